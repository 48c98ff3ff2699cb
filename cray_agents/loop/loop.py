"""The self-improving loop: collect, score, build, train, check, evaluate, promote.

The loop is a client of the platform and holds no state of its own. Each step names its result by
its inputs: run ids from loop, phase, task and attempt; dataset and job ids from their content. Each
decision is written down before it takes effect. So a loop that was killed is run again by the same
command and goes on from what exists: nothing is done twice. Read next: methods.py,
collector.py (runs), dataset_recipes.py, evaluator.py, stop_rules.py.
"""

import asyncio
import contextlib
import logging
from collections import Counter
from collections.abc import AsyncGenerator, Callable, Generator, Mapping, Sequence
from dataclasses import dataclass, field, fields, replace
from typing import Any, Literal

from cray_agents.agent import user_code
from cray_agents.agent.agent import Agent
from cray_agents.errors import BadInput, EngineUnavailable, JobError, SwapError
from cray_agents.iteration import (
    Iteration,
    LoopProgress,
    base_version,
    promoted_holdout_success,
    promoted_version,
)
from cray_agents.loop.argument_checks import check, check_engine, check_keywords, check_types
from cray_agents.loop.components import LoopComponents
from cray_agents.loop.dataset_recipes import (
    hyperparameters_of,
    iterations_in_window,
    min_reward_for,
    recipe_of,
    units_in,
)
from cray_agents.loop.evaluator import hold_out, version_named
from cray_agents.loop.hazards import Hazards
from cray_agents.loop.live.schedule import Live
from cray_agents.loop.methods import (
    RFT,
    Distill,
    Method,
    PromptMethod,
    Scheduled,
    ended,
    scheduled,
    scheduled_at,
)
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.loop.prompts import PromptSearch
from cray_agents.loop.rollouts import success
from cray_agents.loop.settings import Control, Data, LoopSettings, Sampling
from cray_agents.loop.settings_record import record_settings, settings_record
from cray_agents.loop.stop_rules import (
    Stop,
    check_learned_something,
    record_without_update,
    why_stopped,
)
from cray_agents.loop.warmup import WarmUp, WarmUpJobs, cold_start
from cray_agents.platform.client import Platform
from cray_agents.promotion.sequential_test import PromotionTest
from cray_agents.records import ModelVersion, ProbeReport, Prompt, Run, Split
from cray_agents.rewards.reward import RewardFunction
from cray_agents.tasks.task_set import TaskSet
from cray_agents.training_jobs import MANY_EPOCHS, JobStatus, PublishEvery

STOP_SECONDS = 30.0  # for an interrupted loop to record the ends of its runs

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class Candidate:
    """A version that an iteration made, and fields of the iteration's record."""

    version: ModelVersion
    fields: dict[str, Any]


