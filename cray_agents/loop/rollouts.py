"""Rollouts: runs of an agent on many tasks, scored, stored once each, never run twice.

A run's id is derived from its purpose (loop, scope, task, attempt), so a restarted loop finds the
runs of a killed one. A run that the infrastructure failed stays on record, and is tried again under
the same id with `-retry<n>`: RETRIES times, and as often again whenever it is requested again,
unless its set is final. Model calls go through version_gate.py. Called by collector.py (training
runs), evaluator.py (held-out runs) and evaluation.py.

A set of runs may close early (`close_at` below 1), so that slow tools do not hold it up. It closes
when all runs have begun, that share of them has ended, and each of the rest has taken more than
STRAGGLES times the median of the ended ones; time at the gate does not count. The rest is not lost:
each run is stored when it ends, in the background.

A judge of whole groups (llm_judge.py) scores the attempts at a task when all of them have ended.
Until then they are on record as runs that must be scored again, so a kill in between loses nothing.
"""

import asyncio
import logging
import math
import random
import statistics
import time
from collections import defaultdict
from collections.abc import Awaitable, Callable, Iterable, Sequence, Set
from contextlib import nullcontext
from dataclasses import dataclass, field
from typing import Any

from cray_agents.agent.agent import Agent
from cray_agents.agent.environment import WorkerEnvironment
from cray_agents.errors import BadInput, EngineError, EngineUnavailable, NotFound, RewardError
from cray_agents.loop.outside_model import OutsideModel, PricedEngine
from cray_agents.loop.version_gate import GatedEngine, VersionGate
from cray_agents.platform.client import Platform
from cray_agents.promotion.figures import figures_of
from cray_agents.records import (
    REWARD_REFUSED,
    UNSCORED,
    ModelVersion,
    Prompt,
    Run,
    RunError,
    Split,
    Task,
    digest,
)
from cray_agents.rewards.llm_judge import GroupJudge, bind_engine, score_group
from cray_agents.rewards.reward import (
    RewardFunction,
    name_of,
    needs_scoring,
    prepare_rescoring,
    score_run,
)

RETRIES = 2  # of a run that the infrastructure failed, or of a reward that failed
BACKOFF = 0.5  # seconds before a run is tried again; before the next time, four times as many
STRAGGLES = 3.0
Evaluated = ModelVersion | OutsideModel  # what answers; the latter in evaluations alone


@dataclass(frozen=True)
class RolloutRequest:
    """A run that should exist. `scope` tells apart the purposes that the same task is run for."""

    task: Task
    scope: str
    attempt: int = 0
    iteration: int | None = None


@dataclass(eq=False)
class ActiveRollout:
    """A run in progress. It keeps a concurrency slot until it ends or is left behind."""

    run_id: str
    task: asyncio.Task[Run]
    places: asyncio.Semaphore
    begun: float | None = None
    engine: GatedEngine | None = None
    left_behind: bool = False

    @property
    def seconds(self) -> float:
        """The time it has taken so far, or took, without its waits at the gate."""
        waited = self.engine.gate_wait_seconds if self.engine is not None else 0.0
        if self.task.done():
            return self.task.result().seconds - waited
        return time.monotonic() - (self.begun or 0.0) - waited

    def attempt(self, number: int) -> str:
        """The run id of a try; the first one is 0."""
        return f"{self.run_id}-retry{number}" if number else self.run_id

    def leave_behind(self) -> None:
        """Free the concurrency slot: what is left to do is not the engine's, as a tool's work."""
        if self.begun is not None and not self.left_behind and not self.task.done():
            self.left_behind = True
            self.places.release()


@dataclass(eq=False)
class AttemptGroup:
    """The attempts at one task, `size` of them, which are judged together."""

    size: int = 0
    runs: list[Run] = field(default_factory=list)
    judged: asyncio.Future[dict[str, Run]] = field(default_factory=asyncio.Future)

    async def add(self, run: Run, judge: Callable[[list[Run]], Awaitable[list[Run]]]) -> Run:
        """Add a run; return it as it is when all have come, and the last one had them judged."""
        self.runs.append(run)
        if len(self.runs) == self.size:
            try:
                self.judged.set_result({one.id: one for one in await judge(self.runs)})
            except asyncio.CancelledError:
                self.judged.cancel()
                raise
            except BaseException as error:
                self.judged.set_exception(error)
                raise
        return (await asyncio.shield(self.judged))[run.id]


