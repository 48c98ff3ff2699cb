"""A cold start: imitate a few demonstrations until the model succeeds sometimes, and stop there.

    plan = WarmUp(Hyperparameters(steps=100), band=(0.15, 0.4))
    Loop(agent, tasks, rewards=[...], demonstrations=[(messages, {}), ...], warm_up=plan)

A model that never succeeds gives a loop nothing to learn from; one that was shown everything gives
it nothing to do. So training on the demonstrations goes on in small jobs until held-out success
lies in a stated band. Success may leap over the band within a few steps. Then the steps are halved,
and what a shorter job has reached below the band is kept: the search goes on from there.

The loop's journal has an entry `warm-up`: what was shown, and which version came of it. A loop that
is started afterwards, in any process, trains on those demonstrations and no others. Like the loop,
a warm-up is resumed by running it again. Called by loop.py; read next: cookbook/06.
"""

import asyncio
import functools
import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import TYPE_CHECKING, Any

from cray_agents.errors import BadInput, JobError
from cray_agents.generation import LoopProgress
from cray_agents.loop.dataset_recipes import least_reward
from cray_agents.loop.holdout_journal import hold_out
from cray_agents.loop.rollouts import success
from cray_agents.platform.client import Platform
from cray_agents.queries import DatasetRecipe
from cray_agents.records import Message, ModelVersion, Record, Run, digest
from cray_agents.training_jobs import Hyperparameters, JobStatus

if TYPE_CHECKING:
    from cray_agents.loop.loop import Loop

