"""Is a candidate better than the incumbent? A paired sequential test, stated here and nowhere else.

Both versions answer the same held-out tasks; d = candidate's reward - incumbent's, in [-1, 1].
Evidence against the hypothesis E[d] <= margin is the wealth of a gambler who starts with 1 and,
before each d is seen, stakes a share of what he has on d > margin, at fair odds:

    wealth *= 1 + stake * (d - margin)

Were the hypothesis true he could not expect to win, and the probability that he ever multiplies his
wealth by 1 / alpha is at most alpha (Ville 1939), after however many looks at it. So:

- promote as soon as the wealth reaches 1 / alpha: a candidate that is not better by more than
  `margin` is promoted with probability at most alpha, per decision;
- reject as soon as a guard fails: another gambler, on E[d] < -tolerance within the tasks of one tag
  (or on the hidden probes), who has reached guards / guard_alpha (Bonferroni);
- reject as soon as a gambler on E[d] < min_effect has reached 1 / beta: futile;
- when the tasks are exhausted, reject. That is the tie rule: what is not shown to be better is not
  promoted. Tasks on which both do equally well move nothing when the margin is 0.

While the wealth would do, and of a tag fewer than 16 tasks were seen, or it stands below -tolerance
without having failed yet, its tasks are waited for; if at their end it stands below by more than
its standard error, that is a rejection too. The tasks are taken as draws from those that the agent
will meet.

A run of the candidate that could not be scored counts with the least reward: what makes a reward
function fail must not pay. Where it is the incumbent's, or the infrastructure failed one of both,
the pair is left out; when more than MISSING of the planned ones failed so, nothing is judged, and
that is a rejection.

Called by judging.py for loop.py. Read next: betting.py, how the gamblers stake.
"""

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Literal

from pydantic import Field, model_validator

from cray_agents.errors import BadInput
from cray_agents.promotion.e_process import Deadline
from cray_agents.records import Record, StrictRecord, Task, digest

Verdict = Literal["promote", "reject", "continue"]

FEW = 20  # held-out tasks below which none is set aside
SEEN = 16  # tasks of a guarded tag that are waited for
MISSING = 0.1  # share of the planned pairs that the infrastructure may fail
HIDDEN = "hidden probes"  # the name of their guard


class PromotionTest(StrictRecord):
    """The error levels and the sizes of the test. Differences are shares of the rewards' range.

    Args:
        alpha: greatest probability of promoting a candidate that is not better.
        margin: how much better than the incumbent "better" is.
        batch: tasks that are evaluated between two looks.
        min_effect, beta: a candidate better by min_effect is given up early with at most this
            probability.
        guard: a metadata key; each of its values is a tag whose tasks must not get worse.
        tolerance, guard_alpha: a candidate that is nowhere worse by more than the tolerance is
            rejected by all guards together with at most this probability.
        hidden: share of the held-out tasks that never decide, and are only a guard.
        rotation: into how many parts these are divided; each decision uses the next one.
        low, high: the least and the greatest reward of a run.
    """

    alpha: float = Field(0.05, gt=0, le=1)
    margin: float = Field(0.0, gt=-1, lt=1)
    batch: int = Field(32, ge=1)
    min_effect: float = Field(0.02, gt=-1, lt=1)
    beta: float = Field(0.05, gt=0, le=1)
    guard: str | None = None
    tolerance: float = Field(0.1, ge=0, lt=1)
    guard_alpha: float = Field(0.05, gt=0, le=1)
    hidden: float = Field(0.1, ge=0, lt=1)
    rotation: int = Field(2, ge=1)
    low: float = 0.0
    high: float = 1.0

    @model_validator(mode="after")
    def _in_order(self) -> "PromotionTest":
        if not self.low < self.high:
            raise ValueError(f"low ({self.low:g}) must be less than high ({self.high:g})")
        return self


class Pair(Record):
    """What both versions got for a task, and the tag it is guarded under."""

    task: str
    incumbent: float
    candidate: float
    tag: str | None = None


