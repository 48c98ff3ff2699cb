"""Decontamination: find texts that equal, resemble or contain a text held out from training.

`BlockedTexts.of` collects the texts that a queries.Decontamination names. They are inputs of
held-out tasks, from the journals of loops (cray_agents/loop/holdout_journal.py) and from runs, and
texts of given files (blocked_files.py). Comparison is exact, by words (cray_agents/text_words.py)
and by sets of word 5-grams, found through an index of their hashes. Called by draft.py and
selection.py. cray_agents/tasks/leakage.py applies the same rule to a TaskSet, without numpy.
"""

from collections.abc import Iterable, Iterator
from typing import Literal, NamedTuple

import numpy as np
from numpy.typing import NDArray

from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, RunQuery
from cray_agents.records import HELD_OUT_ENTRY, HeldOut, Message, Run
from cray_agents.runtime.datasets.blocked_files import texts_of_file
from cray_agents.runtime.datasets.near_duplicates import Shingles, count_shared, shingles
from cray_agents.runtime.datasets.recipe_checks import LOOP
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.segments.facts import text_of
from cray_agents.tasks.leakage import task_key
from cray_agents.text_words import SIMILAR, is_long, words_of

MANY = 200  # more candidates than this are compared all at once
HEAD = 160  # characters shown of a text

Places = NDArray[np.int64]


class HeldText(NamedTuple):
    """A text held out from training, and its source: `holdout task 3f2a`, `f.jsonl:17`.

    With `world`, the text is the key of a task with a world (leakage.task_key). Then only the task
    is held out, not its input.
    """

    source: str
    text: str
    world: bool = False


class Match(NamedTuple):
    """A match with a held text: its source, its head, and the Jaccard similarity of word 5-grams.

    `how` is `equal` up to case, spaces and punctuation (similarity 1.0), `near`, or `contained`. A
    contained text occurs word for word in the other text, however long that one is.
    """

    source: str
    text: str
    similarity: float
    how: Literal["equal", "near", "contained"]

    @property
    def description(self) -> str:
        """The match in words: `similar (0.913) to holdout task 3f2a`."""
        if self.how == "near":
            return f"similar ({self.similarity:.3f}) to {self.source}"
        return f"{'equal to' if self.how == 'equal' else 'holds all of'} {self.source}"


class BlockedTexts:
    """An index of held texts. A text of 30 words takes about 2 KB of memory."""

    def __init__(self, texts: Iterable[HeldText], threshold: float = SIMILAR) -> None:
        self._threshold = threshold
        self._sources: list[str] = []
        self._heads: list[str] = []
        self._equal: dict[str, int] = {}
        self._worlds: dict[str, str] = {}  # source by task key
        self._vocabulary: dict[str, int] = {}
        self._long: list[int] = []  # numbers of the texts that are compared by similarity
        sets: list[Shingles] = []
        for entry in texts:
            if entry.world:
                self._worlds.setdefault(entry.text, entry.source)
                continue
            words = words_of(entry.text)
            number = len(self._sources)
            if self._equal.setdefault(" ".join(words), number) != number or not words:
                continue  # the same text again
            self._sources.append(entry.source)
            self._heads.append(head(entry.text))
            if is_long(words):
                ids = [self._vocabulary.setdefault(w, len(self._vocabulary)) for w in words]
                self._long.append(number)
                sets.append(shingles(ids))
        self._equal.pop("", None)
        self._index = _Index(sets)
        self._known: dict[str, Match | None] = {}  # results of the last match_any call

    def __len__(self) -> int:
        """Return the number of different texts and worlds."""
        return len(self._sources) + len(self._worlds)

    @classmethod
    def of(cls, store: Store, home: Home, recipe: DatasetRecipe) -> "BlockedTexts":
        """Collect the texts that a recipe excludes. Raises BadInput for an unreadable file."""
        return cls(_collect(store, home, recipe), recipe.decontamination.threshold)

    def match(self, text: str) -> Match | None:
        """Return the match with an equal text, else with the most similar one, else None."""
        return self.match_any([text])

    def match_run(self, run: Run) -> Match | None:
        """Return the match of a run: of its task's world, or of a text of its user."""
        if run.task is not None and run.task.world is not None:
            source = self._worlds.get(task_key(run.task))
            if source is not None:
                return Match(source, head(run.input), 1.0, "equal")
        return self.match_any(inputs_of(run))

    def match_any(self, texts: Iterable[str]) -> Match | None:
        """Return the match of the first of these texts that has one."""
        if not self._sources:
            return None
        before, self._known = self._known, {}  # consecutive runs are attempts at one task
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
            return self._match_with(equal, 1.0, "equal")
        if not self._long or not is_long(words):
            return None
        query = shingles(self._ids(words))
        index, similarity = self._index.nearest(query, self._threshold)
        if index >= 0:
            return self._match_with(self._long[index], similarity, "near")
        index, similarity = self._index.largest_contained(query)
        return self._match_with(self._long[index], similarity, "contained") if index >= 0 else None

    def _ids(self, words: list[str]) -> list[int]:
        """Return the number of each word. Words that no held text has get new numbers."""
        new: dict[str, int] = {}
        known = self._vocabulary
        return [
            known[word] if word in known else new.setdefault(word, len(known) + len(new))
            for word in words
        ]

    def _match_with(
        self, number: int, similarity: float, how: Literal["equal", "near", "contained"]
    ) -> Match:
        return Match(self._sources[number], self._heads[number], similarity, how)


