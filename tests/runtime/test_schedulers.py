"""Contract of the Scheduler port, tested on both implementations."""

import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import SchedulerError
from cray_agents.ports import Command, CommandStatus, Scheduler
from cray_agents.processes import start_time
from cray_agents.runtime.scheduler.choose import open_scheduler
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.runtime.scheduler.supervisor import descendants
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

BOTH = ["local", pytest.param("slurm", marks=pytest.mark.slurm)]


def need(kind: str) -> None:
    if kind == "slurm" and (missing := missing_programs()):
        pytest.skip(f"Slurm is not installed: {missing}")


def end_of(scheduler: Scheduler, name: str) -> CommandStatus:
    wait_until(lambda: scheduler.status(name).state not in ("queued", "running"))
    return scheduler.status(name)


@pytest.fixture(scope="module", params=BOTH)
def scheduler(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory):
    need(request.param)
    os.environ["LEAKED"] = "from the platform"
    with open_scheduler(request.param, tmp_path_factory.mktemp("home") / "slurm") as opened:
        yield opened
    del os.environ["LEAKED"]


@pytest.fixture
def shell(tmp_path: Path, request: pytest.FixtureRequest) -> Callable[..., Command]:
    def command(script: str, name: str = "", **options: Any) -> Command:
        return Command(
            name=name or request.node.name.replace("[", ".").replace("]", ""),
            argv=["/bin/bash", "-c", script],
            directory=str(tmp_path),
            log=str(tmp_path / "the log 100%.txt"),
            **options,
        )

    return command


def text_of(command: Command) -> str:
    """The command's output, without srun's lines about a bad end."""
    log = Path(command.log)
    lines = log.read_text().splitlines(keepends=True) if log.exists() else []
    return "".join(line for line in lines if not line.startswith("srun: error:"))


def test_success_with_environment_directory_and_log(scheduler, shell) -> None:
    value = 'it\'s "quoted" $HOME'
    command = shell('echo "$VALUE|$PWD|$LEAKED|"; echo err >&2', environment={"VALUE": value})
    job_id = scheduler.submit(command)
    status = end_of(scheduler, command.name)
    assert (status.state, status.exit_code, status.id) == ("succeeded", 0, job_id)
    assert text_of(command) == f"{value}|{command.directory}||\nerr\n"


def test_failure_has_its_exit_code_and_the_name_can_be_queued_anew(scheduler, shell) -> None:
    command = shell("echo once; exit 3")
    first = scheduler.submit(command)
    status = end_of(scheduler, command.name)
    assert (status.state, status.exit_code) == ("failed", 3)
    second = scheduler.submit(command)
    assert second != first
    assert end_of(scheduler, command.name).id == second
    assert text_of(command) == "once\nonce\n"


def test_a_live_name_is_not_queued_twice(scheduler, shell) -> None:
    command = shell("echo once; until [ -e end ]; do sleep 0.05; done")
    assert scheduler.submit(command) == scheduler.submit(command)
    wait_until(lambda: "once" in text_of(command))
    assert scheduler.submit(command) == scheduler.status(command.name).id
    Path(command.directory, "end").touch()
    assert end_of(scheduler, command.name).state == "succeeded"
    assert text_of(command) == "once\n"


def test_cancel_asks_first_and_stays_cancelled(scheduler, shell) -> None:
    script = "trap 'echo asked; exit 0' TERM; echo $$; while :; do sleep 0.05; done"
    command = shell(script)
    scheduler.submit(command)
    wait_until(lambda: bool(text_of(command)))
    scheduler.cancel(command.name)
    assert end_of(scheduler, command.name).state == "cancelled"
    assert "asked" in text_of(command)
    assert start_time(int(text_of(command).split()[0])) is None
    scheduler.cancel(command.name)  # no error
    assert scheduler.status(command.name).state == "cancelled"


def test_a_killed_process_is_a_failed_command(scheduler, shell) -> None:
    command = shell("echo $$; exec sleep 60")
    scheduler.submit(command)
    wait_until(lambda: bool(text_of(command)))
    os.kill(int(text_of(command)), 9)
    status = end_of(scheduler, command.name)
    assert (status.state, status.exit_code) == ("failed", 137)


def test_a_program_that_is_missing_is_a_failed_command(scheduler, shell, tmp_path) -> None:
    command = shell("").model_copy(update={"argv": [str(tmp_path / "no-such-program")]})
    scheduler.submit(command)
    status = end_of(scheduler, command.name)
    assert (status.state, status.exit_code) == ("failed", 127)
    assert "no-such-program" in text_of(command)


def test_unknown_and_impossible_names(scheduler, shell) -> None:
    assert scheduler.status("never-heard-of").state == "unknown"
    scheduler.cancel("never-heard-of")
    with pytest.raises(SchedulerError, match="name"):
        scheduler.submit(shell("true", name="../escape"))
    with pytest.raises(SchedulerError):
        scheduler.submit(shell("true", name="huge", nodes=64, ranks=64))


OWNER = """
import sys, time
from pathlib import Path
from cray_agents.ports import Command
from cray_agents.runtime.scheduler.choose import open_scheduler
kind, home, command = sys.argv[1:]
scheduler = open_scheduler(kind, Path(home))
supervisor = scheduler.cluster.pid if kind == "slurm" else scheduler.pid
print(scheduler.submit(Command.model_validate_json(command)), supervisor, flush=True)
time.sleep(60)
"""


@pytest.mark.parametrize("kind", BOTH)
def test_nothing_outlives_a_killed_owner(kind: Any, tmp_path: Path, shell) -> None:
    need(kind)
    home = tmp_path / "slurm"
    command = shell("setsid sleep 61 & echo up $$; sleep 60", name="job")
    argv = [sys.executable, "-c", OWNER, kind, str(home), command.model_dump_json()]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        first, supervisor = owner.stdout.readline().split()
        wait_until(lambda: "up" in text_of(command))
        kept = [int(supervisor), *descendants(int(supervisor))]
        assert len(kept) >= (7 if kind == "slurm" else 3)
        owner.kill()
    wait_until(lambda: all(start_time(pid) is None for pid in kept))
    with open_scheduler(kind, home) as again:
        # Known as failed; or, where the controller had not saved that it ran, tried once more
        # and refused by its claim. Either way it never runs a second time by itself.
        assert end_of(again, "job").state == "failed"
        assert text_of(command).count("up") == 1
        second = again.submit(shell("true", name="job"))
        assert second != first
        assert end_of(again, "job") == CommandStatus(state="succeeded", id=second, exit_code=0)
        if kind == "slurm":
            assert int(second) > int(first)


@pytest.mark.parametrize("kind", BOTH)
def test_a_killed_supervisor_takes_no_job_into_limbo(kind: Any, tmp_path: Path, shell) -> None:
    need(kind)
    with open_scheduler(kind, tmp_path / "slurm") as opened:
        command = shell("setsid sleep 61 & echo up $$; sleep 60", name="job")
        first = opened.submit(command)
        wait_until(lambda: "up" in text_of(command))
        supervisor = opened.cluster.pid if kind == "slurm" else opened.pid
        kept = descendants(supervisor)
        os.kill(supervisor, 9)
        forgotten = ["unknown"] * (kind == "slurm")  # by a controller that had not saved it yet
        assert end_of(opened, "job").state in ["failed", *forgotten]
        second = opened.submit(shell("echo again", name="job"))
        assert second != first
        assert end_of(opened, "job").state == "succeeded"
        assert text_of(command).count("up") == 1
        wait_until(lambda: all(start_time(pid) is None for pid in kept))
