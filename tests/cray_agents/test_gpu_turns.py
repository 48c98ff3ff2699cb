"""Turns on a GPU: jobs and replicas use it one after the other; told GPUs, no GPU is needed."""

import asyncio
import os
import signal
import subprocess
import sys
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import pytest

from cray_agents.config import load_config
from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import BadInput
from cray_agents.loop.phase_timer import PhaseTimer
from cray_agents.paths import Home
from cray_agents.ports import Command
from cray_agents.records import ModelVersion
from cray_agents.runtime.pool import vllm_process
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.pool.vllm_process import VllmProcess
from cray_agents.runtime.pool.vllm_process import command as vllm_command
from cray_agents.runtime.scheduler.gpu_placement import place_on_host
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.server import compose
from cray_agents.server.gpu_turns import TrainingSide, take_turns
from cray_agents.trainers.job.session_journal import SessionJournal, SessionSpec
from cray_agents.trainers.planning.cluster_resources import Gpus, Resources
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_platform import platform
from tests.support.scripted_pool import ask, says_version, serving, until

#: A job by its folder: it says that it runs, and ends when it is told to.
JOB = 'echo $$ > "{0}.runs"; while [ ! -e "{0}.stop" ]; do sleep 0.01; done'
#: A session by its folder: it does what is queued in its turn, and stays.
SESSION = """
cd "{0}"; echo $$ > runs
while [ ! -e end ]; do
  if [ -e turn ]; then
    for job in queue/*; do
      [ -e "$job" ] || continue
      while [ ! -e "$(basename $job).stop" ]; do sleep 0.01; done
      rm "$job"; break
    done
    rm -f turn
  fi
  sleep 0.01
done
"""


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


@pytest.fixture
def scheduler(home: Home) -> Iterator[LocalProcesses]:
    with LocalProcesses(home.slurm, grace=0.2, gpus=["0"], turns=True) as local:
        yield local


def command(name: str, folder: Path, script: str) -> Command:
    folder.mkdir(parents=True, exist_ok=True)
    argv = ["/bin/sh", "-c", script]
    log = str(folder / f"{name}.log")
    return Command(name=name, argv=argv, directory=str(folder), log=log, gpus=True)


def job(home: Home, name: str) -> Command:
    return command(name, home.jobs, JOB.format(home.jobs / name))


def runs(home: Home, name: str) -> bool:
    return (home.jobs / f"{name}.runs").exists()


def stop(home: Home, name: str) -> None:
    (home.jobs / f"{name}.stop").touch()


class Site:
    """A pool of one scripted replica, and a task that gives turns to the scheduler's jobs."""

    def __init__(self, pool: Pool, engine: ScriptedEngine, training: TrainingSide) -> None:
        self.pool, self.engine, self.training = pool, engine, training
        self.asked = False
        self.lines: list[str] = []

    def begin(self, most: float = 1e9) -> asyncio.Task[None]:
        return asyncio.create_task(
            take_turns(self.pool, self.training, lambda: self.asked, least=0.0, most=most,
                       every=0.005, report=self.lines.append)
        )  # fmt: skip

    @property
    def turns(self) -> int:
        return int((self.pool.turns or {}).get("turns", 0))

    @property
    def state(self) -> str:
        return str(self.pool.status()[0]["state"])


@asynccontextmanager
async def site(
    tmp_path: Path, home: Home, scheduler: LocalProcesses, **settings: Any
) -> AsyncIterator[Site]:
    engine = ScriptedEngine(says_version)
    async with serving(tmp_path, InProcessEngine(engine), **settings) as pool:
        site = Site(pool, engine, TrainingSide(home, scheduler, patience=0.0, work=0.0))
        task = site.begin()
        yield site
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


async def test_a_job_trains_while_the_replica_sleeps_and_requests_wait(
    tmp_path: Path, home: Home, scheduler: LocalProcesses
) -> None:
    async with site(tmp_path, home, scheduler) as here:
        assert await ask(here.pool, "m@1") == "m@1"
        scheduler.submit(job(home, "first"))
        assert "replicas use them first" in scheduler.status("first").reason
        await until(lambda: runs(home, "first"))
        assert here.engine.asleep and here.state == "sleeping"
        waiting = asyncio.create_task(ask(here.pool, "m@1"))
        scheduler.submit(job(home, "second"))
        stop(home, "first")
        assert await waiting == "m@1"  # between two jobs, replicas have their turn
        await until(lambda: runs(home, "second"))
        assert here.turns == 1 and here.engine.asleep
        stop(home, "second")
        await until(lambda: here.turns == 2)
        assert here.state == "serving" and not here.engine.asleep
        assert here.pool.turns and here.pool.turns.keys() == {
            *("turns", "drain", "sleep", "train", "wake", "prove")
        }
        assert "train" in here.lines[-1] and len(here.lines) == 4


