"""`run` and `loop` against a platform whose engine is scripted."""

import json
import os
import signal
import subprocess
import sys
import urllib.request
from pathlib import Path
from typing import Any

import pytest

from cray_agents.testing import ScriptedEngine
from tests.support.scripted_platform import platform

pytestmark = pytest.mark.slow

AGENT = """
from cray_agents import RFT, Agent, Loop, Task, TaskSet, Training, reward

@reward
def right(run):
    return run.output == run.task.target

agent = Agent(name="echo", model="m")
tasks = TaskSet([Task(input=str(n), target=str(n), split="train" if n < 5 else "holdout")
                 for n in range(65)])
loop = Loop(agent, tasks, rewards=[right], method=RFT(training=Training(steps=1)))
"""


def cli(*words: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    (cwd / "agent.py").write_text(AGENT)
    argv = [sys.executable, "-m", "cray_agents", *map(str, words)]
    return subprocess.run(argv, cwd=cwd, capture_output=True, text=True)


def test_run_says_why_it_failed(tmp_path: Path) -> None:
    with platform(tmp_path / "home", ScriptedEngine([])) as where:
        (tmp_path / "agent.py").write_text(AGENT)
        source = AGENT.replace('model="m"', 'model="nobody"')
        (tmp_path / "other.py").write_text(source)
        done = cli("run", "other.py", "hi", "--url", where.url, cwd=tmp_path)
    assert done.returncode == 1
    assert "'nobody' does not exist" in " ".join(done.stderr.split())


def test_loop(tmp_path: Path) -> None:
    def answer(request: dict[str, Any], version: str) -> str:
        number = str(request["messages"][-1]["content"])
        return number if version == "m@2" or int(number) % 2 else "no"

    with platform(tmp_path / "home", ScriptedEngine(answer)) as where:
        words = ["loop", "agent.py", "--iterations", 1, "--url", where.url]
        done = cli(*words, "--json", cwd=tmp_path)
        assert done.returncode == 0, done.stderr
        first, second = json.loads(done.stdout)
        assert (first["version"], second["version"], second["promoted"]) == ("m@1", "m@2", True)
        table = cli(*words, cwd=tmp_path)  # again: nothing is done anew, and it is shown
    assert "m@2" in table.stdout and "held-out: mean reward on tasks that" in table.stdout
    assert "m means m@2 now (m@1 before)" in table.stdout
    assert f"cray-agents chat agent.py --url {where.url}" in table.stdout
    assert "held-out 1.000" in table.stderr


def test_a_dashboard_without_a_platform_starts_one_and_ends_it(tmp_path: Path) -> None:
    chat = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "yo"}]}
    (tmp_path / "chats.jsonl").write_text(json.dumps(chat) + "\n")
    done = cli("import", "chats.jsonl", "--format", "openai", "--home", "root", cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    env = {**os.environ, "CRAY_AGENTS_SCHEDULER": "local"}
    argv = [sys.executable, "-m", "cray_agents", "dashboard", "--home", "root", "--no-browser"]
    # a shell that starts tests in the background has it ignored
    with subprocess.Popen(argv, cwd=tmp_path, env=env, stdout=-1, stderr=-1, text=True,
                          preexec_fn=lambda: signal.signal(2, signal.default_int_handler)
                          ) as viewer:  # fmt: skip
        url = viewer.stdout.readline()
        assert "/#sign_in=" in url, viewer.stderr.read()
        with urllib.request.urlopen(url.partition("#")[0], timeout=120) as page:
            assert page.status == 200
        second = cli("up", "--home", "root", "--replicas", 0, "--detach", cwd=tmp_path)
        assert second.returncode == 2 and second.stderr.count("already (pid") == 1
        assert "`cray-agents down --home root`" in " ".join(second.stderr.split())
        viewer.send_signal(signal.SIGINT)
        assert (viewer.wait(120), viewer.stdout.read()) == (0, "")
    assert "no platform runs" in cli("status", "--home", "root", cwd=tmp_path).stdout
