"""Random kills of a training job, and how what came of it differs from one that was left alone."""

import json
import os
import random
from collections import Counter
from dataclasses import asdict, dataclass, field
from pathlib import Path

import numpy as np
from safetensors.numpy import load_file

KILLS = int(os.environ.get("CRAY_BENCH_KILLS", "20"))
SAVE_EVERY = 3
STEPS = 2 * SAVE_EVERY * KILLS  # enough for all kills in one job
BATCH, SAMPLES = 4, 50  # samples a step, and in all: an epoch does not end with a step
LEARNING_RATE = 3e-3


@dataclass(frozen=True)
class Moment:
    """When to kill: in a step after `step` are done, or while such a job writes a save."""

    saving: bool
    step: int
    delay: float  # seconds more

    @classmethod
    def draw(cls, chance: random.Random, done: int) -> "Moment":
        """One that lies a few steps ahead of `done`; a third of them are in a save."""
        step = done + chance.randint(1, 2 * SAVE_EVERY)
        return cls(chance.random() < 1 / 3, step, chance.uniform(0, 0.02))


@dataclass
class Outcome:
    """What became of a killed job. Samples are counted over all steps, against the calm job's."""

    kills: int = 0
    in_saves: int = 0  # kills that left half a save
    refused: list[str] = field(default_factory=list)  # starts that failed, by their errors
    redone: int = 0  # steps that were begun more than once
    difference: float = 0.0  # largest, of a weight
    other_samples: int = 0  # steps that saw others than the calm job's
    lost: int = 0
    doubled: int = 0

    def compare(self, killed: Path, calm: Path, notes: "Notes", calm_notes: "Notes") -> None:
        """Take in the weights and the samples of both."""
        ends, expected = load_file(killed), load_file(calm)
        if ends.keys() != expected.keys():
            raise RuntimeError(f"{killed} has other tensors than {calm}")
        self.difference = max(
            float(np.max(np.abs(ends[name].astype(np.float64) - expected[name])))
            for name in expected
        )
        mine, whole = notes.samples(), calm_notes.samples()
        self.other_samples = sum(mine.get(step) != samples for step, samples in whole.items())
        counted = Counter(one for samples in mine.values() for one in samples)
        planned = Counter(one for samples in whole.values() for one in samples)
        self.lost, self.doubled = (planned - counted).total(), (counted - planned).total()
        self.redone = notes.redone()

    def print(self) -> None:
        """As a line of JSON, for `read`."""
        print(json.dumps(asdict(self)), flush=True)

    @classmethod
    def read(cls, line: str) -> "Outcome":
        return cls(**json.loads(line))


class Notes:
    """A file to which a job adds a line as it begins a step: the steps before it, the samples."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def add(self, done: int, samples: list[int]) -> None:
        with self._path.open("a") as file:
            file.write(json.dumps([done, samples]) + "\n")

    def _lines(self) -> list[tuple[int, list[int]]]:
        text = self._path.read_text() if self._path.exists() else ""
        return [json.loads(line) for line in text.split("\n")[:-1]]

    @property
    def step(self) -> int:
        """Steps that were done when the newest one began."""
        lines = self._lines()
        return lines[-1][0] if lines else 0

    def samples(self) -> dict[int, list[int]]:
        """By step the samples that it saw; of one that was begun again, the last time."""
        return {done: sorted(samples) for done, samples in self._lines()}

    def redone(self) -> int:
        return len(self._lines()) - len(self.samples())


def token_rows() -> list[list[int]]:
    """The samples of both jobs, no two of which are equal."""
    chance = np.random.default_rng(7)
    rows = []
    for number in range(SAMPLES):
        start, stride, size = (int(chance.integers(*b)) for b in ((50, 300), (1, 5), (10, 41)))
        rows.append([4 + number, *((start + stride * i) % 250 + 50 for i in range(size))])
    return rows
