"""Layer choice: the layers and kernels that train a model here, and what a missing package costs.

model.py builds the layers of a `LayerChoice`. A job's event `started` and `cray-agents doctor` say
the same in words. Nothing here touches CUDA, so that a launcher may ask before it forks. Read next:
attention.py and experts.py, the modules for GPUs without Transformer Engine.
"""

import importlib.util
import inspect
from dataclasses import dataclass

INSTALL_TE = "pip install --no-build-isolation 'transformer-engine[pytorch]'"
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
    contexts: int = 1,
    experts: bool = False,
) -> LayerChoice:
    """Choose the layers of a model; the defaults are those of a usual model on GPUs."""
    if not gpu:
        return LayerChoice(False, False, False, "torch and the CPU kernels of cray-agents")
    if transformer_engine:
        return LayerChoice(True, False, False, "Transformer Engine")
    obstacle = _varlen_obstacle(dtype, head_size, contexts)
    one_product = experts and dtype == "bfloat16" and _has_grouped_mm()
    texts = ["attention by torch's varlen_attn"]
    if obstacle is not None:
        texts = [f"attention by a call per sequence length ({obstacle})"]
    if experts:
        texts.append("experts by grouped_mm" if one_product else "one expert after the other")
    text = (
        f"torch without Transformer Engine: {', '.join(texts)}; norms, rotation and SwiGLU are not"
        " fused with the layers around them"
    )
    return LayerChoice(False, obstacle is None, one_product, text)


def has_transformer_engine() -> bool:
    """Return True if Transformer Engine is installed. It is not imported: that may open CUDA."""
    return importlib.util.find_spec("transformer_engine") is not None


def _varlen_obstacle(dtype: str, head_size: int | None, contexts: int) -> str | None:
    """Return why torch's attention for unequal lengths cannot be used; None if it can."""
    if dtype != "bfloat16":
        return f"varlen_attn takes no {dtype}"
    if head_size is not None and (head_size > LARGEST_HEAD or head_size % HEAD_MULTIPLE):
        return (
            f"varlen_attn takes heads of at most {LARGEST_HEAD}, a multiple of {HEAD_MULTIPLE},"
            f" not {head_size}"
        )
    if contexts > 1:
        return "context parallelism gathers keys"
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
