"""How far an export is, and what came of it: counts, and the losses it states.

Kept by the drivers (lines.py, tables.py), journalled by journal.py, shown by the command line.
"""

from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from types import MappingProxyType
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.runtime.exports.line_formats import LOSSES, Written
from cray_agents.runtime.exports.sources import Item

MISSING, UNSUPPORTED = "missing_runs", "unsupported_runs"
OURS: Mapping[str, str] = MappingProxyType(
    {
        MISSING: "runs that are no longer in the store are left out",
        UNSUPPORTED: "runs that the format cannot carry are left out",
        "no_tokens": "runs without exact tokens, or whose logprobs do not go with them, are left "
        "out",
        "no_advantages": "advantages are computed for a dataset; they are null here",
        "no_task": "runs without a task are left out: their prompt has nothing to be judged by",
        "no_target": "tasks without a target have no ground truth: it is null",
        "json_target": "targets that are no text stand as JSON",
        "other_attempts": "further runs on a task are left out: a row is a task",
        "answers": "what the model answered is left out: a row is a task, to be answered anew",
        "tools": "definitions of tools are left out",
        "no_conversation": "the conversation is left out: tokens, masks and numbers are carried",
        "unpaired": "which of two runs on a task was the better is left out",
        "unlabelled": "whether a run is desirable is left out",
        "content_parts": "contents in several parts stand as JSON",
        "call_details": "how and when each model call was made, and how long each tool took, is "
        "left out",
        "exact_tokens": "exact tokens and logprobs are left out",
    }
)


def sentence(code: str) -> str:
    """What a loss is, in words."""
    return LOSSES.get(code) or OURS.get(code) or code.replace("_", " ")


@dataclass(frozen=True)
class ExportLoss:
    """How many runs (pairs, tasks) lost something, and what."""

    count: int
    sentence: str


@dataclass(frozen=True)
class ExportProgress:
    """How far an export is. `total`: items in all, if that is known."""

    records: int
    runs: int
    bytes: int
    total: int | None = None


@dataclass(frozen=True)
class Summary:
    """What an export wrote: `records` lines or rows of `runs` runs (or pairs, or samples)."""

    records: int
    runs: int
    files: int
    bytes: int
    losses: dict[str, ExportLoss]
    resumed: bool = False


OnProgress = Callable[[ExportProgress], None]


@dataclass(frozen=True)
class LossRules:
    """What is done with losses: an error (`strict`, but for those allowed), or counted."""

    strict: bool = False
    allow: frozenset[str] = frozenset()
    skip_unsupported: bool = False


@dataclass
class ExportCounts:
    """Counts so far."""

    records: int = 0
    runs: int = 0
    losses: Counter[str] = field(default_factory=Counter)

    def of(self, item: Item, write: Callable[..., Written], rules: LossRules) -> Written:
        """What a format writes of an item, counted. Raises BadInput as the rules want it."""
        written = Written([])
        if item.runs:
            try:
                written = write(*item.runs)
            except BadInput as error:
                if error.code != "unsupported_export" or not rules.skip_unsupported:
                    raise
                written = Written([], (UNSUPPORTED,))
        whose = " and ".join(run.id for run in item.runs)
        for code, count in (*item.lost, *((code, 1) for code in written.losses)):
            self.add(code, count, rules, whose)
        self.records += len(written.records)
        self.runs += item.covers
        return written

    def add(self, code: str, count: int, rules: LossRules, whose: str = "") -> None:
        """Count a loss of so many runs. Raises BadInput where the rules do not allow it."""
        if rules.strict and code not in rules.allow:
            raise BadInput(
                f"{whose or 'what is exported'}: {sentence(code)} (the loss {code!r}, which strict "
                "does not allow)",
                param="strict",
                code="export_loss",
            )
        self.losses[code] += count

    def plain(self) -> dict[str, Any]:
        """As JSON."""
        return {"records": self.records, "runs": self.runs, "losses": dict(self.losses)}


def losses_of(counts: Mapping[str, int]) -> dict[str, ExportLoss]:
    """Losses with what they mean, the most frequent first, then by name."""
    order = sorted(counts.items(), key=lambda item: (-item[1], item[0]))
    return {code: ExportLoss(count, sentence(code)) for code, count in order if count}
