"""Text index: find the text of a collection that another text equals, resembles or contains.

It decides what counts as the same input: leakage.py keeps a TaskSet's splits apart by it, and
runtime/datasets/decontamination.py keeps held-out texts out of training sets. Texts are
compared by their words (text_words.py), long ones also by their sets of word 5-grams.

The search is exact. The index has the rarest 5-grams of each text, enough of them that every
similar text shares one (prefix filtering: Bayardo, Ma, Srikant 2007). The position of the first
shared 5-gram bounds the number of shared ones (positions: Xiao et al. 2008). It needs no numpy,
which a light install lacks. 10,000 texts of 30 words are looked up among 10,000 in a second, and
the index takes 5 KB for each.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator
from itertools import islice
from typing import Literal, NamedTuple

from cray_agents.text_words import GRAM, SIMILAR, is_long, words_of

WORLD = "\x00"  # marks a key that only an equal key matches; no text's own key has it
_ROUNDING = 1e-9


def input_key(text: str) -> str:
    """Return the key of an input: its words, or the whole text if it has none."""
    return " ".join(words_of(text)) or " ".join(text.casefold().split())


class TextMatch(NamedTuple):
    """A match with text `number` of an index, and the Jaccard similarity of their 5-grams.

    `how` is `equal` for equal keys, `near` for similar texts, `contained` if the other text
    contains all of the index's text, however long the other one is.
    """

    number: int
    similarity: float
    how: Literal["equal", "near", "contained"]


class TextIndex:
    """An index of texts, given as their keys (`input_key`) and numbered in this order."""

    def __init__(self, keys: Iterable[str], threshold: float = SIMILAR) -> None:
        self._threshold = threshold
        self._equal: dict[str, int] = {}
        self._vocabulary: dict[str, int] = {}
        counts: Counter[int] = Counter()  # texts that have a 5-gram
        sets: dict[int, set[int]] = {}
        for number, key in enumerate(keys):
            if self._equal.setdefault(key, number) == number:
                for word in key.split(" "):
                    self._vocabulary.setdefault(word, len(self._vocabulary))
                if grams := self._grams_of(key):
                    sets[number] = grams
                    counts.update(grams)
        # a missing 5-gram counts as 1: most are in one text
        self._counts = {gram: count for gram, count in counts.items() if count > 1}
        self._grams: dict[int, array[int]] = {}  # of each long text, the rarest first
        self._rarest: dict[int, list[int]] = {}  # texts by their rarest 5-gram
        self._index: dict[int, list[int]] = {}  # texts by each 5-gram of their prefixes
        for number, grams in sets.items():
            ordered = self._by_rarity(grams)
            self._grams[number] = array("q", ordered)
            self._rarest.setdefault(ordered[0], []).append(number)
            for gram in islice(ordered, self._prefix(len(ordered))):
                self._index.setdefault(gram, []).append(number)
        self._largest = max(map(len, self._grams.values()), default=0)

    def match(self, key: str) -> TextMatch | None:
        """Return the match with an equal text, else with the most similar one, else None.

        If no text is similar, the largest one that the other contains is returned.
        """
        equal = self._equal.get(key)
        if equal is not None:
            return TextMatch(equal, 1.0, "equal")
        grams = self._grams_of(key) if self._grams else None
        return self._nearest(grams) or self._largest_contained(grams) if grams else None

    def _nearest(self, grams: set[int]) -> TextMatch | None:
        """Return the most similar text, the first of equally similar ones."""
        best, similarity = -1, 0.0
        for number, most in self._candidates(grams):
            if (most, -number) > (similarity, -best):
                other = self._grams[number]
                value = _jaccard(len(grams.intersection(other)), len(grams), len(other))
                if value >= self._threshold and (value, -number) > (similarity, -best):
                    best, similarity = number, value
        return TextMatch(best, similarity, "near") if best >= 0 else None

    def _candidates(self, grams: set[int]) -> Iterator[tuple[int, float]]:
        """Yield each text that may be similar, with an upper bound of its similarity."""
        size = len(grams)
        if size * self._threshold > self._largest + _ROUNDING:
            return
        met: set[int] = set()
        for at, gram in enumerate(self._by_rarity(grams)[: self._prefix(size)]):
            for number in self._index.get(gram, ()):
                if number in met:
                    continue
                met.add(number)
                other = self._grams[number]
                # no earlier 5-gram of the one stands in the other, as both have one order
                shared = min(size - at, len(other))
                if _jaccard(shared, size, len(other)) >= self._threshold:
                    shared = min(shared, len(other) - other.index(gram))
                    most = _jaccard(shared, size, len(other))
                    if most >= self._threshold:
                        yield number, most

    def _largest_contained(self, grams: set[int]) -> TextMatch | None:
        best, size = -1, 0
        for gram in grams & self._rarest.keys():
            for number in self._rarest[gram]:
                other = self._grams[number]
                if size < len(other) <= len(grams) and grams.issuperset(other):
                    best, size = number, len(other)
        return TextMatch(best, size / len(grams), "contained") if best >= 0 else None

    def _by_rarity(self, grams: Iterable[int]) -> list[int]:
        """Sort 5-grams, the rarest first. The filter relies on one order for all sets."""
        counts = self._counts
        return sorted(grams, key=lambda gram: (counts.get(gram, 1), gram))

    def _prefix(self, size: int) -> int:
        """Return the number of a set's rarest members of which a similar set must have one."""
        return size - math.ceil(self._threshold * size - _ROUNDING) + 1

    def _grams_of(self, key: str) -> set[int] | None:
        """Return the 5-grams of a long text as hashes of 64 bits, None for other texts.

        The hashes are of numbers, as the hash of a string differs between processes. Words that no
        text of the index has get new numbers.
        """
        words = key.split(" ")
        if WORLD in key or not is_long(words):
            return None
        known, new = self._vocabulary, dict[str, int]()
        ids = [known[w] if w in known else new.setdefault(w, len(known) + len(new)) for w in words]
        return set(map(hash, zip(*(ids[start:] for start in range(GRAM)), strict=False)))


def _jaccard(shared: int, size: int, other_size: int) -> float:
    """Return the Jaccard similarity of two sets of these sizes that share so many members."""
    return shared / (size + other_size - shared)