class _Index:
    """An inverted index from shingles to the sets that contain them: 24 bytes a shingle."""

    def __init__(self, sets: list[Shingles]) -> None:
        self._sizes = np.array([len(members) for members in sets], np.int64)
        self._starts = np.concatenate(([0], np.cumsum(self._sizes)))
        self._sets = np.concatenate(sets) if sets else np.empty(0, np.uint64)
        owners = np.repeat(np.arange(len(sets), dtype=np.int64), self._sizes)
        order = np.argsort(self._sets, kind="stable")
        self._shingles, first, self._counts = np.unique(
            self._sets[order], return_index=True, return_counts=True
        )
        self._firsts, self._owners = first.astype(np.int64), owners[order]
        self._rarest = self._group_by_rarest(sets)

    def nearest(self, query: Shingles, threshold: float) -> tuple[int, float]:
        """Return the most similar set and its Jaccard similarity; -1 if it is below the threshold.

        Let n be the size of the query. A set that similar shares at least one of any
        `n - ceil(threshold * n) + 1` of its shingles. So only sets with one of the rarest shingles
        are compared (prefix filtering: Bayardo et al. 2007).
        """
        _, counts, places = self._lookup(query)
        enough = int(np.ceil(threshold * len(query) - 1e-9))
        missing = len(query) - len(places)
        if len(places) < enough:
            return -1, 0.0
        rarest = places[np.argsort(counts, kind="stable")[: len(query) - enough + 1 - missing]]
        sizes = self._sizes
        sets = np.unique(self._owners_of(rarest))
        sets = sets[(sizes[sets] >= enough) & (sizes[sets] * threshold <= len(query) + 1e-9)]
        return self._most_similar(query, sets, threshold)

    def largest_contained(self, query: Shingles) -> tuple[int, float]:
        """Return the largest set contained in the query and its Jaccard similarity, or -1."""
        known, _, _ = self._lookup(query)
        best, best_size = -1, 0
        for shingle in known.tolist():
            for index in self._rarest.get(shingle, ()):
                size = int(self._sizes[index])
                if size <= best_size or size > len(query):
                    continue
                if count_shared(self._set(index), query) == size:
                    best, best_size = index, size
        return best, best_size / len(query)

    def _most_similar(self, query: Shingles, sets: Places, threshold: float) -> tuple[int, float]:
        if not len(sets):
            return -1, 0.0
        if len(sets) > MANY:
            shared_counts = self._shared_by_all(query)[sets]
        else:
            shared_counts = self._shared_by(query, sets)
        similar = shared_counts / (len(query) + self._sizes[sets] - shared_counts)
        best = int(np.argmax(similar))  # the first of equals
        if similar[best] < threshold:
            return -1, 0.0
        return int(sets[best]), float(similar[best])

    def _shared_by(self, query: Shingles, sets: Places) -> Places:
        """Return the number of shingles that each of these sets shares with the query."""
        return np.array([count_shared(self._set(int(index)), query) for index in sets], np.int64)

    def _shared_by_all(self, query: Shingles) -> Places:
        """Return that number for every set, which is faster if most sets share a template."""
        _, _, places = self._lookup(query)
        return np.bincount(self._owners_of(places), minlength=len(self._sizes))

    def _lookup(self, query: Shingles) -> tuple[Shingles, Places, Places]:
        """Return the indexed shingles of the query, the sets having each, and their positions."""
        places = np.searchsorted(self._shingles, query)
        places[places == len(self._shingles)] = 0
        known = self._shingles[places] == query
        places = places[known]
        return query[known], self._counts[places], places

    def _owners_of(self, places: Places) -> Places:
        slices = [self._owners[self._firsts[p] : self._firsts[p] + self._counts[p]] for p in places]
        return np.concatenate(slices) if slices else np.empty(0, np.int64)

    def _set(self, index: int) -> Shingles:
        return self._sets[self._starts[index] : self._starts[index + 1]]

    def _group_by_rarest(self, sets: list[Shingles]) -> dict[int, list[int]]:
        """Group sets by their rarest shingle, which every superset contains, too."""
        by_shingle: dict[int, list[int]] = {}
        for index, members in enumerate(sets):
            counts = self._counts[np.searchsorted(self._shingles, members)]
            by_shingle.setdefault(int(members[np.argmin(counts)]), []).append(index)
        return by_shingle


