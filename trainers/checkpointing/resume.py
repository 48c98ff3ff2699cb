"""Resume: find a job's newest sound resume point and load it under any layout.

    megatron/step-00000050/    published by rename when complete; SEALED.json has every file's hash
    megatron/.step-...         being written, or left half-written by a killed job: never loaded

Under its own layout training continues bit for bit. Under another layout only the order of
additions differs. A point that differs from its seal is set aside, and the one before it is used.
Read next: save.py, which writes the points.
"""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.durable import kept_state, resume_points
from cray_agents.trainers.checkpointing.save import POINT, SEAL
from cray_agents.trainers.checkpointing.state import (
    NUMBERS,
    OwnedRange,
    TensorRange,
    TensorSlice,
    allocate_moments,
    local_ranges,
    owned_ranges,
)
from cray_agents.trainers.training.train_step import Training

Floats = npt.NDArray[np.float32]
Slices = tuple[slice, ...]


def step_of(point: Path) -> int:
    """Return the number of steps done at a resume point."""
    return int(point.name.removeprefix("step-"))


def verify(point: Path) -> None:
    """Raise Corrupt, naming the file, if a resume point differs from its seal."""
    try:
        seal: dict[str, str] = json.loads((point / SEAL).read_bytes())
    except (FileNotFoundError, ValueError):
        raise Corrupt(f"resume point {point}: no readable {SEAL}") from None
    for name in seal:
        if not (point / name).exists():
            raise Corrupt(f"resume point {point}: {name} is missing")
    with ThreadPoolExecutor() as pool:
        hashes = pool.map(lambda name: durable.sha256_file(point / name), seal)
    for (name, expected), sha256 in zip(seal.items(), hashes, strict=True):
        if sha256 != expected:
            raise Corrupt(f"resume point {point}: {name} is not what was written (bad checksum)")


def seal_of(point: Path) -> str:
    """Return the hash of a resume point's seal, which names its content; "" without a seal."""
    try:
        return hashlib.sha256((point / SEAL).read_bytes()).hexdigest()
    except FileNotFoundError:
        return ""


def read_common(point: Path) -> dict[str, Any]:
    """Return the `common` data of `save` alone."""
    common: dict[str, Any] = json.loads((point / POINT).read_bytes())["common"]
    return common


def choose(folder: Path, in_memory: str = "") -> tuple[Path | None, list[str]]:
    """Return the newest sound resume point, and the problems of newer ones, which are set aside.

    The point whose seal has the hash `in_memory` is not read: the ranks hold its content. Called by
    one process, before the ranks start.
    """
    problems: list[str] = []
    for point in resume_points(folder):
        if in_memory and seal_of(point) == in_memory:
            return point, problems
        try:
            verify(point)
        except Corrupt as problem:
            problems.append(str(problem))
            aside = folder / f".corrupt-{point.name}"
            shutil.rmtree(aside, ignore_errors=True)
            point.rename(aside)
        else:
            return point, problems
    return None, problems


def newest_point(folder: Path, job_id: str) -> Path:
    """Return another job's newest resume point, for its optimizer. Raises NotFound or Corrupt."""
    points = resume_points(folder)
    if not points:
        raise NotFound(
            f"optimizer_from={job_id!r}: that job has no resume point in {folder} (it has none yet,"
            " or `models prune` removed them); start without optimizer_from, or name a finished job"
            " of this home",
            param="optimizer_from",
        )
    verify(points[0])
    return points[0]


def kept_point(jobs: Path, state_from: str) -> Path:
    """Return the training state that a run kept, `job/number`. Raises NotFound or Corrupt."""
    job, _, number = state_from.partition("/")
    point = kept_state(jobs / job / "megatron", int(number))
    if not point.is_dir():
        raise NotFound(
            f"state_from={state_from!r}: {point} does not exist: that command kept no state, or"
            " `models prune` removed it with the weights; start without state_from",
            param="state_from",
        )
    verify(point)
    return point


def sweep(folder: Path, drafts: str = ".step-*") -> None:
    """Remove drafts of killed jobs. Called by one process, before the ranks start."""
    for draft in folder.glob(drafts) if folder.exists() else []:
        shutil.rmtree(draft, ignore_errors=True)


def load(training: Training, point: Path) -> dict[str, Any]:
    """Restore weights, moments and the count of steps; return the `common` data of `save`.

    Each rank reads its own share, whatever layout wrote it, without communication. Raises BadInput
    if the point is of another model, or of other trainable weights.
    """
    saved = _SavedPoint(point)
    ranges = local_ranges(training)
    allocate_moments(training, saved.adam_steps)
    shards = training.shards
    if shards is not None:
        shards.forget_gathered()
    with torch.no_grad():
        for parameter, its_ranges in ranges.items() if shards is None else ():
            for range_ in its_ranges:
                values = saved.read(range_, NUMBERS.index("param"))
                parameter.view(-1)[range_.begin : range_.begin + len(values)].copy_(values)
        for owned in owned_ranges(training, ranges):
            for number, tensor in enumerate(owned.tensors):
                values = saved.read(owned.range_, number)[owned.first : owned.first + owned.count]
                tensor[: len(values)].copy_(values)
    if shards is not None:
        shards.optimizer_to_weights()
    training.done, training.saved = saved.step, point
    return saved.common


