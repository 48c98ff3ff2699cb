"""GPU turns: a task of `up` that lets replicas and training jobs use the same GPUs, one at a time.

A turn of training begins when a job waits for GPUs. Requests in flight end, the replicas sleep, and
the job starts, or its session goes on. The turn ends when no process of a job uses the GPUs: the
job has ended, or the session has moved its state to host memory. Then the replicas wake, and are
checked before they answer. A turn is for one job, and replicas have their turn after it.

Where NVIDIA's `cuda-checkpoint` is on the PATH (driver 570 or newer), requests that wait suspend a
job: the tool moves what its process has on the GPU to host memory. The job stands still while the
replicas have a turn, and goes on in its next. Of several processes with CUDA none is suspended: one
that is locked may keep the others, and with them the tool, waiting in NCCL. No GPU has run this.

All processes die with the platform. So the next one begins with awake replicas and waiting jobs.
Called by compose.py. Read next: `Pool.asleep`, `LocalProcesses.start_turn`, and
trainers/session/resident.py.
"""

import asyncio
import logging
import os
import shutil
import signal
import subprocess
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cray_agents.errors import CrayError, Overtaken, PoolBusy
from cray_agents.paths import Home
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.trainers.job.session_journal import sessions

LEAST, MOST = 2.0, 60.0  # seconds of the replicas' turn: at least, and at most while they are asked
EVERY = 0.2  # seconds between two looks for a job that waits, or at the job that trains
TOOL = "cuda-checkpoint"
LOCK_SECONDS = 5  # for the work that a process has given to its GPU
COPY_SECONDS = 600  # for the memory of a process

log = logging.getLogger(__name__)


class TrainingSide:
    """The jobs that use the GPUs by turns. All methods read files: call them in a thread.

    Jobs are suspended once requests have waited for `patience` seconds, and not before they have
    had the GPUs for `work` seconds.
    """

    def __init__(
        self, home: Home, scheduler: LocalProcesses, patience: float = 1.0, work: float = 10.0
    ) -> None:
        self._home, self._scheduler = home, scheduler
        self.patience, self.work = patience, work
        self._given: set[str] = set()  # the sessions that got this turn
        self._suspended: dict[int, int] = {}  # process groups, with their process on the GPU
        self.end()  # the turn of a platform that was killed

    def wants(self) -> bool:
        """Return True if a job would go on with a turn."""
        if self._suspended or self._scheduler.turn_wanted():
            return True
        living = set(self._scheduler.on_gpus())
        return any(each.session_id in living and each.queue() for each in sessions(self._home))

    def start(self) -> None:
        """Give the GPUs to the jobs that were suspended, else to those that wait."""
        if self._suspended:
            self._resume()
            return
        for session in sessions(self._home):
            if session.queue():
                session.give_turn()
                self._given.add(session.session_id)
        self._scheduler.start_turn()

    def is_over(self) -> bool:
        """Return True if no process of a job uses the GPUs any more."""
        away = {each.session_id for each in sessions(self._home) if not each.has_turn}
        return all(name in away for name in self._scheduler.on_gpus())

    def suspend(self) -> bool:
        """Free the GPUs of the jobs, which then stand still. Return False if none does.

        A job that the tool leaves broken is killed. It starts again from its resume point.
        """
        if shutil.which(TOOL) is None:
            return False
        on_gpus = {group: _on_gpu(group) for group in self._scheduler.on_gpus().values()}
        if any(len(pids) != 1 for pids in on_gpus.values()):
            return False
        for group, (pid,) in on_gpus.items():
            if not _order(pid, "lock", "--timeout", str(1000 * LOCK_SECONDS)):
                _order(pid, "unlock")
                self._resume()
                return False
            if _order(pid, "checkpoint"):
                _signal(group, signal.SIGSTOP)  # its launcher, too, which looks for signs of life
                self._suspended[group] = pid
            else:
                _kill(group)
        return bool(self._suspended)

    def _resume(self) -> None:
        living = self._scheduler.on_gpus().values()
        for group, pid in self._suspended.items():
            if group in living:
                _signal(group, signal.SIGCONT)
                if not (_order(pid, "restore") and _order(pid, "unlock")):
                    _kill(group)
        self._suspended.clear()

    def end(self) -> dict[str, float]:
        """Take the GPUs back; return the seconds in which sessions came to them and left them."""
        seconds: dict[str, float] = {}
        for session in sessions(self._home):
            session.end_turn()
            if session.session_id in self._given:
                seconds |= session.turn_seconds
        self._given.clear()
        return seconds


