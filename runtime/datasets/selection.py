"""Selection: decide on each run, first by the facts in the index, then by its tokens.

`judge` makes a CandidateRun without reading its body. A method (methods.py) then chooses among the
runs of a task; it requests their `samples` and calls `keep`. A refusal names one of the reasons in
considered_runs.py. Bodies are read a few dozen at a time, and only their tokens are kept. Called by
build.py.
"""

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.queries import DatasetRecipe, Deviation
from cray_agents.records import (
    CONTROL_TOKENS,
    EVALUATION,
    SCAN,
    UNSCORED,
    ModelCall,
    Run,
    reward_of_givers,
    rewards_of_givers,
)
from cray_agents.runtime.datasets.considered_runs import ConsideredRun
from cray_agents.runtime.datasets.decontamination import BlockedTexts
from cray_agents.runtime.datasets.demonstrations import Renderer
from cray_agents.runtime.datasets.near_duplicates import KeptSamples
from cray_agents.runtime.datasets.run_samples import (
    TokenSample,
    find_inexact,
    is_exact,
    losses_of,
    merge_calls,
)
from cray_agents.runtime.datasets.token_shards import Balance, SampleRow
from cray_agents.runtime.datasets.uses import Uses
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.assembly import group_by_request
from cray_agents.runtime.store.index import RunFacts

AHEAD = 64  # runs whose bodies are read at once


@dataclass(slots=True, eq=False)
class CandidateRun:
    """A candidate for the dataset. `reason` is set if refused; `scored` if its reward counts."""

    facts: RunFacts
    reward: float | None
    scored: bool = False
    reason: str | None = None
    detail: str | None = None
    gone: bool = False  # deleted during the build: left out of runs.parquet, too
    rows: list[SampleRow] = field(default_factory=list)

    def refuse(self, reason: str, detail: str | None = None) -> None:
        """Refuse the run. The first reason stays."""
        if self.reason is None:
            self.reason, self.detail, self.rows = reason, detail, []

    @property
    def value(self) -> float:
        """The reward, or 0.0 if there is none."""
        return self.reward or 0.0

    def line(self) -> ConsideredRun:
        """Return the line for runs.parquet."""
        details = (self.detail, losses_of(row.sample for row in self.rows))
        return ConsideredRun(
            self.facts.run_id,
            self.facts.task,
            self.facts.iteration,
            self.facts.attempt,
            self.reward,
            self.reason is None,
            self.reason,
            "; ".join(filter(None, details)) or None,
            len(self.rows),
        )


class Body(NamedTuple):
    """The samples of a run that was read, or the reason why there are none, and details."""

    samples: list[TokenSample]
    metadata: dict[str, Any]
    reason: str | None = None
    detail: str | None = None


