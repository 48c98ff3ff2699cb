"""Dataset methods: choose the runs of a task for each method (queries.DatasetRecipe).

A method gets candidates in groups, in the order of task, iteration and attempt. It refuses each
candidate or gives it rows. Only runs whose `samples` it requests are read. Called by build.py.
"""

from collections.abc import Callable, Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any

from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.run_samples import TokenSample
from cray_agents.runtime.datasets.selection import (
    AHEAD,
    CandidateRun,
    Selection,
    Steps,
    all_equal,
    outcome_advantages,
    rewarded_steps,
    step_advantages,
)

Group = list[CandidateRun]
GROUPS = 1024  # at most in one page


def settle_groups(candidates: Iterable[CandidateRun], selection: Selection) -> Iterator[Group]:
    """Yield groups with all decisions made. Bodies are read for several groups at once."""
    method = METHODS[selection.recipe.method](selection)
    page: list[Group] = []
    to_read: list[CandidateRun] = []
    for group in _groups(candidates, selection.recipe):
        page.append(group)
        to_read += method.candidates_to_read(group)
        if len(to_read) >= AHEAD or len(page) == GROUPS:
            selection.read(to_read)
            yield from map(method.settle, page)
            page, to_read = [], []
    selection.read(to_read)
    yield from map(method.settle, page)


def _groups(candidates: Iterable[CandidateRun], recipe: DatasetRecipe) -> Iterator[Group]:
    """Group the runs that are compared; others, and runs without a task, stand alone.

    grpo and dpo compare runs of one task, iteration and loop. sft compares runs of one task, of
    any loop, if the recipe has `best_of`.
    """
    within_loop = recipe.method in ("grpo", "dpo")

    def key(candidate: CandidateRun) -> Any:
        facts = candidate.facts
        if facts.task is None or not (within_loop or recipe.best_of is not None):
            return facts.run_id
        return facts.task, facts.iteration if within_loop else None

    for _, same in groupby(candidates, key):
        group = list(same)
        yield from _by_loop(group) if within_loop else [group]