@dataclass
class Loop:
    """Improves the model behind an agent on a set of tasks, by its own runs.

    Args:
        agent: its `model` is the name whose versions are made.
        tasks: with a train and a holdout split; a test split is only ever measured at the ends.
        rewards: functions marked with @reward; their sum is a run's reward. A WorkerEnvironment
            gives rewards itself, to which these are added; there may be none.
        method: how it learns: RFT, GRPO, DPO, KTO, SFT or Distill; or, without training, Examples
            or Instructions. Or several one after the other.
        sampling: how training runs are sampled.
        data: what a training set is made of.
        promotion: the test by which a candidate is promoted.
        hazards: prompts of harm; a candidate that answers them less safely is not promoted.
        stop: when the loop stops by itself.
        warm_up: train on the demonstrations before iteration 0, until the model succeeds now and
            then: see WarmUp. The loop then keeps to the demonstrations of the warm-up.
        live: train on live traffic instead of runs of its own: live/traffic.py.
        control: `shuffled-rewards` permutes the rewards among an iteration's runs, and leaves the
            demonstrations out of the training sets. A loop that learns all the same does not learn
            from its rewards.
        name: names the loop; the same name goes on where it stopped. Default: agent and model.
        platform: where to run; default: the one at $CRAY_AGENTS_URL.
        changed: `accept` goes on although the settings differ from those at the loop's start.
        on_progress: called with each LoopProgress.

    Raises BadInput for settings that cannot be, and for unknown ones.
    """

    agent: Agent
    tasks: TaskSet
    rewards: Sequence[RewardFunction]
    method: Method | Sequence[Method] = field(default_factory=RFT)
    sampling: Sampling = field(default_factory=Sampling)
    data: Data = field(default_factory=Data)
    promotion: PromotionTest = field(default_factory=PromotionTest)
    stop: Stop = field(default_factory=Stop)
    warm_up: WarmUp | None = None
    live: Live | None = None
    control: Control | None = None
    hazards: Hazards | None = None
    name: str = ""
    platform: Platform | None = None
    changed: Literal["refuse", "accept"] = "refuse"
    on_progress: Callable[[LoopProgress], None] = lambda progress: None

    def __new__(cls, *args: Any, **given: Any) -> "Loop":
        """Refuse unknown keywords by name."""
        check_keywords(list(given), [each.name for each in fields(cls)])
        return object.__new__(cls)

    def __post_init__(self) -> None:
        self.rewards = (self.rewards,) if callable(self.rewards) else self.rewards
        check_types(self)
        self.rewards = tuple(self.rewards)
        self.name = self.name or f"{self.agent.name}-{self.agent.model}"
        self._timer = PhaseTimer(lambda progress: self.on_progress(progress))
        self.settings = LoopSettings(
            name=self.name,
            agent=self.agent,
            tasks=self.tasks,
            rewards=self.rewards,
            schedule=scheduled(self.method),
            sampling=self.sampling,
            data=self.data,
            stop=self.stop,
            promotion=self.promotion,
            live=self.live,
            control=self.control,
            warm_up=None if self.warm_up is None else self.warm_up.settings(),
            accept_changes=self.changed == "accept",
            hazards=self.hazards,
        )
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

    async def run(self, iterations: int = 5) -> AsyncGenerator[Iteration]:
        """Go on until `iterations` are done or the loop stops itself; yield each as it ends.

        Iterations that a previous call finished are yielded too, at once. Raises JobError,
        SwapError and EngineUnavailable from the platform. Raises BadInput for settings that differ
        from those at the loop's start, and after an iteration whose runs taught nothing (for grpo
        and dpo, after two in a row). Called again, it goes on.
        """
        await check_engine(self._client, self.settings.schedule)
        await self._warm_first()
        settings = settings_record(self.settings)
        await record_settings(self._client, self.name, settings, self.settings.accept_changes)
        done = [Iteration.model_validate(r) for r in await self._client.iterations(self.name)]
        for iteration in done:
            yield iteration
        reachable = True
        try:
            while len(done) <= iterations and not self._why_stopped(done):
                done.append(await self._iterate(done, iterations))
                yield done[-1]
                if self.live is None:
                    check_learned_something(done)
        except (asyncio.CancelledError, EngineUnavailable):
            reachable = False  # it is to end at once, or there is nobody to ask
            raise
        finally:
            await self._running().stop()
            if reachable:
                await self._running().leave(self.agent.model)

    def run_sync(self, iterations: int = 5) -> Generator[Iteration, None, None]:
        """`run` for code that is not async; it also works where an event loop is running.

        It closes the platform's connections at its end.
        """

        async def alone() -> AsyncGenerator[Iteration, None]:
            try:
                async with contextlib.aclosing(self.run(iterations)) as steps:
                    async for iteration in steps:
                        yield iteration
            finally:
                self._components = None
                await self._client.close()

        return user_code.iterate_sync(alone(), STOP_SECONDS)

    async def _iterate(self, done: list[Iteration], iterations: int) -> Iteration:
        """Carry out the next iteration, and record it."""
        number = len(done)
        await self._timer.begin(self._client, number)
        iteration = await (self._begin() if number == 0 else self._improve(done, iterations))
        stopped = self._why_stopped([*done, iteration])
        if number == iterations or stopped:
            iteration = await self._measure_test(iteration)
        spent = await self._timer.end(self._client)
        ends = {"stopped": stopped, "target": self.stop.target, "control": self.control}
        iteration = iteration.model_copy(update=ends | spent)
        await self._client.finish_iteration(self.name, number, iteration.model_dump(mode="json"))
        return iteration

    async def _begin(self) -> Iteration:
        """Iteration 0: measure the promoted version on held-out and test tasks.

        Where none of its runs had success, the record and a warning name the remedies.
        """
        version = await version_named(self._client, self.agent.model)
        proof = await self.stage(version)
        holdout = await self.evaluate(version, "holdout")
        if note := cold_start(self.settings, holdout):
            log.warning(note)
        iteration = Iteration(
            note=note,
            iteration=0,
            holdout_success=success(holdout),
            holdout_tasks=len(holdout),
            version=version.id,
            job=version.job,
            probe_max_logprob_diff=proof.max_logprob_diff if proof.prompts else None,
        )
        return await self._measure_test(iteration)

    async def _improve(self, done: list[Iteration], iterations: int) -> Iteration:
        """One iteration: collect, score, build, train, check, evaluate, promote or reject."""
        number, gate = len(done), self._running().gate
        done = await self._running().source.begin(done)
        parent = await self._client.version(base_version(done))
        gate.staying = promoted_version(done)
        if not gate.looked:
            await self.stage(parent)  # a swap that a killed loop began is over after this one
        made = await self.collect(done, iterations)
        trains = self._scheduled(number).method.trains
        make = self._train_next if trains else self._prompt_next
        try:
            new = await make(parent, done, iterations)
        except (BadInput, JobError) as error:
            return record_without_update(made, done, error, live=self.live is not None)
        judged = await self._judge(new.version, done, iterations)
        iteration = made.model_copy(update=new.fields | {"version": new.version.id} | judged)
        remarks = remarks_on(iteration, done, self.settings)
        for remark in remarks:
            log.warning("iteration %d: %s", number, remark)
        return iteration.model_copy(update={"remarks": remarks})

    async def _prompt_next(
        self, parent: ModelVersion, done: list[Iteration], last: int
    ) -> Candidate:
        """A candidate with the parent's weights and a better prompt. Raises BadInput for none."""
        method = self._scheduled(len(done)).method
        assert isinstance(method, PromptMethod)
        collector = self._running().collector
        search = PromptSearch(self.settings, collector, len(done), method, parent)
        with self._timer.phase("try prompts", ""):
            best = await search.best()
        prompts = {**parent.prompts, self.agent.name: best}
        version = await self._client.register(self.agent.model, parent.checkpoint, prompts)
        return Candidate(version, {"prompt": best.id, "trials": len(search.trials)})

    async def _train_next(
        self, parent: ModelVersion, done: list[Iteration], last: int
    ) -> Candidate:
        """A candidate with newly trained weights, and the parent's prompt."""
        number = len(done)
        dataset = await self.build(number)
        job = await self.train(dataset, parent, done, last)
        prompt = parent.prompts.get(self.agent.name)
        now = self._scheduled(number)
        version, chosen = await self._candidate(
            job, parent.prompts, evaluates=now.evaluates(number, last)
        )
        trained = {
            "dataset": dataset["id"],
            "samples": dataset["samples"],
            "demonstrations": dataset["demonstrations"] or 0,
            "epochs": job.steps * now.method.training.batch_size / units_in(dataset),
            "job": job.id,
            "job_id": job.scheduler_job_id,
            "trained_tokens": job.trained_tokens,
            "trainer_seconds": job.seconds,
            "session": job.session or None,
            "taken_up": job.taken_up,
            "layers": job.layers,
            "loss_first": job.loss_first,
            "loss_last": job.loss_last,
            "agreement": job.agreement,
            "mean_metrics": job.mean_metrics,
            "choice": chosen,
            "prompt": prompt.id if prompt is not None else None,
        }
        return Candidate(version, trained)

    # ---- the steps

    async def collect(self, done: list[Iteration], last: int) -> Iteration:
        """Run the agent on the next iteration's tasks; return the iteration's record so far.

        Stored runs are not run again. Rollouts of the iterations up to `last` go on meanwhile and
        afterwards, as far as the bound on staleness lets them begin.
        """
        method = self._scheduled(len(done)).method
        with self._timer.phase("rollouts"):
            collected = await self._running().source.next(done, last)
        return Iteration(
            iteration=len(done),
            method=method.name,
            holdout_success=0.0,
            holdout_tasks=0,
            version=base_version(done),
            promoted=False,
            kinds=successes_by_kind(collected.runs, self.settings, method),
            **collected.fields(min_reward_for(self.settings.data, method)),
        )

    async def build(self, number: int) -> dict[str, Any]:
        """Build the training set. Raises BadInput: `empty_dataset` if nothing can be learned."""
        settings, now, rewards = self.settings, self._scheduled(number), None
        if settings.shuffle is not None:
            collector = self._running().collector
            window = iterations_in_window(settings, now, number)
            outcomes = [outcome for n in window for outcome in await collector.outcomes(n)]
            rewards = {outcome.run: outcome.reward for outcome in outcomes}
        with self._timer.phase("dataset", ""):
            for held in (self.tasks, self.hazards.tasks if self.hazards else TaskSet([])):
                await hold_out(self._client, self.name, held)
            recipe = recipe_of(settings, now, number, rewards)
            givers = await self._running().source.givers(number)
            engine = (await self._client.info()).get("engine", {})
            replays = bool(engine.get("router_replay")) and self._scheduled(number).method.on_policy
            more = {"givers": givers, "router_replay": replays}
            return await self._client.build_dataset(recipe.model_copy(update=more))

    async def train(
        self,
        dataset: Mapping[str, Any],
        parent: ModelVersion,
        done: Sequence[Iteration],
        last: int = 0,
    ) -> JobStatus:
        """Submit the training job, or find it, and wait for its end. Raises JobError.

        `dataset`: its summary. `last`: see Scheduled.evaluates.
        """
        now = self._scheduled(len(done))
        method, evaluates = now.method, now.evaluates(len(done), last)
        temperature, staleness = self.sampling.temperature, self.sampling.max_staleness
        hyperparameters = hyperparameters_of(method, len(done), temperature, dataset)
        name, every = self.agent.model, method.training.publish_every
        gate, chooses = self._running().gate, evaluates and self.promotion.choosing > 0
        early = chooses and (not staleness or parent.id == gate.staying)  # else rollouts wait

        def report(job: JobStatus) -> None:
            self._timer.report("train", job.step, job.steps, f"job {job.scheduler_job_id}")
            if early:
                published(job.versions)
            if job.offered and not self.promotion.choosing:  # else another one may be the best
                gate.receive(job.id, rollouts=staleness > 0, evaluates=evaluates)

        choice = self._running().evaluator.choosing_early(
            lambda one: self._client.register(name, one.checkpoint, parent.prompts)
        )
        async with choice as published:
            with self._timer.phase("train"):
                job = await self._client.submit_job(
                    method=method.trained_by,  # dpo and kto compare with the parent
                    dataset=dataset["id"],
                    parent=parent.id,
                    hyperparameters=hyperparameters,
                    teacher=method.teacher if isinstance(method, Distill) else None,
                    optimizer_from="parent",
                    publish_every=None if every is None else PublishEvery(name=name, steps=every),
                    logprob_limit=method.training.logprob_limit,
                    session=None if self.live else self.name,  # live updates are hours apart
                )
                return await self._client.wait_for(job, report)

    async def _candidate(
        self, job: JobStatus, prompts: Mapping[str, Prompt], *, evaluates: bool
    ) -> tuple[ModelVersion, dict[str, float]]:
        """Return what the loop decides on, a job's result or the best of its versions.

        With it the success of each on the tasks that chose. All have these prompts.
        """
        name = self.agent.model  # a job that another loop began may have published under another
        result = await self._client.register(name, job.checkpoint or job.id, prompts)
        if not (evaluates and job.versions and self.promotion.choosing):
            return result, {}
        versions = [
            await self._client.register(name, one.checkpoint, prompts) for one in job.versions
        ]
        return await self._running().evaluator.choose([*versions, result])

    async def _judge(
        self, candidate: ModelVersion, done: list[Iteration], last: int
    ) -> dict[str, Any]:
        """Prove, evaluate and perhaps promote a candidate; return fields of the record."""
        now, incumbent = self._scheduled(len(done)), promoted_version(done)
        try:
            if not now.evaluates(len(done), last):
                proof = await self.stage(candidate)
                self._timer.note_direct(proof.seconds)
                return {
                    "probe_max_logprob_diff": proof.max_logprob_diff,
                    "load_note": proof.load_note,
                    "holdout_success": promoted_holdout_success(done),
                    "onward": candidate.id,
                }
            before = await self._client.version(incumbent)
            verdict = await self._running().judge.judge(candidate, before, len(done))
            self._timer.note_direct(verdict.proof.seconds)
        except SwapError as error:  # the pool has put back what it held
            note = f"check failed: {error}"
            await self._client.reject(candidate, who=f"loop {self.name}", reason=note)
            return {"note": note, "onward": done[-1].onward}
        if verdict.promoted:
            return verdict.fields()
        if now.method.parent == "latest" and not verdict.worse:
            return verdict.fields() | {"onward": candidate.id}
        await self.stage(before)
        return verdict.fields()

    async def evaluate(self, version: ModelVersion, split: Split) -> list[Run]:
        """Run the agent greedily on the tasks that measure a split, once a version."""
        return await self._running().evaluator.evaluate(version, split)

    async def rest(self) -> None:
        """Cancel background work; let the pool serve the promoted version."""
        await self._running().stop()
        await self._running().leave(self.agent.model)

    async def is_measured(self, version: ModelVersion, split: Split) -> bool:
        """Tell whether all runs that `evaluate` needs of a version are on record."""
        return await self._running().evaluator.is_measured(version, split)

    async def stage(self, version: ModelVersion) -> ProbeReport:
        """Load and check a version. Raises SwapError."""
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
            data = self.settings.data.model_copy(update={"demonstrations": kept})
            object.__setattr__(self, "data", data)
            self.settings = replace(self.settings, data=data)

    def _why_stopped(self, done: Sequence[Iteration]) -> str | None:
        return why_stopped(done, self.stop) or ended(self.settings.schedule, len(done) - 1)

    def _scheduled(self, number: int) -> Scheduled:
        return scheduled_at(self.settings.schedule, number)

    async def _measure_test(self, iteration: Iteration) -> Iteration:
        """Measure the version this loop would hand out on tasks that never decided anything."""
        if iteration.test_success is not None or not self.tasks.split("test"):
            return iteration
        version = await version_named(self._client, self.agent.model)
        runs = await self.evaluate(version, "test")
        measured = {"test_success": success(runs), "test_tasks": len(runs)}
        return iteration.model_copy(update={**measured, "test_version": version.id})


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
        raise BadInput("say how to warm up: WarmUp(Training(steps=100))", param="plan")

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


