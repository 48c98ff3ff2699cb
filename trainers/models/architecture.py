"""Architecture: the few numbers of a Hugging Face `config.json` that training needs.

The config is read before Megatron is imported, so that an unsupported model is refused at once. A
kind without Megatron layers is trained by transformers' own module, or where a layout splits the
model through Megatron-Bridge (`choose_backend`). To count the weights of such a kind, its network
is built without memory (on torch's meta device). transformers' own functions compute the
frequencies of rotary positions, so that both rotate alike. Read next: tensors.py, which checks the
weights; model.py, which builds the Megatron model; transformers_backend/; megatron_bridge/.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import TYPE_CHECKING, Any

from cray_agents.errors import BadInput, NotFound
from cray_agents.runtime.registry.checkpoints import base_of, max_tokens
from cray_agents.runtime.registry.foreign_model import (
    KINDS,
    MIXTURES,
    TIED,
    is_positive,
    read_config,
    read_weights,
    with_whole_references,
)
from cray_agents.trainers.models.megatron_bridge.bridged_kinds import why_not_bridged
from cray_agents.training_jobs import Backend, JobSpec, Layout, usual_learning_rate

if TYPE_CHECKING:
    import torch

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
VARIANTS = ("default", "linear", "dynamic", "llama3", "yarn", "longrope")
_ROPE_NEEDS = {  # the parameters of transformers' functions
    "linear": ("factor",),
    "dynamic": ("factor",),
    "llama3": ("factor", "low_freq_factor", "high_freq_factor"),
    "yarn": ("factor",),
    "longrope": ("short_factor", "long_factor"),
}
MOST_LOGITS = 1 << 28  # of a rank at a time, on GPUs: 1 GiB in float32 (head.py)
MOST_LAYERS = 1000  # of a directory without weights
# keys without influence on the network
_NO_MATTER = {"transformers_version", "architectures", "_name_or_path", "use_cache"}
_NO_MATTER |= {"dtype", "torch_dtype", "quantization_config"}


@dataclass(frozen=True)
class Sizes:
    """Sizes of a language model. Numbers that its config does not have are 1.

    `limits` are what its config says of the length of sequences, `counted` the number of all its
    weights and that of experts' among them, and `digest` is of all that decides the network.
    """

    network: str
    layers: int
    hidden: int
    ffn: int
    heads: int
    kv_heads: int
    head_size: int
    experts: int
    experts_per_token: int
    expert_ffn: int
    vocab: int
    limits: dict[str, Any]
    counted: tuple[int, int]
    digest: str


def read_sizes(checkpoint: Path, config: dict[str, Any]) -> Sizes:
    """Return the sizes of the language model that a config.json describes.

    Raises BadInput if transformers has none for it, or if its config cannot be.
    """
    from cray_agents.trainers.models.transformers_backend.text_model import TextModel

    model = TextModel(config, checkpoint)
    text = model.config.get_text_config()
    layers = _number(text, "num_hidden_layers")
    stored = read_weights((base_of(checkpoint) or checkpoint).resolve())
    if layers > (len(stored) or MOST_LAYERS):  # spares a hostile config's millions of modules
        raise BadInput(
            f"{checkpoint}/config.json speaks of {layers} layers, and there are {len(stored)}"
            " tensors in all: they are of different models",
            param="parent",
        )
    heads, hidden = _number(text, "num_attention_heads"), _number(text, "hidden_size")
    ffn = _number(text, "intermediate_size")
    experts = _first(text, "num_local_experts", "num_experts", "n_routed_experts")
    whole = with_whole_references(config, checkpoint)
    decisive = {name: value for name, value in whole.items() if name not in _NO_MATTER}
    content = json.dumps(decisive, sort_keys=True)
    network, counted = _count_weights(content, checkpoint)
    limits = text.to_dict() | {"model_type": ""}  # its windows are no limits
    limits["max_position_embeddings"] = getattr(text, "max_position_embeddings", None)
    return Sizes(
        network=network,
        layers=layers,
        hidden=hidden,
        ffn=ffn,
        heads=heads,
        kv_heads=_number(text, "num_key_value_heads", heads),
        head_size=_number(text, "head_dim", max(1, hidden // heads)),
        experts=experts if counted[1] else 0,
        experts_per_token=_number(text, "num_experts_per_tok"),
        expert_ffn=_number(text, "moe_intermediate_size", ffn),
        vocab=_number(text, "vocab_size"),
        limits={name: value for name, value in limits.items() if value is not None},
        counted=counted,
        digest=hashlib.sha256(content.encode()).hexdigest(),
    )


def _first(config: Any, *names: str) -> int:
    return next((size for name in names if (size := _number(config, name, 0))), 0)


def _number(config: Any, name: str, missing: int = 1) -> int:
    """Return a size; of sizes by layer the largest. Raises BadInput for a size that cannot be."""
    values = layer_values(config, name)
    if any(type(each) is int and not 0 <= each < 1 << 31 for each in values):
        raise BadInput(f"config.json has {name}={values}, which no model has", param="parent")
    return max([each for each in values if type(each) is int and each] or [missing])


def layer_values(config: Any, name: str) -> list[Any]:
    """Return the values of a field of transformers' config: several if the layers differ."""
    if getattr(config, "is_heterogeneous", False) and name in config.per_layer_attributes:
        return [getattr(layer, name, None) for layer in config.per_layer_config]
    value = getattr(config, name, None)
    return list(value) if isinstance(value, list | tuple) else [value]


