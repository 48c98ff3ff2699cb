"""TRL class: an Environment of ours as TRL's GRPOTrainer takes one.

    trainer = GRPOTrainer(..., environment_factory=as_trl(Number))

The other way round, TRL's classes in our loops, is env_worker/trl_environment.py.
"""

import inspect
from collections.abc import Callable, Mapping
from typing import Any

from cray_agents.agent import user_code
from cray_agents.agent.environment import Environment, begin, declared_tools, tear_down
from cray_agents.agent.run_context import RunContext
from cray_agents.agent.tool import Tool, model_text, perform
from cray_agents.errors import BadInput
from cray_agents.exact_json import dump_json
from cray_agents.records import Task, new_id

RESERVED = ("reset", "get_reward")


def as_trl(environment: type[Environment]) -> type:
    """Return a class for TRL's `environment_factory`: reset, a method for each tool, get_reward.

    A dataset's columns become the Task: `target`, and all but `prompt` as metadata. The reward is
    the sum of what the environment gave by `context.reward`. A failing tool tells the model why.
    Raises BadInput for a tool that TRL would not take for one.
    """
    if not (isinstance(environment, type) and issubclass(environment, Environment)):
        raise BadInput(f"{environment!r} is no class of an Environment", param="environment")
    methods: dict[str, Any] = {
        "__doc__": environment.__doc__,
        "__init__": _set_up,
        "_make": environment,
        "reset": _reset,
        "get_reward": _get_reward,
    }
    for tool in declared_tools(environment):
        if tool.name in RESERVED or tool.name.startswith("_") or not tool.name.isidentifier():
            raise BadInput(
                f"tool {tool.name!r}: TRL has no tool of this name; rename it", param="environment"
            )
        methods[tool.name] = _method(tool)
    return type(environment.__name__, (), methods)


def _set_up(self: Any) -> None:
    self._context, self._tools = None, {}


def _reset(self: Any, **row: Any) -> str | None:
    """Begin an episode on a row of the dataset; return the observation."""
    if self._context is not None:
        user_code.wait_for(tear_down(self._context))
    metadata = {key: value for key, value in row.items() if key not in ("prompt", "target")}
    text = _last_text(row.get("prompt"))
    task = Task(input=text, target=row.get("target"), metadata=metadata)
    first = {"role": "user", "content": ""}
    self._context = RunContext(new_id("trl"), "trl", text, task, messages=[first])
    self._tools = user_code.wait_for(begin(self._make, self._context))
    seen = self._context.messages[-1]["content"]
    return f"\n\n{seen}" if seen else None


def _get_reward(self: Any) -> float:
    return float(sum(reward.value for reward in self._context.rewards))


def _method(tool: Tool) -> Callable[..., str]:
    """Return a method with the tool's signature and docstring, from which TRL makes a schema."""

    def method(self: Any, **arguments: Any) -> str:
        self._context.turn += 1
        function = {"name": tool.name, "arguments": dump_json(arguments).decode()}
        requested = {"id": new_id("call"), "function": function}
        return model_text(user_code.wait_for(perform(self._tools, requested, self._context)))

    plain = getattr(tool.function, "__func__", tool.function)
    signature = inspect.signature(plain)
    kept = [p for name, p in signature.parameters.items() if name != tool.context_parameter]
    method.__name__, method.__doc__ = tool.name, plain.__doc__
    names = {parameter.name for parameter in kept}
    hints = inspect.get_annotations(plain, eval_str=True)
    method.__annotations__ = {n: hint for n, hint in hints.items() if n in names} | {"return": str}
    resolved = [p.replace(annotation=hints.get(p.name, p.annotation)) for p in kept]
    method.__dict__["__signature__"] = signature.replace(parameters=resolved, return_annotation=str)
    return method


def _last_text(prompt: Any) -> str:
    if isinstance(prompt, list) and prompt and isinstance(prompt[-1], Mapping):
        prompt = prompt[-1].get("content")
    return prompt if isinstance(prompt, str) else ""
