"""Persona: who speaks in a run. A handoff switches it; limits and environment stay.

Made by agent.py from an Agent, kept by progress.py.
"""

import inspect
from collections.abc import Awaitable, Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cray_agents.agent import hooks
from cray_agents.agent.hooks import Hooks
from cray_agents.agent.output_types import OutputReader
from cray_agents.agent.run_context import RunContext
from cray_agents.agent.tool import Tool
from cray_agents.engines.missed_tool_calls import ServerCapabilities
from cray_agents.errors import BadInput, HookError
from cray_agents.ports import ChatEngine
from cray_agents.records import Message

#: A text, or a function of nothing or of the run's context, sync or async, that returns one.
Instructions = (
    str | Callable[[], str | Awaitable[str]] | Callable[[RunContext], str | Awaitable[str]]
)


@dataclass(frozen=True)
class ActiveAgent:
    """A model with its instructions, tools and output type.

    `request` is what its requests have in common, but for tools and messages. `in_order`: its tool
    calls are carried out one by one. `learned` is what is known of the engine's server. `handoffs`
    says by the name of a tool who takes over when that tool is called.
    """

    name: str
    instructions: Instructions
    engine: ChatEngine
    request: Mapping[str, Any]
    tools: Mapping[str, Tool]
    in_order: bool
    hooks: Sequence[Hooks]
    output: OutputReader
    learned: ServerCapabilities
    handoffs: Mapping[str, "ActiveAgent"]

    async def system(self, context: RunContext) -> list[Message]:
        """The system message; none if there is nothing to say. Raises HookError."""
        text = "\n\n".join(
            filter(None, [await self._instructed(context), self.output.instructions])
        )
        return [{"role": "system", "content": text}] if text else []

    async def _instructed(self, context: RunContext) -> str:
        if isinstance(self.instructions, str):
            return self.instructions
        what = f"the instructions function of {self.name}"
        wanted = (context,)[: len(inspect.signature(self.instructions).parameters)]
        text = await hooks.call(what, self.instructions, *wanted)
        if not isinstance(text, str):
            raise HookError(f"{what} returned {text!r}: give a str")
        check_text(text, "instructions")
        return text


def pinned(model: str, to: str) -> str:
    """The model to ask beside a run on `to`: if that is a version of this name, the same version.

    So an agent and those that it hands over to or calls are measured, and trained, at one version.
    """
    name, at, _ = to.rpartition("@")
    return to if at and name == model else model


def check_text(text: str, what: str) -> None:
    """Raise BadInput for text with lone surrogates, which JSON cannot carry."""
    try:
        text.encode()
    except UnicodeEncodeError as error:
        raise BadInput(f"{what} is not valid Unicode text: {error}", param=what) from error
