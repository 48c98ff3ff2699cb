"""Weights check: verify the weights and the resume points that a job reads.

The ranks divide a checkpoint's files, and each hashes its own while all load them: every file is
hashed once a job, and is in the page cache for whoever loads it. Files that this process hashed
before and that did not change since are not hashed again. Called by rank.py, baselines.py and
session/resident.py.
"""

import json
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from cray_agents.errors import CrayError, JobError, StoreError
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry import checkpoints
from cray_agents.trainers.checkpointing import resume
from cray_agents.trainers.checkpointing.save import is_local
from cray_agents.trainers.job.job_inputs import JobInputs, other_weights
from cray_agents.trainers.training.parallel_groups import (
    broadcast_from_rank0,
    gather_from_ranks,
    is_rank0,
)
from cray_agents.training_jobs import JobSpec

READERS = 4  # files that a rank hashes at a time


class FailedEverywhere(JobError):
    """Raised on every rank at the same point: the job failed, and the ranks are still in step."""


class UnwrittenEverywhere(StoreError):
    """Likewise: a disk took no more. The job may be tried again."""


def check_parent(parent: Path, spec: JobSpec) -> AbstractContextManager[None]:
    """Check the weights that a job starts from; see `check_weights`. Random ones have no files."""
    random = spec.hyperparameters.init == "random"
    return nullcontext() if random else check_weights(parent, spec.parent_sha256)


@contextmanager
def check_weights(checkpoint: Path, expected: str) -> Iterator[None]:
    """Hash a checkpoint's weights while the context loads them. Collective.

    Raises FailedEverywhere at its end if they are not the ones that the job was made for.
    """
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    base = checkpoints.base_of(checkpoint)
    folder = base or checkpoint
    files = sorted(folder.glob("*.safetensors"), key=lambda file: (-file.stat().st_size, file))
    stated = checkpoints.stated_hashes(folder)
    with ThreadPoolExecutor(READERS) as threads:
        hashes = [
            (file.name, threads.submit(checksums.hash_of, file, stated.get(file.name, "")))
            for file in files[rank::world]
        ]
        yield
        mine = {name: hashed.result() for name, hashed in hashes}
    every = [json.loads(one) for one in gather_from_ranks(json.dumps(mine).encode())]
    actual = checkpoints.weights_sha256({name: one[name] for one in every for name in one})
    if base is not None:
        actual = checkpoints.weights_sha256(checkpoints.hash_files(checkpoint), actual)
    if actual != expected:
        raise FailedEverywhere(other_weights(checkpoint, actual, expected))


def check_start(work: JobInputs, choose: Callable[[JobInputs], JobInputs]) -> JobInputs:
    """Verify the points to start from; set a damaged one aside, and `choose` again. Collective.

    Raises FailedEverywhere if another job's point is damaged, or none can be chosen.
    """
    while True:
        problems = (
            (point, resume.verify_together(point, work.spec.layout))
            for point in (work.optimizer_from, work.state_from, work.resume_from)
            if point is not None
        )
        point, problem = next(((point, one) for point, one in problems if one), (None, ""))
        if point is None:
            return work
        if point != work.resume_from:
            raise FailedEverywhere(problem)
        chosen, refusal = work.points, None
        if is_rank0():
            resume.set_aside(point)
            print(f"{problem}; set aside, the one before it is used", flush=True)
            kind = "warning" if is_local(point) else "corrupt"  # as of a node that was lost
            work.journal.event(kind, message=f"{problem}; the one before it is used")
            try:
                chosen = choose(work).points
            except CrayError as error:
                refusal = str(error)
        chosen, refusal = broadcast_from_rank0((chosen, refusal))
        if refusal is not None:
            raise FailedEverywhere(refusal)
        work = work.at(work.attempt, *chosen)
