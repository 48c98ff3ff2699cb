"""Background tasks: start the work that nobody awaits, see how it ends, and start it again.

A task may fail by an error that its code did not foresee. That is logged with its traceback, once
for equal errors, and counted: /metrics and the health warnings show it. `BackgroundTasks.keep` then
starts the work again, after a pause that grows.

Some work is not started again, as its end has to end the process: the thread of the controller's
lease (controller_lease.py), the HTTP server and the first start of the replicas (compose.py), the
wait for a further gateway's end (further_process.py), and the tasks of the batch worker, whose
process compose.py starts again.
"""

import asyncio
import logging
import time
from collections.abc import Callable, Coroutine
from typing import Any, NamedTuple, TypeVar

from cray_agents.errors import CrayError

PAUSE = (0.5, 30.0)  # seconds before a restart: after the first failure, and at most
STEADY = 60.0  # seconds of work after which the pause is the shortest again
RECALLED = 3600.0  # seconds after a failure until an equal one is logged again
FORESEEN = (CrayError, OSError)

T = TypeVar("T")

log = logging.getLogger(__name__)


class TaskFailure(NamedTuple):
    """The failures of a task: their number, the last error, and its time in unix seconds."""

    number: int
    error: str
    time: float


class TaskFailures:
    """The failures of this process's background tasks, by the name of the task."""

    def __init__(self) -> None:
        self.by_task: dict[str, TaskFailure] = {}

    def add(self, task: str, error: BaseException, about: str = "") -> None:
        """Count a failure, and log it unless it is the last one again. `about`: for the log.

        Errors of this package and of the operating system need no traceback.
        """
        text = f"{type(error).__name__}: {error}"
        last = self.by_task.get(task, TaskFailure(0, "", 0.0))
        self.by_task[task] = TaskFailure(last.number + 1, text, time.time())
        if last.error != text or time.time() - last.time > RECALLED:
            named = f"{task} ({about})" if about else task
            traceback = None if isinstance(error, FORESEEN) else error
            log.error("background task failed: %s: %s", named, text, exc_info=traceback)


#: One for the process, as is its log.
FAILURES = TaskFailures()


def start_task(name: str, work: Coroutine[Any, Any, T], about: str = "") -> asyncio.Task[T]:
    """Start work whose failure is logged and counted, whether or not somebody awaits the task.

    `name`: of the kind of work, a label in metrics. `about`: the instance, for the log. Errors of
    this package and of the operating system are foreseen: who awaits the task handles them.
    """

    def see_end(task: asyncio.Task[T]) -> None:
        if task.cancelled() or (error := task.exception()) is None:
            return
        if isinstance(error, FORESEEN):
            log.info("%s: %s", about or name, error)
        else:
            FAILURES.add(name, error, about)

    task = asyncio.create_task(work, name=name)
    task.add_done_callback(see_end)
    return task


class BackgroundTasks:
    """The tasks of one owner, for one event loop. Close it when done; it may be used again then."""

    def __init__(self) -> None:
        self._tasks: set[asyncio.Task[Any]] = set()

    def run(self, name: str, work: Coroutine[Any, Any, T], about: str = "") -> asyncio.Task[T]:
        """Do work once: see `start_task`."""
        return self._hold(start_task(name, work, about))

    def keep(
        self, name: str, work: Callable[[], Coroutine[Any, Any, None]], about: str = ""
    ) -> asyncio.Task[None]:
        """Do work until it returns; start it again whenever it fails. Names: see `start_task`."""
        return self._hold(start_task(name, _keep(name, work, about), about))

    async def close(self) -> None:
        """Cancel all tasks; return when they have ended."""
        while tasks := self._tasks - {asyncio.current_task()}:
            for task in tasks:
                task.cancel()
            await asyncio.wait(tasks)

    def _hold(self, task: asyncio.Task[T]) -> asyncio.Task[T]:
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)
        return task


class ChangeNotifier:
    """Wake every waiter on each change. Unlike asyncio.Condition, notify() needs no lock.

    `changes` counts them.
    """

    def __init__(self) -> None:
        self.changes = 0
        self._next = asyncio.Event()

    def notify(self) -> None:
        """Count a change, and wake every waiter."""
        self.changes += 1
        self.wake()

    def wake(self) -> None:
        """Wake every waiter, as what it waits for may have come without a change."""
        self._next.set()
        self._next = asyncio.Event()

    def wait(self) -> Coroutine[Any, Any, object]:
        """Return at the next change after this call."""
        return self._next.wait()

    async def wait_until(self, condition: Callable[[], bool], seconds: float) -> None:
        """Return when the condition holds. Raises TimeoutError."""
        async with asyncio.timeout(seconds):
            while not condition():
                await self.wait()


async def _keep(name: str, work: Callable[[], Coroutine[Any, Any, None]], about: str) -> None:
    pause = PAUSE[0]
    while True:
        begun = time.monotonic()
        task = asyncio.create_task(work(), name=name)
        try:
            await asyncio.wait({task})
        except asyncio.CancelledError:
            task.cancel()
            await asyncio.wait({task})  # what it has to tidy up
            raise
        error = asyncio.CancelledError() if task.cancelled() else task.exception()
        if error is None:
            return
        FAILURES.add(name, error, about)
        steady = time.monotonic() - begun > STEADY
        pause = PAUSE[0] if steady else pause
        await asyncio.sleep(pause)
        pause = min(2 * pause, PAUSE[1])
