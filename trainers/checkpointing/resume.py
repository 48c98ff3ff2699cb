"""Resume: find a job's newest sound resume point and load it under any layout.

    megatron/step-00000050/    published by rename when complete; SEALED.json has every file's hash
    megatron/.step-...         being written, or left half-written by a killed job: never loaded
    megatron/local-...         a point that is newer, on the nodes' own disks: see save.py

Under its own layout training continues bit for bit on CPUs; kernels of GPUs add in an order of
their own. Under another layout only the order of additions differs. A point that differs from its
seal is set aside, and the one before it is used. One process chooses a point that looks whole; all
ranks verify it together, each by its share of the files, before any of them reads it. Of a local
point each rank verifies its own files. Where one is missing or damaged, all go on from the shared
root, and data ranks whose nodes still have their files of that point read them there. Read next:
save.py, which writes the points.
"""

import hashlib
import json
import shutil
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from cray_agents.errors import BadInput, Corrupt, JobError, NotFound
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.checksums import check_version
from cray_agents.runtime.disk.durable import LOCAL, kept_state, resume_points
from cray_agents.trainers.checkpointing.save import (
    POINT,
    RANK,
    SEAL,
    VERSION,
    is_local,
    rank_folder,
    step_of,
)
from cray_agents.trainers.checkpointing.state import (
    NUMBERS,
    OwnedRange,
    TensorRange,
    TensorSlice,
    allocate_moments,
    local_ranges,
    owned_ranges,
)
from cray_agents.trainers.host_copies import scratch_folder
from cray_agents.trainers.training.parallel_groups import gather_from_ranks
from cray_agents.trainers.training.train_step import RankTraining
from cray_agents.training_jobs import Layout

Floats = npt.NDArray[np.float32]
Slices = tuple[slice, ...]


def read_seal(point: Path) -> dict[str, str]:
    """Return the hash of each file of a resume point. Raises Corrupt if one is missing."""
    try:
        seal: dict[str, str] = json.loads((point / SEAL).read_bytes())
    except (FileNotFoundError, ValueError):
        raise Corrupt(f"resume point {point}: no readable {SEAL}") from None
    for name in [POINT] if is_local(point) else seal:
        if not (point / name).exists():
            raise Corrupt(f"resume point {point}: {name} is missing")
    return seal


@cache
def copy_here(point: Path, rank: int, layout: Layout | None) -> Path | None:
    """Return a sound copy, on this node's own disk, of a rank's file of a point on the shared root.

    None unless the rank reads that file alone: data ranks of this layout wrote the point.
    """
    node, name = scratch_folder(point.parents[1]), f"{RANK}-{rank:05d}"
    if node is None or layout is None or layout.splits_model or layout.optimizer_instances > 1:
        return None
    with suppress(OSError, ValueError):
        about, seal = (json.loads((point / each).read_bytes()) for each in (POINT, SEAL))
        if about.get("layout") == layout.model_dump():
            for copy in node.glob(f"{name}/{LOCAL}{step_of(point):08d}.*/{name}.bin"):
                if durable.sha256_file(copy) == seal.get(copy.name):
                    return copy
    return None


def verify(point: Path, rank: int = 0, world: int = 1, layout: Layout | None = None) -> None:
    """Raise Corrupt, naming the file, if a rank's share of a resume point differs from its seal.

    Of a local point that is what the rank itself will read. `layout`: that of the ranks.
    """
    seal, folder = read_seal(point), rank_folder(point, rank)
    names = sorted(seal, key=lambda name: (name.endswith(".json"), name))
    if is_local(point):
        names = [POINT, *(name for name in names if f"-{rank:05d}." in name)]
    else:
        copy = copy_here(point, rank, layout)
        names = [name for name in names[rank::world] if copy is None or name != copy.name]

    def hash_of(name: str) -> str:
        try:
            return durable.sha256_file((point if name == POINT else folder) / name)
        except OSError as error:
            if not is_local(point):  # the shared root is away: another attempt may find it there
                raise
            why = f"{name} cannot be read on its node: {error.strerror}"
            raise Corrupt(f"resume point {point}: {why}") from error

    with ThreadPoolExecutor() as pool:
        hashes = pool.map(hash_of, names)
    for name, sha256 in zip(names, hashes, strict=True):
        if sha256 != seal.get(name):
            raise Corrupt(f"resume point {point}: {name} is not what was written (bad checksum)")


def verify_together(point: Path, layout: Layout) -> str | None:
    """Return what is wrong with a resume point, alike on all ranks; None if nothing. Collective.

    Each rank hashes its share: a large point comes to all nodes at once, and not through one.
    """
    problem = None
    copy_here.cache_clear()  # of a session's job before
    try:
        verify(point, torch.distributed.get_rank(), torch.distributed.get_world_size(), layout)
    except Corrupt as error:
        problem = str(error)
    every = gather_from_ranks(json.dumps(problem).encode())
    return next(filter(None, map(json.loads, every)), None)


