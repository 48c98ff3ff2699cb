"""Hooks: functions of the author, called around the steps of a run.

    def no_deletes(call: ToolCall, context: RunContext) -> str | None:
        return "deleting needs a person" if "delete" in call.name else None

    agent = Agent(..., hooks=[Hooks(before_tool=no_deletes)])

Called by conversation.py.
"""

import functools
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic

from cray_agents.agent import user_code
from cray_agents.agent.run_context import Deps, RunContext
from cray_agents.errors import HookError
from cray_agents.records import ModelCall, Run, ToolCall

Request = dict[str, Any]


@dataclass(frozen=True)
class Hooks(Generic[Deps]):
    """Functions, sync (they run in a thread) or async; all get the run's context last.

    An exception in one ends the run with a HookError that names it.

    Args:
        before_run: called when a run begins, its environment reset.
        after_run: gets the run as it ended, before it is recorded and its environment torn down;
            rewards that it gives to the context are the run's too.
        before_model: gets a request in OpenAI's shape; returns the one to send instead, or None.
        after_model: gets the model call as it is recorded.
        before_tool: gets a call that has no result yet; a str that it returns refuses the call,
            and is told to the model.
        after_tool: gets the call with its result or error.
    """

    before_run: Callable[[RunContext[Deps]], object] | None = None
    after_run: Callable[[Run, RunContext[Deps]], object] | None = None
    before_model: (
        Callable[[Request, RunContext[Deps]], Request | Awaitable[Request | None] | None] | None
    ) = None
    after_model: Callable[[ModelCall, RunContext[Deps]], object] | None = None
    before_tool: (
        Callable[[ToolCall, RunContext[Deps]], str | Awaitable[str | None] | None] | None
    ) = None
    after_tool: Callable[[ToolCall, RunContext[Deps]], object] | None = None


async def call(what: str, function: Callable[..., Any], *arguments: Any) -> Any:
    """Call an author's function. Raises HookError, which names it by `what`."""
    try:
        return await user_code.call(functools.partial(function, *arguments), None)
    except Exception as error:
        raise HookError(f"{what} failed: {type(error).__name__}: {error}") from error


async def observed(hooks: Sequence[Hooks], moment: str, *arguments: Any) -> None:
    """Call all hooks of a moment, such as `after_model`, in order. Raises HookError."""
    for hook in hooks:
        if function := getattr(hook, moment):
            await call(_name(moment, function), function, *arguments)


async def changed(hooks: Sequence[Hooks], request: Request, context: RunContext) -> Request:
    """Pass a request through all before_model hooks. Raises HookError."""
    for hook in hooks:
        if function := hook.before_model:
            name = _name("before_model", function)
            request = await call(name, function, request, context) or request
            if not isinstance(request, dict):
                raise HookError(f"{name} returned a {type(request).__name__}: give a dict or None")
    return request


async def refused(hooks: Sequence[Hooks], requested: ToolCall, context: RunContext) -> str | None:
    """The reason why a before_tool hook refuses a call; None: none does. Raises HookError."""
    for hook in hooks:
        if function := hook.before_tool:
            name = _name("before_tool", function)
            reason = await call(name, function, requested, context)
            if reason is not None and not isinstance(reason, str):
                raise HookError(f"{name} returned {reason!r}: give the reason as a str, or None")
            if reason is not None:
                return reason
    return None


def _name(moment: str, function: Callable[..., Any]) -> str:
    return f"the hook {moment} ({getattr(function, '__name__', type(function).__name__)})"
