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
    local-00000050.<attempt>/    point.json and SEALED.json of a point on the nodes' own disks

With `[job] scratch` each rank first writes to its node's own disk, in a folder of the job:

    rank-00000/local-00000050.<attempt>/    the rank's files; copies-00000.* has what other ranks
                                            own, too, so that a rank reads its own files alone

Then training goes on, and a second thread copies the newest point that is whole there to the shared
root, where it is published as above. Local points go once a newer one is on the shared root: what
is as new serves the other nodes' data ranks when one is lost. If a node's disk takes no more,
points go to the shared root alone.

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
from collections import defaultdict, deque
from collections.abc import Callable, Iterable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from math import prod
from pathlib import Path
from typing import Any, TypeVar

import torch
from torch.distributed import distributed_c10d

from cray_agents.errors import FULL, CrayError, DiskFull, JobError, StoreError
from cray_agents.records import canonical
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.durable import LOCAL, keep_newest, kept_state
from cray_agents.runtime.retention import has_ended
from cray_agents.trainers.checkpointing.state import (
    NUMBERS,
    OwnedRange,
    adam_steps,
    local_ranges,
    optimizers,
    owned_ranges,
)
from cray_agents.trainers.host_copies import check_scratch, scratch_folder
from cray_agents.trainers.training.parallel_groups import gather_from_ranks, write_together
from cray_agents.trainers.training.train_step import RankTraining

VERSION = 1  # of a resume point's files
SEAL = "SEALED.json"
POINT = "point.json"
RANK, COPIES = "rank", "copies"  # a rank's files: what it owns alone, and what others own, too
BLOCK = 8 << 20  # bytes hashed and written at a time
FOR_EVER = timedelta(days=7)  # no limit: a rank that fails to write ends the job and this wait


def folder_name(step: int) -> str:
    """Return the folder name of a step's resume point."""
    return f"step-{step:08d}"


def step_of(point: Path) -> int:
    """Return the number of steps done at a resume point."""
    return int(point.name.partition("-")[2].partition(".")[0])


# ---- on a node's own disk
def is_local(point: Path) -> bool:
    """Return True for a point whose ranks' files are on the nodes' own disks."""
    return point.name.startswith(LOCAL)


def rank_folder(point: Path, rank: int) -> Path:
    """Return the folder with a rank's files of a point: of a local one, on this node's own disk."""
    node = scratch_folder(point.parents[1]) if is_local(point) else None
    return point if node is None else node / f"{RANK}-{rank:05d}" / point.name