class Gaps(Record):
    """How many of the pairs are not what they should be.

    `unscored`: the candidate's run could not be scored, and counts with the least reward.
    `unpaired`: the incumbent's could not be; left out. `failed`: the infrastructure failed one of
    both; left out.
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
    def told(self) -> str:
        """In words; "" if there are none."""
        told = {
            "could not be scored and count as the worst": self.unscored,
            "are left out, for the incumbent has no reward": self.unpaired,
            "are left out, for the infrastructure failed them": self.failed,
        }
        return "; ".join(f"{count} {what}" for what, count in told.items() if count)


WHOLE = Gaps()


class Guard(Record):
    """How a guard stands: it has failed when its evidence has reached the limit.

    `error`: the standard error of the difference.
    """

    tag: str
    tasks: int
    difference: float
    error: float
    evidence: float
    limit: float
    failed: bool


class Decision(Record):
    """What is to be done, and the numbers behind it.

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
    """What the pairs say, in the order in which they were evaluated.

    `planned`: how many pairs of each tag there can be (see `plan`), the same at each look.
    `exhausted`: no more will come. `hidden`: pairs of this decision's probes; wanted once the
    others promote, when the same is asked again with them. `gaps`: of the pairs of both. Raises
    BadInput for a reward that is outside `low` to `high`.
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
        reason="; ".join(filter(None, [reason, gaps.told])),
        evidence=wealth.wealth,
        limit=goal,
        tasks=len(pairs),
        planned=total,
        wins=sum(d > 0 for d in differences),
        losses=sum(d < 0 for d in differences),
        ties=sum(d == 0 for d in differences),
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
        return "reject", f"worse by more than {test.tolerance:g} on {_named(failed)}"
    found = f"evidence {math.floor(10 * wealth.wealth) / 10:g} of {wealth.goal:.3g}"
    if wealth.reached:
        doubted = [] if exhausted else _doubted(guards, test, planned)
        if doubted:
            return "continue", f"better, but more is to be seen of {', '.join(doubted)}"
        lower = [g for g in guards if g.tasks >= SEEN and g.difference + g.error < -test.tolerance]
        if lower:
            return "reject", f"better on the whole, worse on {_named(lower)}"
        return "promote", f"better: {found}"
    if futile.reached:
        return "reject", f"futile: not better by {test.min_effect:g}; {found}"
    if exhausted:
        return "reject", f"not shown to be better: {found}"
    return "continue", found


def _named(guards: Sequence[Guard]) -> str:
    return ", ".join(f"{guard.tag} ({guard.difference:+.3f})" for guard in guards)


def _doubted(
    guards: Sequence[Guard], test: PromotionTest, planned: Mapping[str | None, int]
) -> list[str]:
    """The tags of which too little was seen, or nothing good, and more is to come."""
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
    found = []
    for tag in tags:
        of_tag = [d for pair, d in zip(pairs, differences, strict=True) if pair.tag == tag]
        found.append(_guard(tag, of_tag, planned[tag], limit, test.tolerance))
    if hidden:
        of_probes = [_difference(pair, test) for pair in hidden]
        found.append(_guard(HIDDEN, of_probes, len(hidden), limit, test.tolerance))
    return found


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


def tag_of(task: Task, test: PromotionTest) -> str | None:
    """The tag that a task is guarded under."""
    value = task.metadata.get(test.guard) if test.guard else None
    return None if value is None else str(value)


def plan(tasks: Sequence[Task], test: PromotionTest) -> dict[str | None, int]:
    """How many pairs of each tag an evaluation on these tasks gives: `planned` of `decide`."""
    return dict(Counter(tag_of(task, test) for task in tasks))


def measured(tasks: Sequence[Task], test: PromotionTest) -> list[Task]:
    """The held-out tasks that decide: those that are not set aside."""
    return [task for task in tasks if not _set_aside(task, tasks, test)]


def probes(tasks: Sequence[Task], earlier: int, test: PromotionTest) -> list[Task]:
    """The held-out tasks that a decision is guarded with; never to be reported.

    `earlier`: how many decisions there were before. Set aside by a hash of the task's id, and
    divided by another: the same for the same id, whatever other tasks there are. None of fewer than
    FEW tasks.
    """
    part = earlier % test.rotation
    return [
        task
        for task in tasks
        if _set_aside(task, tasks, test) and _hash(f"part {task.id}") % test.rotation == part
    ]


def _set_aside(task: Task, tasks: Sequence[Task], test: PromotionTest) -> bool:
    return len(tasks) >= FEW and _hash(f"hidden {task.id}") < test.hidden * 2**32


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
    """The standard error of their mean, as if it were 0."""
    squares = sum(d * d for d in differences) + 1  # one more, lest two alike leave no error
    return math.sqrt(squares / (len(differences) + 1) / max(1, len(differences)))


def _mean(values: Sequence[float]) -> float:
    return sum(values) / len(values) if values else 0.0
