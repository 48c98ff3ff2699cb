"""Inspect adapter: tasks of Inspect AI with their solvers, tools, sandboxes and scorers, unchanged.

`--env FILE.py:TASK` or `package.module:TASK` names a function with @task, or a Task. Options:
`scores=a,b` takes these scores as rewards (default: all of them); all others are arguments of the
task. A run is an evaluation of one sample for one epoch. Its scores are the rewards: C is 1, P is
0.5, I and N are 0, and a score that is a dict gives a reward for each key.
"""

import json
import tempfile
from collections.abc import Iterable, Mapping
from typing import Any

from inspect_ai import Task, eval  # noqa: A004 - the framework's name
from inspect_ai.log import EvalLog, EvalSample
from inspect_ai.model import get_model, modelapi
from inspect_ai.model._providers.openai_compatible import OpenAICompatibleAPI
from inspect_ai.scorer import value_to_float

from cray_agents.env_worker.adapters import (
    EnvironmentFailed,
    Rollout,
    RolloutOutcome,
    UsageError,
    check_observation,
    check_tools,
    json_or_text,
    load_object,
)
from cray_agents.env_worker.chat import ServerFailed

SERVICE = "cray"  # Inspect's name for the model's server
SERVER_WORDS = ("APIConnectionError", "APITimeoutError", "InternalServerError", "RateLimitError")
CONFIG = ("temperature", "top_p", "top_k", "seed", "max_tokens", "stop_seqs", "presence_penalty",
          "frequency_penalty")  # fmt: skip
WORDS = {"c", "i", "p", "n", "yes", "no", "true", "false"}
LIMITS = {"token": "max_tokens", "context": "max_tokens", "message": "max_turns",
          "turn": "max_turns", "time": "timeout", "working": "timeout"}  # fmt: skip


class BoundedModel(OpenAICompatibleAPI):
    """Inspect's client of the platform, which sends no more than adapters.py allows.

    exceeded: what was too much, also where a solver went on.
    """

    def __init__(self, model_name: str, **given: Any) -> None:
        super().__init__(model_name, service=SERVICE, **given)
        self.exceeded = ""

    async def generate(  # theirs; asked by position and by name
        self,
        input: Any,  # noqa: A002
        tools: Any,
        tool_choice: Any,
        config: Any,
    ) -> Any:
        """Ask the model. Raises EnvironmentFailed for too many tools or too long a message."""
        try:
            check_tools(len(tools))
            for message in input:
                content = message.content
                if not isinstance(content, str):
                    content = [part.model_dump() for part in content]
                check_observation(content, f"a message of the {message.role} has")
        except EnvironmentFailed as error:
            self.exceeded = str(error)
            raise
        return await super().generate(input, tools, tool_choice, config)


@modelapi(name=SERVICE)
def cray() -> type[BoundedModel]:
    """Return the class, by which Inspect knows the name SERVICE."""
    return BoundedModel


class InspectAdapter:
    """A task of Inspect."""

    def __init__(self, task: Task, scores: list[str]) -> None:
        self._task, self._scores = task, scores
        self._ids: dict[str, int | str] = {}  # by their text; Inspect counts from 1
        for place, sample in enumerate(task.dataset, 1):
            name = place if sample.id is None else sample.id
            self._ids[str(name)] = name

    def tasks(self) -> Iterable[dict[str, Any]]:
        """Yield a task for each sample; `metadata.sample` is its id."""
        for name, sample in zip(self._ids, self._task.dataset, strict=True):
            text = sample.input
            if not isinstance(text, str):
                text = json.dumps([message.model_dump(exclude_none=True) for message in text])
            yield {
                "input": text,
                "target": sample.target,
                "metadata": {"sample": name},
                "identity": ["sample"],
            }

    def run(self, rollout: Rollout) -> RolloutOutcome:
        """Carry out a run."""
        name = str(rollout.metadata.get("sample"))
        if name not in self._ids:
            raise EnvironmentFailed(f"the task has no sample {name!r}")
        model = get_model(
            f"{SERVICE}/{rollout.model}",
            memoize=False,
            base_url=rollout.base_url,
            api_key=rollout.api_key,
        )
        config: Any = {key: value for key, value in rollout.sampling.items() if key in CONFIG}
        with tempfile.TemporaryDirectory(prefix="env-worker-") as folder:
            logs = eval(
                self._task,
                model=model,
                sample_id=[self._ids[name]],
                epochs=1,
                log_dir=folder,
                display="none",
                fail_on_error=False,
                log_realtime=False,
                **config,
            )
            if isinstance(model.api, BoundedModel) and model.api.exceeded:
                raise EnvironmentFailed(model.api.exceeded)
            sample = _sample_of(logs)  # it may be read from the log only now
            limit = LIMITS.get(sample.limit.type, "max_turns") if sample.limit else "completed"
            output = sample.output.completion or None
            return RolloutOutcome(self._rewards(sample), output, stop_reason=limit)

    def _rewards(self, sample: EvalSample) -> dict[str, float]:
        """Return the scores as numbers. Raises EnvironmentFailed for one that is none."""
        scores = sample.scores or {}
        if missing := [name for name in self._scores if name not in scores]:
            known = ", ".join(scores) or "none"
            raise EnvironmentFailed(f"the sample has no score {missing[0]!r}; there is {known}")
        rewards: dict[str, float] = {}
        for name in self._scores or scores:
            value = scores[name].value
            numbers = value if isinstance(value, Mapping) else {"": value}
            for key, part in numbers.items():
                rewards[f"{name}.{key}" if key else name] = _number(name, part)
        return rewards


def make(environment: str, options: Mapping[str, str]) -> InspectAdapter:
    """Return the adapter. Raises UsageError."""
    made = load_object(environment)
    arguments = {key: json_or_text(value) for key, value in options.items() if key != "scores"}
    if not isinstance(made, Task):
        if not callable(made):
            raise UsageError(f"{environment} is no task of Inspect: give a function with @task")
        made = made(**arguments)
    if not isinstance(made, Task):
        raise UsageError(f"{environment} returned {type(made).__name__}: must be a Task")
    return InspectAdapter(made, [name for name in options.get("scores", "").split(",") if name])


def _sample_of(logs: list[EvalLog]) -> EvalSample:
    """Return the sample of an evaluation. Raises EnvironmentFailed, ServerFailed."""
    log = logs[0]
    samples = log.samples or []
    failure = samples[0].error if samples else None
    failure = failure or log.error
    if failure is not None or not samples:
        message = failure.message if failure is not None else f"the evaluation ended: {log.status}"
        trace = failure.traceback if failure is not None else ""
        if any(word in trace for word in SERVER_WORDS):
            raise ServerFailed(message)
        raise EnvironmentFailed(message)
    return samples[0]


def _number(name: str, value: Any) -> float:
    if isinstance(value, str):
        try:
            return float(value)
        except ValueError:
            if value.lower() not in WORDS:
                raise EnvironmentFailed(f"score {name} is {value!r}: no number") from None
    if not isinstance(value, str | int | float | bool):
        raise EnvironmentFailed(f"score {name} is a {type(value).__name__}: no number")
    return float(value_to_float()(value))
