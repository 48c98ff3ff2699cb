"""Considered runs: their lines in runs.parquet with decision and reason, and the counts of a build.

    run         the id; `demonstration/<n>`, from 0, for demonstrations of the recipe (in the shards
                of dpo, `demonstration/<n>/rejected` is the rejected answer); of a document its
                place, such as `corpus.jsonl:17`
    task, iteration, attempt, reward      null if missing
    accepted    true if the run is in the dataset; `samples` counts its rows in the shards
    reason      the reason for leaving the run out, a key of REASONS
    detail      details of the reason: the repeated run, the held-out task, similarity, length; of
                an accepted run, how many of its turns are left out as they were cut off, and what
                its conversation has and its tokens lack

Written by build.py, a few thousand lines at a time. The counts go to the manifest and build.py.
"""

from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.reader import BATCH, RUNS
from cray_agents.runtime.datasets.recipe import manifest_recipe
from cray_agents.runtime.datasets.token_shards import SampleRow
from cray_agents.runtime.disk import durable

REASONS = {
    "alone": "the only scored run of its group",
    "ambiguous_choices": "it has several answers to one request, and none is known as its turn",
    "broken_prefix": "the chat template breaks it into several samples, and DPO needs one",
    "contaminated": "its input is one that is held out, or nearly",
    "corrupt": "its record is damaged",
    "duplicate": "its tokens are those of an earlier sample",
    "empty": "nothing was sampled, or the document is blank",
    "finding": "a scanner found something in it",
    "held_out": "its task is kept to judge by",
    "imported": "it was not recorded here, has no tokens, and was not to be rendered",
    "infrastructure_error": "the platform failed it, not the model",
    "low_reward": "its reward is below `min_reward`",
    "missing_call": "a model call of it was not recorded",
    "near_duplicate": "its tokens are nearly those of an earlier sample",
    "no_logprobs": "its log-probabilities were not recorded",
    "no_pair": "no run of its task was enough better or worse",
    "no_reward": "nobody judged it",
    "no_such_turn": "a reward is for a turn that it has not",
    "no_tokens": "its tokens were not recorded",
    "not_best": "others of its task were better (`best_of`)",
    "not_renderable": "the chat template cannot render it",
    "over_max_per_task": "its task had enough runs already",
    "redacted": "something was removed from it before it was stored",
    "reward_error": "one of its rewards failed",
    "too_long": "it has more than `max_tokens`",
    "used_up": "earlier training sets of the loop used it often enough",
    "zero_variance": "all runs of its group have the same reward",
}


class ConsideredRun(NamedTuple):
    """A line of runs.parquet."""

    run: str
    task: str | None = None
    iteration: int | None = None
    attempt: int | None = None
    reward: float | None = None
    accepted: bool = False
    reason: str | None = None
    detail: str | None = None
    samples: int = 0


class LineWriter:
    """A writer of runs.parquet in a draft directory."""

    def __init__(self, directory: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = directory / RUNS
        text, integer, boolean = pyarrow.string(), pyarrow.int64(), pyarrow.bool_()
        types = (text, text, integer, integer, pyarrow.float64(), boolean, text, text, integer)
        self._schema = pyarrow.schema(list(zip(ConsideredRun._fields, types, strict=True)))
        self._writer: Any = pyarrow.parquet.ParquetWriter(
            self._path, self._schema, compression="zstd", use_dictionary=["task", "reason"]
        )
        self._lines: list[ConsideredRun] = []
        self.count = 0

    def add(self, line: ConsideredRun) -> None:
        """Add a line. Lines are written in batches."""
        self._lines.append(line)
        self.count += 1
        if len(self._lines) == BATCH:
            self._flush()

    def finish(self) -> dict[str, int]:
        """Write the remaining lines. Return the number of rows by file name."""
        self._flush()
        self._writer.close()
        durable.sync(self._path)
        return {RUNS: self.count}

    def _flush(self) -> None:
        import pyarrow

        columns = list(zip(*self._lines, strict=True)) or [()] * len(ConsideredRun._fields)
        arrays = [
            pyarrow.array(column, field.type)
            for column, field in zip(columns, self._schema, strict=True)
        ]
        self._writer.write_table(pyarrow.Table.from_arrays(arrays, schema=self._schema))
        self._lines = []


@dataclass
class BuildCounts:
    """Counts of one build. `rejected` counts runs; `rejected_demonstrations` demonstrations.

    `split_runs`: accepted runs of which a later prompt does not repeat what was read and sampled
    before, so that they are several sequences. `losses`: what the conversations of samples have and
    their tokens lack, with the number of samples.
    """

    recipe: DatasetRecipe
    considered: int = 0
    accepted: int = 0
    split_runs: int = 0
    failed_reward: str | None = None  # the first run that a reward failed on
    rejected: Counter[str] = field(default_factory=Counter)
    losses: Counter[str] = field(default_factory=Counter)
    demonstrations: int = 0
    rejected_demonstrations: Counter[str] = field(default_factory=Counter)
    documents: int = 0
    rejected_documents: Counter[str] = field(default_factory=Counter)
    splits: dict[str, Counter[str]] = field(default_factory=dict)
    versions: Counter[str] = field(default_factory=Counter)  # trained tokens by `name@N`

    def add_run(self, line: ConsideredRun) -> None:
        """Count a considered run."""
        self.considered += 1
        self.accepted += line.accepted
        self.split_runs += line.accepted and line.samples > 1
        if line.reason is not None:
            self.rejected[line.reason] += 1
            if line.reason == "reward_error":
                self.failed_reward = self.failed_reward or line.run

    def add_demonstration(self, line: ConsideredRun) -> None:
        """Count a considered demonstration."""
        self.demonstrations += line.accepted
        if line.reason is not None:
            self.rejected_demonstrations[line.reason] += 1

    def add_document(self, line: ConsideredRun) -> None:
        """Count a considered document."""
        self.documents += line.accepted
        if line.reason is not None:
            self.rejected_documents[line.reason] += 1

    def add_row(self, split: str, row: SampleRow) -> None:
        """Count a sample of the dataset."""
        sample, trained = row.sample, row.sample.trained
        counts = self.splits.setdefault(split, Counter())
        counts.update(samples=1, tokens=len(sample.input_ids), trained_tokens=trained)
        self.losses.update(sample.losses)
        self.versions.update(sample.by_version())

    def total(self, name: str) -> int:
        """Return the sum of `samples`, `tokens` or `trained_tokens` over all splits."""
        return sum(counts[name] for counts in self.splits.values())

    def manifest_fields(self) -> dict[str, Any]:
        """Return the counts as fields of the manifest."""
        names = ("samples", "tokens", "trained_tokens")
        documents = {"documents": self.documents, "rejected_documents": self.rejected_documents}
        return {
            "method": self.recipe.method,
            **{name: self.total(name) for name in names},
            "splits": {
                split: {name: counts[name] for name in names}
                for split, counts in sorted(self.splits.items())
            },
            "versions": dict(sorted(self.versions.items())),
            "accepted_runs": self.accepted,
            "considered_runs": self.considered,
            "split_runs": self.split_runs,
            "losses": dict(sorted(self.losses.items())),
            "rejected": dict(sorted(self.rejected.items())),
            "demonstrations": self.demonstrations,
            "rejected_demonstrations": dict(sorted(self.rejected_demonstrations.items())),
            **(documents if self.recipe.documents else {}),
            "recipe": manifest_recipe(self.recipe),
        }
