"""Rollout queue: runs that loops ask for, leased to workers of environments.

The queue is in memory: the loop asks again after the platform was restarted, and what is durable
is in the store. The end of a run is one event, its description with rewards or error, named
`RUN.rollout`. So a run has one end, whoever tells it, and a loop finds it as it finds its own runs.
A run that had begun and has no end, because its worker or the platform died, ends as failed by the
infrastructure. Its calls stay on record with it, and the loop tries again under another id. While
there are runs, a task looks for leases that have expired, and for runs that nobody wants any more.
Called by routes/loops.py.
"""

import asyncio
import logging
import time
from collections import Counter, OrderedDict
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic import Field

from cray_agents.errors import BadInput, CrayError, NotFound
from cray_agents.records import (
    Event,
    Int64,
    Reward,
    Run,
    RunError,
    StopReason,
    StrictRecord,
    Task,
    Trajectory,
    new_id,
)
from cray_agents.runtime.background import BackgroundTasks, ChangeNotifier
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.feedback import MAX_REWARDS

WANTED = 120.0  # seconds after a loop last asked for a run in which it may begin
SEEN = 60.0  # seconds after its last request in which a worker counts as present
POLL_INTERVAL = 1.0  # seconds between looks at leases
REMEMBERED = 10_000  # ends, for results that are posted again
SOURCE = "environment"  # of the rewards

RolloutState = Literal["queued", "running", "done"]

log = logging.getLogger(__name__)


class RolloutSpec(StrictRecord):
    """A run that a loop asks for. `seconds`: it may take; `sampling`: fields of model calls."""

    run_id: str
    environment: str
    agent: str
    model: str
    task: Task
    loop: str
    iteration: Int64 | None = None
    attempt: Int64 = 0
    sampling: dict[str, Any] = Field(default_factory=dict)
    seconds: float = Field(600.0, gt=0, le=7 * 86400)


class RolloutError(StrictRecord):
    """The failure of an environment."""

    type: str = Field(max_length=200)
    message: str = Field(max_length=10_000)


class GivenReward(StrictRecord):
    """A reward of an environment; `turn` counts model calls from 0."""

    name: str = Field(min_length=1, max_length=200)
    value: float
    turn: Int64 | None = None


class RolloutResult(StrictRecord):
    """The end of a run as its worker tells it: rewards, or an error."""

    lease: str
    rewards: list[GivenReward] = Field(default_factory=list, max_length=MAX_REWARDS)
    output: str | None = None
    stop_reason: StopReason = StopReason.completed
    tags: list[str] = Field(default_factory=list, max_length=32)
    error: RolloutError | None = None


@dataclass
class _Queued:
    """A run in the queue. Times are of the monotonic clock."""

    spec: RolloutSpec
    owner: str
    wanted_until: float
    lease: str = ""
    worker: str = ""
    expires: float = 0.0
    begun: float = 0.0
    ended: asyncio.Event = field(default_factory=asyncio.Event)
    ending: bool = False


