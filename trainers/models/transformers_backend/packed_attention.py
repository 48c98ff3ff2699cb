"""Packed attention: attention of transformers' models within each of several packed sequences.

transformers asks the function that is registered under `PACKED` for its masks, and gives them to
the one that attends. The masks are those of the family itself (causal, sliding, in chunks), each
computed for one sequence, from position 0. So a sequence cannot see its neighbours, and meets the
same borders as alone. Plain causal attention uses torch's fused kernel without a mask. On GPUs one
FlashAttention kernel attends within all sequences, with sliding windows and sinks: nothing is as
large as a sequence's square. Used by passes.py, which tests that it is right for a model.
"""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, replace
from functools import cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)

from cray_agents.trainers.models.attention import send
from cray_agents.trainers.models.layer_choice import varlen_obstacle
from cray_agents.trainers.models.model import LENGTHS, difference

PACKED = "cray_agents_packed"
_LENGTHS: ContextVar[tuple[int, ...]] = ContextVar("lengths of the packed sequences")


@dataclass(frozen=True)
class PackedMask:
    """The lengths of packed sequences, and what a token may see of its own one.

    `window`: itself and so many tokens before it; None: all before it. `whole`, if neither is so:
    [longest, longest] bool, True: may see. In sequences of up to `plain` tokens all see all before.
    """

    lengths: tuple[int, ...]
    window: int | None = None
    whole: torch.Tensor | None = None
    plain: int = 0

    def of(self, number: int) -> "PackedMask":
        """Return the mask of one of the sequences."""
        return replace(self, lengths=(self.lengths[number],))

    def of_length(self, length: int, device: torch.device) -> torch.Tensor | None:
        """Return the mask [length, length] of sequences of a length; None is plain causal."""
        if self.whole is not None:
            return None if length <= self.plain else self.whole[:length, :length]
        if self.window is None or length <= self.window + 1:
            return None
        seen = torch.ones(length, length, dtype=torch.bool, device=device)
        return seen.tril_().triu_(-self.window)


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
    *,
    mask_function: Callable[..., Any],
    use_vmap: bool = False,
    device: Any = None,
    local_size: int | None = None,
    **_: Any,
) -> PackedMask:
    """Return the mask of the packed sequences; transformers calls it once for a type of layer.

    `mask_function` says by (batch, head, query, key) indices who sees whom, without packing. With
    `local_size` that is mostly a sliding window, as a short sequence shows.
    """
    from transformers.masking_utils import causal_mask_function

    lengths = _LENGTHS.get()
    if mask_function is causal_mask_function:
        return PackedMask(lengths)
    zero = torch.zeros((), dtype=torch.long, device=device)

    def made(tokens: int) -> tuple[torch.Tensor, torch.Tensor]:
        place = torch.arange(tokens, device=device)
        if use_vmap:
            over_keys = torch.vmap(mask_function, (None, None, None, 0))
            whole = torch.vmap(over_keys, (None, None, 0, None))(zero, zero, place, place)
        else:
            whole = mask_function(zero[None, None], zero[None, None], place[:, None], place[None])
        return whole.expand(tokens, tokens), place[:, None] - place

    longest = max(lengths)
    if local_size is not None and not use_vmap:
        whole, before = made(min(longest, 2 * local_size + 1))
        if bool((whole == ((before >= 0) & (before < local_size))).all()):
            return PackedMask(lengths, window=local_size - 1)
    # made once for the longest: a shorter sequence sees the same of its own beginning
    whole, before = made(longest)
    differs = (whole != (before >= 0)).any(1).cumsum(0) > 0
    return PackedMask(lengths, whole=whole, plain=int((~differs).sum()))


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
    size, kinds = query.shape[-1], (query.shape[1], key.shape[1])
    fits = softcap is None and attention_mask.whole is None and value.shape[-1] == size
    if fits and query.dtype == torch.bfloat16 and flash_works(*kinds, size, query.device):
        kernel = FlashKernel(attention_mask, query.device, scaling)
        packed_tensors = (t[0].transpose(0, 1) for t in (query, key, value))
        return AttentionWithSinks.apply(*packed_tensors, s_aux, kernel)[None], None  # type: ignore[no-untyped-call]
    alike = [(length, len(list(each))) for length, each in groupby(attention_mask.lengths)]
    sizes = [length * number for length, number in alike]
    split = (torch.split(t[0], sizes, 1) for t in (query, key, value))
    out = []
    for (length, _), *tensors in zip(alike, *split, strict=True):
        # [heads, n length, size] -> [n, heads, length, size]
        q, k, v = (t.unflatten(1, (-1, length)).transpose(0, 1) for t in tensors)
        mask = attention_mask.of_length(length, query.device)
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


