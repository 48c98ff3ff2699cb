"""From turns to training sequences: the tokens that were sampled, never a text tokenised again.

Called by selection.py for recorded runs and by demonstrations.py for conversations to imitate.
token_shards.py writes what comes of it.
"""

import math
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple

from cray_agents.records import ModelCall

GREEDY = 1e-5  # temperatures below it are 0 to vLLM

#: Options that change the distribution beyond its temperature -> values that do not; nor does null
SHAPING: dict[str, tuple[Any, ...]] = {
    "top_p": (1,),
    "top_k": (0, -1),
    "min_p": (0,),
    "presence_penalty": (0,),
    "frequency_penalty": (0,),
    "repetition_penalty": (1,),
    "logit_bias": ({},),
    "min_tokens": (0,),
    "bad_words": ([],),
    "allowed_token_ids": (),
    "thinking_token_budget": (),
    "watermarking": (False,),
    "use_beam_search": (False,),
    "structured_outputs": (),
    "response_format": ({"type": "text"},),
    "text": ({}, {"format": {"type": "text"}}),
    "output_format": (),
    "output_config": ({},),
    "tool_choice": ("auto", "none", {"type": "auto"}, {"type": "none"}),
    "vllm_xargs": ({},),
}


def temperature_of(sampling: Mapping[str, Any]) -> float | None:
    """The temperature of a request: 1 where it says none, 0 where it is greedy, None if no number.

    What was imported may say anything.
    """
    given = sampling.get("temperature")
    if given is None:
        return 1.0
    if not isinstance(given, int | float) or not math.isfinite(given):
        return None
    return 0.0 if given < GREEDY else float(given)


def is_shaped(sampling: Mapping[str, Any]) -> bool:
    """Whether more than the temperature decided what could be sampled."""
    given = ((name, sampling.get(name)) for name in SHAPING)
    return any(value is not None and value not in SHAPING[name] for name, value in given)


def is_held(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Whether a tool is `strict`: the server then holds its arguments to a grammar."""
    return any(tool.get("strict") or (tool.get("function") or {}).get("strict") for tool in tools)


CONTEXT = -1  # the version of a token that no version sampled


class TokenTurn(NamedTuple):
    """One model call as tokens. `logprobs` is parallel to `sampled`; `version` is `name@N`.

    `seams`: from which sampled token on another version sampled. `shaped`: more than the
    temperature decided what could be sampled (sampling.py), or, after a seam, what stands before it
    was read under other weights: the trainer would not find the same log-probabilities.
    """

    prompt: Sequence[int]
    sampled: Sequence[int]
    logprobs: Sequence[float]
    version: str = ""
    temperature: float | None = None  # None: nothing was sampled, or not known how
    shaped: bool = False
    seams: Sequence[tuple[int, str]] = ()


class Span(NamedTuple):
    """So many tokens in a row: trained on (1) or not, and the place of their version."""

    tokens: int
    trained: int
    version: int = CONTEXT


@dataclass(slots=True)
class TokenSample:
    """One training sequence. `input_ids` and `logprobs` are parallel: [tokens], int32, float32.

    `spans` cover them; `turns` are those that the trained spans are of, counted from 0 in the whole
    run; `versions` are those that sampled, in order of their first token, and `temperatures`
    theirs. A rendered demonstration was sampled by none.
    """

    input_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    spans: list[Span] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    temperatures: set[float | None] = field(default_factory=set)
    shaped: bool = False
    turns: list[int] = field(default_factory=list)

    @property
    def temperature(self) -> float | None:
        """At which all of it was sampled; None: nothing was, or at several, or not known."""
        return next(iter(self.temperatures)) if len(self.temperatures) == 1 else None

    @property
    def trained(self) -> int:
        """How many tokens are trained on."""
        return sum(span.tokens for span in self.spans if span.trained)

    @property
    def loss_mask(self) -> list[int]:
        """[tokens]; 1: trained on."""
        return list(chain.from_iterable(repeat(s.trained, s.tokens) for s in self.spans))

    @property
    def version_index(self) -> list[int]:
        """[tokens]; places in `versions`, -1 where nothing was sampled."""
        return list(chain.from_iterable(repeat(s.version, s.tokens) for s in self.spans))

    @property
    def prompt(self) -> "array[int]":
        """What stands before the first token that is trained on."""
        first = self.spans[0]
        return self.input_ids[: 0 if first.trained else first.tokens]

    def by_span(self, turns: Sequence[float]) -> tuple[float, ...]:
        """A number for each span, from those of the run's turns; 0 for what is not trained on."""
        trained = iter(self.turns)
        return tuple(turns[next(trained)] if span.trained else 0.0 for span in self.spans)

    def by_version(self) -> dict[str, int]:
        """Trained tokens of each version."""
        found: dict[str, int] = {}
        for span in self.spans:
            if span.trained and span.version != CONTEXT:
                name = self.versions[span.version]
                found[name] = found.get(name, 0) + span.tokens
        return found

    def _add_context(self, tokens: "array[int]") -> None:
        if tokens:
            self.input_ids += tokens
            self.logprobs.frombytes(bytes(4 * len(tokens)))
            self.spans.append(Span(len(tokens), 0))

    def _add_sampled(self, turn: TokenTurn, number: int) -> None:
        self.input_ids += array("i", turn.sampled)
        self.logprobs += array("f", turn.logprobs)
        parts = [(0, turn.version), *turn.seams, (len(turn.sampled), "")]
        for (start, version), (end, _) in pairwise(parts):
            self.spans.append(Span(end - start, 1, self._place(version)))
            self.turns.append(number)
        self.temperatures.add(turn.temperature)
        self.shaped = self.shaped or turn.shaped

    def _place(self, version: str) -> int:
        if not version:
            return CONTEXT
        if version not in self.versions:
            self.versions.append(version)
        return self.versions.index(version)


def merge_turns(turns: Iterable[TokenTurn]) -> list[TokenSample]:
    """One sample for turns that extend each other, a further one where the prefix breaks.

    A turn extends the sequence when its prompt starts with all of it: then only what the prompt
    adds is new context (mask 0), and the sampled tokens are trained on (mask 1). A chat template
    that renders an earlier turn differently breaks the prefix, and a new sequence starts.
    """
    found: list[TokenSample] = []
    for number, turn in enumerate(turns):
        prompt = array("i", turn.prompt)
        length = len(found[-1].input_ids) if found else 0
        if not found or prompt[:length] != found[-1].input_ids:
            found.append(TokenSample())
            length = 0
        found[-1]._add_context(prompt[length:])
        found[-1]._add_sampled(turn, number)
    return found


def turn_of(call: ModelCall) -> TokenTurn:
    """A recorded call as a turn."""
    return TokenTurn(
        call.prompt_token_ids,
        call.token_ids,
        call.logprobs,
        call.model,
        temperature_of(call.sampling),
        is_shaped(call.sampling) or is_held(call.tools) or bool(call.seams),
        [(seam.at, seam.model) for seam in call.seams],
    )
