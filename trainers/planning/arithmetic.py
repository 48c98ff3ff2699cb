"""How many weights a model has, and how many floating-point operations a token costs.

Exact counts from an Architecture, without torch. memory.py turns them into bytes, plan.py into
hours; the trainer divides operations by time and peak for its MFU.
"""

from dataclasses import dataclass

from cray_agents.trainers.models.architecture import Architecture
from cray_agents.training_jobs import Lora


@dataclass(frozen=True)
class Parameters:
    """Weights of a whole model by component; a vocabulary's padding is not counted."""

    embedding: int
    attention: int  # projections, their biases, the norms of queries and keys
    mlp: int  # dense feed-forward layers, or the routers of experts
    experts: int
    norms: int
    head: int  # the output layer; 0: it is the embedding

    @property
    def total(self) -> int:
        """All of them, as a checkpoint holds them."""
        return self.embedding + self.attention + self.mlp + self.experts + self.norms + self.head


def count(model: Architecture) -> Parameters:
    """The weights of a model."""
    table = model.vocab * model.hidden
    return Parameters(
        embedding=table,
        attention=model.layers * attention_weights(model),
        mlp=model.layers * mlp_weights(model),
        experts=model.layers * (model.experts or 0) * expert_weights(model),
        norms=(2 * model.layers + 1) * model.hidden,
        head=0 if model.tied else table,
    )


def attention_weights(model: Architecture) -> int:
    """Of one layer: q, k, v and output projections, biases, the norms of queries and keys."""
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    matrices = model.hidden * (2 * queries + 2 * keys)
    biases = queries + 2 * keys if model.qkv_bias else 0
    return matrices + biases + (2 * model.head_size if model.qk_norm else 0)


def mlp_weights(model: Architecture) -> int:
    """Of one layer, outside its experts: gate, up and down; with experts, the router."""
    return model.hidden * (model.experts if model.experts else 3 * model.ffn)


def expert_weights(model: Architecture) -> int:
    """Of one expert of one layer: gate, up and down."""
    return 3 * model.hidden * model.expert_ffn


def adapter_weights(model: Architecture, lora: Lora) -> int:
    """What LoRA trains: rank * (in + out) per target, of which fc1 is gate and up in one.

    The feed-forward layers of experts have no adapters.
    """
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    sizes = {
        "qkv": model.hidden + queries + 2 * keys,
        "proj": queries + model.hidden,
        "fc1": 0 if model.experts else model.hidden + 2 * model.ffn,
        "fc2": 0 if model.experts else model.ffn + model.hidden,
    }
    return model.layers * lora.rank * sum(sizes[target] for target in set(lora.targets))


def multiplied(model: Architecture) -> int:
    """N, the weights each token is multiplied with.

    Without the embedding, which is looked up (a tied one counts as the output layer), and of the
    experts those that a token is sent to.
    """
    parts = count(model)
    idle = 0
    if model.experts:
        idle = parts.experts // model.experts * (model.experts - model.experts_per_token)
    return parts.total - idle - (0 if model.tied else parts.embedding)


def flops_per_token(model: Architecture, length: float, lora: Lora | None = None) -> float:
    """Operations to train on one token of a sequence of `length` tokens: 6 N + 12 L a d s.

    PaLM's count, appendix B of arXiv 2204.02311: two for each weight forward and four backward,
    and attention's two products over the whole square, causal or not; what is recomputed does not
    count. LoRA's frozen weights need no gradient: 4 N + 6 of the adapters'. For sequences of many
    lengths take sum(length ** 2) / sum(length).
    """
    weights = multiplied(model)
    if lora is None:
        return 6 * weights + 3 * _attention(model, length)
    return 4 * weights + 6 * adapter_weights(model, lora) + 3 * _attention(model, length)


def flops_per_scored_token(model: Architecture, length: float) -> float:
    """Operations of a forward pass alone: 2 N + 4 L a d s."""
    return 2 * multiplied(model) + _attention(model, length)


def _attention(model: Architecture, length: float) -> float:
    return 4 * model.layers * model.heads * model.head_size * length
