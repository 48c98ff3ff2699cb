"""Prompt search: the candidate of an iteration whose method is Examples or Instructions.

Both try prompts on train tasks, greedily, with the parent's weights. Each trial is a run on record,
with the prompt's hash as its tag; so is what a reflector was asked. A killed search therefore goes
through the same steps again, and asks for nothing twice. What it finds becomes a version of the
model with the parent's weights, and held-out tasks decide on it as on any other. Called by loop.py.
"""

import asyncio
import contextlib
import logging
import os
import random
from collections import defaultdict
from collections.abc import Callable, Coroutine, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass, field
from typing import Any, TypeVar, cast

from cray_agents.agent.agent import Agent
from cray_agents.agent.sessions import without_system
from cray_agents.engines.openai_engine import OpenAIEngine
from cray_agents.errors import BadInput, EngineError, EngineUnavailable, NotFound, SetupError
from cray_agents.loop.collector import Collector
from cray_agents.loop.dataset_recipes import min_reward_for
from cray_agents.loop.methods import Examples, Instructions, PromptMethod
from cray_agents.loop.rollouts import attempts_at, failed_by_infrastructure, shuffled
from cray_agents.loop.settings import LoopSettings
from cray_agents.messages import Message, read_messages
from cray_agents.records import ModelVersion, Prompt, Run, StopReason, Task, digest
from cray_agents.rewards.llm_judge import judged_sections

BATCH = 8  # runs that a reflector reads at a time
ANSWERS = 3  # times that a reflector is asked for instructions, if it answers without any
INSTRUCTIONS = "instructions"  # the name under which gepa changes them

T = TypeVar("T")
Trial = tuple[float, dict[str, Any]]  # a run's score, and what the reflector reads of it
log = logging.getLogger(__name__)