class Limit:
    """A limit on accepted runs per task. Runs without a task have no limit."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._task: str | None = None
        self._accepted = 0

    def is_reached(self, task: str | None) -> bool:
        """Tell whether the task has all the runs it may have."""
        accepted = self._accepted if task == self._task else 0
        return self._most is not None and task is not None and accepted >= self._most

    def count(self, task: str | None) -> None:
        """Count an accepted run."""
        self._accepted = self._accepted + 1 if task == self._task else 1
        self._task = task


class GroupMethod:
    """A method of deciding on the candidates of a group."""

    def __init__(self, selection: Selection) -> None:
        self._selection, self._recipe = selection, selection.recipe
        self._limit = Limit(selection.recipe.max_per_task)

    def candidates_to_read(self, group: Group) -> Sequence[CandidateRun]:
        """Return the candidates of a group that will most likely be read."""
        raise NotImplementedError

    def settle(self, group: Group) -> Group:
        """Decide on every candidate of a group. Return them in the order of their rows."""
        raise NotImplementedError


class Sft(GroupMethod):
    """Runs to imitate: all, or the best few of each task."""

    def candidates_to_read(self, group: Group) -> Sequence[CandidateRun]:
        """Return the best runs not refused yet."""
        if self._limit.is_reached(group[0].facts.task):
            return []
        return _rank(group)[: self._recipe.best_of]

    def settle(self, group: Group) -> Group:
        """Accept the best usable runs, up to the limit. Repeated samples count once."""
        chosen = {c for c in group if c.reason is None}
        if self._recipe.best_of is not None:
            chosen = set(self._best(_rank(group), self._recipe.best_of))
        for candidate in (c for c in group if c in chosen):
            task = candidate.facts.task
            if self._limit.is_reached(task):
                candidate.refuse("over_max_per_task")
            elif self._selection.keep(candidate):
                self._limit.count(task)
        return group

    def _best(self, ranked: Sequence[CandidateRun], most: int) -> Group:
        best: Group = []
        for candidate in ranked:
            if len(best) == most:
                candidate.refuse("not_best", f"best_of {most}: they reach {best[-1].value:g}")
            elif self._selection.samples(candidate):
                best.append(candidate)
        return best


class Grpo(GroupMethod):
    """Groups of a task's scored runs, with advantages (selection.py).

    The mean and the standard deviation cover every scored run of the group. This includes runs with
    missing or contaminated tokens, and runs over the limit.
    """

    def candidates_to_read(self, group: Group) -> Sequence[CandidateRun]:
        """Return the runs not refused yet, or none if the group has no signal."""
        return [] if self._no_signal(group) else [c for c in group if not c.reason]

    def settle(self, group: Group) -> Group:
        """Give each scored run its advantage, or refuse the whole group."""
        if reason := self._no_signal(group):
            for candidate in group:
                candidate.refuse(reason, f"reward {candidate.value:g}")
            return group
        recipe, scored = self._recipe, [c for c in group if c.scored]
        deviation = recipe.deviation if recipe.normalize else None
        arguments: list[dict[str, Any]]
        if steps := self._steps(scored):
            turns = step_advantages(steps, deviation, recipe.discount)
            arguments = [{"turns": advantages} for advantages in turns]
        else:
            outcomes = outcome_advantages([c.value for c in scored], deviation)
            arguments = [{"advantage": advantage} for advantage in outcomes]
        for candidate, advantages in zip(scored, arguments, strict=True):
            self._settle_one(candidate, advantages)
        return group

    def _no_signal(self, group: Group) -> str | None:
        """Return the reason why a group has no training signal."""
        scored = [c for c in group if c.scored]
        if len(scored) < 2:
            return "alone"
        rewards = [r for steps in self._steps(scored) for r in steps.rewards.values()]
        return "zero_variance" if all_equal(rewards or [c.value for c in scored]) else None

    def _steps(self, scored: Group) -> list[Steps]:
        return rewarded_steps([c.facts for c in scored], self._recipe.rewards or {})

    def _settle_one(self, candidate: CandidateRun, advantages: dict[str, Any]) -> None:
        task = candidate.facts.task
        if candidate.reason is not None:
            return
        if self._limit.is_reached(task):
            candidate.refuse("over_max_per_task")
            return
        name = group_name(candidate, self._recipe)
        # equal samples stay: without one of them the advantages would not sum to 0
        if samples := self._selection.samples(candidate):
            self._selection.add_rows(candidate, samples, group=name, **advantages)
            self._limit.count(task)


class Dpo(GroupMethod):
    """A pair of each task and iteration: the best run and the worst one, with the same prompt."""

    def candidates_to_read(self, group: Group) -> Sequence[CandidateRun]:
        """Return the best and the worst run, unless their rewards rule out a pair."""
        ranked = _rank(group)
        return [ranked[0], ranked[-1]] if not self._fault(ranked) else []

    def settle(self, group: Group) -> Group:
        """Pair the best and the worst usable run, and refuse the rest."""
        ranked = _rank(group)
        if ranked and self._limit.is_reached(ranked[0].facts.task):
            _refuse(ranked, "over_max_per_task")
            return group
        fault = self._fault(ranked)
        best = self._first_usable(ranked) if not fault else None
        worst = self._first_usable(ranked[::-1]) if best is not None else None
        if best is None or worst is None or (fault := self._fault([best, worst])):
            _refuse(ranked, "no_pair", fault or "none of its runs can be used")
            return group
        [better], [worse] = self._selection.samples(best), self._selection.samples(worst)
        if better.prompt != worse.prompt:
            _refuse(ranked, "no_pair", "the best and the worst run were asked differently")
            return group
        self._pair(best, worst, better, worse)
        _refuse([c for c in ranked if not c.rows], "not_best", "neither the best nor the worst")
        return [best, worst, *(c for c in group if c is not best and c is not worst)]

    def _fault(self, ranked: Sequence[CandidateRun]) -> str | None:
        """Return the reason why the rewards of the first and the last run rule out a pair."""
        if len(ranked) < 2:
            return "no other run to compare it with"
        best, worst = ranked[0].value, ranked[-1].value
        if all_equal([best, worst]) or best - worst < self._recipe.min_margin:
            return f"rewards from {worst:g} to {best:g}"
        if self._recipe.min_reward is not None and best < self._recipe.min_reward:
            return f"the best reward is {best:g}"
        return None

    def _first_usable(self, ranked: Sequence[CandidateRun]) -> CandidateRun | None:
        for candidate in ranked:
            samples = self._selection.samples(candidate)
            if len(samples) > 1:
                candidate.refuse("broken_prefix", f"{len(samples)} samples")
            elif samples:
                return candidate
        return None

    def _pair(
        self, best: CandidateRun, worst: CandidateRun, better: TokenSample, worse: TokenSample
    ) -> None:
        """Accept both samples of a pair, unless an earlier pair had the same."""
        name = group_name(best, self._recipe)
        both = better.input_ids + worse.input_ids
        repeat = self._selection.seen.repeat(best.facts.run_id, both)
        if repeat is not None:
            _refuse([best, worst], repeat.reason, f"the pair of {repeat.detail}")
            return
        for candidate, sample in ((best, better), (worst, worse)):
            fields: dict[str, Any] = {"group": name, "pair": name, "chosen": candidate is best}
            self._selection.add_rows(candidate, [sample], **fields)
        self._limit.count(best.facts.task)


class SingleRuns(GroupMethod):
    """Runs without groups, at most so many of a task."""

    def candidates_to_read(self, group: Group) -> Sequence[CandidateRun]:
        """Return the run, unless it was refused or its task has enough runs."""
        return [] if self._limit.is_reached(group[0].facts.task) else _rank(group)

    def settle(self, group: Group) -> Group:
        """Accept the run, if it can be trained on."""
        [candidate] = group
        task = candidate.facts.task
        if candidate.reason is not None:
            return group
        if self._limit.is_reached(task):
            candidate.refuse("over_max_per_task")
        elif self._accept(candidate):
            self._limit.count(task)
        return group

    def _accept(self, candidate: CandidateRun) -> bool:
        """Add the run's samples, and return True; or refuse it."""
        raise NotImplementedError


