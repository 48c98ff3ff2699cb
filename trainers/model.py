"""An Architecture as a Megatron GPTModel: Transformer Engine's layers on GPUs, torch's on the CPU.

train.py calls `build_model` after the process groups exist. Two small modules of our own stand in
on the CPU for what Megatron only has on CUDA. Read next: weights.py, which fills the model.
"""

from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from torch.nn.utils.rnn import pad_sequence

from cray_agents.records import Layout
from cray_agents.trainers.architecture import Architecture

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


class RMSNorm(torch.nn.RMSNorm):
    """Megatron's torch norm refuses sequence parallelism, which only has to mark the weight."""

    def __init__(self, config: Any, hidden_size: int, eps: float = 1e-5, **_: Any) -> None:
        super().__init__(hidden_size, eps=eps, dtype=config.params_dtype)
        self.weight.sequence_parallel = config.sequence_parallel  # type: ignore[attr-defined]


class PackedAttention(torch.nn.Module):
    """Causal attention within each of the packed sequences (`thd`), by torch's fused kernel.

    Queries, keys and values of each sequence lie one after the other: [tokens, heads, head size].
    They are laid out as [sequences, heads, longest, head size] for one call of the kernel: the
    padding stands right of the real tokens, so that the causal mask alone hides it from them.
    """

    def __init__(
        self,
        config: Any,
        layer_number: int,
        attn_mask_type: Any,
        attention_type: str,
        softmax_scale: float | None = None,
        **_: Any,
    ) -> None:
        super().__init__()
        self.scale = softmax_scale
        self.grouped = config.num_attention_heads != config.num_query_groups

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
        """Attend; returns [tokens, heads * head size]."""
        ends: list[int] = packed_seq_params.cu_seqlens_q.tolist()
        lengths = [end - start for start, end in pairwise(ends)]
        longest = max(lengths)
        q, k, v = (self._pad(t, lengths, longest) for t in (query, key, value))
        out = F.scaled_dot_product_attention(
            q, k, v, is_causal=True, scale=self.scale, enable_gqa=self.grouped
        )
        rows = out.transpose(1, 2)
        if longest * len(lengths) == query.shape[0]:
            return rows.reshape(query.shape[0], -1)
        return torch.cat([row[:n] for row, n in zip(rows, lengths, strict=True)]).flatten(1)

    @staticmethod
    def _pad(tokens: torch.Tensor, lengths: list[int], longest: int) -> torch.Tensor:
        """[tokens, heads, size] as [sequences, heads, longest, size]."""
        if longest * len(lengths) == tokens.shape[0]:
            rows = tokens.reshape(len(lengths), longest, *tokens.shape[1:])
        else:
            rows = pad_sequence(list(torch.split(tokens, lengths)), batch_first=True)
        return rows.transpose(1, 2)


def transformer_config(model: Architecture, layout: Layout, dtype: str, on_cpu: bool) -> Any:
    """The TransformerConfig of a model spread over a layout."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import TransformerConfig

    gpu, precision = not on_cpu, DTYPES[dtype]
    values: dict[str, Any] = {
        "num_layers": model.layers,
        "hidden_size": model.hidden,
        "ffn_hidden_size": model.ffn,
        "num_attention_heads": model.heads,
        "num_query_groups": model.kv_heads,
        "kv_channels": model.head_size,
        "normalization": "RMSNorm",
        "layernorm_epsilon": model.norm_eps,
        "qk_layernorm": model.qk_norm,
        "gated_linear_unit": True,
        "activation_func": F.silu,
        "add_bias_linear": False,
        "add_qkv_bias": model.qkv_bias,
        "hidden_dropout": 0.0,
        "attention_dropout": 0.0,
        "attention_softmax_in_fp32": True,
        "bf16": dtype == "bfloat16",
        "params_dtype": precision,
        "pipeline_dtype": precision,
        "autocast_dtype": precision,
        "use_cpu_initialization": on_cpu,
        # perform_initialization=False would be quicker, but leaves the tensor-parallel marks unset:
        # gradient norms under tensor parallelism would be wrong
        "moe_token_dispatcher_type": "alltoall",  # packing refuses "allgather", dense or not
        "variable_seq_lengths": True,  # micro-batches differ in length between pipeline stages
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        "calculate_per_token_loss": True,
        "bias_activation_fusion": gpu,
        "bias_dropout_fusion": gpu,
        "masked_softmax_fusion": gpu,
        "apply_rope_fusion": gpu,
        "persist_layer_norm": gpu,
        "cross_entropy_loss_fusion": gpu,
        "gradient_accumulation_fusion": gpu and layers._grad_accum_fusion_available,
    }
    if model.experts:
        values |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.experts_per_token,
            "moe_ffn_hidden_size": model.expert_ffn,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": gpu,
            "moe_router_dtype": "fp32" if gpu else None,
            "moe_router_pre_softmax": False,  # softmax over the chosen: norm_topk_prob
        }
    return TransformerConfig(**values)


def build_model(model: Architecture, layout: Layout, dtype: str, on_cpu: bool) -> Any:
    """This rank's part of the model, with random weights."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec

    config = transformer_config(model, layout, dtype, on_cpu)
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=not on_cpu, normalization="RMSNorm"
    )
    if on_cpu:
        spec.layer_norm = RMSNorm
        for layer in spec.layer_specs:
            attention = layer.submodules.self_attention.submodules
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            attention.core_attention = PackedAttention
            if model.qk_norm:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
    part = GPTModel(
        config,
        spec,
        vocab_size=model.vocab,
        max_sequence_length=model.max_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(),
        post_process=parallel_state.is_pipeline_last_stage(),
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        rotary_base=model.rope_base,
        rope_scaling=model.rope_scale is not None,
        rope_scaling_factor=model.rope_scale or 8.0,
    )
    return part if on_cpu else part.cuda(torch.cuda.current_device())


def named_parameters(part: Any) -> Iterator[tuple[str, torch.nn.Parameter]]:
    """Parameters under their GPTModel names, whatever wraps the model (DDP, bf16)."""
    while hasattr(part, "module"):
        part = part.module
    yield from part.named_parameters()
