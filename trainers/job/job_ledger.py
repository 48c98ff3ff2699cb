"""Job ledger: the lines of the ledger that a training job or session writes.

Its launcher writes when a node is held and left (`holding`), with the GPUs that it sees. The steps
of an attempt are written when it ends, or, if it was killed, when the next attempt begins, before
the events of lost steps are dropped. Called by job.py, job_inputs.py and the session's processes.
"""

import os
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from typing import Any

from cray_agents.errors import Corrupt
from cray_agents.paths import Home
from cray_agents.runtime.accounting.ledger import LedgerFile, holding
from cray_agents.runtime.scheduler.gpu_placement import gpu_type, host_gpus
from cray_agents.trainers.job.journal import JobJournal


@contextmanager
def holding_node(
    home: Home, kind: str, holder: str, attempt: int, what: str, ranks: int
) -> Iterator[LedgerFile]:
    """Write that this node's GPUs and cores are held while the block runs.

    `ranks`: of all nodes. Of several launchers on a node only the first one writes.
    """
    if os.environ.get("SLURM_LOCALID", "0") != "0":
        yield LedgerFile(home.ledger, holder)
        return
    with holding(
        home.ledger,
        kind=kind,
        holder=holder,
        attempt=attempt,
        what=what,
        state="training",
        gpus=tuple(host_gpus()),
        gpu_type=gpu_type(),
        cores=held_cores(ranks),
    ) as ledger:
        yield ledger


def held_cores(ranks: int) -> int:
    """Return the cores that a job has on this node: what Slurm gave it, else what it asked for.

    Without Slurm all `ranks` are here, with a core for each thread that the trainer gave them.
    """
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return ranks * (int(threads) if threads.isdecimal() else 1)


def note_steps(ledger: LedgerFile, journal: JobJournal, within: tuple[str, int] = ("", 0)) -> None:
    """Write the steps of a job's newest attempt so far.

    `within`: the session that trains it, and the session's attempt.
    """
    started: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    with suppress(Corrupt, OSError):  # it is an account: the job itself meets the damage
        events = journal.events()
    for event in events:
        if event["event"] == "started":
            started, steps = event, []
        elif event["event"] == "step" and started is not None:
            steps.append(event)
    if started is None or not steps:
        return
    ledger.note(
        event="steps",
        kind="job",
        holder=journal.job_id,
        attempt=started["attempt"],
        within=within[0],
        within_attempt=within[1],
        node=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        first=started["from_step"],
        last=steps[-1]["step"],
        seconds=sum(step["seconds"] for step in steps),
        tokens=sum(step["tokens"] for step in steps),
    )
