"""Whether a task of one split is also in another: by its id, or by its input, also nearly.

The rule for inputs is that of words.py: equal but for case, spaces and punctuation; of long ones
also those whose word 5-grams are similar, or that hold all of a guarded one. Tasks whose metadata
make them what they are (Task.identity) are compared by these as well. Nothing is estimated,
and all is looked up: of a guarded input the index holds its rarest 5-grams, so many that one that
is similar must share one of them (prefix filtering: Bayardo, Ma, Srikant 2007), and where the first
that they share stands bounds how many there are (positions: Xiao et al. 2008). Called by tasks.py.
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

#: What a split is kept from: tasks of those before it. Nothing that is judged by may be trained on,
#: and nothing that only measures may decide.
GUARDED: tuple[Split, ...] = ("train", "holdout", "test")
_ROUNDING = 1e-9
_WORLD = "\x00"  # in no key of a text: tasks with a world are equal or not, never nearly


@dataclass(frozen=True)
class Leak:
    """Task number `one` of a set is also task number `other`, which is in a more guarded split.

    `how`: the same `id`; inputs that are `equal`, `near` (Jaccard similarity of word 5-grams), or
    that of `one` has all of the other in it (`contained`).
    """

    one: int
    other: int
    similarity: float
    how: Literal["id", "equal", "near", "contained"]


def key_of(text: str) -> str:
    """What makes two inputs equal: their words, or, in a text that has none, all of it."""
    return " ".join(words_of(text)) or " ".join(text.casefold().split())


def task_key(task: Task) -> str:
    """What makes two tasks equal: the key of the input, and the world where the task has one."""
    key = key_of(task.input)
    return key if task.world is None else f"{key}{_WORLD}{task.world}"


class Dropped(NamedTuple):
    """A task that `on_leak="drop"` left out, and why, in words."""

    task: Task
    reason: str


def apart(
    tasks: Sequence[Task], keys: Sequence[str], places: Sequence[str], *, drop: bool
) -> tuple[tuple[Task, ...], tuple[Dropped, ...]]:
    """The tasks without those that are in another split too, and these; in order.

    `places`: what to call each in a message. Raises BadInput for a leak that is not to be dropped,
    and for two tasks of one id.
    """
    dropped: dict[int, Dropped] = {}
    for leak in leaks(tasks, keys):
        told = _told(leak, tasks, places)
        if not drop:
            raise BadInput(told, param="id" if leak.how == "id" else "split")
        dropped[leak.one] = Dropped(tasks[leak.one], told)
    ids: dict[str, int] = {}
    for n, task in enumerate(tasks):
        first = n if n in dropped else ids.setdefault(task.id, n)
        if first != n:
            raise BadInput(
                f"{places[n]}: the same task id {task.id!r} as {places[first]}", param="id"
            )
    kept = tuple(task for n, task in enumerate(tasks) if n not in dropped)
    return kept, tuple(dropped.values())


def leaks(tasks: Sequence[Task], keys: Sequence[str]) -> Iterator[Leak]:
    """Each task that is also in a split more guarded than its own, once. `keys`: see `key_of`."""
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
        elif found := guarded.match(number, ranks[number], keys[number]):
            yield found


def _told(leak: Leak, tasks: Sequence[Task], places: Sequence[str]) -> str:
    """A leak in words: both tasks, how alike they are, and what can be done."""
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
    """The inputs that others are compared with, and where the rarest 5-grams of each are."""

    def __init__(self, inputs: Iterable[tuple[int, int, str]]) -> None:
        self._equal: dict[str, tuple[int, int]] = {}  # (task number, rank)
        self._texts: list[tuple[int, int, array[int]]] = []  # and the 5-grams, rarest first
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
        """A task of a more guarded split that this one is."""
        if rank == self._highest:
            return None
        equal = self._equal.get(key)
        if equal is not None and equal[1] > rank:
            return Leak(number, equal[0], 1.0, "equal")
        mine = self._grams(key) if self._texts else None
        if not mine:
            return None
        for place in self._similar(mine):
            other, its, grams = self._texts[place]
            both = len(mine.intersection(grams)) if its > rank else 0
            similarity = both / (len(mine) + len(grams) - both)
            if similarity >= SIMILAR:
                return Leak(number, other, similarity, "near")
        for gram in mine & self._rarest.keys():
            for place in self._rarest[gram]:
                other, its, grams = self._texts[place]
                if its > rank and len(grams) <= len(mine) and mine.issuperset(grams):
                    return Leak(number, other, len(grams) / len(mine), "contained")
        return None

    def _similar(self, mine: set[int]) -> Iterator[int]:
        """Those that may be similar, each once."""
        met: set[int] = set()
        known = mine & self._counts.keys()
        size, unknown = len(mine), len(mine) - len(known)
        if len(known) < SIMILAR * size - _ROUNDING:
            return
        wanted = self._by_rarity(known)[: _prefix(size) - unknown]
        for at, gram in enumerate(wanted, unknown):  # those that nobody has are the rarest
            for place, position in self._index.get(gram, ()):
                if place not in met:
                    met.add(place)
                    its = len(self._texts[place][2])
                    both = min(size - at, its - position)  # at most: this is the first they share
                    if both >= SIMILAR * (size + its - both) - _ROUNDING:
                        yield place

    def _by_rarity(self, grams: Iterable[int]) -> list[int]:
        """In an order that is the same for all sets: this is what the filter rests on."""
        counts = self._counts
        return sorted(grams, key=lambda gram: (counts[gram], gram))

    def _grams(self, key: str) -> set[int] | None:
        """The 5-grams of a text that is compared by similarity, as hashes of 64 bits.

        Of numbers, for the hash of a string is another one in each process.
        """
        words = key.split(" ")
        if _WORLD in key or not is_long(words):
            return None
        known = self._vocabulary
        ids = [known.setdefault(word, len(known)) for word in words]
        return {hash(tuple(ids[n : n + GRAM])) for n in range(len(ids) - GRAM + 1)}


def _prefix(size: int) -> int:
    """How many of a set's members another must have one of, to be similar."""
    return size - math.ceil(SIMILAR * size - _ROUNDING) + 1
