"""Layer choice: the layers and kernels that train a model here, and what a missing package costs.

model.py builds the layers of a `LayerChoice`. A job's event `started` and `cray-agents doctor` say
the same in words. Nothing here touches CUDA, so that `doctor` and launchers may ask. Read next:
attention.py and model.py, with the modules for GPUs without Transformer Engine.
"""

import importlib.util
import inspect
from dataclasses import dataclass

from cray_agents.errors import BadInput
from cray_agents.training_jobs import Hyperparameters

# what megatron-core 0.16.1 asks for; compiled for CUDA 13, as torch's wheels are
INSTALL_TE = "pip install --no-build-isolation 'transformer-engine[core_cu13,pytorch]>=2.9,<2.12'"
LARGEST_HEAD = 256  # of FlashAttention's kernels
HEAD_MULTIPLE = 8


@dataclass(frozen=True)
class LayerChoice:
    """The layers of a job: Transformer Engine's, or torch's with faster kernels where they fit.

    - `varlen`: one attention kernel for all packed sequences, else a call per length
    - `grouped`: one matrix product for all experts, else one expert after the other
    - `text`: all of it in a line
    """

    transformer_engine: bool
    varlen: bool
    grouped: bool
    text: str


def choose_layers(
    *,
    gpu: bool,
    transformer_engine: bool,
    dtype: str = "bfloat16",
    head_size: int | None = None,
    experts: bool = False,
) -> LayerChoice:
    """Choose the layers of a model; the defaults are those of a usual model on GPUs."""
    if not gpu:
        return LayerChoice(False, False, False, "torch and the CPU kernels of cray-agents")
    if transformer_engine:
        return LayerChoice(True, False, False, "Transformer Engine")
    obstacle = varlen_obstacle(dtype, head_size)
    one_product = experts and dtype == "bfloat16" and _has_grouped_mm()
    by = " with FlashAttention 3" if has_flash_attention_3() else ""
    texts = [f"attention by torch's varlen_attn{by}"]
    if obstacle is not None:
        texts = [f"attention by a call per sequence length ({obstacle})"]
    if experts:
        texts.append("experts by grouped_mm" if one_product else "one expert after the other")
    text = (
        f"torch without Transformer Engine: {', '.join(texts)}; norms, rotation and SwiGLU are not"
        " fused with the layers around them"
    )
    return LayerChoice(False, obstacle is None, one_product, text)


def check_layers(
    layers: LayerChoice, hyper: Hyperparameters, recompute: str, *, mixture: bool
) -> None:
    """Raise BadInput for FP8 and recomputed modules that a model has not got with these layers."""
    if hyper.fp8 is not None:
        _check_fp8(layers, hyper)
    modules = recompute.split(",")
    for module in {"moe", "moe_act"} & set(modules) if not mixture else {"mlp"} & set(modules):
        other = "mlp" if module.startswith("moe") else "moe, or with Transformer Engine moe_act"
        kind = "a mixture of experts" if mixture else "not a mixture of experts"
        raise BadInput(
            f"recompute={recompute}: the model is {kind} and has no {module!r}: ask for {other}",
            param="recompute",
        )
    if "moe_act" in modules and not layers.transformer_engine:
        raise BadInput(
            f"recompute={recompute}: 'moe_act' needs Transformer Engine's experts, and here the"
            f" layers are {layers.text}: ask for 'moe', or {INSTALL_TE}",
            param="recompute",
        )
    if hyper.fp8 == "delayed" and {"moe_act", "layernorm"} & set(modules):
        raise BadInput(
            f"recompute={recompute}: with fp8=delayed neither 'layernorm' nor 'moe_act' can be"
            " computed again: ask for another fp8, such as tensorwise",
            param="recompute",
        )


def _check_fp8(layers: LayerChoice, hyper: Hyperparameters) -> None:
    reason = None
    if not layers.transformer_engine:
        reason = f"needs Transformer Engine on a GPU, and here the layers are {layers.text}"
    elif hyper.dtype != "bfloat16":
        reason = f"needs dtype bfloat16, not {hyper.dtype}"
    elif hyper.lora is not None:
        reason = "is for training all weights, not LoRA"
    if reason is not None:
        raise BadInput(f"fp8={hyper.fp8} {reason}: leave fp8 out", param="fp8")


def has_transformer_engine() -> bool:
    """Return True if Transformer Engine is installed. It is not imported: that may open CUDA."""
    return importlib.util.find_spec("transformer_engine") is not None


def has_flash_attention_3() -> bool:
    """Return True if FlashAttention 3 is installed, which torch's attention can use on Hopper."""
    return importlib.util.find_spec("flash_attn_interface") is not None


def varlen_obstacle(dtype: str, head_size: int | None) -> str | None:
    """Return why torch's attention for unequal lengths cannot be used; None if it can."""
    if dtype != "bfloat16":
        return f"varlen_attn takes no {dtype}"
    if head_size is not None and (head_size > LARGEST_HEAD or head_size % HEAD_MULTIPLE):
        return (
            f"varlen_attn takes heads of at most {LARGEST_HEAD}, a multiple of {HEAD_MULTIPLE},"
            f" not {head_size}"
        )
    try:
        from torch.nn.attention.varlen import varlen_attn
    except ImportError:
        return "this torch has no varlen_attn"
    arguments = {"scale", "window_size", "enable_gqa"}
    if missing := arguments - inspect.signature(varlen_attn).parameters.keys():
        return f"varlen_attn of this torch has no {', '.join(sorted(missing))}"
    return None


def _has_grouped_mm() -> bool:
    try:
        from torch.nn.functional import grouped_mm  # noqa: F401
    except ImportError:
        return False
    return True