def load_moments(training: Training, point: Path) -> list[tuple[OwnedRange, torch.Tensor]]:
    """Restore moments and Adam's count of steps alone; return the master weights of the point.

    Each is beside the range that it belongs to, flattened, in host memory. Raises BadInput as
    `load` does.
    """
    saved, masters = _SavedPoint(point), []
    allocate_moments(training, saved.adam_steps)
    with torch.no_grad():
        for owned in owned_ranges(training, local_ranges(training)):
            part = slice(owned.first, owned.first + owned.count)
            master, *moments = (saved.read(owned.range_, n)[part] for n in range(len(NUMBERS)))
            for tensor, values in zip(owned.tensors[1:], moments, strict=True):
                tensor[: len(values)].copy_(values)
            masters.append((owned, master))
    return masters


@dataclass(frozen=True)
class _SavedRange:
    """Consecutive elements of a saved slice from `first` on, at `position` in a file."""

    first: int
    count: int
    path: Path
    position: int
    total: int  # elements in the file for each of NUMBERS

    def read(self, number: int) -> Floats:
        """Read one of NUMBERS, [count]. Not memory-mapped: the root may be a network disk."""
        offset = (number * self.total + self.position) * 4
        return np.fromfile(self.path, "<f4", self.count, offset=offset)


class _SavedPoint:
    """The weights of a resume point, each as the slices of the ranks that wrote it."""

    def __init__(self, point: Path) -> None:
        self.point = point
        content = json.loads((point / POINT).read_bytes())
        self.step: int = content["step"]
        self.common: dict[str, Any] = content["common"]
        self.adam_steps = 0
        self._weights: dict[str, dict[TensorSlice, list[_SavedRange]]] = {}
        for path in sorted(point.glob("rank-*.json")):
            index = json.loads(path.read_bytes())
            self.adam_steps = max(self.adam_steps, index["adam_steps"])
            self._read_index(path.with_suffix(".bin"), index["pieces"])

    def _read_index(self, path: Path, entries: list[dict[str, Any]]) -> None:
        total, position = sum(entry["count"] for entry in entries), 0
        for entry in entries:
            sizes = (tuple(entry[name]) for name in ("whole", "offset", "shape"))
            slices = self._weights.setdefault(entry["key"], {})
            slices.setdefault(TensorSlice(entry["key"], *sizes), []).append(
                _SavedRange(entry["first"], entry["count"], path, position, total)
            )
            position += entry["count"]

    def read(self, range_: TensorRange, number: int) -> torch.Tensor:
        """Read one of NUMBERS for a range's slice, flattened: [size] float32.

        The result is shorter if the vocabulary has more filler rows now than when it was saved:
        filler rows learn nothing.
        """
        wanted = range_.slice_
        saved = self._weights.get(wanted.key, {})
        whole = next((slice_.whole for slice_ in saved), ())
        if whole != wanted.whole and (not range_.padded or whole[1:] != wanted.whole[1:]):
            what = f"has {wanted.key} as {whole}" if whole else f"has no {wanted.key}"
            raise BadInput(
                f"resume point {self.point} {what}, which this job trains as {wanted.whole}: an"
                " optimizer goes on only with the same model and the same trainable weights (lora,"
                " its rank and targets); leave optimizer_from out",
                param="optimizer_from",
            )
        rows = max(0, min(wanted.shape[0], whole[0] - wanted.offset[0]))
        block = np.empty((rows, *wanted.shape[1:]), np.float32)
        for slice_, saved_ranges in saved.items():
            both = _overlap(wanted.offset, block.shape, slice_)
            if both is not None:
                flat = np.empty(slice_.size, np.float32)
                for saved_range in saved_ranges:
                    values = saved_range.read(number)
                    flat[saved_range.first : saved_range.first + len(values)] = values
                block[both[0]] = flat.reshape(slice_.shape)[both[1]]
        return torch.from_numpy(block.reshape(-1))


def _overlap(
    offset: tuple[int, ...], shape: tuple[int, ...], slice_: TensorSlice
) -> tuple[Slices, Slices] | None:
    """Return the elements that a block and a slice share, in the coordinates of each."""
    in_block, in_slice = [], []
    for mine, size, theirs, their_size in zip(
        offset, shape, slice_.offset, slice_.shape, strict=True
    ):
        low, high = max(mine, theirs), min(mine + size, theirs + their_size)
        if low >= high:
            return None
        in_block.append(slice(low - mine, high - mine))
        in_slice.append(slice(low - theirs, high - theirs))
    return tuple(in_block), tuple(in_slice)
