"""Asking a human: on a real terminal, through a function, and where nobody is."""

import asyncio
import json
import os
import subprocess
import sys
from typing import Any

import pytest

from cray_agents import Agent
from cray_agents.agent.tool import perform
from cray_agents.engines.scripted import tool_call
from cray_agents.records import ToolCall
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.ask import Question, ask_human_tool

PROGRAM = """
import asyncio, json, sys
from cray_agents.agent.tool import perform
from cray_agents.tools.ask import ask_human_tool

async def main():
    tool = ask_human_tool(timeout=float(sys.argv[1]))
    one = lambda n: {"id": "c", "function": {"name": "ask_human", "arguments": sys.argv[n]}}
    calls = [perform({"ask_human": tool}, one(n)) for n in range(2, len(sys.argv))]
    for call in await asyncio.gather(*calls):
        print("ANSWER", json.dumps(call.error or call.result), flush=True)
    print("NEXT", sys.stdin.readline(), flush=True)

asyncio.run(main())
"""


class Terminal:
    """A program on a pseudo-terminal, and what it has shown."""

    def __init__(self, *questions: dict, timeout: float = 60.0) -> None:
        self.keyboard, there = os.openpty()
        argv = [sys.executable, "-c", PROGRAM, str(timeout), *map(json.dumps, questions)]
        self.process = subprocess.Popen(argv, stdin=there, stdout=there, stderr=there)
        os.close(there)
        self.shown = ""

    def type(self, text: str) -> None:
        os.write(self.keyboard, text.encode())

    def until(self, text: str) -> str:
        """Read until this is shown after all that was read before; what was shown up to there."""
        while text not in self.shown:
            self.shown += os.read(self.keyboard, 1000).decode()
        before, _, self.shown = self.shown.partition(text)
        return before

    def __enter__(self) -> "Terminal":
        return self

    def __exit__(self, *_: object) -> None:
        self.process.kill()
        self.process.wait()
        os.close(self.keyboard)


def test_on_a_terminal() -> None:
    questions: list[dict[str, Any]] = [
        {"question": "Which \x1b[31mcolour?", "choices": ["red", "Blue"]},
        {"question": "And why?"},
    ]
    with Terminal(*questions) as terminal:
        shown = terminal.until("> ")
        assert "Which ␛[31mcolour?" in shown and "2. Blue" in shown and "why" not in shown
        terminal.type("green\n")
        terminal.until("Choose one, or its number.")
        terminal.until("> ")
        terminal.type("2\n")
        assert "And why?" in terminal.until("> ")
        terminal.type("because\n")
        terminal.until('ANSWER "Blue"')
        terminal.until('ANSWER "because"')


def test_nobody_answers_and_nobody_reads_the_keyboard_any_more() -> None:
    with Terminal({"question": "Who?"}, timeout=0.2) as terminal:
        terminal.until('ANSWER "ask_human did not answer within 0.2 s"')
        terminal.type("for the next one\n")
        terminal.until("NEXT for the next one")


def test_the_end_of_the_input_is_no_answer() -> None:
    with Terminal({"question": "Who?"}) as terminal:
        terminal.until("> ")
        terminal.type("\x04")
        terminal.until('ANSWER "the human did not want to answer"')


def test_without_a_terminal() -> None:
    argv = [sys.executable, "-c", PROGRAM, "60", '{"question": "Who?"}']
    done = subprocess.run(
        argv, stdin=subprocess.DEVNULL, capture_output=True, text=True, check=True
    )
    assert done.stdout.startswith('ANSWER "nobody can be asked: there is no terminal.')


async def ask(via: Any, **arguments: object) -> ToolCall:
    tool = ask_human_tool(via=via, name="boss")
    asked = {"id": "c", "function": {"name": "boss", "arguments": json.dumps(arguments)}}
    return await perform({"boss": tool}, asked)


async def test_through_a_function() -> None:
    async def later(question: Question) -> str:
        await asyncio.sleep(0)
        return question.choices[-1].upper()

    assert (await ask(later, question="?", choices=["a", "b"])).result == "b"
    assert (await ask(lambda question: question.text, question="echo")).result == "echo"
    failed = await ask(lambda question: "c", question="?", choices=["a", "b"])
    assert failed.error == "the human answered 'c', which is none of the choices"


@pytest.mark.parametrize(("said", "meant"), [("1", "10"), ("10", "10"), (" b ", "B"), ("3", None)])
def test_choices_by_number_or_text(said: str, meant: str | None) -> None:
    engine = ScriptedEngine([tool_call("ask_human", question="?", choices=["10", "B"]), "done"])
    agent = Agent(name="a", tools=[ask_human_tool(via=lambda _: said)], engine=engine)
    (call,) = agent.run_sync("go").trajectory.turns[0].tool_calls
    assert call.result == meant and bool(call.error) == (meant is None)
