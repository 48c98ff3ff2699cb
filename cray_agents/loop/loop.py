"""The self-improving loop: collect, score, build, train, prove, evaluate, promote.

The loop is a client of the platform and holds no state of its own. Each step names its result by
its inputs: run ids from loop, phase, task and attempt; dataset and job ids from their content. Each
decision is written down before it takes effect. So a loop that was killed is run again by the same
command and goes on from what exists: nothing is done twice. Read next: stages.py (methods),
collector.py (runs), dataset_recipes.py, evaluator.py, stop_rules.py.
"""

import asyncio
import contextlib
import logging
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal

from cray_agents.agent import user_code
from cray_agents.agent.agent import Agent
from cray_agents.errors import BadInput, EngineUnavailable, JobError, SwapError
from cray_agents.generation import (
    Generation,
    LoopProgress,
    base_version,
    promoted_holdout_success,
    promoted_version,
)
from cray_agents.loop.argument_checks import check, check_engine, check_kinds, check_types
from cray_agents.loop.components import LoopComponents
from cray_agents.loop.curriculum import Curriculum
from cray_agents.loop.dataset_recipes import (
    generations_in_window,
    hyperparameters_of,
    min_reward_for,
    recipe_of,
    units_in,
)
from cray_agents.loop.holdout_journal import hold_out
from cray_agents.loop.live.schedule import Watch
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.remarks import remarks_on, successes_by_kind
from cray_agents.loop.rollouts import success
from cray_agents.loop.settings import (
    Asynchrony,
    Control,
    Demonstration,
    LoopSettings,
    Sampling,
    Stopping,
    TrainingData,
)
from cray_agents.loop.settings_record import record_settings, settings_record
from cray_agents.loop.stages import TRAINED_BY, Method, Stage, ended, planned, stage_of
from cray_agents.loop.stop_rules import (
    Budget,
    check_learned_something,
    record_without_update,
    why_stopped,
)
from cray_agents.loop.warmup import WarmUp, WarmUpJobs, cold_start
from cray_agents.platform.client import Platform
from cray_agents.promotion.sequential_test import PromotionTest
from cray_agents.records import ModelVersion, ProbeReport, Run, Split
from cray_agents.rewards.reward import RewardFunction
from cray_agents.tasks.task_set import TaskSet
from cray_agents.training_jobs import Hyperparameters, JobStatus, as_hyperparameters

STOP_SECONDS = 30.0  # for an interrupted loop to record the ends of its runs

log = logging.getLogger(__name__)


