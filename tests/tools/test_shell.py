"""A shell as a tool: in a new folder, in one that is given, in one of the run's own."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Agent, Task
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import BadInput
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.sandbox import Sandbox
from cray_agents.tools.shell import ShellSession, shell_tool


async def test_a_command() -> None:
    shell = shell_tool(Sandbox(seconds=120))
    assert await shell("echo out; echo err >&2; exit 3") == "out\nerr\n[exit status 3]"
    assert await shell("touch a && ls") == "a"
    assert await shell("ls | wc -l; true") == "0"
    assert await shell("python -c 'print(6 * 7)'") == "42"


async def test_a_folder_that_is_given(tmp_path: Path) -> None:
    shell = shell_tool(Sandbox(seconds=120), workdir=tmp_path)
    await shell("echo x > a")
    assert await shell("cat a; pwd") == f"x\n{tmp_path}"
    assert (tmp_path / "a").read_text() == "x\n"
    with pytest.raises(BadInput, match="is no folder"):
        await shell_tool(workdir=tmp_path / "none")("true")


async def test_a_folder_of_the_runs_own() -> None:
    folders: list[Path] = []

    class Given(ShellSession):
        def files(self, task: Task) -> Mapping[str, str | bytes]:
            return {"notes/in": f"for {task.input}\n"}

        async def teardown(self) -> None:
            if self.folder is not None:
                folders.append(self.folder)
            await super().teardown()

    commands = ["cat notes/in; echo mine > notes/out", "cat notes/*"]
    script: list[Any] = [*(tool_call("shell", command=command) for command in commands), "done"]
    engine = ScriptedEngine(script * 2)
    agent = Agent(name="a", environment=lambda: Given(Sandbox(seconds=120)), engine=engine)
    for name in ("one", "two"):
        run = await agent.run(name)
        calls = [call for turn in run.trajectory.turns for call in turn.tool_calls]
        assert [call.result for call in calls] == [f"for {name}", f"for {name}\nmine"]
    assert len(set(folders)) == 2 and not any(folder.exists() for folder in folders)
