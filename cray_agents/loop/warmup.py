"""A cold start: imitate a few demonstrations until the model succeeds sometimes, and stop there.

    plan = WarmUp(Training(steps=100), band=(0.15, 0.4))
    data = Data(demonstrations=[(messages, {}), ...])
    Loop(agent, tasks, rewards=[...], data=data, warm_up=plan)

A model that never succeeds gives a loop nothing to learn from; one that was shown everything gives
it nothing to do. So training on the demonstrations goes on in small jobs until held-out success
lies in a stated band. Success may leap over the band within a few steps. Then the steps are halved:
a version below the band is kept, and the search goes on from it.

The loop's journal has an entry `warm-up` with the demonstrations and the version. A loop that is
started afterwards, in any process, trains on those demonstrations and no others. Like the loop,
a warm-up is resumed by running it again. Called by loop.py. Read next: cookbook/05_database.py.
"""

import logging
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cray_agents.errors import BadInput, JobError
from cray_agents.iteration import LoopProgress
from cray_agents.loop.dataset_recipes import min_reward_for
from cray_agents.loop.evaluator import hold_out
from cray_agents.loop.methods import Training
from cray_agents.loop.settings import Demonstration, LoopSettings
from cray_agents.platform.client import Platform
from cray_agents.queries import DatasetRecipe
from cray_agents.records import ModelVersion, Record, Run, digest
from cray_agents.training_jobs import Hyperparameters, JobStatus

SEEDS = 2**31  # a job's seed is below, and not negative
ENTRY = "warm-up"  # in the loop's journal
REMEDIES = (
    "let it imitate demonstrations first, Loop(data=Data(demonstrations=...), warm_up=WarmUp(...));"
    " begin with a model that solves some of these tasks; give easier tasks, or a reward for a part"
    " of one"
)

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class WarmUp:
    """A plan to warm up: the first job, the jobs after it, and the band to stop in.

    Args:
        first: the first job's settings; its `steps` are a guess, which need not be good.
        then: those of the jobs after it, while success is below the band. Default: `first`.
        demonstrations: how many of the loop's the first job sees. Default: all.
        more: how many more each later job sees that goes on below the band.
        band: lowest and highest held-out success; the first version inside is promoted.
        jobs: how many at most.

    Raises BadInput for what cannot be.
    """

    first: Training
    then: Training | None = None
    demonstrations: int | None = None
    more: int = 0
    band: tuple[float, float] = (0.15, 0.40)
    jobs: int = 20

    def __post_init__(self) -> None:
        if not self.band[0] <= self.band[1]:
            raise BadInput(f"band={self.band!r}: give the lowest success first", param="band")
        for name, job in (("first", self.first), ("then", self.then or self.first)):
            if not isinstance(job, Training) or job.steps is None:
                raise BadInput(f"{name}={job!r}: give Training(steps=...)", param=name)
            if job.publish_every is not None:
                why = "a warm-up tries whole jobs alone: leave it out"
                raise BadInput(f"publish_every has no effect: {why}", param=name)
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
        plain = {name: job and _job(job).model_dump(mode="json") for name, job in jobs.items()}
        return asdict(self) | plain | {"band": list(self.band)}


class Warmed(Record):
    """An entry of the journal: the version, its held-out success and its demonstrations.

    `shown` counts the loop's first demonstrations, `demonstrations` is their hash, `plan` the hash
    of the plan.
    """

    version: str
    success: float
    shown: int
    demonstrations: str
    plan: str


@dataclass(frozen=True)
class Tried:
    """A job of a warm-up: its version, that version's success, its demonstrations and steps."""

    version: ModelVersion
    success: float
    demonstrations: int
    steps: int


#: Trains a version (None: the first one) on so many demonstrations, after these earlier jobs.
Attempt = Callable[[ModelVersion | None, Hyperparameters, int, Sequence[Tried]], Awaitable[Tried]]


