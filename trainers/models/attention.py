"""Attention over packed sequences, and a norm, in torch: Megatron has them on CUDA only.

model.py puts them into the layers if Transformer Engine is missing. Nothing here waits for the
device: the lengths of the sequences are numbers of the host. Read next: layer_choice.py for when
which kernel is used, megatron_on_cpu.py for the CPU's other replacements, data/context_parallel.py
for the cut of sequences over ranks.
"""

from collections.abc import Iterator, Sequence
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import numpy.typing as npt
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)

from cray_agents.trainers.data.context_parallel import cut
from cray_agents.trainers.data.samples import Ints
from cray_agents.trainers.models import kernels


class RMSNorm(torch.nn.RMSNorm):
    """RMSNorm with a mark for sequence parallelism, which Megatron's torch norm refuses."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Normalise over the last dimension."""
        if x.is_cpu and x.dtype == torch.float32:
            return kernels.rms_norm(x, self.weight, float(self.eps or 0.0))
        return super().forward(x)


def packed_sequences(
    bounds: npt.NDArray[np.int32],
    device: torch.device,
    shared_tokens: Ints | None = None,
    heads: Ints | None = None,
) -> Any:
    """Return whole sequences' bounds [sequences + 1] as PackedSeqParams of Megatron.

    `shared_tokens` and `heads` [sequences]: see Packed; None: nothing is. What attention needs
    beyond Megatron's own are the attributes `lengths` and `ends` on the host, [sequences], numpy:
    the tokens and the keys of each; `keys`, [all keys]: their places among the tokens, None if they
    are the tokens; `key_bounds`, [sequences + 1]. The rotation finds `shared_tokens` at the bounds.
    """
    from megatron.core.packed_seq_params import PackedSeqParams

    lengths = np.diff(bounds)
    ends = lengths if shared_tokens is None else lengths + shared_tokens
    on_device = send(bounds, device)
    packed = PackedSeqParams(
        qkv_format="thd",
        cu_seqlens_q=on_device,
        cu_seqlens_kv=on_device,
        max_seqlen_q=int(lengths.max()),
        max_seqlen_kv=int(ends.max()),
    )
    packed.lengths, packed.ends, packed.keys = lengths, ends, None
    if shared_tokens is not None and heads is not None and shared_tokens.any():
        places: list[npt.NDArray[Any]] = []
        for place, (head, shared) in enumerate(zip(heads, shared_tokens, strict=True)):
            own = np.arange(bounds[place], bounds[place + 1], dtype=np.int64)
            places.append(np.concatenate([places[head][:shared], own]) if shared else own)
        packed.keys = send(np.concatenate(places), device)
        packed.key_bounds = send(_bounds(ends), device)
        on_device.shared_tokens = send(shared_tokens, device)  # type: ignore[attr-defined]
    return packed


def send(array: npt.NDArray[Any], device: torch.device) -> torch.Tensor:
    """Return an array as a tensor on a device. A GPU's queue takes it up; nobody waits for it."""
    tensor = torch.from_numpy(array)
    return tensor if device.type == "cpu" else tensor.pin_memory().to(device, non_blocking=True)


