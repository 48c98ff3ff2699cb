"""Memory: an upper estimate of the bytes that a training job needs on each rank.

The estimate counts data that lasts through a step. The allocator, CUDA and NCCL need more, for
which layout_choice.py keeps a reserve. No torch.
"""

from dataclasses import dataclass
from math import ceil
from typing import Literal

from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.planning.arithmetic import (
    adapter_weights,
    attention_weights,
    expert_weights,
    mlp_weights,
)
from cray_agents.training_jobs import Hyperparameters, Layout

GIB = 2**30
UNFUSED = 3  # times as much is kept by transformers' modules, from above: they fuse little
Recompute = Literal["none", "selective", "full"]  # as in JobSpec


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank, by purpose."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float

    @property
    def total(self) -> float:
        """The sum in bytes."""
        return self.weights + self.gradients + self.optimizer + self.activations + self.logits

    @property
    def gib(self) -> float:
        """The sum in GiB."""
        return self.total / GIB


@dataclass(frozen=True)
class WeightShare:
    """Weights of one rank: dense ones, equal on all data ranks, and its experts'."""

    dense: int
    experts: int


def estimate_memory(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    *,
    sequence_length: int,
    recompute: Recompute = "none",
) -> Memory:
    """Estimate the memory of the fullest rank, in the first or the last pipeline stage.

    The first has the embedding and the most micro-batches in flight, the last the output layer and
    the logits. `sequence_length`, the tokens of a usual sequence, decides the number of
    micro-batches.
    """
    waiting = in_flight(layout, micro_batches(layout, hyper, sequence_length))
    first = _stage(model, layout, hyper, 0, waiting, recompute)
    last = _stage(model, layout, hyper, layout.pipeline - 1, 1.0, recompute)
    if layout.pipeline == 1:
        return last
    return max(first, last, key=lambda memory: memory.total)


def micro_batches(layout: Layout, hyper: Hyperparameters, sequence_length: int) -> int:
    """Return a data rank's micro-batches in a step, if packing leaves no gaps."""
    tokens = ceil(hyper.batch_size / layout.data) * sequence_length
    return max(1, ceil(tokens / hyper.max_tokens_per_microbatch))


def in_flight(layout: Layout, count: int) -> float:
    """Return the most micro-batches whose activations the first stage holds, for all its layers.

    With one forward, one backward they equal the stages; interleaving multiplies them by
    1 + (p - 1) / (p v) (arXiv 2205.05198, section 4.2.3). `count` is the limit.
    """
    stages, chunks = layout.pipeline, layout.interleave
    more = 1 + (stages - 1) / (stages * chunks) if chunks > 1 else 1.0
    return min(stages * more, float(count))


def weight_share(model: Architecture, layout: Layout, stage: int) -> WeightShare:
    """Return the weights of a rank in a pipeline stage, with the vocabulary padded."""
    if model.way == "universal":
        weights, experts = model.counted
        return WeightShare(weights - experts, experts)
    layers, tensor = model.layers // layout.pipeline, layout.tensor
    whole = 2 * model.hidden + (2 * model.head_size if model.qk_norm else 0)  # norms
    split = attention_weights(model) - (2 * model.head_size if model.qk_norm else 0)
    if model.experts:
        whole += mlp_weights(model)  # the router
    else:
        split += mlp_weights(model)
    dense = layers * (whole + split // tensor)
    table = ceil(model.vocab / tensor) * model.hidden
    last = stage == layout.pipeline - 1
    if stage == 0:
        dense += table
    if last:
        dense += model.hidden
    if last and not (model.tied and stage == 0):
        dense += table
    experts = layers * (model.experts or 0) // layout.expert * (expert_weights(model) // tensor)
    return WeightShare(dense, experts)


def _stage(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    stage: int,
    waiting: float,
    recompute: Recompute,
) -> Memory:
    """Estimate the memory of a rank in a pipeline stage.

    Weights are in their own type, gradients in float32. Adam's two moments, and in bfloat16 the
    float32 weights, are spread over the ranks with the same weights (ZeRO, arXiv 1910.02054;
    Megatron's distributed optimizer): data * context ranks, for experts divided by expert.
    """
    size = 2 if hyper.dtype == "bfloat16" else 4
    states = 12 if hyper.dtype == "bfloat16" else 8
    mine = weight_share(model, layout, stage)
    copies = layout.data * layout.context
    if hyper.lora is None:
        weights = size * (mine.dense + mine.experts)
        trained = mine.dense + mine.experts
        optimizer = states * (mine.dense + mine.experts * layout.expert) / copies
    else:
        trained = ceil(adapter_weights(model, hyper.lora) / layout.pipeline)
        weights = size * (mine.dense + mine.experts + trained)
        optimizer = states * trained / copies
    tokens = hyper.max_tokens_per_microbatch / layout.context
    layers = model.layers // layout.pipeline
    if recompute == "full":  # each layer's input, and the one layer in recomputation
        split = layout.tensor if layout.sequence_parallel else 1
        inputs = layers * size * model.hidden / split
        kept = waiting * inputs + layer_activations(model, layout, size)
    else:
        kept = waiting * layers * layer_activations(model, layout, size)
    logits = 0.0
    if stage == layout.pipeline - 1:
        logits = tokens * (4 + 2 * size) * ceil(model.vocab / layout.tensor)
    return Memory(weights, 4.0 * trained, optimizer, tokens * kept, logits)


def layer_activations(model: Architecture, layout: Layout, size: int) -> float:
    """Return the bytes that one layer keeps for the backward pass of one token on a rank.

    The formula is equations 2 and 4 of arXiv 2205.05198, adapted to these models: no dropout,
    grouped keys, a gated feed-forward layer, experts with even loads. Inputs of the norms and the
    first linear layers are split over tensor ranks only with sequence parallelism. With as many
    keys as queries and f = 8 h / 3 it is the paper's 34 h less 2 h of dropout masks. Attention is
    fused everywhere and keeps no scores: the term 5 a s / h is 0, and "selective" saves nothing.
    """
    hidden, queries = model.hidden, model.heads * model.head_size
    keys = model.kv_heads * model.head_size
    attention = 2 * queries + 2 * keys  # q, k, v and the output projection's input
    if model.qk_norm:
        attention += queries + keys  # the norms' inputs
    feed = 3 * model.ffn / layout.tensor  # gate, up, and their product
    routing = 0.0
    if model.experts:  # a token's copies on the way to its experts and back
        feed = model.experts_per_token * (2 * hidden + 3 * model.expert_ffn / layout.tensor)
        routing = 8.0 * model.experts  # logits and probabilities, float32
    around = 4 * hidden / (layout.tensor if layout.sequence_parallel else 1)
    kept = size * (around + attention / layout.tensor + feed) + routing
    return UNFUSED * kept if model.way == "universal" else kept
