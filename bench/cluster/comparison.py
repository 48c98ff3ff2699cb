"""Comparison: one trace under the controller, with parts of it left out, and under a static split.

bench/simulation.py prints it. The static split is the best one for this very trace, found
afterwards; no site knows it in advance.
"""

from collections.abc import Mapping
from typing import Any

from bench.cluster.controller import Cluster
from bench.cluster.simulation import Controller, Simulation
from bench.cluster.static_split import StaticSplit, best_split
from bench.cluster.traces import Trace
from cray_agents.runtime.scaling.decision import ScalingRules, ServingRule

JUST_IN_TIME, NO_SLEEP, NO_PREEMPTION = "just in time", "without sleep", "without preemption"


def rules_for(trace: Trace, *, sleeps: bool = True, preempts: bool = True) -> list[ScalingRules]:
    """Return the rules of a simulated cluster: two of a hundred nodes spare for each class."""
    nodes = trace.nodes
    serving = [
        ServingRule(
            name=each.name,
            slots=each.slots,
            spare=max(1, nodes // 50),
            warm=nodes // 2 if sleeps else 0,
            cold=nodes // 4 if sleeps else 0,
        )
        for each in trace.serving
    ]
    return [ScalingRules(rule, preempts=preempts) for rule in serving]


def compare(trace: Trace, limit: float) -> list[dict[str, Any]]:
    """Play a trace under each way; return a row of figures for each.

    `limit`: seconds of waiting after which an answer does not count, and which 99 % of the requests
    keep under the static split. Raises BadInput if no split does.
    """
    split = best_split(trace, limit)
    controllers: Mapping[str, Controller] = {
        JUST_IN_TIME: Cluster(rules_for(trace)),
        NO_SLEEP: Cluster(rules_for(trace, sleeps=False)),
        NO_PREEMPTION: Cluster(rules_for(trace, preempts=False)),
        name_split(split): StaticSplit(split),
    }
    rows: list[dict[str, Any]] = []
    for way, controller in controllers.items():
        result = Simulation(trace, controller, limit).run()
        rows.append(
            {
                "way": way,
                "goodput": result.goodput,
                "utilisation": result.utilisation,
                "served": result.answered_work / result.node_seconds,
                "trained": result.trained_work / result.node_seconds,
                "wait_p50": result.wait(0.5),
                "wait_p99": result.wait(0.99),
                "steps_lost": round(result.lost_steps),
                "preemptions": result.preemptions,
                "starts": result.starts,
                "wakes": result.wakes,
                "unanswered": result.unanswered,
            }
        )
    for row in rows:
        row["of_static"] = row["goodput"] / rows[-1]["goodput"]
    return rows


def name_split(split: Mapping[str, int]) -> str:
    """Name a static split: "static 33 + 7"."""
    return f"static {' + '.join(map(str, split.values()))}"
