"""Architecture: the few numbers of a Hugging Face `config.json` that training needs.

The config is read before Megatron is imported, so that an unsupported model is refused at once. A
kind without native layers is trained by transformers' own module, or where a layout splits the
model through Megatron-Bridge (`choose_way`). Read next: tensors.py, which checks the weights;
model.py, which builds the Megatron model; universal/; bridge/.
"""

from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, NotFound
from cray_agents.runtime.registry.checkpoints import max_tokens
from cray_agents.runtime.registry.foreign_model import KINDS, MIXTURES, TIED, read_config
from cray_agents.trainers.models.bridge.bridged_kinds import why_not_bridged
from cray_agents.trainers.models.rope import Rope, check_rope, read_rope
from cray_agents.trainers.models.universal.model_sizes import read_sizes
from cray_agents.training_jobs import JobSpec, Layout, Way, usual_learning_rate

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
    """A decoder-only transformer with grouped-query attention, RoPE, RMSNorm and SwiGLU.

    Of a model that is not trained the native way only kind, vocabulary, limit of tokens and number
    of weights are exact. The other numbers are what its config has of them, for estimates.
    """

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
    way: Way = "native"
    network: str = ""  # not native: the class in transformers
    counted: tuple[int, int] = (0, 0)  # not native: all weights, and those of experts
    config: str = ""  # not native: a hash of what decides the network

    @property
    def qkv_bias(self) -> bool:
        """True for Qwen2, which has biases on q, k and v only."""
        return self.kind == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """True for Qwen3, which normalises each head's queries and keys."""
        return self.kind.startswith("qwen3")


def choose_way(kind: str, way: Way | None, layout: Layout | None = None) -> Way:
    """Return the way that is asked for, or the best of those that can train a kind in a layout.

    Native for the kinds that have native layers, else universal. Where the layout splits the model,
    which the universal way cannot, bridge, if Megatron-Bridge is installed and knows the kind.
    Raises BadInput for a bridge that cannot be.
    """
    if way == "bridge" and (obstacle := why_not_bridged(kind)):
        raise BadInput(f"cannot train a {kind!r} model with way=bridge: {obstacle}", param="way")
    if way is not None:
        return way
    if kind in SUPPORTED:
        return "native"
    splits = layout is not None and layout.splits_model
    return "bridge" if splits and why_not_bridged(kind) is None else "universal"


def with_way(spec: JobSpec, parent: Path) -> JobSpec:
    """Return the spec with way=bridge if its layout needs that. The id is the decided way's.

    A parent that cannot be read decides nothing: the checks that follow say what is wrong.
    """
    hyper = spec.hyperparameters
    if hyper.way is not None or not spec.layout.splits_model:
        return spec
    try:
        kind = read_config(parent).get("model_type", "")
    except (BadInput, NotFound):
        return spec
    if choose_way(kind, None, spec.layout) != "bridge":
        return spec
    return spec.model_copy(update={"hyperparameters": hyper.model_copy(update={"way": "bridge"})})


def with_learning_rate(spec: JobSpec, parent: Path) -> JobSpec:
    """Return the spec with the usual learning rate if it gives none. The id is the decided rate's.

    A parent that cannot be read decides nothing, as above.
    """
    hyper = spec.hyperparameters
    if hyper.learning_rate is not None:
        return spec
    try:
        width = read_architecture(parent, hyper.way).hidden
    except (BadInput, NotFound):
        return spec
    rate = {"learning_rate": usual_learning_rate(width, spec.method, hyper)}
    return spec.model_copy(update={"hyperparameters": hyper.model_copy(update=rate)})


def read_architecture(
    checkpoint: Path, way: Way | None = None, layout: Layout | None = None
) -> Architecture:
    """Read a checkpoint directory's config. Raises NotFound, or BadInput naming the obstacle.

    `way` None: see `choose_way`.
    """
    config = read_config(checkpoint)
    kind = config.get("model_type", "")
    way = choose_way(kind, way, layout)
    if way != "native":
        return _of_transformers(config, checkpoint, way)
    if kind not in SUPPORTED:
        raise BadInput(
            f"cannot train a {kind!r} model ({checkpoint}) the native way, which has layers for:"
            f" {', '.join(SUPPORTED)}. Leave way out, or ask for way=universal",
            param="way",
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


def _of_transformers(config: dict[str, Any], checkpoint: Path, way: Way) -> Architecture:
    sizes = read_sizes(checkpoint, config)
    return Architecture(
        kind=config.get("model_type", ""),
        layers=sizes.layers,
        hidden=sizes.hidden,
        ffn=sizes.ffn,
        heads=sizes.heads,
        kv_heads=sizes.kv_heads,
        head_size=sizes.head_size,
        vocab=sizes.vocab,
        max_tokens=max_tokens({"max_position_embeddings": 1 << 31, **sizes.limits}),
        norm_eps=0.0,
        tied=bool(config.get(TIED)),
        rope=Rope({"rope_type": "default"}, 1),
        experts=sizes.experts or None,
        experts_per_token=sizes.experts_per_token,
        expert_ffn=sizes.expert_ffn,
        way=way,
        network=sizes.network,
        counted=sizes.counted,
        config=sizes.digest,
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
                " is supported by the native layers; way=universal trains transformers' own, with"
                " data parallelism alone"
            )
