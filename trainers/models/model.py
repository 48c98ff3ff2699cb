"""Model: build this rank's chunks of an Architecture as Megatron GPTModels.

backends.py calls `build_model` once the process groups exist. On GPUs the layers are
Transformer Engine's if it is installed. Else they are Megatron's local ones, with attention.py's
modules for layers that Megatron has on CUDA only: see layer_choice.py. Read next: head.py for the
logits, weights.py for filling the model.

A GPU may be too old for a kernel of torch, or a head size unknown to it. A rank runs the kernels on
a few tokens first (`confirm`), and takes the slower layers with a line in its log, instead of dying
in its first step.
"""

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import torch
import torch.nn.functional as F  # noqa: N812 (torch's own spelling)
from torch.nn import attention

from cray_agents.trainers.models.architecture import MOST_LOGITS, Architecture, rope_frequencies
from cray_agents.trainers.models.attention import (
    PackedAttention,
    RMSNorm,
    attend_to_all,
    attend_to_ends,
)
from cray_agents.trainers.models.head import Head, padded_vocab
from cray_agents.trainers.models.layer_choice import (
    LayerChoice,
    check_layers,
    choose_layers,
    has_flash_attention_3,
)
from cray_agents.training_jobs import Hyperparameters, Layout

DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16}
LENGTHS = (7, 1, 12)  # of sequences; odd, as real ones are
ENDS = (7, 4, 30)  # keys of the same, where context ranks have other tokens of them
TOLERANCE = 0.03  # of the largest number: bfloat16 has 8 bits, and sums differ in order

Function = Callable[..., torch.Tensor]


def confirm(layers: LayerChoice, model: Architecture, device: torch.device) -> LayerChoice:
    """Return the choice without the kernels that do not work on a device; print which."""
    if layers.varlen and has_flash_attention_3() and (why := _use_flash_attention_3(model, device)):
        attention.restore_flash_attention_impl()
        print(f"FlashAttention 3 does not work on {device}, torch's own kernel is used: {why}")
    problems = {
        "varlen": varlen_problem(model, device) if layers.varlen else None,
        "grouped": grouped_problem(model, device) if layers.grouped else None,
    }
    failed = {name: why for name, why in problems.items() if why is not None}
    for name, why in failed.items():
        print(f"the kernel {name!r} does not work on {device}, a slower one is used: {why}")
    return replace(
        layers,
        varlen=layers.varlen and "varlen" not in failed,
        grouped=layers.grouped and "grouped" not in failed,
    )


def _use_flash_attention_3(model: Architecture, device: torch.device) -> str | None:
    """Let torch attend by FlashAttention 3; return what is wrong with it, None if nothing is."""
    try:
        attention.activate_flash_attention_impl("FA3")
    except (ImportError, RuntimeError, ValueError) as error:
        return f"{type(error).__name__}: {error}"
    return varlen_problem(model, device)


def varlen_problem(model: Architecture, device: torch.device) -> str | None:
    """Return what is wrong with attention over unequal lengths; None if nothing is."""
    scale, groups = model.head_size**-0.5, model.heads // model.kv_heads
    sizes = ((sum(LENGTHS), groups), (sum(ENDS), 1), (sum(ENDS), 1))
    shapes = [(tokens, heads, model.head_size) for tokens, heads in sizes]
    bounds, keys = (
        torch.tensor([0, *each]).cumsum(0).to(device, torch.int32) for each in (LENGTHS, ENDS)
    )
    of_keys = (keys, max(ENDS))
    return difference(
        lambda q, k, v: attend_to_all(q, k, v, bounds, max(LENGTHS), scale, of_keys),
        lambda q, k, v: torch.cat(list(attend_to_ends(q, k, v, LENGTHS, ENDS, scale))),
        shapes,
        device,
    )


