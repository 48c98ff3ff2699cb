"""Counts of an export: its records, runs and losses so far, and the summary at its end.

Updated by jsonl_files.py and parquet_files.py, saved by resume_journal.py, printed by the command
line.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.runtime.exports.export_format import LOSSES, UNSUPPORTED, Written
from cray_agents.runtime.exports.sources.export_source import Item


def describe_loss(code: str) -> str:
    """Return the sentence of a loss's code."""
    return LOSSES.get(code) or code.replace("_", " ")


@dataclass(frozen=True)
class ExportLoss:
    """A loss in words, and the number of runs, pairs or tasks that had it."""

    count: int
    sentence: str


@dataclass(frozen=True)
class ExportProgress:
    """Progress of an export. `total` is the number of all items, None if unknown."""

    records: int
    runs: int
    bytes: int
    total: int | None = None


@dataclass(frozen=True)
class Summary:
    """Result of an export: `records` lines or rows of `runs` runs (or pairs, or samples)."""

    records: int
    runs: int
    files: int
    bytes: int
    losses: dict[str, ExportLoss]
    resumed: bool = False


OnProgress = Callable[[ExportProgress], None]


@dataclass(frozen=True)
class LossRules:
    """Rules for losses. `strict` makes each an error, except those in `allow`.

    `skip_unsupported` turns a run that the format cannot carry into a loss.
    """

    strict: bool = False
    allow: frozenset[str] = frozenset()
    skip_unsupported: bool = False


@dataclass
class ExportCounts:
    """Running counts of an export."""

    records: int = 0
    runs: int = 0
    losses: Counter[str] = field(default_factory=Counter)

    def write_item(self, item: Item, write: Callable[..., Written], rules: LossRules) -> Written:
        """Write an item with a format and count it. Raises BadInput as the rules demand."""
        written = Written([])
        if item.runs:
            try:
                written = write(*item.runs)
            except BadInput as error:
                if error.code != "unsupported_export" or not rules.skip_unsupported:
                    raise
                written = Written([], (UNSUPPORTED,))
        subject = " and ".join(run.id for run in item.runs)
        for code, count in (*item.lost, *((code, 1) for code in written.losses)):
            self.add(code, count, rules, subject)
        self.records += len(written.records)
        self.runs += item.covers
        return written

    def add(self, code: str, count: int, rules: LossRules, subject: str = "") -> None:
        """Count a loss of `count` runs. Raises BadInput if the rules forbid it."""
        if rules.strict and code not in rules.allow:
            raise BadInput(
                f"{subject or 'what is exported'}: {describe_loss(code)} (the loss {code!r}, which "
                "strict does not allow)",
                param="strict",
                code="export_loss",
            )
        self.losses[code] += count

    def as_json(self) -> dict[str, Any]:
        """Return the counts as JSON values."""
        return {"records": self.records, "runs": self.runs, "losses": dict(self.losses)}


def describe_losses(counts: Mapping[str, int]) -> dict[str, ExportLoss]:
    """Return the losses with their sentences, most frequent first, then by code."""
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {code: ExportLoss(count, describe_loss(code)) for code, count in order if count}
