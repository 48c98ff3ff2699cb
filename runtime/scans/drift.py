"""Drift: which habits of a model differ between two of its versions, by a sequential test.

The runs of both versions are paired in the order in which they began. For each habit x is 1 if the
later version's run has more of it, -1 if the earlier one's has, 0 if both have the same. Without a
difference the mean of x is 0. Two betting tests (`Stream` in cray_agents/promotion/e_process.py)
collect evidence for a mean above and below it. With h habits a habit has drifted when one of its
two reaches 2 h / alpha. The probability that any habit is reported though none differs is at most
alpha, however often one looks while runs come in. The test takes the runs of both versions for
draws of the same tasks: give a filter where they are not. Called by cli/version_scans.py.
"""

import re
from collections import Counter
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Any

from cray_agents.promotion.e_process import Stream
from cray_agents.records import Run, StopReason
from cray_agents.runtime.scans import sampled_texts

GRAM = 4  # tokens in a row that are counted as repetition
_REFUSALS = re.compile(
    r"\b(?:i(?:'|\u2019)?m sorry\b|i (?:can(?:no|'|\u2019)t|cannot|am (?:not able|unable))\b"
    r"|i(?:'|\u2019)?m (?:not able|unable)\b|as an ai\b|i must decline\b|i won(?:'|\u2019)t\b)",
    re.IGNORECASE,
)


def _tokens(run: Run) -> float:
    return sum(len(call.token_ids) for call in run.calls)


def _turns(run: Run) -> float:
    return len(run.trajectory.turns)


def _tool_calls(run: Run) -> float:
    return sum(len(call.message.get("tool_calls") or ()) for call in run.calls)


def _tool_errors(run: Run) -> float:
    return sum(1 for turn in run.trajectory.turns for call in turn.tool_calls if call.error)


def _unfinished(run: Run) -> float:
    return float(run.stop_reason != StopReason.completed)


def _refusals(run: Run) -> float:
    return float(any(_REFUSALS.search(text[:400]) for text in sampled_texts(run)))


def _repetition(run: Run) -> float:
    """Return the share of sampled 4-grams that an earlier 4-gram of the call equals."""
    again = total = 0
    for call in run.calls:
        ids = call.token_ids
        grams = Counter(tuple(ids[n : n + GRAM]) for n in range(len(ids) - GRAM + 1))
        total += grams.total()
        again += grams.total() - len(grams)
    return again / total if total else 0.0


def _surprise(run: Run) -> float:
    """Return the mean of -logprob over the sampled tokens, in nats."""
    values = [value for call in run.calls for value in call.logprobs]
    return -sum(values) / len(values) if values else 0.0


HABITS: dict[str, tuple[Callable[[Run], float], str]] = {
    "tokens": (_tokens, "sampled tokens in a run"),
    "turns": (_turns, "turns in a run"),
    "tool_calls": (_tool_calls, "tool calls in a run"),
    "tool_errors": (_tool_errors, "failed tool calls in a run"),
    "unfinished": (_unfinished, "share of runs that did not complete"),
    "refusals": (_refusals, "share of runs with a phrase of refusal"),
    "repetition": (_repetition, "share of repeated 4-grams of tokens"),
    "surprise": (_surprise, "nats per sampled token"),
}


@dataclass
class HabitComparison:
    """One habit in the runs of two versions, and the evidence that it differs."""

    name: str
    pairs: int = 0
    totals: list[float] = field(default_factory=lambda: [0.0, 0.0])
    more: Stream = field(default_factory=Stream)
    less: Stream = field(default_factory=Stream)

    def add(self, earlier: float, later: float) -> None:
        """Take the habit's numbers of a pair of runs."""
        self.pairs += 1
        self.totals[0] += earlier
        self.totals[1] += later
        sign = (later > earlier) - (later < earlier)
        self.more.add(sign)
        self.less.add(-sign)

    def to_dict(self, limit: float) -> dict[str, Any]:
        """Return means, evidence, and `drifted`: "more", "less" or None. `limit`: see above."""
        means = [total / self.pairs if self.pairs else None for total in self.totals]
        ways = (("more", self.more.evidence), ("less", self.less.evidence))
        way, evidence = max(ways, key=lambda pair: pair[1])
        return {
            "habit": self.name,
            "about": HABITS[self.name][1],
            "pairs": self.pairs,
            "earlier": means[0],
            "later": means[1],
            "evidence": evidence,
            "limit": limit,
            "drifted": way if evidence >= limit else None,
        }


def compare_habits(pairs: Iterable[tuple[Run, Run]], alpha: float) -> list[dict[str, Any]]:
    """Compare the habits of two versions over pairs of runs (the earlier version's first).

    `alpha` is the greatest probability of reporting a drift where there is none. Two infinitely
    different versions need some 20 pairs.
    """
    habits = [HabitComparison(name) for name in HABITS]
    for earlier, later in pairs:
        for habit in habits:
            measure = HABITS[habit.name][0]
            habit.add(measure(earlier), measure(later))
    return [habit.to_dict(2 * len(HABITS) / alpha) for habit in habits]
