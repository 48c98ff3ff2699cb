"""Model: build this rank's chunks of an Architecture as Megatron GPTModels.

training/train_step.py calls `build_model` once the process groups exist. On GPUs the layers are
Transformer Engine's if it is installed. Else they are Megatron's local ones, with attention.py's
modules for layers that Megatron has on CUDA only: see layer_choice.py. Read next: head.py for the
logits, weights.py for filling the model, kernel_trial.py for kernels that fail.
"""

from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)

from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.models.attention import PackedAttention, RMSNorm
from cray_agents.trainers.models.experts import grouped_experts
from cray_agents.trainers.models.head import Head, padded_vocab
from cray_agents.trainers.models.kernel_trial import confirm
from cray_agents.trainers.models.layer_choice import LayerChoice, check_layers, choose_layers
from cray_agents.trainers.models.rope import rope_frequencies
from cray_agents.trainers.planning.arithmetic import MOST_LOGITS
from cray_agents.training_jobs import Hyperparameters, Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}


def build_model(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    on_cpu: bool,
    recompute: str = "none",
) -> list[Any]:
    """Build this rank's chunks of the model (GPTModel); `load_weights` fills them.

    There is one, or `layout.interleave` of them in the order of the forward pass. The attribute
    `head` is a Head on the chunk with the output layer, else None.
    """
    layers = layers_of(model, layout, hyper.dtype, on_cpu)
    check_layers(layers, hyper, recompute, mixture=bool(model.experts))
    if not on_cpu:
        layers = confirm(layers, model, torch.device("cuda"))
    te = layers.transformer_engine
    inverse, scaling = rope_frequencies(model.rope, model.head_size)
    config = transformer_config(model, layout, hyper, on_cpu, te, recompute)
    if scaling != 1.0:  # a factor of both queries and keys
        config.softmax_scale = scaling**2 / model.head_size**0.5
    several = layout.interleave > 1
    stages = range(layout.interleave) if several else [None]
    chunks = [_chunk(model, config, layout, layers, stage) for stage in stages]
    return [finish_chunk(chunk, model, hyper, inverse, on_cpu) for chunk in chunks]


def finish_chunk(
    chunk: Any, model: Architecture, hyper: Hyperparameters, inverse: torch.Tensor, on_cpu: bool
) -> Any:
    """Give a GPTModel its rotary frequencies [size / 2] and its head; return it on its device."""
    chunk.rotary_pos_emb.inv_freq = inverse.to(chunk.rotary_pos_emb.inv_freq.device)
    chunk.head = None
    if chunk.post_process:
        chunk.head = Head(chunk, model.vocab, hyper.policy.temperature)
        if not on_cpu:
            chunk.head.most_logits = MOST_LOGITS
    return chunk if on_cpu else chunk.cuda(torch.cuda.current_device())


def layers_of(model: Architecture, layout: Layout, dtype: str, on_cpu: bool) -> LayerChoice:
    """Return the layers that `build_model` makes. Megatron must be loaded."""
    from megatron.core.models.gpt import gpt_layer_specs

    return choose_layers(
        gpu=not on_cpu,
        transformer_engine=gpt_layer_specs.HAVE_TE,
        dtype=dtype,
        head_size=model.head_size,
        contexts=layout.context,
        experts=bool(model.experts),
    )


def _chunk(
    model: Architecture, config: Any, layout: Layout, layers: LayerChoice, stage: int | None
) -> Any:
    """Build one chunk; `stage` is its number among this rank's, None if there is one."""
    from megatron.core import parallel_state
    from megatron.core.models.gpt import GPTModel
    from megatron.core.models.gpt.gpt_layer_specs import get_gpt_decoder_block_spec
    from megatron.core.transformer.spec_utils import ModuleSpec

    te = layers.transformer_engine
    spec = get_gpt_decoder_block_spec(
        config, use_transformer_engine=te, normalization="RMSNorm", vp_stage=stage
    )
    if not te:
        spec.layer_norm = RMSNorm
        for layer in spec.layer_specs:
            attention = layer.submodules.self_attention.submodules
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            attention.core_attention = ModuleSpec(
                module=PackedAttention, params={"varlen": layers.varlen}
            )
            if layers.grouped:
                layer.submodules.mlp.submodules.experts.module = grouped_experts()
            if model.qk_norm:
                attention.q_layernorm = attention.k_layernorm = RMSNorm
    return GPTModel(
        config,
        spec,
        vocab_size=padded_vocab(model.vocab, layout.tensor),
        max_sequence_length=model.max_tokens,
        pre_process=parallel_state.is_pipeline_first_stage(ignore_virtual=False, vp_stage=stage),
        post_process=parallel_state.is_pipeline_last_stage(ignore_virtual=False, vp_stage=stage),
        share_embeddings_and_output_weights=model.tied,
        position_embedding_type="rope",
        vp_stage=stage,
    )


