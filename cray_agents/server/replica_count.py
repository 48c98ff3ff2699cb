"""Replica count: a task of `up` that lets Slurm replicas come and go with the load.

`--replicas slurm:MIN-MAX`. Once a second it looks at the pool and the queue of requests, and does
what decision.py says: a replica that is needed is submitted as a job, one that is not gives its
place back. Where Slurm has no free place for a needed replica, training jobs are preempted
(cluster_view.py). They are queued again at once, and Slurm starts them when a place is free. Called
by compose.py.
"""

import asyncio
import logging
import os
import time
from collections import Counter
from collections.abc import Callable, Sequence, Set
from contextlib import suppress
from dataclasses import replace
from datetime import datetime
from functools import partial

from cray_agents.config import Config
from cray_agents.errors import BadInput, ConfigError, CrayError
from cray_agents.ports import Command
from cray_agents.processes import SAFE_IMPORTS
from cray_agents.runtime.accounting.ledger import HeldDevices
from cray_agents.runtime.gateway.model_calls.admission import Admission, GatewayShares
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.serving_plan import ServingDevice
from cray_agents.runtime.pool.vllm_process import has_gpu_build
from cray_agents.runtime.registry import foreign_model
from cray_agents.runtime.scaling.decision import (
    Observed,
    Scaler,
    ScalingAction,
    ScalingRules,
    ServingRule,
    ServingView,
)
from cray_agents.runtime.scheduler.gpu_placement import GpuPlacement, gpu_type, gpus_per_server
from cray_agents.server.cluster_view import ClusterState, ClusterView
from cray_agents.server.platform_process import ReplicaCount
from cray_agents.trainers.planning.cluster_resources import gpu_of_host, this_host
from cray_agents.trainers.planning.step_time import identify

EVERY = 1.0  # seconds between two looks
LOOK = 5.0  # seconds between two looks at the cluster, while replicas are missing

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
        nodes=config.replica_nodes,
        least=replicas.least,
        most=replicas.jobs,
        calm=60 * config.replica_calm_minutes,
        empty=60 * config.replica_empty_minutes,
        warm=config.replica_warm,
    )


def scaling_rules(config: Config, rule: ServingRule) -> ScalingRules:
    """Return the rules of a platform: of its replicas, and of the training that gives way."""
    return ScalingRules(
        rule,
        training_nodes=config.preempt_keep_nodes,
        least_run=60 * config.preempt_after_minutes,
        quiet_hours=tuple(config.quiet_hours),
        preempts=config.preempt_training,
    )


async def keep_replica_count(
    pool: Pool,
    admission: Admission,
    shares: GatewayShares,
    rules: ScalingRules,
    cluster: ClusterView | None = None,
    *,
    every: float = EVERY,
    look: float = LOOK,
) -> None:
    """Start and end replicas as the rules say, until cancelled. `shares`: other gateways' load.

    `cluster`: whose training gives way; None: nobody does.
    """
    controller = ReplicaController(
        pool, PlatformLoad(pool, admission, shares, rules), rules, cluster, look
    )
    try:
        while True:
            await asyncio.sleep(every)
            await controller.step()
    finally:
        if cluster is not None:
            cluster.close()


