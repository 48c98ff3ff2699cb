"""Python as a tool: single programs, and a session with variables, in the sandbox."""

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import pytest

from cray_agents import Agent
from cray_agents.agent.tool import as_tool
from cray_agents.engines.scripted import tool_call
from cray_agents.processes import alive
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.python import PythonSession, python_tool
from cray_agents.tools.sandbox import Sandbox
from cray_agents.tools.sandbox.process import process_tree


@contextlib.asynccontextmanager
async def session(**limits: float) -> AsyncIterator[PythonSession]:
    made = PythonSession(Sandbox(**limits))  # type: ignore[arg-type]
    try:
        yield made
    finally:
        await made.teardown()


async def test_a_program() -> None:
    python = python_tool(Sandbox(seconds=120))
    assert await python("x = 6 * 7\nprint(x)") == "42"
    assert await python("x = 1") == "[no output]"
    assert "NameError: name 'x' is not defined\n[exit status 1]" in await python("print(x)")
    assert (
        await python_tool(Sandbox(seconds=0.3))("while True: pass") == "[ended: it took too long]"
    )


def test_what_a_model_reads_of_it() -> None:
    schema = as_tool(python_tool()).schema["function"]
    assert schema["name"] == "python" and "Nothing is kept" in schema["description"]
    assert list(schema["parameters"]["properties"]) == ["code"]


async def test_variables_last() -> None:
    async with session(seconds=120) as python:
        assert await python.python("import os\nx = 41") == "[no output]"
        assert await python.python("x + 1") == "42"
        assert await python.python("_ + 1") == "43"
        assert await python.python("open('f', 'w').write('y')") == "1"
        assert await python.python("os.system('cat f; echo'); print('z')") == "y\nz"
        assert await python.python("None") == "[no output]"
        assert await python.python("'é'") == "'é'"
        assert await python.python("if x:\n  def f(): return x\n\nf()") == "41"


async def test_errors_are_shown() -> None:
    async with session(seconds=120) as python:
        shown = await python.python("def f():\n    1 / 0\nf()")
        assert shown.startswith("Traceback") and "    1 / 0" in shown and "<call 1>" in shown
        assert "worker" not in shown and "ast.py" not in await python.python("def f(:")
        assert "SyntaxError" in await python.python("def f(:")
        assert "EOFError" in await python.python("input()")
        assert "SystemExit: 2" in await python.python("import sys; sys.exit(2)")
        assert "MemoryError" in await python.python("b = bytearray(1 << 30)")
        assert await python.python("f.__name__") == "'f'"


async def test_code_that_takes_too_long_is_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("cray_agents.tools.python.GRACE", 60.0)  # a busy machine is slow to end it
    async with session(seconds=0.5) as python:
        await python.python("x = 1")
        assert "more than 0.5 s; variables are kept" in await python.python("while True: pass")
        assert await python.python("x") == "1"


@pytest.mark.slow
@pytest.mark.parametrize(
    ("code", "why"),
    [
        ("import signal, time; signal.signal(signal.SIGALRM, print); time.sleep(60)\n"
         "while True: time.sleep(60)", "it took too long"),
        ("import os; os._exit(0)", "Python itself ended"),
        ("import os\nfor n in range(3, 20):\n  try: os.write(n, b'?\\n')\n  except OSError: pass",
         "Python itself ended"),
        ("import os\nfor n in range(3, 20):\n  try:\n    while True: os.write(n, b'?' * 9999)\n"
         "  except OSError: pass", "it printed too much"),
    ],
)  # fmt: skip
async def test_a_session_that_is_lost_begins_again(code: str, why: str) -> None:
    async with session(seconds=120) as python:
        await python.python("x = 1")
        patient, python.sandbox = python.sandbox, Sandbox(seconds=1 if "too long" in why else 120)
        shown = await python.python(code)
        assert why in shown and "all variables and files are gone" in shown
        python.sandbox = patient
        assert "NameError" in await python.python("x")


async def test_long_output() -> None:
    async with session(seconds=120, output_chars=100) as python:
        shown = await python.python("print('a' * 300000 + 'b')")
        assert shown.startswith("a") and shown.endswith("b") and len(shown) < 200


async def test_a_call_that_is_cancelled_does_not_answer_the_next() -> None:
    async with session(seconds=120) as python:
        await python.python("x = 1")
        asked = asyncio.create_task(python.python("import time; time.sleep(10)"))
        await asyncio.sleep(0)
        asked.cancel()
        with pytest.raises(asyncio.CancelledError):
            await asked
        assert await python.python("2 + 2") == "4"


async def test_an_agent_has_its_own_and_leaves_nothing() -> None:
    script: list[Any] = [
        tool_call("python", code="x = 40"),
        tool_call("python", code="x + 2"),
        "done",
    ]
    made: list[PythonSession] = []
    pids: list[int] = []

    class Watched(PythonSession):
        async def teardown(self) -> None:
            if self._worker is not None:
                made.append(self)
                pids.extend(process_tree(self._worker.pid))
            await super().teardown()

    engine = ScriptedEngine(script * 2)
    agent = Agent(name="a", environment=lambda: Watched(Sandbox(seconds=120)), engine=engine)
    for _ in range(2):
        run = await agent.run("go")
        calls = [call for turn in run.trajectory.turns for call in turn.tool_calls]
        assert [call.result for call in calls] == ["[no output]", "42"]
    assert len(made) == 2 and len(pids) >= 4 and not any(alive(pid) for pid in pids)
