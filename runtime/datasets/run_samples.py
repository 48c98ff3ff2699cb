"""Run samples: merge the turns of a run into training sequences of the sampled tokens.

No text is tokenised again. Called by selection.py for recorded runs and by demonstrations.py for
conversations to imitate. token_shards.py writes the samples.
"""

import base64
import math
import zlib
from array import array
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from itertools import chain, pairwise, repeat
from typing import Any, NamedTuple

from cray_agents.records import ModelCall
from cray_agents.runtime.store.assembly import CUT

GREEDY = 1e-5  # vLLM treats lower temperatures as 0

#: Options that reshape the distribution -> values without effect (null has none, either).
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
    """Return the temperature of a request: 1 by default, 0 if greedy.

    Returns None if it is not a number, which can happen in imported runs.
    """
    value = sampling.get("temperature")
    if value is None:
        return 1.0
    if not isinstance(value, int | float) or not math.isfinite(value):
        return None
    return 0.0 if value < GREEDY else float(value)


def is_shaped(sampling: Mapping[str, Any]) -> bool:
    """Tell whether an option other than the temperature reshaped the distribution."""
    options = ((name, sampling.get(name)) for name in SHAPING)
    return any(value is not None and value not in SHAPING[name] for name, value in options)


def has_strict_tool(tools: Sequence[Mapping[str, Any]]) -> bool:
    """Tell whether a tool is `strict`: the server then forces its arguments into a grammar."""
    return any(tool.get("strict") or (tool.get("function") or {}).get("strict") for tool in tools)


CONTEXT = -1  # the version index of tokens that no version sampled


class TokenTurn(NamedTuple):
    """One model call as tokens. `logprobs` is parallel to `sampled`; `version` is `name@N`.

    `seams` are (first sampled token, version) of each change of version. `shaped` means that an
    option other than the temperature reshaped the distribution, or that there are seams. After a
    seam, earlier tokens had been read under other weights. In both cases the trainer would compute
    other log-probabilities.
    """

    prompt: Sequence[int]
    sampled: Sequence[int]
    logprobs: Sequence[float]
    version: str = ""
    temperature: float | None = None  # None: nothing was sampled, or the temperature is unknown
    shaped: bool = False
    seams: Sequence[tuple[int, str]] = ()
    routes: bytes = b""  # 16 bits an expert, of all tokens but the last; empty: unknown
    route_width: int = 0  # bytes of a token


class Span(NamedTuple):
    """A run of tokens: their number, trained on (1) or not, and the index of their version."""

    tokens: int
    trained: int
    version: int = CONTEXT