class ReplicaController:
    """The controller of a platform's replicas. Call `step` once a period."""

    def __init__(
        self,
        pool: Pool,
        load: "PlatformLoad",
        rules: ScalingRules,
        cluster: ClusterView | None = None,
        look: float = LOOK,
    ) -> None:
        if cluster is None:
            rules = replace(rules, preempts=False)
        self.scaler = Scaler(rules)
        self._pool, self._load, self._look = pool, load, look
        self._cluster = cluster if rules.preempts else None
        self._state: ClusterState | None = None
        self._next_look = float("-inf")
        self._submitted = 0  # replicas without a place that were called already

    async def step(self) -> list[ScalingAction]:
        """Look, decide, and do it; return what was decided."""
        seen = self._load.observe()
        cluster = self._cluster
        if cluster is not None:
            await self._see_cluster(cluster, seen)
        actions = self._postpone(self.scaler.decide(seen), seen)
        jobs = {job.name: job for job in seen.running}
        missing = sum(action.count for action in actions if action.kind in ("start", "wake"))
        missing += self.scaler.short
        # those that find no free place are submitted too: a place that is left is theirs then
        self._change("start", missing - self._submitted, actions)
        for action in actions:
            if action.kind in ("end", "sleep"):
                self._change(action.kind, action.count, actions)
            elif action.kind == "preempt" and cluster is not None:
                why = f"{action.why} ({self._load.words})"
                await asyncio.to_thread(cluster.preempt, jobs[action.name], why)
        return actions

    def _postpone(self, actions: list[ScalingAction], seen: Observed) -> list[ScalingAction]:
        """Leave out preemptions for replicas whose jobs are not in Slurm's queue yet.

        Else a node that is left may be given to the next training job, or to the same one.
        """
        if self._state is None:
            return actions
        nodes = {job.name: job.nodes for job in seen.running}
        room = self._state.waiting * self.scaler.rules.serving.nodes - seen.leaving
        kept = []
        for action in actions:
            if action.kind == "preempt":
                if room <= 0:
                    self._next_look = seen.time
                    continue
                room -= nodes[action.name]
            kept.append(action)
        return kept

    def _change(self, kind: str, count: int, actions: list[ScalingAction]) -> None:
        if kind == "start":
            change = self._pool.call_back
        else:
            change = partial(self._pool.give_back, sleep=kind == "sleep")
        changed = sum(change() for _ in range(count))
        if changed:
            why = next((action.why for action in actions if action.kind == kind), self._load.words)
            log.info("%d replicas %s: %s", changed, kind, why)

    async def _see_cluster(self, cluster: ClusterView, seen: Observed) -> None:
        """Add the cluster to what is seen; jobs to preempt only if it was looked at just now.

        While all needed replicas are there, nobody asks Slurm.
        """
        view = seen.serving
        coming, view.starting = view.starting, view.starting - self._load.waiting
        state, fresh = self._state, seen.time >= self._next_look or self._state is None
        if not self.scaler.grows(seen):
            state = None
        elif fresh:
            try:
                state = await asyncio.to_thread(cluster.look, seen.time, self._load.asleep)
            except CrayError as error:
                log.warning("the cluster is not seen: %s", error)
                state = None
            self._next_look = seen.time + self._look
        self._state, self._submitted = state, 0
        if state is None:
            view.starting = coming
            return
        # a job that runs is no replica of the pool before its supervisor has been found
        begun = state.replicas - view.serving - view.draining - view.starting - sum(view.asleep)
        begun = max(0, min(begun, self._load.waiting))
        view.starting += begun
        self._submitted = self._load.waiting - begun
        # a sleeping replica's job holds its place, which is free for itself alone
        view.wakeable = self._load.wakeable(state.used)
        each = self.scaler.rules.serving.nodes
        seen.nodes, seen.free = state.nodes, state.free + sum(view.wakeable) * each
        seen.leaving = state.leaving + view.draining * self.scaler.rules.serving.nodes
        seen.running = state.running if fresh else []


class PlatformLoad:
    """The requests and replicas of a platform, as the controller sees them.

    `waiting`: replicas whose job waits for its place, as last observed. `asleep`: sleeping ones by
    node. `words`: the load.
    """

    def __init__(
        self,
        pool: Pool,
        admission: Admission,
        shares: GatewayShares,
        rules: ScalingRules,
        clock: Callable[[], float] = time.monotonic,
    ) -> None:
        self._pool, self._admission, self._shares, self._rules = pool, admission, shares, rules
        self._clock = clock
        self._busy, self._time = 0.0, time.monotonic()
        self.waiting, self.words = 0, ""
        self._levels: list[tuple[str, int]] = []  # of sleeping replicas: node, level

    @property
    def asleep(self) -> Counter[str]:
        """The number of sleeping replicas by node."""
        return Counter(node for node, _ in self._levels)

    def wakeable(self, used: Set[str]) -> tuple[int, int]:
        """Return how many replicas sleep at level 1 and 2 on nodes that are not `used`."""
        levels = [level for node, level in self._levels if node not in used]
        return levels.count(1), levels.count(2)

    def observe(self) -> Observed:
        """Return the present state, as if every replica that is away had a place."""
        rule, replicas, now = self._rules.serving, self._pool.status(), time.monotonic()
        busy = sum(replica["busy_seconds"] for replica in replicas)
        # requests that came and went between two looks show in the seconds that replicas were busy
        at_once = (busy - self._busy) / max(1e-3, now - self._time)
        # a process that stood still between two clocks is no load
        at_once = min(at_once, len(replicas) - self._pool.away)
        self._busy, self._time = busy, now
        serving = sum(replica["state"] == "serving" for replica in replicas)
        self.waiting = sum(replica["state"] == "waiting" for replica in replicas)
        waiting = (self._admission.waiting(batch) for batch in (False, True))
        inside = (self._admission.inside(batch) for batch in (False, True))
        seconds = self._admission.mean_seconds
        self._levels = [(one["host"], one["asleep"]) for one in replicas if one["asleep"]]
        asleep = self.wakeable(frozenset())
        view = ServingView(
            waiting=sum(waiting),
            in_flight=sum(inside) + self._shares.demand,
            arrivals=at_once / seconds if seconds else 0.0,
            answer_seconds=seconds,
            serving=serving,
            starting=len(replicas) - serving - self._pool.away,
            draining=sum(
                one["state"] == "away" and bool(one["host"]) and not one["asleep"]
                for one in replicas
            ),
            asleep=asleep,
            wakeable=asleep,
        )
        self.words = (
            f"{view.waiting} requests wait, {view.in_flight} are answered,"
            f" {serving} of {len(replicas)} replicas serve"
        )
        clock, each = datetime.now(), rule.nodes
        return Observed(
            time=self._clock(),
            hour=clock.hour + clock.minute / 60,
            nodes=len(replicas) * each + self._rules.training_nodes,
            free=self._pool.away * each,  # Slurm knows which nodes there are
            leaving=0,
            serving=view,
            running=[],
        )


