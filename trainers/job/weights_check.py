"""Weights check: verify the weights that a job reads, while its ranks load them.

The ranks divide a checkpoint's files, and each hashes its own beside the loading: every file is
hashed once a job, and is in the page cache for whoever loads it. Files that this process hashed
before and that did not change since are not hashed again. Called by rank.py, baselines.py and
session/resident.py.
"""

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import AbstractContextManager, contextmanager, nullcontext
from pathlib import Path

import torch

from cray_agents.errors import JobError, StoreError
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry import checkpoints
from cray_agents.trainers.job.job_inputs import other_weights
from cray_agents.trainers.training.parallel_groups import gather_from_ranks
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
    files = sorted(checkpoint.glob("*.safetensors"), key=lambda file: (-file.stat().st_size, file))
    stated = checkpoints.stated_hashes(checkpoint)
    with ThreadPoolExecutor(READERS) as threads:
        hashes = [
            (file.name, threads.submit(checksums.hash_of, file, stated.get(file.name, "")))
            for file in files[rank::world]
        ]
        yield
        mine = {name: hashed.result() for name, hashed in hashes}
    every = [json.loads(one) for one in gather_from_ranks(json.dumps(mine).encode())]
    actual = checkpoints.weights_sha256({name: one[name] for one in every for name in one})
    if actual != expected:
        raise FailedEverywhere(other_weights(checkpoint, actual, expected))
