"""Restarter: a task of `cray-agents up` that keeps training jobs going without a client.

A job that died, was preempted, ran out of time or was resumed starts again when the trainer is
asked for its status (megatron_trainer.py). This task asks for every job that has not ended.
"""

import asyncio
import itertools
import logging
import os

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
        try:
            jobs = await asyncio.to_thread(unfinished_jobs, home, ended)
        except OSError as error:
            log.warning("the jobs in %s cannot be listed: %s", home.jobs, error)
            jobs = []
        for job_id in jobs:
            try:
                await asyncio.to_thread(trainer.status, job_id)
            except Exception as error:
                if troubles.get(job_id) != str(error):
                    known = isinstance(error, CrayError)
                    log.warning("%s: %s; asked again", job_id, error, exc_info=not known)
                troubles[job_id] = str(error)
            else:
                troubles.pop(job_id, None)
        await asyncio.sleep(every)


def unfinished_jobs(home: Home, ended: set[str]) -> list[str]:
    """Return the names of the jobs that have not ended.

    Jobs that have ended are added to `ended`; a job in it is not looked at.
    """
    try:
        names = {entry.name for entry in os.scandir(home.jobs)}
    except FileNotFoundError:
        return []
    ended &= names
    unfinished = []
    for name in sorted(names - ended):
        journal = JobJournal(home, name)
        if journal.ended:
            ended.add(name)
        elif journal.exists:
            unfinished.append(name)
    return unfinished
