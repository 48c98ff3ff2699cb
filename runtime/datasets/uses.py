"""Uses ledger: fix the dataset of each step of a loop, and count the uses of each run.

    <home>/loops/<loop>/datasets/commits/<n>.json    n = 0, 1, ...: {step, recipe, dataset, seen}
                                 <step>.<recipe>.ready   a dataset about to be committed

A build counts the uses of runs in all n commits, and commits as number n by exclusive create. If
another build has taken the number, it counts and builds again. So no two builds miss each other's
uses, for any steps and on any hosts.

A builder may be killed at any point. The next builder then resumes:

    draft not complete              the draft is removed a day later; the build begins anew
    `ready` not written             the same
    `ready`, not yet published      the named dataset does not exist; the build begins anew
    published, not yet committed    the dataset named by `ready` is committed, even if there are new
                                    runs; if uses are bounded and another step was committed
                                    meanwhile, it is built anew, or it might use runs too often
    committed                       the step's commit is found among the commits

A commit is made last, so it always names an existing dataset. In an older root `<step>.json`
repeats a step's commit. Called by build.py.
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
from cray_agents.runtime.datasets.reader import MANIFEST, accepted_runs
from cray_agents.runtime.datasets.recipe import recipe_name
from cray_agents.runtime.disk import checksums, durable

COMMIT_FORMAT = 1
LAG = 0.1  # seconds between reads of a file that is not visible yet


class Commit(Record):
    """The dataset of a step. `recipe` is the recipe's hash, `seen` the number of commits before."""

    step: int
    recipe: str
    dataset: str
    seen: int
    format: int = COMMIT_FORMAT


class Uses:
    """Counts of each run's uses in datasets of the loop's other steps: about 100 bytes a run."""

    def __init__(self) -> None:
        self._counts: dict[bytes, int] = {}

    def add(self, run_id: str) -> None:
        """Count one use."""
        key = _key(run_id)
        self._counts[key] = self._counts.get(key, 0) + 1

    def of(self, run_id: str) -> int:
        """Return the number of uses of a run."""
        return self._counts.get(_key(run_id), 0)


@dataclass(frozen=True)
class Ledger:
    """The ledger of a loop, for the build of one of its steps."""

    home: Home
    loop: str
    step: int
    recipe: str
    bounded: bool  # the recipe has `max_uses`

    @classmethod
    def of(cls, home: Home, recipe: DatasetRecipe) -> "Ledger | None":
        """Return the ledger for a recipe, or None if it names no loop and step."""
        if recipe.loop is None or recipe.step is None:
            return None
        bounded = recipe.max_uses is not None
        return cls(home, recipe.loop, recipe.step, recipe_name(recipe), bounded)

    def find_or_resume(self) -> str | None:
        """Return the dataset of the step, or None. Commits a dataset that a killed build published.

        Raises BadInput if the step has another recipe's dataset.
        """
        commit = self._committed(self._commits())
        if commit is None:
            ready = _read(self._ready)
            if ready is not None and self._exists(ready.dataset):
                commit = self._commit(ready)
        return self._checked_dataset(commit) if commit is not None else None

    def count(self) -> tuple[int, Uses] | None:
        """Return the number of commits, and the uses in their datasets.

        Returns None if another builder has committed this step.
        """
        commits = list(self._commits())
        if self._committed(commits) is not None:
            return None
        return len(commits), self._uses(commits)

    def prepare(self, dataset: str, seen: int) -> None:
        """Record the dataset to be committed, when it is complete but not yet published."""
        commit = Commit(step=self.step, recipe=self.recipe, dataset=dataset, seen=seen)
        durable.replace_file(self._ready, _line(commit))

    def commit(self, dataset: str, seen: int) -> str | None:
        """Commit a published dataset. Return the step's, or None if uses must be counted again.

        Raises BadInput if the step got another recipe's dataset meanwhile.
        """
        own = Commit(step=self.step, recipe=self.recipe, dataset=dataset, seen=seen)
        commit = self._commit(own)
        return self._checked_dataset(commit) if commit is not None else None

    def read(self) -> tuple[str | None, Uses]:
        """Return the dataset of the step, or None, and the uses in datasets of all other steps."""
        commits = list(self._commits())
        own = self._committed(commits)
        dataset = None if own is None else own.dataset
        return dataset, self._uses([c for c in commits if c.step != self.step])

    def _uses(self, commits: Iterable[Commit]) -> Uses:
        uses = Uses()
        for commit in commits if self.bounded else ():
            for run_id in accepted_runs(self.home, commit.dataset):
                uses.add(run_id)
        return uses

    def _commit(self, commit: Commit) -> Commit | None:
        number = commit.seen
        while not durable.create_file(self._commit_path(number), _line(commit)):
            other = _read(self._commit_path(number))
            if other is None:  # a file system with a lag; the file will appear
                time.sleep(LAG)
                continue
            if other.step == self.step:
                commit = other  # an earlier commit of this step, ours or another builder's
                break
            if self.bounded:
                return None
            number += 1
        self._ready.unlink(missing_ok=True)
        return commit

    def _committed(self, commits: Iterable[Commit]) -> Commit | None:
        return next((commit for commit in commits if commit.step == self.step), None)

    def _checked_dataset(self, commit: Commit) -> str:
        """Return the dataset of a commit. Raises BadInput for another recipe's; Corrupt."""
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
        while (commit := _read(self._commit_path(number))) is not None:
            yield commit
            number += 1

    def _exists(self, dataset: str) -> bool:
        return (self.home.dataset(dataset) / MANIFEST).is_file()

    def _commit_path(self, number: int) -> Path:
        return self._folder / "commits" / f"{number}.json"

    @property
    def _folder(self) -> Path:
        return self.home.loop_datasets(self.loop)

    @property
    def _ready(self) -> Path:
        return self._folder / f"{self.step}.{self.recipe[:16]}.ready"


def _read(path: Path) -> Commit | None:
    return checksums.find_record(Commit, path, COMMIT_FORMAT)


def _line(commit: Commit) -> bytes:
    return checksums.with_crc(orjson.dumps(commit.model_dump()))


def _key(run_id: str) -> bytes:
    return blake2b(run_id.encode(), digest_size=16).digest()
