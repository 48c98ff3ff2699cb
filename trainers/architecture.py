"""What a Hugging Face `config.json` says, in the few numbers that training needs.

Read before Megatron is imported: a model that cannot be trained is refused here by name, at once.
Read next: model.py, which builds the Megatron model from it.
"""

import json
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, NotFound
from cray_agents.records import Layout

SUPPORTED = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")


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
    max_tokens: int  # positions, or the sliding window where that is shorter
    norm_eps: float
    tied: bool
    rope_base: float
    rope_scale: float | None  # Llama 3's factor; None: plain RoPE
    experts: int | None
    experts_per_token: int
    expert_ffn: int

    @property
    def qkv_bias(self) -> bool:
        """Only Qwen2 has biases, and only on q, k and v."""
        return self.kind == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """Qwen3 normalises each head's queries and keys."""
        return self.kind.startswith("qwen3")


def read_architecture(checkpoint: Path) -> Architecture:
    """Read a checkpoint directory's config. Raises NotFound, or BadInput naming the obstacle."""
    try:
        config = json.loads((checkpoint / "config.json").read_bytes())
    except FileNotFoundError:
        raise NotFound(f"{checkpoint} has no config.json: give a Hugging Face checkpoint") from None
    kind = config.get("model_type", "")
    if kind not in SUPPORTED:
        raise BadInput(
            f"cannot train a {kind!r} model ({checkpoint}); supported: {', '.join(SUPPORTED)}"
        )
    _refuse_variants(config, checkpoint)
    rope_base, rope_scale = _rope(config, checkpoint)
    heads, hidden = config["num_attention_heads"], config["hidden_size"]
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    positions = config["max_position_embeddings"]
    experts = config.get("num_local_experts") or config.get("num_experts")
    return Architecture(
        kind=kind,
        layers=config["num_hidden_layers"],
        hidden=hidden,
        ffn=config["intermediate_size"],
        heads=heads,
        kv_heads=config.get("num_key_value_heads") or heads,
        head_size=config.get("head_dim") or hidden // heads,
        vocab=config["vocab_size"],
        max_tokens=min(positions, window or positions),
        norm_eps=config["rms_norm_eps"],
        tied=config.get("tie_word_embeddings", False),
        rope_base=rope_base,
        rope_scale=rope_scale,
        experts=experts,
        experts_per_token=config.get("num_experts_per_tok", 0),
        expert_ffn=config.get("moe_intermediate_size") or config["intermediate_size"],
    )


def _refuse_variants(config: dict[str, Any], checkpoint: Path) -> None:
    """Options of a supported architecture that the Megatron model would silently ignore."""
    expected = {
        "hidden_act": "silu",
        "attention_bias": False,
        "mlp_bias": False,
        "decoder_sparse_step": 1,
        "mlp_only_layers": [],
        "partial_rotary_factor": 1.0,
        "quantization_config": None,
    }
    if config["model_type"] == "qwen3_moe":
        expected["norm_topk_prob"] = True
        config = {"norm_topk_prob": False, **config}
    for name, value in expected.items():
        found = config.get(name, value)
        if found != value:
            raise BadInput(
                f"cannot train {checkpoint}: its config has {name}={found!r}, and only {value!r}"
                " is supported"
            )


def _rope(config: dict[str, Any], checkpoint: Path) -> tuple[float, float | None]:
    """RoPE's base and Llama 3 factor, from transformers 5's `rope_parameters` or the older keys."""
    rope = config.get("rope_parameters") or {
        "rope_theta": config.get("rope_theta", 10000.0),
        **(config.get("rope_scaling") or {}),
    }
    kind = rope.get("rope_type") or rope.get("type") or "default"
    base = float(rope["rope_theta"])
    if kind == "default":
        return base, None
    fixed = {  # Megatron's rope_scaling has these built in
        "low_freq_factor": 1.0,
        "high_freq_factor": 4.0,
        "original_max_position_embeddings": 8192,
    }
    if kind != "llama3" or any(rope.get(name) != value for name, value in fixed.items()):
        raise BadInput(
            f"cannot train {checkpoint}: its rotary embedding is {rope}; supported are"
            f" 'default', and 'llama3' with {fixed}"
        )
    return base, float(rope["factor"])


def why_unfit(model: Architecture, layout: Layout) -> str | None:
    """Why a model cannot be spread like this; None if it can."""
    tensor, pipeline, expert = layout.tensor, layout.pipeline, layout.expert
    for name, size in (
        ("attention heads", model.heads),
        ("key-value heads", model.kv_heads),
        ("vocabulary entries", model.vocab),
        ("feed-forward units", model.ffn),
        ("feed-forward units of an expert", model.expert_ffn),
    ):
        if size % tensor:
            return f"tensor={tensor} does not divide its {size} {name}"
    if model.layers % pipeline:
        return f"pipeline={pipeline} does not divide its {model.layers} layers"
    if expert > 1 and not model.experts:
        return f"expert={expert}, but it has no experts"
    if expert > 1 and (model.experts or 0) % expert:
        return f"expert={expert} does not divide its {model.experts} experts"
    if layout.data * tensor % expert or layout.data % expert:
        return f"expert={expert} does not divide the data={layout.data} ranks it lives in"
    if layout.sequence_parallel and tensor == 1:
        return "sequence_parallel has no effect with tensor=1"
    if model.experts and tensor > 1 and not layout.sequence_parallel:
        return "experts with tensor>1 need sequence_parallel=true"
    return None


def check_layout(model: Architecture, layout: Layout) -> None:
    """Raises BadInput that names layouts of the same world size which would do."""
    reason = why_unfit(model, layout)
    if reason is None:
        return
    world = layout.world
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    fitting = [
        f"data={data} tensor={tensor} pipeline={pipeline}"
        + (" sequence_parallel=true" if parallel else "")
        for data in reversed(sizes)
        for tensor in sizes
        for pipeline in sizes
        for parallel in [bool(model.experts) and tensor > 1]
        if data * tensor * pipeline == world
        and why_unfit(
            model,
            Layout(data=data, tensor=tensor, pipeline=pipeline, sequence_parallel=parallel),
        )
        is None
    ]
    raise BadInput(
        f"a {model.kind} model does not fit {layout!r}: {reason}. On {world} ranks these fit: "
        + "; ".join(fitting[:8]),
        param="layout",
    )
