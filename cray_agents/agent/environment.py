"""Environment: the world that a run acts on, made anew for each run.

    class Number(Environment):
        def reset(self, task, context):
            self.secret = task.metadata["secret"]

        @tool
        def guess(self, number: int, context: RunContext) -> str:
            "Guess the number."
            context.reward(float(number == self.secret))
            return "yes" if number == self.secret else "higher" if ... else "lower"

    agent = Agent(name="guesser", environment=Number)

Called by conversation.py.
"""

import functools
import logging
import re
import types
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, replace
from typing import Any

from cray_agents.agent import hooks, user_code
from cray_agents.agent.run_context import RunContext
from cray_agents.agent.tool import Tool, as_tool
from cray_agents.errors import BadInput, HookError
from cray_agents.messages import with_parts
from cray_agents.records import Task

Answer = str | Awaitable[str | None] | None  # the return value of a sync or async method

WORKER_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}")
TEARDOWN = 30.0  # seconds that the end of an environment may take

log = logging.getLogger(__name__)


class Environment:
    """Base class of environments. Methods marked with @tool are the run's tools and share `self`.

    Tool calls are carried out one after another, in the model's order. All methods may be sync or
    async. Sync methods run in a thread. After a timeout such a thread goes on beside `teardown`, so
    slow methods are better async. Keep `__init__` cheap and let `reset` do the work: instances are
    also made to look at their tools.
    """

    def reset(self, task: Task, context: RunContext) -> Answer:
        """Begin a run. Return an observation, which the model sees below the input, or None.

        A failure counts as the infrastructure's: the run has an error and no reward.
        """
        return None

    def reply(self, answer: str, context: RunContext) -> Answer:
        """Reply to an answer as the user would; None ends the run with the answer."""
        return None

    def teardown(self) -> Awaitable[None] | None:
        """Clean up after any end: also after a failed reset, a timeout or a cancellation."""
        return None


@dataclass(frozen=True)
class WorkerEnvironment:
    """An environment of another framework, whose runs processes of its own carry out.

    A Loop asks for each run, and `cray-agents env-worker --name NAME` takes it: see
    docs/environments.md. The agent's model, temperature, max_tokens and sampling go with the run;
    its `timeout` (default: 600 seconds) ends it. Instructions, tools and turns are the framework's.
    """

    name: str

    def __post_init__(self) -> None:
        if not isinstance(self.name, str) or not WORKER_NAME.fullmatch(self.name):
            raise BadInput(
                f"WorkerEnvironment({self.name!r}): a name has letters, digits and '._-'",
                param="environment",
            )


EnvironmentMaker = Callable[[], Environment] | WorkerEnvironment


def declared_tools(make: EnvironmentMaker | None) -> list[Tool]:
    """The tools of an environment, for their schemas; each run has its own (`begin`).

    Raises BadInput if `make` makes no environment.
    """
    if make is None or isinstance(make, WorkerEnvironment):
        return []
    if not callable(make):
        raise BadInput(f"{make!r} is not an Environment: give a class of one", param="environment")
    kind: Any = make if isinstance(make, type) else type(make())
    if not issubclass(kind, Environment):
        raise BadInput(f"{kind.__name__} is not an Environment", param="environment")
    return [tool for _, tool in _tools(kind)]


async def begin(make: Callable[[], Environment], context: RunContext) -> dict[str, Tool]:
    """Make and reset a run's environment, show its observation to the model, return its tools.

    Raises HookError.
    """
    try:
        made: Any = make()
    except Exception as error:
        name = getattr(make, "__name__", "environment")
        raise HookError(f"making {name} failed: {type(error).__name__}: {error}") from error
    context.environment = made
    task = context.task or Task(input=context.input)
    if seen := await _text(made, "reset", task, context):
        first = context.messages[-1]
        content: Any = [*with_parts(first["content"]), {"type": "text", "text": seen}]
        if isinstance(first["content"], str):
            content = "\n\n".join(filter(None, [first["content"], seen]))
        context.messages[-1] = {**first, "content": content}
    return {
        tool.name: replace(tool, function=getattr(made, attribute))
        for attribute, tool in _tools(made.__class__)
    }


async def reply(answer: str, context: RunContext) -> str | None:
    """Return the reply of the run's environment, if any, to an answer. Raises HookError."""
    if context.environment is None:
        return None
    return await _text(context.environment, "reply", answer, context)


async def tear_down(context: RunContext) -> None:
    """End the run's environment, if any. A failure is logged: it takes nothing from the run."""
    if context.environment is None:
        return
    try:
        await user_code.call(context.environment.teardown, TEARDOWN)
    except user_code.UserCodeTimeout:
        log.error("run %s: teardown took more than %g s and was left", context.run_id, TEARDOWN)
    except Exception:
        log.exception("run %s: the teardown of its environment failed", context.run_id)


@functools.cache
def _tools(kind: type[Environment]) -> list[tuple[str, Tool]]:
    """(attribute, tool) for all methods marked with @tool."""
    attributes = {name: getattr(kind, name) for name in dir(kind)}
    return [
        (name, as_tool(types.MethodType(function, kind)))  # a schema needs no instance
        for name, function in attributes.items()
        if hasattr(function, "__tool_options__")
    ]


async def _text(environment: Environment, method: str, *arguments: Any) -> str | None:
    what = f"{type(environment).__name__}.{method}"
    text = await hooks.call(what, getattr(environment, method), *arguments)
    if text is not None and not isinstance(text, str):
        raise HookError(f"{what} returned {text!r}: give a str or None")
    return text
