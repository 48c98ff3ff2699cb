"""Near duplicates: find samples that nearly repeat an earlier sample of a dataset.

Similarity is the Jaccard index of two sequences' sets of token 5-grams. Banded MinHash signatures
(Broder 1997) find candidates, and each candidate is then compared exactly. So every reported pair
reaches the threshold. `NearDuplicates` states the share of missed pairs.

Signatures come from rensa, written in Rust. On one core it makes 190,000 a second of 200 tokens and
100,000 of 2,000; datasketch 2.0 makes 19,000 and 2,500. Hashes and seed are ours, so signatures are
the same everywhere (a test pins one). Called by build.py and selection.py; see
decontamination.py for texts.
"""

import hashlib
import tempfile
from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from hashlib import blake2b
from typing import NamedTuple

import numpy as np
import rensa
from numpy.typing import NDArray

from cray_agents.runtime.datasets.run_samples import TokenSample
from cray_agents.text_words import GRAM

Shingles = NDArray[np.uint64]

_MIX = np.uint64(0x9E3779B97F4A7C15)  # 2**64 over the golden ratio, odd
_SHIFT = np.uint64(29)


def shingles(ids: Sequence[int] | NDArray[np.uint64]) -> Shingles:
    """Return the distinct hashes of a sequence's 5-grams, sorted. Empty for fewer than five ids."""
    numbers = np.asarray(ids, dtype=np.uint64)
    count = len(numbers) - GRAM + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    for start in range(GRAM):
        hashes ^= numbers[start : start + count]
        hashes *= _MIX
        hashes ^= hashes >> _SHIFT
    hashes.sort()
    distinct: Shingles = hashes[np.concatenate(([True], hashes[1:] != hashes[:-1]))]
    return distinct


def count_shared(few: Shingles, many: Shingles) -> int:
    """Count the common shingles of two sets. Searches `many` for each of `few`."""
    places = np.searchsorted(many, few)
    places[places == len(many)] = 0
    return int(np.count_nonzero(many[places] == few)) if len(many) else 0


HASHES = 128  # at most, per signature
RECALL = 0.999  # share of pairs at the threshold that share a band
SEED = 42
MOST = 64  # sequences in a bucket, and candidates compared
IN_MEMORY = 256 * 2**20  # bytes of shingles kept in memory; more go to a temporary file