async def take_turns(
    pool: Pool,
    training: TrainingSide,
    is_asked: Callable[[], bool],
    *,
    least: float = LEAST,
    most: float = MOST,
    every: float = EVERY,
    report: Callable[[str], None] = log.info,
) -> None:
    """Let training have a turn whenever a job waits for one, until cancelled.

    `is_asked`: tells whether requests are under way or wait. After each turn the replicas have the
    GPUs for `least` seconds, and while they are asked or change versions for up to `most`.
    `report` gets a line at the begin and the end of a turn.
    """
    woke = time.monotonic()
    while True:
        await asyncio.sleep(every)
        replicas_turn = most if is_asked() or pool.swapping or not pool.ready else least
        if time.monotonic() - woke < replicas_turn:
            continue
        try:
            if await asyncio.to_thread(training.wants):
                await one_turn(pool, training, is_asked, every, report)
                woke = time.monotonic()
        except (PoolBusy, Overtaken) as error:
            log.warning("a job waits on for its turn on the GPU: %s", error)
            woke = time.monotonic()


async def one_turn(
    pool: Pool,
    training: TrainingSide,
    is_asked: Callable[[], bool],
    every: float,
    report: Callable[[str], None],
) -> None:
    """Let the replicas sleep, the waiting jobs train, and the replicas wake.

    Raises PoolBusy or Overtaken where the replicas do not fall asleep.
    """
    report("a job waits for the GPU: the replicas go to sleep")
    async with pool.asleep() as seconds:
        begun = time.monotonic()
        try:
            await asyncio.to_thread(training.start)
        except (CrayError, OSError) as error:  # of those that started, the end is waited for
            log.warning("a job that waits for the GPU did not start: %s", error)
        due = begun + training.work  # when requests that wait suspend the jobs
        while not await _look(training.is_over):
            if not is_asked():
                due = max(due, time.monotonic() + training.patience)
            elif time.monotonic() >= due:
                if await _look(training.suspend):
                    report("requests wait for the GPU: what trains is suspended")
                    break
                due = time.monotonic() + MOST
            await asyncio.sleep(every)
        else:
            seconds |= await asyncio.to_thread(training.end)
        seconds["train"] = time.monotonic() - begun
    pool.note_turn(seconds)
    phases = ", ".join(f"{phase} {value:.2f} s" for phase, value in seconds.items())
    report(f"a turn of training on the GPU is over: {phases}")


async def _look(look: Callable[[], bool]) -> bool:
    """Return what a look at the jobs tells; False while nothing can be learned."""
    try:
        return await asyncio.to_thread(look)
    except OSError as error:
        log.warning("the jobs on the GPU cannot be looked up: %s", error)
        return False


def _on_gpu(group: int) -> list[int]:
    """Return the processes of a group that use CUDA."""
    found = []
    for entry in Path("/proc").iterdir():
        with suppress(ProcessLookupError):
            if entry.name.isdigit() and os.getpgid(int(entry.name)) == group:
                found.append(int(entry.name))
    return [pid for pid in found if _run("--get-state", "--pid", str(pid))]


def _order(pid: int, action: str, *more: str) -> bool:
    return _run("--action", action, "--pid", str(pid), *more)


def _run(*words: str) -> bool:
    """Run the tool; return False if it fails."""
    try:
        subprocess.run([TOOL, *words], capture_output=True, timeout=COPY_SECONDS, check=True)
    except (OSError, subprocess.SubprocessError):
        return False
    return True


def _kill(group: int) -> None:
    """Kill a job that the tool left broken; its trainer starts it again."""
    log.warning("%s failed: the job of process %d starts again from its resume point", TOOL, group)
    _signal(group, signal.SIGKILL)


def _signal(group: int, number: int) -> None:
    with suppress(ProcessLookupError):
        os.killpg(group, number)