@dataclass
class Rollouts:
    """The runs of one loop, `concurrency` at a time, in the order of their requests.

    `seeded`: a run's sampling seed follows from its id, so that a repeated run is the same. `tags`
    are those of all the runs.
    """

    platform: Platform
    gate: VersionGate
    agent: Agent
    loop: str
    rewards: Sequence[RewardFunction]
    concurrency: int
    seeded: bool = True
    tags: Sequence[str] = ()
    going: dict[str, ActiveRollout] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self._agent = self.agent.through(self.platform.engine())
        self._places = asyncio.Semaphore(self.concurrency)
        self._left: list[ActiveRollout] = []  # stragglers that go on in the background
        self._begun = set[str]()
        bound = bind_engine(self.rewards, self.platform.engine())
        self._judges = [one for one in bound if isinstance(one, GroupJudge)]
        self._rewards = [one for one in bound if not isinstance(one, GroupJudge)]

    async def stored(
        self,
        split: Split | None,
        *,
        iteration: int | None = None,
        version: Evaluated | None = None,
        tag: str | None = None,
    ) -> list[Run]:
        """Runs of this loop that are on record."""
        model = version.id if version else None
        where: dict[str, Any] = {"iteration": iteration, "split": split, "model": model, "tag": tag}
        return [run async for run in self.platform.runs(loop=self.loop, **where)]

    def at(
        self, version: Evaluated, temperature: float | None, prompt: Prompt | None = None
    ) -> Agent:
        """The agent that asks a version, with the prompt of that or another one."""
        if isinstance(version, OutsideModel):
            agent = self._agent.override(model=version.model)
        else:
            agent = self._agent.at(version, prompt)
        return agent.override(temperature=temperature, recorder=None)

    async def run(
        self,
        requests: Sequence[RolloutRequest],
        version: Evaluated,
        temperature: float | None,
        on_done: Callable[[int], None],
        *,
        close_at: float = 1.0,
        paired: bool = False,
        final: bool = False,
        prompt: Prompt | None = None,
    ) -> list[Run]:
        """Return the requested runs in order: recorded ones, and the rest executed now.

        on_done: called with the number of runs that have ended.
        close_at: below 1, runs that have not ended when the set closes are left out.
        paired: a task and attempt has the same sampling seed under every version.
        final: a recorded run that the infrastructure failed stays as it is.
        prompt: that of the agent, in place of the version's.

        Raises StoreError and EngineUnavailable from recording. Raises EngineUnavailable where the
        infrastructure failed all the runs, and no recorded run of their iteration or version.
        """
        self._raise_lost()
        if not requests:
            return []
        agent = self.at(version, temperature, prompt)
        tag = agent.tags[-1] if prompt is not None else None
        known = await self._known(requests, version, tag)
        groups: dict[tuple[str, str], AttemptGroup] = {}
        for item in requests if self._judges else ():
            groups.setdefault((item.scope, item.task.id), AttemptGroup()).size += 1
        started = [
            self._start(
                item,
                agent,
                version,
                known,
                paired,
                final,
                groups.get((item.scope, item.task.id)),
            )
            for item in requests
        ]
        try:
            await self._until_closed(started, on_done, close_at)
        except BaseException:
            await cancel(started)
            raise
        self._left += [each for each in started if not each.task.done()]
        for each in started:
            each.leave_behind()
        runs = [each.task.result() for each in started if each.task.done()]
        check_some_went_well(runs, known.values())
        return runs

    def resume(
        self,
        requests: Sequence[RolloutRequest],
        version: ModelVersion,
        temperature: float,
        known: Set[str],
    ) -> None:
        """Start runs in the background that a kill had cut off. Nobody waits for them."""
        agent = self.at(version, temperature)
        for item in requests:
            if (name := self.name(item)) not in known and name not in self._begun:
                self._left.append(self._start(item, agent, version, {}))

    async def stop(self) -> None:
        """Cancel the runs in progress, as if they had never begun."""
        await cancel(list(self.going.values()))

    async def are_scored(self, requests: Sequence[RolloutRequest], version: Evaluated) -> bool:
        """Tell whether all these runs are on record with a reward."""
        known = await self._known(requests, version) if requests else {}
        scored = {
            name.partition("-retry")[0] for name, run in known.items() if run.reward is not None
        }
        return all(self.name(item) in scored for item in requests)

    def name(self, item: RolloutRequest) -> str:
        """The id of a run."""
        return "run_" + digest([self.loop, item.scope, item.task.id, item.attempt], 24)

    def _seed(self, item: RolloutRequest, paired: bool) -> int | None:
        if not (self.seeded or paired):
            return None
        made_of = [item.task.id, item.attempt] if paired else [self.name(item)]
        return int(digest(made_of, 7), 16)

    def _raise_lost(self) -> None:
        """Raise the error of a background run, such as a StoreError."""
        for each in self._left:
            if each.task.done() and not each.task.cancelled():
                each.task.result()
        self._left = [each for each in self._left if not each.task.done()]

    async def _known(
        self, requests: Sequence[RolloutRequest], version: Evaluated, tag: str | None = None
    ) -> dict[str, Run]:
        first, splits = requests[0], {item.task.split for item in requests}
        of = None if first.iteration is not None else version
        split = first.task.split if len(splits) == 1 else None
        runs = await self.stored(split, iteration=first.iteration, version=of, tag=tag)
        return {run.id: run for run in runs}

    def _start(
        self,
        item: RolloutRequest,
        agent: Agent,
        version: Evaluated,
        known: dict[str, Run],
        paired: bool = False,
        final: bool = False,
        group: AttemptGroup | None = None,
    ) -> ActiveRollout:
        run_id = self.name(item)
        if run_id in self.going:
            return self.going[run_id]

        async def one() -> Run:
            try:
                await self._places.acquire()
                going.begun = time.monotonic()
                try:
                    run = await self._one(agent, version, item, going, known, paired, final)
                finally:
                    if not going.left_behind:
                        self._places.release()
                return run if group is None else await group.add(run, self._judged)
            finally:
                del self.going[run_id]

        self._begun.add(run_id)
        going = self.going[run_id] = ActiveRollout(run_id, asyncio.create_task(one()), self._places)
        return going

    async def _until_closed(
        self, started: Sequence[ActiveRollout], on_done: Callable[[int], None], close_at: float
    ) -> None:
        """Wait until all have ended, or the set closes. Raises the error of a run."""
        ended: asyncio.Queue[asyncio.Task[Run]] = asyncio.Queue()
        for going in started:
            going.task.add_done_callback(ended.put_nowait)
        finished = 0
        while finished < len(started):
            left = patience(started, close_at) if close_at < 1 else None
            if left is not None and left <= 0:
                return
            try:
                async with asyncio.timeout(left):
                    task = await ended.get()
            except TimeoutError:
                continue
            task.result()
            finished += 1
            on_done(finished)

    async def _one(
        self,
        agent: Agent,
        version: Evaluated,
        item: RolloutRequest,
        going: ActiveRollout,
        known: dict[str, Run],
        paired: bool,
        final: bool,
    ) -> Run:
        """Carry out and score a run. A try that the infrastructure failed is kept and repeated."""
        tried: list[Run] = []
        while (recorded := known.get(going.attempt(len(tried)))) is not None:
            tried.append(recorded)
        if tried and needs_scoring(tried[-1]):
            whole = await self.platform.run(tried[-1].id)  # with its tokens
            whole = prepare_rescoring(whole, agent.output_type)
            return await self._scored(whole, going, again=True)
        if tried and (final or not failed_by_infrastructure(tried[-1])):
            return tried[-1]
        seed = self._seed(item, paired)
        waits = [BACKOFF * 4**number for number in range(RETRIES)]
        for wait in waits if tried else [0.0, *waits]:
            await asyncio.sleep(wait)
            run_id = going.attempt(len(tried))
            run = await self._carried_out(agent, version, item, going, run_id, seed)
            tried.append(await self._scored(run, going))
            if not failed_by_infrastructure(tried[-1]):
                break
        return tried[-1]

    async def _carried_out(
        self,
        agent: Agent,
        version: Evaluated,
        item: RolloutRequest,
        going: ActiveRollout,
        run_id: str,
        seed: int | None,
    ) -> Run:
        """Carry out a run here, or let a worker of the agent's environment do it."""
        if isinstance(version, OutsideModel):
            priced = PricedEngine(version)
            run = await agent.through(priced).run(
                item.task, run_id=run_id, loop=self.loop, attempt=item.attempt, seed=seed
            )
            error, turns = run.error, run.trajectory.turns
            if error is not None and error.type == EngineError.__name__ and not turns:
                # its server took no request at all, such as for a setting that it does not know
                error = error.model_copy(update={"infrastructure": True})
            told = {"model": version.id, "cost": priced.cost, "error": error}
            return run.model_copy(update=told)
        if isinstance(agent.environment, WorkerEnvironment):
            spec = worker_spec(agent, agent.environment, item, self.loop, run_id, seed)
            async with self.gate.passing(version, nullcontext()):
                return await run_by_worker(self.platform, spec)
        going.engine = GatedEngine(self.platform.engine(), self.gate, version)
        return await agent.through(going.engine).run(
            item.task,
            run_id=run_id,
            loop=self.loop,
            iteration=item.iteration,
            attempt=item.attempt,
            seed=seed,
        )

    async def _scored(self, run: Run, going: ActiveRollout, *, again: bool = False) -> Run:
        """Score a run and record it, in no slot. A reward that fails is tried again alone.

        `again`: the run is on record already, without its rewards.
        """
        for _ in range(1 + RETRIES):
            done = await score_run(run, self._rewards)
            done = done.model_copy(update={"tags": list(dict.fromkeys([*done.tags, *self.tags]))})
            if not needs_scoring(done):
                break
        if again and (needs_scoring(done) or self._judges):
            return done
        if not failed_by_infrastructure(done):  # such a one may be tried again
            going.leave_behind()
        given = bool(run.rewards) and not again
        if self._judges and not needs_scoring(done) and not failed_by_infrastructure(done):
            waits = RunError(type=UNSCORED, message="not judged yet: its group is judged together")
            await self._record(done.model_copy(update={"error": waits}), given)
            return done
        return await self._record(done, given)

    async def _judged(self, runs: list[Run]) -> list[Run]:
        """Return a group's runs with the rewards that compare them; record those that had none.

        A run that the infrastructure failed, or another reward, is left out. Where the judge
        fails, all of them stay unscored.
        """
        new = {(name_of(judge), judge.__reward_options__.source) for judge in self._judges}
        fit = [r for r in runs if not (failed_by_infrastructure(r) or needs_scoring(r))]
        bare = [r for r in fit if not new <= {(given.name, given.source) for given in r.rewards}]
        if not bare:
            return runs
        for left in reversed(range(1 + RETRIES)):
            try:
                scored = {run.id: run for run in await score_group(fit, self._judges)}
                break
            except RewardError as error:
                if not left:
                    scored = {run.id: run.unscored(str(error)) for run in bare}
        done = await asyncio.gather(*(self._record(scored[run.id]) for run in bare))
        judged = {run.id: run for run in done}
        return [judged.get(run.id, run) for run in runs]

    async def _record(self, done: Run, repeat: bool = False) -> Run:
        """Record a run; return it, or as unscored where the platform refuses its reward.

        `repeat`: see `Run.unscored`.
        """
        try:
            await self.platform.record([done])
        except BadInput as refused:
            if refused.code != REWARD_REFUSED:
                raise
            done = done.unscored(str(refused), repeat=repeat)
            await self.platform.record([done])
        return done


