"""Terminal view of an agent at work: its text as it comes, tool calls, limits, errors.

Called by agents.py. Texts of models and tools are printed without markup, and their control
characters as pictures.
"""

import asyncio
import contextlib
import dataclasses
import sys
from pathlib import Path
from typing import Any

import orjson
from pydantic_core import to_json
from rich.text import Text

from cray_agents.agent.agent import Agent
from cray_agents.agent.sessions import MemorySession, Session
from cray_agents.agent.stream_events import (
    AgentEvent,
    Handoff,
    LimitReached,
    RunEnded,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from cray_agents.agent.tool import model_text
from cray_agents.cli.screen import console, disarm, errors, one_line
from cray_agents.errors import CrayError
from cray_agents.records import Message, Run, StopReason, Task

_TOOL_CHARS = 400  # of a tool's arguments or result
#: Fields that /save writes; other fields are a server's own.
_SAVED = ("role", "content", "name", "tool_calls", "tool_call_id")
_HELP = """\
/reset      begin a new conversation
/history    the conversation so far
/save FILE  write it to a file, as a line of JSON that `import --format openai` reads
/quit       end the chat; so does Ctrl-D
Ctrl-C stops an answer. A line that begins with a blank is never a command."""


async def answer(agent: Agent, text: str | Task, memory: Session, *, as_json: bool = False) -> Run:
    """Ask, print events as they happen, and return the run. Raises as Agent.stream does."""
    run: Run | None = None
    async for event in agent.stream(text, session=memory):
        if isinstance(event, RunEnded):
            run = event.run
        if as_json:
            print(disarm(_as_line(event)), flush=True)
        else:
            _show(event)
    if run is None:
        raise RuntimeError("the agent's stream ended without RunEnded")
    if not as_json:
        console.print()
    return run


def _show(event: AgentEvent) -> None:
    match event:
        case TextDelta():
            _print(event.text)
        case ToolStarted():
            _print(f"\n  {event.name}({_shorten(event.arguments)})", style="dim")
        case ToolFinished():
            style = "dim" if event.call.error is None else "red"
            _print(f"\n  {event.call.name} -> {_shorten(model_text(event.call))}\n", style=style)
        case Handoff():
            _print(f"\n  to {event.agent}:\n", style="dim")
        case LimitReached():
            _print(f"\n  limit reached: {event.limit}\n", style="yellow")
        case RunEnded():
            pass


def _print(text: str, style: str = "") -> None:
    safe = Text(disarm(text), style)
    console.print(safe, end="", soft_wrap=True)


def _shorten(text: str) -> str:
    line = one_line(text)
    return line if len(line) <= _TOOL_CHARS else f"{line[:_TOOL_CHARS]}..."


def _as_line(event: AgentEvent) -> str:
    fields = {field.name: getattr(event, field.name) for field in dataclasses.fields(event)}
    return to_json({"event": type(event).__name__, **fields}, inf_nan_mode="strings").decode()


def as_text(output: Any) -> str:
    """Return a run's output: a text as it is, any other value as JSON."""
    return output if isinstance(output, str) else to_json(output).decode()


def has_answer(run: Run) -> bool:
    """Tell if the run came to an answer, if only because a limit made it."""
    completed = run.stop_reason == StopReason.completed or run.output is not None
    return completed and run.error is None


def report(run: Run) -> None:
    """Print to stderr why a run came to no answer."""
    reason = "" if run.error is None else f": {run.error.message}"
    errors.print(Text.assemble((str(run.stop_reason), "red"), disarm(reason)))


class TerminalChat:
    """A conversation on the terminal. Ctrl-C stops the present answer, which is then forgotten.

    With a `task`, each question is asked as a copy of it with another input, so that an environment
    has the task's metadata.
    """

    def __init__(
        self, agent: Agent, memory: Session, *, task: Task | None = None, forget: bool = False
    ) -> None:
        self._agent = agent
        self._memory = memory
        self._task = task
        self._forget = forget

    def run(self) -> None:
        """Answer lines of input until /quit or Ctrl-D."""
        if sys.stdin.isatty():
            with contextlib.suppress(ImportError):
                import readline  # noqa: F401 - it gives `input` line editing and history
        with asyncio.Runner() as runner:
            while True:
                try:
                    line = input("you: ")
                except KeyboardInterrupt:
                    console.print("\n(Ctrl-D or /quit ends the chat)")
                    continue
                except EOFError:
                    return
                if line.strip() == "/quit":
                    return
                try:
                    if line.strip():
                        self._handle(line, runner)
                except KeyboardInterrupt:
                    console.print("\n(stopped)")
                except CrayError as error:
                    errors.print(Text(str(error), "red"))

    def _handle(self, line: str, runner: asyncio.Runner) -> None:
        command, _, rest = line.partition(" ")
        match command:
            case "/help":
                console.print(_HELP, markup=False)
            case "/reset":
                self._memory = MemorySession()
                console.print("(a new conversation)")
            case "/history":
                runner.run(self._history())
            case "/save":
                self._save(rest.strip(), runner.run(self._memory.history()))
            case _ if command.startswith("/"):
                console.print(f"there is no command {command}; /help tells them", markup=False)
            case _:
                self._ask(line.strip(), runner)

    def _ask(self, text: str, runner: asyncio.Runner) -> None:
        if self._forget:
            self._memory = MemorySession()
        _print(f"{self._agent.name}: ", style="bold green")
        request = text if self._task is None else self._task.model_copy(update={"input": text})
        run = runner.run(answer(self._agent, request, self._memory))
        if not has_answer(run):
            report(run)

    async def _history(self) -> None:
        for message in await self._memory.history():
            for call in message.get("tool_calls") or ():
                function = call["function"]
                _print(f"  {function['name']}({_shorten(function['arguments'])})\n", style="dim")
            if text := message.get("content"):
                _print(f"{message['role']}: {text}\n")

    def _save(self, name: str, messages: list[Message]) -> None:
        saved = [{key: m[key] for key in _SAVED if key in m} for m in messages]
        line = orjson.dumps({"messages": saved}) + b"\n"
        try:
            with Path(name).open("xb") as file:
                file.write(line)
        except OSError as error:
            errors.print(Text(f"/save FILE: {error}", "red"))
            return
        console.print(f"(saved to {name})", markup=False)
