"""Selection: decide on each run, first by the facts in the index, then by its tokens.

`judge` makes a CandidateRun without reading its body. A method (methods.py) then chooses among the
runs of a task; it requests their `samples` and calls `keep`. A refusal names one of the reasons in
considered_runs.py. Bodies are read a few dozen at a time, and only their tokens are kept. Called by
build.py.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.queries import DatasetRecipe
from cray_agents.records import (
    CONTROL_TOKENS,
    EVALUATION,
    UNSCORED,
    ModelCall,
    Run,
    reward_of_givers,
    rewards_of_givers,
)
from cray_agents.runtime.datasets.advantages import first_missing_turn
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
