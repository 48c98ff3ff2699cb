"""Resume points are written while training goes on: it waits for a copy in memory, no longer.

rank.py makes one `Saver`. `save` copies what this rank owns into a buffer of its own (page-locked
on GPUs); a thread then writes it, hashes it and waits for the disk. When all ranks have written,
rank 0's thread looks once more whether its attempt may still publish, seals and renames:

    .step-00000050.<attempt>/    being written, or left half-written by a killed job: never loaded
        rank-00000.bin           float32 [3, n], little-endian: weights, exp_avg, exp_avg_sq
        rank-00000.json          the boxes and stretches these n elements are of, in order
        point.json               steps done, and what `save` was given
        SEALED.json              every file's SHA-256: it comes last
    step-00000050/               the same, published

One point is in flight at a time: the next `save` waits for it. A thread dies with its process and
needs no fork of one that holds gloo's or NCCL's threads; hashing and writing leave Python's lock to
training. Read next: state.py for what is saved, resume.py for the way back.
"""

import hashlib
import json
import shutil
import time
from collections import defaultdict
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from datetime import timedelta
from math import prod
from pathlib import Path
from typing import Any

import torch
from torch.distributed import distributed_c10d

from cray_agents.errors import JobError, StoreError
from cray_agents.records import canonical
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.durable import keep_newest
from cray_agents.trainers.checkpointing.state import (
    NUMBERS,
    OwnedRange,
    adam_steps,
    owned,
    parts_of,
)
from cray_agents.trainers.training.train_step import Training

SEAL = "SEALED.json"
POINT = "point.json"
BLOCK = 8 << 20  # bytes hashed and written at a time
FOR_EVER = timedelta(days=7)  # a rank that fails to write ends the job, and with it the waiting


def name_of(step: int) -> str:
    """The folder of a step's resume point."""
    return f"step-{step:08d}"


def _ignore(step: int, seconds: float) -> None: ...