def set_aside(point: Path) -> None:
    """Rename a damaged point, so that nothing reads it again. Called by one process.

    A local one is forgotten: its files may be gone with a node.
    """
    aside = point if is_local(point) else point.with_name(f".corrupt-{point.name}")
    shutil.rmtree(aside, ignore_errors=True)
    if aside != point:
        point.rename(aside)


def seal_of(point: Path) -> str:
    """Return the hash of a resume point's seal, which names its content; "" without a seal."""
    with suppress(FileNotFoundError):
        return hashlib.sha256((point / SEAL).read_bytes()).hexdigest()
    return ""


def read_common(point: Path) -> dict[str, Any]:
    """Return the `common` data of `save` alone."""
    return dict(_read_point(point)["common"])


def _read_point(point: Path) -> dict[str, Any]:
    """Return the content of point.json. Raises NewerFormat, Corrupt for a wrong version."""
    content: dict[str, Any] = json.loads((point / POINT).read_bytes())
    check_version(content.get("version"), VERSION, f"resume point {point}")
    return content


def choose(
    folder: Path, in_memory: str = "", layout: Layout | None = None
) -> tuple[Path | None, list[str]]:
    """Return the newest whole resume point, and the problems of newer ones, which are set aside.

    The point whose seal has the hash `in_memory` is not read: the ranks hold its content. `layout`:
    that of the ranks, which alone can read a local point of it. Called by one process. Before they
    load the point, all ranks call `verify_together`.
    """
    problems: list[str] = []
    for point in [*_local_points(folder, layout), *resume_points(folder)]:
        if in_memory and seal_of(point) == in_memory:
            return point, problems
        try:
            read_seal(point)
        except Corrupt as problem:
            problems.append(str(problem))
            set_aside(point)
        else:
            return point, problems
    return None, problems


def _local_points(folder: Path, layout: Layout | None) -> list[Path]:
    """Return the local points that are newer than the shared root's, the newest first.

    What ranks of this layout cannot go on from is forgotten.
    """
    drained = max(map(step_of, resume_points(folder)), default=0)
    usable: list[Path] = []
    for point in sorted(folder.glob(f"{LOCAL}*"), reverse=True):
        written = None
        with suppress(OSError, ValueError):
            written = _read_point(point).get("layout")
        fits = layout is not None and written == layout.model_dump()
        if fits and step_of(point) > drained and scratch_folder(folder.parent) is not None:
            usable.append(point)
        else:
            set_aside(point)
    return usable


def newest_point(folder: Path, job_id: str) -> Path:
    """Return another job's newest resume point, for its optimizer. Raises NotFound or Corrupt."""
    points = resume_points(folder)
    if not points:
        raise NotFound(
            f"optimizer_from={job_id!r}: that job has no resume point in {folder} (it has none yet,"
            " or `maintain prune models` removed them); start without optimizer_from, or name"
            " a finished job of this home",
            param="optimizer_from",
        )
    read_seal(points[0])
    return points[0]


def kept_point(jobs: Path, state_from: str) -> Path:
    """Return the training state that a run kept, `job/number`. Raises NotFound or Corrupt."""
    job, _, number = state_from.partition("/")
    point = kept_state(jobs / job / "megatron", int(number))
    if not point.is_dir():
        raise NotFound(
            f"state_from={state_from!r}: {point} does not exist: that command kept no state, or"
            " `maintain prune models` removed it with the weights; start without state_from",
            param="state_from",
        )
    read_seal(point)
    return point


def sweep(folder: Path, drafts: str = ".step-*") -> None:
    """Remove drafts of killed jobs. Called by one process, before the ranks start."""
    for draft in folder.glob(drafts) if folder.exists() else []:
        shutil.rmtree(draft, ignore_errors=True)


def load(training: RankTraining, point: Path) -> dict[str, Any]:
    """Restore weights, moments and the count of steps; return the `common` data of `save`.

    Each rank reads what its optimizer owns, whatever layout wrote it, and the ranks that share a
    weight then exchange it. Collective. Raises BadInput if the point is of another model, or of
    other trainable weights.
    """
    saved = _SavedPoint(point, torch.distributed.get_rank(), training.layout)
    ranges = local_ranges(training)
    every = gather_from_ranks(str(saved.adam_steps).encode())  # of a local point each knows its own
    allocate_moments(training, max(map(int, every)))
    if training.shards is not None:
        training.shards.forget_gathered()
    with torch.no_grad():
        for range_ in (one for its_ranges in ranges.values() for one in its_ranges):
            if not saved.own:  # else it is of this job, and holds what this rank owns
                saved.rows_of(range_)  # all ranks refuse alike, also one that owns nothing of it
        for owned in owned_ranges(training, ranges):
            for number, tensor in enumerate(owned.tensors):
                values = saved.read(owned.range_, number, owned.first, owned.count)
                tensor[: len(values)].copy_(values)
        training.optimizer_to_weights()
    training.done, training.saved = saved.step, None if is_local(point) else point
    return saved.common


