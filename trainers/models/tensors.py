"""The tensors of a Hugging Face checkpoint, as its config implies them: names and shapes.

initial.py makes them, weights.py compares them with what a checkpoint holds.
"""

from cray_agents.trainers.models.architecture import Architecture

Shapes = dict[str, tuple[int, ...]]


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