async def test_a_killed_job_gives_the_gpu_back(
    tmp_path: Path, home: Home, scheduler: LocalProcesses
) -> None:
    async with site(tmp_path, home, scheduler) as here:
        scheduler.submit(job(home, "first"))
        os.kill(await pid_of(home, "first"), signal.SIGKILL)
        await until(lambda: here.turns == 1)
        assert await ask(here.pool, "m@1") == "m@1"
        assert scheduler.status("first").state == "failed"


async def test_a_session_stays_between_its_turns(
    tmp_path: Path, home: Home, scheduler: LocalProcesses
) -> None:
    spec = SessionSpec(name="loop", turns=True)
    session = SessionJournal(home, spec.id)
    session.write_spec(spec)
    async with site(tmp_path, home, scheduler) as here:
        session.hand_over("one")
        scheduler.submit(command(spec.id, session.folder, SESSION.format(session.folder)))
        done: list[str] = []
        for name in ("one", "two"):
            done.append(name)
            session.hand_over(name)
            await until(lambda: here.state == "sleeping" and session.has_turn)
            (session.folder / f"{name}.stop").touch()
            await until(lambda: here.turns == len(done) and here.state == "serving")
            assert not session.has_turn and session.queue() == []
            assert scheduler.status(spec.id).state == "running"
            assert await ask(here.pool, "m@1") == "m@1"
        pid = int((session.folder / "runs").read_text())
        session.hand_over("three")
        await until(lambda: session.has_turn)
        os.kill(pid, signal.SIGKILL)  # within its turn
        await until(lambda: here.turns == 3)
        assert here.state == "serving" and not session.has_turn


async def test_a_job_waits_for_replicas_that_are_asked(
    tmp_path: Path, home: Home, scheduler: LocalProcesses
) -> None:
    async with site(tmp_path, home, scheduler) as here:
        here.asked = True
        scheduler.submit(job(home, "first"))
        for _ in range(20):
            await asyncio.sleep(0.005)
        assert here.state == "serving" and not runs(home, "first")
        impatient = here.begin(most=0.0)
        await until(lambda: runs(home, "first"))
        impatient.cancel()


async def test_answers_that_do_not_end_let_the_job_wait(
    tmp_path: Path, home: Home, scheduler: LocalProcesses
) -> None:
    ended = asyncio.Event()

    async def stuck(request: dict[str, Any], version: str) -> str:
        await ended.wait()
        return version

    async with site(tmp_path, home, scheduler, drain_timeout=0.02) as here:
        here.engine._function = stuck
        answer = asyncio.create_task(ask(here.pool, "m@1"))
        await until(lambda: here.pool.status()[0]["in_flight"] == 1)
        scheduler.submit(job(home, "first"))
        await until(lambda: here.state == "sleeping")
        await until(lambda: here.state == "serving")  # it gave up for now
        assert not runs(home, "first")
        ended.set()
        assert await answer == "m@1"
        await until(lambda: runs(home, "first"))


async def test_the_end_of_the_platform_does_not_wait_for_a_turn(
    tmp_path: Path, home: Home, scheduler: LocalProcesses
) -> None:
    async with site(tmp_path, home, scheduler) as here:
        scheduler.submit(job(home, "first"))
        await until(lambda: runs(home, "first"))
    assert here.engine.asleep and here.turns == 0


#: NVIDIA's tool: jobs that say that they run use CUDA, and the order fails that `fails` names.
TOOL = """#!/bin/sh
cd "{0}"
case "$1" in
  --get-state) grep -qsx "$3" {1}/*.runs ;;
  --action) echo "$2" >> orders; ! grep -qx "$2" fails ;;
esac
"""


class CudaCheckpoint:
    """A stand-in for NVIDIA's tool, on the PATH."""

    def __init__(self, folder: Path, jobs: Path) -> None:
        self._orders, self._fails = folder / "orders", folder / "fails"
        self._orders.touch()
        self._fails.touch()
        (folder / "cuda-checkpoint").write_text(TOOL.format(folder, jobs))
        (folder / "cuda-checkpoint").chmod(0o700)

    def fails(self, order: str) -> None:
        self._fails.write_text(f"{order}\n")

    @property
    def orders(self) -> list[str]:
        return self._orders.read_text().split()


