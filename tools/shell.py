"""Shell tool: sandboxed shell commands for agents, in a given folder or in each run's own.

    agent = Agent(name="coder", tools=[shell_tool(workdir="project")])
    agent = Agent(name="coder", environment=ShellSession)

Called by agent authors. Read next: sandbox/__init__.py, the guarantees.
"""

import asyncio
import tempfile
from collections.abc import Awaitable, Callable, Mapping
from pathlib import Path

from cray_agents.agent.environment import Environment
from cray_agents.agent.run_context import RunContext
from cray_agents.agent.tool import tool
from cray_agents.errors import SetupError
from cray_agents.records import Task
from cray_agents.tools.sandbox import Sandbox
from cray_agents.tools.sandbox.sandbox import remove, write_files


def shell_tool(
    sandbox: Sandbox | None = None, workdir: str | Path | None = None
) -> Callable[[str], Awaitable[str]]:
    """Make a tool `shell(command)`.

    Args:
        sandbox: limits and readable files; default: Sandbox().
        workdir: the folder that commands work in and may write to, the same for all runs; default:
            a new one for each command.

    Raises SetupError if this machine offers no sandbox: see Sandbox.
    """
    box = sandbox or Sandbox()
    box.check()

    @tool(timeout=None)  # the sandbox limits the time
    async def shell(command: str) -> str:
        """Run a shell command and return what it prints.

        Args:
            command: for bash, such as 'ls -l | head'.
        """
        return await _run(box, command, workdir)

    return shell


class ShellSession(Environment):
    """A tool `shell(command)` in the run's own folder, which is removed at its end.

    Files last from command to command; variables, background jobs and `cd` do not. To begin with
    some files, subclass this and override `files`.
    """

    def __init__(self, sandbox: Sandbox | None = None) -> None:
        self.sandbox = sandbox or Sandbox()
        self.folder: Path | None = None

    def files(self, task: Task) -> Mapping[str, str | bytes]:
        """Return the files of the folder at the beginning: name: content."""
        return {}

    async def reset(self, task: Task, context: RunContext) -> str | None:
        """Make the folder. Raises SetupError if this machine offers no sandbox."""
        await asyncio.to_thread(self.sandbox.check)
        self.folder = Path(tempfile.mkdtemp(prefix="cray-shell-")).resolve()
        write_files(self.folder, self.files(task), None)
        return None

    @tool(timeout=None)
    async def shell(self, command: str) -> str:
        """Run a shell command and return what it prints. Files stay for later commands.

        Args:
            command: for bash, such as 'ls -l | head'.
        """
        if self.folder is None:
            raise SetupError("the shell has no folder: reset was not called")
        return await _run(self.sandbox, command, self.folder)

    async def teardown(self) -> None:
        """Remove the folder."""
        folder, self.folder = self.folder, None
        if folder is not None:
            await remove(folder)


async def _run(sandbox: Sandbox, command: str, workdir: str | Path | None) -> str:
    return (await sandbox.run(["bash", "-c", command], workdir=workdir)).text
