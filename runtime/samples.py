"""From turns to training sequences: the tokens that were sampled, never a text tokenised again.

Called by datasets.py for recorded runs and by demonstrations.py for conversations to imitate.
"""

from collections.abc import Iterable
from dataclasses import dataclass, field

from cray_agents.records import ModelCall, Sample


@dataclass
class TokenTurn:
    """One model call as tokens. `logprobs` is parallel to `sampled`."""

    prompt: list[int]
    sampled: list[int]
    logprobs: list[float]


@dataclass
class _Sequence:
    """Three parallel lists: [tokens]."""

    input_ids: list[int] = field(default_factory=list)
    loss_mask: list[int] = field(default_factory=list)
    logprobs: list[float] = field(default_factory=list)

    def context(self, tokens: list[int]) -> None:
        self.input_ids += tokens
        self.loss_mask += [0] * len(tokens)
        self.logprobs += [0.0] * len(tokens)

    def sampled(self, turn: TokenTurn) -> None:
        self.input_ids += turn.sampled
        self.loss_mask += [1] * len(turn.sampled)
        self.logprobs += turn.logprobs


def merge_turns(turns: Iterable[TokenTurn]) -> list[Sample]:
    """One sample for turns that extend each other, a further one where the prefix breaks.

    A turn extends the sequence when its prompt starts with all of it: then only what the prompt
    adds is new context (mask 0), and the sampled tokens are trained on (mask 1). A chat template
    that renders an earlier turn differently breaks the prefix, and a new sequence starts.
    """
    sequences: list[_Sequence] = []
    for turn in turns:
        length = len(sequences[-1].input_ids) if sequences else 0
        if not sequences or turn.prompt[:length] != sequences[-1].input_ids:
            sequences.append(_Sequence())
            length = 0
        sequences[-1].context(turn.prompt[length:])
        sequences[-1].sampled(turn)
    return [
        Sample(input_ids=s.input_ids, loss_mask=s.loss_mask, logprobs=s.logprobs) for s in sequences
    ]


def turn_of(call: ModelCall) -> TokenTurn:
    """A recorded call as a turn."""
    return TokenTurn(call.prompt_token_ids, call.token_ids, call.logprobs)