class Kto(SingleRuns):
    """Scored runs without groups: desirable if the reward reaches `least`, else undesirable."""

    def _accept(self, candidate: CandidateRun) -> bool:
        chosen = candidate.value >= self._selection.least
        return self._selection.keep(candidate, chosen=chosen)


class DistillSelection(SingleRuns):
    """All runs with their tokens, whatever came of them. Equal samples stay: they are draws."""

    def _accept(self, candidate: CandidateRun) -> bool:
        samples = self._selection.samples(candidate)
        if samples:
            self._selection.add_rows(candidate, samples)
        return bool(samples)


METHODS: dict[str, Callable[[Selection], GroupMethod]] = {
    "sft": Sft,
    "grpo": Grpo,
    "dpo": Dpo,
    "kto": Kto,
    "distill": DistillSelection,
}


def group_name(candidate: CandidateRun, recipe: DatasetRecipe) -> str:
    """Return the name of a comparison group: `task/g3`, or `loop/task/g3` across loops."""
    facts = candidate.facts
    names = [facts.task or facts.run_id]
    if facts.iteration is not None:
        names.append(f"g{facts.iteration}")
    if recipe.loop is None and facts.loop is not None:
        names.insert(0, facts.loop)
    return "/".join(names)


def _by_loop(candidates: Group) -> list[Group]:
    groups: dict[str | None, Group] = {}
    for candidate in candidates:
        groups.setdefault(candidate.facts.loop, []).append(candidate)
    return list(groups.values())


def _rank(group: Sequence[CandidateRun]) -> Group:
    """Return the runs not refused yet, best first. Equal runs keep their order."""
    return sorted((c for c in group if c.reason is None), key=lambda c: -c.value)


def _refuse(candidates: Iterable[CandidateRun], reason: str, detail: str | None = None) -> None:
    for candidate in candidates:
        candidate.refuse(reason, detail)