@dataclass(frozen=True)
class WarmUpJobs:
    """The jobs of a loop's warm-up. `measure` gives a version's held-out success."""

    platform: Platform
    loop: LoopSettings
    measure: Callable[[ModelVersion], Awaitable[float]]
    on_progress: Callable[[LoopProgress], None]

    async def run(self, plan: WarmUp) -> tuple[ModelVersion, int | None]:
        """Warm up, or find that it was done; promote the version.

        Also returns how many demonstrations the loop is to keep to; None: all that it has now.
        Raises as `warm_up` in loop.py does.
        """
        check(self.loop)
        digest_of_plan = digest(plan.settings())
        before = await self._recorded()
        if await self._begun() and (before is None or before.plan != digest_of_plan):
            raise BadInput(
                f"loop {self.loop.name} has begun without this warm-up, which comes before "
                "iteration 0: leave it out, or give the loop another name",
                param="warm_up",
            )
        keep: int | None
        if before is not None and before.plan == digest_of_plan:
            keep = self._same_demonstrations(before)
            version = await self.platform.version(before.version)
        else:
            tried = await search(plan, len(self.loop.data.demonstrations), self._try)
            version, keep = tried.version, tried.demonstrations
            before = Warmed(version=version.id, success=tried.success, shown=keep,
                            demonstrations=self._hash(keep), plan=digest_of_plan)  # fmt: skip
            await self._record(before)
        low, high = plan.band
        reason = f"held-out success {before.success:.3f} for {low:g}-{high:g}"
        await _promote(self.platform, version, reason)
        return version, keep

    async def run_first(self, plan: WarmUp | None) -> int | None:
        """Before iteration 0: warm up if a plan is given, and the loop has not begun.

        Returns how many demonstrations the loop is to keep to; None: all.
        """
        if plan is not None and not await self._begun():
            return (await self.run(plan))[1]
        before = await self._recorded()
        return None if before is None else self._same_demonstrations(before)

    async def _try(
        self,
        parent: ModelVersion | None,
        hyperparameters: Hyperparameters,
        demonstrations: int,
        tried: Sequence[Tried],
    ) -> Tried:
        """Train one version and measure it: an Attempt."""
        platform, name = self.platform, self.loop.agent.model
        first = parent or ModelVersion.model_validate((await platform.versions(name))[0])
        job = await platform.submit_job(
            dataset=await self._dataset(demonstrations),
            parent=first.id,
            hyperparameters=hyperparameters,
            optimizer_from="parent",
            session=self.loop.name,
        )
        before = tried[-1].success if tried else None
        job = await platform.wait_for(job, self._reporter(len(tried) + 1, before))
        version = await platform.register(name, job.checkpoint or job.id)
        reached = await self.measure(version)
        return Tried(version, reached, demonstrations, hyperparameters.steps)

    async def _dataset(self, count: int) -> str:
        loop, data = self.loop, self.loop.data
        await hold_out(self.platform, loop.name, loop.tasks)
        chosen = data.demonstrations[:count]
        recipe = DatasetRecipe(
            loop=loop.name,
            iterations=[],  # demonstrations alone, however many runs there are by now
            demonstrations=[messages for messages, _ in chosen],
            demonstrations_metadata=[metadata for _, metadata in chosen],
            balance_by=data.balance_by,
            balance_power=data.balance_power,
            tools=loop.agent.tool_schemas,
            tokenizer=loop.agent.model,
        )
        return str((await self.platform.build_dataset(recipe))["id"])

    def _reporter(self, number: int, before: float | None) -> Callable[[JobStatus], None]:
        def report(job: JobStatus) -> None:
            note = f"job {job.scheduler_job_id}"
            note += "" if before is None else f", held-out success {before:.3f} before"
            self.on_progress(LoopProgress(0, f"warm-up job {number}", job.step, job.steps, note))

        return report

    async def _begun(self) -> bool:
        """Tell whether the loop's own training has begun, or may have."""
        return await self.platform.recall(self.loop.name, "settings-1") is not None

    async def _recorded(self) -> Warmed | None:
        """The newest entry: a warm-up with another plan may have followed the first one."""
        number, newest = 1, None
        while (
            entry := await self.platform.recall(self.loop.name, f"{ENTRY}-{number}")
        ) is not None:
            number, newest = number + 1, Warmed.model_validate(entry)
        return newest

    async def _record(self, entry: Warmed) -> None:
        number, content = 1, entry.model_dump()
        while not await self.platform.remember(self.loop.name, f"{ENTRY}-{number}", content):
            number += 1

    def _same_demonstrations(self, record: Warmed) -> int | None:
        """The number of demonstrations in the warm-up; None if the loop has others, and may.

        Raises BadInput if the loop has others, and its changes are not accepted.
        """
        if self._hash(record.shown) == record.demonstrations:
            return record.shown
        if self.loop.accept_changes:
            return None
        raise BadInput(
            f"the warm-up of loop {self.loop.name} showed {record.shown} demonstrations, and the "
            f"loop's first {record.shown} are others now. Give it those, or another name, or go on "
            'with what it has: changed="accept", `cray-agents loop --accept-changes`',
            param="demonstrations",
            code="loop_changed",
        )

    def _hash(self, count: int) -> str:
        chosen: list[Demonstration] = list(self.loop.data.demonstrations[:count])
        return digest([list(pair) for pair in chosen])


