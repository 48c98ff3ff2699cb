"""Python tool: sandboxed Python for agents, a new program per call, or a session.

    agent = Agent(name="analyst", tools=[python_tool()])
    agent = Agent(name="analyst", environment=PythonSession)

The Python is this process's, with its packages. Called by agent authors. Read next:
sandbox/__init__.py, the guarantees; python_worker.py, the process of a session.
"""

import asyncio
import contextlib
import json
import sys
from collections.abc import Awaitable, Callable
from pathlib import Path

from cray_agents.agent.environment import Environment
from cray_agents.agent.run_context import RunContext
from cray_agents.agent.tool import tool
from cray_agents.records import Task
from cray_agents.tools.sandbox import Sandbox
from cray_agents.tools.sandbox.process import BLOCK, TOO_MUCH, SandboxedProcess

WORKER = Path(__file__).with_name("python_worker.py")
GRACE = 2.0  # seconds for interrupted code to end
_LONGEST = 8  # bytes of JSON that a character of output may take


def python_tool(sandbox: Sandbox | None = None) -> Callable[[str], Awaitable[str]]:
    """Make a tool `python(code)`, whose every call is a new program in a new folder.

    Raises SetupError if this machine offers no sandbox: see Sandbox.
    """
    box = sandbox or Sandbox()
    box.check()

    @tool(timeout=None)  # the sandbox limits the time
    async def python(code: str) -> str:
        """Run a Python program and return what it prints. Nothing is kept between calls.

        Args:
            code: the program. Print what you want to see.
        """
        argv = [sys.executable, "main.py"]
        return (await box.run(argv, files={"main.py": code})).text

    return python


class PythonSession(Environment):
    """A tool `python(code)` whose variables and files last for the run.

    Use `environment=PythonSession`, or `lambda: PythonSession(Sandbox(seconds=60))`. The sandbox's
    seconds and cpu_seconds limit each call. Code that takes longer is interrupted, and its
    variables stay. If that fails, or the code exceeds another limit, the session begins again.
    """

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self.sandbox = sandbox or Sandbox()
        self._stack = contextlib.AsyncExitStack()
        self._worker: SandboxedProcess | None = None

    async def reset(self, task: Task, context: RunContext) -> str | None:
        """Check the sandbox. Raises SetupError if this machine offers none."""
        await asyncio.to_thread(self.sandbox.check)
        return None

    @tool(timeout=None)
    async def python(self, code: str) -> str:
        """Run Python code and return what it prints, and the value of its last expression.

        Variables, imports and files are there in later calls.

        Args:
            code: one or more statements.
        """
        answered = False
        try:
            worker = self._worker or await self._begin()
            output = await self._ask(worker, code)
            answered = output is not None
        finally:
            if not answered:
                await self.teardown()
        if output is not None:
            return output
        why = TOO_MUCH[worker.limit] if worker.limit else "Python itself ended"
        return f"[ended: {why}. Python was started again: all variables and files are gone]"

    async def teardown(self) -> None:
        """End Python, and remove its files."""
        self._worker = None
        await self._stack.aclose()

    async def _begin(self) -> SandboxedProcess:
        argv = [sys.executable, "-c", WORKER.read_text(), str(self.sandbox.output_chars)]
        self._worker = await self._stack.enter_async_context(self.sandbox.start(argv))
        return self._worker

    async def _ask(self, worker: SandboxedProcess, code: str) -> str | None:
        """Return the worker's output for some code; None if it ended or had to be killed."""
        request = {"code": code, "seconds": self.sandbox.seconds}
        if self.sandbox.cpu_seconds is not None:
            worker.allow(self.sandbox.cpu_seconds)
        with contextlib.suppress(BrokenPipeError, ConnectionResetError):
            worker.stdin.write(json.dumps(request).encode() + b"\n")
            await worker.stdin.drain()
        line = bytearray()
        try:
            async with asyncio.timeout(self.sandbox.seconds + GRACE):
                while not line.endswith(b"\n"):
                    block = await worker.stdout.read(BLOCK)
                    line += block
                    if not block or len(line) > BLOCK + _LONGEST * self.sandbox.output_chars:
                        worker.kill("output" if block else None)
                        return None
        except TimeoutError:
            worker.kill("seconds")
            return None
        with contextlib.suppress(ValueError, KeyError, TypeError):
            return str(json.loads(line)["shown"])
        return None  # the code itself wrote to the worker's pipe
