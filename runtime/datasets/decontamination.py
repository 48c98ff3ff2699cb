"""The texts that must not be in a training set, and whether a text is one of them, or nearly one.

`Held.of` gathers them, as recipes.Decontamination says which: the inputs of held-out tasks, from
the journals of loops (cray_agents/held_out.py) and from runs, and given files (held_files.py).
Nothing is estimated: words (cray_agents/words.py) are compared, and
sets of word 5-grams through an index of their hashes. Called by the builder, once a task. splits.py
of cray_agents holds a TaskSet's splits apart by the same rule, without numpy.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cray_agents.loop.holdout_journal import ENTRY, HeldOut
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, RunQuery
from cray_agents.records import Message, Run
from cray_agents.runtime.datasets.blocked_files import texts_of_file
from cray_agents.runtime.datasets.near_duplicates import Shingles, shared, shingles
from cray_agents.runtime.datasets.recipe_checks import LOOP
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.segments.facts import text_of
from cray_agents.tasks.leakage import task_key
from cray_agents.text_words import SIMILAR, is_long, words_of

MANY = 200  # candidates that are not compared one by one
HEAD = 160  # characters of a text that are shown

Places = NDArray[np.int64]


class HeldText(NamedTuple):
    """A text that must not be trained on, and where from: `holdout task 3f2a`, `f.jsonl:17`.

    With `world` the text is the key of a task that has one (splits.task_key): only that is held.
    """

    source: str
    text: str
    world: bool = False


class Match(NamedTuple):
    """The held text that was recognised, its head, and the Jaccard similarity of word 5-grams.

    `how`: `equal` but for case, spaces and punctuation (similarity 1.0); `near`; or `contained`:
    the held text stands in the other one word for word, however long that is.
    """

    source: str
    text: str
    similarity: float
    how: Literal["equal", "near", "contained"]

    @property
    def told(self) -> str:
        """What was recognised, in words: `similar (0.913) to holdout task 3f2a`."""
        if self.how == "near":
            return f"similar ({self.similarity:.3f}) to {self.source}"
        return f"{'equal to' if self.how == 'equal' else 'holds all of'} {self.source}"


class BlockedTexts:
    """Held texts, indexed. A text of 30 words takes about 2 KB of memory."""

    def __init__(self, texts: Iterable[HeldText], threshold: float = SIMILAR) -> None:
        self._threshold = threshold
        self._sources: list[str] = []
        self._heads: list[str] = []
        self._equal: dict[str, int] = {}
        self._worlds: dict[str, str] = {}  # the source of each
        self._vocabulary: dict[str, int] = {}
        self._long: list[int] = []  # numbers of the texts that are compared by similarity
        sets: list[Shingles] = []
        for held in texts:
            if held.world:
                self._worlds.setdefault(held.text, held.source)
                continue
            words = words_of(held.text)
            number = len(self._sources)
            if self._equal.setdefault(" ".join(words), number) != number or not words:
                continue  # the same text again
            self._sources.append(held.source)
            self._heads.append(head(held.text))
            if is_long(words):
                ids = [self._vocabulary.setdefault(w, len(self._vocabulary)) for w in words]
                self._long.append(number)
                sets.append(shingles(ids))
        self._equal.pop("", None)
        self._index = _Index(sets)
        self._known: dict[str, Match | None] = {}  # of what match_any was given last

    def __len__(self) -> int:
        """How many different texts and worlds are held."""
        return len(self._sources) + len(self._worlds)

    @classmethod
    def of(cls, store: Store, home: Home, recipe: DatasetRecipe) -> "BlockedTexts":
        """What a recipe must not train on. Raises BadInput on a file that cannot be read."""
        what = recipe.decontamination
        return cls(_gathered(store, home, recipe), what.threshold)

    def match(self, text: str) -> Match | None:
        """The held text that this one is: an equal one, else the most similar, else None."""
        return self.match_any([text])

    def match_run(self, run: Run) -> Match | None:
        """What is held of a run: its task's world, or a text that its user said."""
        if run.task is not None and run.task.world is not None:
            source = self._worlds.get(task_key(run.task))
            if source is not None:
                return Match(source, head(run.input), 1.0, "equal")
        return self.match_any(inputs_of(run))

    def match_any(self, texts: Iterable[str]) -> Match | None:
        """The match of the first of these texts that has one."""
        if not self._sources:
            return None
        before, self._known = self._known, {}  # attempts at a task come one after another
        for text in texts:
            if text not in self._known:
                self._known[text] = before[text] if text in before else self._match(text)
            if (match := self._known[text]) is not None:
                return match
        return None

    def _match(self, text: str) -> Match | None:
        words = words_of(text)
        equal = self._equal.get(" ".join(words))
        if equal is not None:
            return self._found(equal, 1.0, "equal")
        if not self._long or not is_long(words):
            return None
        mine = shingles(self._ids(words))
        place, similarity = self._index.nearest(mine, self._threshold)
        if place >= 0:
            return self._found(self._long[place], similarity, "near")
        place, similarity = self._index.inside(mine)
        return self._found(self._long[place], similarity, "contained") if place >= 0 else None

    def _ids(self, words: list[str]) -> list[int]:
        """Words as numbers; each that no held text has gets one of its own."""
        new: dict[str, int] = {}
        known = self._vocabulary
        return [
            known[word] if word in known else new.setdefault(word, len(known) + len(new))
            for word in words
        ]

    def _found(
        self, number: int, similarity: float, how: Literal["equal", "near", "contained"]
    ) -> Match:
        return Match(self._sources[number], self._heads[number], similarity, how)