Result = TypeVar("Result")

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
    with those of all ranks; it returns False if it was superseded. Files of which `wanted` is no
    longer true on rank 0, when their turn has come, are not written.
    """

    what: str
    draft: Path
    write: Callable[[], dict[str, str]]
    publish: Callable[[dict[str, str]], bool]
    wanted: Callable[[], bool] | None = None


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
        self._flight = self.submit(partial(self.write, files, begun))

    def submit(self, work: Callable[[], Result]) -> Future[Result]:
        """Let the thread do work, which may `write`, after all that it was given before."""
        return self._thread.submit(work)

    def settle(self) -> BackgroundEnd | None:
        """Wait for the files in flight; return their end, the same on every rank. None: no files"""
        flight, self._flight = self._flight, None
        return None if flight is None else flight.result()

    def close(self) -> None:
        """Let the thread end. Files in flight are still published."""
        self._thread.shutdown(wait=False)

    # ---- on the writing thread
    def write(self, files: FileSet, begun: float) -> BackgroundEnd:
        """Write and publish files; return their end, the same on every rank."""
        self._tries += 1
        key, hashes, end = f"{self._key}/{self._tries}", {}, BackgroundEnd()
        if files.wanted is not None:
            if self._rank == 0:
                self._store.set(f"{key}/wanted", json.dumps(files.wanted()))
            if not self._await(f"{key}/wanted"):
                return end
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


class Saver:
    """Writer of a job's resume points. All ranks call the same methods in the same order.

    Rank 0's writing thread calls `may_publish` right before the rename. Rank 0 calls `report(step,
    seconds)` after a point was published, with the time from `save` to its publication, and `warn`
    once a node's own disk takes no more. A point that could not be written leaves nothing behind,
    and the next one makes up for it: training goes on without. Only `finish` raises what became of
    the last one. `resumed`: the point that training goes on from; a local one is published, too.
    """

    def __init__(
        self,
        training: RankTraining,
        folder: Path,
        attempt: int,
        keep: int,
        may_publish: Callable[[], bool],
        report: Callable[[int, float], None] = lambda step, seconds: None,
        warn: Callable[[str], None] = print,
        resumed: Path | None = None,
    ) -> None:
        self._training, self._folder, self._attempt, self._keep = training, folder, attempt, keep
        self._may_publish, self._report, self._warn = may_publish, report, warn
        self._rank = torch.distributed.get_rank()
        self._owned: dict[str, list[OwnedRange]] = {}  # by the kind of file that they are in
        self._buffers: dict[str, torch.Tensor] = {}
        self._step, self._common = -1, (-1, dict[str, Any]())  # of the last point; step, `common`
        start = f"{folder.parent.name}/{attempt}"
        self._files = BackgroundFiles(f"resume-point/{start}")
        self._ends: deque[tuple[int, Future[BackgroundEnd]]] = deque()  # not heard of yet, by step
        self._problem: CrayError | None = None  # of the last point
        self._node = scratch_folder(folder.parent)
        self._local = None if self._node is None else BackgroundFiles(f"local-point/{start}")
        self._locally = self._local is not None  # until a node's disk takes no more
        self._staging: Future[BackgroundEnd] | None = None  # of the last point, on the local disks
        self._whole: list[int] = []  # steps of the newest two points that are whole there
        self._copied = -1  # the step of the point that is being published
        self._drained = -1  # the newest that is published
        if self._node is not None:
            self._sweep(self._node, resumed)
            if resumed is not None and is_local(resumed):
                self._go_on(resumed)
            elif resumed is not None:
                self._drained = step_of(resumed)

    def save(self, common: dict[str, Any]) -> None:
        """Copy the current state and start writing it; `common` is plain data that `load` returns.

        Waits while the previous point is still being written, if that is where training waits for
        it: on the nodes' own disks if there are any, else on the shared root.
        """
        # of a point of the same step some ranks may have heard the end
        self._settle(wait=not self._locally or self._step == self._training.done)
        if self._step == self._training.done:
            return
        self._step, started, self._problem = self._training.done, time.monotonic(), None
        self._common = self._step, common
        indices = self._stage()
        point = self._describe_point(self._step, common)
        mine = {RANK: indices[RANK]}
        files = self._shared(self._step, point, lambda draft: self._write_rank(draft, mine))
        if self._local is None or not self._locally:
            self._publish_later(self._step, files, started)
        else:
            work = partial(self._save_locally, self._step, point, indices, files, started)
            self._staging = self._local.submit(work)

    def keep(self, common: dict[str, Any]) -> None:
        """Write the current state, and return when it is published. Collective.

        Unlike resume points it stays when newer ones come: see retention.py. One that exists
        is left as it is. `finish` comes first. Raises StoreError on every rank, with nothing left
        behind.
        """
        assert self._staging is None and not self._ends, "the buffer is in use"
        number, mine = self._training.done, {RANK: self._stage()[RANK]}
        target = kept_state(self._folder, number)
        draft = target.with_name(f".{target.name}.{self._attempt}")
        point = self._describe_point(number, common)

        def publish(seal: dict[str, str]) -> None:
            if self._rank == 0:
                self._publish(draft, target, seal, point)

        what = "the training state"
        try:
            written = write_together(what, lambda: self._write_rank(draft, mine))
            every = [json.loads(one) for one in gather_from_ranks(json.dumps(written).encode())]
            seal = {name: sha256 for hashes in every for name, sha256 in hashes.items()}
            write_together(what, lambda: publish(seal))
        except StoreError:
            if self._rank == 0:
                shutil.rmtree(draft, ignore_errors=True)
            raise

    def poll(self) -> None:
        """Report the ends of points in flight that have ended. Called every step."""
        if self._staging is None or self._staging.done():
            self._settle(wait=False)

    def finish(self) -> None:
        """Wait until the last point is published on the shared root. Collective.

        Raises StoreError on every rank if it could not be written, DiskFull if for want of room,
        and JobError if the ranks' files do not make a whole.
        """
        self._settle(wait=True)
        step, common = self._common
        if self._problem is not None and self._locally and step == self._training.done:
            self._locally = False  # its copy may be what was lost, and memory has it still
            self.save(common)
            self._settle(wait=True)
        problem, self._problem = self._problem, None
        if problem is not None:
            raise problem
        self._remove_local(f"{RANK}-*", lambda local: step_of(local) <= self._drained)
        if torch.distributed.get_world_size() > 1:
            torch.distributed.barrier()

    def close(self) -> None:
        """Let the writing threads end. Points in flight are still published."""
        if self._local is None:
            self._files.close()
        else:
            self._local.submit(self._files.close)
            self._local.close()

    # ---- on the training thread
    def _settle(self, *, wait: bool) -> None:
        """Wait for the point on the local disks; hear of the ends that are known, or `wait`."""
        staging, self._staging = self._staging, None
        if staging is not None and (problem := staging.result().problem):
            self._locally = False
            if self._rank == 0:
                self._warn(f"{problem}: from here on resume points go to the shared root alone")
        while self._ends and (wait or self._ends[0][1].done()):
            step, end = self._ends[0][0], self._ends.popleft()[1].result()
            if end.problem:
                problem = f"{end.problem}; the one before it stays"
                if step == self._step:
                    self._problem, self._step = _ERRORS[end.kind](problem), -1
                if self._rank == 0:
                    print(problem, flush=True)
            elif end.published and self._rank == 0:
                self._training.saved = self._folder / folder_name(step)
                self._report(step, end.seconds)

    def _stage(self) -> dict[str, bytes]:
        """Copy this rank's owned ranges into buffers, which are made once.

        Return the index of each kind of file.
        """
        training = self._training
        if not self._owned:
            mine = optimizers(training)
            first = all(one.distributed_optimizer_instance_id == 0 for one in mine)
            self._owned = {RANK: [], COPIES: []}
            for owned in owned_ranges(training, local_ranges(training)):
                # the other instances of the optimizer hold the same as the first
                self._owned[COPIES if owned.range_.copy or not first else RANK].append(owned)
            if not self._locally:
                del self._owned[COPIES]
            for kind, every in self._owned.items():
                size, on_gpu = sum(owned.count for owned in every), not training.on_cpu
                self._buffers[kind] = torch.empty(len(NUMBERS), size, pin_memory=on_gpu)
        for kind, every in self._owned.items():
            position = 0
            for owned in every:
                for row, tensor in zip(self._buffers[kind], owned.tensors, strict=True):
                    row[position : position + owned.count].copy_(tensor, non_blocking=True)
                position += owned.count
        if not training.on_cpu:
            torch.cuda.synchronize()
        steps = adam_steps(training)
        return {
            kind: canonical({"adam_steps": steps, "pieces": [_describe(owned) for owned in every]})
            for kind, every in self._owned.items()
        }

    def _describe_point(self, step: int, common: dict[str, Any]) -> bytes:
        layout = self._training.layout.model_dump()
        return canonical({"version": VERSION, "step": step, "common": common, "layout": layout})

    def _shared(
        self,
        step: int,
        point: bytes,
        write: Callable[[Path], dict[str, str]],
        wanted: Callable[[], bool] | None = None,
    ) -> FileSet:
        """Return a point's files on the shared root, which `write` writes into a draft."""
        target = self._folder / folder_name(step)
        draft = self._folder / f".{target.name}.{self._attempt}"

        def publish(seal: dict[str, str]) -> bool:
            published = self._publish(draft, target, seal, point)
            keep_newest(self._folder, self._keep)
            return published

        what = f"the resume point of step {step}"
        return FileSet(what, draft, lambda: write(draft), publish, wanted)

    def _sweep(self, node: Path, resumed: Path | None) -> None:
        """Remove the points of ended jobs on this node's disk, and what killed attempts left."""
        jobs, kept = self._folder.parents[1], -1 if resumed is None else step_of(resumed)
        _remove(node.parent, "*", lambda job: has_ended(jobs / job.name))
        _remove(node, f"{self._name(RANK)}/*", lambda point: step_of(point) != kept)

    def _go_on(self, resumed: Path) -> None:
        """Publish the local point that training goes on from: the shared root has an older one."""
        step, point = step_of(resumed), (resumed / POINT).read_bytes()
        self._step, self._whole = step, [step]
        self._common = step, json.loads(point)["common"]
        hashes = json.loads((resumed / SEAL).read_bytes())
        self._copy_later(resumed, hashes, point, time.monotonic())

    # ---- on any thread, in the same order on all ranks
    def _copy_later(self, local: Path, hashes: dict[str, str], point: bytes, begun: float) -> None:
        """Publish a local point on the shared root, unless a newer one is whole by then."""
        step, source, name = step_of(local), rank_folder(local, self._rank), self._name(RANK)
        mine = {each: sha256 for each, sha256 in hashes.items() if each.startswith(name)}

        def copy(draft: Path) -> dict[str, str]:
            draft.mkdir(parents=True, exist_ok=True)
            for each, sha256 in mine.items():
                with (source / each).open("rb") as file:
                    blocks = iter(partial(file.read, BLOCK), b"")
                    if _write_hashed(draft / each, map(memoryview, blocks)) != sha256:
                        raise StoreError(f"{source / each} is not what was written (bad checksum)")
            return mine

        files = self._shared(step, point, copy, wanted=lambda: step >= self._whole[-1])
        self._publish_later(step, files, begun)

    def _publish_later(self, step: int, files: FileSet, begun: float) -> Future[BackgroundEnd]:
        def write() -> BackgroundEnd:
            self._copied = step
            end = self._files.write(files, begun)
            if end.published:  # also of ranks that were here before
                self._drained = step
                self._remove_local(f"{RANK}-*", lambda local: step_of(local) < step)
            self._copied = -1
            return end

        published = self._files.submit(write)
        self._ends.append((step, published))
        return published

    # ---- on the writing threads
    def _save_locally(
        self, step: int, point: bytes, indices: dict[str, bytes], files: FileSet, begun: float
    ) -> BackgroundEnd:
        """Write a point to the nodes' own disks, and then have it copied to the shared root.

        If a disk takes no more, return when `files`, the point on the shared root, has ended.
        """
        assert self._local is not None
        local = self._folder / f"{LOCAL}{step:08d}.{self._attempt}"
        draft, hashes = rank_folder(local, self._rank), dict[str, str]()

        def write() -> dict[str, str]:
            check_scratch()
            hashes.update(self._write_rank(draft, indices))
            return hashes

        def publish(seal: dict[str, str]) -> bool:
            note = local.with_name(f".{local.name}")
            try:
                note.mkdir(parents=True, exist_ok=True)
                return self._seal(note, local, seal, point)
            except OSError as error:  # no room for it: the next copy tells, too
                print(f"{local} could not be written: {error}", flush=True)
                shutil.rmtree(note, ignore_errors=True)
                return False

        end = self._local.write(FileSet(files.what, draft, write, publish), begun)
        if end.problem:
            shutil.rmtree(draft, ignore_errors=True)
            self._publish_later(step, files, begun).result()
            return end
        self._whole = [*self._whole[-1:], step]
        self._copy_later(local, hashes, point, begun)
        kept = (*self._whole, self._copied, self._drained)
        self._remove_local(self._name(RANK), lambda one: step_of(one) not in kept)
        return end

    def _remove_local(self, ranks: str, unwanted: Callable[[Path], bool]) -> None:
        """Remove local points of some ranks, and what the shared root has of them."""
        if self._node is not None:
            _remove(self._node, f"{ranks}/{LOCAL}*", unwanted)
            if self._rank == 0:
                _remove(self._folder, f"{LOCAL}*", unwanted)

    def _name(self, kind: str) -> str:
        return f"{kind}-{self._rank:05d}"

    def _write_rank(self, draft: Path, indices: dict[str, bytes]) -> dict[str, str]:
        """Write buffers and their indices; return the hash of each file."""
        draft.mkdir(parents=True, exist_ok=True)
        hashes = {}
        for kind, index in indices.items():
            name, numbers = self._name(kind), self._buffers[kind]
            array: Any = numbers.numpy()
            view = memoryview(array).cast("B") if numbers.numel() else memoryview(b"")
            blocks = (view[start : start + BLOCK] for start in range(0, len(view), BLOCK))
            hashes[f"{name}.bin"] = _write_hashed(draft / f"{name}.bin", blocks)
            durable.write_file(draft / f"{name}.json", index)
            hashes[f"{name}.json"] = hashlib.sha256(index).hexdigest()
        return hashes

    def _publish(self, draft: Path, target: Path, seal: dict[str, str], point: bytes) -> bool:
        refuse_gaps([draft / name for name in seal if name.endswith(".json")])
        return self._seal(draft, target, seal, point)

    def _seal(self, draft: Path, target: Path, seal: dict[str, str], point: bytes) -> bool:
        durable.write_file(draft / POINT, point)
        seal[POINT] = hashlib.sha256(point).hexdigest()
        durable.write_file(draft / SEAL, canonical(seal))
        may = self._may_publish()
        if not may or not durable.publish_directory(draft, target):
            shutil.rmtree(draft, ignore_errors=True)
            return False
        return True


def _describe(owned: OwnedRange) -> dict[str, Any]:
    return {**vars(owned.range_.slice_), "first": owned.first, "count": owned.count}


def _remove(folder: Path, pattern: str, unwanted: Callable[[Path], bool]) -> None:
    """Delete unwanted folders as far as possible: a later start sweeps again."""
    with suppress(OSError):
        for found in folder.glob(pattern):
            if unwanted(found):
                shutil.rmtree(found, ignore_errors=True)


def _write_hashed(path: Path, blocks: Iterable[memoryview]) -> str:
    """Write bytes and wait for the disk; return their SHA-256."""
    hasher = hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for block in blocks:
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
