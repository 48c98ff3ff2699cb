"""Training jobs go on although no client asks after them: `cray-agents up` runs this as a task.

What died, was preempted, ran out of its time or was resumed is started again when somebody asks the
trainer how it stands (megatron_trainer.py). Here somebody does, for every job that has not ended.
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
AFRESH = 12  # rounds after which the ended ones are looked at, too: a failed one is tried again

log = logging.getLogger(__name__)


async def keep_going(home: Home, trainer: Trainer, every: float = EVERY) -> None:
    """Ask after every job that has not ended, until cancelled; what fails is logged, once."""
    ended: set[str] = set()
    troubles: dict[str, str] = {}
    for number in itertools.count():
        if number % AFRESH == 0:
            ended.clear()
        try:
            jobs = await asyncio.to_thread(going, home, ended)
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


def going(home: Home, ended: set[str]) -> list[str]:
    """The jobs that have not ended, by name.

    Those that have are added to `ended`; in what is there already nothing is looked at.
    """
    try:
        names = {entry.name for entry in os.scandir(home.jobs)}
    except FileNotFoundError:
        return []
    ended &= names
    found = []
    for name in sorted(names - ended):
        journal = JobJournal(home, name)
        if journal.ended:
            ended.add(name)
        elif journal.exists:
            found.append(name)
    return found
