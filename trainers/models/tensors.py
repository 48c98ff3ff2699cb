"""Tensor names and shapes that a Hugging Face config implies, compared with a checkpoint's.

`read_parent` compares before anything is copied or started. A tensor beyond the config would be
dropped, and another model would be trained. weights.py makes random tensors of these shapes.
"""

import re
from dataclasses import replace
from pathlib import Path

from cray_agents.errors import BadInput
from cray_agents.runtime.registry.checkpoints import base_of
from cray_agents.runtime.registry.foreign_model import (
    EMBEDDING,
    HEAD,
    Tensor,
    is_tied,
    read_config,
    read_weights,
)
from cray_agents.trainers.models.architecture import Architecture, read_architecture
from cray_agents.training_jobs import Backend, Layout

Shapes = dict[str, tuple[int, ...]]
DTYPES = ("F64", "F32", "BF16", "F16")  # the types that can be trained, as safetensors names them
_BUFFERS = re.compile(r"rotary_emb\.(inv_freq|cos_cached|sin_cached)$")  # computed from the config
_NAMED = 5


def read_parent(
    checkpoint: Path,
    init: str = "parent",
    backend: Backend | None = None,
    layout: Layout | None = None,
) -> Architecture:
    """Read the model that a job starts from, and check its weights unless they start at random.

    Embedding and head are tied as transformers decides it. `backend` None: `choose_backend`. Raises
    NotFound, and BadInput for tensors that are missing, unknown, of another shape, or of a type
    that cannot be trained.
    """
    model = read_architecture(checkpoint, backend, layout)
    if model.backend != "megatron":
        if init == "random":
            return model
        from cray_agents.trainers.models.transformers_backend.parent_files import ParentFiles

        ParentFiles(checkpoint)  # compares its files with its config
        return model
    if init == "random":
        return model
    folder = (base_of(checkpoint) or checkpoint).resolve()
    weights = read_weights(folder)
    model = replace(model, tied=is_tied(folder, read_config(checkpoint), weights))
    _compare(weights, model, checkpoint)
    return model


def _compare(weights: dict[str, Tensor], model: Architecture, checkpoint: Path) -> None:
    experts = model.experts or 1
    if model.layers * experts > len(weights):  # spares a hostile config's millions of names
        raise BadInput(
            f"{checkpoint} lacks tensors that its config.json implies: it speaks of {model.layers}"
            f" layers{f' of {experts} experts' if model.experts else ''}, and there are"
            f" {len(weights)} tensors in all",
            param="parent",
        )
    implied = tensor_shapes(model)
    stored = dict(weights)
    if model.tied and HEAD in stored:  # tied: one tensor under either name
        stored.setdefault(EMBEDDING, stored[HEAD])
        del stored[HEAD]
    for name, shape in implied.items():
        if name not in stored:
            raise BadInput(
                f"{checkpoint} lacks the tensor {name!r} that its config.json implies",
                param="parent",
            )
        if stored[name].shape != shape:
            raise BadInput(
                f"{name} in {checkpoint} has the shape {list(stored[name].shape)}, and config.json"
                f" implies {list(shape)}: they are of different models",
                param="parent",
            )
        if stored[name].dtype not in DTYPES:
            raise BadInput(
                f"{checkpoint}: {name!r} is stored as {stored[name].dtype}; supported are"
                f" {', '.join(DTYPES)}: save it as one of these",
                param="parent",
            )
    extra = [n for n in stored if n not in implied and not _BUFFERS.search(n)]
    if extra:
        more = f" and {len(extra) - _NAMED} more" if len(extra) > _NAMED else ""
        raise BadInput(
            f"{checkpoint} has tensors that its config.json does not imply, and that training would"
            f" drop: {', '.join(sorted(extra)[:_NAMED])}{more}; correct the config, or save the"
            " model without them",
            param="parent",
        )


def tensor_shapes(model: Architecture) -> Shapes:
    """Map every tensor's name to its shape; matrices are [out, in], as in torch."""
    shapes: Shapes = {"model.embed_tokens.weight": (model.vocab, model.hidden)}
    for layer in range(model.layers):
        prefix = f"model.layers.{layer}."
        shapes |= {prefix + name: shape for name, shape in _layer(model).items()}
    shapes["model.norm.weight"] = (model.hidden,)
    if not model.tied:
        shapes["lm_head.weight"] = (model.vocab, model.hidden)
    return shapes


def hf_name(model: Architecture, name: str) -> str:
    """Translate a tensor's name for an architecture with names of its own."""
    if model.kind == "mixtral":
        for common, own in _MIXTRAL.items():
            name = name.replace(common, own)
    return name


_MIXTRAL = {"mlp.": "block_sparse_moe.", "gate_proj": "w1", "down_proj": "w2", "up_proj": "w3"}


def _layer(model: Architecture) -> Shapes:
    hidden, queries, keys = (
        model.hidden,
        model.heads * model.head_size,
        model.kv_heads * model.head_size,
    )
    shapes: Shapes = {
        "input_layernorm.weight": (hidden,),
        "self_attn.q_proj.weight": (queries, hidden),
        "self_attn.k_proj.weight": (keys, hidden),
        "self_attn.v_proj.weight": (keys, hidden),
        "self_attn.o_proj.weight": (hidden, queries),
        "post_attention_layernorm.weight": (hidden,),
    }
    if model.qkv_bias:
        shapes |= {
            "self_attn.q_proj.bias": (queries,),
            "self_attn.k_proj.bias": (keys,),
            "self_attn.v_proj.bias": (keys,),
        }
    if model.qk_norm:
        shapes |= {f"self_attn.{x}_norm.weight": (model.head_size,) for x in "qk"}
    if not model.experts:
        return shapes | _feed_forward("mlp.", hidden, model.ffn)
    shapes["mlp.gate.weight"] = (model.experts, hidden)
    for expert in range(model.experts):
        shapes |= _feed_forward(f"mlp.experts.{expert}.", hidden, model.expert_ffn)
    return {hf_name(model, name): shape for name, shape in shapes.items()}


def _feed_forward(prefix: str, hidden: int, size: int) -> Shapes:
    return {
        f"{prefix}gate_proj.weight": (size, hidden),
        f"{prefix}up_proj.weight": (size, hidden),
        f"{prefix}down_proj.weight": (hidden, size),
    }
