"""Which sample is nearly another that came before: for a dataset that says everything once.

Similarity is the Jaccard index of two sequences' sets of token 5-grams. A MinHash signature
(Broder 1997) in bands finds those that may be similar; each is then compared exactly, so whatever
is reported is at least as similar as was asked. What is missed is stated at `NearDuplicates`.

Signatures are rensa's: written in Rust, it makes 190,000 a second of 200 tokens and 100,000 of
2,000 on one core, where datasketch 2.0 makes 19,000 and 2,500, from hashes of ours and a seed, so
that they are the same everywhere (a test holds one). Called by the builder; see decontamination.py
for texts.
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
    """The distinct hashes of a sequence's 5-grams, sorted; none for less than five ids."""
    each = np.asarray(ids, dtype=np.uint64)
    count = len(each) - GRAM + 1
    if count <= 0:
        return np.empty(0, np.uint64)
    hashes = np.zeros(count, np.uint64)
    for place in range(GRAM):
        hashes ^= each[place : place + count]
        hashes *= _MIX
        hashes ^= hashes >> _SHIFT
    hashes.sort()
    distinct: Shingles = hashes[np.concatenate(([True], hashes[1:] != hashes[:-1]))]
    return distinct


def shared(few: Shingles, many: Shingles) -> int:
    """How many of the first are in the second; both sorted and distinct."""
    places = np.searchsorted(many, few)
    places[places == len(many)] = 0
    return int(np.count_nonzero(many[places] == few)) if len(many) else 0


HASHES = 128  # at most, in a signature
RECALL = 0.999  # of pairs just as similar as the threshold, by the banding alone
SEED = 42
MOST = 64  # sequences in a bucket, and candidates that are compared
IN_MEMORY = 256 * 2**20  # bytes of shingles before they go to a temporary file


