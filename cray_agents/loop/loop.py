"""The self-improving loop: collect, score, build, train, prove, evaluate, promote.

A client of the platform (platform.py): it holds no state of its own. What every step makes has a
name derived from the step's inputs (run ids from loop, phase, task and attempt; dataset and job ids
from their content), and what is decided is written down first, so a loop that was killed is run
again by the same command and goes on from what exists; nothing is done twice. The steps' own
modules: schedule.py (methods), collecting.py (runs), training_sets.py, judging.py, stopping.py.
"""

import asyncio
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cray_agents.agent.agent import Agent
from cray_agents.errors import BadInput, EngineUnavailable, JobError, SwapError
from cray_agents.generation import Generation, LoopProgress, onward_of, promoted_by, standing_of
from cray_agents.loop.components import LoopComponents
from cray_agents.loop.curriculum import Curriculum
from cray_agents.loop.dataset_recipes import hyperparameters_of, least_reward, recipe_of, window
from cray_agents.loop.holdout_journal import hold_out
from cray_agents.loop.live.schedule import Watch
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.rollouts import success
from cray_agents.loop.settings import check, prepare, settings_of, settle
from cray_agents.loop.stages import TRAINED_BY, Method, Stage, ended, planned, stage_of
from cray_agents.loop.stop_rules import Budget, check_taught, untaught, why_stopped
from cray_agents.loop.warmup import WarmUp, cold_start, warm_first
from cray_agents.platform.client import Platform
from cray_agents.promotion.sequential_test import PromotionTest
from cray_agents.records import Message, ModelVersion, ProbeReport, Run, Split
from cray_agents.rewards.reward import RewardFunction
from cray_agents.tasks.task_set import TaskSet
from cray_agents.training_jobs import Hyperparameters, JobStatus

log = logging.getLogger(__name__)

Control = Literal["shuffled-rewards"]


