"""Architecture: the few numbers of a Hugging Face `config.json` that training needs.

The config is read before Megatron is imported, so that an unsupported model is refused at once.
Read next: tensors.py, which checks the weights; model.py, which builds the Megatron model.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.runtime.registry.checkpoints import max_tokens
from cray_agents.runtime.registry.model_config import KINDS, MIXTURES, TIED, read_config
from cray_agents.trainers.models.rope import Rope, check_rope, read_rope

SUPPORTED = KINDS
_REQUIRED = (
    "num_hidden_layers",
    "hidden_size",
    "intermediate_size",
    "num_attention_heads",
    "vocab_size",
    "max_position_embeddings",
    "rms_norm_eps",
)
_REQUIRED_OF_MIXTURES = {
    "mixtral": ("num_experts_per_tok",),
    "qwen3_moe": ("num_experts_per_tok", "moe_intermediate_size"),
}
_QWEN3_HEAD = 128  # transformers' default for a qwen3 config without head_dim


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with grouped-query attention, RoPE, RMSNorm and SwiGLU."""

    kind: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    vocab: int
    max_tokens: int  # of a sequence, limited by positions, the sliding window or RoPE
    norm_eps: float
    tied: bool  # by the config; tensors.py decides by the weights
    rope: Rope
    experts: int | None = None
    experts_per_token: int = 0
    expert_ffn: int = 0
    norm_topk: bool = True  # the chosen experts' weights sum to 1
    init_std: float = 0.02  # of matrices, if the model starts at random
    dtype: str = "float32"  # stored type, if the model starts at random

    @property
    def qkv_bias(self) -> bool:
        """True for Qwen2, which has biases on q, k and v only."""
        return self.kind == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """True for Qwen3, which normalises each head's queries and keys."""
        return self.kind.startswith("qwen3")


def read_architecture(checkpoint: Path) -> Architecture:
    """Read a checkpoint directory's config. Raises NotFound, or BadInput naming the obstacle."""
    config = read_config(checkpoint)
    kind = config.get("model_type", "")
    if kind not in SUPPORTED:
        raise BadInput(
            f"cannot train a {kind!r} model ({checkpoint}); supported: {', '.join(SUPPORTED)}"
        )
    required = _REQUIRED + _REQUIRED_OF_MIXTURES.get(kind, ())
    missing = [name for name in required if config.get(name) is None]
    experts = config.get("num_local_experts") or config.get("num_experts")
    if kind in MIXTURES and experts is None:
        missing.append("num_local_experts")
    if missing:
        raise BadInput(f"{checkpoint}/config.json does not say {', '.join(missing)}: add it")
    _refuse_variants(config, checkpoint)
    rope = read_rope(config, checkpoint)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    size = config.get("head_dim") or (_QWEN3_HEAD if kind == "qwen3" else hidden // heads)
    check_rope(rope, size, checkpoint)
    return Architecture(
        kind=kind,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=size,
        vocab=config["vocab_size"],
        max_tokens=max_tokens(config),
        norm_eps=config["rms_norm_eps"],
        tied=config.get(TIED, False),
        rope=rope,
        experts=experts if kind in MIXTURES else None,
        experts_per_token=config.get("num_experts_per_tok", 0),
        expert_ffn=config.get("moe_intermediate_size") or config["intermediate_size"],
        norm_topk=config.get("norm_topk_prob", kind != "qwen3_moe"),
        init_std=config.get("initializer_range") or 0.02,
        dtype=config.get("dtype") or config.get("torch_dtype") or "float32",
    )


def _refuse_variants(config: dict[str, Any], checkpoint: Path) -> None:
    """Raise BadInput for options that the Megatron model would silently ignore."""
    expected = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "quantization_config": None,
    }
    for name, value in expected.items():
        actual = config.get(name)
        if actual not in (None, value):
            raise BadInput(
                f"cannot train {checkpoint}: its config has {name}={actual!r}, and only {value!r}"
                " is supported"
            )