@dataclass
class Selection:
    """The selection of one build. Accepted samples are added to `seen` and `balance`."""

    store: Store
    recipe: DatasetRecipe
    blocked: BlockedTexts
    uses: Uses
    renderer: Renderer | None
    seen: KeptSamples
    balance: Balance
    _bodies: dict[str, Body | None] = field(default_factory=dict)

    @property
    def least(self) -> float:
        """The least reward of a run to imitate (sft) or a desirable one (kto)."""
        return 1.0 if self.recipe.min_reward is None else self.recipe.min_reward

    def judge(self, facts: RunFacts) -> CandidateRun:
        """Make a candidate. Refuse it here if that needs no body."""
        override = (self.recipe.rewards or {}).get(facts.run_id)
        rewarded, facts = facts.reward is not None, self._with_givers(facts)
        reward = facts.reward if override is None else override
        candidate = CandidateRun(facts, reward)
        rewarding = self.recipe.method != "distill"  # its teacher judges
        if facts.split not in (None, "train"):
            candidate.refuse("held_out", facts.split)
        elif EVALUATION in facts.tags:
            candidate.refuse("held_out", EVALUATION)
        elif findings := self._findings(facts):
            candidate.refuse("finding", ", ".join(findings))
        elif facts.infrastructure:
            candidate.refuse("infrastructure_error", facts.error)
        elif rewarding and facts.error == UNSCORED:
            candidate.refuse("reward_error")
        elif rewarding and reward is None:
            detail = "from nobody whom the recipe names as a giver" if rewarded else None
            candidate.refuse("no_reward", detail)
        elif _is_empty(facts):
            candidate.refuse("empty", "nothing was sampled" if facts.calls else "no turn")
        elif (
            self.recipe.method == "grpo"
            and override is None
            and first_missing_turn(facts) is not None
        ):
            candidate.refuse("no_such_turn", f"{first_missing_turn(facts)} of {facts.turns}")
        else:
            candidate.scored = True
            self._judge_scored(candidate)
        return candidate

    def _findings(self, facts: RunFacts) -> list[str]:
        """Return the scanners that found something, unless the recipe takes such runs."""
        asked = self.recipe.where.tags if self.recipe.where is not None else ()
        found = [tag for tag in facts.tags if tag.startswith(SCAN) and tag not in asked]
        return [] if self.recipe.with_findings else [tag[len(SCAN) :] for tag in found]

    def _with_givers(self, facts: RunFacts) -> RunFacts:
        """Return the facts with only the rewards from givers that the recipe names."""
        if self.recipe.givers is None or not facts.given:
            return facts
        reward = reward_of_givers(facts.reward, facts.given, self.recipe.givers)
        rewards = rewards_of_givers(facts.given, self.recipe.givers)
        return facts._replace(reward=reward, rewards=rewards)

    def _judge_scored(self, candidate: CandidateRun) -> None:
        facts, recipe = candidate.facts, self.recipe
        if recipe.method == "sft" and candidate.value < self.least:
            candidate.refuse("low_reward")
        elif facts.imported is not None and not facts.calls and not recipe.render:
            candidate.refuse("imported", facts.imported)
        elif recipe.max_uses is not None:
            used = self.uses.of(facts.run_id)
            if used >= recipe.max_uses:
                candidate.refuse("used_up", f"{used} of {recipe.max_uses}")

    def read(self, candidates: Sequence[CandidateRun]) -> None:
        """Read the bodies of these candidates in advance, and drop bodies read before."""
        run_ids = [c.facts.run_id for c in candidates if c.reason is None]
        self._bodies = dict.fromkeys(run_ids)
        for run in self.store.runs_by_id(run_ids):
            self._bodies[run.id] = self._body(run)

    def samples(self, candidate: CandidateRun) -> list[TokenSample]:
        """Return a candidate's samples. If it cannot be trained on, refuse it and return none."""
        run_id = candidate.facts.run_id
        if run_id not in self._bodies:
            self._bodies[run_id] = next(map(self._body, self.store.runs_by_id([run_id])), None)
        body = self._bodies[run_id]
        if body is None:
            self._refuse_unread(candidate)
            return []
        if body.reason is not None:
            candidate.refuse(body.reason, body.detail)
        elif candidate.reason is None:
            candidate.detail = body.detail
        return body.samples

    def keep(self, candidate: CandidateRun, **fields: Any) -> bool:
        """Accept a candidate without its repeated samples; refuse it if all are repeated."""
        samples = self.samples(candidate)
        if not samples:
            return False
        fresh, repeat = self.seen.drop_repeats(candidate.facts.run_id, samples)
        if repeat is not None and not fresh:
            candidate.refuse(repeat.reason, repeat.detail)
            return False
        self.add_rows(candidate, fresh, **fields)
        return True

    def add_rows(
        self,
        candidate: CandidateRun,
        samples: Iterable[TokenSample],
        turns: Sequence[float] | None = None,
        **fields: Any,
    ) -> None:
        """Make rows of samples. `turns` are advantages by turn; `fields` go to SampleRow."""
        facts = candidate.facts
        body = self._bodies[facts.run_id]
        fields["balance"] = self.balance.group_of(body.metadata if body else {})
        candidate.rows = [
            SampleRow(sample, facts.run_id, facts.task or "", candidate.value, **fields)
            for sample in samples
        ]
        if turns is not None:
            candidate.rows = [_with_turn_advantages(row, turns) for row in candidate.rows]

    def _refuse_unread(self, candidate: CandidateRun) -> None:
        try:
            self.store.run(candidate.facts.run_id)
        except NotFound:
            candidate.gone = True
            candidate.refuse("corrupt")
        except Corrupt as error:
            candidate.refuse("corrupt", str(error))
        else:
            candidate.refuse("corrupt", "it could not be read")

    def _body(self, run: Run) -> Body:
        """Make the samples of a run, or find the reason why there are none."""
        metadata = run.task.metadata if run.task else {}
        fault = _token_fault(run)
        if fault is not None:
            return Body([], metadata, *fault)
        match = self.blocked.match_run(run)
        if match is not None:
            return Body([], metadata, "contaminated", match.description)
        if run.calls:
            samples = merge_calls(run.calls)
            if CONTROL_TOKENS in run.tags:
                samples[0].losses.add("the border between contents and control tokens")
        else:
            try:
                samples = self._render(run)
            except BadInput as error:
                return Body([], metadata, "not_renderable", str(error))
        longest = max(len(sample.input_ids) for sample in samples)
        if is_too_long(longest, self.recipe):
            return Body([], metadata, "too_long", f"{longest} tokens")
        left = sum(not is_exact(call) for call in run.calls)
        return Body(samples, metadata, None, f"without {left} cut-off turns" if left else None)

    def _render(self, run: Run) -> list[TokenSample]:
        """Render an imported run with the chat template. Raises BadInput."""
        if self.renderer is None:
            raise BadInput("there is no tokenizer to render it with", param="tokenizer")
        return self.renderer.samples(run.trajectory.messages, run.trajectory.tools)


def _with_turn_advantages(row: SampleRow, turns: Sequence[float]) -> SampleRow:
    each = row.sample.by_span(turns)
    tokens = [span.tokens for span in row.sample.spans]
    mean = math.fsum(n * value for n, value in zip(tokens, each, strict=True)) / row.sample.trained
    return row._replace(advantage=mean, advantages=each)


