"""Promotion test: a paired sequential test that decides if a candidate beats the incumbent.

Both versions answer the same held-out tasks; d = candidate's reward - incumbent's, in [-1, 1].
Evidence against the hypothesis E[d] <= margin is a wealth that starts at 1. Before each d is seen,
a share of it (the stake) is bet on d > margin, at fair odds:

    wealth *= 1 + stake * (d - margin)

If the hypothesis is true, the probability that the wealth ever reaches 1 / alpha is at most alpha
(Ville 1939), for any number of looks. So:

- Promote as soon as the wealth reaches 1 / alpha. A candidate that is not better by more than
  `margin` is promoted with probability at most alpha, per decision.
- Reject as soon as a guard fails. A guard is a second wealth, on E[d] < -tolerance within the tasks
  of one tag (or on the hidden probes). It fails at guards / guard_alpha (Bonferroni).
- Reject as futile as soon as a wealth on E[d] < min_effect reaches 1 / beta.
- Reject when the tasks are exhausted. This is the tie rule: a candidate not shown to be better is
  not promoted. Tasks with equal rewards do not change the wealth when the margin is 0.

Even with wealth enough to promote, the test waits for more tasks of a tag that has had fewer than
16, or whose mean is below -tolerance while its guard has not failed. If the mean of a tag is
finally below -tolerance by more than its standard error, the candidate is rejected too. The test
treats the tasks as random draws from those that the agent will meet.

A run of the candidate that could not be scored counts with the least reward, as breaking a reward
function must not pay. A pair is left out if the incumbent's run could not be scored, or if the
infrastructure failed a run. If it failed more than MISSING of the planned pairs, the candidate is
rejected without a judgement.

Called by loop/evaluator.py for loop/loop.py. Read next: e_process.py, the choice of the stakes.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from cray_agents.errors import BadInput
from cray_agents.promotion.e_process import Deadline
from cray_agents.promotion.figures import Pair, tally
from cray_agents.records import Record, StrictRecord, Task, digest

Verdict = Literal["promote", "reject", "continue"]

FEW = 20  # with fewer held-out tasks, none is set aside as a probe
SEEN = 16  # tasks of a guarded tag that the test waits for
MISSING = 0.1  # share of the planned pairs that the infrastructure may fail
HIDDEN = "hidden probes"  # the guard's name


class PromotionTest(StrictRecord):
    """Settings of the promotion test. Differences are fractions of the rewards' range.

    Args:
        alpha: greatest probability of promoting a candidate that is not better.
        margin: difference from the incumbent above which a candidate counts as better.
        batch: tasks to evaluate between two looks.
        min_effect, beta: beta is the greatest probability of giving up early a candidate that is
            better by min_effect.
        guard: a metadata key; each of its values is a tag whose tasks must not get worse.
        tolerance, guard_alpha: guard_alpha is the greatest probability that all guards together
            reject a candidate that is on no tag worse by more than the tolerance.
        choosing: share of the held-out tasks that choose the best of the versions that a job
            published, and never decide: see `Training.publish_every`.
        hidden: share of the held-out tasks that never decide, and are only a guard.
        rotation: number of groups of these tasks; each decision uses the next group.
        low, high: the least and the greatest reward of a run.
    """

    alpha: float = Field(default=0.05, gt=0, le=1)
    margin: float = Field(default=0.0, gt=-1, lt=1)
    batch: int = Field(default=32, ge=1)
    min_effect: float = Field(default=0.02, gt=-1, lt=1)
    beta: float = Field(default=0.05, gt=0, le=1)
    guard: str | None = None
    tolerance: float = Field(default=0.1, ge=0, lt=1)
    guard_alpha: float = Field(default=0.05, gt=0, le=1)
    choosing: float = Field(default=0.0, ge=0, lt=1)
    hidden: float = Field(default=0.1, ge=0, lt=1)
    rotation: int = Field(default=2, ge=1)
    low: float = 0.0
    high: float = 1.0

    @model_validator(mode="after")
    def _check_range(self) -> "PromotionTest":
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g})")
        return self


class Gaps(Record):
    """Counts of incomplete pairs.

    `unscored`: the candidate's run could not be scored, and counts with the least reward.
    `unpaired`: the incumbent's run could not be scored, and the pair is left out. `failed`: the
    infrastructure failed a run, and the pair is left out.
    """

    unscored: int = 0
    unpaired: int = 0
    failed: int = 0

    def __add__(self, other: "Gaps") -> "Gaps":
        return Gaps(
            unscored=self.unscored + other.unscored,
            unpaired=self.unpaired + other.unpaired,
            failed=self.failed + other.failed,
        )

    @property
    def description(self) -> str:
        """The counts in words; "" if all are 0."""
        counts = {
            "could not be scored and count as the worst": self.unscored,
            "are left out, for the incumbent has no reward": self.unpaired,
            "are left out, for the infrastructure failed them": self.failed,
        }
        return "; ".join(f"{count} {fate}" for fate, count in counts.items() if count)


WHOLE = Gaps()


class Guard(Record):
    """The state of a guard, which has failed if its evidence has reached the limit.

    `error` is the standard error of the difference.
    """

    tag: str
    tasks: int
    difference: float
    error: float
    evidence: float
    limit: float
    failed: bool


class Decision(Record):
    """A decision on a candidate, with its numbers.

    `difference` is the mean of d, and `error` its standard error.
    """

    verdict: Verdict
    reason: str
    evidence: float
    limit: float
    tasks: int
    planned: int
    wins: int
    losses: int
    ties: int
    incumbent: float
    candidate: float
    difference: float
    error: float = 0.0
    guards: list[Guard] = Field(default_factory=list)
    gaps: Gaps = WHOLE


def decide(
    pairs: Sequence[Pair],
    test: PromotionTest,
    *,
    planned: Mapping[str | None, int],
    exhausted: bool,
    hidden: Sequence[Pair] = (),
    gaps: Gaps = WHOLE,
) -> Decision:
    """Decide on a candidate by pairs, in the order of their evaluation.

    `planned` is the greatest number of pairs of each tag (see `plan`), the same at each look.
    `exhausted`: no more pairs will come. `hidden` are the pairs of this decision's probes: once
    `pairs` alone promote, call this again with them. `gaps` counts over both kinds of pairs. Raises
    BadInput for a reward outside `low` to `high`.
    """
    differences = [_difference(pair, test) for pair in pairs]
    total = sum(planned.values())
    goal = 1 / test.alpha
    wealth = Deadline(goal, total, test.margin)
    futile = Deadline(1 / test.beta, total, -test.min_effect)
    for d in differences:
        wealth.add(d)
        futile.add(-d)
    guards = _guards(pairs, differences, test, planned, hidden)
    verdict, reason = _verdict(wealth, futile, guards, test, planned, exhausted)
    if gaps.failed > MISSING * total:
        verdict, reason = "reject", f"not judged: of {total} pairs too many are missing"
    return Decision(
        verdict=verdict,
        reason="; ".join(filter(None, [reason, gaps.description])),
        evidence=wealth.wealth,
        limit=goal,
        **tally(differences),
        planned=total,
        incumbent=_mean([pair.incumbent for pair in pairs]),
        candidate=_mean([pair.candidate for pair in pairs]),
        difference=_mean(differences),
        error=_error(differences),
        guards=guards,
        gaps=gaps,
    )


def _verdict(
    wealth: Deadline,
    futile: Deadline,
    guards: Sequence[Guard],
    test: PromotionTest,
    planned: Mapping[str | None, int],
    exhausted: bool,
) -> tuple[Verdict, str]:
    failed = [guard for guard in guards if guard.failed]
    if failed:
        return "reject", f"worse by more than {test.tolerance:g} on {_list_guards(failed)}"
    rounded = math.floor(10 * wealth.wealth * (1 + 1e-9)) / 10  # as `reached` reads it
    evidence = f"evidence {rounded:g}, {wealth.goal:.3g} needed"
    if wealth.reached:
        undecided = [] if exhausted else _undecided_tags(guards, test, planned)
        if undecided:
            return "continue", f"better, but more is to be seen of {', '.join(undecided)}"
        lower = [g for g in guards if g.tasks >= SEEN and g.difference + g.error < -test.tolerance]
        if lower:
            return "reject", f"better on the whole, worse on {_list_guards(lower)}"
        return "promote", f"better: {evidence}"
    if futile.reached:
        return "reject", f"futile: not better by {test.min_effect:g}; {evidence}"
    if exhausted:
        return "reject", f"not shown to be better: {evidence}"
    return "continue", evidence


def _list_guards(guards: Sequence[Guard]) -> str:
    return ", ".join(f"{guard.tag} ({guard.difference:+.3f})" for guard in guards)


def _undecided_tags(
    guards: Sequence[Guard], test: PromotionTest, planned: Mapping[str | None, int]
) -> list[str]:
    """Return the tags with more tasks to come that have few so far, or a mean below tolerance."""
    return [
        guard.tag
        for guard in guards
        if guard.tasks < planned.get(guard.tag, 0)
        and (guard.tasks < SEEN or guard.difference < -test.tolerance)
    ]


def _guards(
    pairs: Sequence[Pair],
    differences: Sequence[float],
    test: PromotionTest,
    planned: Mapping[str | None, int],
    hidden: Sequence[Pair],
) -> list[Guard]:
    tags = sorted(tag for tag in planned if tag is not None) if test.guard else []
    limit = (len(tags) + (test.hidden > 0)) / test.guard_alpha
    guards = []
    for tag in tags:
        of_tag = [d for pair, d in zip(pairs, differences, strict=True) if pair.tag == tag]
        guards.append(_guard(tag, of_tag, planned[tag], limit, test.tolerance))
    if hidden:
        of_probes = [_difference(pair, test) for pair in hidden]
        guards.append(_guard(HIDDEN, of_probes, len(hidden), limit, test.tolerance))
    return guards


def _guard(tag: str, of_tag: Sequence[float], planned: int, limit: float, slack: float) -> Guard:
    worse = Deadline(limit, planned, slack)
    for d in of_tag:
        worse.add(-d)
    return Guard(
        tag=tag,
        tasks=len(of_tag),
        difference=_mean(of_tag),
        error=_error(of_tag),
        evidence=worse.wealth,
        limit=limit,
        failed=worse.reached,
    )


def guard_tag(task: Task, test: PromotionTest) -> str | None:
    """Return the guarded tag of a task."""
    value = task.metadata.get(test.guard) if test.guard else None
    return None if value is None else str(value)


def plan(tasks: Sequence[Task], test: PromotionTest) -> dict[str | None, int]:
    """Count the pairs of each tag in an evaluation on these tasks: `planned` of `decide`."""
    return dict(Counter(guard_tag(task, test) for task in tasks))


def deciding_tasks(tasks: Sequence[Task], test: PromotionTest) -> list[Task]:
    """Return the held-out tasks that decide, without those set aside as probes or to choose."""
    free = [task for task in tasks if not _set_aside(task, tasks, test)]
    return [task for task in free if not _chooses(task, test)]


def choosing_tasks(tasks: Sequence[Task], test: PromotionTest) -> list[Task]:
    """Return the held-out tasks that choose among a job's versions; a hash of its id sets each."""
    free = [task for task in tasks if not _set_aside(task, tasks, test)]
    return [task for task in free if _chooses(task, test)]


