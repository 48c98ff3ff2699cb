"""Local processes: hard time limits, one owner per directory, states kept in files."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cray_agents.errors import SchedulerError, SetupError
from cray_agents.ports import Command
from cray_agents.processes import start_time
from cray_agents.runtime.scheduler.local import LocalProcesses
from tests.support.waiting import wait_until


def command(folder: Path, script: str, name: str = "job") -> Command:
    return Command(
        name=name, argv=["/bin/sh", "-c", script], directory=str(folder), log=str(folder / "log")
    )


def settle(scheduler: LocalProcesses, name: str = "job") -> str:
    wait_until(lambda: scheduler.status(name).state != "running")
    return scheduler.status(name).state


def started(folder: Path) -> int:
    log = folder / "log"
    wait_until(lambda: log.exists() and log.read_text().endswith("\n"))
    return int(log.read_text().split()[0])


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


@pytest.mark.slow
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


# ---- GPUs: their number is told, and the commands print CUDA_VISIBLE_DEVICES
SHOW = 'echo "$CUDA_VISIBLE_DEVICES" > {0}.gpus; while [ ! -e {0}.stop ]; do sleep 0.02; done'


def job(folder: Path, name: str, ranks: int) -> Command:
    """A command that writes the GPUs it sees to NAME.gpus and ends when NAME.stop is there."""
    script = SHOW.format(folder / name)
    return command(folder, script, name).model_copy(update={"gpus": True, "ranks": ranks})


def gpus_of(folder: Path, name: str) -> str:
    """The GPUs that a job sees, as soon as it has begun."""
    seen = folder / f"{name}.gpus"
    return wait_until(lambda: seen.exists() and seen.read_text()).strip()


def stop(local: LocalProcesses, folder: Path, name: str) -> None:
    (folder / f"{name}.stop").touch()
    assert settle(local, name) == "succeeded"


def test_no_gpu_is_given_to_two_and_the_others_wait_in_order(tmp_path: Path) -> None:
    with LocalProcesses(tmp_path, gpus=["4", "GPU-5f", "MIG-6"]) as local:
        first = local.submit(job(tmp_path, "first", 2))
        wide = local.submit(job(tmp_path, "wide", 3))
        small = local.submit(job(tmp_path, "small", 1))  # its GPU is free, and not its turn
        assert gpus_of(tmp_path, "first") == "4,GPU-5f"
        waiting = local.status("small")
        assert (waiting.state, waiting.id) == ("queued", small)
        assert waiting.reason == "waits: 1 of 3 GPUs are free"
        assert local.submit(job(tmp_path, "wide", 3)) == wide != first
        local.submit(command(tmp_path, "echo $$", "on-cpu"))  # a command without GPUs never waits
        assert settle(local, "on-cpu") == "succeeded"
        stop(local, tmp_path, "first")
        assert local.status("wide").state == "running"
        assert gpus_of(tmp_path, "wide") == "4,GPU-5f,MIG-6"
        assert local.status("small").state == "queued" and not (tmp_path / "small.gpus").exists()
        local.cancel("wide")
        assert settle(local, "wide") == "cancelled"
        assert gpus_of(tmp_path, "small") == "4"
        local.submit(job(tmp_path, "last", 2))
        assert gpus_of(tmp_path, "last") == "GPU-5f,MIG-6"
        with pytest.raises(SchedulerError, match=r"takes 4 GPUs.*this host may use 3: .* layout"):
            local.submit(job(tmp_path, "huge", 4))
        assert local.status("huge").state == "unknown"


def test_a_waiting_command_is_cancelled_at_once(tmp_path: Path) -> None:
    with LocalProcesses(tmp_path, gpus=["0"]) as local:
        for name in ("first", "second", "third"):
            local.submit(job(tmp_path, name, 1))
        local.cancel("second")
        second = local.status("second")
        assert (second.state, second.exit_code) == ("cancelled", None)
        stop(local, tmp_path, "first")
        assert gpus_of(tmp_path, "third") == "0"
    assert not (tmp_path / "second.gpus").exists()
    with LocalProcesses(tmp_path, gpus=["0"]) as again:
        assert again.status("second").state == "cancelled"


OWNER = """
import sys, time
from pathlib import Path
from cray_agents.ports import Command
from cray_agents.runtime.scheduler.local import LocalProcesses
local = LocalProcesses(Path(sys.argv[1]), gpus=["0", "1", "2"])
for command in sys.argv[2:]:
    print(local.submit(Command.model_validate_json(command)), flush=True)