def transformer_config(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    on_cpu: bool,
    te: bool,
    recompute: str,
) -> Any:
    """Return the TransformerConfig of a model under a layout."""
    from megatron.core.tensor_parallel import layers
    from megatron.core.transformer import TransformerConfig

    gpu, dtype, precision = not on_cpu, hyper.dtype, DTYPES[hyper.dtype]
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
        # perform_initialization=False would be quicker, but leaves the tensor-parallel marks unset,
        # and gradient norms under tensor parallelism would be wrong
        "moe_token_dispatcher_type": "alltoall",  # packing refuses "allgather", dense or not
        "variable_seq_lengths": True,  # micro-batches differ in length between pipeline stages
        "tensor_model_parallel_size": layout.tensor,
        "pipeline_model_parallel_size": layout.pipeline,
        "context_parallel_size": layout.context,
        "expert_model_parallel_size": layout.expert,
        "sequence_parallel": layout.sequence_parallel,
        "calculate_per_token_loss": True,
        "bias_activation_fusion": True,  # on the CPU by kernels.py
        "bias_dropout_fusion": gpu,
        "masked_softmax_fusion": te,
        "apply_rope_fusion": te,
        "persist_layer_norm": te,
        "cross_entropy_loss_fusion": gpu and dtype == "bfloat16",  # its gradient is bfloat16
        "gradient_accumulation_fusion": gpu and layers._grad_accum_fusion_available,
        **recomputation(recompute),
        **uneven_stages(model, layout),
    }
    if hyper.fp8 is not None:
        # the weights stay bfloat16; "hybrid" has more range for gradients, which only scales per
        # tensor need
        per_tensor = hyper.fp8 in ("tensorwise", "delayed")
        values |= {
            "fp8": "hybrid" if per_tensor else "e4m3",
            "fp8_recipe": hyper.fp8,
            "moe_router_padding_for_quantization": bool(model.experts),
        }
    if layout.interleave > 1:
        values |= {
            "virtual_pipeline_model_parallel_size": layout.interleave,
            "overlap_p2p_comm": True,  # the interleaved schedule is silently wrong without
            "batch_p2p_comm": False,
        }
    if model.experts:
        values |= {
            "num_moe_experts": model.experts,
            "moe_router_topk": model.experts_per_token,
            "moe_ffn_hidden_size": model.expert_ffn,
            "moe_router_load_balancing_type": "aux_loss",
            "moe_aux_loss_coeff": 0.0,
            "moe_grouped_gemm": te,
            "moe_router_dtype": "fp32" if gpu else None,
            "moe_router_pre_softmax": not model.norm_topk,  # else a softmax over the chosen alone
        }
    return TransformerConfig(**values)


def uneven_stages(model: Architecture, layout: Layout) -> dict[str, Any]:
    """Return the option of Megatron for layers that do not divide into chunks; else nothing."""
    chunks = layout.chunk_layers(model.layers)
    if len(set(chunks)) == 1:
        return {}
    rows = [["decoder"] * count for count in chunks]
    rows[0].insert(0, "embedding")
    rows[-1].append("loss")
    return {"pipeline_model_parallel_layout": rows}


def recomputation(recompute: str) -> dict[str, Any]:
    """Return the options of Megatron for JobSpec.recompute."""
    if recompute == "none":
        return {}
    if recompute == "full":
        return {
            "recompute_granularity": "full",
            "recompute_method": "uniform",
            "recompute_num_layers": 1,
        }
    modules = ["core_attn"] if recompute == "selective" else recompute.split(",")
    return {"recompute_granularity": "selective", "recompute_modules": modules}
