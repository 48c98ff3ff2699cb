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


class Site:
    """A pool of one scripted replica, and a task that gives turns to the scheduler's jobs."""

    def __init__(
        self, pool: Pool, engine: ScriptedEngine, home: Home, scheduler: LocalProcesses
    ) -> None:
        self.pool, self.engine, self.home, self.scheduler = pool, engine, home, scheduler
        self.training = TrainingSide(home, scheduler, patience=0.0, work=0.0)
        self.asked = False
        self.lines: list[str] = []

    def begin(self, most: float = 1e9) -> asyncio.Task[None]:
        return asyncio.create_task(
            take_turns(self.pool, self.training, lambda: self.asked, least=0.0, most=most,
                       every=0.005, report=self.lines.append)
        )  # fmt: skip

    def submit(self, name: str) -> None:
        self.scheduler.submit(job(self.home, name))

    def runs(self, name: str) -> bool:
        return (self.home.jobs / f"{name}.runs").exists()

    def stop(self, name: str) -> None:
        (self.home.jobs / f"{name}.stop").touch()

    async def pid_of(self, name: str) -> int:
        return await written_pid(self.home.jobs / f"{name}.runs")

    async def train_while_asked(self) -> int:
        """Begin a job, then let requests wait for the GPU; return the job's process."""
        self.submit("first")
        pid = await self.pid_of("first")
        self.asked = True
        return pid

    def state_of(self, name: str) -> str:
        return self.scheduler.status(name).state

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
        site = Site(pool, engine, home, scheduler)
        task = site.begin()
        yield site
        task.cancel()
        with suppress(asyncio.CancelledError):
            await task


@pytest.fixture
async def here(tmp_path: Path, home: Home, scheduler: LocalProcesses) -> AsyncIterator[Site]:
    async with site(tmp_path, home, scheduler) as site_of_test:
        yield site_of_test


async def test_a_job_trains_while_the_replica_sleeps_and_requests_wait(here: Site) -> None:
    assert await ask(here.pool, "m@1") == "m@1"
    here.submit("first")
    assert "replicas use them first" in here.scheduler.status("first").reason
    await until(lambda: here.runs("first"))
    assert here.engine.asleep and here.state == "sleeping"
    waiting = asyncio.create_task(ask(here.pool, "m@1"))
    here.submit("second")
    here.stop("first")
    assert await waiting == "m@1"  # between two jobs, replicas have their turn
    await until(lambda: here.runs("second"))
    assert here.turns == 1 and here.engine.asleep
    here.stop("second")
    await until(lambda: here.turns == 2)
    assert here.state == "serving" and not here.engine.asleep
    assert here.pool.turns and here.pool.turns.keys() == {
        *("turns", "drain", "sleep", "train", "wake", "prove")
    }
    assert "train" in here.lines[-1] and len(here.lines) == 4


async def test_a_killed_job_gives_the_gpu_back(here: Site) -> None:
    here.submit("first")
    os.kill(await here.pid_of("first"), signal.SIGKILL)
    await until(lambda: here.turns == 1)
    assert await ask(here.pool, "m@1") == "m@1"
    assert here.state_of("first") == "failed"


def session_of(home: Home) -> tuple[SessionJournal, Command]:
    """A session with a job in its queue, and the command that starts it."""
    spec = SessionSpec(name="loop", turns=True)
    session = SessionJournal(home, spec.id)
    session.write_spec(spec)
    session.hand_over("one")
    return session, command(spec.id, session.folder, SESSION.format(session.folder))


async def test_a_session_stays_between_its_turns(here: Site) -> None:
    session, its_command = session_of(here.home)
    here.scheduler.submit(its_command)
    done: list[str] = []
    for name in ("one", "two"):
        done.append(name)
        session.hand_over(name)
        await until(lambda: here.state == "sleeping" and session.has_turn)
        (session.folder / f"{name}.stop").touch()
        await until(lambda: here.turns == len(done) and here.state == "serving")
        assert not session.has_turn and session.queue() == []
        assert here.state_of(session.session_id) == "running"
        assert await ask(here.pool, "m@1") == "m@1"
    pid = int((session.folder / "runs").read_text())
    session.hand_over("three")
    await until(lambda: session.has_turn)
    os.kill(pid, signal.SIGKILL)  # within its turn
    await until(lambda: here.turns == 3)
    assert here.state == "serving" and not session.has_turn


async def test_a_job_waits_for_replicas_that_are_asked(here: Site) -> None:
    here.asked = True
    here.submit("first")
    for _ in range(20):
        await asyncio.sleep(0.005)
    assert here.state == "serving" and not here.runs("first")
    impatient = here.begin(most=0.0)
    await until(lambda: here.runs("first"))
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
        here.submit("first")
        await until(lambda: here.state == "sleeping")
        await until(lambda: here.state == "serving")  # it gave up for now
        assert not here.runs("first")
        ended.set()
        assert await answer == "m@1"
        await until(lambda: here.runs("first"))


async def test_the_end_of_the_platform_does_not_wait_for_a_turn(
    tmp_path: Path, home: Home, scheduler: LocalProcesses
) -> None:
    async with site(tmp_path, home, scheduler) as here:
        here.submit("first")
        await until(lambda: here.runs("first"))
    assert here.engine.asleep and here.turns == 0


#: NVIDIA's tool: jobs that say that they run use CUDA, and the order fails that `fails` names.
TOOL = """#!/bin/sh
cd "{0}"
case "$1" in
  --get-state) grep -qsx "$3" {1}/jobs/*.runs {1}/sessions/*/runs ;;
  --action) echo "$2" >> orders; ! grep -qx "$2" fails ;;
esac
"""


