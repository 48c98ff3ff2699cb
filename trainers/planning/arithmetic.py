"""Arithmetic: a model's number of weights, and floating-point operations per token.

The counts are exact, from an Architecture, without torch. memory.py turns them into bytes, plan.py
into hours. The trainer divides operations by time and peak for its MFU.
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
    head: int  # the output layer; 0 if it is the embedding

    @property
    def total(self) -> int:
        """The number of all weights in a checkpoint."""
        return self.embedding + self.attention + self.mlp + self.experts + self.norms + self.head


def count_weights(model: Architecture) -> Parameters:
    """Count the weights of a model. All but experts count as `mlp` if it is not native."""
    table = model.vocab * model.hidden
    if model.way != "native":
        weights, experts = model.counted
        rest = max(0, weights - experts - table)
        return Parameters(weights - experts - rest, 0, rest, experts, 0, 0)
    return Parameters(
        embedding=table,
        attention=model.layers * attention_weights(model),
        mlp=model.layers * mlp_weights(model),
        experts=model.layers * (model.experts or 0) * expert_weights(model),
        norms=(2 * model.layers + 1) * model.hidden,
        head=0 if model.tied else table,
    )


def attention_weights(model: Architecture) -> int:
    """Count one layer's q, k, v and output projections, biases, and norms of queries and keys."""
    queries, keys = model.heads * model.head_size, model.kv_heads * model.head_size
    matrices = model.hidden * (2 * queries + 2 * keys)
    biases = queries + 2 * keys if model.qkv_bias else 0
    return matrices + biases + (2 * model.head_size if model.qk_norm else 0)


def mlp_weights(model: Architecture) -> int:
    """Count one layer's gate, up and down; with experts, only the router."""
    return model.hidden * (model.experts if model.experts else 3 * model.ffn)


def expert_weights(model: Architecture) -> int:
    """Count gate, up and down of one expert of one layer."""
    return 3 * model.hidden * model.expert_ffn


def adapter_weights(model: Architecture, lora: Lora) -> int:
    """Count LoRA's weights: rank * (in + out) per target; fc1 is gate and up in one.

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


def weights_per_token(model: Architecture) -> int:
    """Return N, the number of weights that each token is multiplied with.

    The embedding is looked up and does not count, but a tied one counts as the output layer. Of the
    experts only those of a token count.
    """
    weights = count_weights(model)
    idle = 0
    if model.experts:
        idle = weights.experts // model.experts * (model.experts - model.experts_per_token)
    return weights.total - idle - (0 if model.tied else weights.embedding)


def flops_per_token(model: Architecture, length: float, lora: Lora | None = None) -> float:
    """Return the operations to train on one token of a `length`-token sequence: 6 N + 12 L a d s.

    The count is PaLM's, appendix B of arXiv 2204.02311: two for each weight forward and four
    backward, and attention's two products over the whole square, causal or not. Recomputation does
    not count. LoRA's frozen weights need no gradient: 4 N + 6 per adapter weight. For sequences of
    many lengths take sum(length ** 2) / sum(length).
    """
    weights = weights_per_token(model)
    if lora is None:
        return 6 * weights + 3 * _attention(model, length)
    return 4 * weights + 6 * adapter_weights(model, lora) + 3 * _attention(model, length)


def flops_per_scored_token(model: Architecture, length: float) -> float:
    """Return a token's operations in a forward pass alone: 2 N + 4 L a d s."""
    return 2 * weights_per_token(model) + _attention(model, length)


def _attention(model: Architecture, length: float) -> float:
    return 4 * model.layers * model.heads * model.head_size * length
