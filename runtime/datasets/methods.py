"""Which of a task's runs are wanted, by method: sft, grpo, dpo, kto (recipes.DatasetRecipe).

A method gets the candidates group by group, in the order of task, generation and attempt, and
settles each: refused, or with rows. Only those it asks `samples` of are read. Called by making.py.
"""

from collections.abc import Iterable, Iterator, Sequence
from itertools import groupby
from typing import Any, Protocol

from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.advantages import (
    Steps,
    equal,
    of_outcomes,
    of_steps,
    steps_among,
)
from cray_agents.runtime.datasets.run_samples import TokenSample
from cray_agents.runtime.datasets.selection import AHEAD, CandidateRun, Selection

Group = list[CandidateRun]
GROUPS = 1024  # looked at together


class GroupMethod(Protocol):
    """How groups are made and settled."""

    def key(self, candidate: CandidateRun) -> Any:
        """What those have in common that come one after the other and are looked at together."""
        ...

    def groups(self, together: Group) -> list[Group]:
        """The groups among them."""
        ...

    def ahead(self, group: Group) -> Sequence[CandidateRun]:
        """Those of a group that will most likely be read."""
        ...

    def settle(self, group: Group) -> Group:
        """Settle all of a group; returns them in the order of their rows."""
        ...


def settled(candidates: Iterable[CandidateRun], selection: Selection) -> Iterator[Group]:
    """The groups of a recipe's method, settled. Bodies are read for several groups at once."""
    method = METHODS[selection.recipe.method](selection)
    page: list[Group] = []
    ahead: list[CandidateRun] = []
    for _, together in groupby(candidates, method.key):
        for group in method.groups(list(together)):
            page.append(group)
            ahead += method.ahead(group)
        if len(ahead) >= AHEAD or len(page) == GROUPS:
            selection.read(ahead)
            yield from map(method.settle, page)
            page, ahead = [], []
    selection.read(ahead)
    yield from map(method.settle, page)


class Limit:
    """How many of the current task are in; there is no limit on runs without a task."""

    def __init__(self, most: int | None) -> None:
        self._most = most
        self._task: str | None = None
        self._taken = 0

    def reached(self, task: str | None) -> bool:
        """Whether no more of this task may come in."""
        taken = self._taken if task == self._task else 0
        return self._most is not None and task is not None and taken >= self._most

    def took(self, task: str | None) -> None:
        """Count one in."""
        self._taken = self._taken + 1 if task == self._task else 1
        self._task = task


class Sft:
    """Runs to imitate: all, or the best few of each task."""

    def __init__(self, selection: Selection) -> None:
        self._selection, self._best_of = selection, selection.recipe.best_of
        self._limit = Limit(selection.recipe.max_per_task)

    def key(self, candidate: CandidateRun) -> Any:
        """A task's runs where the best are looked for, else each alone."""
        task = candidate.facts.task
        return candidate.facts.run_id if task is None or self._best_of is None else (task,)

    def groups(self, together: Group) -> list[Group]:
        """One, whatever loops the runs are of."""
        return [together]

    def ahead(self, group: Group) -> Sequence[CandidateRun]:
        """The best of those that may come in."""
        if self._limit.reached(group[0].facts.task):
            return []
        return _ranked(group)[: self._best_of]

    def settle(self, group: Group) -> Group:
        """The best that can be used; of these, equal samples once, and as many as may be."""
        chosen = [c for c in group if c.reason is None]
        if self._best_of is not None:
            chosen = self._best(_ranked(group), self._best_of)
        wanted = set(chosen)
        for candidate in (c for c in group if c in wanted):
            task = candidate.facts.task
            if self._limit.reached(task):
                candidate.refuse("over_max_per_task")
            elif self._selection.keep(candidate):
                self._limit.took(task)
        return group

    def _best(self, ranked: Sequence[CandidateRun], most: int) -> Group:
        best: Group = []
        for candidate in ranked:
            if len(best) == most:
                candidate.refuse("not_best", f"best_of {most}: they reach {best[-1].value:g}")
            elif self._selection.samples(candidate):
                best.append(candidate)
        return best


class Grpo:
    """Groups of a task's scored runs, with advantages (advantages.py).

    The mean and the standard deviation are of all that was scored in the group: also of those whose
    tokens are then missing, contaminated or over the limit.
    """

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._limit = Limit(selection.recipe.max_per_task)

    def key(self, candidate: CandidateRun) -> Any:
        """A task's runs in a generation."""
        return _generation_key(candidate)

    def groups(self, together: Group) -> list[Group]:
        """Those of each loop."""
        return _by_loop(together)

    def ahead(self, group: Group) -> Sequence[CandidateRun]:
        """All but those of a group that says nothing."""
        return [] if self._silence(group) else [c for c in group if not c.reason]

    def settle(self, group: Group) -> Group:
        """Refuse the group, or give each its advantage."""
        if reason := self._silence(group):
            for candidate in group:
                candidate.refuse(reason, f"reward {candidate.value:g}")
            return group
        recipe, scored = self._selection.recipe, [c for c in group if c.scored]
        deviation = recipe.deviation if recipe.normalize else None
        about: list[dict[str, Any]]
        if steps := self._steps(scored):
            turns = of_steps(steps, deviation, recipe.discount)
            about = [{"turns": advantages} for advantages in turns]
        else:
            outcomes = of_outcomes([c.value for c in scored], deviation)
            about = [{"advantage": advantage} for advantage in outcomes]
        for candidate, advantages in zip(scored, about, strict=True):
            self._settle_one(candidate, advantages)
        return group

    def _silence(self, group: Group) -> str | None:
        """Why a group says nothing."""
        scored = [c for c in group if c.scored]
        if len(scored) < 2:
            return "alone"
        rewards = [r for steps in self._steps(scored) for r in steps.rewards.values()]
        return "zero_variance" if equal(rewards or [c.value for c in scored]) else None

    def _steps(self, scored: Group) -> list[Steps]:
        return steps_among([c.facts for c in scored], self._selection.recipe.rewards or {})

    def _settle_one(self, candidate: CandidateRun, advantages: dict[str, Any]) -> None:
        task = candidate.facts.task
        if candidate.reason is not None:
            return
        if self._limit.reached(task):
            candidate.refuse("over_max_per_task")
            return
        name = group_name(candidate, self._selection.recipe)
        # equal samples are draws, not repeats: without one of them the advantages do not sum to 0
        if samples := self._selection.samples(candidate):
            self._selection.take(candidate, samples, group=name, **advantages)
            self._limit.took(task)


