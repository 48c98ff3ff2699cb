"""Saver: write resume points while training goes on; training waits only for a copy in memory.

torch DCP and Megatron's dist_checkpointing are not used: resume points are asynchronous, sealed by
a manifest and independent of the layout, on gloo as on NCCL.

job/rank.py makes one `Saver`. `save` copies this rank's state into a buffer (page-locked on GPUs).
A thread then writes it, hashes it and waits for the disk. When all ranks have written, rank 0's
thread checks once more that its attempt may publish, then seals and renames:

    .step-00000050.<attempt>/    being written, or left half-written by a killed job: never loaded
        rank-00000.bin           float32 [3, n], little-endian: weights, exp_avg, exp_avg_sq
        rank-00000.json          the slices and ranges of these n elements, in order
        point.json               VERSION, steps done, and the `common` data of `save`
        SEALED.json              every file's SHA-256, written last
    step-00000050/               the same, published
    kept-00000050/               likewise, for other jobs: it stays when newer ones come (`keep`)

One point is in flight at a time: the next `save` waits for it. Through the ranks' store every rank
learns how a point ended, so that a full disk of one rank is the same error on all. A thread, unlike
a forked process, does not copy gloo's or NCCL's threads, and hashing and writing release Python's
lock. `BackgroundFiles` has the thread, also for the versions of job/job_versions.py. Read next:
state.py for the saved state, resume.py for loading.
"""

import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import dataclass
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from cray_agents.errors import FULL, CrayError, DiskFull, JobError, StoreError
from cray_agents.records import canonical
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.durable import keep_newest, kept_state
from cray_agents.trainers.checkpointing.state import (
    NUMBERS,
    OwnedRange,
    adam_steps,
    local_ranges,
    optimizers,
    owned_ranges,
)
from cray_agents.trainers.training.parallel_groups import gather_from_ranks, write_together
from cray_agents.trainers.training.train_step import RankTraining

VERSION = 1  # of a resume point's files
SEAL = "SEALED.json"
POINT = "point.json"
BLOCK = 8 << 20  # bytes hashed and written at a time
FOR_EVER = timedelta(days=7)  # no limit: a rank that fails to write ends the job and this wait


def folder_name(step: int) -> str:
    """Return the folder name of a step's resume point."""
    return f"step-{step:08d}"


#: Errors that background files can end with, by their names in the ranks' store.
_ERRORS: dict[str, type[CrayError]] = {
    kind.__name__: kind for kind in (DiskFull, StoreError, JobError)
}


@dataclass(frozen=True)
class BackgroundEnd:
    """The end of background files: published, superseded, or a problem of a kind in `_ERRORS`."""

    published: bool = False
    seconds: float = 0.0  # from the start to the publication
    problem: str = ""
    kind: str = ""


@dataclass(frozen=True)
class FileSet:
    """Files to write together. `what` they are is for the text of a problem.

    `write` writes this rank's files into `draft` and returns their hashes. Rank 0 calls `publish`
    with those of all ranks; it returns False if it was superseded.
    """

    what: str
    draft: Path
    write: Callable[[], dict[str, str]]
    publish: Callable[[dict[str, str]], bool]


class BackgroundFiles:
    """Files that every rank writes in a thread, while training goes on, and rank 0 publishes.

    All ranks call the same methods in the same order. One set is in flight at a time. `key` is new
    in the ranks' store, which a session's jobs share. What cannot be written leaves nothing behind.
    """

    def __init__(self, key: str) -> None:
        self._key, self._tries = key, 0
        self._rank, self._world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone()  # a connection of its own, so that the thread may wait on it
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="background-files")
        self._flight: Future[BackgroundEnd] | None = None

    @property
    def in_flight(self) -> bool:
        """True until `settle` has told the end of the files."""
        return self._flight is not None

    @property
    def done(self) -> bool:
        """True if `settle` would not wait. Ranks may differ."""
        return self._flight is not None and self._flight.done()

    def start(self, files: FileSet, begun: float) -> None:
        """Start to write files. `begun`: monotonic seconds."""
        assert self._flight is None, "one set of files at a time"
        self._tries += 1
        self._flight = self._thread.submit(self._run, files, begun, f"{self._key}/{self._tries}")

    def settle(self) -> BackgroundEnd | None:
        """Wait for the files in flight; return their end, the same on every rank. None: no files"""
        flight, self._flight = self._flight, None
        return None if flight is None else flight.result()

    def close(self) -> None:
        """Let the thread end. Files in flight are still published."""
        self._thread.shutdown(wait=False)

    # ---- on the writing thread
    def _run(self, files: FileSet, begun: float, key: str) -> BackgroundEnd:
        hashes, end = {}, BackgroundEnd()
        try:
            hashes = files.write()
        except OSError as error:
            end = _failed(files, error)
        self._store.set(f"{key}/{self._rank}", json.dumps([hashes, vars(end)]))
        if self._rank > 0:
            return BackgroundEnd(**self._await(f"{key}/end"))
        written = [self._await(f"{key}/{rank}") for rank in range(self._world)]
        end = next((BackgroundEnd(**each) for _, each in written if each["problem"]), end)
        if not end.problem:
            every = {name: sha256 for each, _ in written for name, sha256 in each.items()}
            try:
                published = files.publish(every)
                end = BackgroundEnd(published, time.monotonic() - begun)
            except (OSError, CrayError) as error:
                end = _failed(files, error)
        if end.problem:
            shutil.rmtree(files.draft, ignore_errors=True)
        self._store.set(f"{key}/end", json.dumps(vars(end)))
        return end

    def _await(self, key: str) -> Any:
        """Return a value that a rank sets in the store."""
        self._store.wait([key], FOR_EVER)
        return json.loads(self._store.get(key))


