"""GPU turns: a task of `up` that lets replicas and training jobs use the same GPUs, one at a time.

A turn of training begins when a job waits for GPUs. Requests in flight end, the replicas sleep, and
the job starts, or its session goes on. The turn ends when no process of a job uses the GPUs: the
job has ended, or the session has moved its state to host memory. Then the replicas wake, and are
proven before they answer. A turn is for one job, and replicas have their turn after it.

All processes die with the platform. So the next one begins with awake replicas and waiting jobs.
Called by compose.py. Read next: `Pool.asleep`, `LocalProcesses.start_turn`, and
trainers/session/resident.py.
"""

import asyncio
import logging
import time
from collections.abc import Callable

from cray_agents.errors import CrayError, Overtaken, PoolBusy
from cray_agents.paths import Home
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.trainers.job.session_journal import sessions

LEAST, MOST = 2.0, 60.0  # seconds of the replicas' turn: at least, and at most while they are asked
EVERY = 0.2  # seconds between two looks for a job that waits, or at the job that trains

log = logging.getLogger(__name__)


class TrainingSide:
    """The jobs that use the GPUs by turns. All methods read files: call them in a thread."""

    def __init__(self, home: Home, scheduler: LocalProcesses) -> None:
        self._home, self._scheduler = home, scheduler
        self._given: set[str] = set()  # the sessions that got this turn
        self.end()  # the turn of a platform that was killed

    def wants(self) -> bool:
        """Return True if a job would go on with a turn."""
        if self._scheduler.turn_wanted():
            return True
        living = set(self._scheduler.on_gpus())
        return any(each.session_id in living and each.queue() for each in sessions(self._home))

    def start(self) -> None:
        """Give the GPUs to the jobs that wait."""
        for session in sessions(self._home):
            if session.queue():
                session.give_turn()
                self._given.add(session.session_id)
        self._scheduler.start_turn()

    def is_over(self) -> bool:
        """Return True if no process of a job uses the GPUs any more."""
        away = {each.session_id for each in sessions(self._home) if not each.has_turn}
        return all(name in away for name in self._scheduler.on_gpus())

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

    `is_asked`: tells whether requests are under way or wait, or versions change. After each turn
    the replicas have the GPUs for `least` seconds, and while they are asked for up to `most`.
    `report` gets a line at the begin and the end of a turn.
    """
    woke = time.monotonic()
    while True:
        await asyncio.sleep(every)
        replicas_turn = most if is_asked() or not pool.ready else least
        if time.monotonic() - woke < replicas_turn:
            continue
        try:
            if await asyncio.to_thread(training.wants):
                await one_turn(pool, training, every, report)
                woke = time.monotonic()
        except (PoolBusy, Overtaken) as error:
            log.warning("a job waits on for its turn on the GPU: %s", error)
            woke = time.monotonic()


async def one_turn(
    pool: Pool, training: TrainingSide, every: float, report: Callable[[str], None]
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
        while not await _is_over(training):  # noqa: ASYNC110 - other processes end
            await asyncio.sleep(every)
        seconds["train"] = time.monotonic() - begun
        seconds |= await asyncio.to_thread(training.end)
    pool.note_turn(seconds)
    phases = ", ".join(f"{phase} {value:.2f} s" for phase, value in seconds.items())
    report(f"a turn of training on the GPU is over: {phases}")


async def _is_over(training: TrainingSide) -> bool:
    """Tell whether the turn is over; while that cannot be learned, it is not."""
    try:
        return await asyncio.to_thread(training.is_over)
    except OSError as error:
        log.warning("the jobs on the GPU cannot be looked up: %s", error)
        return False
