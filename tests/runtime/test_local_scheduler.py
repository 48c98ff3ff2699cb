"""Local processes: hard time limits, one owner per directory, states kept in files."""

import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from cray_agents.errors import SchedulerError, SetupError
from cray_agents.ports import Command
from cray_agents.runtime.scheduler.choose import open_scheduler
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.runtime.scheduler.supervised import start_time


def command(folder: Path, script: str, name: str = "job") -> Command:
    return Command(
        name=name, argv=["/bin/sh", "-c", script], directory=str(folder), log=str(folder / "log")
    )


def settle(scheduler: LocalProcesses, name: str = "job") -> str:
    deadline = time.monotonic() + 60
    while scheduler.status(name).state == "running" and time.monotonic() < deadline:
        time.sleep(0.01)
    return scheduler.status(name).state


def started(folder: Path) -> int:
    deadline = time.monotonic() + 60
    while not (folder / "log").exists() or not (folder / "log").read_text().endswith("\n"):
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return int((folder / "log").read_text().split()[0])


def test_a_command_that_will_not_stop_is_killed(tmp_path: Path) -> None:
    with LocalProcesses(tmp_path, grace=0.2) as local:
        local.submit(command(tmp_path, "trap '' TERM; echo $$; while :; do sleep 0.05; done"))
        pid = started(tmp_path)
        local.cancel("job")
        assert settle(local) == "cancelled"
        assert local.status("job").exit_code == 137
        assert start_time(pid) is None


def test_close_ends_commands_and_their_ends_are_remembered(tmp_path: Path) -> None:
    with LocalProcesses(tmp_path) as local:
        local.submit(command(tmp_path, "exit 4", "short"))
        assert settle(local, "short") == "failed"
        first = local.submit(command(tmp_path, "echo $$; sleep 60"))
        pid = started(tmp_path)
    assert start_time(pid) is None
    with pytest.raises(SchedulerError, match="closed"):
        local.submit(command(tmp_path, "true", "late"))
    with LocalProcesses(tmp_path) as again:
        assert again.status("short").exit_code == 4
        status = again.status("job")
        assert (status.state, status.id, status.reason) == ("failed", first, "its platform ended")
        assert again.submit(command(tmp_path, "true")) != first
        assert settle(again) == "succeeded"


def test_a_directory_has_one_owner(tmp_path: Path) -> None:
    opened = "import sys, pathlib; from cray_agents.runtime.scheduler.local import LocalProcesses\n"
    opened += "LocalProcesses(pathlib.Path(sys.argv[1])); print('open', flush=True); input()"
    with LocalProcesses(tmp_path), pytest.raises(SetupError, match="open already"):
        LocalProcesses(tmp_path)
    with subprocess.Popen(
        [sys.executable, "-c", opened, str(tmp_path)], stdin=-1, stdout=-1
    ) as other:
        assert other.stdout
        other.stdout.readline()
        record = (tmp_path / "local" / "owner.json").read_text()
        assert str(other.pid) in record
        with pytest.raises(SetupError, match=f"another platform .pid {other.pid}"):
            LocalProcesses(tmp_path)
        other.kill()
    with LocalProcesses(tmp_path) as local:  # waits until the killed owner's supervisor is gone
        assert local.status("job").state == "unknown"


def test_open_local_states_its_reason(tmp_path: Path) -> None:
    with open_scheduler("local", tmp_path) as local:
        assert isinstance(local, LocalProcesses)
        assert (local.name, local.reason) == ("local", "local processes, as asked for")
        assert os.getpgid(local.pid) != os.getpgid(0)  # out of a terminal's Ctrl-C