def grouped_problem(model: Architecture, device: torch.device) -> str | None:
    """Return what is wrong with the product of all experts; None if nothing is."""
    sizes = [LENGTHS[0], 0, *LENGTHS[1:]]  # one expert without tokens
    ends = torch.tensor(sizes).cumsum(0).to(device, torch.int32)
    shapes = [(sum(sizes), model.hidden), *[(model.expert_ffn, model.hidden)] * len(sizes)]

    def one_by_one(tokens: torch.Tensor, *weights: torch.Tensor) -> torch.Tensor:
        each = zip(torch.split(tokens, sizes), weights, strict=True)
        return torch.cat([mine @ weight.t() for mine, weight in each])

    return difference(
        lambda tokens, *weights: grouped_product(tokens, ends, list(weights)),
        one_by_one,
        shapes,
        device,
    )


def difference(
    fast: Function, plain: Function, shapes: Sequence[tuple[int, ...]], device: torch.device
) -> str | None:
    """Compare values and gradients of two functions of bfloat16 tensors of the given shapes."""
    random = torch.Generator().manual_seed(1)
    drawn = [torch.randn(shape, generator=random).bfloat16().to(device) for shape in shapes]
    results = []
    for function in (fast, plain):
        given = [tensor.clone().requires_grad_() for tensor in drawn]
        try:
            out = function(*given)
            upstream = torch.linspace(-1, 1, out.numel()).to(out).view_as(out)
            torch.autograd.backward(out, upstream)
        except (RuntimeError, ValueError) as error:
            return f"{type(error).__name__}: {str(error).splitlines()[0]}"
        results.append([out.detach(), *(tensor.grad for tensor in given)])
    for ours, theirs in zip(*results, strict=True):
        assert ours is not None and theirs is not None  # every input has a gradient
        apart, largest = (ours - theirs).abs().max(), theirs.abs().max()
        if not bool(apart <= TOLERANCE * largest):
            return f"it is {float(apart):.3g} off, where the largest number is {float(largest):.3g}"
    return None


@cache
def grouped_experts() -> type[Any]:
    """Return the class. Megatron must be loaded: the class is made of one of Megatron's."""
    from megatron.core.transformer import mlp
    from megatron.core.transformer.moe.experts import SequentialMLP

    class GroupedExperts(SequentialMLP):  # type: ignore[misc]
        """A rank's experts, all at once: SwiGLU between two grouped products, without biases."""

        def __init__(self, *args: Any, **kwargs: Any) -> None:
            super().__init__(*args, **kwargs)
            # Megatron's buffer begins with the last weight; `as_one` needs the experts in order
            modules = self.local_experts._modules
            for name in list(modules)[::-1]:
                modules[name] = modules.pop(name)

        def forward(
            self, tokens: torch.Tensor, tokens_per_expert: torch.Tensor, probs: torch.Tensor
        ) -> tuple[torch.Tensor, None]:
            """Apply the experts to tokens [n, hidden], sorted by expert; `probs` [n]."""
            if not len(tokens):  # of other ranks' tokens none may come here
                return super().forward(tokens, tokens_per_expert, probs)  # type: ignore[no-any-return]
            ends = tokens_per_expert.cumsum(0).to(tokens.device, torch.int32, non_blocking=True)
            into, out = (
                [getattr(self.local_experts[i], name).weight for i in range(self.num_local_experts)]
                for name in ("linear_fc1", "linear_fc2")
            )
            gated = mlp.weighted_bias_swiglu_impl(
                grouped_product(tokens, ends, into), None, probs.unsqueeze(-1), False
            )
            return grouped_product(gated, ends, out), None

    return GroupedExperts


def grouped_product(
    tokens: torch.Tensor, ends: torch.Tensor, weights: list[torch.Tensor]
) -> torch.Tensor:
    """Multiply each expert's tokens [n, in] by its weight [out, in]; `ends` [experts], int32.

    Only the weights are kept for the backward pass, not a copy of them that the product may take:
    over all layers the copies would be as large as the model.
    """
    return _GroupedProduct.apply(tokens, ends, *weights)  # type: ignore[no-any-return,no-untyped-call]