class FlashKernel:
    """FlashAttention over packed sequences, for a mask without `whole`.

    Tensors are [tokens, heads, size], log-sum-exps [heads, tokens] in float32.
    """

    def __init__(self, mask: PackedMask, device: torch.device, scale: float | None) -> None:
        bounds = send(np.cumsum([0, *mask.lengths]).astype(np.int32), device)
        self._sizes = (bounds, bounds, max(mask.lengths), max(mask.lengths))
        self._causal, self._scale = mask.window is None, scale
        self._window = [-1 if mask.window is None else mask.window, 0]

    def attend(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what is attended to, and the log-sum-exp of each row of scores."""
        several = query.shape[1] != key.shape[1]
        given = (self._causal, self._scale, self._window, several)
        out, lse, _ = torch.ops.torch_attn._varlen_attn(query, key, value, *self._sizes, *given)
        return out, lse

    def gradients(
        self, gradient: torch.Tensor, *saved: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
        """Return the gradients of query, key and value; `saved`: these, output and log-sum-exp."""
        dropout = torch.zeros(2, dtype=torch.uint64, device=gradient.device)  # there is none
        given = (self._causal, dropout, self._scale, self._window)
        dq, dk, dv = torch.ops.torch_attn._varlen_attn_backward(
            gradient, *saved, *self._sizes, *given
        )
        return dq, dk, dv


class AttentionWithSinks(torch.autograd.Function):
    """Attention by a kernel, whose softmax may count one more key a head, its sink, without value.

    With l = log(sum exp s + exp sink), the output is the kernel's times exp(lse - l), which is
    sigmoid(lse - sink). The kernel's backward pass computes p = exp(s - l) and p (dp - do . o):
    with this output and l in place of its own these are the gradients. That of the sink is
    -exp(sink - l) do . o, summed over tokens.
    """

    @staticmethod
    def forward(
        ctx: Any,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        sinks: torch.Tensor | None,
        kernel: FlashKernel,
    ) -> torch.Tensor:
        out, lse = kernel.attend(query, key, value)
        if sinks is not None:
            own, lse = lse, torch.logaddexp(lse, sinks.float()[:, None])
            out = (out * (own - lse).exp().t()[..., None]).to(out.dtype)
        ctx.save_for_backward(query, key, value, out, lse, sinks)
        ctx.kernel = kernel
        return out

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        *saved, sinks = ctx.saved_tensors
        gradient, (*_, out, lse) = gradients[0].contiguous(), saved
        d_sinks = None
        if sinks is not None:
            shares = (sinks.float()[:, None] - lse).exp()
            along = (gradient.float() * out.float()).sum(-1)
            d_sinks = -(shares * along.t()).sum(1).to(sinks.dtype)
        return *ctx.kernel.gradients(gradient, *saved), d_sinks, None


@cache
def flash_works(heads: int, kv_heads: int, size: int, device: torch.device) -> bool:
    """Return True if FlashAttention with a window and sinks is right on a device: it is tried."""
    if device.type != "cuda" or varlen_obstacle("bfloat16", size) is not None:
        return False
    mask, groups, network = PackedMask(LENGTHS, window=5), heads // kv_heads, torch.nn.Module()

    def fast(*tensors: torch.Tensor) -> torch.Tensor:
        kernel = FlashKernel(mask, device, None)
        return AttentionWithSinks.apply(*tensors, kernel)  # type: ignore[no-any-return,no-untyped-call]

    def plain(*tensors: torch.Tensor) -> torch.Tensor:
        query, key, value = (each.float().transpose(0, 1)[None] for each in tensors[:3])
        return attend(network, query, key, value, mask, s_aux=tensors[3])[0][0]

    shapes = [(sum(LENGTHS), count, size) for count in (groups, 1, 1)]
    with torch.enable_grad():
        problem = difference(fast, plain, [*shapes, (groups,)], device)
    if problem is not None:
        print(f"FlashAttention does not work on {device}, a slower one is used: {problem}")
    return problem is None