def worker_spec(
    agent: Agent,
    environment: WorkerEnvironment,
    item: RolloutRequest,
    loop: str,
    run_id: str,
    seed: int | None,
) -> dict[str, Any]:
    """The request for a run by a worker, as POST /v1/rollouts takes it."""
    given = {"temperature": agent.temperature, "max_tokens": agent.max_tokens, "seed": seed}
    sampling = {name: value for name, value in given.items() if value is not None}
    return {
        "run_id": run_id,
        "environment": environment.name,
        "agent": agent.name,
        "model": agent.model,
        "task": item.task.model_dump(mode="json"),
        "loop": loop,
        "iteration": item.iteration,
        "attempt": item.attempt,
        "sampling": {**agent.sampling, **sampling},
        "seconds": SECONDS if agent.timeout in (None, math.inf) else agent.timeout,
    }


def attempts_at(
    tasks: Sequence[Task], scope: str, attempts: int, iteration: int | None = None
) -> list[RolloutRequest]:
    """The runs of several attempts at tasks, those at one task side by side."""
    numbers = range(attempts)
    return [RolloutRequest(task, scope, number, iteration) for task in tasks for number in numbers]


def patience(started: Sequence[ActiveRollout], close_at: float) -> float | None:
    """Seconds until the set closes, if no run ends meanwhile; None: it cannot close yet."""
    ended = [each.seconds for each in started if each.task.done()]
    going = [each for each in started if not each.task.done()]
    if not going or not ended or len(ended) < close_at * len(started):
        return None
    if any(each.begun is None for each in going):
        return None
    longest = STRAGGLES * statistics.median(ended)
    return max(longest - each.seconds for each in going)


