"""Leakage: find tasks of one split that are also in another, by id or by similar input.

text_words.py defines equal inputs: they differ only in case, spaces and punctuation. Long inputs
are also equal if their word 5-grams are similar, or if one contains all of a guarded one. The
metadata that Task.identity names are compared as well.

The search is exact. The index has the rarest 5-grams of each guarded input, enough of them that
every similar input shares one (prefix filtering: Bayardo, Ma, Srikant 2007). The position of the
first shared 5-gram bounds the number of shared ones (positions: Xiao et al. 2008). Called by
task_set.py.
"""

import math
from array import array
from collections import Counter
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Literal, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.records import Split, Task
from cray_agents.text_words import GRAM, SIMILAR, is_long, words_of

#: Splits, the least guarded first. No task of a split may be in one before it: tasks that decide
#: are not trained on, and tasks that only measure do not decide.
GUARDED: tuple[Split, ...] = ("train", "holdout", "test")
_ROUNDING = 1e-9
_WORLD = "\x00"  # never in the key of a text: tasks with a world are equal or not, never similar


@dataclass(frozen=True)
class Leak:
    """A leak: task number `one` of a set equals task number `other` of a more guarded split.

    `how` is `id` for the same id, `equal` for equal inputs, `near` for inputs whose word 5-grams
    are similar (Jaccard), `contained` if the input of `one` contains all of the other.
    """

    one: int
    other: int
    similarity: float
    how: Literal["id", "equal", "near", "contained"]


def input_key(text: str) -> str:
    """Return the key of an input: its words, or the whole text if it has none."""
    return " ".join(words_of(text)) or " ".join(text.casefold().split())


def task_key(task: Task) -> str:
    """Return the key of a task: the key of its input, and its world if it has one."""
    key = input_key(task.input)
    return key if task.world is None else f"{key}{_WORLD}{task.world}"


class Dropped(NamedTuple):
    """A task that `on_leak="drop"` left out, with the reason in words."""

    task: Task
    reason: str


def separate_splits(
    tasks: Sequence[Task], keys: Sequence[str], places: Sequence[str], *, drop: bool
) -> tuple[tuple[Task, ...], tuple[Dropped, ...]]:
    """Return the tasks without leaks, and the dropped tasks, both in order.

    `places` are the names of the tasks in messages. Raises BadInput for a leak unless `drop` is
    set, and for two tasks of one id.
    """
    dropped: dict[int, Dropped] = {}
    for leak in find_leaks(tasks, keys):
        text = _describe(leak, tasks, places)
        if not drop:
            raise BadInput(text, param="id" if leak.how == "id" else "split")
        dropped[leak.one] = Dropped(tasks[leak.one], text)
    ids: dict[str, int] = {}
    for n, task in enumerate(tasks):
        first = n if n in dropped else ids.setdefault(task.id, n)
        if first != n:
            raise BadInput(
                f"{places[n]}: the same task id {task.id!r} as {places[first]}", param="id"
            )
    kept = tuple(task for n, task in enumerate(tasks) if n not in dropped)
    return kept, tuple(dropped.values())


def find_leaks(tasks: Sequence[Task], keys: Sequence[str]) -> Iterator[Leak]:
    """Yield a leak for each task that is also in a more guarded split. `keys`: see `task_key`."""
    ranks = [GUARDED.index(task.split) for task in tasks]
    guarded = _Guarded((n, rank, keys[n]) for n, rank in enumerate(ranks) if rank)
    ids: dict[str, int] = {}
    for number, task in enumerate(tasks):
        known = ids.setdefault(task.id, number)
        if ranks[known] < ranks[number]:
            ids[task.id] = number
    for number, task in enumerate(tasks):
        same = ids[task.id]
        if ranks[same] > ranks[number]:
            yield Leak(number, same, 1.0, "id")
        elif leak := guarded.match(number, ranks[number], keys[number]):
            yield leak


def _describe(leak: Leak, tasks: Sequence[Task], places: Sequence[str]) -> str:
    """Describe a leak in words: both tasks, their similarity, and the remedies."""
    one, other = tasks[leak.one], tasks[leak.other]
    what = f"task id {one.id!r}" if leak.how == "id" else f"input {one.input[:60]!r}"
    alike, hint = "", ""
    if leak.how in ("near", "contained"):
        how = f"similarity {leak.similarity:.2f}" if leak.how == "near" else "all of it is in there"
        alike = f" as {other.input[:60]!r} ({how})"
        hint = "; a long text that all tasks share belongs into the agent's instructions"
    return (
        f"{places[leak.one]}: the {what} is in split {one.split!r} here and in {other.split!r} at "
        f"{places[leak.other]}{alike}. What a split judges must not be known from another: give "
        f'both one split, leave one out, or say on_leak="drop"{hint}'
    )