@dataclass
class Loop:
    """Improves the model behind an agent on a set of tasks, by its own runs.

    Args:
        agent: its `model` is the name whose versions are made.
        tasks: with a train and a holdout split; a test split is only ever measured at the ends.
        rewards: functions marked with @reward; their sum is a run's reward. A WorkerEnvironment
            gives rewards itself, to which these are added; there may be none.
        method: `rft`, `grpo`, `dpo`, `kto`, `sft` or `distill` (see Stage), or a sequence of
            Stages.
        attempts: runs per task and generation.
        tasks_per_generation: how many train tasks a generation draws (see Curriculum).
        name: names the loop; the same name goes on where it stopped. Default: agent and model.
        hyperparameters: of each training job; with `lora` each job trains its parent's adapters on.
            A dict may leave `steps` out, as the default does: each job then sees its set EPOCHS
            times (dataset_recipes.py).
        demonstrations: conversations with their metadata. sft trains on them alone; rft keeps them
            in every training set.
        warm_up: train on the demonstrations before generation 0, until the model succeeds now and
            then: see WarmUp. The loop then keeps to the demonstrations of the warm-up.
        balance_by, balance_power, discount: see DatasetRecipe.
        history: how many generations of runs stay in the training set; None: all. grpo and distill
            take their own generation's alone.
        max_uses: in how many training sets a run may be; None: in any number.
        min_reward: the least reward of a good run. None: 1 for rft and kto, any for dpo.
        promotion: the test by which a candidate is promoted.
        evaluate_every: see Stage.
        resample: for grpo and dpo: the share of a generation's runs that may be added to replace
            tasks whose attempts were all rewarded alike.
        staleness: generation n samples from the version decided at generation n - 1 - staleness,
            while earlier jobs train (arXiv 2410.18252). grpo and distill correct for it: see
            Policy.importance_cap. With one replica, versions take turns on it.
        close_at: the share of a generation's runs with which it may close (rollouts.py has the
            rule). Late runs are stored when they end, and enter the next training set.
        target: stop when held-out success reaches it.
        patience: stop after so many evaluated candidates in a row of which none was promoted.
        budget: stop when it is used up.
        concurrency: runs at a time.
        temperature: of the training runs; held-out and test runs are greedy.
        seeded: each training run has a sampling seed made of its id: a killed loop ends like an
            undisturbed one, as far as a sample does not depend on the rest of its batch. The
            engine then draws for each request by itself, which costs time in large batches on a
            GPU.
        watch: train on live traffic instead of runs of its own: live/traffic.py.
        changed: `accept` goes on although the settings differ from those at the loop's start.
        platform: where to run; default: the one at $CRAY_AGENTS_URL.
        teacher: of distill: see Stage.
        logprob_limit: how far trainer and engine may lie apart before a job's first step, in nats:
            see JobSpec. None: by the rounding of both.
        control: `shuffled-rewards` permutes the rewards among a generation's runs, and leaves the
            demonstrations out of the training sets. A loop that learns all the same does not learn
            from its rewards.
    """

    agent: Agent
    tasks: TaskSet
    rewards: Sequence[RewardFunction]
    method: Method | Sequence[Stage] = "rft"
    attempts: int = 1
    tasks_per_generation: int = 512
    name: str = ""
    hyperparameters: Hyperparameters = field(default_factory=lambda: as_hyperparameters({}))
    demonstrations: Sequence[Demonstration] = ()
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
    teacher: str | None = None
    logprob_limit: float | None = None

    def __post_init__(self) -> None:
        self.rewards = (self.rewards,) if callable(self.rewards) else self.rewards
        check_types(self.agent, self.tasks, self.rewards, self.demonstrations)
        check_kinds(self)
        self.rewards = tuple(self.rewards)
        self.hyperparameters = as_hyperparameters(self.hyperparameters)
        self.name = self.name or f"{self.agent.name}-{self.agent.model}"
        # on live traffic others decide how many runs a task has
        attempts = self.attempts if self.watch is None else max(2, self.attempts)
        default = Stage("rft", None, self.hyperparameters, attempts,
                        self.tasks_per_generation, self.evaluate_every,
                        teacher=self.teacher)  # fmt: skip
        self.stages = planned(self.method, default)
        self._timer = PhaseTimer(lambda progress: self.on_progress(progress))
        self.settings = LoopSettings(
            self.name,
            self.agent,
            self.tasks,
            self.rewards,
            tuple(self.stages),
            Sampling(self.curriculum, self.resample, self.concurrency, self.temperature,
                     self.seed, self.seeded, self.control),
            Asynchrony(self.staleness, self.close_at),
            TrainingData(self.demonstrations, self.history, self.max_uses, self.min_reward,
                         self.balance_by, self.balance_power, self.discount),
            Stopping(self.target, self.patience, self.budget),
            self.promotion,
            self.watch,
            None if self.warm_up is None else self.warm_up.settings(),
            self.changed == "accept",
        )  # fmt: skip
        check(self.settings)
        self._components: LoopComponents | None = None

    def __setattr__(self, name: str, value: Any) -> None:
        """Refuse to change a setting of a loop that is made: it would count in a part of it."""
        made = "_components" in vars(self)
        if made and name in self.__dataclass_fields__ and name not in ("platform", "on_progress"):
            raise BadInput(
                f"{name} is a setting of a loop that is made already: "
                f"dataclasses.replace(loop, {name}=...) makes another",
                param=name,
            )
        object.__setattr__(self, name, value)

    def run(self, generations: int = 5) -> Generator[Generation, None, None]:
        """Go on until `generations` are done or the loop stops itself; yield each as it ends.

        It also works where an event loop is running, as in a notebook.

        Generations that a previous call finished are yielded too, at once. Raises JobError,
        SwapError and EngineUnavailable from the platform. Raises BadInput for settings that differ
        from those at the loop's start, and after a generation whose runs taught nothing (for grpo
        and dpo, after two in a row). Called again, it goes on.
        """

        async def alone() -> AsyncGenerator[Generation, None]:
            try:
                async with contextlib.aclosing(self.steps(generations)) as steps:
                    async for generation in steps:
                        yield generation
            finally:
                self._components = None
                await self._client.close()

        return user_code.iterate_sync(alone(), STOP_SECONDS)

    async def steps(self, generations: int = 5) -> AsyncGenerator[Generation]:
        """`run` for those who have an event loop of their own."""
        await check_engine(self._client, self.stages, self.logprob_limit)
        await self._warm_first()
        settings = settings_record(self.settings)
        await record_settings(self._client, self.name, settings, self.settings.accept_changes)
        done = [Generation.model_validate(r) for r in await self._client.generations(self.name)]
        for generation in done:
            yield generation
        reachable = True
        try:
            while len(done) <= generations and not self._why_stopped(done):
                done.append(await self._generate(done, generations))
                yield done[-1]
                if self.watch is None:
                    check_learned_something(done)
        except (asyncio.CancelledError, EngineUnavailable):
            reachable = False  # it is to end at once, or there is nobody to ask
            raise
        finally:
            await self._running().stop()
            if reachable:
                await self._running().leave(self.agent.model)

    async def _generate(self, done: list[Generation], generations: int) -> Generation:
        """Make the next generation, and record it."""
        number = len(done)
        await self._timer.begin(self._client, number)
        generation = await (self._begin() if number == 0 else self._improve(done, generations))
        stopped = self._why_stopped([*done, generation])
        if number == generations or stopped:
            generation = await self._measure_test(generation)
        spent = await self._timer.end(self._client)
        generation = generation.model_copy(update={"stopped": stopped, **spent})
        record = generation.model_dump(mode="json")
        await self._client.finish_generation(self.name, number, record)
        return generation

    async def _begin(self) -> Generation:
        """Generation 0: measure the promoted version on held-out and test tasks.

        Where none of its runs had success, the record and a warning name the remedies.
        """
        version = await self._promoted()
        proof = await self.stage(version)
        holdout = await self.evaluate(version, "holdout")
        if note := cold_start(self.settings, holdout):
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
        number, gate = len(done), self._running().gate
        done = await self._running().begin(done)
        parent = await self._client.version(base_version(done))
        gate.staying = promoted_version(done)
        if not gate.looked:
            await self.stage(parent)  # a swap that a killed loop began is over after this one
        made = await self.collect(done, generations)
        try:
            dataset = await self.build(number)
            job = await self.train(dataset, parent, done, generations)
        except (BadInput, JobError) as error:
            return record_without_update(made, done, error, live=self.settings.live)
        candidate = await self._client.register(self.agent.model, job.checkpoint or job.id)
        trained = {
            "dataset": dataset["id"],
            "samples": dataset["samples"],
            "demonstrations": dataset["demonstrations"] or 0,
            "epochs": job.steps
            * stage_of(self.stages, number).hyperparameters.batch_size
            / units_in(dataset),
            "job": job.id,
            "job_id": job.scheduler_job_id,
            "trained_tokens": job.trained_tokens,
            "trainer_seconds": job.seconds,
            "session": job.session or None,
            "taken_up": job.taken_up,
            "layers": job.layers,
            "loss_first": job.loss_first,
            "loss_last": job.loss_last,
            "version": candidate.id,
        }
        judged = await self._judge(candidate, done, generations)
        generation = made.model_copy(update=trained | judged)
        remarks = remarks_on(generation, done, self.settings)
        for remark in remarks:
            log.warning("generation %d: %s", number, remark)
        return generation.model_copy(update={"remarks": remarks})

    # ---- the steps

    async def collect(self, done: list[Generation], last: int) -> Generation:
        """Run the agent on the next generation's tasks; return the generation's record so far.

        Stored runs are not run again. Rollouts of the generations up to `last` go on meanwhile and
        afterwards, as far as the bound on staleness lets them begin.
        """
        stage = stage_of(self.stages, len(done))
        with self._timer.phase("rollouts"):
            collected = await self._running().collect(done, last)
        return Generation(
            generation=len(done),
            method=stage.method,
            holdout_success=0.0,
            holdout_tasks=0,
            version=base_version(done),
            promoted=False,
            kinds=successes_by_kind(collected.runs, self.settings, stage),
            **collected.fields(min_reward_for(self.settings.data, stage)),
        )

    async def build(self, number: int) -> dict[str, Any]:
        """Build the training set. Raises BadInput: `empty_dataset` if nothing can be learned."""
        settings, stage, rewards = self.settings, stage_of(self.stages, number), None
        if settings.sampling.shuffle is not None:
            collector = self._running().collector
            window = generations_in_window(
                settings.data, settings.asynchrony, stage, number, live=settings.live
            )
            outcomes = [outcome for n in window for outcome in await collector.outcomes(n)]
            rewards = {outcome.run: outcome.reward for outcome in outcomes}
        with self._timer.phase("dataset", ""):
            await hold_out(self._client, self.name, self.tasks)
            recipe = recipe_of(settings, stage, number, rewards)
            givers = await self._running().givers(number)
            return await self._client.build_dataset(recipe.model_copy(update={"givers": givers}))

    async def train(
        self,
        dataset: Mapping[str, Any],
        parent: ModelVersion,
        done: Sequence[Generation],
        last: int = 0,
    ) -> JobStatus:
        """Submit the training job, or find it, and wait for its end. Raises JobError.

        `dataset`: its summary. `last`: see Stage.evaluates.
        """
        stage = stage_of(self.stages, len(done))
        evaluates = stage.evaluates(len(done), last)
        hyperparameters = hyperparameters_of(stage, len(done), self.temperature, dataset)

        def report(job: JobStatus) -> None:
            self._timer.report("train", job.step, job.steps, f"job {job.scheduler_job_id}")
            if job.offered:
                gate = self._running().gate
                gate.receive(job.id, rollouts=self.staleness > 0, evaluates=evaluates)

        with self._timer.phase("train"):
            job = await self._client.submit_job(
                method=TRAINED_BY[stage.method],  # dpo and kto compare with the parent
                dataset=dataset["id"],
                parent=parent.id,
                hyperparameters=hyperparameters,
                teacher=stage.teacher,
                optimizer_from="parent",
                logprob_limit=self.logprob_limit,
                session=None if self.settings.live else self.name,  # live updates are hours apart
            )
            return await self._client.wait_for(job, report)

    async def _judge(
        self, candidate: ModelVersion, done: list[Generation], last: int
    ) -> dict[str, Any]:
        """Prove, evaluate and perhaps promote a candidate; return fields of the record."""
        stage, incumbent = stage_of(self.stages, len(done)), promoted_version(done)
        try:
            if not stage.evaluates(len(done), last):
                proof = await self.stage(candidate)
                self._timer.note_direct(proof.seconds)
                return {
                    "probe_max_logprob_diff": proof.max_logprob_diff,
                    "load_note": proof.load_note,
                    "holdout_success": promoted_holdout_success(done),
                    "onward": candidate.id,
                }
            before = await self._client.version(incumbent)
            verdict = await self._running().decide(candidate, before, len(done))
            self._timer.note_direct(verdict.proof.seconds)
        except SwapError as error:  # the pool has put back what it held
            note = f"not proven: {error}"
            await self._client.reject(candidate, who=f"loop {self.name}", reason=note)
            return {"note": note, "onward": done[-1].onward}
        if verdict.promoted:
            return verdict.fields()
        if stage.parent == "latest" and not verdict.worse:
            return verdict.fields() | {"onward": candidate.id}
        await self.stage(before)
        return verdict.fields()

    async def evaluate(self, version: ModelVersion, split: Split) -> list[Run]:
        """Run the agent greedily on the tasks that measure a split, once a version."""
        return await self._running().judge.evaluate(version, split)

    async def rest(self) -> None:
        """Cancel background work; let the pool serve the promoted version."""
        await self._running().stop()
        await self._running().leave(self.agent.model)

    async def is_measured(self, version: ModelVersion, split: Split) -> bool:
        """Tell whether all runs that `evaluate` needs of a version are on record."""
        return await self._running().judge.is_measured(version, split)

    async def stage(self, version: ModelVersion) -> ProbeReport:
        """Load and prove a version. Raises SwapError."""
        with self._timer.phase("swap", version.id):
            return await self._running().gate.stage(version)

    # ---- the platform, and what runs on it

    @property
    def _client(self) -> Platform:
        self.platform = self.platform or Platform()
        return self.platform

    def _running(self) -> LoopComponents:
        """The components that belong to the event loop that runs now."""
        made = self._components
        if made is None or made.event_loop is not asyncio.get_running_loop():
            made = LoopComponents.of(self.settings, self._client, self._timer)
            self._components = made
        return made

    async def _warm_first(self) -> None:
        """Warm up if the loop asks for it; keep to the demonstrations of any warm-up."""
        warm = False
        try:
            self._keep_demonstrations(await self._warm_up_jobs().run_first(self.warm_up))
            warm = True
        finally:
            if not warm:
                await self.rest()

    def _warm_up_jobs(self) -> WarmUpJobs:
        def report(progress: LoopProgress) -> None:
            self.on_progress(progress)

        return WarmUpJobs(self._client, self.settings, self._measure_holdout, report)

    async def _measure_holdout(self, version: ModelVersion) -> float:
        if not await self.is_measured(version, "holdout"):
            await self.stage(version)
        return success(await self.evaluate(version, "holdout"))

    def _keep_demonstrations(self, count: int | None) -> None:
        if count is not None:
            kept = self.settings.data.demonstrations[:count]
            object.__setattr__(self, "demonstrations", kept)
            data = replace(self.settings.data, demonstrations=kept)
            self.settings = replace(self.settings, data=data)

    def _why_stopped(self, done: Sequence[Generation]) -> str | None:
        stopping = self.settings.stopping
        why = why_stopped(done, stopping.target, stopping.patience, stopping.budget)
        return why or ended(self.stages, len(done) - 1)

    async def _promoted(self) -> ModelVersion:
        version = await self._client.promoted(self.agent.model)
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


def warm_up(loop: Loop, plan: WarmUp | None = None) -> ModelVersion:
    """Warm up the loop's model, from its first version; return the version that came of it.

    A loop with `warm_up=` does this by itself when it is run. `plan`: default is that one. Promotes
    the version unless a later one is promoted already, and leaves the loop with the demonstrations
    that were shown. Where no version lies in the band because success leaps over it, the nearest
    version is taken, and a warning says so. Raises JobError when success stays below the band, and
    BadInput when the loop has begun without this warm-up.
    """
    plan = plan or loop.warm_up
    if plan is None:
        raise BadInput("say how to warm up: WarmUp(Hyperparameters(steps=100))", param="plan")

    async def alone() -> ModelVersion:
        try:
            version, keep = await loop._warm_up_jobs().run(plan)
            loop._keep_demonstrations(keep)
            return version
        finally:
            await loop.rest()
            loop._components = None
            await loop._client.close()

    return user_code.wait_for(alone(), STOP_SECONDS)