class Dpo:
    """A pair of each task and generation: the best run and the worst one, with the same prompt."""

    def __init__(self, selection: Selection) -> None:
        self._selection, self._recipe = selection, selection.recipe
        self._limit = Limit(selection.recipe.max_per_task)

    def key(self, candidate: CandidateRun) -> Any:
        """A task's runs in a generation."""
        return _generation_key(candidate)

    def groups(self, together: Group) -> list[Group]:
        """Those of each loop."""
        return _by_loop(together)

    def ahead(self, group: Group) -> Sequence[CandidateRun]:
        """The best and the worst."""
        ranked = _ranked(group)
        return [ranked[0], ranked[-1]] if not self._fault(ranked) else []

    def settle(self, group: Group) -> Group:
        """Find the pair; the others are neither the best nor the worst."""
        ranked = _ranked(group)
        if ranked and self._limit.reached(ranked[0].facts.task):
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
        """Why the first and the last make no pair, by their rewards."""
        if len(ranked) < 2:
            return "no other run to compare it with"
        best, worst = ranked[0].value, ranked[-1].value
        if equal([best, worst]) or best - worst < self._recipe.min_margin:
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
        """Take a pair in, unless it was there before: both its samples, side by side."""
        name = group_name(best, self._recipe)
        both = better.input_ids + worse.input_ids
        repeat = self._selection.seen.repeat(best.facts.run_id, both)
        if repeat is not None:
            best.repeats = repeat
            _refuse([best, worst], repeat.reason, f"the pair of {repeat.detail}")
            return
        for candidate, sample in ((best, better), (worst, worse)):
            about: dict[str, Any] = {"group": name, "pair": name, "chosen": candidate is best}
            self._selection.take(candidate, [sample], **about)
        self._limit.took(best.facts.task)


class Kto:
    """Scored runs, each alone: desirable from the least reward on, else undesirable."""

    def __init__(self, selection: Selection) -> None:
        self._selection = selection
        self._limit = Limit(selection.recipe.max_per_task)

    def key(self, candidate: CandidateRun) -> Any:
        """Each by itself."""
        return candidate.facts.run_id

    def groups(self, together: Group) -> list[Group]:
        """That one."""
        return [together]

    def ahead(self, group: Group) -> Sequence[CandidateRun]:
        """It, if it may come in."""
        return [] if self._limit.reached(group[0].facts.task) else _ranked(group)

    def settle(self, group: Group) -> Group:
        """Take it in, with what it is."""
        [candidate] = group
        task = candidate.facts.task
        if candidate.reason is not None:
            return group
        if self._limit.reached(task):
            candidate.refuse("over_max_per_task")
        elif self._selection.keep(candidate, chosen=candidate.value >= self._selection.least):
            self._limit.took(task)
        return group


METHODS: dict[str, type[Sft | Grpo | Dpo | Kto]] = {
    "sft": Sft,
    "grpo": Grpo,
    "dpo": Dpo,
    "kto": Kto,
}


def group_name(candidate: CandidateRun, recipe: DatasetRecipe) -> str:
    """What runs are compared within, in words: `task/g3`, and the loop unless there is but one."""
    facts = candidate.facts
    parts = [facts.task or facts.run_id]
    if facts.generation is not None:
        parts.append(f"g{facts.generation}")
    if recipe.loop is None and facts.loop is not None:
        parts.insert(0, facts.loop)
    return "/".join(parts)


def _generation_key(candidate: CandidateRun) -> Any:
    facts = candidate.facts
    return facts.run_id if facts.task is None else (facts.task, facts.generation)


def _by_loop(together: Group) -> list[Group]:
    found: dict[str | None, Group] = {}
    for candidate in together:
        found.setdefault(candidate.facts.loop, []).append(candidate)
    return list(found.values())


def _ranked(group: Sequence[CandidateRun]) -> Group:
    """Those that may come in, the best first; of equals the earlier."""
    return sorted((c for c in group if c.reason is None), key=lambda c: -c.value)


def _refuse(candidates: Iterable[CandidateRun], reason: str, detail: str | None = None) -> None:
    for candidate in candidates:
        candidate.refuse(reason, detail)
