"""Evaluation: an agent's tasks answered by versions of a model, without a loop.

It is a client of the platform, as a loop is, and holds no state: a run's id follows from the name,
the agent, the rewards, the temperature, the version, the task and the attempt. So the same
evaluation run again asks for nothing that is on record; more tasks, models or attempts are added
to it. Read next: rollouts.py; promotion/figures.py.
"""

import inspect
import re
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from functools import partial, wraps
from statistics import fmean
from typing import Annotated, Any, ParamSpec, TypeVar

from pydantic import Field, FiniteFloat, PositiveInt, StringConstraints

from cray_agents.agent import user_code
from cray_agents.agent.agent import Agent
from cray_agents.agent.description import check_arguments
from cray_agents.agent.environment import WorkerEnvironment
from cray_agents.errors import BadInput, EngineUnavailable, NotFound, StoreError
from cray_agents.iteration import LoopProgress
from cray_agents.loop.argument_checks import check_agent, check_key
from cray_agents.loop.evaluator import version_named
from cray_agents.loop.loop import STOP_SECONDS
from cray_agents.loop.outside_model import OutsideModel
from cray_agents.loop.rollouts import Evaluated, Rollouts, attempts_at, scores_of
from cray_agents.loop.settings_record import record_of
from cray_agents.loop.version_gate import VersionGate
from cray_agents.platform.client import Platform
from cray_agents.promotion.figures import Figures, PairedDifference, compare, figures_of
from cray_agents.records import EVALUATION, UNSCORED, ModelVersion, Record, Run, digest
from cray_agents.rewards.reward import RewardFunction
from cray_agents.tasks.readers import TaskLike
from cray_agents.tasks.task_set import TaskSet

P = ParamSpec("P")
R = TypeVar("R")


class VersionResult(Figures):
    """A version's figures: over all tasks, and `by` the values of a metadata key.

    `errors` counts the missing attempts by the type of their error. `seconds`: of a run on average;
    `cost`: of a run, see runtime/views/evaluations.py; None while it is not known.
    """

    by: dict[str, Figures]
    errors: dict[str, int]
    seconds: float | None = None
    cost: float | None = None


class EvaluationResult(Record):
    """The results of an evaluation, by `name@N`, and each later version against the first one.

    `loop` is the name that the runs are recorded under, with the tag `evaluation`. `currency`: of
    the costs.
    """

    loop: str
    attempts: int
    temperature: float | None
    currency: str = "USD"
    models: dict[str, VersionResult]
    comparisons: list[PairedDifference]