@lru_cache(maxsize=8)
def _count_weights(config: str, checkpoint: Path) -> tuple[str, tuple[int, int]]:
    """Return the network's class, the number of its weights, and of those of experts."""
    import torch

    from cray_agents.trainers.models.transformers_backend.text_model import TextModel

    network = TextModel(json.loads(config), checkpoint).build(torch.float32, "meta")
    tied = network.all_tied_weights_keys  # by the config; they are one tensor with another
    named = network.named_parameters()
    sizes = {name: prod(one.shape) for name, one in named if name not in tied}
    experts = sum(number for name, number in sizes.items() if ".experts." in name)
    return type(network).__name__, (sum(sizes.values()), experts)


@dataclass(frozen=True)
class Rope:
    """A config's `rope_parameters`, and the number of positions of its model."""

    parameters: dict[str, Any]  # with `rope_type` and `rope_theta`
    positions: int

    @property
    def kind(self) -> str:
        """One of VARIANTS."""
        return str(self.parameters["rope_type"])


def read_rope(config: dict[str, Any], checkpoint: Path) -> Rope:
    """Read transformers 5's `rope_parameters` or the older keys. Raises BadInput."""
    theta = config.get("rope_theta") or (1e6 if config["model_type"] == "mixtral" else 1e4)
    given = config.get("rope_parameters") or config.get("rope_scaling") or {}
    parameters = {"rope_theta": theta, **given}
    kind = parameters.pop("type", "default")
    kind = parameters.setdefault("rope_type", kind)
    if kind not in VARIANTS:
        raise BadInput(
            f"cannot train {checkpoint}: its rotary embedding is {kind!r}; supported are"
            f" {', '.join(VARIANTS)}"
        )
    share = parameters.pop("partial_rotary_factor", config.get("partial_rotary_factor"))
    if share not in (None, 1.0):
        raise BadInput(
            f"cannot train {checkpoint}: it rotates only {share} of a head"
            " (partial_rotary_factor), and only 1.0 is supported"
        )
    positions = config["max_position_embeddings"]
    if kind in ("llama3", "yarn", "longrope"):  # the config's top-level number comes first
        original = config.get("original_max_position_embeddings")
        original = original or parameters.get("original_max_position_embeddings") or positions
        parameters["original_max_position_embeddings"] = original
    return Rope(parameters, positions)


def check_rope(rope: Rope, head_size: int, checkpoint: Path) -> None:
    """Raise BadInput if no frequencies can be computed from the parameters."""
    if head_size % 2:
        raise BadInput(f"cannot train {checkpoint}: a head of {head_size} cannot be rotated")
    for name in ("rope_theta", *_ROPE_NEEDS.get(rope.kind, ())):
        value = rope.parameters.get(name)
        if name.endswith(("short_factor", "long_factor")):
            fits = isinstance(value, list) and len(value) == head_size // 2
            must = f"a list of {head_size // 2} finite numbers above 0"
        else:
            fits, must = True, "a finite number above 0"
        each = value if isinstance(value, list) and "a list" in must else [value]
        if not fits or not all(map(is_positive, each)):
            raise BadInput(
                f"cannot train {checkpoint}: its rotary embedding ({rope.kind}) has {name} ="
                f" {repr(value)[:100]}, which must be {must}"
            )


