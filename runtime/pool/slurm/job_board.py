"""Job board: the states of all replicas' jobs, for which Slurm is asked once a poll interval.

Asked by slurm_replica.py, once for each replica that waits for news.
"""

import asyncio
import time
from collections.abc import Callable
from typing import Any

from cray_agents.errors import CrayError
from cray_agents.ports import CommandStatus, Scheduler
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.controller_lease import unguarded

POLL = 2.0  # seconds between two questions to Slurm about all jobs together


class JobBoard:
    """The states of all replicas' jobs. Slurm is asked about all of them at once.

    `term`: returns the controller's term, which supervisors are told.
    """

    def __init__(
        self, scheduler: Scheduler, seconds: float = POLL, term: Callable[[], int] = unguarded
    ) -> None:
        self.scheduler, self.term = scheduler, term
        self.watched = 0  # jobs, at the last poll
        self._seconds = seconds
        self._next = 0.0
        self._waiting: dict[str, list[tuple[asyncio.Future[CommandStatus], Any]]] = {}
        self._tasks = BackgroundTasks()
        self._polls = False

    async def status(self, name: str, seen: CommandStatus | None = None) -> CommandStatus:
        """Return a job's status at the next poll, or when it is no longer the one that was `seen`.

        Raises SchedulerError.
        """
        future: asyncio.Future[CommandStatus] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append((future, seen))
        if not self._polls:
            self._polls = True
            self._tasks.keep("job board", self._poll)
        return await future

    async def _poll(self) -> None:
        while self._waiting:
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
            self._next = time.monotonic() + self._seconds
            waiting, self._waiting = self._waiting, {}
            self.watched = len(waiting)
            answers: dict[str, CommandStatus | Exception] = {}
            try:
                answers = await asyncio.to_thread(self._ask, list(waiting))
            finally:  # who asked in vain asks again at the next poll
                for name in waiting.keys() - answers.keys():
                    self._waiting.setdefault(name, []).extend(waiting[name])
            for name, answer in answers.items():
                for future, seen in waiting[name]:
                    if future.done():  # who asked was cancelled
                        continue
                    if answer == seen:
                        self._waiting.setdefault(name, []).append((future, seen))
                    elif isinstance(answer, CommandStatus):
                        future.set_result(answer)
                    else:
                        future.set_exception(answer)
        self._polls = False

    def _ask(self, names: list[str]) -> dict[str, CommandStatus | Exception]:
        answers: dict[str, CommandStatus | Exception] = {}
        for name in names:
            try:
                answers[name] = self.scheduler.status(name)
            except (CrayError, OSError, ValueError) as error:  # each asker gets it
                answers[name] = error
        return answers