class CudaCheckpoint:
    """A stand-in for NVIDIA's tool, on the PATH."""

    def __init__(self, folder: Path, root: Path) -> None:
        self._orders, self._fails = folder / "orders", folder / "fails"
        self._orders.touch()
        self._fails.touch()
        (folder / "cuda-checkpoint").write_text(TOOL.format(folder, root))
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
    return CudaCheckpoint(folder, home.root)


async def written_pid(file: Path) -> int:
    await until(lambda: file.exists() and bool(file.read_text()))
    return int(file.read_text())


def stands_still(pid: int) -> bool:
    """Tell whether a process of its group is stopped: a shell that just forked waits for that."""
    group, found = str(os.getpgid(pid)), []
    for file in Path("/proc").glob("[0-9]*/stat"):
        with suppress(OSError):
            found.append(file.read_text().rpartition(")")[2].split()[:3])
    return any((state, its) == ("T", group) for state, _, its in found)


async def test_requests_that_wait_suspend_a_job(here: Site, tool: CudaCheckpoint) -> None:
    pid = await here.train_while_asked()
    assert await ask(here.pool, "m@1") == "m@1"
    await until(lambda: stands_still(pid))
    assert tool.orders == ["lock", "checkpoint"]
    here.asked = False
    await until(lambda: not stands_still(pid))
    here.stop("first")
    await until(lambda: here.state_of("first") == "succeeded" and here.turns == 2)
    assert tool.orders == ["lock", "checkpoint", "restore", "unlock"]
    assert await ask(here.pool, "m@1") == "m@1"


async def test_requests_that_wait_suspend_a_session_within_its_turn(
    here: Site, tool: CudaCheckpoint
) -> None:
    session, its_command = session_of(here.home)
    here.scheduler.submit(its_command)
    pid = await written_pid(session.folder / "runs")
    for count, name in enumerate(("one", "two"), 1):
        session.hand_over(name)
        await until(lambda: session.has_turn)
        here.asked = True
        assert await ask(here.pool, "m@1") == "m@1"
        await until(lambda: stands_still(pid))
        (session.folder / f"{name}.stop").touch()  # done, once it goes on
        assert session.has_turn and session.queue() == [name]
        here.asked = False
        await until(lambda: not session.has_turn and here.state == "serving")
        assert session.queue() == []
        assert tool.orders == count * ["lock", "checkpoint", "restore", "unlock"]
        assert here.state_of(its_command.name) == "running"


async def test_a_job_whose_work_on_the_gpu_does_not_end_is_not_suspended(
    here: Site, tool: CudaCheckpoint
) -> None:
    tool.fails("lock")
    pid = await here.train_while_asked()
    waiting = asyncio.create_task(ask(here.pool, "m@1"))
    await until(lambda: tool.orders == ["lock", "unlock"])
    assert not stands_still(pid) and not waiting.done()
    here.stop("first")
    assert await waiting == "m@1"
    await until(lambda: here.turns == 1)
    assert tool.orders == ["lock", "unlock"]


@pytest.mark.parametrize("order", ["checkpoint", "restore"])
async def test_a_job_that_the_tool_breaks_is_killed(
    here: Site, order: str, tool: CudaCheckpoint
) -> None:
    tool.fails(order)
    await here.train_while_asked()
    assert await ask(here.pool, "m@1") == "m@1"
    here.asked = False
    await until(lambda: here.state_of("first") == "failed")
    await until(lambda: here.state == "serving")
    assert tool.orders[-1] == order
    assert await ask(here.pool, "m@1") == "m@1"


async def test_a_job_of_several_processes_is_not_suspended(
    here: Site, tool: CudaCheckpoint
) -> None:
    ranks = [JOB.format(here.home.jobs / name) for name in ("first", "second")]
    here.scheduler.submit(
        command("job", here.home.jobs, f"/bin/sh -c '{ranks[0]}' & {ranks[1]}; wait")
    )
    assert await here.pid_of("first") != await here.pid_of("second")
    here.asked = True
    assert not await asyncio.to_thread(here.training.suspend)
    waiting = asyncio.create_task(ask(here.pool, "m@1"))
    here.stop("first")
    here.stop("second")
    assert await waiting == "m@1" and not tool.orders


async def test_a_suspended_job_may_be_cancelled(here: Site, tool: CudaCheckpoint) -> None:
    pid = await here.train_while_asked()
    await until(lambda: stands_still(pid) and here.turns == 1)
    here.scheduler.cancel("first")
    await until(lambda: here.state_of("first") == "cancelled")
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
    session, its_command = session_of(home)
    argv = [sys.executable, "-c", KILLED, str(home.root)]
    argv += [each.model_dump_json() for each in (its_command, job(home, "second"))]
    with subprocess.Popen(argv, stdout=subprocess.PIPE, text=True) as former:  # noqa: ASYNC220
        assert former.stdout and former.stdout.readline() == "started\n"
        assert session.has_turn
        former.kill()
    with LocalProcesses(home.slurm, grace=0.2, gpus=["0"], turns=True) as scheduler:
        training = TrainingSide(home, scheduler)
        assert not session.has_turn and training.is_over()  # nothing is on the GPU
        assert scheduler.status(its_command.name).state == "failed"  # the trainer starts it again
        assert scheduler.status("second").state == "queued" and training.wants()
        async with site(tmp_path, home, scheduler) as here:
            await until(lambda: here.runs("second"))
            assert not session.has_turn or its_command.name not in scheduler.on_gpus()


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
