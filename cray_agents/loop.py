"""The self-improving loop: collect, score, build, train, prove, evaluate, promote.

A client of the platform (platform.py): it holds no state of its own. What every step makes has a
name derived from the step's inputs (run ids from loop, phase, task and attempt; dataset and job ids
from their content), so a loop that was killed is run again by the same command and goes on from
what exists; nothing is done twice. Read next: agent.py, curriculum.py.
"""

import asyncio
import time
from collections.abc import AsyncGenerator, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Literal

from cray_agents.agent import Agent
from cray_agents.curriculum import Curriculum
from cray_agents.errors import BadInput, SwapError
from cray_agents.generation import Generation, Progress
from cray_agents.platform import Platform
from cray_agents.recipes import DatasetRecipe
from cray_agents.records import Message, ModelVersion, Run, Split
from cray_agents.rewards import RewardFunction
from cray_agents.rollouts import Rollouts, Wanted, accepted, shuffled, success
from cray_agents.tasks import TaskSet
from cray_agents.training import Hyperparameters, JobStatus

Control = Literal["shuffled-rewards"]


@dataclass
class Loop:
    """Improves the model behind an agent on a set of tasks, by its own successful runs.

    Args:
        agent: its `model` is the name whose versions are made.
        tasks: with a train and a holdout split; a test split is only ever measured at the ends.
        rewards: functions marked with @reward; their sum is a run's reward.
        method: `rft`, rejection-sampling fine-tuning: train on the runs with reward >= min_reward.
        attempts: runs per task and generation.
        tasks_per_generation: how many train tasks a generation draws (see Curriculum).
        name: names the loop; the same name goes on where it stopped. Default: agent and model.
        hyperparameters: of each training job.
        demonstrations: conversations kept in every training set, with their metadata.
        balance_by, balance_power: how groups of tasks weigh in training (see DatasetRecipe).
        history: how many generations of runs stay in the training set; None: all.
        max_uses: in how many training sets a run may be; None: in any number.
        target: stop when held-out success reaches it.
        patience: stop after so many generations in a row of which none was promoted.
        concurrency: runs at a time.
        temperature: of the training runs; held-out and test runs are greedy.
        platform: where to run; default: the one at $CRAY_AGENTS_URL.
        control: `shuffled-rewards` permutes the rewards among a generation's runs, to show
            that it is the rewards that teach.
    """

    agent: Agent
    tasks: TaskSet
    rewards: Sequence[RewardFunction]
    method: str = "rft"
    attempts: int = 1
    tasks_per_generation: int = 512
    name: str = ""
    hyperparameters: Hyperparameters = field(default_factory=lambda: Hyperparameters(steps=100))
    demonstrations: Sequence[tuple[list[Message], dict[str, Any]]] = ()
    history: int | None = None
    max_uses: int | None = None
    min_reward: float = 1.0
    balance_by: str | None = None
    balance_power: float = 0.0
    curriculum: Curriculum = field(default_factory=Curriculum)
    target: float | None = None
    patience: int | None = None
    concurrency: int = 64
    temperature: float = 1.0
    seed: int = 0
    control: Control | None = None
    platform: Platform | None = None
    on_progress: Callable[[Progress], None] = lambda progress: None

    def __post_init__(self) -> None:
        if self.method != "rft":
            raise BadInput(f"method {self.method!r} is not known; valid: 'rft'", param="method")
        if not self.rewards:
            raise BadInput("a loop needs at least one reward function", param="rewards")
        for split in ("train", "holdout"):
            if not self.tasks.split(split):
                raise BadInput(f"the task set has no {split} tasks", param="tasks")
        self.name = self.name or f"{self.agent.name}-{self.agent.model}"
        self._generation = 0
        self._seconds: dict[str, float] = {}

    def run(self, generations: int = 5) -> Iterator[Generation]:
        """Go on until `generations` are done or the target is reached; yields each as it ends.

        Generations that a previous call finished are yielded too, at once. Raises what the
        platform raises: JobError, SwapError, EngineUnavailable.
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
                runner.run(self._platform.close())

    async def steps(self, generations: int = 5) -> AsyncGenerator[Generation]:
        """`run` for those who have an event loop of their own."""
        platform = self._platform
        done = [Generation(**record) for record in await platform.generations(self.name)]
        for generation in done:
            yield generation
        number = len(done)
        while number <= generations and not self._finished(done):
            self._generation, self._seconds = number, {}
            generation = await (self._begin() if number == 0 else self._improve(done))
            if number == generations or self._finished([*done, generation]):
                generation = await self._measure_test(generation)
            generation = generation.model_copy(update={"seconds": dict(self._seconds)})
            await platform.finish_generation(self.name, number, generation.model_dump(mode="json"))
            done.append(generation)
            yield generation
            number += 1

    def _finished(self, done: Sequence[Generation]) -> bool:
        """Whether the target is reached, or nothing has been promoted for too long."""
        if done and self.target is not None and done[-1].holdout_success >= self.target:
            return True
        stalled = [not generation.promoted for generation in done[-(self.patience or 0) :]]
        return self.patience is not None and len(stalled) == self.patience and all(stalled)

    async def _begin(self) -> Generation:
        """Generation 0: the promoted version as it is, measured on held-out and test tasks."""
        version = await self._incumbent()
        proof = await self._stage(version)
        holdout = await self.evaluate(version, "holdout")
        generation = Generation(
            generation=0,
            holdout_success=success(holdout),
            holdout_tasks=len(holdout),
            version=version.id,
            job=version.job,
            probe_max_logprob_diff=proof.max_logprob_diff if proof.prompts else None,
        )
        return await self._measure_test(generation)

    async def _improve(self, done: list[Generation]) -> Generation:
        """One generation: collect, score, build, train, prove, evaluate, promote or reject."""
        number, incumbent = len(done), await self._incumbent_of(done)
        best = max(g.holdout_success for g in done if g.promoted)
        await self._stage(incumbent)
        runs = await self.collect(number, incumbent)
        dataset = await self.build(number)
        job = await self.train(dataset["id"], incumbent)
        candidate = await self._platform.register(self.agent.model, job.checkpoint or job.id)
        verdict = await self._judge(candidate, incumbent, best)
        return Generation(
            generation=number,
            runs=len(runs),
            accepted_runs=accepted(runs, self.min_reward),
            failed_runs=sum(run.reward is None for run in runs),
            trained_tokens=job.trained_tokens,
            loss_first=job.loss_first,
            loss_last=job.loss_last,
            version=candidate.id,
            job_id=job.scheduler_job_id,
            job=job.id,
            dataset=dataset["id"],
            **verdict,
        )

    async def _judge(
        self, candidate: ModelVersion, incumbent: ModelVersion, best: float
    ) -> dict[str, Any]:
        """Prove a candidate, evaluate it, promote it if it is better; else go back."""
        try:
            proof = await self._stage(candidate)
        except SwapError as error:  # the pool has put the incumbent back
            note = f"not proven: {error}"
            return {"promoted": False, "note": note, "holdout_success": 0.0, "holdout_tasks": 0}
        runs = await self.evaluate(candidate, "holdout")
        reached = success(runs)
        if reached > best:
            with self._phase("promote"):
                reason = f"held-out {reached:.3f} > {best:.3f} on {len(runs)} tasks"
                await self._platform.promote(candidate, who=f"loop {self.name}", reason=reason)
        else:
            await self._stage(incumbent)
        return {
            "promoted": reached > best,
            "note": "" if reached > best else f"rejected: not above {best:.3f}",
            "holdout_success": reached,
            "holdout_tasks": len(runs),
            "probe_max_logprob_diff": proof.max_logprob_diff,
        }

    async def collect(self, number: int, version: ModelVersion) -> list[Run]:
        """Run the agent on this generation's train tasks; what is stored is not run again."""
        earlier = [await self._train_runs(n) for n in range(1, number)]
        tasks = self.curriculum.choose(
            self.tasks.split("train"),
            earlier,
            self.tasks_per_generation,
            f"{self.name}/{self.seed}/{number}",
        )
        wanted = [
            Wanted(task, f"g{number}", attempt, number)
            for task in tasks
            for attempt in range(self.attempts)
        ]
        return await self._run("rollouts", wanted, version, self.temperature)

    async def is_measured(self, version: ModelVersion, split: Split) -> bool:
        """Whether `evaluate` would find all of a version's runs on record."""
        runs = await self._rollouts.stored(split, version=version)
        return {task.id for task in self.tasks.split(split)} <= {
            run.task.id for run in runs if run.task and run.reward is not None
        }

    async def evaluate(self, version: ModelVersion, split: Split) -> list[Run]:
        """Run the agent greedily on a held-out split, once per version."""
        wanted = [Wanted(task, f"{version.id}/{split}") for task in self.tasks.split(split)]
        return await self._run(f"evaluate {split}", wanted, version, 0.0)

    async def build(self, number: int) -> dict[str, Any]:
        """The training set: what succeeded so far, and the demonstrations."""
        first = 1 if self.history is None else max(1, number - self.history + 1)
        generations = list(range(first, number + 1))
        rewards: dict[str, float] | None = None
        if self.control == "shuffled-rewards":
            rewards = dict[str, float]()
            for earlier in generations:
                runs = await self._train_runs(earlier)
                rewards |= shuffled(runs, f"{self.seed}/{earlier}")
        with self._phase("dataset"):
            self._report("dataset")
            return await self._platform.build_dataset(
                DatasetRecipe(
                    loop=self.name,
                    generations=generations,
                    step=number,
                    max_uses=self.max_uses,
                    min_reward=self.min_reward,
                    balance_by=self.balance_by,
                    balance_power=self.balance_power,
                    demonstrations=[messages for messages, _ in self.demonstrations],
                    demonstrations_metadata=[metadata for _, metadata in self.demonstrations],
                    tools=self.agent.tool_schemas,
                    tokenizer=self.agent.model,
                    rewards=rewards,
                )
            )

    async def train(self, dataset: str, parent: ModelVersion) -> JobStatus:
        """Submit the training job, or find it, and wait for its end. Raises JobError."""
        order = {"seed": self.hyperparameters.seed + self._generation}  # else all jobs draw alike
        with self._phase("train"):
            job = await self._platform.submit_job(
                dataset=dataset,
                parent=parent.id,
                hyperparameters=self.hyperparameters.model_copy(update=order),
                optimizer_from=parent.job,
            )
            return await self._platform.wait_for(
                job,
                lambda job: self._report(
                    "train", job.step, job.steps, f"job {job.scheduler_job_id}"
                ),
            )

    # ---- where things are, and what is shown

    @property
    def _platform(self) -> Platform:
        if self.platform is None:
            self.platform = Platform()
        return self.platform

    @property
    def _rollouts(self) -> Rollouts:
        return Rollouts(self._platform, self.agent, self.name, self.rewards, self.concurrency)

    async def _train_runs(self, generation: int) -> list[Run]:
        return await self._rollouts.stored("train", generation=generation)

    async def _run(
        self, phase: str, wanted: list[Wanted], version: ModelVersion, temperature: float
    ) -> list[Run]:
        with self._phase(phase):
            return await self._rollouts.run(
                wanted, version, temperature, lambda n: self._report(phase, n, len(wanted))
            )

    async def _incumbent(self) -> ModelVersion:
        version = await self._platform.promoted(self.agent.model)
        if version is None:
            raise BadInput(
                f"no version of model {self.agent.model!r} is promoted; "
                f"start the platform with `cray-agents up --model DIR --name {self.agent.model}`",
                param="model",
            )
        return version

    async def _incumbent_of(self, done: list[Generation]) -> ModelVersion:
        """The version the last promotion of this loop made; not what a crash left behind it."""
        last = next(g.version for g in reversed(done) if g.promoted)
        for version in await self._platform.versions(self.agent.model):
            if f"{version['name']}@{version['number']}" == last:
                return ModelVersion.model_validate(version)
        raise BadInput(f"version {last} of loop {self.name} is gone from the registry")

    async def _stage(self, version: ModelVersion) -> Any:
        with self._phase("swap"):
            self._report("swap", note=version.id)
            return await self._platform.stage(version)

    async def _measure_test(self, generation: Generation) -> Generation:
        """Measure the version this loop would hand out on tasks that never decided anything."""
        if generation.test_success is not None or not self.tasks.split("test"):
            return generation
        version = await self._incumbent()
        await self._stage(version)
        runs = await self.evaluate(version, "test")
        return generation.model_copy(
            update={
                "test_success": success(runs),
                "test_tasks": len(runs),
                "test_version": version.id,
            }
        )

    def _report(self, phase: str, done: int = 0, total: int = 0, note: str = "") -> None:
        self.on_progress(Progress(self._generation, phase, done, total, note))

    @contextmanager
    def _phase(self, name: str) -> Iterator[None]:
        begun = time.monotonic()
        try:
            yield
        finally:
            self._seconds[name] = self._seconds.get(name, 0.0) + time.monotonic() - begun


async def _next(steps: AsyncGenerator[Generation]) -> Generation:
    return await anext(steps)
