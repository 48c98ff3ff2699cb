"""The tensors of a Hugging Face checkpoint, as its config implies them: names and shapes.

`read_parent` holds them against what a checkpoint has, before anything is copied or started: what
is left over would be dropped, and another model would be trained. initial.py makes them.
"""

import re
from dataclasses import replace
from pathlib import Path

from cray_agents.errors import BadInput
from cray_agents.runtime.registry.model_config import EMBEDDING, HEAD, is_tied, read_config
from cray_agents.runtime.registry.model_files import Tensor, read_weights
from cray_agents.trainers.models.architecture import Architecture, read_architecture

Shapes = dict[str, tuple[int, ...]]
DTYPES = ("F64", "F32", "BF16", "F16")  # safetensors' words, of what can be trained
_BUFFERS = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # computed from the config
_SHOWN = 5


def read_parent(checkpoint: Path, init: str = "parent") -> Architecture:
    """The model that a job starts from: by its config and, where it has them, its weights.

    Embedding and head are tied as transformers decides it. Raises NotFound, and BadInput for
    tensors that are missing, too many, of another shape, or of a type that cannot be trained.
    """
    model = read_architecture(checkpoint)
    if init == "random":
        return model
    weights = read_weights(checkpoint.resolve())
    model = replace(model, tied=is_tied(checkpoint.resolve(), read_config(checkpoint), weights))
    _compare(weights, model, checkpoint)
    return model


def _compare(weights: dict[str, Tensor], model: Architecture, checkpoint: Path) -> None:
    experts = model.experts or 1
    if model.layers * experts > len(weights):  # before so many names are made
        raise BadInput(
            f"{checkpoint} lacks tensors that its config.json implies: it speaks of {model.layers}"
            f" layers{f' of {experts} experts' if model.experts else ''}, and there are"
            f" {len(weights)} tensors in all",
            param="parent",
        )
    implied = shapes(model)
    held = dict(weights)
    if model.tied and HEAD in held:  # the same numbers, or all there is of the two
        held.setdefault(EMBEDDING, held[HEAD])
        del held[HEAD]
    for name, shape in implied.items():
        if name not in held:
            raise BadInput(
                f"{checkpoint} lacks the tensor {name!r} that its config.json implies",
                param="parent",
            )
        if held[name].shape != shape:
            raise BadInput(
                f"{name} in {checkpoint} has the shape {list(held[name].shape)}, and config.json"
                f" implies {list(shape)}: they are of different models",
                param="parent",
            )
        if held[name].dtype not in DTYPES:
            raise BadInput(
                f"{checkpoint}: {name!r} is stored as {held[name].dtype}; supported are"
                f" {', '.join(DTYPES)}: save it as one of these",
                param="parent",
            )
    others = [n for n in held if n not in implied and not _BUFFERS.search(n)]
    if others:
        more = f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
        raise BadInput(
            f"{checkpoint} has tensors that its config.json does not imply, and that training would"
            f" drop: {', '.join(sorted(others)[:_SHOWN])}{more}; correct the config, or save the"
            " model without them",
            param="parent",
        )


def shapes(model: Architecture) -> Shapes:
    """Name -> shape of every tensor; matrices are [out, in], as torch has them."""
    found: Shapes = {"model.embed_tokens.weight": (model.vocab, model.hidden)}
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        found |= {prefix + name: shape for name, shape in _layer(model).items()}
    found["model.norm.weight"] = (model.hidden,)
    if not model.tied:
        found["lm_head.weight"] = (model.vocab, model.hidden)
    return found


def hf_name(model: Architecture, name: str) -> str:
    """A tensor's name where the architecture has its own words for it."""
    if model.kind == "mixtral":
        for plain, theirs in _MIXTRAL.items():
            name = name.replace(plain, theirs)
    return name


_MIXTRAL = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _layer(model: Architecture) -> Shapes:
    hidden, queries, keys = (
        model.hidden,
        model.heads * model.head_size,
        model.kv_heads * model.head_size,
    )
    found: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
    }
    if model.qkv_bias:
        found |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if model.qk_norm:
        found |= {f"self_attn.{x}_norm.weight": (model.head_size,) for x in "qk"}
    if not model.experts:
        return found | _feed_forward("mlp.", hidden, model.ffn)
    found["mlp.gate.weight"] = (model.experts, hidden)
    for expert in range(model.experts):
        found |= _feed_forward(f"mlp.experts.{expert}.", hidden, model.expert_ffn)
    return {hf_name(model, name): shape for name, shape in found.items()}


def _feed_forward(prefix: str, hidden: int, size: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (size, hidden),
        f"{prefix}up_proj.weight": (size, hidden),
        f"{prefix}down_proj.weight": (hidden, size),
    }
