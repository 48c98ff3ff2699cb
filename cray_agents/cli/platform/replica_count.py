"""Replica count: a task of `up` that lets Slurm replicas come and go with the load.

`--replicas slurm:MIN-MAX`. Once a second it looks at the pool and the queue of requests, and does
what decision.py says: a replica that is needed is submitted as a job, one that is not gives its
place back. Slurm decides who gives way to a job that waits. Called by compose.py.
"""

import asyncio
import logging
import time

from cray_agents.cli.platform.platform_process import ReplicaCount
from cray_agents.config import Config
from cray_agents.errors import BadInput
from cray_agents.runtime.gateway.gateway_shares import GatewayShares
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.scaling.decision import Scaler, ScalingRules, ServingRule
from cray_agents.runtime.scaling.observed import Observed, ServingView

EVERY = 1.0  # seconds between two looks

log = logging.getLogger(__name__)


def replica_rule(config: Config, replicas: ReplicaCount) -> ServingRule | None:
    """Return the rule of `--replicas slurm:MIN-MAX`; None where all replicas stay.

    Raises BadInput for times that do not fit.
    """
    if replicas.least is None:
        return None
    if config.replica_empty_minutes < config.replica_calm_minutes:
        raise BadInput(
            f"replica_empty_minutes = {config.replica_empty_minutes:g} is less than"
            f" replica_calm_minutes = {config.replica_calm_minutes:g}: give at least as many",
            param="replica_empty_minutes",
        )
    return ServingRule(
        name="replicas",
        slots=config.max_num_seqs,
        least=replicas.least,
        most=replicas.jobs,
        calm=60 * config.replica_calm_minutes,
        empty=60 * config.replica_empty_minutes,
    )


async def keep_replica_count(
    pool: Pool,
    admission: Admission,
    shares: GatewayShares,
    rule: ServingRule,
    *,
    every: float = EVERY,
) -> None:
    """Start and end replicas as a rule says, until cancelled. `shares`: other gateways' load."""
    scaler = Scaler(ScalingRules((rule,), preempts=False))
    load = _Load(pool, admission, shares, rule.name)
    while True:
        await asyncio.sleep(every)
        for action in scaler.decide(load.observe()):
            change = pool.call_back if action.kind == "start" else pool.give_back
            changed = sum(change() for _ in range(action.count))
            if changed:
                log.info("%d replicas %s: %s", changed, action.kind, action.why)


class _Load:
    """The requests and replicas of a platform, as the controller sees them."""

    def __init__(self, pool: Pool, admission: Admission, shares: GatewayShares, name: str) -> None:
        self._pool, self._admission, self._shares, self._name = pool, admission, shares, name
        self._busy, self._time = 0.0, time.monotonic()

    def observe(self) -> Observed:
        """Return the present state."""
        replicas, now = self._pool.status(), time.monotonic()
        busy = sum(replica["busy_seconds"] for replica in replicas)
        # requests that came and went between two looks show in the seconds that replicas were busy
        at_once = (busy - self._busy) / max(1e-3, now - self._time)
        self._busy, self._time = busy, now
        serving = sum(replica["state"] == "serving" for replica in replicas)
        waiting = (self._admission.waiting(batch) for batch in (False, True))
        inside = (self._admission.inside(batch) for batch in (False, True))
        seconds = self._admission.mean_seconds
        view = ServingView(
            name=self._name,
            waiting=sum(waiting),
            in_flight=sum(inside) + self._shares.demand,
            arrivals=at_once / seconds if seconds else 0.0,
            answer_seconds=seconds,
            serving=serving,
            starting=len(replicas) - serving - self._pool.away,
        )
        return Observed(
            time=now,
            hour=0.0,
            nodes=len(replicas),
            free=self._pool.away,  # Slurm knows which nodes there are
            leaving=0,
            serving=[view],
            running=[],
            queued=[],
        )