# ---- the GPUs, cores and memory that each replica of `up` has
def serving_device(config: Config, replicas: ReplicaCount, *, gpu: bool) -> ServingDevice:
    """Describe what each replica has: of this host, or in a Slurm job on GPUs that are named."""
    if gpu:
        named = (config.job.gpu_type or config.train_gpu or "").replace("_", " ")
        known = identify(named) if replicas.jobs else None
        kind, gib = ("", 0.0) if known is None else (known.name, known.gib)
        if replicas.here:
            with suppress(ConfigError):
                kind, gib = gpu_of_host()
        return ServingDevice(gib, gpus_per_server(config.engine_args), kind)
    if replicas.jobs:
        command = replica_command(config)
        return ServingDevice(cores=command.cpus_per_rank * command.ranks // command.nodes)
    host, share = this_host(), replicas.here
    if not share:  # nothing is served, and any model fits
        return ServingDevice()
    cores = max(1, host.cores // share)
    return ServingDevice(host.gib / share, cores=cores, bfloat16=host.bfloat16)


def replica_command(config: Config) -> Command:
    """Return what all replicas' jobs ask Slurm for. Raises BadInput for nodes that do not fit."""
    gpus = gpus_per_server(config.engine_args) if has_gpu_build() else 0
    nodes = config.replica_nodes
    ranks = gpus or nodes
    if ranks % nodes:
        raise BadInput(
            f"a replica of {gpus} GPUs (engine_args) does not divide over replica_nodes = {nodes}",
            param="replica_nodes",
        )
    cores = config.replica_cpus or (4 * gpus or 2 * nodes)
    trusted = os.pathsep.join(map(str, foreign_model.allowed_directories()))
    return Command(
        name="replica",
        kind="replica",
        argv=[],
        directory="",
        log="",
        environment=SAFE_IMPORTS | ({foreign_model.VARIABLE: trusted} if trusted else {}),
        nodes=nodes,
        ranks=ranks,
        cpus_per_rank=-(-cores // ranks),
        gpus=gpus > 0,
    )


def devices_of_replicas(
    config: Config, placement: GpuPlacement, jobs: int, threads: Sequence[int]
) -> list[HeldDevices]:
    """Return what each replica holds, for the ledger: those of this host first, then Slurm jobs.

    A job's GPUs are numbered within it. A server on GPUs of this host has no cores of its own. One
    on its CPU has as many as it computes with: `threads`, of each.
    """
    if has_gpu_build():
        kind = config.job.gpu_type or gpu_type()
        own = [HeldDevices(gpus, kind) for gpus in placement.replicas]
    else:
        own = [HeldDevices(cores=each) for each in threads]
    if not jobs:
        return own
    command = replica_command(config)
    numbers = tuple(str(number) for number in range(command.ranks if command.gpus else 0))
    cores = command.ranks * command.cpus_per_rank
    return [*own, *[HeldDevices(numbers, config.job.gpu_type or "", cores)] * jobs]