class _Index:
    """Sets of shingles, and for each shingle which sets it is in: flat arrays, 24 bytes each."""

    def __init__(self, sets: list[Shingles]) -> None:
        self._sizes = np.array([len(one) for one in sets], np.int64)
        self._starts = np.concatenate(([0], np.cumsum(self._sizes)))
        self._sets = np.concatenate(sets) if sets else np.empty(0, np.uint64)
        owners = np.repeat(np.arange(len(sets), dtype=np.int64), self._sizes)
        order = np.argsort(self._sets, kind="stable")
        self._shingles, first, self._counts = np.unique(
            self._sets[order], return_index=True, return_counts=True
        )
        self._firsts, self._owners = first.astype(np.int64), owners[order]
        self._rarest = self._by_rarest(sets)

    def nearest(self, mine: Shingles, threshold: float) -> tuple[int, float]:
        """The most similar set and its Jaccard similarity, if that reaches the threshold, or -1.

        Sets that similar share one of any `len(mine) - ceil(threshold * len(mine)) + 1` shingles
        of mine; so those of the rarest are looked at (prefix filtering: Bayardo et al. 2007).
        """
        _, counts, places = self._lookup(mine)
        enough = int(np.ceil(threshold * len(mine) - 1e-9))
        missing = len(mine) - len(places)
        if len(places) < enough:
            return -1, 0.0
        rarest = places[np.argsort(counts, kind="stable")[: len(mine) - enough + 1 - missing]]
        sizes = self._sizes
        found = np.unique(self._owners_of(rarest))
        found = found[(sizes[found] >= enough) & (sizes[found] * threshold <= len(mine) + 1e-9)]
        return self._best(mine, found, threshold)

    def inside(self, mine: Shingles) -> tuple[int, float]:
        """The largest set all of which is in mine, and its Jaccard similarity, or -1."""
        mine_here, _, _ = self._lookup(mine)
        best, size = -1, 0
        for shingle in mine_here.tolist():
            for place in self._rarest.get(shingle, ()):
                its = int(self._sizes[place])
                if its > size and its <= len(mine) and shared(self._set(place), mine) == its:
                    best, size = place, its
        return best, size / len(mine)

    def _best(self, mine: Shingles, found: Places, threshold: float) -> tuple[int, float]:
        if not len(found):
            return -1, 0.0
        both = self._all_shared(mine)[found] if len(found) > MANY else self._shared(mine, found)
        similar = both / (len(mine) + self._sizes[found] - both)
        best = int(np.argmax(similar))  # the first of equals
        if similar[best] < threshold:
            return -1, 0.0
        return int(found[best]), float(similar[best])

    def _shared(self, mine: Shingles, found: Places) -> Places:
        """How many of mine are in each of these sets."""
        return np.array([shared(self._set(int(place)), mine) for place in found], np.int64)

    def _all_shared(self, mine: Shingles) -> Places:
        """How many of mine are in each set: sooner told where most sets share a template."""
        _, _, places = self._lookup(mine)
        return np.bincount(self._owners_of(places), minlength=len(self._sizes))

    def _lookup(self, mine: Shingles) -> tuple[Shingles, Places, Places]:
        """Those of mine that any set has, in how many it is, and its place among the shingles."""
        places = np.searchsorted(self._shingles, mine)
        places[places == len(self._shingles)] = 0
        known = self._shingles[places] == mine
        places = places[known]
        return mine[known], self._counts[places], places

    def _owners_of(self, places: Places) -> Places:
        slices = [self._owners[self._firsts[p] : self._firsts[p] + self._counts[p]] for p in places]
        return np.concatenate(slices) if slices else np.empty(0, np.int64)

    def _set(self, place: int) -> Shingles:
        return self._sets[self._starts[place] : self._starts[place + 1]]

    def _by_rarest(self, sets: list[Shingles]) -> dict[int, list[int]]:
        """Each set by the shingle that the fewest others have; what holds the set has that one."""
        found: dict[int, list[int]] = {}
        for place, one in enumerate(sets):
            counts = self._counts[np.searchsorted(self._shingles, one)]
            found.setdefault(int(one[np.argmin(counts)]), []).append(place)
        return found


