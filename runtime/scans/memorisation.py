"""Memorisation: how often a version says what stood in its training set, or a planted string.

A run repeats the training set if `length` tokens in a row that the model sampled stand in a sample
of the set in the same order (50 in Carlini et al. 2022, arXiv 2202.07646). Both sides are the exact
tokens that were recorded. Runs that the set was made of do not count. A planted string (a canary in
Carlini et al. 2019, arXiv 1802.08232) was put into training data on purpose, and occurs nowhere
else; a run that says it has memorised it.

Rows of tokens are compared by 64-bit hashes: of a billion different ones fewer than one in ten is
taken for another's. Called by cli/version_scans.py.
"""

import math
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import NormalDist
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow.parquet as pq

from cray_agents.paths import Home
from cray_agents.records import Run
from cray_agents.runtime.datasets import reader
from cray_agents.runtime.scans import sampled_texts

LENGTH = 50  # tokens
SHOWN_RUNS = 5

_MIX = 0x9E3779B97F4A7C15  # 2^64 / golden ratio: makes neighbouring ids differ in all bits
_BASE = 0xD6E8FEB86659FD93
_ROWS = 256  # of a shard that are read at a time

Hashes = npt.NDArray[np.uint64]


@dataclass
class MemorisedRuns:
    """The runs of one version, and those that repeat the training set or a planted string."""

    model: str
    runs: int = 0
    compared: int = 0  # runs that sampled at least `length` tokens in a row
    repeating: list[str] = field(default_factory=list)
    planted: dict[str, list[str]] = field(default_factory=dict)  # string -> runs

    def to_dict(self) -> dict[str, Any]:
        """Return counts, rates with their 95 % intervals, and the first runs."""
        planted = sorted({run for runs in self.planted.values() for run in runs})
        return {
            "model": self.model,
            "runs": self.runs,
            "compared": self.compared,
            "repeating": len(self.repeating),
            "rate": _rate(len(self.repeating), self.compared),
            "interval": wilson_interval(len(self.repeating), self.compared),
            "repeating_runs": self.repeating[:SHOWN_RUNS],
            "with_planted": len(planted),
            "planted_rate": _rate(len(planted), self.runs),
            "planted": {text: runs[:SHOWN_RUNS] for text, runs in sorted(self.planted.items())},
        }


class Memorisation:
    """The comparison of runs with training sets and planted strings.

    Call `add` for each run, `compare` for each dataset, then `versions`.
    """

    def __init__(self, *, length: int = LENGTH, planted: Sequence[str] = ()) -> None:
        self._length = length
        self._planted = planted
        self._versions: dict[str, MemorisedRuns] = {}
        self._rows: dict[str, tuple[str, list[Hashes]]] = {}  # run -> version, hashes
        self._repeating: set[str] = set()

    def add(self, run: Run, version: str) -> None:
        """Take a run of this version (`name@N`)."""
        counted = self._versions.setdefault(version, MemorisedRuns(version))
        counted.runs += 1
        hashes = [
            row_hashes(call.token_ids, self._length)
            for call in run.calls
            if len(call.token_ids) >= self._length
        ]
        if hashes:
            counted.compared += 1
            self._rows[run.id] = version, hashes
        if self._planted:
            texts = list(sampled_texts(run))
            for string in self._planted:
                if any(string in text for text in texts):
                    counted.planted.setdefault(string, []).append(run.id)

    def compare(self, home: Home, dataset: str) -> None:
        """Find the runs that repeat a dataset. Raises NotFound, Corrupt."""
        reader.read_dataset(home, dataset)
        own = self._rows.keys() & set(reader.accepted_runs(home, dataset))
        rows_of_runs = [
            (run, row)
            for run, (_, rows) in self._rows.items()
            if run not in own and run not in self._repeating
            for row in rows
        ]
        if not rows_of_runs:
            return
        every = np.unique(np.concatenate([row for _, row in rows_of_runs]))
        stands = np.zeros(len(every), dtype=bool)
        for tokens in _samples(reader.shards(home, dataset)):
            hashes = row_hashes(tokens, self._length)
            places = np.minimum(np.searchsorted(every, hashes), len(every) - 1)
            stands[places[every[places] == hashes]] = True
        repeated = every[stands]
        self._repeating |= {run for run, row in rows_of_runs if np.isin(row, repeated).any()}

    def versions(self) -> list[MemorisedRuns]:
        """Return the counts of each version."""
        for run in sorted(self._repeating):
            counted = self._versions[self._rows[run][0]]
            if run not in counted.repeating:
                counted.repeating.append(run)
        return [self._versions[name] for name in sorted(self._versions)]


def row_hashes(tokens: Sequence[int] | npt.NDArray[Any], length: int) -> Hashes:
    """Hash each `length` tokens in a row: [tokens - length + 1], empty for fewer tokens.

    A polynomial in the mixed ids, modulo 2^64.
    """
    ids = (np.asarray(tokens, dtype=np.uint64) + np.uint64(1)) * np.uint64(_MIX)
    ids ^= ids >> np.uint64(29)
    ids *= np.uint64(_BASE)
    count = max(0, len(ids) - length + 1)
    hashes = np.zeros(count, dtype=np.uint64)
    for place in range(length):
        hashes = hashes * np.uint64(_BASE) + ids[place : place + count]
    return hashes


def wilson_interval(hits: int, trials: int) -> tuple[float, float] | None:
    """Return the 95 % interval of a rate (Wilson 1927), None without trials."""
    if not trials:
        return None
    z = NormalDist().inv_cdf(0.975)
    rate, spread = hits / trials, z * z / trials
    middle = (rate + spread / 2) / (1 + spread)
    half = math.sqrt(rate * (1 - rate) * spread + spread * spread / 4) / (1 + spread)
    return max(0.0, middle - half), min(1.0, middle + half)


def _rate(hits: int, trials: int) -> float | None:
    return hits / trials if trials else None


def _samples(shards: Iterable[Path]) -> Iterator[npt.NDArray[Any]]:
    for shard in shards:
        with pq.ParquetFile(shard) as file:
            for batch in file.iter_batches(batch_size=_ROWS, columns=["input_ids"]):
                for row in batch.column("input_ids"):
                    yield row.values.to_numpy(zero_copy_only=False)