def probe_tasks(tasks: Sequence[Task], earlier: int, test: PromotionTest) -> list[Task]:
    """Return the hidden probes of a decision, held-out tasks that are never reported.

    `earlier` counts the decisions before this one. A hash of the task's id sets it aside, and
    another hash chooses its group, so both are independent of the other tasks. There are no probes
    among fewer than FEW tasks.
    """
    part = earlier % test.rotation
    return [
        task
        for task in tasks
        if _set_aside(task, tasks, test) and _hash(f"part {task.id}") % test.rotation == part
    ]


def _set_aside(task: Task, tasks: Sequence[Task], test: PromotionTest) -> bool:
    return len(tasks) >= FEW and _hash(f"hidden {task.id}") < test.hidden * 2**32


def _chooses(task: Task, test: PromotionTest) -> bool:
    return _hash(f"choosing {task.id}") < test.choosing * 2**32


def _hash(text: str) -> int:
    return int(digest(text, 8), 16)


def _difference(pair: Pair, test: PromotionTest) -> float:
    for reward in (pair.incumbent, pair.candidate):
        if not test.low <= reward <= test.high:
            raise BadInput(
                f"the reward {reward:g} of task {pair.task} is outside {test.low:g} to "
                f"{test.high:g}: give the range of your rewards as PromotionTest(low=…, high=…)",
                param="promotion",
            )
    return (pair.candidate - pair.incumbent) / (test.high - test.low)