@dataclass(slots=True)
class TokenSample:
    """One training sequence. `input_ids` and `logprobs` are parallel: [tokens], int32, float32.

    `spans` cover all tokens. `turns` has the turn of each trained span, counted from 0 in the whole
    run. `versions` sampled the tokens, in order of their first token, at `temperatures`. A rendered
    demonstration has no versions. `losses` names what its conversation has and the tokens lack.
    `routed` has the routes of tokens from a place on, `route_width` bytes each.
    """

    input_ids: "array[int]" = field(default_factory=lambda: array("i"))
    logprobs: "array[float]" = field(default_factory=lambda: array("f"))
    spans: list[Span] = field(default_factory=list)
    versions: list[str] = field(default_factory=list)
    temperatures: set[float | None] = field(default_factory=set)
    shaped: bool = False
    turns: list[int] = field(default_factory=list)
    losses: set[str] = field(default_factory=set)
    routed: list[tuple[int, bytes]] = field(default_factory=list)
    route_width: int = 0

    @property
    def routes(self) -> bytes | None:
        """The experts of each token, 16 bits each, 0xffff where unknown; None: none is known."""
        whole = bytearray(b"\xff" * (self.route_width * len(self.input_ids)))
        for start, rows in self.routed:
            whole[start * self.route_width : start * self.route_width + len(rows)] = rows
        return bytes(whole) or None

    @property
    def temperature(self) -> float | None:
        """The single sampling temperature, or None if there are none, several or unknown ones."""
        return next(iter(self.temperatures)) if len(self.temperatures) == 1 else None

    @property
    def trained(self) -> int:
        """The number of tokens trained on."""
        return sum(span.tokens for span in self.spans if span.trained)

    @property
    def loss_mask(self) -> list[int]:
        """The loss mask: [tokens], 1 if trained on."""
        return list(chain.from_iterable(repeat(s.trained, s.tokens) for s in self.spans))

    @property
    def version_index(self) -> list[int]:
        """The indexes into `versions`: [tokens], -1 if not sampled."""
        return list(chain.from_iterable(repeat(s.version, s.tokens) for s in self.spans))

    @property
    def prompt(self) -> "array[int]":
        """The tokens before the first one trained on."""
        first = self.spans[0]
        return self.input_ids[: 0 if first.trained else first.tokens]

    def by_span(self, turns: Sequence[float]) -> tuple[float, ...]:
        """Return each span's value, given values by turn; 0.0 for spans not trained on."""
        trained = iter(self.turns)
        return tuple(turns[next(trained)] if span.trained else 0.0 for span in self.spans)

    def by_version(self) -> dict[str, int]:
        """Count the trained tokens of each version."""
        counts: dict[str, int] = {}
        for span in self.spans:
            if span.trained and span.version != CONTEXT:
                name = self.versions[span.version]
                counts[name] = counts.get(name, 0) + span.tokens
        return counts

    def _add_context(self, tokens: "array[int]") -> None:
        if tokens:
            self.input_ids += tokens
            self.logprobs.frombytes(bytes(4 * len(tokens)))
            self.spans.append(Span(len(tokens), 0))

    def _add_sampled(self, turn: TokenTurn, number: int) -> None:
        self.input_ids += array("i", turn.sampled)
        self.logprobs += array("f", turn.logprobs)
        seams = [(0, turn.version), *turn.seams, (len(turn.sampled), "")]
        for (start, version), (end, _) in pairwise(seams):
            self.spans.append(Span(end - start, 1, self._version_index(version)))
            self.turns.append(number)
        self.temperatures.add(turn.temperature)
        self.shaped = self.shaped or turn.shaped

    def _add_routes(self, turn: TokenTurn, before: int) -> None:
        """Take a turn's routes from the last token on that was there before it."""
        start = max(0, before - 1)
        rows = turn.routes[start * turn.route_width :]
        if rows and self.route_width in (0, turn.route_width):
            self.route_width = turn.route_width
            self.routed.append((start, rows))

    def _version_index(self, version: str) -> int:
        if not version:
            return CONTEXT
        if version not in self.versions:
            self.versions.append(version)
        return self.versions.index(version)


def merge_calls(calls: Sequence[ModelCall]) -> list[TokenSample]:
    """Merge the calls of a run but those that were cut off and lack tokens or logprobs."""
    return merge_turns(turn_of(call) if is_exact(call) else None for call in calls)


def is_exact(call: ModelCall) -> bool:
    """Tell whether all tokens that a call read and sampled are known, with their logprobs."""
    sampled = bool(call.token_ids and call.prompt_token_ids)
    return sampled and len(call.logprobs) == len(call.token_ids)


def find_inexact(calls: Sequence[ModelCall]) -> ModelCall | None:
    """Return a call without which a run cannot be trained on, though its tokens are not known."""
    whole = [call for call in calls if call.finish_reason not in CUT or is_exact(call)]
    return next((call for call in whole or calls if not is_exact(call)), None)


def merge_turns(turns: Iterable[TokenTurn | None]) -> list[TokenSample]:
    """Merge turns that extend each other into one sample. Start another if the prefix breaks.

    A turn extends the sequence if its prompt starts with the whole sequence. Then the rest of the
    prompt is new context (mask 0), and the sampled tokens are trained on (mask 1). A chat template
    that renders an earlier turn differently breaks the prefix, and a new sequence starts. A turn
    that is None is left out.
    """
    samples: list[TokenSample] = []
    for number, turn in enumerate(turns):
        if turn is None:
            continue
        prompt = array("i", turn.prompt)
        length = len(samples[-1].input_ids) if samples else 0
        if not samples or prompt[:length] != samples[-1].input_ids:
            samples.append(TokenSample())
            length = 0
        samples[-1]._add_context(prompt[length:])
        samples[-1]._add_sampled(turn, number)
        samples[-1]._add_routes(turn, length)
    return samples


def losses_of(samples: Iterable[TokenSample]) -> str | None:
    """Return what the conversation of these samples has and their tokens lack, as one text."""
    return ", ".join(sorted({loss for sample in samples for loss in sample.losses})) or None


def turn_of(call: ModelCall) -> TokenTurn:
    """Convert a recorded call to a turn."""
    routes = call.routes
    return TokenTurn(
        call.prompt_token_ids,
        call.token_ids,
        call.logprobs,
        call.model,
        temperature_of(call.sampling),
        is_shaped(call.sampling) or has_strict_tool(call.tools) or bool(call.seams),
        [(seam.at, seam.model) for seam in call.seams],
        b"" if routes is None else zlib.decompress(base64.b64decode(routes.data)),
        0 if routes is None else 2 * routes.layers * routes.experts,
    )