async def cancel(started: Sequence[ActiveRollout]) -> None:
    """Cancel runs, and wait until they have ended."""
    tasks = [each.task for each in started]
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)


def check_some_went_well(runs: Sequence[Run], known: Iterable[Run]) -> None:
    """Raise EngineUnavailable if the infrastructure failed all the runs: they show nothing."""
    if not runs or not all(map(failed_by_infrastructure, [*runs, *known])):
        return
    first = next(run.error for run in runs if run.error is not None)
    raise EngineUnavailable(
        f"the infrastructure failed all of {len(runs)} runs, the first with {first.type}: "
        f"{first.message}. When that is mended, the same command goes on"
    )


def failed_by_infrastructure(run: Run) -> bool:
    """Tell whether a run says nothing about the agent, because the engine or machine failed it."""
    return run.error is not None and run.error.infrastructure


def success(runs: Sequence[Run]) -> float:
    """The mean reward over runs that were scored; an infrastructure failure does not count."""
    return figures_of(scores_of(runs)).mean.value or 0.0


def scores_of(runs: Sequence[Run]) -> dict[str, list[float | None]]:
    """The rewards of runs by task; None for one without, such as an infrastructure failure."""
    scores = defaultdict[str, list[float | None]](list)
    for run in runs:
        scores[run.task.id if run.task else ""].append(run.reward)
    return dict(scores)


