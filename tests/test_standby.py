"""`up --standby`: another process follows the one that is killed or hands over."""

import asyncio
import json
import os
import signal
import subprocess
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.processes import alive
from cray_agents.server import platform_process
from tests.support.bare_models import bare_model
from tests.support.campaign import free_port
from tests.support.command_line import cli
from tests.support.deciding_controller import controller
from tests.support.waiting import wait_until


class Root:
    """A shared root, with processes of `up` that serve no model."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.pids: list[int] = []

    def command(self, *words: object) -> "subprocess.CompletedProcess[str]":
        return cli(*words, "--home", self.home, cwd=self.folder)

    def up(self, *words: object) -> None:
        argv = ["up", "--name", "m", "--scheduler", "local", "--replicas", 0, "--detach", *words]
        done = self.command(*argv)
        logs = "".join(path.read_text() for path in (self.home / "logs").glob("*.log"))
        assert done.returncode == 0, done.stderr + logs

    def status(self) -> dict[str, Any]:
        """What it says; {} while nobody controls the root."""
        done = self.command("status", "--json")
        found: dict[str, Any] = json.loads(done.stdout) if done.stdout else {}
        self.pids += [found["pid"]] if found.get("pid") else []
        return found if found.get("running") else {}

    def doctor(self) -> dict[str, str]:
        rows = json.loads(self.command("doctor", "--json").stdout)
        return {row["check"]: row["found"] for row in rows}

    def waiting(self) -> list[int]:
        """The standbys that the controller knows of."""
        return [one["pid"] for one in self.status().get("controller", {}).get("standbys", ())]

    def standbys(self) -> list[int]:
        notes = (self.home / "controller/standbys").glob("standby_*.json")
        return [json.loads(note.read_text())["pid"] for note in notes]

    def why(self) -> str:
        return " ".join(self.command("why", "controller").stdout.split())


@pytest.fixture
def root(tmp_path: Path) -> Iterator[Root]:
    root = Root(tmp_path)
    yield root
    root.command("down")
    for pid in {*root.pids, *root.standbys()}:
        if alive(pid):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.slow
def test_a_standby_follows_who_is_killed_and_who_hands_over_and_ends_with_down(root: Root) -> None:
    model = bare_model(root.folder / "model")
    port = free_port()
    root.up("--model", model, "--port", port)
    first = root.status()
    assert "no standby waits" in root.command("down", "--hand-over").stderr
    root.up("--standby", "--port", port)
    second = wait_until(lambda: next(iter(root.standbys()), None))
    wait_until(lambda: root.waiting() == [second])
    assert (first["controller"]["term"], first["controller"]["pid"]) == (1, first["pid"])
    assert f"(pid {first['pid']})" in root.why() and f"(pid {second})" in root.why()
    rows = root.doctor()
    assert rows["controller"].startswith(f"{os.uname().nodename} (pid {first['pid']}), term 1, ")
    assert rows["standbys"] == f"{os.uname().nodename} (pid {second})" and rows["gateways"] == "1"

    claim = platform_process.owner(Home(root.home))
    assert claim is not None
    newest_key = platform_process.lasting_key(claim)
    assert callable(newest_key)

    os.kill(first["pid"], signal.SIGKILL)
    said = root.why()
    followed_with = asyncio.run(asyncio.wait_for(newest_key(), 120))  # by a client that goes on
    assert followed_with != claim["token"]
    assert followed_with == json.loads((root.home / "platform.json").read_text())["token"]
    now = wait_until(root.status)
    assert "ended without giving the root back" in said or f"(pid {second})" in said
    assert (now["pid"], now["url"]) == (second, first["url"])
    assert now["controller"]["term"] == 2
    log = next((root.home / "logs").glob("standby-*.log")).read_text()
    assert f"took over from {os.uname().nodename} (pid {first['pid']}), term 2: replicas 0" in log

    root.up("--standby", "--port", port)
    third = wait_until(lambda: next((pid for pid in root.standbys() if pid != second), None))
    wait_until(root.waiting)
    assert root.command("down", "--hand-over").returncode == 0
    now = wait_until(root.status)
    assert (now["pid"], now["controller"]["term"]) == (third, 3) and not alive(second)
    added = root.command("models", "reject", "m@1")
    assert "m@1 is promoted" in added.stderr  # it answers with the same registry

    with controller(root.home, os.uname().nodename, 12) as fourth:
        wait_until(root.waiting)
        assert root.command("down").returncode == 0
        assert fourth.wait() == 0
    assert not alive(third) and not (root.home / "platform.json").exists()
    assert root.why().startswith("No platform runs on this root: the last one gave it back.")
    assert root.doctor()["controller"].startswith("none; the last term was ")
