"""Packed attention: attention of transformers' models within each of several packed sequences.

transformers asks the function that is registered under `PACKED` for its masks, and gives them to
the one that attends. The masks are those of the family itself (causal, sliding, in chunks), each
computed for one sequence, from position 0. So a sequence cannot see its neighbours, and meets the
same borders as alone. Plain causal attention uses torch's fused kernel without a mask. Used by
passes.py, which tests that it is right for a model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from itertools import groupby
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)

PACKED = "cray_agents_packed"
_LENGTHS: ContextVar[tuple[int, ...]] = ContextVar("lengths of the packed sequences")


@dataclass(frozen=True)
class PackedMask:
    """The lengths of packed sequences, and for each length what a token may see.

    `masks`: [length, length] bool, True: may see. None is plain causal.
    """

    lengths: tuple[int, ...]
    masks: dict[int, torch.Tensor | None]

    def of(self, number: int) -> "PackedMask":
        """Return the mask of one of the sequences."""
        return PackedMask((self.lengths[number],), self.masks)


def register() -> None:
    """Make `PACKED` known to transformers; again, nothing changes."""
    from transformers import AttentionInterface, AttentionMaskInterface

    AttentionInterface.register(PACKED, attend)
    AttentionMaskInterface.register(PACKED, packed_mask)


@contextmanager
def packed(lengths: Sequence[int]) -> Iterator[None]:
    """Let masks that are made within the context be of sequences of these lengths."""
    token = _LENGTHS.set(tuple(lengths))
    try:
        yield
    finally:
        _LENGTHS.reset(token)


def packed_mask(
    *, mask_function: Callable[..., Any], use_vmap: bool = False, device: Any = None, **_: Any
) -> PackedMask:
    """Return the mask of the packed sequences; transformers calls it once for a type of layer.

    `mask_function` says by (batch, head, query, key) indices who sees whom, without packing.
    """
    from transformers.masking_utils import causal_mask_function

    lengths = _LENGTHS.get()
    masks: dict[int, torch.Tensor | None] = dict.fromkeys(lengths)
    if mask_function is causal_mask_function:
        return PackedMask(lengths, masks)
    # made once for the longest: a shorter sequence sees the same of its own beginning
    place = torch.arange(max(lengths), device=device)
    zero = torch.zeros((), dtype=torch.long, device=device)
    if use_vmap:
        over_keys = torch.vmap(mask_function, (None, None, None, 0))
        whole = torch.vmap(over_keys, (None, None, 0, None))(zero, zero, place, place)
    else:
        whole = mask_function(zero[None, None], zero[None, None], place[:, None], place[None])
    whole = whole.expand(len(place), len(place))
    causal = place[:, None] >= place[None]
    differs = (whole != causal).any(1).cumsum(0) > 0
    plain_up_to = int((~differs).sum())  # tokens that see all before them
    for length in set(lengths):
        masks[length] = None if length <= plain_up_to else whole[:length, :length]
    return PackedMask(lengths, masks)


def attend(
    module: torch.nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: PackedMask | None,
    scaling: float | None = None,
    softcap: float | None = None,
    s_aux: torch.Tensor | None = None,
    **_: Any,
) -> tuple[torch.Tensor, None]:
    """Attend within the packed sequences of [1, heads, tokens, size]; return [1, tokens, ...].

    Keys may have fewer heads. `softcap` bounds the scores (arXiv 2408.00118), and `s_aux` [heads]
    are sinks: scores of a key without a value (arXiv 2309.17453).
    """
    if not isinstance(attention_mask, PackedMask):
        raise TypeError(f"{type(module).__name__} attends without a mask of packed sequences")
    if s_aux is None:
        s_aux = getattr(module, "sinks", None)
    alike = [(length, len(list(each))) for length, each in groupby(attention_mask.lengths)]
    sizes = [length * number for length, number in alike]
    split = (torch.split(t[0], sizes, 1) for t in (query, key, value))
    out = []
    for (length, _), *tensors in zip(alike, *split, strict=True):
        # [heads, n length, size] -> [n, heads, length, size]
        q, k, v = (t.unflatten(1, (-1, length)).transpose(0, 1) for t in tensors)
        mask = attention_mask.masks[length]
        if softcap is None and s_aux is None:
            attended = F.scaled_dot_product_attention(
                q,
                k,
                v,
                attn_mask=mask,
                is_causal=mask is None,
                scale=scaling,
                enable_gqa=q.shape[1] != k.shape[1],
            )
        else:
            attended = _attend_by_scores(q, k, v, mask, scaling, softcap, s_aux)
        out.append(attended.transpose(1, 2).flatten(0, 1))  # [n length, heads, size]
    return (torch.cat(out) if len(out) > 1 else out[0])[None], None


def _attend_by_scores(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    mask: torch.Tensor | None,
    scale: float | None,
    softcap: float | None,
    sinks: torch.Tensor | None,
) -> torch.Tensor:
    """Attend over [n, heads, length, size] with bounded scores and sinks, which no kernel has."""
    groups, length = query.shape[1] // key.shape[1], query.shape[2]
    if groups > 1:
        key, value = (t.repeat_interleave(groups, 1) for t in (key, value))
    scores = query @ key.transpose(2, 3) * (query.shape[-1] ** -0.5 if scale is None else scale)
    if softcap is not None:
        scores = (scores / softcap).tanh() * softcap
    if mask is None:
        mask = torch.ones(length, length, dtype=torch.bool, device=query.device).tril()
    scores = scores.float().masked_fill(~mask, -torch.inf)
    if sinks is not None:
        sink = sinks.float().reshape(1, -1, 1, 1).expand(len(scores), -1, length, 1)
        return torch.cat([scores, sink], -1).softmax(-1)[..., :-1].to(value.dtype) @ value
    return scores.softmax(-1).to(value.dtype) @ value
