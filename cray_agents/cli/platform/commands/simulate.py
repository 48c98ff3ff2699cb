"""`simulate`: a day of a cluster that serves and trains, under the controller and static splits.

No cluster is needed. Read next: runtime/scaling/comparison.py.
"""

import time
from typing import Annotated

import typer

from cray_agents.cli.screen import JsonOption, errors, show

COLUMNS = [
    "way",
    "goodput",
    "of_static",
    "utilisation",
    "served",
    "trained",
    "wait_p50",
    "wait_p99",
    "steps_lost",
    "preemptions",
]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(simulate)


def simulate(
    nodes: Annotated[int, typer.Option(help="Of the cluster; a replica takes one.")] = 64,
    trace: Annotated[str, typer.Option(help="bursty, diurnal or failures.")] = "bursty",
    seed: Annotated[int, typer.Option(help="Of the trace.")] = 1,
    hours: Annotated[float, typer.Option(help="That the trace takes.")] = 24.0,
    limit: Annotated[
        float, typer.Option(help="Seconds of waiting after which an answer counts for nothing.")
    ] = 60.0,
    as_json: JsonOption = False,
) -> None:
    """Simulate who gets the nodes, serving or training: goodput, waiting, steps lost."""
    from cray_agents.runtime.scaling.comparison import compare
    from cray_agents.runtime.scaling.traces import make_trace

    begun = time.monotonic()
    rows = compare(make_trace(trace, seed, nodes, hours), limit)
    show(rows, COLUMNS, as_json=as_json)
    errors.print(
        f"{nodes} nodes, {hours:g} hours, seed {seed}: simulated in"
        f" {time.monotonic() - begun:.1f} s. Waits in seconds; goodput, utilisation, served and"
        " trained are shares of all node-hours.",
        soft_wrap=True,
    )