def as_one(weights: Sequence[torch.Tensor]) -> torch.Tensor:
    """Return weights of a shape as one tensor [weights, ...], without a copy if that is possible.

    They must lie at equal distances in one storage, as in Megatron's buffer of weights.
    """
    starts = [weight.data_ptr() for weight in weights]
    distances = {after - before for before, after in pairwise(starts)} or {weights[0].nbytes}
    one_storage = len({weight.untyped_storage().data_ptr() for weight in weights}) == 1
    if not one_storage or len(distances) != 1 or min(distances) <= 0:
        return torch.stack(list(weights))
    first, step = weights[0], distances.pop() // weights[0].element_size()
    return first.as_strided((len(weights), *first.shape), (step, *first.stride()))


class _GroupedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, tokens: torch.Tensor, ends: torch.Tensor, *weights: torch.Tensor
    ) -> torch.Tensor:
        ctx.save_for_backward(tokens, ends, *weights)
        return torch.nn.functional.grouped_mm(tokens, as_one(weights).mT, offs=ends)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor | None, ...]:
        tokens, ends, *weights = ctx.saved_tensors
        gradient, product = gradients[0].contiguous(), torch.nn.functional.grouped_mm
        d_tokens = product(gradient, as_one(weights), offs=ends)
        if not any(ctx.needs_input_grad[2:]):
            return d_tokens, None, *(None for _ in weights)
        d_weights = product(gradient.t(), tokens, offs=ends)
        return d_tokens, None, *d_weights.unbind()


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
    """Give a GPTModel its rotary frequencies [size / 2] and its head; return it on its device.

    Transformer Engine's layers add their weights' gradients to Megatron's float32 sums in the same
    product. They take that from the configuration, where Megatron's own layers refuse it without
    Apex: so it is switched on here.
    """
    for module in chunk.modules():
        if hasattr(module, "fuse_wgrad_accumulation"):
            module.fuse_wgrad_accumulation = True
    chunk.rotary_pos_emb.inv_freq = inverse.to(chunk.rotary_pos_emb.inv_freq.device)
    chunk.head = None
    if chunk.post_process:
        chunk.head = Head(chunk, model.vocab, hyper.policy.temperature)
        if not on_cpu:
            chunk.head.most_logits, chunk.head.compiled = MOST_LOGITS, True
    return chunk if on_cpu else chunk.cuda(torch.cuda.current_device())


def layers_of(model: Architecture, layout: Layout, dtype: str, on_cpu: bool) -> LayerChoice:
    """Return the layers that `build_model` makes. Megatron must be loaded."""
    from megatron.core.models.gpt import gpt_layer_specs

    return choose_layers(
        gpu=not on_cpu,
        transformer_engine=gpt_layer_specs.HAVE_TE,
        dtype=dtype,
        head_size=model.head_size,
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
            parts = layer.submodules.self_attention.submodules
            layer.submodules.input_layernorm = layer.submodules.pre_mlp_layernorm = RMSNorm
            parts.core_attention = ModuleSpec(
                module=PackedAttention, params={"varlen": layers.varlen}
            )
            if layers.grouped:
                layer.submodules.mlp.submodules.experts.module = grouped_experts()
            if model.qk_norm:
                parts.q_layernorm = parts.k_layernorm = RMSNorm
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
    from megatron.core.transformer.moe import moe_utils

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
        "batch_p2p_sync": False,  # only before PyTorch 1.13 (pytorch/pytorch 82450)
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
            # None, or no such name: Transformer Engine is missing, or too old for it
            "moe_permute_fusion": te and bool(getattr(moe_utils, "fused_permute", None)),
            "moe_router_fusion": te
            and bool(getattr(moe_utils, "fused_topk_with_score_function", None)),
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
