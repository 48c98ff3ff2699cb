"""Sequences of ids as the sets of their 5-grams, each hashed to 64 bits: what similarity is about.

The same ids give the same hashes in every process and on every machine. Called by near.py (tokens)
and decontamination.py (words).
"""

from collections.abc import Sequence

import numpy as np
from numpy.typing import NDArray

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