SEEDS = 2**31  # a job's seed is below, and not negative
ENTRY = "warm-up"  # in the loop's journal
REMEDIES = (
    "let it imitate demonstrations first, Loop(demonstrations=..., warm_up=WarmUp(...)); begin "
    "with a model that solves some of these tasks; give easier tasks, or a reward for a part of one"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmUp:
    """How to warm up: the first job, the jobs after it, and where to stop.

    Args:
        first: the first job's hyperparameters; its `steps` are a guess, which need not be good.
        then: those of the jobs after it, while success is below the band. Default: `first`.
        demonstrations: how many of the loop's the first job sees. Default: all.
        more: how many more each later job sees that goes on below the band.
        band: lowest and highest held-out success; the first version inside is promoted.
        jobs: how many at most.

    Raises BadInput for what cannot be.
    """

    first: Hyperparameters
    then: Hyperparameters | None = None
    demonstrations: int | None = None
    more: int = 0
    band: tuple[float, float] = (0.15, 0.40)
    jobs: int = 20

    def __post_init__(self) -> None:
        if not self.band[0] <= self.band[1]:
            raise BadInput(f"band={self.band!r}: give the lowest success first", param="band")
        for name, value, least in (
            ("demonstrations", 1 if self.demonstrations is None else self.demonstrations, 1),
            ("more", self.more, 0),
            ("jobs", self.jobs, 1),
        ):
            if value < least:
                raise BadInput(f"{name}={value!r}: must be at least {least}", param=name)

    def settings(self) -> dict[str, Any]:
        """The plan as plain data, as a loop's settings have it."""
        jobs = {"first": self.first, "then": self.then}
        told = {name: job and job.model_dump(mode="json") for name, job in jobs.items()}
        return asdict(self) | told | {"band": list(self.band)}


class Warmed(Record):
    """The journal's entry: the version, its held-out success, and what it was shown.

    `shown` counts the loop's first demonstrations; `demonstrations` is the hash of these, and
    `plan` that of the plan.
    """

    version: str
    success: float
    shown: int
    demonstrations: str
    plan: str


@dataclass(frozen=True)
class Tried:
    """A job of a warm-up: the version it made, that version's success, and what it was shown."""

    version: ModelVersion
    success: float
    shown: int
    steps: int


#: Trains from a version (None: the first one) on so many demonstrations, after those tried before.
Attempt = Callable[[ModelVersion | None, Hyperparameters, int, Sequence[Tried]], Awaitable[Tried]]


def warm_up(loop: "Loop", plan: WarmUp | None = None) -> ModelVersion:
    """Warm up the loop's model, from its first version; returns the version that came of it.

    A loop with `warm_up=` does this by itself when it is run. `plan`: default is that one. Promotes
    the version unless a later one is promoted already, and leaves the loop with the demonstrations
    that were shown. Where no version lies in the band because success leaps over it, the nearest
    version is taken, and a warning says so. Raises JobError when success stays below the band, and
    BadInput when the loop has begun without this warm-up.
    """

    async def alone() -> ModelVersion:
        try:
            return await _warm_up(loop, plan or loop.warm_up)
        finally:
            await loop.rest()
            await loop.where.close()  # of this event loop, which ends here

    return asyncio.run(alone())


async def warm_first(loop: "Loop") -> None:
    """Before generation 0: warm up if the loop asks for it; keep to what any warm-up has shown."""
    if loop.warm_up is not None and not await _begun(loop):
        await _warm_up(loop, loop.warm_up)
    elif (before := await _recorded(loop)) is not None:
        _keep_to(loop, before)


def cold_start(loop: "Loop", runs: Sequence[Run]) -> str:
    """What to say of generation 0 when no run of it had success; nothing if one had.

    Success is what the first stage learns from: a good run, or one with any reward at all. A loop
    that watches learns from what people say, whatever these runs got.
    """
    stage, rewards = loop.stages[0], [run.reward for run in runs if run.reward is not None]
    if loop.watch is not None or stage.method == "sft" or not rewards:
        return ""
    least = least_reward(loop, stage)
    if least is not None and stage.method != "dpo":
        if max(rewards) >= least:
            return ""
        what = f"a reward of {least:g}"
    elif max(rewards) > 0 or max(rewards) > min(rewards):
        return ""
    else:
        what = "any reward"
    told = f"cold start: none of {len(rewards)} held-out runs got {what}"
    if stage.method == "rft" and loop.demonstrations:
        return f"{told}: until some do, it learns from the demonstrations alone. Else {REMEDIES}"
    return f"{told}, and a loop learns from success alone. Remedies: {REMEDIES}"


async def _warm_up(loop: "Loop", plan: WarmUp | None) -> ModelVersion:
    platform = loop.where
    if plan is None:
        raise BadInput("say how to warm up: WarmUp(Hyperparameters(steps=100))", param="plan")
    check(loop)
    asked = digest(plan.settings())
    before = await _recorded(loop)
    if await _begun(loop) and (before is None or before.plan != asked):
        raise BadInput(
            f"loop {loop.name} has begun without this warm-up, which comes before generation 0: "
            "leave it out, or give the loop another name",
            param="warm_up",
        )
    if before is not None and before.plan == asked:
        _keep_to(loop, before)
        found = await platform.version(before.version)
    else:
        tried = await search(plan, len(loop.demonstrations), functools.partial(_try, loop))
        found, shown = tried.version, tried.shown
        before = Warmed(version=found.id, success=tried.success, shown=shown,
                        demonstrations=_hash(loop, shown), plan=asked)  # fmt: skip
        await _remember(loop, before)
        loop.demonstrations = loop.demonstrations[:shown]
    low, high = plan.band
    await _promote(platform, found, f"held-out success {before.success:.3f} for {low:g}-{high:g}")
    return found


def check(loop: "Loop") -> None:
    """Raises BadInput when the loop has nothing to show, or nothing to see the band by."""
    if not loop.demonstrations:
        raise BadInput("a warm-up imitates demonstrations: give some", param="demonstrations")
    if not loop.tasks.split("holdout"):
        raise BadInput(
            "a warm-up ends at a held-out success: give the loop held-out tasks", param="tasks"
        )


async def search(plan: WarmUp, every: int, attempt: Attempt) -> Tried:
    """Try jobs until a version is in the band; returns it, or the nearest. Raises JobError.

    `every`: how many demonstrations there are. `over` is how many steps after `below` success was
    once seen above the band; None: it never was. Half of them are tried next, on the same
    demonstrations. It is an estimate: each job draws the data in an order of its own. Where it was
    wrong (`over` is 0), the steps grow from there again.
    """
    low, high = plan.band
    then = plan.then or plan.first
    now, shown = plan.first, min(plan.demonstrations or every, every)
    below: ModelVersion | None = None
    over: int | None = None
    tried: list[Tried] = []
    while len(tried) < plan.jobs:
        seed = (now.seed - len(tried) - 1) % SEEDS  # those from `seed` on are the loop's
        this = await attempt(below, now.model_copy(update={"seed": seed}), shown, tried)
        tried.append(this)
        if low <= this.success <= high:
            return this
        if this.success > high:
            if now.steps == 1:
                break  # it leaps within a single step
            over, steps = now.steps, now.steps // 2
        else:
            below = this.version
            if over is None:
                now, shown = then, min(shown + plan.more, every)
                continue
            over = max(0, over - now.steps)
            steps = max(1, over // 2) if over else min(2 * now.steps, then.steps)
        now = now.model_copy(update={"steps": steps})
    return _nearest(tried, plan)


def _nearest(tried: Sequence[Tried], plan: WarmUp) -> Tried:
    """What to take where no version was in the band. Raises JobError if all were below it.

    A version without any success would be no better a start than none: it is the last choice.
    """
    low, high = plan.band
    jobs, told = len(tried), f"held-out success in the band {low:g}-{high:g}"
    if all(each.success < low for each in tried):
        best = max(each.success for each in tried)
        raise JobError(
            f"{jobs} warm-up jobs did not reach {told}, the best was {best:.3f}: give more "
            "demonstrations, more steps, more jobs or a lower band"
        )
    useful = [each for each in tried if each.success > 0] or list(tried)
    found = min(useful, key=lambda each: (max(low - each.success, each.success - high), each.steps))
    log.warning(
        "none of %d warm-up jobs had %s, for success leaps over it: %s with %.3f is taken as "
        "the nearest. A lower learning_rate, or demonstrations that differ more, make it gradual",
        jobs, told, found.version.id, found.success,
    )  # fmt: skip
    return found


async def _try(
    loop: "Loop",
    parent: ModelVersion | None,
    hyperparameters: Hyperparameters,
    shown: int,
    tried: Sequence[Tried],
) -> Tried:
    """One job, and how the version that it makes does on the held-out tasks: an Attempt."""
    platform, name = loop.where, loop.agent.model
    first = parent or ModelVersion.model_validate((await platform.versions(name))[0])
    job = await platform.submit_job(
        dataset=await _dataset(loop, shown),
        parent=first.id,
        hyperparameters=hyperparameters,
        optimizer_from="parent",
    )
    before = tried[-1].success if tried else None
    job = await platform.wait_for(job, _reporter(loop, len(tried) + 1, before))
    version = await platform.register(name, job.checkpoint or job.id)
    if not await loop.is_measured(version, "holdout"):
        await loop.stage(version)
    reached = success(await loop.evaluate(version, "holdout"))
    return Tried(version, reached, shown, hyperparameters.steps)


async def _promote(platform: Platform, version: ModelVersion, reason: str) -> None:
    promoted = await platform.promoted(version.name)
    if promoted is None or promoted.number < version.number:
        await platform.promote(version, who="warm-up", reason=reason)


async def _dataset(loop: "Loop", count: int) -> str:
    await hold_out(loop.where, loop.name, loop.tasks)
    shown = loop.demonstrations[:count]
    recipe = DatasetRecipe(
        loop=loop.name,
        generations=[],  # demonstrations alone, however many runs there are by now
        demonstrations=[messages for messages, _ in shown],
        demonstrations_metadata=[metadata for _, metadata in shown],
        balance_by=loop.balance_by,
        balance_power=loop.balance_power,
        tools=loop.agent.tool_schemas,
        tokenizer=loop.agent.model,
    )
    return str((await loop.where.build_dataset(recipe))["id"])


def _reporter(loop: "Loop", number: int, before: float | None) -> Callable[[JobStatus], None]:
    def report(job: JobStatus) -> None:
        note = f"job {job.scheduler_job_id}"
        note += "" if before is None else f", held-out success {before:.3f} before"
        loop.on_progress(LoopProgress(0, f"warm-up job {number}", job.step, job.steps, note))

    return report


# ---- the journal


async def _begun(loop: "Loop") -> bool:
    """Whether the loop's own training has begun, or may have."""
    return await loop.where.recall(loop.name, "settings-1") is not None


async def _recorded(loop: "Loop") -> Warmed | None:
    """The newest entry: a warm-up with another plan may have followed, before the loop began."""
    number, found = 1, None
    while (entry := await loop.where.recall(loop.name, f"{ENTRY}-{number}")) is not None:
        number, found = number + 1, Warmed.model_validate(entry)
    return found


async def _remember(loop: "Loop", record: Warmed) -> None:
    number = 1
    while not await loop.where.remember(loop.name, f"{ENTRY}-{number}", record.model_dump()):
        number += 1


def _keep_to(loop: "Loop", record: Warmed) -> None:
    """Leave the loop with the demonstrations that were shown. Raises BadInput if it has others."""
    same = _hash(loop, record.shown) == record.demonstrations
    if not same and loop.changed == "refuse":
        raise BadInput(
            f"the warm-up of loop {loop.name} showed {record.shown} demonstrations, and the loop's "
            f"first {record.shown} are others now. Give it those, or another name, or go on with "
            'what it has: changed="accept", `cray-agents loop --accept-changes`',
            param="demonstrations",
            code="loop_changed",
        )
    if same:
        loop.demonstrations = loop.demonstrations[: record.shown]


def _hash(loop: "Loop", count: int) -> str:
    shown: list[tuple[list[Message], dict[str, Any]]] = list(loop.demonstrations[:count])
    return digest([list(pair) for pair in shown])