def _failed(files: FileSet, error: OSError | CrayError) -> BackgroundEnd:
    if isinstance(error, CrayError):
        return BackgroundEnd(problem=str(error), kind=JobError.__name__)
    problem = f"{files.what} could not be written: {error}"
    if error.errno not in FULL:
        return BackgroundEnd(problem=problem, kind=StoreError.__name__)
    problem += f"; make room in {files.draft.parent}"
    return BackgroundEnd(problem=problem, kind=DiskFull.__name__)


def _report_nothing(step: int, seconds: float) -> None: ...


class Saver:
    """Writer of a job's resume points. All ranks call the same methods in the same order.

    Rank 0's writing thread calls `may_publish` right before the rename. Rank 0 calls `report(step,
    seconds)` after a point was published, with the time from `save` to its publication. A point
    that could not be written leaves nothing behind, and the next one makes up for it: training goes
    on without. Only `finish` raises what became of the last one.
    """

    def __init__(
        self,
        training: RankTraining,
        folder: Path,
        attempt: int,
        keep: int,
        may_publish: Callable[[], bool],
        report: Callable[[int, float], None] = _report_nothing,
    ) -> None:
        self._training, self._folder, self._attempt, self._keep = training, folder, attempt, keep
        self._may_publish, self._report = may_publish, report
        self._rank = torch.distributed.get_rank()
        self._owned: list[OwnedRange] = []
        self._buffer = torch.empty(len(NUMBERS), 0)
        self._step = -1
        self._files = BackgroundFiles(f"resume-point/{folder.parent.name}/{attempt}")
        self._problem: CrayError | None = None  # of the last point

    def save(self, common: dict[str, Any]) -> None:
        """Copy the current state and start writing it; `common` is plain data that `load` returns.

        Waits while the previous point is still being written.
        """
        self._settle()
        if self._step == self._training.done:
            return
        self._step, started, self._problem = self._training.done, time.monotonic(), None
        index = self._stage()
        point = canonical({"version": VERSION, "step": self._step, "common": common})
        target = self._folder / folder_name(self._step)
        draft = self._folder / f".{target.name}.{self._attempt}"

        def publish(seal: dict[str, str]) -> bool:
            published = self._publish(draft, target, seal, point)
            keep_newest(self._folder, self._keep)
            return published

        what = f"the resume point of step {self._step}"
        files = FileSet(what, draft, lambda: self._write_rank(draft, index), publish)
        self._files.start(files, started)

    def keep(self, common: dict[str, Any]) -> None:
        """Write the current state, and return when it is published. Collective.

        Unlike resume points it stays when newer ones come: see retention.py. One that exists
        is left as it is. `finish` comes first. Raises StoreError on every rank, with nothing left
        behind.
        """
        assert not self._files.in_flight, "the buffer is in use"
        number, index = self._training.done, self._stage()
        target = kept_state(self._folder, number)
        draft = target.with_name(f".{target.name}.{self._attempt}")
        point = canonical({"version": VERSION, "step": number, "common": common})

        def publish(seal: dict[str, str]) -> None:
            if self._rank == 0:
                self._publish(draft, target, seal, point)

        what = "the training state"
        try:
            mine = write_together(what, lambda: self._write_rank(draft, index))
            every = [json.loads(one) for one in gather_from_ranks(json.dumps(mine).encode())]
            seal = {name: sha256 for hashes in every for name, sha256 in hashes.items()}
            write_together(what, lambda: publish(seal))
        except StoreError:
            if self._rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise

    def poll(self) -> None:
        """Report the end of the point in flight, if it has ended. Called every step."""
        if self._files.done:
            self._settle()

    def finish(self) -> None:
        """Wait until the last point is published. Collective.

        Raises StoreError on every rank if it could not be written, DiskFull if for want of room,
        and JobError if the ranks' files do not make a whole.
        """
        self._settle()
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        if torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()

    def close(self) -> None:
        """Let the writing thread end. A point in flight is still published."""
        self._files.close()

    # ---- on the training thread
    def _settle(self) -> None:
        step, end = self._step, self._files.settle()
        if end is None:
            return
        if end.problem:
            problem = f"{end.problem}; the one before it stays"
            self._problem, self._step = _ERRORS[end.kind](problem), -1
            if self._rank == 0:
                print(problem, flush=True)
        elif end.published and self._rank == 0:
            self._training.saved = self._folder / folder_name(step)
            self._report(step, end.seconds)

    def _stage(self) -> bytes:
        """Copy this rank's owned ranges into the buffer, which is made once; return their index."""
        mine = optimizers(self._training)
        first = all(one.distributed_optimizer_instance_id == 0 for one in mine)
        if first and not self._owned:  # the other instances of the optimizer hold the same
            self._owned = [
                owned
                for owned in owned_ranges(self._training, local_ranges(self._training))
                if not owned.range_.copy
            ]
            size = sum(owned.count for owned in self._owned)
            on_gpu = not self._training.on_cpu
            self._buffer = torch.empty(len(NUMBERS), size, pin_memory=on_gpu)
        position = 0
        for owned in self._owned:
            for row, tensor in zip(self._buffer, owned.tensors, strict=True):
                row[position : position + owned.count].copy_(tensor, non_blocking=True)
            position += owned.count
        if not self._training.on_cpu:
            torch.cuda.synchronize()
        pieces = [_describe(owned) for owned in self._owned]
        return canonical({"adam_steps": adam_steps(self._training), "pieces": pieces})

    # ---- on the writing thread
    def _write_rank(self, draft: Path, index: bytes) -> dict[str, str]:
        """Write the buffer and its index; return the hash of each file."""
        draft.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank:05d}"
        hashes = {f"{name}.bin": _write_hashed(draft / f"{name}.bin", self._buffer)}
        durable.write_file(draft / f"{name}.json", index)
        return {**hashes, f"{name}.json": hashlib.sha256(index).hexdigest()}

    def _publish(self, draft: Path, target: Path, seal: dict[str, str], point: bytes) -> bool:
        refuse_gaps([draft / name for name in seal if name.endswith(".json")])
        durable.write_file(draft / POINT, point)
        seal[POINT] = hashlib.sha256(point).hexdigest()
        durable.write_file(draft / SEAL, canonical(seal))
        may = self._may_publish()
        if not may or not durable.publish_directory(draft, target):
            shutil.rmtree(draft, ignore_errors=True)
            return False
        return True