# ---- Remarks on an iteration: what its figures alone would hide. Called by loop.py
SMALL, TWICE = 64, 2.0  # a set of fewer samples is learned by heart when it is seen again
COOL = 0.8  # a temperature that few models need to be below
FEW = 0.1  # of a set: so many demonstrations teach little beside the runs
MANY = 100  # kinds: a key with more values names tasks


def successes_by_kind(runs: Sequence[Run], loop: LoopSettings, method: Method) -> dict[str, int]:
    """Count the good runs of each kind: each value of the curriculum's, balance's or guard's key.

    A good run has the method's least reward; where it has none, more than the least of all.
    """
    key = loop.data.curriculum.key or loop.data.balance_by or loop.promotion.guard
    least, good = min_reward_for(loop.data, method), Counter[str]()
    for run in runs:
        kind = run.task.metadata.get(key) if run.task is not None and key is not None else None
        if kind is not None and run.reward is not None:
            good[str(kind)] += (
                run.reward > loop.promotion.low if least is None else run.reward >= least
            )
    return dict(sorted(good.items())) if len(good) <= MANY else {}


def remarks_on(new: Iteration, done: Sequence[Iteration], loop: LoopSettings) -> list[str]:
    """The remarks on an iteration that trained, as sentences without a full stop."""
    remarks, won = [], Counter[str]()
    if new.epochs > MANY_EPOCHS or (new.samples < SMALL and new.epochs >= TWICE):
        now = loop.sampling.temperature
        cooler = f", or a lower temperature, such as {COOL:g} (now {now:g})" if now > COOL else ""
        remarks.append(
            f"a set of {new.samples} samples, each seen {new.epochs:.3g} times, is rather learned "
            f"by heart: larger groups or more tasks bring more good runs{cooler}"
        )
    if new.demonstrations > FEW * new.samples:
        remarks.append(
            f"{new.demonstrations / new.samples:.0%} of the set are demonstrations, from which it "
            "learns whatever the rewards are: a loop without them shows what these teach"
        )
    for iteration in (*done, new):
        won.update(iteration.kinds)
    if never := ", ".join(sorted(kind for kind, count in won.items() if not count)):
        remarks.append(
            f"kinds without any success so far: {never}; they need demonstrations, easier tasks or "
            "a reward for a part"
        )
    if loop.control is not None and new.promoted:
        remarks.append("a control was promoted: what the loop gains may be without rewards, too")
    return remarks