@dataclass
class Evaluation:
    """Measures versions of a model behind an agent on tasks. Nothing is trained or promoted.

    Args:
        agent: what answers, with each version in turn.
        tasks: all of them, whatever their split; those of a plain list are test tasks. Their runs
            are never trained on.
        rewards: functions marked with @reward, as in Loop.
        models: versions `name@N`, or names, which mean their promoted version, or an OutsideModel,
            which another server answers for; default: the agent's model.
        attempts: runs of each task, for mean@k and pass@k.
        temperature: of the runs; 0 is greedy, for which one attempt is enough. Default: the
            agent's.
        by: a metadata key of the tasks, by whose values the figures are broken down.
        min_reward: the least reward with which an attempt passes.
        concurrency: runs at a time.
        name: names the evaluation. Default: the agent's name.
        platform: where to run; default: the one at $CRAY_AGENTS_URL.
        on_progress: called with each LoopProgress, whose phase is the version.

    Raises BadInput for settings that cannot be.
    """

    agent: Agent
    tasks: TaskSet | Sequence[TaskLike]
    rewards: Sequence[RewardFunction]
    models: Sequence[str | OutsideModel] = ()
    attempts: PositiveInt = 1
    temperature: Annotated[FiniteFloat, Field(ge=0)] | None = None
    by: str | None = None
    min_reward: FiniteFloat = 1.0
    concurrency: PositiveInt = 64
    name: Annotated[str, StringConstraints(pattern=r"^[A-Za-z0-9._-]{1,100}$")] = ""
    platform: Platform | None = None
    on_progress: Callable[[LoopProgress], None] = lambda progress: None

    def __post_init__(self) -> None:
        self.rewards = (self.rewards,) if callable(self.rewards) else self.rewards
        check_agent(self.agent, self.rewards)
        own = isinstance(self.agent.environment, WorkerEnvironment)  # which gives rewards itself
        if not self.rewards and not own:
            raise BadInput("an evaluation needs at least one reward function", param="rewards")
        given = self.tasks
        if isinstance(given, str) or not isinstance(given, Sequence):
            raise BadInput(f"tasks={given!r}: give a TaskSet or a list of tasks", param="tasks")
        self._tasks = (
            given if isinstance(given, TaskSet) else TaskSet.from_list(given, holdout=0, test=1)
        )
        if not self._tasks:
            raise BadInput("there are no tasks to evaluate on", param="tasks")
        if isinstance(self.models, str | OutsideModel):
            self.models = (self.models,)
        self.models = self.models or (self.agent.model,)
        self.name = self.name or re.sub(r"[^A-Za-z0-9._-]", "-", self.agent.name)[:100]
        check_arguments(self, Evaluation, "tasks", "rewards")
        outside = [one.id for one in self.models if isinstance(one, OutsideModel)]
        if outside and own:
            raise BadInput(
                f"models={outside[0]!r}: workers of an environment ask the platform alone",
                param="models",
            )
        if self.temperature is None:
            self.temperature = self.agent.temperature
        if self.temperature == 0 and self.attempts > 1:
            raise BadInput(
                f"attempts={self.attempts} at temperature 0 would all be the same: give attempts=1"
                " or a temperature",
                param="attempts",
            )
        check_key("by", self.by, [task.metadata for task in self._tasks])

    @property
    def loop(self) -> str:
        """The name that the runs are recorded under; other settings give another one."""
        settings = record_of(self.agent.override(model="-"), self.rewards)
        return f"eval-{self.name}-{digest([settings, self.temperature], 8)}"

    async def run(self) -> EvaluationResult:
        """Run what is not on record yet, and return the figures of all.

        A run that the infrastructure failed, or that could not be scored, is missing. It is tried
        again when the evaluation is run again. Raises NotFound or BadInput for a version that does
        not exist, SwapError for one that cannot be served, EngineUnavailable if the infrastructure
        failed all runs of a version, and BadInput if none of them could be scored.
        """
        platform = self.platform = self.platform or Platform()
        versions = [
            one if isinstance(one, OutsideModel) else await version_named(platform, one)
            for one in self.models
        ]
        ids = [version.id for version in versions]
        if twice := [name for name in ids if ids.count(name) > 1]:
            raise BadInput(f"models={list(self.models)}: {twice[0]} is in it twice", param="models")
        holder = f"evaluation {self.name}"
        gate = VersionGate(platform, lambda why: self._report(f"waiting: {why}"), holder)
        given = (platform, gate, self.agent, self.loop, self.rewards, self.concurrency)
        rollouts = Rollouts(*given, tags=[EVALUATION])
        try:
            await gate.look()
            runs = {version.id: await self._runs(rollouts, version) for version in versions}
        finally:
            await rollouts.stop()
            await gate.stop()
            with suppress(NotFound, EngineUnavailable):  # no replica is held, or nobody is there
                await platform.renew(holder, 0)
        scores = [scores_of(each) for each in runs.values()]
        costs: dict[str, dict[str, Any]] = {}
        with suppress(NotFound, StoreError, EngineUnavailable):  # the figures stand without costs
            rows = (await platform.views.get("/evaluations", loop=self.loop))["data"]
            costs = {row["model"]: row for row in rows}
        return EvaluationResult(
            loop=self.loop,
            attempts=self.attempts,
            temperature=self.temperature,
            currency=next((row["currency"] for row in costs.values()), "USD"),
            models={name: self._result(each, costs.get(name, {})) for name, each in runs.items()},
            comparisons=[
                compare((ids[0], other), scores[0], theirs)
                for other, theirs in zip(ids[1:], scores[1:], strict=True)
            ],
        )

    def run_sync(self) -> EvaluationResult:
        """`run` for code that is not async; it closes the platform's connections at its end."""

        async def alone() -> EvaluationResult:
            try:
                return await self.run()
            finally:
                if self.platform is not None:
                    await self.platform.close()

        return user_code.wait_for(alone(), STOP_SECONDS)

    async def _runs(self, rollouts: Rollouts, version: Evaluated) -> list[Run]:
        """A version's runs at all tasks: recorded ones, and the rest carried out now."""
        requests = []
        for task in self._tasks:
            scope = f"{version.id}/{digest(task.model_dump(mode='json'))}"
            requests += attempts_at([task], scope, self.attempts)
        report = partial(self._report, version.id, total=len(requests))
        if isinstance(version, ModelVersion) and not await rollouts.are_scored(requests, version):
            await rollouts.gate.stage(version)
        runs = await rollouts.run(requests, version, self.temperature, report, paired=True)
        unscored = [run.error for run in runs if run.error and run.error.type == UNSCORED]
        if unscored and all(run.reward is None for run in runs):
            raise BadInput(
                f"none of {len(runs)} runs of {version.id} could be scored: {unscored[0].message}",
                param="rewards",
            )
        return runs

    def _report(self, phase: str, done: int = 0, total: int = 0) -> None:
        self.on_progress(LoopProgress(0, phase, done, total))

    def _result(self, runs: Sequence[Run], row: Mapping[str, Any]) -> VersionResult:
        groups: dict[str, list[Run]] = {}
        for run in runs:
            value = run.task.metadata.get(self.by) if run.task and self.by else None
            groups.setdefault("-" if value is None else str(value), []).append(run)
        took = [run.seconds for run in runs if run.reward is not None]
        own = [run.cost for run in runs if run.cost is not None]  # of an outside model
        lost = [run.error.type if run.error else "no reward" for run in runs if run.reward is None]
        return VersionResult(
            **dict(self._figures(runs)),
            by={name: self._figures(groups[name]) for name in sorted(groups)} if self.by else {},
            errors=dict(Counter(lost)),
            seconds=fmean(took) if took else None,
            cost=fmean(own) if own else row.get("cost"),
        )

    def _figures(self, runs: Sequence[Run]) -> Figures:
        return figures_of(scores_of(runs), self.min_reward, self.attempts)


def _call_form(make: Callable[P, Evaluation], run: Callable[[Evaluation], R]) -> Callable[P, R]:
    """Return a function of an Evaluation's arguments that runs it."""

    @wraps(run, assigned=["__doc__"])
    def evaluate(*args: P.args, **settings: P.kwargs) -> R:
        return run(make(*args, **settings))

    evaluate.__dict__["__signature__"] = inspect.signature(make)
    return evaluate


evaluate = _call_form(Evaluation, Evaluation.run)
evaluate_sync = _call_form(Evaluation, Evaluation.run_sync)