def accepted(runs: Sequence[Run], min_reward: float) -> int:
    """Count the runs that reach the reward."""
    return sum(run.reward is not None and run.reward >= min_reward for run in runs)


def shuffled(rewards: Sequence[tuple[str, float]], seed: str) -> dict[str, float]:
    """Rewards by run id, permuted among the runs; the same for the same rewards and seed."""
    scored = sorted(rewards)
    values = [value for _, value in scored]
    random.Random(seed).shuffle(values)
    return {run_id: value for (run_id, _), value in zip(scored, values, strict=True)}


# ---- Worker runs: runs of a WorkerEnvironment, asked for over HTTP and waited for
# The worker's outcome is on record when the platform says that the run is done; see
# runtime/gateway/rollout_queue.py.
SECONDS = 600.0  # that a run may take, if the agent has no timeout
WAIT = 20  # seconds of a request
PATIENCE = 60.0  # seconds for which a platform that restarts is waited for
#: Types of errors that an environment is to blame for; env_worker/ names them.
ENVIRONMENT_ERRORS = ("EnvironmentFailed", "EnvironmentTimeout", "EnvironmentDied")
TELL_EVERY = 60.0  # seconds between warnings that no worker is there

log = logging.getLogger(__name__)
_warned: dict[str, float] = {}  # by environment: when the last warning was


async def run_by_worker(platform: Platform, spec: dict[str, Any]) -> Run:
    """Ask for a run, and return it when its end is on record. Raises EngineUnavailable."""
    lost_at: float | None = None
    while True:
        try:
            state = await platform.ask_for_rollout(spec)
            while state != "done":
                state, workers = await platform.wait_for_rollout(spec["run_id"], WAIT)
                lost_at = None
                if state == "queued" and not workers:
                    _tell(spec["environment"])
            return await platform.run(spec["run_id"])
        except NotFound:
            continue  # the platform was restarted: ask again
        except EngineUnavailable:
            lost_at = time.monotonic() if lost_at is None else lost_at
            if time.monotonic() - lost_at > PATIENCE:
                raise


def _tell(environment: str) -> None:
    now = time.monotonic()
    if now - _warned.get(environment, -TELL_EVERY) >= TELL_EVERY:
        _warned[environment] = now
        log.warning(
            "no worker of environment %r asks for runs: start `cray-agents env-worker --name %s`, "
            "see docs/environments.md",
            environment,
            environment,
        )
