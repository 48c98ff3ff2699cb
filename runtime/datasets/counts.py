"""What is counted while a dataset is made, and the papers that tell of it.

Filled by making.py; the card is card.py's, the page histogram.py's.
"""

from collections import Counter
from dataclasses import dataclass, field
from itertools import groupby
from pathlib import Path
from typing import Any

from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.card import CardFacts, Removed, write_card
from cray_agents.runtime.datasets.considered_runs import ConsideredRun
from cray_agents.runtime.datasets.content_name import brief
from cray_agents.runtime.datasets.decontamination import Match, head
from cray_agents.runtime.datasets.histogram import Histograms
from cray_agents.runtime.datasets.near_duplicates import Repeat
from cray_agents.runtime.datasets.selection import CandidateRun
from cray_agents.runtime.datasets.token_shards import SampleRow

EXAMPLES = 5  # of each kind of removal that the card shows
PAGE = "histogram.html"


@dataclass
class BuildCounts:
    """Counts of one build. `rejected` is of runs; demonstrations are counted apart."""

    recipe: DatasetRecipe
    considered: int = 0
    accepted: int = 0
    rejected: Counter[str] = field(default_factory=Counter)
    demonstrations: int = 0
    rejected_demonstrations: Counter[str] = field(default_factory=Counter)
    splits: dict[str, Counter[str]] = field(default_factory=dict)
    versions: Counter[str] = field(default_factory=Counter)
    duplicates: list[Removed] = field(default_factory=list)
    contaminated: list[Removed] = field(default_factory=list)
    histograms: Histograms = field(default_factory=Histograms)

    def run(self, candidate: CandidateRun, line: ConsideredRun) -> None:
        """Count a run that was considered."""
        facts = candidate.facts
        self.considered += 1
        self.accepted += line.accepted
        if line.reason is not None:
            self.rejected[line.reason] += 1
        self.histograms.run(
            reward=candidate.reward,
            turns=facts.turns,
            calls=facts.calls,
            task=facts.task or "",
            accepted=line.accepted,
        )
        self._removed(facts.run_id, facts.input, candidate.match, candidate.repeats)

    def demonstration(
        self,
        line: ConsideredRun,
        text: str,
        match: Match | None = None,
        repeats: Repeat | None = None,
    ) -> None:
        """Count a demonstration."""
        self.demonstrations += line.accepted
        if line.reason is not None:
            self.rejected_demonstrations[line.reason] += 1
        self._removed("", head(text), match, repeats)

    def row(self, split: str, row: SampleRow) -> None:
        """Count a sample that is in."""
        sample, trained = row.sample, row.sample.trained
        counts = self.splits.setdefault(split, Counter())
        counts.update(samples=1, tokens=len(sample.input_ids), trained_tokens=trained)
        by_version = sample.by_version()
        self.versions.update(by_version)
        self.histograms.sample(
            tokens=len(sample.input_ids),
            trained=trained,
            advantage=row.advantage if self.recipe.method == "grpo" else None,
            versions=by_version,
        )

    def total(self, what: str) -> int:
        """samples, tokens or trained_tokens of all splits."""
        return sum(counts[what] for counts in self.splits.values())

    def plain(self) -> dict[str, Any]:
        """The counts, as the manifest has them."""
        names = ("samples", "tokens", "trained_tokens")
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
            "rejected": dict(sorted(self.rejected.items())),
            "demonstrations": self.demonstrations,
            "rejected_demonstrations": dict(sorted(self.rejected_demonstrations.items())),
            "recipe": brief(self.recipe),
        }

    def write_papers(self, directory: Path, name: str, files: dict[str, dict[str, Any]]) -> None:
        """Write card and page into a draft that holds the files. They tell no time and no place."""
        shards = sorted(file for file in files if "-" in file)
        self.histograms.write(directory / PAGE, title=name)
        about = CardFacts(
            id=name,
            recipe=self.recipe,
            shards={k: list(v) for k, v in groupby(shards, lambda s: s.partition("-")[0])},
            rows={split: counts["samples"] for split, counts in self.splits.items()},
            tokens=self.total("tokens"),
            trained_tokens=self.total("trained_tokens"),
            considered_runs=self.considered,
            accepted_runs=self.accepted,
            demonstrations=self.demonstrations,
            rejected=self.rejected + self.rejected_demonstrations,
            files=files,
            versions=dict(sorted(self.versions.items())),
            rewards=self.histograms.rewards(),
            duplicates=self.duplicates,
            contaminated=self.contaminated,
        )
        write_card(directory, about)

    def _removed(self, run_id: str, text: str, match: Match | None, repeats: Repeat | None) -> None:
        if match is not None and len(self.contaminated) < EXAMPLES:
            removed = Removed(run_id, text, match.source, match.text, match.similarity)
            self.contaminated.append(removed)
        if repeats is not None and len(self.duplicates) < EXAMPLES:
            self.duplicates.append(Removed(run_id, text, repeats.run, "", repeats.similarity))