def token_positions(bounds: torch.Tensor, tokens: int, rank: int, ranks: int) -> torch.Tensor:
    """Return [tokens]: the position in its sequence of each token that `cut` gives to a rank.

    Computed on the device of `bounds` [sequences + 1], which are of the whole sequences, as
    `packed_sequences` makes them.
    """
    shared_tokens = getattr(bounds, "shared_tokens", None)
    bounds = bounds.long()
    place = torch.arange(tokens, device=bounds.device)
    sequence = torch.searchsorted(bounds[1:] // ranks, place, right=True)
    nth = place - bounds[:-1][sequence] // ranks
    if ranks == 1:
        return nth if shared_tokens is None else nth + shared_tokens[sequence]
    chunk = bounds.diff()[sequence] // (2 * ranks)
    return nth + chunk * torch.where(nth < chunk, rank, 2 * (ranks - 1) - rank)


class PackedAttention(torch.nn.Module):
    """Causal attention within each of the packed sequences (`thd`), by torch's fused kernels.

    Sequences lie one after the other in queries, keys and values: [tokens, heads, head size].
    PackedSeqParams are those of `packed_sequences`. With `varlen`, one kernel attends within all
    sequences. The tokens that a sequence left out are keys of its own. With context parallelism a
    rank has the tokens that `cut` selects, and gathers its peers' keys and values.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        varlen: bool = False,
        **_: Any,
    ) -> None:
        super().__init__()
        self.varlen = varlen
        self.scale = softmax_scale
        self.contexts = pg_collection.cp

    def forward(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        attention_mask: torch.Tensor | None = None,
        attn_mask_type: Any = None,
        attention_bias: torch.Tensor | None = None,
        packed_seq_params: Any = None,
    ) -> torch.Tensor:
        """Attend; return [tokens, heads * head size]."""
        packed = packed_seq_params
        if self.contexts.size() > 1:
            return self._from_chunks(query, key, value, packed.lengths)
        shared, lengths = packed.keys is not None, packed.lengths.tolist()
        if shared:
            key, value = (_SharedRows.apply(each, packed.keys) for each in (key, value))  # type: ignore[no-untyped-call]
        if self.varlen:
            bounds, longest = packed.cu_seqlens_q, packed.max_seqlen_q
            keys = (packed.key_bounds, packed.max_seqlen_kv) if shared else None
            return attend_to_all(query, key, value, bounds, longest, self.scale, keys).flatten(1)
        if shared:
            out = list(attend_to_ends(query, key, value, lengths, packed.ends.tolist(), self.scale))
        else:
            out = list(attend_by_length(query, key, value, lengths, self.scale))
        return (torch.cat(out) if len(out) > 1 else out[0]).flatten(1)

    def _from_chunks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Any
    ) -> torch.Tensor:
        """Attend from this rank's two chunks of each sequence to all keys up to their ends.

        Keys and values are gathered whole, as in arXiv 2407.21783, section 3.3.2. In the backward
        pass each rank sums its own tokens' gradients from all ranks.
        """
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        rank, ranks = self.contexts.rank(), self.contexts.size()
        order, chunks, ends = _keys_of_chunks(tuple(lengths.tolist()), rank, ranks)
        both = gather_from_sequence_parallel_region(torch.cat([key, value], 1), group=self.contexts)
        key, value = both.index_select(0, send(order, key.device)).chunk(2, dim=1)
        if self.varlen:
            bounds, of_keys = (send(_bounds(each), key.device) for each in (chunks, ends))
            longest = (int(chunks.max()), int(ends.max()))
            return attend_to_all(
                query, key, value, bounds, longest[0], self.scale, (of_keys, longest[1])
            ).flatten(1)
        out = attend_to_ends(query, key, value, chunks.tolist(), ends.tolist(), self.scale)
        return torch.cat(list(out)).flatten(1)


def takes_shared_prompts(chunks: Sequence[torch.nn.Module]) -> bool:
    """Tell whether the attention of a model's chunks finds keys that a sequence left out."""
    modules = (module for chunk in chunks for module in chunk.modules())
    return any(isinstance(each, PackedAttention) and each.contexts.size() == 1 for each in modules)


def attend_to_all(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    bounds: torch.Tensor,
    longest: int,
    scale: float | None,
    keys: tuple[torch.Tensor, int] | None = None,
) -> torch.Tensor:
    """Attend within all sequences by FlashAttention's kernel for unequal lengths.

    `keys`: bounds and the longest of the keys, if those are more: queries are then the last tokens.
    """
    from torch.nn.attention.varlen import varlen_attn

    of_keys, longest_keys = (bounds, longest) if keys is None else keys
    attended = varlen_attn(
        query,
        key,
        value,
        bounds,
        of_keys,
        longest,
        longest_keys,
        scale=scale,
        window_size=(-1, 0),  # all tokens before, none after
        enable_gqa=query.shape[1] != key.shape[1],
    )
    assert isinstance(attended, torch.Tensor)  # alone, unless more is asked for
    return attended


def attend_to_ends(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    ends: Sequence[int],
    scale: float | None,
) -> Iterator[torch.Tensor]:
    """Attend from the last `lengths` tokens of sequences of `ends` keys, one after the other."""
    split = (torch.split(each, list(ends)) for each in (key, value))
    for q, k, v in zip(torch.split(query, list(lengths)), *split, strict=True):
        mask = None
        if len(q) < len(k):
            mask = torch.ones(len(q), len(k), dtype=torch.bool, device=q.device)
            mask.tril_(len(k) - len(q))
        yield _attend(q[None], k[None], v[None], scale, mask).flatten(0, 1)


class _SharedRows(torch.autograd.Function):
    """Select rows, some of them several times; their gradients are added in float32."""

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, places: torch.Tensor) -> torch.Tensor:
        ctx.save_for_backward(places)
        ctx.count = len(rows)
        return rows.index_select(0, places)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, None]:
        (places,), (gradient,) = ctx.saved_tensors, gradients
        total = gradient.new_zeros((ctx.count, *gradient.shape[1:]), dtype=torch.float32)
        return total.index_add_(0, places, gradient.float()).to(gradient.dtype), None


def attend_by_length(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    lengths: Sequence[int],
    scale: float | None,
) -> Iterator[torch.Tensor]:
    """Attend within whole sequences, one after the other; neighbours of a length share a call."""
    alike = [(length, len(list(group))) for length, group in groupby(lengths)]
    sizes = [length * number for length, number in alike]
    split = (torch.split(tensor, sizes) for tensor in (query, key, value))
    for (length, _), *tensors in zip(alike, *split, strict=True):
        q, k, v = (tensor.unflatten(0, (-1, length)) for tensor in tensors)
        yield _attend(q, k, v, scale).flatten(0, 1)


def _attend(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float | None,
    mask: torch.Tensor | None = None,
) -> torch.Tensor:
    """Attend over [sequences, tokens, heads, size], in and out; causal without a mask."""
    return F.scaled_dot_product_attention(
        query.transpose(1, 2),
        key.transpose(1, 2),
        value.transpose(1, 2),
        attn_mask=mask,
        is_causal=mask is None,
        scale=scale,
        enable_gqa=query.shape[2] != key.shape[2],
    ).transpose(1, 2)


@lru_cache(maxsize=4)
def _keys_of_chunks(lengths: tuple[int, ...], rank: int, ranks: int) -> tuple[Any, Any, Any]:
    """Return of a rank's two chunks of each sequence, one chunk after the other: the places among
    all ranks' tokens of the keys up to its end, [keys]; its tokens; and its keys, [chunks].
    """
    each = np.array(lengths)
    starts = np.cumsum(each) - each
    cuts = [cut(each, other, ranks) for other in range(ranks)]
    order = np.argsort(np.concatenate([starts[sequence] + nth for nth, sequence in cuts]))
    chunks = np.repeat(each // (2 * ranks), 2)
    ends = chunks * np.tile([rank + 1, 2 * ranks - rank], len(each))
    keys = [np.arange(at, at + n) for at, n in zip(np.repeat(starts, 2), ends, strict=True)]
    return order[np.concatenate(keys)], chunks, ends


def _bounds(lengths: Any) -> npt.NDArray[np.int32]:
    return np.cumsum([0, *lengths]).astype(np.int32)