def cold_start(loop: LoopSettings, runs: Sequence[Run]) -> str:
    """A warning for iteration 0 when none of its runs had success; empty if one had.

    The first method learns from success alone: from a good run, or one with any reward at all. A
    loop on live traffic learns from people's rewards, whatever these runs got; distill from none.
    """
    rewards = [run.reward for run in runs if run.reward is not None]
    method = loop.schedule[0].method
    if loop.live is not None or method.name in ("sft", "distill") or not rewards:
        return ""
    least = min_reward_for(loop.data, method)
    if least is not None and method.name != "dpo":
        if max(rewards) >= least:
            return ""
        missing = f"a reward of {least:g}"
    elif max(rewards) > 0 or max(rewards) > min(rewards):
        return ""
    else:
        missing = "any reward"
    text = f"cold start: none of {len(rewards)} held-out runs got {missing}"
    if method.name == "rft" and loop.data.demonstrations:
        return f"{text}: until some do, it learns from the demonstrations alone. Else {REMEDIES}"
    return f"{text}, and a loop learns from success alone. Remedies: {REMEDIES}"


def check(loop: LoopSettings) -> None:
    """Check a loop that is to warm up. Raises BadInput without demonstrations or held-out tasks."""
    if not loop.data.demonstrations:
        raise BadInput("a warm-up imitates demonstrations: give some", param="demonstrations")
    if not loop.tasks.split("holdout"):
        raise BadInput(
            "a warm-up ends at a held-out success: give the loop held-out tasks", param="tasks"
        )


def _job(training: Training) -> Hyperparameters:
    assert training.steps is not None  # as WarmUp checks
    return training.job(training.steps)


async def search(plan: WarmUp, every: int, attempt: Attempt) -> Tried:
    """Try jobs until a version is in the band; return it, or the nearest. Raises JobError.

    every: the number of demonstrations.

    `over` is the number of steps after `below` at which success was above the band; None: it never
    was. Half of these steps are tried next, on the same demonstrations. `over` is an estimate,
    because each job draws the data in an order of its own. Where it was wrong (0), the steps grow
    again.
    """
    low, high = plan.band
    then = _job(plan.then or plan.first)
    now, chosen = _job(plan.first), min(plan.demonstrations or every, every)
    below: ModelVersion | None = None
    over: int | None = None
    tried: list[Tried] = []
    while len(tried) < plan.jobs:
        seed = (now.seed - len(tried) - 1) % SEEDS  # those from `seed` on are the loop's
        this = await attempt(below, now.model_copy(update={"seed": seed}), chosen, tried)
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
                now, chosen = then, min(chosen + plan.more, every)
                continue
            over = max(0, over - now.steps)
            steps = max(1, over // 2) if over else min(2 * now.steps, then.steps)
        now = now.model_copy(update={"steps": steps})
    return _nearest(tried, plan)


def _nearest(tried: Sequence[Tried], plan: WarmUp) -> Tried:
    """The version nearest to the band, if none was in it. Raises JobError if all were below it.

    A version without any success would be no better a start than none: it is the last choice.
    """
    low, high = plan.band
    jobs, band = len(tried), f"held-out success in the band {low:g}-{high:g}"
    if all(each.success < low for each in tried):
        best = max(each.success for each in tried)
        raise JobError(
            f"{jobs} warm-up jobs did not reach {band}, the best was {best:.3f}: give more "
            "demonstrations, more steps, more jobs or a lower band"
        )
    useful = [each for each in tried if each.success > 0] or list(tried)
    nearest = min(
        useful, key=lambda each: (max(low - each.success, each.success - high), each.steps)
    )
    log.warning(
        "none of %d warm-up jobs had %s, for success leaps over it: %s with %.3f is taken as "
        "the nearest. A lower learning_rate, or demonstrations that differ more, make it gradual",
        jobs, band, nearest.version.id, nearest.success,
    )  # fmt: skip
    return nearest


async def _promote(platform: Platform, version: ModelVersion, reason: str) -> None:
    promoted = await platform.promoted(version.name)
    if promoted is None or promoted.number < version.number:
        await platform.promote(version, who="warm-up", reason=reason)
