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
from collections.abc import Sequence

import numpy as np
import rensa

from cray_agents.runtime.datasets.shingles import Shingles, shared, shingles

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