@pytest.fixture
def tool(tmp_path: Path, home: Home, monkeypatch: pytest.MonkeyPatch) -> CudaCheckpoint:
    folder = tmp_path / "tool"
    folder.mkdir()
    monkeypatch.setenv("PATH", str(folder), prepend=":")
    return CudaCheckpoint(folder, home.jobs)


async def pid_of(home: Home, name: str) -> int:
    await until(lambda: runs(home, name) and bool((home.jobs / f"{name}.runs").read_text()))
    return int((home.jobs / f"{name}.runs").read_text())


async def train_while_asked(here: Site, home: Home, scheduler: LocalProcesses) -> int:
    """Begin a job, then let requests wait for the GPU; return the job's process."""
    scheduler.submit(job(home, "first"))
    pid = await pid_of(home, "first")
    here.asked = True
    return pid


def stands_still(pid: int) -> bool:
    """Tell whether a process of its group is stopped: a shell that just forked waits for that."""
    group, found = str(os.getpgid(pid)), []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found.append(file.read_text().rpartition(")")[2].split()[:3])
    return any((state, its) == ("T", group) for state, _, its in found)


async def test_requests_that_wait_suspend_a_job(
    tmp_path: Path, home: Home, scheduler: LocalProcesses, tool: CudaCheckpoint
) -> None:
    async with site(tmp_path, home, scheduler) as here:
        pid = await train_while_asked(here, home, scheduler)
        assert await ask(here.pool, "m@1") == "m@1"
        await until(lambda: stands_still(pid))
        assert tool.orders == ["lock", "checkpoint"]
        here.asked = False
        await until(lambda: not stands_still(pid))
        stop(home, "first")
        await until(lambda: scheduler.status("first").state == "succeeded" and here.turns == 2)
        assert tool.orders == ["lock", "checkpoint", "restore", "unlock"]
        assert await ask(here.pool, "m@1") == "m@1"


async def test_a_job_whose_work_on_the_gpu_does_not_end_is_not_suspended(
    tmp_path: Path, home: Home, scheduler: LocalProcesses, tool: CudaCheckpoint
) -> None:
    tool.fails("lock")
    async with site(tmp_path, home, scheduler) as here:
        pid = await train_while_asked(here, home, scheduler)
        waiting = asyncio.create_task(ask(here.pool, "m@1"))
        await until(lambda: tool.orders == ["lock", "unlock"])
        assert not stands_still(pid) and not waiting.done()
        stop(home, "first")
        assert await waiting == "m@1"
        await until(lambda: here.turns == 1)
        assert tool.orders == ["lock", "unlock"]


@pytest.mark.parametrize("order", ["checkpoint", "restore"])
async def test_a_job_that_the_tool_breaks_is_killed(
    order: str, tmp_path: Path, home: Home, scheduler: LocalProcesses, tool: CudaCheckpoint
) -> None:
    tool.fails(order)
    async with site(tmp_path, home, scheduler) as here:
        await train_while_asked(here, home, scheduler)
        assert await ask(here.pool, "m@1") == "m@1"
        here.asked = False
        await until(lambda: scheduler.status("first").state == "failed")
        await until(lambda: here.state == "serving")
        assert tool.orders[-1] == order
        assert await ask(here.pool, "m@1") == "m@1"


async def test_a_job_of_several_processes_is_not_suspended(
    tmp_path: Path, home: Home, scheduler: LocalProcesses, tool: CudaCheckpoint
) -> None:
    async with site(tmp_path, home, scheduler) as here:
        ranks = [JOB.format(home.jobs / name) for name in ("first", "second")]
        scheduler.submit(command("job", home.jobs, f"/bin/sh -c '{ranks[0]}' & {ranks[1]}; wait"))
        assert await pid_of(home, "first") != await pid_of(home, "second")
        here.asked = True
        assert not await asyncio.to_thread(here.training.suspend)
        waiting = asyncio.create_task(ask(here.pool, "m@1"))
        stop(home, "first")
        stop(home, "second")
        assert await waiting == "m@1" and not tool.orders


async def test_a_suspended_job_may_be_cancelled(
    tmp_path: Path, home: Home, scheduler: LocalProcesses, tool: CudaCheckpoint
) -> None:
    async with site(tmp_path, home, scheduler) as here:
        pid = await train_while_asked(here, home, scheduler)
        await until(lambda: stands_still(pid) and here.turns == 1)
        scheduler.cancel("first")
        await until(lambda: scheduler.status("first").state == "cancelled")
        here.asked = False
        await until(lambda: here.turns == 2 and here.state == "serving")
        assert tool.orders == ["lock", "checkpoint"]
        assert await ask(here.pool, "m@1") == "m@1"