def rope_frequencies(rope: Rope, head_size: int) -> tuple["torch.Tensor", float]:
    """Return inverse frequencies [head size / 2] in float32, and the factor of queries and keys."""
    import torch

    if rope.kind == "default":
        powers = torch.arange(0, head_size, 2, dtype=torch.int64).float() / head_size
        return 1.0 / rope.parameters["rope_theta"] ** powers, 1.0
    from transformers import LlamaConfig
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    config = LlamaConfig(
        head_dim=head_size,
        max_position_embeddings=rope.positions,
        rope_parameters=dict(rope.parameters),
    )
    inverse, scaling = ROPE_INIT_FUNCTIONS[rope.kind](config, torch.device("cpu"))
    return inverse.float(), float(scaling)


@dataclass(frozen=True)
class Architecture:
    """A decoder-only transformer with grouped-query attention, RoPE, RMSNorm and SwiGLU.

    Of a model that the megatron backend does not train only kind, vocabulary, limit of tokens and
    number of weights are exact. The other numbers are what its config has of them, for estimates.
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
    backend: Backend = "megatron"
    network: str = ""  # of the other backends: the class in transformers
    counted: tuple[int, int] = (0, 0)  # of the others: all weights, and experts'
    config: str = ""  # of the others: a hash of what decides the network

    @property
    def qkv_bias(self) -> bool:
        """True for Qwen2, which has biases on q, k and v only."""
        return self.kind == "qwen2"

    @property
    def qk_norm(self) -> bool:
        """True for Qwen3, which normalises each head's queries and keys."""
        return self.kind.startswith("qwen3")


def choose_backend(kind: str, backend: Backend | None, layout: Layout | None = None) -> Backend:
    """Return the backend that is asked for, or the best of those that can train a kind in a layout.

    `megatron` for the kinds that it has layers for, else `transformers`. Where the layout splits
    the model, which that cannot, `megatron-bridge`, if it is installed and knows the kind. Raises
    BadInput where `megatron-bridge` is asked for and cannot train the kind.
    """
    if backend == "megatron-bridge" and (obstacle := why_not_bridged(kind)):
        raise BadInput(
            f"cannot train a {kind!r} model with backend=megatron-bridge: {obstacle}",
            param="backend",
        )
    if backend is not None:
        return backend
    if kind in SUPPORTED:
        return "megatron"
    splits = layout is not None and layout.splits_model
    return "megatron-bridge" if splits and why_not_bridged(kind) is None else "transformers"


def with_backend(spec: JobSpec, parent: Path) -> JobSpec:
    """Return the spec with backend=megatron-bridge if its layout needs that.

    The job's id is that of the spec with the backend. A parent that cannot be read
    decides nothing: the checks that follow say what is wrong.
    """
    hyper = spec.hyperparameters
    if hyper.backend is not None or not spec.layout.splits_model:
        return spec
    try:
        kind = read_config(parent).get("model_type", "")
    except (BadInput, NotFound):
        return spec
    if choose_backend(kind, None, spec.layout) != "megatron-bridge":
        return spec
    hyper = hyper.model_copy(update={"backend": "megatron-bridge"})
    return spec.model_copy(update={"hyperparameters": hyper})


def with_learning_rate(spec: JobSpec, parent: Path) -> JobSpec:
    """Return the spec with the usual learning rate if it gives none. The id is the decided rate's.

    A parent that cannot be read decides nothing, as above.
    """
    hyper = spec.hyperparameters
    if hyper.learning_rate is not None:
        return spec
    try:
        width = read_architecture(parent, hyper.backend).hidden
    except (BadInput, NotFound):
        return spec
    rate = {"learning_rate": usual_learning_rate(width, spec.method, hyper)}
    return spec.model_copy(update={"hyperparameters": hyper.model_copy(update=rate)})


def read_architecture(
    checkpoint: Path, backend: Backend | None = None, layout: Layout | None = None
) -> Architecture:
    """Read a checkpoint directory's config. Raises NotFound, or BadInput naming the obstacle.

    `backend` None: see `choose_backend`.
    """
    config = read_config(checkpoint)
    kind = config.get("model_type", "")
    backend = choose_backend(kind, backend, layout)
    if backend != "megatron":
        return _of_transformers(config, checkpoint, backend)
    if kind not in SUPPORTED:
        raise BadInput(
            f"cannot train a {kind!r} model ({checkpoint}) with backend=megatron, which has layers"
            f" for: {', '.join(SUPPORTED)}. Leave backend out, or ask for backend=transformers",
            param="backend",
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


def _of_transformers(config: dict[str, Any], checkpoint: Path, backend: Backend) -> Architecture:
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
        backend=backend,
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
                " is supported by backend=megatron; backend=transformers trains transformers' own"
                " layers, with data parallelism alone"
            )
