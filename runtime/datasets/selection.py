"""Whether a run may be trained on: first by what the index knows, then by its tokens.

A Candidate goes from `judge` (no body is read) to a method (methods.py: which of a task's runs are
wanted), which asks for its `samples`, and `keep`s them. Whoever refuses it says why, once; the
reasons are listed in considered.py. Bodies are read a few dozen at a time, and only their tokens
are kept. Called by making.py.
"""

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.queries import DatasetRecipe
from cray_agents.records import UNSCORED, ModelCall, Run, by_givers, reward_by
from cray_agents.runtime.datasets.advantages import turn_beyond
from cray_agents.runtime.datasets.considered_runs import ConsideredRun
from cray_agents.runtime.datasets.decontamination import BlockedTexts, Match
from cray_agents.runtime.datasets.demonstrations import Renderer
from cray_agents.runtime.datasets.near_duplicates import KeptSamples, Repeat
from cray_agents.runtime.datasets.run_samples import TokenSample, merge_turns, turn_of
from cray_agents.runtime.datasets.sample_weights import Balance
from cray_agents.runtime.datasets.token_shards import SampleRow
from cray_agents.runtime.datasets.uses import Uses
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.branch_choice import by_request
from cray_agents.runtime.store.index import RunFacts

AHEAD = 64  # runs whose bodies are read at once


@dataclass(slots=True, eq=False)
class CandidateRun:
    """A run on its way in. `reason` says why it was left out; `scored`: its reward counts."""

    facts: RunFacts
    reward: float | None
    scored: bool = False
    reason: str | None = None
    detail: str | None = None
    gone: bool = False  # forgotten since it was found: nothing is said of it any more
    match: Match | None = None
    repeats: Repeat | None = None
    rows: list[SampleRow] = field(default_factory=list)

    def refuse(self, reason: str, detail: str | None = None) -> None:
        """Leave it out; the first reason stays."""
        if self.reason is None:
            self.reason, self.detail, self.rows = reason, detail, []

    @property
    def value(self) -> float:
        """The reward, of one that has it."""
        return self.reward or 0.0

    def line(self) -> ConsideredRun:
        """What runs.parquet says of it."""
        return ConsideredRun(
            self.facts.run_id,
            self.facts.task,
            self.facts.generation,
            self.facts.attempt,
            self.reward,
            self.reason is None,
            self.reason,
            self.detail,
            len(self.rows),
        )


class Body(NamedTuple):
    """What is kept of a run that was read: its samples, or why there are none."""

    samples: list[TokenSample]
    metadata: dict[str, Any]
    reason: str | None = None
    detail: str | None = None
    match: Match | None = None