def inputs_of(run: Run) -> list[str]:
    """Return the texts of a run to compare: its input, and all messages of its user.

    Messages of its model calls are included, since a client could report a different trajectory.
    """
    prompts = (text for call in run.calls for text in inputs_of_messages(call.messages))
    return list(dict.fromkeys([run.input, *inputs_of_messages(run.trajectory.messages), *prompts]))


def inputs_of_messages(messages: Iterable[Message]) -> list[str]:
    """Return the texts of a demonstration to compare: each message of its user, no answers."""
    return [text_of(m) for m in messages if m.get("role") == "user"]


def input_of(run: Run) -> str:
    """Return the text to hold out for a run: its input, or the first message of its user."""
    return run.input or input_of_messages(run.trajectory.messages)


def input_of_messages(messages: Iterable[Message]) -> str:
    """Return the first message of the user, or ""."""
    return next(iter(inputs_of_messages(messages)), "")


def head(text: str) -> str:
    """Return the beginning of a text, on one line."""
    line = " ".join(text[: 4 * HEAD].split())
    return line if len(line) <= HEAD else line[: HEAD - 1] + "…"


def _collect(store: Store, home: Home, recipe: DatasetRecipe) -> Iterator[HeldText]:
    options = recipe.decontamination
    if options.holdout:
        yield from _journal_texts(home, recipe.loop)
        for split in ("holdout", "test"):
            yield from _split_texts(store, recipe.loop, split)
    files = Files(home)
    for name in options.files:
        yield from (HeldText(source, text) for source, text in texts_of_file(files, name))


def _journal_texts(home: Home, loop: str | None) -> Iterator[HeldText]:
    """Yield the held-out tasks of a loop, or of all loops, even if they were not run yet."""
    if loop is not None and not LOOP.fullmatch(loop):
        return
    for path in sorted(home.loop("").glob(f"{loop or '*'}/journal/{HELD_OUT_ENTRY}*.json")):
        entry = checksums.read_record(HeldOut, path)
        yield from (HeldText(source, text) for source, text in entry.inputs)
        yield from (HeldText(source, key, world=True) for source, key in entry.worlds)


def _split_texts(store: Store, loop: str | None, split: str) -> Iterator[HeldText]:
    """Yield the input of one run of each task, since all attempts share it."""
    run_ids: dict[tuple[str | None, str | None, str], str] = {}
    for facts in store.facts(RunQuery(loop=loop, split=split)):
        run_ids.setdefault((facts.loop, facts.task, facts.input), facts.run_id)
    for run in store.runs_by_id(list(run_ids.values())):
        source = f"{split} task {run.task.id if run.task else ''}"
        if run.task is not None and run.task.world is not None:
            yield HeldText(source, task_key(run.task), world=True)
        else:
            yield HeldText(source, input_of(run))
