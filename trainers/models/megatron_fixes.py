"""Megatron fixes: import megatron-core 0.16.1 and mend what is wrong or slow in it on any device.

launch.py calls `load_megatron` once, before any other use of Megatron. On a machine without CUDA
megatron_on_cpu.py adapts it first. Then FIXES follow, on GPUs and CPUs alike: most are for a
Megatron without Transformer Engine, which tests on CPUs see as well as a GPU without it. What
Transformer Engine or Apex provides stays as it is. Read next: megatron_on_cpu.py, kernels.py.
"""

import importlib
import inspect
from functools import cache, lru_cache
from typing import Any

import torch

from cray_agents.trainers.models import kernels
from cray_agents.trainers.models.attention import token_positions
from cray_agents.trainers.models.megatron_on_cpu import ModuleView, adapt_to_cpu, import_on_cpu

_MODULES = (
    "distributed",
    "models.gpt",
    "models.gpt.gpt_layer_specs",
    "optimizer",
    "pipeline_parallel.schedules",
    "tensor_parallel.random",
    "transformer.moe.moe_layer",
)


@cache
def load_megatron() -> bool:
    """Import megatron.core and mend it, once; return True if it has to train on the CPU."""
    modules = [f"megatron.core.{name}" for name in _MODULES]
    on_cpu = not torch.cuda.is_available()
    if on_cpu:
        adapt_to_cpu(import_on_cpu(*modules))
    else:
        for name in modules:
            importlib.import_module(name)
    for fix in FIXES:
        fix()
    return on_cpu


def _name_missing_gemm() -> None:
    """Let routers of experts run without Transformer Engine: they use a name that it binds."""
    moe: Any = importlib.import_module("megatron.core.transformer.moe.moe_utils")
    if not hasattr(moe, "te_general_gemm"):
        moe.te_general_gemm = None


def _rotate_without_waiting() -> None:
    """Rotate packed sequences by kernels.py: Megatron's waits for the device in each layer.

    Transformer Engine's layers have their own kernel.
    """
    rope: Any = importlib.import_module("megatron.core.models.common.embeddings.rope_utils")

    @lru_cache(maxsize=1)  # all layers of a micro-batch use the same angles
    def angles(
        bounds: torch.Tensor, freqs: torch.Tensor, tokens: int, dtype: torch.dtype, group: Any
    ) -> tuple[torch.Tensor, torch.Tensor]:
        positions = token_positions(bounds, tokens, group.rank(), group.size())
        chosen = freqs[positions, 0]
        return chosen.cos().to(dtype), chosen.sin().to(dtype)

    def rotate(
        tokens: torch.Tensor,
        cu_seqlens: torch.Tensor,
        freqs: torch.Tensor,
        cp_group: Any = None,
        **_: Any,
    ) -> torch.Tensor:
        cos, sin = angles(cu_seqlens, freqs, len(tokens), tokens.dtype, cp_group)
        if (size := freqs.shape[-1]) == tokens.shape[-1]:
            return kernels.rotate(tokens, cos, sin)
        rotated = kernels.rotate(tokens[..., :size], cos, sin)  # of some kinds a part of each head
        return torch.cat([rotated, tokens[..., size:]], -1)

    rope._apply_rotary_pos_emb_thd = rotate


def _keep_one_table() -> None:
    """Keep the angles of one length: Megatron keeps those of 32, of gigabytes if they are long."""
    embedding: Any = importlib.import_module("megatron.core.models.common.embeddings")
    rotary = embedding.RotaryEmbedding
    rotary.forward = lru_cache(maxsize=1)(rotary.forward.__wrapped__)


def _compute_outputs_again() -> None:
    """Let outputs be computed again without Transformer Engine: the default False is taken for FP8.

    In 0.16.1 `recompute_modules` with "layernorm" fails without this. FP8 of the layers themselves
    is read from Transformer Engine's state, where that is installed.
    """
    random: Any = importlib.import_module("megatron.core.tensor_parallel.random")
    if not getattr(random, "HAVE_TE", False):
        random.CheckpointWithoutOutput.__init__.__defaults__ = (None,)


class _FusedAdamW(torch.optim.AdamW):
    """torch's one-pass AdamW; a class, because Megatron names one and checks its type."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs, fused=True)

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        """Do one step without the import that torch's own begins with: `_adapt_optimizers`."""
        return inspect.unwrap(torch.optim.AdamW.step)(self, closure)


def fuse_adam() -> None:
    """Let Megatron's optimizer use the one-pass AdamW; its configuration has no setting for it."""
    optimizer = importlib.import_module("megatron.core.optimizer").__dict__
    if optimizer["USING_PYTORCH_OPTIMIZER"]:
        optim = ModuleView(torch.optim, AdamW=_FusedAdamW)
        optimizer["torch"] = ModuleView(optimizer["torch"], optim=optim)


def _clip_without_waiting() -> None:
    """Compute the norm of all gradients, and scale them, in few kernels: Megatron's own waits for
    the device once a parameter, and holds each one's copy.
    """
    utils: Any = importlib.import_module("megatron.core.utils")
    clip: Any = importlib.import_module("megatron.core.optimizer.clip_grads")
    if clip.l2_norm_impl is utils.local_multi_tensor_l2_norm:
        clip.l2_norm_impl = _norm
    if clip.multi_tensor_scale_impl is utils.local_multi_tensor_scale:
        clip.multi_tensor_scale_impl = _scale


def _norm(chunk: int, overflow: Any, tensors: Any, *_: Any) -> tuple[torch.Tensor, None]:
    """Return the norm [1] of a list of tensors, as Apex's multi_tensor_l2norm does."""
    norms = torch._foreach_norm(tensors[0])
    return torch.linalg.vector_norm(torch.stack(norms)).float()[None], None


def _scale(chunk: int, overflow: Any, tensors: Any, factor: float) -> None:
    """Multiply gradients in place, as Apex's multi_tensor_scale does if both lists are the same."""
    _, gradients = tensors
    if gradients:
        torch._foreach_mul_(gradients, factor)


FIXES = (
    _name_missing_gemm,
    _rotate_without_waiting,
    _keep_one_table,
    _compute_outputs_again,
    fuse_adam,
    _clip_without_waiting,
)