def load_moments(training: RankTraining, point: Path) -> list[tuple[OwnedRange, torch.Tensor]]:
    """Restore moments and Adam's count of steps alone; return the master weights of the point.

    Each is beside the range that it belongs to, flattened, in host memory. Raises BadInput as
    `load` does.
    """
    saved, masters = _SavedPoint(point), []
    allocate_moments(training, saved.adam_steps)
    with torch.no_grad():
        for owned in owned_ranges(training, local_ranges(training)):
            master, *moments = (
                saved.read(owned.range_, number, owned.first, owned.count)
                for number in range(len(NUMBERS))
            )
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

    def read(self, number: int, start: int, count: int) -> Floats:
        """Read `count` elements of one of NUMBERS from `start` on.

        The file is not mapped into memory: the root may be a network disk.
        """
        offset = (number * self.total + self.position + start) * 4
        return np.fromfile(self.path, "<f4", count, offset=offset)


class _SavedPoint:
    """The weights of a resume point, each as the slices of the ranks that wrote it."""

    def __init__(self, point: Path, rank: int = 0, layout: Layout | None = None) -> None:
        self.point, self.adam_steps = point, 0
        content = _read_point(point)
        self.step: int = content["step"]
        self.common: dict[str, Any] = content["common"]
        self._weights: dict[str, dict[TensorSlice, list[_SavedRange]]] = {}
        copy = None if is_local(point) else copy_here(point, rank, layout)
        self.own = copy is not None or is_local(point)  # all is this rank's, on its node's disk
        indices = "*-*.json" if copy is None else f"{copy.stem}.json"
        for path in sorted(rank_folder(point, rank).glob(indices)):
            index = json.loads(path.read_bytes())
            self.adam_steps = max(self.adam_steps, index["adam_steps"])
            self._read_index(copy or path.with_suffix(".bin"), index["pieces"])

    def _read_index(self, path: Path, entries: list[dict[str, Any]]) -> None:
        total, position = sum(entry["count"] for entry in entries), 0
        for entry in entries:
            sizes = (tuple(entry[name]) for name in ("whole", "offset", "shape"))
            slices = self._weights.setdefault(entry["key"], {})
            slices.setdefault(TensorSlice(entry["key"], *sizes), []).append(
                _SavedRange(entry["first"], entry["count"], path, position, total)
            )
            position += entry["count"]

    def rows_of(self, range_: TensorRange) -> int:
        """Return how many rows of a range's slice were saved. Raises BadInput for another weight.

        They are fewer if the vocabulary has more filler rows now: filler rows learn nothing.
        """
        wanted = range_.slice_
        whole = next((slice_.whole for slice_ in self._weights.get(wanted.key, ())), ())
        if whole != wanted.whole and (not range_.padded or whole[1:] != wanted.whole[1:]):
            what = f"has {wanted.key} as {whole}" if whole else f"has no {wanted.key}"
            raise BadInput(
                f"resume point {self.point} {what}, which this job trains as {wanted.whole}: an"
                " optimizer goes on only with the same model and the same trainable weights (lora,"
                " its rank and targets); leave optimizer_from out",
                param="optimizer_from",
            )
        return max(0, min(wanted.shape[0], whole[0] - wanted.offset[0]))

    def read(self, range_: TensorRange, number: int, first: int, count: int) -> torch.Tensor:
        """Read one of NUMBERS of elements `first` .. `first + count` of a range's flattened slice.

        Nothing else is read, unless the slice was saved in columns of it. The result is shorter
        where filler rows were not saved.
        """
        wanted = range_.slice_
        shape = (self.rows_of(range_), *wanted.shape[1:])
        end, row = min(first + count, prod(shape)), prod(shape[1:])
        numbers = np.empty(max(0, end - first), np.float32)
        overlaps = [
            (slice_, ranges, both)
            for slice_, ranges in self._weights[wanted.key].items()
            if (both := _overlap(wanted.offset, shape, slice_)) is not None
        ]
        columns = [(wanted.offset[1:], wanted.shape[1:])]
        if any((slice_.offset[1:], slice_.shape[1:]) not in columns for slice_, *_ in overlaps):
            block = np.empty(shape, np.float32)
            for slice_, ranges, (in_block, in_slice) in overlaps:
                flat = np.empty(slice_.size, np.float32)
                for saved in ranges:
                    values = saved.read(number, 0, saved.count)
                    flat[saved.first : saved.first + saved.count] = values
                block[in_block] = flat.reshape(slice_.shape)[in_slice]
            return torch.from_numpy(block.reshape(-1)[first:end])
        missing = len(numbers)
        for slice_, ranges, _ in overlaps:
            begin = (slice_.offset[0] - wanted.offset[0]) * row
            for saved in ranges:
                start = begin + saved.first
                low, high = max(first, start), min(end, start + saved.count)
                if low < high:
                    numbers[low - first : high - first] = saved.read(
                        number, low - start, high - low
                    )
                    missing -= high - low
        if missing > 0:
            raise JobError(f"resume point {self.point} lacks elements of {wanted.key}: report it")
        return torch.from_numpy(numbers)


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
