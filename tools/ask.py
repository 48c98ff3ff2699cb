"""Ask tool: ask a human, on this terminal or through another front end.

agent = Agent(name="clerk", tools=[ask_human_tool()])
ask_human_tool(via=my_function)       # sync or async, gets a Question, returns the answer
"""

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass
from typing import IO

from rich.console import Console
from rich.text import Text

from cray_agents.agent import user_code
from cray_agents.agent.tool import Tool, as_tool, tool
from cray_agents.errors import ToolError

_PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
TIMEOUT = 600.0  # seconds for a human's answer


@dataclass(frozen=True)
class Question:
    """A question to a human. Without `choices` any answer is valid."""

    text: str
    choices: tuple[str, ...] = ()

    def choose(self, reply: str) -> str | None:
        """Return the choice that a reply means, by its text or number from 1; None if none."""
        reply = reply.strip()
        if not self.choices:
            return reply or None
        if reply.isdecimal() and 1 <= int(reply) <= len(self.choices):
            return self.choices[int(reply) - 1]
        return next((one for one in self.choices if one.casefold() == reply.casefold()), None)


Via = Callable[[Question], str | Awaitable[str]]


def ask_human_tool(
    *, via: Via | None = None, timeout: float | None = TIMEOUT, name: str = "ask_human"
) -> Tool:
    """Make a tool that asks a human and waits for the answer.

    Args:
        via: a function that answers, sync or async. None: the human at this terminal; without a
            terminal, the model gets an error.
        timeout: seconds until the model gets an error for a missing answer; None: no limit.
        name: the tool's name for models.
    """
    terminal_lock = asyncio.Lock()

    async def ask_human(question: str, choices: Sequence[str] = ()) -> str:
        """Ask a human, and wait for the answer.

        Args:
            question: what is to be decided or is not known, with all that is needed to answer.
            choices: the possible answers; none: any answer.
        """
        request = Question(question, tuple(choices))
        if via is None:
            async with terminal_lock:  # concurrent questions would mix on the screen
                return await _at_terminal(request, sys.stdin, Console(stderr=True))
        reply = str(await user_code.call(functools.partial(via, request), None))
        if (answer := request.choose(reply)) is None:
            raise ToolError(f"the human answered {reply!r}, which is none of the choices")
        return answer

    return as_tool(tool(name=name, timeout=timeout, max_chars=None)(ask_human))


async def _at_terminal(question: Question, keyboard: IO[str], screen: Console) -> str:
    """Ask until the answer is valid. Raises ToolError if nobody can answer."""
    if not keyboard.isatty():
        raise ToolError("nobody can be asked: there is no terminal. Go on with what you know")
    screen.print(_escape(question.text, "bold yellow"))
    for number, choice in enumerate(question.choices, 1):
        screen.print(_escape(f"  {number}. {choice}"))
    while True:
        screen.print("> ", end="")
        reply = await _read_line(keyboard)
        if not reply:
            raise ToolError("the human did not want to answer")
        if (answer := question.choose(reply)) is not None:
            return answer
        screen.print("Choose one, or its number." if question.choices else "Say something.")


def _escape(text: str, style: str = "") -> Text:
    """Replace control characters in a model's text by pictures, to protect the terminal."""
    return Text(text.translate(_PICTURES), style)


async def _read_line(keyboard: IO[str]) -> str:
    """Wait for a line and return it. If this is cancelled, no reader of the keyboard is left."""
    loop = asyncio.get_running_loop()
    typed: asyncio.Future[None] = loop.create_future()

    def set_typed() -> None:
        if not typed.done():
            typed.set_result(None)

    loop.add_reader(keyboard, set_typed)
    try:
        await typed
    finally:
        loop.remove_reader(keyboard)
    return keyboard.readline()