time.sleep(60)
"""


def test_waiting_commands_go_on_in_order_after_their_platform_was_killed(tmp_path: Path) -> None:
    jobs = [job(tmp_path, *each) for each in (("z", 2), ("wide", 3), ("y", 1), ("x", 2), ("a", 1))]
    argv = [sys.executable, "-c", OWNER, str(tmp_path), *(each.model_dump_json() for each in jobs)]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as owner:
        assert owner.stdout
        ids = [owner.stdout.readline().strip() for _ in jobs]
        assert gpus_of(tmp_path, "z") == "0,1"
        owner.kill()
    with LocalProcesses(tmp_path, gpus=["5", "6"]) as again:  # others than before, and fewer
        assert again.status("z").state == "failed"  # it ended with its platform: its GPUs are free
        assert again.status("wide").state == "failed"
        assert "takes 3 GPUs, one a rank, and jobs of this host may use 2" in (
            again.status("wide").reason
        )
        assert gpus_of(tmp_path, "y") == "5"
        assert [again.status(name).id for name in ("y", "x")] == ids[2:4]
        assert again.status("x").state == again.status("a").state == "queued"
        stop(again, tmp_path, "y")
        assert gpus_of(tmp_path, "x") == "5,6"
        (tmp_path / "z.gpus").unlink()
        again.submit(job(tmp_path, "z", 1))
        assert again.status("z").state == "queued"
        stop(again, tmp_path, "x")
        assert (gpus_of(tmp_path, "a"), gpus_of(tmp_path, "z")) == ("5", "6")
    assert not list(tmp_path.glob("local/*/*.waiting"))


def test_a_killed_supervisor_frees_its_gpus(tmp_path: Path) -> None:
    with LocalProcesses(tmp_path, gpus=["0", "1"]) as local:
        local.submit(job(tmp_path, "first", 2))
        local.submit(job(tmp_path, "second", 1))
        assert gpus_of(tmp_path, "first") == "0,1"
        os.kill(local.pid, 9)
        wait_until(lambda: local.status("second").state != "queued")
        assert gpus_of(tmp_path, "second") == "0"
        assert local.status("first").state == "failed"


def test_gpus_that_replicas_use_by_turns_are_given_out_in_a_turn(tmp_path: Path) -> None:
    with LocalProcesses(tmp_path, gpus=["0", "1"], turns=True) as local:
        assert not local.turn_wanted()
        for name, ranks in (("first", 1), ("second", 1), ("third", 1)):
            local.submit(job(tmp_path, name, ranks))
        local.submit(command(tmp_path, "true", "on-cpu"))
        assert settle(local, "on-cpu") == "succeeded"
        first = local.status("first")
        assert first.reason == "waits: 2 of 2 GPUs are free, and replicas use them first"
        assert local.turn_wanted() and not local.on_gpus()
        local.start_turn()
        assert gpus_of(tmp_path, "first") == "0" and gpus_of(tmp_path, "second") == "1"
        assert list(local.on_gpus()) == ["first", "second"] and not local.turn_wanted()
        stop(local, tmp_path, "first")
        assert local.status("third").state == "queued"  # its turn is the next one
        assert list(local.on_gpus()) == ["second"] and local.turn_wanted()
    with LocalProcesses(tmp_path, gpus=["0"], turns=True) as again:
        assert again.status("third").state == "queued" and again.turn_wanted()
        again.start_turn()
        assert gpus_of(tmp_path, "third") == "0"
