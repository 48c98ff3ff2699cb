"""Asking a human, as a tool: on this terminal, or through whatever front end there is.

agent = Agent(name="clerk", tools=[ask_human_tool()])
ask_human_tool(via=my_function)       # sync or async, gets a Question, returns the answer
ask_human_tool(via=questions)         # an asyncio.Queue of Questions, each with `answer(text)`
"""

import asyncio
import functools
import sys
from collections.abc import Awaitable, Callable, Sequence
from dataclasses import dataclass, field
from typing import IO

from rich.console import Console
from rich.text import Text

from cray_agents.agent import user_code
from cray_agents.agent.tool import Tool, as_tool, tool
from cray_agents.errors import ToolError

_PICTURES = {code: 0x2400 + code for code in range(32) if code not in (9, 10)} | {127: 0x2421}
TIMEOUT = 600.0  # seconds that a human has to answer


@dataclass(frozen=True, eq=False)
class Question:
    """What is asked. Without `choices` any answer will do."""

    text: str
    choices: tuple[str, ...] = ()
    answered: "asyncio.Future[str]" = field(
        default_factory=lambda: asyncio.get_running_loop().create_future(), repr=False
    )

    def answer(self, text: str) -> None:
        """Give the answer, from any thread; the first one counts."""
        self.answered.get_loop().call_soon_threadsafe(self._give, text)

    def _give(self, text: str) -> None:
        if not self.answered.done():
            self.answered.set_result(text)

    def chosen(self, said: str) -> str | None:
        """The choice that an answer means, by its text or number from 1; None: it is none."""
        said = said.strip()
        if not self.choices:
            return said or None
        if said.isdecimal() and 1 <= int(said) <= len(self.choices):
            return self.choices[int(said) - 1]
        return next((one for one in self.choices if one.casefold() == said.casefold()), None)


Via = Callable[[Question], str | Awaitable[str]] | asyncio.Queue[Question]


def ask_human_tool(
    *, via: Via | None = None, timeout: float | None = TIMEOUT, name: str = "ask_human"
) -> Tool:
    """A tool that asks a human and waits for the answer.

    Args:
        via: who is asked: a function, or a queue that a front end on the same event loop reads;
            None: whoever sits at this terminal. Where there is none, the model is told so.
        timeout: seconds until the model is told that nobody answered; None: no limit.
        name: what models call it.
    """
    one_asks = asyncio.Lock()

    async def ask_human(question: str, choices: Sequence[str] = ()) -> str:
        """Ask a human, and wait for the answer.

        Args:
            question: what is to be decided or is not known, with all that is needed to answer.
            choices: the possible answers; none: any answer.
        """
        asked = Question(question, tuple(choices))
        if via is None:
            async with one_asks:  # side by side they could not be told apart
                return await _at_terminal(asked, sys.stdin, Console(stderr=True))
        return await _elsewhere(asked, via)

    return as_tool(tool(name=name, timeout=timeout, max_chars=None)(ask_human))


async def _elsewhere(asked: Question, via: Via) -> str:
    if isinstance(via, asyncio.Queue):
        await via.put(asked)
        said = await asked.answered
    else:
        said = await user_code.call(functools.partial(via, asked), None)
    answer = asked.chosen(str(said))
    if answer is None:
        raise ToolError(f"the human answered {str(said)!r}, which is none of the choices")
    return answer


async def _at_terminal(asked: Question, keyboard: IO[str], screen: Console) -> str:
    """Ask until the answer is one. Raises ToolError where nobody can answer."""
    if not keyboard.isatty():
        raise ToolError("nobody can be asked: there is no terminal. Go on with what you know")
    screen.print(_shown(asked.text, "bold yellow"))
    for number, choice in enumerate(asked.choices, 1):
        screen.print(_shown(f"  {number}. {choice}"))
    while True:
        screen.print("> ", end="")
        said = await _line(keyboard)
        if not said:
            raise ToolError("the human did not want to answer")
        if (answer := asked.chosen(said)) is not None:
            return answer
        screen.print("Choose one, or its number." if asked.choices else "Say something.")


def _shown(text: str, style: str = "") -> Text:
    """A model's text, which may not drive the terminal: control characters as pictures."""
    return Text(text.translate(_PICTURES), style)


async def _line(keyboard: IO[str]) -> str:
    """A line, once there is one; when we are cancelled nobody is left reading the keyboard."""
    loop = asyncio.get_running_loop()
    typed: asyncio.Future[None] = loop.create_future()

    def there_is_one() -> None:
        if not typed.done():
            typed.set_result(None)

    loop.add_reader(keyboard, there_is_one)
    try:
        await typed
    finally:
        loop.remove_reader(keyboard)
    return keyboard.readline()
