"""Model config: read a config.json, and refuse values that no model can have.

Only the kinds in KINDS are checked: the numbers of others are known to the engine alone. Called by
checkpoints.py; trainers/models/architecture.py makes an Architecture of it. Read next:
model_files.py.
"""

import math
import os
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, NotFound
from cray_agents.runtime.registry.model_files import CONFIG, Tensor, read_json, same_values

KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
MIXTURES = ("mixtral", "qwen3_moe")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = "tie_word_embeddings"
# whole numbers from 1 on; a value larger than in any known model means a damaged file
_MOST = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 26,
    "max_position_embeddings": 1 << 31,
    "original_max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
}
_MOST_OF_MIXTURES = {
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "moe_intermediate_size": 1 << 24,
}
_MOST_EXPERTS = 1_000_000  # in all layers together
_FLAGS = (TIED, "use_sliding_window", "norm_topk_prob")
_FLOATS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")


def read_config(directory: Path) -> dict[str, Any]:
    """Read and check a directory's config.json. Raises NotFound without one, BadInput."""
    if not os.path.lexists(directory / CONFIG):
        raise NotFound(
            f"{directory} has no {CONFIG}: give a Hugging Face checkpoint", param="checkpoint"
        )
    config = read_json(directory.resolve(), CONFIG)
    if config.get("model_type") in KINDS:
        _check_numbers(config, directory / CONFIG)
    return config


def _check_numbers(config: dict[str, Any], path: Path) -> None:
    """Raise BadInput that names the first key with an impossible value."""

    def refuse(name: str, must: str) -> BadInput:
        value = repr(config[name])[:100]
        return BadInput(f"{path} has {name} = {value}, which must be {must}", param="checkpoint")

    most = _MOST | (_MOST_OF_MIXTURES if config["model_type"] in MIXTURES else {})
    for name, limit in most.items():
        value = config.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= limit):
            raise refuse(name, f"a whole number from 1 to {limit}")
    for name in _FLAGS:
        if not isinstance(config.get(name, False), bool):
            raise refuse(name, "true or false")
    for name in _FLOATS:
        if config.get(name) is not None and not is_positive(config[name]):
            raise refuse(name, "a finite number above 0")
    if config.get("initializer_range") and not is_positive(config["initializer_range"]):
        raise refuse("initializer_range", "a finite number from 0 on")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), dict | None):
            raise refuse(name, "an object")
    for name in ("dtype", "torch_dtype", "hidden_act"):
        if not isinstance(config.get(name), str | None):
            raise refuse(name, "a text")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if heads and heads % (config.get("num_key_value_heads") or heads):
        raise refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if heads and hidden and not config.get("head_dim") and hidden % heads:
        raise refuse("num_attention_heads", f"a divisor of hidden_size ({hidden})")
    experts = config.get("num_local_experts") or config.get("num_experts")
    if config["model_type"] in MIXTURES and experts:
        if (config.get("num_experts_per_tok") or 1) > experts:
            raise refuse("num_experts_per_tok", f"at most the number of experts ({experts})")
        if experts * (config.get("num_hidden_layers") or 1) > _MOST_EXPERTS:
            raise refuse("num_hidden_layers", f"less with {experts} experts in each layer")


def is_positive(value: object) -> bool:
    """Tell whether a value of JSON is a finite number above 0."""
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def is_tied(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> bool:
    """Tell whether embedding and head are one tensor, by transformers' rule when it loads a model.

    The config must tie them, and two stored tensors must be equal: `tie_weights` of transformers 5
    leaves different ones separate.
    """
    if not config.get(TIED):
        return False
    both = EMBEDDING in weights and HEAD in weights
    return not both or same_values(directory, weights[EMBEDDING], weights[HEAD])
