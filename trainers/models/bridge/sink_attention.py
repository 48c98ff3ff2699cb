"""Sink attention: Megatron's attention module over packed sequences, with sinks and windows.

Megatron's own takes padded rows only, unless Transformer Engine is installed. This one computes as
the universal way does (packed_attention.py), and keeps Megatron's parameters and their shards.
bridged_model.py puts it into the layers on CPUs.
"""

from functools import cache
from typing import Any

import torch

from cray_agents.trainers.models.universal.packed_attention import PackedMask, attend


@cache
def sink_attention() -> type[Any]:
    """Return the class. Megatron must be loaded: the class is made of one of Megatron's."""
    from megatron.core.tensor_parallel import set_tensor_model_parallel_attributes
    from megatron.core.transformer.dot_product_attention import DotProductAttention
    from megatron.core.transformer.utils import is_layer_window_attention

    class SinkAttention(DotProductAttention):  # type: ignore[misc]
        """Causal attention within each of the packed sequences (`thd`)."""

        def __init__(self, config: Any, layer_number: int, *args: Any, **options: Any) -> None:
            super().__init__(config, layer_number, *args, **options)
            local = is_layer_window_attention(
                config.window_size, config.window_attn_skip_freq, self.layer_number
            )
            self.window: int | None = config.window_size[0] if local else None
            if isinstance(self.softmax_offset, torch.nn.Parameter):  # Megatron leaves it unmarked
                set_tensor_model_parallel_attributes(self.softmax_offset, True, 0, 1)

        def forward(
            self,
            query: torch.Tensor,
            key: torch.Tensor,
            value: torch.Tensor,
            attention_mask: None = None,
            attn_mask_type: Any = None,
            attention_bias: None = None,
            packed_seq_params: Any = None,
        ) -> torch.Tensor:
            """Attend over [tokens, heads, head size]; return [tokens, heads * head size]."""
            lengths = tuple(packed_seq_params.lengths.tolist())
            masks = {length: self._mask(length, query.device) for length in set(lengths)}
            query, key, value = (t.transpose(0, 1)[None] for t in (query, key, value))
            attended, _ = attend(
                self,
                query,
                key,
                value,
                PackedMask(lengths, masks),
                scaling=self.softmax_scale,
                s_aux=self.softmax_offset,
            )
            return attended[0].flatten(1)

        def _mask(self, length: int, device: torch.device) -> torch.Tensor | None:
            """Return what each token may see, [length, length] bool; None: all before it."""
            if self.window is None or length <= self.window + 1:
                return None
            all_ = torch.ones(length, length, dtype=torch.bool, device=device)
            return all_.tril() & all_.triu(-self.window)

    return SinkAttention
