"""The way back from a resume point: found, proven, and loaded under any layout.

    megatron/step-00000050/    published by rename when complete; SEALED.json has every file's hash
    megatron/.step-...         being written, or left half-written by a killed job: never loaded

Under its own layout training goes on bit for bit, under another but for the order of additions.
A point that is not what its seal says is set aside by name, and the one before it used.
Read next: saving.py, which writes them.
"""

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
from cray_agents.runtime.disk.durable import resume_points
from cray_agents.trainers.checkpointing.save import POINT, SEAL
from cray_agents.trainers.checkpointing.state import (
    NUMBERS,
    TensorRange,
    TensorSlice,
    allocate_moments,
    owned,
    parts_of,
)
from cray_agents.trainers.training.train_step import Training

Floats = npt.NDArray[np.float32]
Slices = tuple[slice, ...]


def step_of(point: Path) -> int:
    """The number of steps that were done at a resume point."""
    return int(point.name.removeprefix("step-"))


def verify(point: Path) -> None:
    """Raises Corrupt, naming the file, when a resume point is not what its seal says."""
    try:
        seal: dict[str, str] = json.loads((point / SEAL).read_bytes())
    except (FileNotFoundError, ValueError):
        raise Corrupt(f"resume point {point}: no readable {SEAL}") from None
    for name in seal:
        if not (point / name).exists():
            raise Corrupt(f"resume point {point}: {name} is missing")
    with ThreadPoolExecutor() as pool:
        found = pool.map(lambda name: durable.sha256_file(point / name), seal)
    for (name, expected), sha256 in zip(seal.items(), found, strict=True):
        if sha256 != expected:
            raise Corrupt(f"resume point {point}: {name} is not what was written (bad checksum)")


def choose(folder: Path) -> tuple[Path | None, list[str]]:
    """(the newest sound resume point, what is wrong with newer ones). Sets corrupt ones aside.

    Called by one process, before the ranks start.
    """
    problems: list[str] = []
    for point in resume_points(folder):
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


def last_of(folder: Path, job_id: str) -> Path:
    """The newest resume point of another job, for its optimizer. Raises NotFound or Corrupt."""
    found = resume_points(folder)
    if not found:
        raise NotFound(
            f"optimizer_from={job_id!r}: that job has no resume point in {folder} (it has none yet,"
            " or `models prune` removed them); start without optimizer_from, or name a finished job"
            " of this home",
            param="optimizer_from",
        )
    verify(found[0])
    return found[0]


def sweep(folder: Path, drafts: str = ".step-*") -> None:
    """Remove what a killed job left half-written. Called by one process, before the ranks start."""
    for draft in folder.glob(drafts) if folder.exists() else []:
        shutil.rmtree(draft, ignore_errors=True)


def load(training: Training, point: Path) -> dict[str, Any]:
    """Restore weights, moments and the count of steps; returns what `save` was given.

    Each rank reads what it needs, whatever layout wrote it; nothing is communicated. Raises
    BadInput when the point is of another model, or of other trainable weights.
    """
    saved = _Saved(point)
    parts = parts_of(training)
    allocate_moments(training, saved.adam_steps)
    with torch.no_grad():
        for parameter, places in parts.items():
            for part in places:
                values = saved.read(part, NUMBERS.index("param"))
                parameter.view(-1)[part.begin : part.begin + len(values)].copy_(values)
        for piece in owned(training, parts):
            for number, tensor in enumerate(piece.tensors):
                values = saved.read(piece.part, number)[piece.first : piece.first + piece.count]
                tensor[: len(values)].copy_(values)
    training.done = saved.step
    return saved.common


@dataclass(frozen=True)
class _Stretch:
    """Consecutive elements of a saved box, from `first` on, and where in which file they are."""

    first: int
    count: int
    path: Path
    position: int
    total: int  # elements in the file, of each of NUMBERS

    def read(self, number: int) -> Floats:
        """One of NUMBERS, [count]. Nothing is mapped: the shared root may be a network's."""
        place = (number * self.total + self.position) * 4
        return np.fromfile(self.path, "<f4", self.count, offset=place)


class _Saved:
    """The weights of a resume point, each as the boxes that its ranks had."""

    def __init__(self, point: Path) -> None:
        self.point = point
        told = json.loads((point / POINT).read_bytes())
        self.step: int = told["step"]
        self.common: dict[str, Any] = told["common"]
        self.adam_steps = 0
        self._weights: dict[str, dict[TensorSlice, list[_Stretch]]] = {}
        for path in sorted(point.glob("rank-*.json")):
            index = json.loads(path.read_bytes())
            self.adam_steps = max(self.adam_steps, index["adam_steps"])
            self._read_index(path.with_suffix(".bin"), index["pieces"])

    def _read_index(self, path: Path, pieces: list[dict[str, Any]]) -> None:
        total, position = sum(piece["count"] for piece in pieces), 0
        for piece in pieces:
            sizes = (tuple(piece[name]) for name in ("whole", "offset", "shape"))
            boxes = self._weights.setdefault(piece["key"], {})
            boxes.setdefault(TensorSlice(piece["key"], *sizes), []).append(
                _Stretch(piece["first"], piece["count"], path, position, total)
            )
            position += piece["count"]

    def read(self, part: TensorRange, number: int) -> torch.Tensor:
        """One of NUMBERS for a box, flattened: [box.size] float32.

        Shorter, where a vocabulary was filled up less when it was saved than it is now: of the rows
        that fill it up, nothing was learnt.
        """
        box = part.box
        saved = self._weights.get(box.key, {})
        whole = next((other.whole for other in saved), ())
        if whole != box.whole and (not part.padded or whole[1:] != box.whole[1:]):
            what = f"has {box.key} as {whole}" if whole else f"has no {box.key}"
            raise BadInput(
                f"resume point {self.point} {what}, which this job trains as {box.whole}: an"
                " optimizer goes on only with the same model and the same trainable weights (lora,"
                " its rank and targets); leave optimizer_from out",
                param="optimizer_from",
            )
        rows = max(0, min(box.shape[0], whole[0] - box.offset[0]))
        found = np.empty((rows, *box.shape[1:]), np.float32)
        for other, stretches in saved.items():
            both = _overlap(box.offset, found.shape, other)
            if both is not None:
                flat = np.empty(other.size, np.float32)
                for stretch in stretches:
                    values = stretch.read(number)
                    flat[stretch.first : stretch.first + len(values)] = values
                found[both[0]] = flat.reshape(other.shape)[both[1]]
        return torch.from_numpy(found.reshape(-1))


def _overlap(
    offset: tuple[int, ...], shape: tuple[int, ...], other: TensorSlice
) -> tuple[Slices, Slices] | None:
    """Where a block and a box share elements, in the coordinates of each."""
    here, there = [], []
    for mine, size, theirs, their_size in zip(
        offset, shape, other.offset, other.shape, strict=True
    ):
        low, high = max(mine, theirs), min(mine + size, theirs + their_size)
        if low >= high:
            return None
        here.append(slice(low - mine, high - mine))
        there.append(slice(low - theirs, high - theirs))
    return tuple(here), tuple(there)
