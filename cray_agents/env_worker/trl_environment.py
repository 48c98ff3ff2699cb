"""TRL adapter: classes for the `environment_factory` of TRL's GRPOTrainer, unchanged.

`--env FILE.py:CLASS` names a factory, or a dict of factories of which a row's `environment` takes
one. Options: `rewards=FILE.py:FUNCTION,...` (TRL's reward functions; `get_reward` is taken without
being named), `dataset=FILE.py:NAME` (rows, for --tasks), `max_turns` (100).

The rules are those of trl/trainer/grpo_trainer.py: `reset(**row)` may return a text that is added
to the last user message; public methods are the tools, with schemas from their docstrings; a
failing tool is an answer {"error": ...} to the model; rewards are functions of prompts, completions
and environments, and None is no reward.
"""

import asyncio
import inspect
import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from transformers.utils import get_json_schema

from cray_agents.env_worker.adapters import (
    EnvironmentFailed,
    Rollout,
    RolloutOutcome,
    UsageError,
    check_options,
    check_tools,
    load_object,
)
from cray_agents.env_worker.chat import ModelConversation

NO_TOOLS = ("reset", "get_reward")


class TrlAdapter:
    """Environments of TRL."""

    def __init__(
        self,
        factories: Mapping[Any, Callable[[], Any]],
        rewards: Sequence[Callable[..., Any]],
        rows: Iterable[Mapping[str, Any]],
        max_turns: int,
    ) -> None:
        self._factories, self._rewards, self._rows = factories, rewards, rows
        self._max_turns = max_turns
        self._made: dict[Any, Any] = {}  # as TRL: made once, reset often

    def tasks(self) -> Iterable[dict[str, Any]]:
        """Yield a task for each row of the dataset; the row is its metadata."""
        for row in self._rows:
            columns = json.loads(json.dumps(dict(row)))
            yield {
                "input": columns.get("prompt") or "",
                "metadata": columns,
                "identity": sorted(columns),
            }

    def run(self, rollout: Rollout) -> RolloutOutcome:
        """Carry out a run."""
        row = rollout.metadata
        if rollout.task.get("target") is not None:
            row.setdefault("target", rollout.task["target"])
        name = row.get("environment") if None not in self._factories else None
        if name not in self._factories:
            known = ", ".join(map(str, self._factories))
            raise EnvironmentFailed(f"the row's environment is {name!r}; there are {known}")
        environment = self._made.get(name) or self._factories[name]()
        self._made[name] = environment
        passed = {key: value for key, value in row.items() if name is None or key != "environment"}
        passed.setdefault("prompt", rollout.messages)
        asked = passed["prompt"]
        text = isinstance(asked, str)
        prompt = [{"role": "user", "content": asked}] if text else [dict(one) for one in asked]
        observation = environment.reset(**passed)
        if observation is not None:
            prompt[-1] = {**prompt[-1], "content": prompt[-1]["content"] + observation}
        tools = methods_of(environment)
        talk = ModelConversation(rollout, prompt, schemas(tools))
        stop = talk.go_on(lambda call: _called(tools, call), self._max_turns)
        completion = talk.messages[len(prompt) :]
        rewards = self._scored(row, prompt, completion, environment)
        return RolloutOutcome(rewards, talk.output, stop_reason=stop)

    def _scored(
        self, row: Mapping[str, Any], prompt: Any, completion: Any, environment: Any
    ) -> dict[str, float]:
        values: dict[str, Any] = {}
        columns = {key: [value] for key, value in row.items() if key != "prompt"}
        for function in self._rewards:
            sides = {"prompts": [prompt], "completions": [completion]}
            given = _awaited(function(**sides, environments=[environment], **columns))
            if len(given) != 1:
                raise EnvironmentFailed(
                    f"reward {function.__name__} returned {len(given)} values for one completion"
                )
            values[function.__name__] = given[0]
        if hasattr(environment, "get_reward"):
            values[type(environment).__name__] = _awaited(environment.get_reward())
        return {name: value for name, value in values.items() if value is not None}


def make(environment: str, options: Mapping[str, str]) -> TrlAdapter:
    """Return the adapter. Raises UsageError."""
    check_options("trl", options, ("rewards", "dataset", "max_turns"))
    factory = load_object(environment)
    factories = factory if isinstance(factory, Mapping) else {None: factory}
    if not all(callable(one) and hasattr(one, "reset") for one in factories.values()):
        raise UsageError(f"{environment}: give a class with `reset`, or a dict of such classes")
    rewards = [load_object(name) for name in options.get("rewards", "").split(",") if name]
    names = [one.__name__ for one in rewards]
    names += [type_.__name__ for type_ in factories.values() if hasattr(type_, "get_reward")]
    if twice := {name for name in names if names.count(name) > 1}:
        raise UsageError(f"two rewards are called {min(twice)!r}: give each a name of its own")
    if not rewards and not any(hasattr(one, "get_reward") for one in factories.values()):
        raise UsageError(
            f"{environment} has no get_reward: name reward functions, "
            "--option rewards=FILE.py:FUNCTION"
        )
    rows = load_object(options["dataset"]) if "dataset" in options else ()
    return TrlAdapter(factories, rewards, rows, int(options.get("max_turns", "100")))


def methods_of(environment: Any) -> dict[str, Callable[..., Any]]:
    """Return an environment's tools: its public methods but `reset` and `get_reward`."""
    functions = inspect.getmembers(type(environment), predicate=inspect.isfunction)
    return {
        name: getattr(environment, name)
        for name, _ in functions
        if name not in NO_TOOLS and not name.startswith("_")
    }


def schemas(tools: Mapping[str, Callable[..., Any]]) -> list[dict[str, Any]]:
    """Return the schemas of tools, from their docstrings. Raises EnvironmentFailed."""
    check_tools(len(tools))
    return [get_json_schema(tool) for tool in tools.values()]


def _called(tools: Mapping[str, Callable[..., Any]], call: Mapping[str, Any]) -> Any:
    """Return what the model reads of a tool call."""
    name = call["function"]["name"]
    try:
        if name not in tools:
            raise ValueError(f"Tool {name} not found.")  # TRL's words
        return _awaited(tools[name](**json.loads(call["function"]["arguments"] or "{}")))
    except Exception as error:  # noqa: BLE001 - as TRL does
        return {"error": str(error)}


def _awaited(value: Any) -> Any:
    async def result() -> Any:
        return await value

    return asyncio.run(result()) if inspect.isawaitable(value) else value