class NearDuplicates:
    """The sequences that were kept so far. What it answers depends on the order of `add` alone.

    Of pairs as similar as `threshold` (from 0.1 on), one in a thousand is missed, of more similar
    ones fewer. A bucket that more than 64 sequences share is that of a common beginning (a system
    prompt, tools), not of duplicates: it is given up, and the others find them. Held in memory:
    about 3 KB a kept sequence; its shingles, 8 bytes each, go to a temporary file beyond 256 MiB.
    """

    def __init__(self, threshold: float) -> None:
        self._threshold = threshold
        self._rows, self._bands = banding(threshold)
        self._equal: dict[bytes, int] = {}
        self._first: dict[int, int] = {}  # of a bucket; most have but one
        self._more: dict[int, array[int]] = {}
        self._keys: list[str] = []
        self._places = array("Q", [0])  # where each one's shingles begin in the file; the end
        self._file = tempfile.SpooledTemporaryFile(max_size=IN_MEMORY)  # noqa: SIM115

    def __len__(self) -> int:
        """How many were kept."""
        return len(self._keys)

    def add(self, key: str, token_ids: Sequence[int]) -> tuple[str, float] | None:
        """The kept sequence that this one nearly is, and how similar; None: now it is kept, too.

        Of several the most similar, and of those the first. One of less than five tokens is
        compared as a whole.
        """
        ids = np.asarray(token_ids, dtype=np.uint64)
        whole = hashlib.blake2b(ids.tobytes(), digest_size=16).digest()
        equal = self._equal.get(whole)
        if equal is not None:
            return self._keys[equal], 1.0
        mine = shingles(ids)
        buckets = self._buckets_of(mine) if len(mine) else []
        found = self._most_similar(mine, buckets)
        if found is None:
            self._keep(key, whole, mine, buckets)
        return found

    def close(self) -> None:
        """Give the temporary file back."""
        self._file.close()

    def _buckets_of(self, mine: Shingles) -> list[int]:
        """A hash for each band of the signature."""
        count = self._rows * self._bands
        matrix = rensa.RMinHash.digest_matrix_from_flat_token_hashes(
            mine, [0, len(mine)], count, SEED
        )
        signature = np.array(matrix.to_rows()[0], dtype=np.uint64).reshape(self._bands, self._rows)
        hashes = np.arange(self._bands, dtype=np.uint64)  # equal rows of two bands are no match
        for row in range(self._rows):
            hashes = (hashes ^ signature[:, row]) * np.uint64(0xD6E8FEB86659FD93)
            hashes ^= hashes >> np.uint64(32)
        found: list[int] = hashes.tolist()
        return found

    def _most_similar(self, mine: Shingles, buckets: list[int]) -> tuple[str, float] | None:
        met: Counter[int] = Counter()
        for bucket in buckets:
            met.update(self._members(bucket))
        best, similarity = -1, self._threshold
        for one in sorted(met, key=lambda one: (-met[one], one))[:MOST]:
            found = self._similarity(mine, one)
            if found > similarity or (found == similarity and (best < 0 or one < best)):
                best, similarity = one, found
        return (self._keys[best], similarity) if best >= 0 else None

    def _similarity(self, mine: Shingles, one: int) -> float:
        start, end = self._places[one], self._places[one + 1]
        fewer, more = sorted((len(mine), (end - start) // mine.itemsize))
        if fewer < self._threshold * more:  # cannot be; spares reading it
            return 0.0
        self._file.seek(start)
        theirs = np.frombuffer(self._file.read(end - start), dtype=np.uint64)
        both = shared(mine, theirs)
        return both / (len(mine) + len(theirs) - both)

    def _keep(self, key: str, whole: bytes, mine: Shingles, buckets: list[int]) -> None:
        number = len(self._keys)
        self._keys.append(key)
        self._equal[whole] = number
        self._file.seek(self._places[-1])
        self._file.write(mine.tobytes())
        self._places.append(self._places[-1] + mine.nbytes)
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
    """Rows and bands of a signature: the most rows that still find pairs of this similarity.

    Two sequences of similarity s share a band of r rows with probability s**r (Leskovec,
    Rajaraman, Ullman: Mining of Massive Datasets, 3.4).
    """
    for rows in range(HASHES, 1, -1):
        bands = HASHES // rows
        if 1 - (1 - threshold**rows) ** bands >= RECALL:
            return rows, bands
    return 1, HASHES


class Repeat(NamedTuple):
    """The earlier run (or demonstration) whose sample this repeats; `exact`: to the token."""

    run: str
    similarity: float
    exact: bool = False

    @property
    def reason(self) -> str:
        """As considered.py lists them."""
        return "duplicate" if self.exact else "near_duplicate"

    @property
    def detail(self) -> str:
        """With what."""
        return self.run if self.exact else f"{self.run} ({self.similarity:.3f})"


class KeptSamples:
    """The samples that were kept: about 200 bytes each, and what NearDuplicates needs."""

    def __init__(self, threshold: float | None) -> None:
        self._near = None if threshold is None else NearDuplicates(threshold)
        self._places: dict[bytes, int] = {}  # in the names below
        self._names = bytearray()
        self._ends = array("Q", [0])

    def repeat(self, run: str, tokens: "array[int]") -> Repeat | None:
        """What these tokens repeat; None: nothing, and now they are kept."""
        key = blake2b(tokens.tobytes(), digest_size=16).digest()
        place = self._places.get(key)
        if place is not None:
            return Repeat(self._name(place), 1.0, exact=True)
        if self._near is not None:
            found = self._near.add(run, tokens)
            if found is not None:
                return Repeat(*found)
        self._places[key] = len(self._ends) - 1
        self._names += run.encode()
        self._ends.append(len(self._names))
        return None

    def fresh(
        self, run: str, samples: Iterable[TokenSample]
    ) -> tuple[list[TokenSample], Repeat | None]:
        """The samples that repeat nothing, now kept; and what the last of the others repeats."""
        found, last = [], None
        for sample in samples:
            repeat = self.repeat(run, sample.input_ids)
            if repeat is None:
                found.append(sample)
            else:
                last = repeat
        return found, last

    def close(self) -> None:
        """Give temporary files back."""
        if self._near is not None:
            self._near.close()

    def _name(self, place: int) -> str:
        return self._names[self._ends[place] : self._ends[place + 1]].decode()