class NearDuplicates:
    """The sequences kept so far. Results depend only on the order of `add` calls.

    One in a thousand pairs at `threshold` (0.1 or more) is missed, and fewer of more similar pairs.
    A bucket of more than 64 sequences comes from a common beginning (a system prompt, tools). It is
    given up, and other buckets find the duplicates. Memory: about 3 KB a kept sequence. Shingles
    take 8 bytes each; beyond 256 MiB they go to a temporary file.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._rows, self._bands = banding(threshold)
        self._equal: dict[bytes, int] = {}
        self._first: dict[int, int] = {}  # the first sequence of each bucket; most have only one
        self._more: dict[int, array[int]] = {}  # further sequences
        self._keys: list[str] = []
        self._offsets = array("Q", [0])  # byte offsets of each sequence's shingles in the file
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115

    def __len__(self) -> int:
        """Return the number of kept sequences."""
        return len(self._keys)

    def add(self, key: str, token_ids: Sequence[int]) -> tuple[str, float] | None:
        """Return the most similar kept sequence and its similarity; else keep this one.

        Of equally similar ones the first is returned. A sequence of fewer than five tokens only
        matches an equal one.
        """
        ids = np.asarray(token_ids, dtype=np.uint64)
        content_hash = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        equal = self._equal.get(content_hash)
        if equal is not None:
            return self._keys[equal], 1.0
        shingle_set = shingles(ids)
        buckets = self._buckets_of(shingle_set) if len(shingle_set) else []
        match = self._most_similar(shingle_set, buckets)
        if match is None:
            self._keep(key, content_hash, shingle_set, buckets)
        return match

    def close(self) -> None:
        """Remove the temporary file."""
        self._file.close()

    def _buckets_of(self, shingle_set: Shingles) -> list[int]:
        """Return a hash for each band of the signature."""
        count = self._rows * self._bands
        matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
            shingle_set, [0, len(shingle_set)], count, SEED
        )
        signature = np.array(matrix.to_rows()[0], dtype=np.uint64).reshape(self._bands, self._rows)
        # the band numbers, so that equal rows of different bands do not match
        hashes = np.arange(self._bands, dtype=np.uint64)
        for row in range(self._rows):
            hashes = (hashes ^ signature[:, row]) * np.uint64(0xD6E8FEB86659FD93)
            hashes ^= hashes >> np.uint64(32)
        buckets: list[int] = hashes.tolist()
        return buckets

    def _most_similar(self, shingle_set: Shingles, buckets: list[int]) -> tuple[str, float] | None:
        common: Counter[int] = Counter()  # common buckets by sequence
        for bucket in buckets:
            common.update(self._members(bucket))
        best, similarity = -1, self._threshold
        for number in sorted(common, key=lambda number: (-common[number], number))[:MOST]:
            value = self._similarity(shingle_set, number)
            if value > similarity or (value == similarity and (best < 0 or number < best)):
                best, similarity = number, value
        return (self._keys[best], similarity) if best >= 0 else None

    def _similarity(self, shingle_set: Shingles, number: int) -> float:
        start, end = self._offsets[number], self._offsets[number + 1]
        fewer, more = sorted((len(shingle_set), (end - start) // shingle_set.itemsize))
        if fewer < self._threshold * more:  # cannot reach the threshold
            return 0.0
        self._file.seek(start)
        kept = np.frombuffer(self._file.read(end - start), dtype=np.uint64)
        both = count_shared(shingle_set, kept)
        return both / (len(shingle_set) + len(kept) - both)

    def _keep(
        self, key: str, content_hash: bytes, shingle_set: Shingles, buckets: list[int]
    ) -> None:
        number = len(self._keys)
        self._keys.append(key)
        self._equal[content_hash] = number
        self._file.seek(self._offsets[-1])
        self._file.write(shingle_set.tobytes())
        self._offsets.append(self._offsets[-1] + shingle_set.nbytes)
        for bucket in buckets:
            if self._first.setdefault(bucket, number) != number:
                more = self._more.setdefault(bucket, array("I"))
                if len(more) < MOST:
                    more.append(number)

    def _members(self, bucket: int) -> Sequence[int]:
        more = self._more.get(bucket)
        if more is None:
            first = self._first.get(bucket)
            return () if first is None else (first,)
        return (self._first[bucket], *more) if len(more) < MOST else ()


def banding(threshold: float) -> tuple[int, int]:
    """Return rows and bands of a signature: the most rows that reach RECALL at this similarity.

    Two sequences of similarity s share a band of r rows with probability s**r (Leskovec,
    Rajaraman, Ullman: Mining of Massive Datasets, 3.4).
    """
    for rows in range(HASHES, 1, -1):
        bands = HASHES // rows
        if 1 - (1 - threshold**rows) ** bands >= RECALL:
            return rows, bands
    return 1, HASHES


class Repeat(NamedTuple):
    """An earlier run or demonstration with the same sample. `exact`: all tokens are equal."""

    run: str
    similarity: float
    exact: bool = False

    @property
    def reason(self) -> str:
        """The reason, as listed in considered_runs.py."""
        return "duplicate" if self.exact else "near_duplicate"

    @property
    def detail(self) -> str:
        """The detail for runs.parquet."""
        return self.run if self.exact else f"{self.run} ({self.similarity:.3f})"


class KeptSamples:
    """The samples kept so far: about 200 bytes each, plus the memory of NearDuplicates."""

    def __init__(self, threshold: float | None) -> None:
        self._near = None if threshold is None else NearDuplicates(threshold)
        self._runs: dict[bytes, str] = {}  # by content hash

    def repeat(self, run: str, tokens: "array[int]") -> Repeat | None:
        """Return the sample that these tokens repeat, or keep them and return None."""
        key = blake2b(tokens.tobytes(), digest_size=16).digest()
        if key in self._runs:
            return Repeat(self._runs[key], 1.0, exact=True)
        if self._near is not None:
            match = self._near.add(run, tokens)
            if match is not None:
                return Repeat(*match)
        self._runs[key] = run
        return None

    def drop_repeats(
        self, run: str, samples: Iterable[TokenSample]
    ) -> tuple[list[TokenSample], Repeat | None]:
        """Keep and return the samples that repeat nothing. Also return the last repeat."""
        kept, last = [], None
        for sample in samples:
            repeat = self.repeat(run, sample.input_ids)
            if repeat is None:
                kept.append(sample)
            else:
                last = repeat
        return kept, last

    def close(self) -> None:
        """Remove temporary files."""
        if self._near is not None:
            self._near.close()