@dataclass
class PromptSearch:
    """The search of iteration `number`, from its parent's prompt. `trials`: ids of its runs."""

    loop: LoopSettings
    collector: Collector
    number: int
    method: PromptMethod
    parent: ModelVersion
    trials: set[str] = field(default_factory=set)

    def __post_init__(self) -> None:
        self._rollouts = self.collector.rollouts
        self._present = self.loop.agent.at(self.parent).prompt
        self._draw = random.Random(f"{self.loop.name}/{self.loop.sampling.seed}/{self.number}")
        self._order = [*self.loop.tasks.split("train")]
        self._draw.shuffle(self._order)

    async def best(self) -> Prompt:
        """The prompt that did best on train tasks.

        Raises BadInput, with the code `empty_dataset` if no run was good enough to be an example,
        or no rewrite better than the present instructions. Raises
        EngineUnavailable from trials and reflector, and SetupError without gepa.
        """
        if isinstance(self.method, Examples):
            return await self._examples(self.method)
        assert isinstance(self.method, Instructions)
        return await self._instructions(self.method)

    async def _tried(self, prompt: Prompt, tasks: Sequence[Task]) -> list[Run]:
        """A greedy run of each task with a prompt: the recorded one, or one carried out now."""
        requests = attempts_at(tasks, f"{self.parent.id}/prompt/{prompt.id}", 1)
        before, clock = len(self.trials), self.collector.clock

        def report(done: int) -> None:
            clock.report("try prompts", before + done, before + len(tasks), prompt.id)

        runs = await self._rollouts.run(
            requests, self.parent, 0.0, report, paired=True, prompt=prompt
        )
        self.trials |= {run.id for run in runs}
        return runs

    # ---- examples

    async def _examples(self, method: Examples) -> Prompt:
        sets = self._sets(await self._good_runs(), method)
        outcomes: dict[str, float] = {}
        tried: list[tuple[Prompt, list[str]]] = []
        refusal = ""
        for chosen in sets:
            examples = [message for task in chosen for message in chosen[task]]
            prompt = self._present.model_copy(update={"examples": examples})
            others = [task for task in self._order if task.id not in chosen] or self._order
            runs = await self._tried(prompt, others[: method.trials])
            if problem := _refused(runs):
                refusal = refusal or problem
                continue
            scores = {r.id: self._score(r) for r in runs if not failed_by_infrastructure(r)}
            outcomes |= scores
            tried.append((prompt, [*scores]))
        if not tried:
            raise BadInput(
                f"iteration {self.number}: the server refuses every input behind {method.count} "
                f"examples: {refusal}. Give fewer, as in Examples(count={max(1, method.count // 2)}"
                "), or serve the model with a longer context",
                param="method",
                code="examples_refused",
            )
        if self.loop.shuffle is not None:
            outcomes = shuffled([*outcomes.items()], f"{self.loop.shuffle}/{self.number}/trials")

        def mean(one: tuple[Prompt, list[str]]) -> float:
            return sum(outcomes[run] for run in one[1]) / max(1, len(one[1]))

        return max(tried, key=mean)[0]

    async def _good_runs(self) -> dict[str, list[Message]]:
        """The messages of the shortest good run at each train task of this iteration."""
        least = min_reward_for(self.loop.data, self.method) or 0.0
        outcomes = await self.collector.outcomes(self.number)
        good = {outcome.run for outcome in outcomes if outcome.reward >= least}
        runs = await self._rollouts.stored("train", iteration=self.number)
        found: dict[str, list[list[Message]]] = defaultdict(list)
        for run in runs:
            if run.id in good and run.task is not None and (own := await self._shown(run)):
                found[run.task.id].append(own)
        if not found:
            raise BadInput(
                f"none of {len(runs)} runs can be an example: one must have a reward of "
                f"{least:g}, and end with an answer",
                code="empty_dataset",
            )
        return {task: min(ones, key=lambda one: len(str(one))) for task, ones in found.items()}

    async def _shown(self, run: Run) -> list[Message]:
        """The messages that a run added to its prompt; none if it cannot be an example."""
        version = await self._rollouts.platform.version(run.model)
        messages = without_system(run.trajectory.messages)
        own = self.loop.agent.at(version).without_examples(messages)
        whole = run.stop_reason is StopReason.completed and run.error is None
        if not whole or "suspect" in run.tags or not own or own[-1]["role"] != "assistant":
            return []
        try:
            return read_messages(own)
        except ValueError:  # such as a tool call that was never answered
            return []

    def _sets(
        self, good: Mapping[str, list[Message]], method: Examples
    ) -> list[dict[str, list[Message]]]:
        names = sorted(good)
        drawn = [
            tuple(self._draw.sample(names, min(method.count, len(names))))
            for _ in range(method.sets)
        ]
        once = {frozenset(names): names for names in drawn}
        return [{name: good[name] for name in names} for names in once.values()]

    # ---- instructions

    async def _instructions(self, method: Instructions) -> Prompt:
        try:
            from gepa.api import optimize
        except ImportError as error:
            problem = "Instructions needs the package gepa: pip install 'cray-agents[prompts]'"
            raise SetupError(problem) from error
        measured = self._order[: min(method.trials, len(self._order) // 2)]
        url, _, model = method.reflector.partition("#")
        outside = "://" in url
        key = os.environ.get("OPENAI_API_KEY") or "none"  # not the platform's own
        engine = (
            OpenAIEngine(url, api_key=key, exact_tokens=False)
            if outside
            else self._rollouts.platform.engine()
        )
        asked = Agent("reflector", model=model or url, engine=engine, recorder=None)
        bridge = Bridge(
            self._scored, lambda prompt: self._rewritten(asked, method.reflector, prompt)
        )
        try:
            found: Any = await bridge.run(
                lambda: optimize(
                    seed_candidate={INSTRUCTIONS: self._present.instructions or ""},
                    trainset=self._order[len(measured) :],
                    valset=measured,
                    adapter=cast(Any, bridge),
                    reflection_lm=bridge.reflect,
                    reflection_minibatch_size=min(BATCH, len(self._order) - len(measured)),
                    perfect_score=self.loop.promotion.high,
                    max_metric_calls=method.budget,
                    stop_callbacks=cast(Any, bridge.ended),
                    logger=bridge,
                    seed=self.number,
                )
            )
        finally:
            if outside:
                await engine.close()
        if found.best_idx == 0:
            raise BadInput(
                f"no rewrite did better at train tasks, in {len(self.trials)} runs",
                code="empty_dataset",
            )
        return self._with(str(found.best_candidate[INSTRUCTIONS]))

    def _with(self, instructions: str) -> Prompt:
        return self._present.model_copy(update={"instructions": instructions})

    async def _scored(self, instructions: str, tasks: Sequence[Task]) -> list[Trial]:
        """What instructions came to at tasks."""
        runs = await self._tried(self._with(instructions), tasks)
        return [(self._score(run), self._told(run)) for run in runs]

    def _told(self, run: Run) -> dict[str, Any]:
        """What a reflector reads of a run: its conversation and rewards, not its task's target."""
        own = without_system(run.trajectory.messages)[len(self._present.examples) :]
        trajectory = run.trajectory.model_copy(update={"messages": own})
        parts = judged_sections(run.model_copy(update={"trajectory": trajectory}), transcript=True)
        rewards = [
            f"{reward.name}: {reward.value:g}" + (f" ({reward.comment})" if reward.comment else "")
            for reward in run.rewards
        ]
        failed = [] if run.error is None else [f"{run.error.type}: {run.error.message}"]
        ended = f"reward {self._score(run):g}", f"it ended as {run.stop_reason}"
        return {
            "Inputs": parts["task"],
            "Generated Outputs": parts["conversation"],
            "Feedback": "; ".join([*ended, *rewards, *failed]),
        }

    def _score(self, run: Run) -> float:
        return self.loop.promotion.low if run.reward is None else run.reward

    async def _rewritten(self, asked: Agent, named: str, prompt: str) -> str:
        """The reflector's answer, also one on record. Raises BadInput if it answers nothing."""
        platform = self._rollouts.platform
        for attempt in range(ANSWERS):
            run: Run | None = None
            run_id = f"reflect_{digest([self.loop.name, self.number, named, prompt, attempt], 24)}"
            with contextlib.suppress(NotFound):
                run = await platform.run(run_id)
            if run is None or not _usable(run):
                run = await asked.run(prompt, run_id=run_id, tags=["reflector"], seed=attempt)
                if run.error is not None and run.error.infrastructure:
                    raise EngineUnavailable(
                        f"the reflector {named} did not answer: {run.error.message}. When that is "
                        "mended, the same command goes on"
                    )
                await platform.record([run])
            if _usable(run):
                return str(run.output)
        why = run.error.message if run is not None and run.error else "its answers are empty"
        raise BadInput(
            f"the reflector {named} gave no instructions, asked {ANSWERS} times (run {run_id}): "
            f"{why}. Another reflector, or fewer trials, may do; the loop's runs are kept",
            param="method",
            code="no_instructions",
        )


def _usable(reflection: Run) -> bool:
    """Tell whether a reflector's answer has any text."""
    said = reflection.output
    return isinstance(said, str) and bool(said.replace("`", "").strip())


def _refused(runs: Sequence[Run]) -> str:
    """Why the server refused all of these runs; "" if it did not."""
    errors = [run.error for run in runs if run.error is not None and not run.calls]
    own = [one.message for one in errors if one.type == EngineError.__name__]
    return own[0] if own and len(own) == len(runs) else ""


class Bridge:
    """The loop as gepa's adapter and reflector: its thread asks, the event loop answers."""

    propose_new_texts = None

    def __init__(
        self,
        score: Callable[[str, Sequence[Task]], Coroutine[Any, Any, list[Trial]]],
        rewrite: Callable[[str], Coroutine[Any, Any, str]],
    ) -> None:
        self._score, self._rewrite = score, rewrite
        self._event_loop = asyncio.get_running_loop()
        self._waiting: Future[Any] | None = None
        self._failure: Exception | None = None  # gepa itself goes on after a failed reflection

    async def run(self, search: Callable[[], T]) -> T:
        """Run gepa in a thread; raise what it was answered with. If cancelled, it ends first."""
        work = asyncio.create_task(asyncio.to_thread(search))
        try:
            found = await asyncio.shield(work)
        except asyncio.CancelledError:
            self._failure = self._failure or RuntimeError("the loop has ended")
            if self._waiting is not None:
                self._waiting.cancel()
            await asyncio.wait({work})
            raise
        if self._failure is not None:
            raise self._failure
        return found

    def ended(self, state: Any) -> bool:
        """Tell gepa to stop: one of its stop_callbacks."""
        return self._failure is not None

    def _answer(self, work: Coroutine[Any, Any, T]) -> T:
        if self._failure is not None:
            work.close()
            raise self._failure
        self._waiting = waiting = asyncio.run_coroutine_threadsafe(work, self._event_loop)
        try:
            return waiting.result()
        except Exception as error:
            self._failure = self._failure or error
            raise

    def evaluate(
        self, batch: list[Task], candidate: dict[str, str], capture_traces: bool = False
    ) -> Any:
        """Scores of instructions at tasks: a method of gepa's GEPAAdapter."""
        from gepa.core.adapter import EvaluationBatch

        done = self._answer(self._score(candidate[INSTRUCTIONS], batch))
        scores, told = [score for score, _ in done], [told for _, told in done]
        return EvaluationBatch(told, scores, told if capture_traces else None)

    def make_reflective_dataset(
        self, candidate: dict[str, str], eval_batch: Any, components_to_update: list[str]
    ) -> dict[str, list[dict[str, Any]]]:
        """What the reflector reads of runs: a method of gepa's GEPAAdapter."""
        return dict.fromkeys(components_to_update, eval_batch.trajectories)

    def reflect(self, prompt: str | list[dict[str, Any]]) -> str:
        """The reflector's answer to gepa's request."""
        return self._answer(self._rewrite(str(prompt)))

    def log(self, message: str) -> None:
        """Note what gepa reports."""
        log.debug("gepa: %s", message)
