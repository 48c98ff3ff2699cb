"""Model sizes: what planning needs of a model that only transformers knows.

The network is built without memory (on torch's meta device) to count its weights. Nothing of the
directory but its config.json and the headers of its weights is read. Called by
models/architecture.py. Read next: text_model.py.
"""

import hashlib
import json
from dataclasses import dataclass
from functools import lru_cache
from math import prod
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.runtime.registry.foreign_model import read_weights, with_whole_references

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
    from cray_agents.trainers.models.universal.text_model import TextModel

    model = TextModel(config, checkpoint)
    text = model.config.get_text_config()
    layers = _number(text, "num_hidden_layers")
    stored = read_weights(checkpoint.resolve())
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

    from cray_agents.trainers.models.universal.text_model import TextModel

    network = TextModel(json.loads(config), checkpoint).build(torch.float32, "meta")
    tied = network.all_tied_weights_keys  # by the config; they are one tensor with another
    named = network.named_parameters()
    sizes = {name: prod(one.shape) for name, one in named if name not in tied}
    experts = sum(number for name, number in sizes.items() if ".experts." in name)
    return type(network).__name__, (sum(sizes.values()), experts)
