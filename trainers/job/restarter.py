"""Restarter: a task of `cray-agents up` that keeps training jobs going without a client.

A job that died, was preempted, ran out of time or was resumed starts again when the trainer is
asked for its status (megatron_trainer.py). This task asks for every job that has not ended, but for
those whose commands wait or run as they did when they were last asked for. A round over a thousand
jobs then reads one folder and asks the scheduler once.
"""

import asyncio
import itertools
import logging
import os
from collections.abc import Iterator, Set
from contextlib import contextmanager

from cray_agents.errors import CrayError
from cray_agents.paths import Home
from cray_agents.ports import Trainer
from cray_agents.trainers.job.journal import JobJournal

EVERY = 5.0  # seconds between two rounds
RECHECK_ENDED = 12  # rounds between two looks at ended jobs: a failed one may be retried

log = logging.getLogger(__name__)


async def restart_unfinished_jobs(home: Home, trainer: Trainer, every: float = EVERY) -> None:
    """Ask for the status of every unfinished job, until cancelled; log each new error once."""
    ended: set[str] = set()
    troubles: dict[str, str] = {}
    for number in itertools.count():
        if number % RECHECK_ENDED == 0:
            ended.clear()
        jobs: list[str] = []
        with _noting("the jobs", troubles):
            unchanged = await asyncio.to_thread(trainer.unchanged)
            jobs = await asyncio.to_thread(unfinished_jobs, home, ended, unchanged)
        for job_id in jobs:
            with _noting(job_id, troubles):
                await asyncio.to_thread(trainer.status, job_id)
        await asyncio.sleep(every)


@contextmanager
def _noting(what: str, troubles: dict[str, str]) -> Iterator[None]:
    """Log an error unless it is the last one of the same thing."""
    try:
        yield
    except Exception as error:
        if troubles.get(what) != str(error):
            known = isinstance(error, CrayError | OSError)
            log.warning("%s: %s; asked again", what, error, exc_info=not known)
        troubles[what] = str(error)
    else:
        troubles.pop(what, None)


def unfinished_jobs(home: Home, ended: set[str], unchanged: Set[str] = frozenset()) -> list[str]:
    """Return the names of the jobs that have not ended, without the `unchanged` ones.

    Jobs that have ended are added to `ended`. The files of a job in either set are not looked at.
    """
    try:
        names = {entry.name for entry in os.scandir(home.jobs)}
    except FileNotFoundError:
        return []
    ended &= names
    unfinished = []
    for name in sorted(names - ended - unchanged):
        journal = JobJournal(home, name)
        if journal.ended:
            ended.add(name)
        elif journal.exists:
            unfinished.append(name)
    return unfinished