class Saver:
    """Writes a job's resume points. All ranks call the same methods in the same order.

    `may_publish` is asked on rank 0, in its writing thread, right before the rename; `tell(step,
    seconds)` hears on rank 0 of a point that was published, and how long it took from `save` on.
    """

    def __init__(
        self,
        training: Training,
        folder: Path,
        attempt: int,
        keep: int,
        may_publish: Callable[[], bool],
        tell: Callable[[int, float], None] = _ignore,
    ) -> None:
        self._training, self._folder, self._attempt, self._keep = training, folder, attempt, keep
        self._may_publish, self._tell = may_publish, tell
        self._rank, self._world = torch.distributed.get_rank(), torch.distributed.get_world_size()
        store: Any = distributed_c10d._get_default_store()
        self._store = store.clone()  # on which a thread may wait
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="resume-point")
        self._pieces: list[OwnedRange] = []
        self._buffer = torch.empty(len(NUMBERS), 0)
        self._flight: Future[bool] | None = None
        self._step, self._begun = -1, 0.0

    def save(self, common: dict[str, Any]) -> None:
        """Copy the present state and let it be written; `common` is plain data for `load`.

        Waits for the point before, if that is still being written. Raises StoreError as `poll`.
        """
        self._settle()
        if self._step == self._training.done:
            return
        self._step, self._begun = self._training.done, time.monotonic()
        self._stage()
        index = {
            "adam_steps": adam_steps(self._training),
            "pieces": [_describe(piece) for piece in self._pieces],
        }
        point = {"step": self._step, "common": common}
        self._flight = self._thread.submit(self._write, self._step, canonical(index), point)

    def poll(self) -> None:
        """Called every step. Raises StoreError when the point in flight could not be written."""
        if self._flight is not None and self._flight.done():
            self._settle()

    def finish(self) -> None:
        """Wait until the last point is published. Collective. Raises StoreError as `poll`."""
        self._settle()
        if self._world > 1:
            torch.distributed.barrier()

    # ---- on the training thread
    def _settle(self) -> None:
        flight, self._flight = self._flight, None
        if flight is None:
            return
        try:
            published = flight.result()
        except OSError as problem:
            raise StoreError(
                f"the resume point of step {self._step} could not be written: {problem}; the one"
                f" before it stays. Make room in {self._folder}, then start the job again"
            ) from problem
        if published:
            self._tell(self._step, time.monotonic() - self._begun)

    def _stage(self) -> None:
        """Copy what this rank owns into the buffer, which is made once."""
        if not self._pieces:
            self._pieces = [
                piece
                for piece in owned(self._training, parts_of(self._training))
                if not piece.part.copy
            ]
            size = sum(piece.count for piece in self._pieces)
            on_gpu = not self._training.on_cpu
            self._buffer = torch.empty(len(NUMBERS), size, pin_memory=on_gpu)
        position = 0
        for piece in self._pieces:
            for row, tensor in zip(self._buffer, piece.tensors, strict=True):
                row[position : position + piece.count].copy_(tensor, non_blocking=True)
            position += piece.count
        if not self._training.on_cpu:
            torch.cuda.synchronize()

    # ---- on the writing thread
    def _write(self, step: int, index: bytes, point: dict[str, Any]) -> bool:
        """Write this rank's files; rank 0 then publishes. Whether this rank published."""
        draft = self._folder / f".{name_of(step)}.{self._attempt}"
        draft.mkdir(parents=True, exist_ok=True)
        name = f"rank-{self._rank:05d}"
        hashes = {f"{name}.bin": _write_hashed(draft / f"{name}.bin", self._buffer)}
        durable.write_file(draft / f"{name}.json", index)
        hashes[f"{name}.json"] = hashlib.sha256(index).hexdigest()
        self._store.set(self._key(step, self._rank), json.dumps(hashes))
        if self._rank > 0:
            return False
        self._store.wait([self._key(step, rank) for rank in range(self._world)], FOR_EVER)
        seal: dict[str, str] = {}
        for rank in range(self._world):
            seal |= json.loads(self._store.get(self._key(step, rank)))
        return self._publish(draft, step, seal, canonical(point))

    def _publish(self, draft: Path, step: int, seal: dict[str, str], point: bytes) -> bool:
        refuse_gaps([draft / name for name in seal if name.endswith(".json")])
        durable.write_file(draft / POINT, point)
        seal[POINT] = hashlib.sha256(point).hexdigest()
        durable.write_file(draft / SEAL, canonical(seal))
        may = self._may_publish()
        if not may or not durable.publish_directory(draft, self._folder / name_of(step)):
            shutil.rmtree(draft, ignore_errors=True)
            return False
        keep_newest(self._folder, self._keep)
        return True

    def _key(self, step: int, rank: int) -> str:
        return f"resume-point/{self._attempt}/{step}/{rank}"


def _describe(piece: OwnedRange) -> dict[str, Any]:
    box = piece.part.box
    return {
        "key": box.key,
        "whole": box.whole,
        "offset": box.offset,
        "shape": box.shape,
        "first": piece.first,
        "count": piece.count,
    }


def _write_hashed(path: Path, buffer: torch.Tensor) -> str:
    """Write a tensor's bytes and wait for the disk; returns their SHA-256."""
    numbers: Any = buffer.numpy()
    view, hasher = memoryview(numbers).cast("B"), hashlib.sha256()
    with path.open("wb", buffering=0) as file:
        for start in range(0, len(view), BLOCK):
            block = view[start : start + BLOCK]
            hasher.update(block)
            while block:
                block = block[file.write(block) :]
    durable.sync(path)
    return hasher.hexdigest()


def refuse_gaps(indices: Sequence[Path]) -> None:
    """Raises JobError unless the ranks' pieces are the whole of every weight, each element once.

    It cannot happen, but if it did, it would be noticed when the point is needed.
    """
    counts: dict[tuple[str, int], int] = defaultdict(int)
    for path in indices:
        for piece in json.loads(path.read_bytes())["pieces"]:
            counts[piece["key"], prod(piece["whole"])] += piece["count"]
    wrong = sorted(key for (key, size), count in counts.items() if count != size)
    if wrong:
        raise JobError(
            f"of {wrong[:3]} a resume point would not hold each element once: this is a defect of"
            " the trainer; report it with the job's layout and model"
        )