class _Guarded:
    """The guarded inputs, with an index of the rarest 5-grams of each."""

    def __init__(self, inputs: Iterable[tuple[int, int, str]]) -> None:
        self._equal: dict[str, tuple[int, int]] = {}  # (task number, rank)
        self._texts: list[tuple[int, int, array[int]]] = []  # number, rank, 5-grams, rarest first
        for number, rank, key in inputs:
            if self._equal.get(key, (0, 0))[1] < rank:
                self._equal[key] = number, rank
        self._highest = max((rank for _, rank in self._equal.values()), default=0)
        self._vocabulary: dict[str, int] = {}
        self._counts: Counter[int] = Counter()
        sets = []
        for key, (number, rank) in self._equal.items():
            if grams := self._grams(key):
                self._counts.update(grams)
                sets.append((number, rank, grams))
        self._rarest: dict[int, list[int]] = {}
        self._index: dict[int, list[tuple[int, int]]] = {}  # text, position among its 5-grams
        for number, rank, grams in sets:
            ordered = self._by_rarity(grams)
            place = len(self._texts)
            self._texts.append((number, rank, array("q", ordered)))
            self._rarest.setdefault(ordered[0], []).append(place)
            for position, gram in enumerate(ordered[: _prefix(len(ordered))]):
                self._index.setdefault(gram, []).append((place, position))

    def match(self, number: int, rank: int, key: str) -> Leak | None:
        """Return the leak of a task into a more guarded split, if there is one."""
        if rank == self._highest:
            return None
        equal = self._equal.get(key)
        if equal is not None and equal[1] > rank:
            return Leak(number, equal[0], 1.0, "equal")
        grams = self._grams(key) if self._texts else None
        if not grams:
            return None
        for place in self._candidates(grams):
            other, other_rank, other_grams = self._texts[place]
            both = len(grams.intersection(other_grams)) if other_rank > rank else 0
            similarity = both / (len(grams) + len(other_grams) - both)
            if similarity >= SIMILAR:
                return Leak(number, other, similarity, "near")
        for gram in grams & self._rarest.keys():
            for place in self._rarest[gram]:
                other, other_rank, other_grams = self._texts[place]
                may_contain = other_rank > rank and len(other_grams) <= len(grams)
                if may_contain and grams.issuperset(other_grams):
                    return Leak(number, other, len(other_grams) / len(grams), "contained")
        return None

    def _candidates(self, grams: set[int]) -> Iterator[int]:
        """Yield the places of the texts that may be similar, each once."""
        met: set[int] = set()
        known = grams & self._counts.keys()
        size, unknown = len(grams), len(grams) - len(known)
        if len(known) < SIMILAR * size - _ROUNDING:
            return
        wanted = self._by_rarity(known)[: _prefix(size) - unknown]
        for at, gram in enumerate(wanted, unknown):  # 5-grams that no text has are the rarest
            for place, position in self._index.get(gram, ()):
                if place not in met:
                    met.add(place)
                    other_size = len(self._texts[place][2])
                    # an upper bound, as this is the first 5-gram that both have
                    both = min(size - at, other_size - position)
                    if both >= SIMILAR * (size + other_size - both) - _ROUNDING:
                        yield place

    def _by_rarity(self, grams: Iterable[int]) -> list[int]:
        """Sort 5-grams, the rarest first. The filter relies on one order for all sets."""
        counts = self._counts
        return sorted(grams, key=lambda gram: (counts[gram], gram))

    def _grams(self, key: str) -> set[int] | None:
        """Return the 5-grams of a long text as hashes of 64 bits, None for other texts.

        The hashes are of numbers, as the hash of a string differs between processes.
        """
        words = key.split(" ")
        if _WORLD in key or not is_long(words):
            return None
        known = self._vocabulary
        ids = [known.setdefault(word, len(known)) for word in words]
        return {hash(tuple(ids[n : n + GRAM])) for n in range(len(ids) - GRAM + 1)}


def _prefix(size: int) -> int:
    """Return the number of a set's rarest members of which a similar set must have one."""
    return size - math.ceil(SIMILAR * size - _ROUNDING) + 1