class RolloutQueue:
    """The runs that wait for a worker, and those that have one. For use on one event loop."""

    def __init__(self, store: Store) -> None:
        self._store = store
        self._queue: OrderedDict[str, _Queued] = OrderedDict()  # by run, oldest first
        self._workers: dict[tuple[str, str], float] = {}  # (environment, worker) -> last seen
        # by run: the lease that told its end, if one did
        self._ended: OrderedDict[str, str] = OrderedDict()
        self._changed = ChangeNotifier()
        self._tasks = BackgroundTasks()
        self._watching: asyncio.Task[None] | None = None

    async def submit(self, spec: RolloutSpec, owner: str) -> RolloutState:
        """Ask for a run, also again. A run that is on record is done.

        A run with calls and no end was cut off, and is recorded as that.
        """
        known = self._queue.get(spec.run_id)
        if known is None:
            facts = await asyncio.to_thread(self._facts, spec.run_id)
            if facts is not None and facts.loop is not None:
                return "done"
            if facts is not None:
                cut = _Queued(spec, owner, 0.0, begun=time.time())
                await self._record_failure(
                    cut, "RunCutOff", "the platform was restarted while the run went on"
                )
                return "done"
            new = _Queued(spec, owner, 0.0)
            known = self._queue.setdefault(spec.run_id, new)
            if known is new:
                self._changed.notify()
        known.wanted_until = time.monotonic() + WANTED
        if self._watching is None or self._watching.done():
            self._watching = self._tasks.keep("leases of rollouts", self._watch)
        return "running" if known.lease else "queued"

    def _facts(self, run_id: str) -> Any:
        self._store.refresh()
        return self._store.index.run(run_id)

    async def wait(self, run_id: str, seconds: float) -> tuple[RolloutState, int]:
        """Wait for the end of a run; return its state, and its environment's workers.

        Raises NotFound for a run that nobody asked for since the platform began.
        """
        deadline = time.monotonic() + seconds
        while True:
            queued = self._queue.get(run_id)
            if queued is None:
                if run_id in self._ended:
                    return "done", 0
                raise NotFound(f"run {run_id!r} is not in the queue: ask for it", param="run_id")
            now = time.monotonic()
            queued.wanted_until = now + WANTED
            if now >= deadline:
                count = self.workers().get(queued.spec.environment, 0)
                return ("running" if queued.lease else "queued"), count
            with suppress(TimeoutError):
                await asyncio.wait_for(queued.ended.wait(), deadline - now)

    async def lease(
        self, environment: str, worker: str, seconds: float, wait: float
    ) -> dict[str, Any] | None:
        """Lease the oldest run of an environment that is still wanted; None if none came."""
        deadline = time.monotonic() + wait
        while True:
            now = time.monotonic()
            self._workers[environment, worker] = now
            self._drop_unwanted(now)
            for queued in self._queue.values():
                if queued.lease or queued.spec.environment != environment:
                    continue
                queued.lease, queued.worker = new_id("lease"), worker
                queued.expires, queued.begun = now + seconds, time.time()
                return {**queued.spec.model_dump(mode="json"), "lease": queued.lease}
            if now >= deadline:
                return None
            with suppress(TimeoutError):
                await asyncio.wait_for(self._changed.wait(), deadline - now)

    def renew(self, run_id: str, lease: str, seconds: float) -> None:
        """Move the deadline of a lease on. Raises BadInput `lease_lost`."""
        queued = self._leased(run_id, lease)
        queued.expires = time.monotonic() + seconds
        self._workers[queued.spec.environment, queued.worker] = time.monotonic()

    async def finish(self, run_id: str, result: RolloutResult) -> None:
        """Record the end of a run; the same end again changes nothing.

        Raises BadInput, `lease_lost` for a run of another.
        """
        if self._ended.get(run_id) == result.lease:
            return
        queued = self._leased(run_id, result.lease)
        error = result.error
        if error is not None:
            await self._record_failure(queued, error.type, error.message)
            self._ended[run_id] = result.lease
            return
        if not result.rewards:
            raise BadInput("rewards is empty: give a reward or an error", param="rewards")
        rewards = [Reward(**given.model_dump(), source=SOURCE) for given in result.rewards]
        await self._record(
            queued,
            output=result.output,
            stop_reason=result.stop_reason,
            rewards=rewards,
            tags=result.tags,
        )
        self._ended[run_id] = result.lease

    def workers(self) -> Counter[str]:
        """Count the workers that asked for runs of late, by environment."""
        now = time.monotonic()
        self._workers = {key: seen for key, seen in self._workers.items() if now - seen < SEEN}
        return Counter(environment for environment, _ in self._workers)

    def overview(self) -> list[dict[str, Any]]:
        """Return queued and running runs and workers, by environment."""
        queued = Counter(q.spec.environment for q in self._queue.values() if not q.lease)
        running = Counter(q.spec.environment for q in self._queue.values() if q.lease)
        workers = self.workers()
        return [
            {"environment": name, "queued": queued[name], "running": running[name],
             "workers": workers[name]}
            for name in sorted({*queued, *running, *workers})
        ]  # fmt: skip

    def _leased(self, run_id: str, lease: str) -> _Queued:
        queued = self._queue.get(run_id)
        lost = queued is None or queued.lease != lease or queued.ending
        if queued is None or lost or queued.expires < time.monotonic():
            raise BadInput(
                f"run {run_id!r} is not this worker's any more: its lease has ended, and nothing "
                "of it is recorded",
                param="lease",
                code="lease_lost",
            )
        return queued

    async def close(self) -> None:
        """Stop looking at leases."""
        await self._tasks.close()

    async def _watch(self) -> None:
        """End the runs whose worker is silent, and drop those that nobody wants, until none is."""
        while self._queue:
            now = time.monotonic()
            self._drop_unwanted(now)
            for queued in list(self._queue.values()):
                if not queued.lease or queued.ending or queued.expires >= now:
                    continue
                message = f"worker {queued.worker} did not renew its lease: it died, or is cut off"
                try:
                    await self._record_failure(queued, "WorkerLost", message)
                except (CrayError, OSError) as error:  # as on a full disk: it is tried again
                    log.error("the end of run %s was not recorded: %s", queued.spec.run_id, error)
            await asyncio.sleep(POLL_INTERVAL)
        self._watching = None  # now: who asks before this task is done starts another one

    def _drop_unwanted(self, now: float) -> None:
        """Forget the runs that no worker has and no loop has asked for of late."""
        for run_id, queued in list(self._queue.items()):
            if not queued.lease and queued.wanted_until < now:
                del self._queue[run_id]
                queued.ended.set()  # whoever waits learns that it is not in the queue

    async def _record_failure(self, queued: _Queued, kind: str, message: str) -> None:
        error = RunError(type=kind, message=message, infrastructure=True)
        await self._record(queued, stop_reason=StopReason.error, error=error)

    async def _record(self, queued: _Queued, **end: Any) -> None:
        """Record the end of a run durably, and wake who waits for it."""
        queued.ending = True
        spec, run_id = queued.spec, queued.spec.run_id
        try:
            run = (await asyncio.to_thread(self._begun, spec, queued.begun)).model_copy(
                update={
                    "agent": spec.agent,
                    "model": spec.model,
                    "input": spec.task.text,
                    "task": spec.task,
                    "loop": spec.loop,
                    "iteration": spec.iteration,
                    "attempt": spec.attempt,
                    "started": queued.begun,
                    "seconds": max(0.0, time.time() - queued.begun),
                    "owner": queued.owner,
                    **{name: value for name, value in end.items() if value is not None},
                }
            )
            body = run.model_dump(mode="json")
            for turn in body["trajectory"]["turns"]:
                turn["call"] = None
            event = Event(id=f"{run_id}.rollout", run_id=run_id, kind="run", body=body)
            await self._store.append([event], many=True)
        finally:
            queued.ending = False
        self._ended[run_id] = ""  # by no worker
        if len(self._ended) > REMEMBERED:
            self._ended.popitem(last=False)
        self._queue.pop(run_id, None)
        queued.ended.set()

    def _begun(self, spec: RolloutSpec, begun: float) -> Run:
        """Return the run as its calls tell it; without calls, a run without turns."""
        try:
            return self._store.run(spec.run_id)
        except NotFound:
            return Run(
                id=spec.run_id,
                agent=spec.agent,
                model=spec.model,
                input=spec.task.text,
                stop_reason=StopReason.completed,
                trajectory=Trajectory(),
                started=begun,
            )