def _describe(owned: OwnedRange) -> dict[str, Any]:
    slice_ = owned.range_.slice_
    return {
        "key": slice_.key,
        "whole": slice_.whole,
        "offset": slice_.offset,
        "shape": slice_.shape,
        "first": owned.first,
        "count": owned.count,
    }


def _write_hashed(path: Path, buffer: torch.Tensor) -> str:
    """Write a tensor's bytes and wait for the disk; return their SHA-256."""
    numbers: Any = buffer.numpy()
    view = memoryview(numbers).cast("B") if buffer.numel() else memoryview(b"")
    hasher = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            hasher.update(block)
            while block:
                block = block[file.write(block) :]
    durable.sync(path)
    return hasher.hexdigest()


def refuse_gaps(indices: Sequence[Path]) -> None:
    """Raise JobError unless the ranks' ranges hold every element of every weight exactly once.

    A gap should be impossible. Without this check it would show only when the point is loaded.
    """
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for path in indices:
        for entry in json.loads(path.read_bytes())["pieces"]:
            counts[entry["key"], prod(entry["whole"])] += entry["count"]
    wrong = sorted(key for (key, size), count in counts.items() if count != size)
    if wrong:
        raise JobError(
            f"of {wrong[:3]} a resume point would not hold each element once: this is a defect of"
            " the trainer; report it with the job's layout and model"
        )