KILLED = """
import sys, time
from pathlib import Path
from cray_agents.ports import Command
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.paths import Home
from cray_agents.server.gpu_turns import TrainingSide
home = Home(Path(sys.argv[1]))
local = LocalProcesses(home.slurm, gpus=["0"], turns=True)
training = TrainingSide(home, local)
for command in sys.argv[2:]:
    local.submit(Command.model_validate_json(command))
training.start()
print("started", flush=True)
time.sleep(600)
"""


@pytest.mark.slow
async def test_after_a_platform_was_killed_in_a_turn_the_next_one_serves_first(
    tmp_path: Path, home: Home
) -> None:
    spec = SessionSpec(name="loop", turns=True)
    session = SessionJournal(home, spec.id)
    session.write_spec(spec)
    session.hand_over("one")
    jobs = [
        command(spec.id, session.folder, SESSION.format(session.folder)),
        job(home, "second"),
    ]
    argv = [sys.executable, "-c", KILLED, str(home.root)]
    argv += [each.model_dump_json() for each in jobs]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as former:  # noqa: ASYNC220
        assert former.stdout and former.stdout.readline() == "started\n"
        assert session.has_turn
        former.kill()
    with LocalProcesses(home.slurm, grace=0.2, gpus=["0"], turns=True) as scheduler:
        training = TrainingSide(home, scheduler)
        assert not session.has_turn and training.is_over()  # nothing is on the GPU
        assert scheduler.status(spec.id).state == "failed"  # the trainer starts it again
        assert scheduler.status("second").state == "queued" and training.wants()
        async with site(tmp_path, home, scheduler):
            await until(lambda: runs(home, "second"))
            assert not session.has_turn or spec.id not in scheduler.on_gpus()


async def test_an_iteration_has_the_seconds_of_its_own_turns(tmp_path: Path) -> None:
    pools: list[Pool] = []

    async def beside(pool: Pool) -> None:
        pools.append(pool)
        pool.note_turn({"drain": 1.0, "train": 8.0})

    with platform(tmp_path, ScriptedEngine(says_version), beside=beside) as where:
        timer = PhaseTimer(lambda progress: None)
        await until(lambda: bool(pools) and pools[0].turns is not None)
        await timer.begin(where, 0)
        assert (await timer.end(where))["turns"] == {}
        await timer.begin(where, 1)
        pools[0].note_turn({"drain": 0.5, "train": 2.0, "offload": 0.25})
        spent = await timer.end(where)
        assert spent["turns"] == {"turns": 1, "drain": 0.5, "train": 2.0, "offload": 0.25}
        await timer.begin(where, 2)
        pools[0]._turns = {"turns": 1.0, "drain": 0.1}  # as of another platform
        assert (await timer.end(where))["turns"] == {"turns": 1, "drain": 0.1}


def test_a_replica_by_turns_is_started_so_that_it_can_sleep(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(vllm_process, "has_gpu_build", lambda: True)
    monkeypatch.setattr(compose, "has_gpu_build", lambda: True)
    config = load_config({"home": str(tmp_path), "train_gpu": "H100"}, tmp_path)
    for gpus, flags in ((["0"], 1), (["0", "1"], 0)):
        placement = place_on_host(config, replicas=1, here=True, gpus=gpus)
        pool = compose.make_pool(config, "m", 1, placement)
        [slot] = pool._slots
        replica = slot.engine_host
        assert isinstance(replica, VllmProcess) and replica.devices == "0"
        line = vllm_command(tmp_path, ("m",), replica.settings)
        assert line.count("--enable-sleep-mode") == flags


def test_weights_larger_than_the_gpu_are_refused_at_the_start(tmp_path: Path) -> None:
    config = load_config({"home": str(tmp_path), "train_gpu": "H100"}, tmp_path)
    placement = place_on_host(config, replicas=1, here=True, gpus=["0"])
    version = ModelVersion(name="m", number=1, checkpoint="c", weights_sha256="0")
    folder = config.root.checkpoint("c")
    folder.mkdir(parents=True)
    (folder / "model.safetensors").write_bytes(bytes(3 * 2**20))
    compose.check_serving(config, version, placement, Resources(gpus=Gpus("H100", 79, 1)))
    tiny = Resources(gpus=Gpus("H100", 2 / 2**10, 1))
    with pytest.raises(BadInput, match=r"the weights of m@1 take .* --tensor-parallel-size 2 or"):
        compose.check_serving(config, version, placement, tiny)