@dataclass
class Selection:
    """What judging needs. `seen` and `balance` are filled by what is kept."""

    store: Store
    recipe: DatasetRecipe
    held: BlockedTexts
    uses: Uses
    renderer: Renderer | None
    seen: KeptSamples
    balance: Balance
    _bodies: dict[str, Body | None] = field(default_factory=dict)

    @property
    def least(self) -> float:
        """The reward from which on a run is good enough: to be imitated, to be desirable."""
        return 1.0 if self.recipe.min_reward is None else self.recipe.min_reward

    def judge(self, facts: RunFacts) -> CandidateRun:
        """All that can be said of a run without its body."""
        given = (self.recipe.rewards or {}).get(facts.run_id)
        rewarded, facts = facts.reward is not None, self._counted(facts)
        reward = facts.reward if given is None else given
        candidate = CandidateRun(facts, reward)
        if facts.split not in (None, "train"):
            candidate.refuse("held_out", facts.split)
        elif facts.infrastructure:
            candidate.refuse("infrastructure_error", facts.error)
        elif facts.error == UNSCORED:
            candidate.refuse("reward_error")
        elif reward is None:
            detail = "from nobody whom the recipe names as a giver" if rewarded else None
            candidate.refuse("no_reward", detail)
        elif _silent(facts):
            candidate.refuse("empty", "nothing was sampled" if facts.calls else "no turn")
        elif self.recipe.method == "grpo" and given is None and turn_beyond(facts) is not None:
            candidate.refuse("no_such_turn", f"{turn_beyond(facts)} of {facts.turns}")
        else:
            candidate.scored = True
            self._judge_scored(candidate)
        return candidate

    def _counted(self, facts: RunFacts) -> RunFacts:
        """The run with the rewards of those givers that the recipe names."""
        if self.recipe.givers is None or not facts.given:
            return facts
        reward = reward_by(facts.reward, facts.given, self.recipe.givers)
        return facts._replace(reward=reward, rewards=by_givers(facts.given, self.recipe.givers))

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
        """Read the bodies of these ahead, and forget those that were read before."""
        wanted = [c.facts.run_id for c in candidates if c.reason is None]
        self._bodies = dict.fromkeys(wanted)
        for run in self.store.whole(wanted):
            self._bodies[run.id] = self._body(run)

    def samples(self, candidate: CandidateRun) -> list[TokenSample]:
        """A candidate's samples; none, and it is refused, if it cannot be trained on."""
        run_id = candidate.facts.run_id
        if run_id not in self._bodies:
            self._bodies[run_id] = next(map(self._body, self.store.whole([run_id])), None)
        body = self._bodies[run_id]
        if body is None:
            self._refuse_unread(candidate)
            return []
        if body.reason is not None:
            candidate.match = body.match
            candidate.refuse(body.reason, body.detail)
        return body.samples

    def keep(self, candidate: CandidateRun, **about: Any) -> bool:
        """Take a candidate in, but for those of its samples that were there before."""
        samples = self.samples(candidate)
        if not samples:
            return False
        fresh, repeat = self.seen.fresh(candidate.facts.run_id, samples)
        if repeat is not None and not fresh:
            candidate.repeats = repeat
            candidate.refuse(repeat.reason, repeat.detail)
            return False
        self.take(candidate, fresh, **about)
        return True

    def take(
        self,
        candidate: CandidateRun,
        samples: Iterable[TokenSample],
        turns: Sequence[float] | None = None,
        **about: Any,
    ) -> None:
        """Make rows of samples. `about`: fields of Row; `turns`: the advantages of its turns."""
        facts = candidate.facts
        body = self._bodies[facts.run_id]
        about["balance"] = self.balance.group_of(body.metadata if body else {})
        candidate.rows = [
            SampleRow(sample, facts.run_id, facts.task or "", candidate.value, **about)
            for sample in samples
        ]
        if turns is not None:
            candidate.rows = [_by_turn(row, turns) for row in candidate.rows]

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
        """A run's samples, or what is wrong with them."""
        metadata = run.task.metadata if run.task else {}
        fault = _token_fault(run)
        if fault is not None:
            return Body([], metadata, *fault)
        match = self.held.match_run(run)
        if match is not None:
            return Body([], metadata, "contaminated", match.told, match)
        if run.calls:
            samples = merge_turns(map(turn_of, run.calls))
        else:
            try:
                samples = self._render(run)
            except BadInput as error:
                return Body([], metadata, "not_renderable", str(error))
        longest = max(len(sample.input_ids) for sample in samples)
        if too_long(longest, self.recipe):
            return Body([], metadata, "too_long", f"{longest} tokens")
        return Body(samples, metadata)

    def _render(self, run: Run) -> list[TokenSample]:
        """What was imported, as the model would have said it. Raises BadInput."""
        if self.renderer is None:
            raise BadInput("there is no tokenizer to render it with", param="tokenizer")
        return self.renderer.samples(run.trajectory.messages, run.trajectory.tools)


def _by_turn(row: SampleRow, turns: Sequence[float]) -> SampleRow:
    each = row.sample.by_span(turns)
    tokens = [span.tokens for span in row.sample.spans]
    mean = math.fsum(n * value for n, value in zip(tokens, each, strict=True)) / row.sample.trained
    return row._replace(advantage=mean, advantages=each)


def too_long(tokens: int, recipe: DatasetRecipe) -> bool:
    """Whether a sample of so many tokens is left out."""
    return recipe.max_tokens is not None and tokens > recipe.max_tokens


def _silent(facts: RunFacts) -> bool:
    """Whether nothing was sampled. Tokens that are missing are another matter."""
    if facts.imported is not None:
        return False
    if not facts.calls:
        return not facts.turns
    asked = facts.calls >= facts.turns and facts.prompt_tokens > 0 and not facts.redacted
    return asked and not facts.sampled_tokens


def _token_fault(run: Run) -> tuple[str, str | None] | None:
    """Why a run's tokens cannot be trained on, and which call's."""
    calls = run.calls
    if run.imported is not None and not calls:
        return None
    missing = next((t.call_id for t in run.trajectory.turns if t.call is None), None)
    if missing is not None:
        return "missing_call", missing
    redacted = next((c for c in calls if c.redacted and not c.token_ids), None)
    if redacted is not None:
        return "redacted", ", ".join(sorted({found.kind for found in redacted.redacted}))
    if not any(c.token_ids for c in calls) and all(c.prompt_token_ids for c in calls):
        return "empty", "nothing was sampled" if calls else "no turn"
    return _call_fault(calls)


def _call_fault(calls: Sequence[ModelCall]) -> tuple[str, str] | None:
    for choices in by_request(calls):
        if len(choices) > 1:
            return "ambiguous_choices", f"{len(choices)} of {choices[0].id}"
    for call in calls:
        if not (call.token_ids and call.prompt_token_ids):
            return "no_tokens", call.id
        if len(call.logprobs) != len(call.token_ids):
            return "no_logprobs", call.id
    return None