def inputs_of(run: Run) -> list[str]:
    """What of a run is compared: its input, and all that its user said.

    Also what was really asked of the model, for the rest is what its client tells.
    """
    asked = (text for call in run.calls for text in inputs_of_messages(call.messages))
    return list(dict.fromkeys([run.input, *inputs_of_messages(run.trajectory.messages), *asked]))


def inputs_of_messages(messages: Iterable[Message]) -> list[str]:
    """What of a demonstration is compared: each message of its user; answers never are."""
    return [text_of(m) for m in messages if m.get("role") == "user"]


def input_of(run: Run) -> str:
    """What of a held-out run is held: its input, or what its user said first."""
    return run.input or input_of_messages(run.trajectory.messages)


def input_of_messages(messages: Iterable[Message]) -> str:
    """What was asked: the first message of the user."""
    return next(iter(inputs_of_messages(messages)), "")


def head(text: str) -> str:
    """The beginning of a text, on one line."""
    line = " ".join(text[: 4 * HEAD].split())
    return line if len(line) <= HEAD else line[: HEAD - 1] + "…"


def _gathered(store: Store, home: Home, recipe: DatasetRecipe) -> Iterator[HeldText]:
    what = recipe.decontamination
    if what.holdout:
        yield from _of_journal(home, recipe.loop)
        for split in ("holdout", "test"):
            yield from _of_split(store, recipe.loop, split)
    files = Files(home)
    for name in what.files:
        yield from (HeldText(source, text) for source, text in texts_of_file(files, name))


def _of_journal(home: Home, loop: str | None) -> Iterator[HeldText]:
    """What loops, or the one that is named, keep to judge by, whether or not it was run yet."""
    if loop is not None and not LOOP.fullmatch(loop):
        return
    for path in sorted(home.loop("").glob(f"{loop or '*'}/journal/{ENTRY}*.json")):
        entry = checksums.read_record(HeldOut, path)
        yield from (HeldText(source, text) for source, text in entry.inputs)
        yield from (HeldText(source, key, world=True) for source, key in entry.worlds)


def _of_split(store: Store, loop: str | None, split: str) -> Iterator[HeldText]:
    """One run's input for each task: attempts at a task, and generations, have the same."""
    found: dict[tuple[str | None, str | None, str], str] = {}
    for facts in store.facts(RunQuery(loop=loop, split=split)):
        found.setdefault((facts.loop, facts.task, facts.input), facts.run_id)
    for run in store.whole(list(found.values())):
        source = f"{split} task {run.task.id if run.task else ''}"
        if run.task is not None and run.task.world is not None:
            yield HeldText(source, task_key(run.task), world=True)
        else:
            yield HeldText(source, input_of(run))
