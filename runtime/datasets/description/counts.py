"""Build counts: count runs, samples and tokens of a build, for its manifest, card and figures.

Filled by draft.py. Read next: card.py, which writes the card; histogram.py, the page of figures.
"""

from collections import Counter
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.content_name import manifest_recipe
from cray_agents.runtime.datasets.description.histogram import Histograms
from cray_agents.runtime.datasets.exclusion.decontamination import Match, head
from cray_agents.runtime.datasets.exclusion.near_duplicates import Repeat
from cray_agents.runtime.datasets.samples.token_shards import SampleRow
from cray_agents.runtime.datasets.selection.considered_runs import ConsideredRun
from cray_agents.runtime.datasets.selection.selection import CandidateRun

EXAMPLES = 5  # of duplicates and of contamination on the card


class Removed(NamedTuple):
    """An example of a removed run or demonstration. Similarity 1.0 means equal.

    `run_id` is "" for a demonstration. `source` is the run of the earlier sample, or the name of
    the held text. `text` and `matched` may be only heads of texts; `matched` may be "".
    """

    run_id: str
    text: str
    source: str
    matched: str
    similarity: float


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
    splits: dict[str, Counter[str]] = field(default_factory=dict)
    duplicates: list[Removed] = field(default_factory=list)
    contaminated: list[Removed] = field(default_factory=list)
    histograms: Histograms = field(default_factory=Histograms)

    def add_run(self, candidate: CandidateRun, line: ConsideredRun) -> None:
        """Count a considered run."""
        facts = candidate.facts
        self.considered += 1
        self.accepted += line.accepted
        self.split_runs += line.accepted and line.samples > 1
        if line.reason is not None:
            self.rejected[line.reason] += 1
            if line.reason == "reward_error":
                self.failed_reward = self.failed_reward or facts.run_id
        self.histograms.add_run(
            reward=candidate.reward,
            turns=facts.turns,
            calls=facts.calls,
            task=facts.task or "",
            accepted=line.accepted,
        )
        self._add_examples(facts.run_id, facts.input, candidate.match, candidate.repeats)

    def add_demonstration(
        self,
        line: ConsideredRun,
        text: str,
        match: Match | None = None,
        repeats: Repeat | None = None,
    ) -> None:
        """Count a considered demonstration."""
        self.demonstrations += line.accepted
        if line.reason is not None:
            self.rejected_demonstrations[line.reason] += 1
        self._add_examples("", head(text), match, repeats)

    def add_row(self, split: str, row: SampleRow) -> None:
        """Count a sample of the dataset."""
        sample, trained = row.sample, row.sample.trained
        counts = self.splits.setdefault(split, Counter())
        counts.update(samples=1, tokens=len(sample.input_ids), trained_tokens=trained)
        self.losses.update(sample.losses)
        self.histograms.add_sample(
            tokens=len(sample.input_ids),
            trained=trained,
            advantage=row.advantage if self.recipe.method == "grpo" else None,
            versions=sample.by_version(),
        )

    def total(self, name: str) -> int:
        """Return the sum of `samples`, `tokens` or `trained_tokens` over all splits."""
        return sum(counts[name] for counts in self.splits.values())

    @property
    def versions(self) -> dict[str, int]:
        """Trained tokens by the version `name@N` that sampled them, in the order of names."""
        return dict(sorted(self.histograms.versions.items()))

    def manifest_fields(self) -> dict[str, Any]:
        """Return the counts as fields of the manifest."""
        names = ("samples", "tokens", "trained_tokens")
        return {
            "method": self.recipe.method,
            **{name: self.total(name) for name in names},
            "splits": {
                split: {name: counts[name] for name in names}
                for split, counts in sorted(self.splits.items())
            },
            "versions": self.versions,
            "accepted_runs": self.accepted,
            "considered_runs": self.considered,
            "split_runs": self.split_runs,
            "losses": dict(sorted(self.losses.items())),
            "rejected": dict(sorted(self.rejected.items())),
            "demonstrations": self.demonstrations,
            "rejected_demonstrations": dict(sorted(self.rejected_demonstrations.items())),
            "recipe": manifest_recipe(self.recipe),
        }

    def _add_examples(
        self, run_id: str, text: str, match: Match | None, repeats: Repeat | None
    ) -> None:
        if match is not None and len(self.contaminated) < EXAMPLES:
            removed = Removed(run_id, text, match.source, match.text, match.similarity)
            self.contaminated.append(removed)
        if repeats is not None and len(self.duplicates) < EXAMPLES:
            self.duplicates.append(Removed(run_id, text, repeats.run, "", repeats.similarity))