def is_too_long(tokens: int, recipe: DatasetRecipe) -> bool:
    """Tell whether a sample of so many tokens exceeds the recipe's `max_tokens`."""
    return recipe.max_tokens is not None and tokens > recipe.max_tokens


def _is_empty(facts: RunFacts) -> bool:
    """Tell whether nothing was sampled, as opposed to tokens missing from the record."""
    if facts.imported is not None:
        return False
    if not facts.calls:
        return not facts.turns
    is_complete = facts.calls >= facts.turns and facts.prompt_tokens > 0 and not facts.redacted
    return is_complete and not facts.sampled_tokens


def _token_fault(run: Run) -> tuple[str, str | None] | None:
    """Return the reason why the tokens of a run cannot be trained on, and the call's id."""
    calls = run.calls
    if run.imported is not None and not calls:
        return None
    missing = next((t.call_id for t in run.trajectory.turns if t.call is None), None)
    if missing is not None:
        return "missing_call", missing
    redacted = next((c for c in calls if c.redacted and not c.token_ids), None)
    if redacted is not None:
        return "redacted", ", ".join(sorted({redaction.kind for redaction in redacted.redacted}))
    if not any(c.token_ids for c in calls) and all(c.prompt_token_ids for c in calls):
        return "empty", "nothing was sampled" if calls else "no turn"
    return _call_fault(calls)


def _call_fault(calls: Sequence[ModelCall]) -> tuple[str, str] | None:
    for choices in group_by_request(calls):
        if len(choices) > 1:
            return "ambiguous_choices", f"{len(choices)} of {choices[0].id}"
    if (call := find_inexact(calls)) is None:
        return None
    known = bool(call.token_ids and call.prompt_token_ids)
    return "no_logprobs" if known else "no_tokens", call.id


# ---- Advantages of a group of runs, from their outcomes or from the rewards of their turns
# Both forms are from arXiv 2402.03300 (GRPO): section 4.1.2, outcome supervision, and 4.1.3,
# process supervision. Called by methods.py with the rewards of a group.
EQUAL = 1e-9  # rewards this close are equal: sums of the same rewards vary with their order


class Steps(NamedTuple):
    """The rewards of a run of `turns` turns, by turn. A turn without a reward is no step."""

    turns: int
    rewards: Mapping[int, float]


def all_equal(values: Sequence[float]) -> bool:
    """Tell whether all rewards are equal."""
    return math.isclose(min(values), max(values), rel_tol=EQUAL, abs_tol=EQUAL)


def outcome_advantages(values: Sequence[float], deviation: Deviation | None) -> list[float]:
    """Return each reward minus the group's mean, divided by the standard deviation if one is named.

    The variance of n values divides by n - 1 for `sample` and by n for `population`. The paper does
    not say which of them it means; TRL 1.16 and verl use `sample`.
    """
    mean = math.fsum(values) / len(values)
    scale = 1.0
    if deviation is not None:
        count = len(values) - (deviation == "sample")
        scale = math.sqrt(math.fsum((value - mean) ** 2 for value in values) / count)
    return [(value - mean) / scale for value in values]


def step_advantages(
    group: Sequence[Steps], deviation: Deviation | None, discount: float
) -> list[list[float]]:
    """Return the advantages of each run's turns: [runs][turns].

    All step rewards of the group are normalised together, as outcomes are. The advantage of a turn
    is the sum of the normalised rewards of this turn and all later ones. The reward k turns later
    is multiplied by discount**k (the paper's discount is 1).
    """
    rewards = [reward for run in group for reward in run.rewards.values()]
    normalised = iter(outcome_advantages(rewards, deviation))
    by_run = []
    for run in group:
        step_values = {turn: next(normalised) for turn in run.rewards}
        advantages = [0.0] * run.turns
        total = 0.0
        for turn in reversed(range(run.turns)):
            total = step_values.get(turn, 0.0) + discount * total
            advantages[turn] = total
        by_run.append(advantages)
    return by_run


def rewarded_steps(runs: Sequence[RunFacts], overrides: Mapping[str, float]) -> list[Steps]:
    """Return the step rewards of each run, or an empty list if no single turn was rewarded.

    `overrides` maps run ids to rewards of whole runs, which replace all recorded rewards.
    """
    judged = [facts for facts in runs if facts.run_id not in overrides]
    if not any(turn is not None for facts in judged for *_, turn in facts.rewards):
        return []
    return [
        Steps(facts.turns, {facts.turns - 1: overrides[facts.run_id]})
        if facts.run_id in overrides
        else _steps_of(facts)
        for facts in runs
    ]


def first_missing_turn(facts: RunFacts) -> int | None:
    """Return the first rewarded turn that the run does not have."""
    turns = (turn for *_, turn in facts.rewards if turn is not None)
    return next((turn for turn in turns if not 0 <= turn < facts.turns), None)


def _steps_of(facts: RunFacts) -> Steps:
    """Sum the rewards of a run by turn. Rewards for the whole run count at its last turn."""
    by_turn: dict[int, float] = {}
    for _, _, value, turn in facts.rewards:
        index = facts.turns - 1 if turn is None else turn
        by_turn[index] = by_turn.get(index, 0.0) + value
    return Steps(facts.turns, by_turn)