def _error(differences: Sequence[float]) -> float:
    """Return the standard error of the mean of `differences`, as if the mean were 0."""
    squares = sum(d * d for d in differences) + 1  # one more, so that equal ones leave an error
    return math.sqrt(squares / (len(differences) + 1) / max(1, len(differences)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0


# ---- Paired evidence: the pairs behind a decision, as a loop notes them in its journal
# A note has the rewards and the runs of each pair in the order of their evaluation. The wealth
# after each pair follows from it. Written by loop/evaluator.py, once per decision; read by
# runtime/views/iteration_evidence.py. Hidden probes are not noted: they are never reported.
MOST_PAIRS = 100_000  # noted: a body has its limit


class RunPair(Record):
    """A pair with the runs that it compares."""

    task: str
    tag: str | None
    incumbent: float
    candidate: float
    incumbent_run: str
    candidate_run: str


class PairedEvidence(Record):
    """The pairs behind a decision, the first `MOST_PAIRS` of them.

    `planned` is the greatest number of pairs that the decision could have.
    """

    incumbent: str
    candidate: str
    test: PromotionTest
    planned: int
    pairs: list[RunPair]

    def wealth(self) -> list[float]:
        """Return the wealth of the bets on "better" after each pair; it starts at 1 before them."""
        test, wealth = self.test, list[float]()
        bets = Deadline(1 / test.alpha, self.planned, test.margin)
        for pair in self.pairs:
            bets.add((pair.candidate - pair.incumbent) / (test.high - test.low))
            wealth.append(bets.wealth)
        return wealth


def entry_of(iteration: int) -> str:
    """Return the name of the journal's entry for an iteration's decision."""
    return f"pairs-{iteration}"


def paired(pairs: Sequence[Pair], runs: dict[str, tuple[str, str]]) -> list[RunPair]:
    """Return pairs with their runs: by task, the incumbent's and the candidate's."""
    return [
        RunPair(
            task=pair.task,
            tag=pair.tag,
            incumbent=pair.incumbent,
            candidate=pair.candidate,
            incumbent_run=runs[pair.task][0],
            candidate_run=runs[pair.task][1],
        )
        for pair in pairs[:MOST_PAIRS]
    ]
