"""Attention over packed sequences, and a norm, in torch: Megatron has them on CUDA only.

model.py puts them into the layers if Transformer Engine is missing. Read next: cpu_megatron.py for
the CPU's other replacements, data/context_parallel.py for the cut of sequences over ranks.
"""

from collections.abc import Iterator
from functools import lru_cache
from itertools import groupby
from typing import Any

import numpy as np
import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)

from cray_agents.trainers.data.context_parallel import cut
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


class PackedAttention(torch.nn.Module):
    """Causal attention within each of the packed sequences (`thd`), by torch's fused kernel.

    Sequences lie one after the other in queries, keys and values: [tokens, heads, head size].
    `cu_seqlens_q` of the PackedSeqParams are the whole sequences' bounds. With context parallelism
    a rank has the tokens that `cut` selects, and gathers its peers' keys and values.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        pg_collection: Any = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.grouped = config.num_attention_heads != config.num_query_groups
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
        bounds = packed_seq_params.cu_seqlens_q.tolist()
        alone = self.contexts.size() == 1
        attend = self._sequences if alone else self._chunks
        out = [block.flatten(0, 1) for block in attend(query, key, value, np.diff(bounds))]
        return (torch.cat(out) if len(out) > 1 else out[0]).flatten(1)

    def _sequences(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Any
    ) -> Iterator[torch.Tensor]:
        """Attend within whole sequences; neighbours of equal length share a call."""
        alike = [(length, len(list(group))) for length, group in groupby(lengths.tolist())]
        sizes = [length * number for length, number in alike]
        split = (torch.split(tensor, sizes) for tensor in (query, key, value))
        for (length, _), *tensors in zip(alike, *split, strict=True):
            yield self._attend(*(tensor.unflatten(0, (-1, length)) for tensor in tensors))

    def _chunks(
        self, query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, lengths: Any
    ) -> Iterator[torch.Tensor]:
        """Attend from this rank's two chunks of each sequence to all keys up to their ends.

        Keys and values are gathered whole, as in arXiv 2407.21783, section 3.3.2. In the backward
        pass each rank sums its own tokens' gradients from all ranks.
        """
        from megatron.core.tensor_parallel import gather_from_sequence_parallel_region

        rank, ranks = self.contexts.rank(), self.contexts.size()
        order = torch.from_numpy(_order(tuple(lengths.tolist()), ranks)).to(key.device)
        gathered = gather_from_sequence_parallel_region(
            torch.cat([key, value], 1), group=self.contexts
        )
        keys_and_values = torch.split(gathered[order], lengths.tolist())
        halves = np.repeat(lengths // (2 * ranks), 2).tolist()
        queries = iter(torch.split(query, halves))
        for length, both in zip(lengths.tolist(), keys_and_values, strict=True):
            chunk = length // (2 * ranks)
            for place in (rank, 2 * ranks - 1 - rank):
                end = (place + 1) * chunk
                k, v = both[None, :end].chunk(2, dim=2)
                mask = torch.ones(chunk, end, dtype=torch.bool, device=key.device)
                yield self._attend(next(queries)[None], k, v, mask.tril(end - chunk))

    def _attend(
        self,
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        mask: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """Attend over [sequences, tokens, heads, size], in and out; causal without a mask."""
        return F.scaled_dot_product_attention(
            query.transpose(1, 2),
            key.transpose(1, 2),
            value.transpose(1, 2),
            attn_mask=mask,
            is_causal=mask is None,
            scale=self.scale,
            enable_gqa=self.grouped,
        ).transpose(1, 2)


@lru_cache(maxsize=4)
def _order(lengths: tuple[int, ...], ranks: int) -> Any:
    """Return [tokens]: the place of each token of the whole sequences among the ranks' tokens."""
    each = np.array(lengths)
    starts = np.cumsum(each) - each
    cuts = [cut(each, rank, ranks) for rank in range(ranks)]
    return np.argsort(np.concatenate([starts[sequence] + nth for nth, sequence in cuts]))