@dataclass
class Loop:
    """Improves the model behind an agent on a set of tasks, by its own runs.

    Args:
        agent: its `model` is the name whose versions are made.
        tasks: with a train and a holdout split; a test split is only ever measured at the ends.
        rewards: functions marked with @reward; their sum is a run's reward.
        method: `rft`, `grpo`, `dpo`, `kto` or `sft` (see Stage), or a sequence of Stages.
        attempts: runs per task and generation.
        tasks_per_generation: how many train tasks a generation draws (see Curriculum).
        name: names the loop; the same name goes on where it stopped. Default: agent and model.
        hyperparameters: of each training job; with `lora` each job trains adapters on its parent.
        demonstrations: conversations with their metadata: all that sft trains on; rft keeps them in
            every training set.
        warm_up: train on the demonstrations before generation 0, until the model succeeds now and
            then: see WarmUp. The loop then keeps to the demonstrations that were shown.
        balance_by, balance_power, discount: see DatasetRecipe.
        history: how many generations of runs stay in the training set; None: all. grpo takes its
            own generation's alone.
        max_uses: in how many training sets a run may be; None: in any number.
        min_reward: from which reward on a run is good. None: 1 for rft and kto, any for dpo.
        promotion: the test by which a candidate is promoted.
        evaluate_every: see Stage.
        resample: of grpo and dpo, by which share of a generation's runs may be added to it in the
            place of tasks whose attempts were all rewarded alike.
        staleness: generation n samples from the version decided at generation n - 1 - staleness,
            while the jobs of those before it train (arXiv 2410.18252). What grpo's weights then
            correct is in Policy.importance_cap. With one replica, versions take turns on it.
        close_at: the share of a generation's runs with which it may close (rollouts.py has the
            rule); the others are stored when they end, and enter the next training set.
        target: stop when held-out success reaches it.
        patience: stop after so many evaluated candidates in a row of which none was promoted.
        budget: stop when it is used up.
        concurrency: runs at a time.
        temperature: of the training runs; held-out and test runs are greedy.
        seeded: each training run has a sampling seed made of its id: a loop that was killed ends as
            one that was not, as far as a sample does not depend on what else is in its batch. The
            engine then draws for each request by itself, which is work in large batches on a GPU.
        watch: trains on live traffic in the place of runs of its own: continual.py.
        changed: `accept` goes on although the settings are not those that the loop began with.
        platform: where to run; default: the one at $CRAY_AGENTS_URL.
        control: `shuffled-rewards` permutes the rewards among a generation's runs, to show
            that it is the rewards that teach.
    """

    agent: Agent
    tasks: TaskSet
    rewards: Sequence[RewardFunction]
    method: Method | Sequence[Stage] = "rft"
    attempts: int = 1
    tasks_per_generation: int = 512
    name: str = ""
    hyperparameters: Hyperparameters = field(default_factory=lambda: Hyperparameters(steps=100))
    demonstrations: Sequence[tuple[list[Message], dict[str, Any]]] = ()
    history: int | None = None
    max_uses: int | None = None
    min_reward: float | None = None
    balance_by: str | None = None
    balance_power: float = 0.0
    discount: float = 1.0
    curriculum: Curriculum = field(default_factory=Curriculum)
    promotion: PromotionTest = field(default_factory=PromotionTest)
    evaluate_every: int = 1
    resample: float = 0.0
    staleness: int = 0
    close_at: float = 1.0
    target: float | None = None
    patience: int | None = None
    budget: Budget = field(default_factory=Budget)
    concurrency: int = 64
    temperature: float = 1.0
    seed: int = 0
    seeded: bool = True
    control: Control | None = None
    watch: Watch | None = None
    changed: Literal["refuse", "accept"] = "refuse"
    platform: Platform | None = None
    on_progress: Callable[[LoopProgress], None] = lambda progress: None
    warm_up: WarmUp | None = None

    def __post_init__(self) -> None:
        prepare(self)
        attempts = self.attempts if self.watch is None else max(2, self.attempts)  # who knows
        default = Stage("rft", None, self.hyperparameters, attempts,
                        self.tasks_per_generation, self.evaluate_every)  # fmt: skip
        self.stages = planned(self.method, default)
        check(self)
        self._clock = PhaseTimer(lambda progress: self.on_progress(progress))
        self._parts: LoopComponents | None = None

    def run(self, generations: int = 5) -> Generator[Generation, None, None]:
        """Go on until `generations` are done or the loop stops itself; yields each as it ends.

        Generations that a previous call finished are yielded too, at once. Raises what the
        platform raises: JobError, SwapError, EngineUnavailable; and BadInput for settings that
        are not those it began with, or after a generation whose runs taught nothing (of grpo and
        dpo, after two in a row). Called again, it goes on.
        """
        with asyncio.Runner() as runner:
            steps = self.steps(generations)
            try:
                while True:
                    try:
                        yield runner.run(_next(steps))
                    except StopAsyncIteration:
                        return
            finally:
                runner.run(steps.aclose())
                runner.run(self.where.close())

    async def steps(self, generations: int = 5) -> AsyncGenerator[Generation]:
        """`run` for those who have an event loop of their own."""
        warm = False
        try:
            await warm_first(self)
            warm = True
        finally:
            if not warm:
                await self.rest()
        await settle(self.where, self.name, settings_of(self), self.changed == "accept")
        done = [Generation.model_validate(r) for r in await self.where.generations(self.name)]
        for generation in done:
            yield generation
        reachable = True
        try:
            while len(done) <= generations and not self._why_stopped(done):
                done.append(await self._generate(done, generations))
                yield done[-1]
                if self.watch is None:
                    check_taught(done)
        except (asyncio.CancelledError, EngineUnavailable):
            reachable = False  # it is to end at once, or there is nobody to ask
            raise
        finally:
            await self._now().stop()
            if reachable:
                await self._now().leave(self.agent.model)

    async def _generate(self, done: list[Generation], generations: int) -> Generation:
        """The next generation; it is on record when this returns."""
        number = len(done)
        await self._clock.begin(self.where, number)
        generation = await (self._begin() if number == 0 else self._improve(done, generations))
        stopped = self._why_stopped([*done, generation])
        if number == generations or stopped:
            generation = await self._measure_test(generation)
        spent = await self._clock.end(self.where)
        generation = generation.model_copy(update={"stopped": stopped, **spent})
        record = generation.model_dump(mode="json")
        await self.where.finish_generation(self.name, number, record)
        return generation

    async def _begin(self) -> Generation:
        """Generation 0: the promoted version as it is, measured on held-out and test tasks.

        Where none of its runs had success, the record and a warning say what can be done.
        """
        version = await self._promoted()
        proof = await self.stage(version)
        holdout = await self.evaluate(version, "holdout")
        if note := cold_start(self, holdout):
            log.warning(note)
        generation = Generation(
            note=note,
            generation=0,
            holdout_success=success(holdout),
            holdout_tasks=len(holdout),
            version=version.id,
            job=version.job,
            probe_max_logprob_diff=proof.max_logprob_diff if proof.prompts else None,
        )
        return await self._measure_test(generation)

    async def _improve(self, done: list[Generation], generations: int) -> Generation:
        """One generation: collect, score, build, train, prove, evaluate, promote or reject."""
        number, gate = len(done), self._now().gate
        done = await self._now().begin(done)
        parent = await self.where.version(onward_of(done))
        gate.staying = promoted_by(done)
        if not gate.looked:
            await self.stage(parent)  # a swap that a killed loop began is over after this one
        made = await self.collect(done, generations)
        try:
            dataset = await self.build(number)
            job = await self.train(dataset["id"], parent, done)
        except (BadInput, JobError) as error:
            return untaught(made, done, error, live=self.watch is not None)
        candidate = await self.where.register(self.agent.model, job.checkpoint or job.id)
        trained = {
            "dataset": dataset["id"],
            "job": job.id,
            "job_id": job.scheduler_job_id,
            "trained_tokens": job.trained_tokens,
            "trainer_seconds": job.seconds,
            "loss_first": job.loss_first,
            "loss_last": job.loss_last,
            "version": candidate.id,
        }
        return made.model_copy(update=trained | await self._judge(candidate, done, generations))

    # ---- the steps

    async def collect(self, done: list[Generation], last: int) -> Generation:
        """Run the agent on the next generation's tasks; returns the generation's record so far.

        What is stored is not run again. Rollouts of the generations up to `last` that may begin,
        by the bound on staleness, go on meanwhile and afterwards.
        """
        stage = stage_of(self.stages, len(done))
        with self._clock.phase("rollouts"):
            collected = await self._now().collect(done, last)
        return Generation(
            generation=len(done),
            method=stage.method,
            holdout_success=0.0,
            holdout_tasks=0,
            version=onward_of(done),
            promoted=False,
            **collected.told(least_reward(self, stage)),
        )

    async def build(self, number: int) -> dict[str, Any]:
        """The training set. Raises BadInput, of code `empty_dataset` if nothing can be learned."""
        stage, rewards = stage_of(self.stages, number), None
        if self.control == "shuffled-rewards":
            collector = self._now().collector
            seen = [await collector.outcomes(n) for n in window(self, stage, number)]
            rewards = {outcome.run: outcome.reward for outcomes in seen for outcome in outcomes}
        with self._clock.phase("dataset", ""):
            await hold_out(self.where, self.name, self.tasks)
            recipe = recipe_of(self, stage, number, rewards)
            givers = await self._now().givers(number)
            return await self.where.build_dataset(recipe.model_copy(update={"givers": givers}))

    async def train(
        self, dataset: str, parent: ModelVersion, done: Sequence[Generation]
    ) -> JobStatus:
        """Submit the training job, or find it, and wait for its end. Raises JobError."""
        stage = stage_of(self.stages, len(done))
        hyperparameters = hyperparameters_of(self, stage, len(done))

        def report(job: JobStatus) -> None:
            self._clock.report("train", job.step, job.steps, f"job {job.scheduler_job_id}")

        with self._clock.phase("train"):
            job = await self.where.submit_job(
                method=TRAINED_BY[stage.method],  # dpo and kto compare with the parent
                dataset=dataset,
                parent=parent.id,
                hyperparameters=hyperparameters,
                optimizer_from="parent",
            )
            return await self.where.wait_for(job, report)

    async def _judge(
        self, candidate: ModelVersion, done: list[Generation], last: int
    ) -> dict[str, Any]:
        """Prove a candidate; evaluate it, and promote it if it is better; say what goes on."""
        stage, incumbent = stage_of(self.stages, len(done)), promoted_by(done)
        try:
            if not stage.evaluates(len(done), last):
                proof = await self.stage(candidate)
                told = {"probe_max_logprob_diff": proof.max_logprob_diff}
                return told | {"holdout_success": standing_of(done), "onward": candidate.id}
            before = await self.where.version(incumbent)
            verdict = await self._now().decide(candidate, before, len(done))
        except SwapError as error:  # the pool has put back what it held
            note = f"not proven: {error}"
            await self.where.reject(candidate, who=f"loop {self.name}", reason=note)
            return {"note": note, "onward": done[-1].onward}
        if verdict.promoted:
            return verdict.told()
        if stage.parent == "latest" and not verdict.worse:
            return verdict.told() | {"onward": candidate.id}
        await self.stage(before)
        return verdict.told()

    async def evaluate(self, version: ModelVersion, split: Split) -> list[Run]:
        """Run the agent greedily on the tasks that a split's success is told on, once a version."""
        return await self._now().judge.evaluate(version, split)

    async def rest(self) -> None:
        """Cancel what goes on in the background; let the pool serve what the name means."""
        await self._now().stop()
        await self._now().leave(self.agent.model)

    async def is_measured(self, version: ModelVersion, split: Split) -> bool:
        """Whether `evaluate` would find all of a version's runs on record."""
        return await self._now().judge.is_measured(version, split)

    async def stage(self, version: ModelVersion) -> ProbeReport:
        """Load and prove a version. Raises SwapError."""
        with self._clock.phase("swap", version.id):
            return await self._now().gate.stage(version)

    # ---- where things are

    @property
    def where(self) -> Platform:
        """The platform that it runs on."""
        self.platform = self.platform or Platform()
        return self.platform

    def _now(self) -> LoopComponents:
        """The parts that belong to the event loop that runs now."""
        if self._parts is None or self._parts.event_loop is not asyncio.get_running_loop():
            self._parts = LoopComponents.of(self, self._clock)
        return self._parts

    def _why_stopped(self, done: Sequence[Generation]) -> str | None:
        why = why_stopped(done, self.target, self.patience, self.budget)
        return why or ended(self.stages, len(done) - 1)

    async def _promoted(self) -> ModelVersion:
        version = await self.where.promoted(self.agent.model)
        if version is None:
            raise BadInput(
                f"no version of model {self.agent.model!r} is promoted; "
                f"start the platform with `cray-agents up --model DIR --name {self.agent.model}`",
                param="model",
            )
        return version

    async def _measure_test(self, generation: Generation) -> Generation:
        """Measure the version this loop would hand out on tasks that never decided anything."""
        if generation.test_success is not None or not self.tasks.split("test"):
            return generation
        version = await self._promoted()
        runs = await self.evaluate(version, "test")
        measured = {"test_success": success(runs), "test_tasks": len(runs)}
        return generation.model_copy(update={**measured, "test_version": version.id})


async def _next(steps: AsyncGenerator[Generation]) -> Generation:
    return await anext(steps)
