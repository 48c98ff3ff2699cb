"""Which dataset each step of a loop has, once and for all, and how often a run was used by them.

    <home>/loops/<loop>/datasets/commits/<n>.json    n = 0, 1, ...: {step, recipe, dataset, seen}
                                 <step>.json         the same, by step
                                 <step>.<recipe>.ready   a dataset about to be committed

A build counts the runs' uses in all commits there are, say n of them, and commits as number n by
exclusive create: if another was faster the number is taken, and it counts and builds again. So no
two builds can miss each other's uses, whatever step they are of and whichever host they run on.

Where a builder may be killed, and what the next one finds:

    before the draft is whole       a hidden draft, swept a day later; the build begins anew
    before `ready` is written       the same
    `ready`, not yet published      the named dataset does not exist: the build begins anew
    published, not yet committed    the dataset that `ready` names exists: it is committed as it is,
                                    though other runs have come in since; unless another step was
                                    committed meanwhile and uses are bounded: then it would use
                                    runs too often, and is built anew
    committed, no `<step>.json`     the commits are read: the step's is among them
    after that                      `<step>.json` answers

A commit never names a dataset that does not exist: it is made last. Called by building.py.
"""

import time
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from hashlib import blake2b
from pathlib import Path

import orjson

from cray_agents.errors import BadInput, Corrupt
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import Record
from cray_agents.runtime.datasets.content_name import recipe_name
from cray_agents.runtime.datasets.reader import MANIFEST, accepted_runs
from cray_agents.runtime.disk import checksums, durable

LAG = 0.1  # seconds


class Commit(Record):
    """That a step has a dataset. `recipe` is the recipe's name, `seen` how many came before."""

    step: int
    recipe: str
    dataset: str
    seen: int


class Uses:
    """How often each run is in the datasets of a loop's other steps: about 100 bytes a run."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def add(self, run_id: str) -> None:
        """Count one use."""
        key = _key(run_id)
        self._counts[key] = self._counts.get(key, 0) + 1

    def of(self, run_id: str) -> int:
        """How often it was used."""
        return self._counts.get(_key(run_id), 0)


@dataclass(frozen=True)
class Ledger:
    """The steps of one loop, as seen by the build of one of them."""

    home: Home
    loop: str
    step: int
    recipe: str
    bounded: bool  # whether uses are

    @classmethod
    def of(cls, home: Home, recipe: DatasetRecipe) -> "Ledger | None":
        """The ledger that a recipe's dataset goes into, if it is of a step."""
        if recipe.loop is None or recipe.step is None:
            return None
        bounded = recipe.max_uses is not None
        return cls(home, recipe.loop, recipe.step, recipe_name(recipe), bounded)

    def committed(self) -> str | None:
        """The step's dataset; what a killed build had ready is committed first.

        Raises BadInput if the step is another recipe's.
        """
        found = self._find()
        if found is None:
            ready = _read(self._ready)
            if ready is not None and self._exists(ready.dataset):
                found = self._commit(ready)
        return self._mine(found) if found is not None else None

    def count(self) -> tuple[int, Uses] | None:
        """How many commits there are, and the uses in their datasets.

        None if the step's own is among them: another builder was faster.
        """
        commits = list(self._commits())
        if any(commit.step == self.step for commit in commits):
            return None
        return len(commits), self._uses(commits)

    def prepare(self, dataset: str, seen: int) -> None:
        """Say which dataset will be committed: called when it is whole, before it is published."""
        commit = Commit(step=self.step, recipe=self.recipe, dataset=dataset, seen=seen)
        durable.replace_file(self._ready, _line(commit))

    def commit(self, dataset: str, seen: int) -> str | None:
        """Commit a published dataset; returns the step's, or None if uses must be counted again.

        Raises BadInput if the step became another recipe's meanwhile.
        """
        commit = Commit(step=self.step, recipe=self.recipe, dataset=dataset, seen=seen)
        found = self._commit(commit)
        return self._mine(found) if found is not None else None

    def look(self) -> tuple[str | None, Uses]:
        """The step's dataset, if it has one, and the uses in those of all others."""
        commits = list(self._commits())
        mine = next((c.dataset for c in commits if c.step == self.step), None)
        return mine, self._uses([c for c in commits if c.step != self.step])

    def _uses(self, commits: Iterable[Commit]) -> Uses:
        uses = Uses()
        for commit in commits if self.bounded else ():
            for run_id in accepted_runs(self.home, commit.dataset):
                uses.add(run_id)
        return uses

    def _commit(self, commit: Commit) -> Commit | None:
        number = commit.seen
        while not durable.create_file(self._number(number), _line(commit)):
            other = _read(self._number(number))
            if other is None:  # a file system whose listing lags behind: it will be seen
                time.sleep(LAG)
                continue
            if other.step == self.step:
                commit = other  # ours of another time, or another builder of the same step
                break
            if self.bounded:
                return None
            number += 1
        durable.create_file(self._by_step, _line(commit))
        self._ready.unlink(missing_ok=True)
        return commit

    def _find(self) -> Commit | None:
        found = _read(self._by_step)
        if found is None:
            found = next((c for c in self._commits() if c.step == self.step), None)
            if found is not None:
                durable.create_file(self._by_step, _line(found))
        return found

    def _mine(self, commit: Commit) -> str:
        if commit.recipe != self.recipe:
            raise BadInput(
                f"step {self.step} of loop {self.loop} has a training set, {commit.dataset}, made "
                "by another recipe: a step keeps what it has; take the next one",
                param="step",
                code="step_taken",
            )
        if not self._exists(commit.dataset):
            raise Corrupt(
                f"{commit.dataset}, the training set of step {self.step} of loop {self.loop}, is "
                f"gone from {self.home.datasets}"
            )
        return commit.dataset

    def _commits(self) -> Iterator[Commit]:
        number = 0
        while (found := _read(self._number(number))) is not None:
            yield found
            number += 1

    def _exists(self, dataset: str) -> bool:
        return (self.home.dataset(dataset) / MANIFEST).is_file()

    def _number(self, number: int) -> Path:
        return self._folder / "commits" / f"{number}.json"

    @property
    def _folder(self) -> Path:
        return self.home.loop_datasets(self.loop)

    @property
    def _by_step(self) -> Path:
        return self._folder / f"{self.step}.json"

    @property
    def _ready(self) -> Path:
        return self._folder / f"{self.step}.{self.recipe[:16]}.ready"


def _read(path: Path) -> Commit | None:
    try:
        return checksums.read_record(Commit, path)
    except FileNotFoundError:
        return None


def _line(commit: Commit) -> bytes:
    return checksums.with_crc(orjson.dumps(commit.model_dump()))


def _key(run_id: str) -> bytes:
    return blake2b(run_id.encode(), digest_size=16).digest()
