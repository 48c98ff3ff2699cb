"""Arithmetic: a model's weights, floating-point operations per token, and bytes on each rank.

Weights and operations are exact, from an Architecture. The trainer divides operations by time and
peak for its MFU. Memory is an estimate from above of the data that lasts through a step: the
allocator, CUDA and NCCL need more, for which layouts.py keeps a reserve. On CPUs it was compared
with what Megatron and torch hold, on GPUs it was not. No torch.
"""

from dataclasses import dataclass, replace
from math import ceil

from cray_agents.trainers.models.architecture import MOST_LOGITS, SUPPORTED, Architecture
from cray_agents.training_jobs import Hyperparameters, Layout, Lora


@dataclass(frozen=True)
class Parameters:
    """Weights of a whole model; a vocabulary's padding is not counted. `embedding`: its table."""

    total: int
    embedding: int
    experts: int


def count_weights(model: Architecture) -> Parameters:
    """Count the weights of a model."""
    table = model.vocab * model.hidden
    if model.backend != "megatron":
        total, experts = model.counted
        return Parameters(total, min(table, total - experts), experts)
    experts = model.layers * (model.experts or 0) * expert_weights(model)
    dense = model.layers * (attention_weights(model) + mlp_weights(model))
    norms = (2 * model.layers + 1) * model.hidden
    tables = table if model.tied else 2 * table
    return Parameters(tables + dense + norms + experts, table, experts)


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


GIB = 2**30
# layers whose weights, and whose gradients, FSDP holds whole at a time (weight_shards.py)
GATHERED, SUMMED = 2, 3


@dataclass(frozen=True)
class Memory:
    """Bytes of the fullest rank, by purpose. `teacher`: its weights and its passes (distill)."""

    weights: float
    gradients: float
    optimizer: float
    activations: float
    logits: float
    teacher: float = 0.0

    @property
    def total(self) -> float:
        """The most bytes at a time: a teacher has gone before steps keep activations."""
        lasting = self.weights + self.gradients + self.optimizer
        return lasting + max(self.activations + self.logits, self.teacher)

    @property
    def gib(self) -> float:
        """The most GiB at a time."""
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
    recompute: str = "none",
    on_cpu: bool = False,
    teacher: Architecture | None = None,
) -> Memory:
    """Estimate the memory of the fullest rank.

    The first pipeline stage has the embedding and the most micro-batches in flight, the last the
    output layer and the logits, and where layers do not divide another may have one more.
    `sequence_length`, the tokens of a usual sequence, decides the number of micro-batches. With
    `on_cpu` all logits are held at once. `teacher`: another model, which scores the samples before
    the first step, spread as the layout says, without gradients or an optimizer.
    """
    count = micro_batches(layout, hyper, sequence_length)
    layers = layout.stage_layers(model.layers)
    stages = {0, layers.index(max(layers)), layout.pipeline - 1}
    memories = []
    for stage in stages:
        memory = _stage(model, layout, hyper, stage, count, recompute, on_cpu)
        if teacher is not None:
            scoring = _scoring(teacher, layout, hyper, stage, on_cpu)
            memory = replace(memory, teacher=scoring)
        memories.append(memory)
    return max(memories, key=lambda memory: memory.total)


def micro_batches(layout: Layout, hyper: Hyperparameters, sequence_length: int) -> int:
    """Return a data rank's micro-batches in a step, if packing leaves no gaps."""
    tokens = ceil(hyper.batch_size / layout.data) * sequence_length
    return max(1, ceil(tokens / hyper.max_tokens_per_microbatch))


def in_flight(layout: Layout, count: int, stage: int = 0) -> float:
    """Return the most micro-batches whose activations a stage holds, for all its layers.

    With one forward, one backward they equal the stages from this one on. With interleaving, stage
    s of p holds v p + p - 1 - 2 s chunks of v (Megatron's schedule; of the first stage arXiv
    2205.05198, section 4.2.3, says the same). `count` is the limit.
    """
    stages, chunks = layout.pipeline, layout.interleave
    most = stages + (stages - 1 - 2 * stage) / chunks if chunks > 1 else stages - stage
    return min(float(most), float(count))


def weight_share(model: Architecture, layout: Layout, stage: int) -> WeightShare:
    """Return the weights of a rank in a pipeline stage, with the vocabulary padded."""
    if model.backend != "megatron":
        weights, experts = model.counted
        tables = min(weights - experts, 2 * model.vocab * model.hidden)  # not split by stages
        split = layout.tensor * layout.pipeline
        dense = (weights - experts - tables) // split + tables // layout.tensor
        return WeightShare(dense, experts // (split * layout.expert))
    layers, tensor = layout.stage_layers(model.layers)[stage], layout.tensor
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
    count: int,
    recompute: str,
    on_cpu: bool,
) -> Memory:
    """Estimate the memory of a rank in a pipeline stage, for `count` micro-batches a step.

    Weights are in their own type, gradients in float32. Adam's two moments, and in bfloat16 the
    float32 weights, are spread over the ranks with the same weights (ZeRO, arXiv 1910.02054;
    Megatron's distributed optimizer): data * context ranks of an optimizer's instance, for experts
    divided by expert. FP8 keeps two copies of the matrices in eight bits beside them, one of them
    transposed. Full sharding spreads weights and gradients too; see `_at_once`.
    """
    size = 2 if hyper.dtype == "bfloat16" else 4
    states = 12 if hyper.dtype == "bfloat16" else 8
    mine = weight_share(model, layout, stage)
    copies = layout.data * layout.context / layout.optimizer_instances
    weights: float
    if hyper.lora is None:
        weights = size * _at_once(model, layout, mine, GATHERED)
        gradients = 4.0 * _at_once(model, layout, mine, SUMMED)
        optimizer = states * (mine.dense + mine.experts * layout.expert) / copies
    else:
        share = layout.stage_layers(model.layers)[stage] / model.layers
        trained = ceil(adapter_weights(model, hyper.lora) * share)
        weights = size * (mine.dense + mine.experts + trained)
        gradients = 4.0 * trained
        optimizer = states * trained / copies
    fp8 = hyper.fp8 is not None
    if fp8:
        weights += 2.0 * (mine.dense + mine.experts)
    tokens = hyper.max_tokens_per_microbatch / layout.context
    layers = layout.stage_layers(model.layers)[stage]
    each = layer_activations(model, layout, size, recompute, fp8=fp8, on_cpu=on_cpu)
    kept = in_flight(layout, count, stage) * layers * each
    if recompute not in ("none", "selective"):  # the one layer in recomputation
        kept += layer_activations(model, layout, size, fp8=fp8, on_cpu=on_cpu)
    logits = 0.0
    if stage == layout.pipeline - 1:
        logits = _logits(model, layout, tokens, size, on_cpu)
    return Memory(weights, gradients, optimizer, tokens * kept, logits)


def _at_once(model: Architecture, layout: Layout, mine: WeightShare, layers: int) -> float:
    """Return the most weights, or gradients, that a rank holds at a time.

    With full sharding that is its shard, and whole what is under way: some layers, the embedding
    and the output layer.
    """
    whole = mine.dense + mine.experts
    if layout.sharding == "optimizer":
        return whole
    tables = min(whole, model.vocab * model.hidden * (1 if model.tied else 2))
    under_way = tables + min(layers, model.layers) * (whole - tables) / model.layers
    return whole / layout.data + under_way


def _scoring(
    model: Architecture, layout: Layout, hyper: Hyperparameters, stage: int, on_cpu: bool
) -> float:
    """Return the bytes of a model that only scores: weights, a layer's activations, logits."""
    size = 2 if hyper.dtype == "bfloat16" else 4
    tokens = hyper.max_tokens_per_microbatch / layout.context
    mine = weight_share(model, layout, stage)
    weights = size * _at_once(model, layout, mine, GATHERED)
    logits = _logits(model, layout, tokens, size, on_cpu) if stage == layout.pipeline - 1 else 0.0
    return weights + tokens * layer_activations(model, layout, size, on_cpu=on_cpu) + logits


def _logits(model: Architecture, layout: Layout, tokens: float, size: int, on_cpu: bool) -> float:
    """Return the bytes of logits and their gradients, and in chunks of the head's gradients: the
    passed one, and in bfloat16 a chunk's.
    """
    columns = ceil(model.vocab / layout.tensor)
    numbers = tokens * columns
    whole = on_cpu or (model.backend == "transformers" and layout.sharding == "full")
    if whole or numbers <= MOST_LOGITS:
        return numbers * (4 + 2 * size)
    return MOST_LOGITS * (4 + 2 * size) + columns * model.hidden * 4


def layer_activations(
    model: Architecture,
    layout: Layout,
    size: int,
    recompute: str = "none",
    *,
    fp8: bool = False,
    on_cpu: bool = False,
) -> float:
    """Return the bytes that one layer keeps for the backward pass of one token on a rank.

    The formula is equations 2 and 4 of arXiv 2205.05198, adapted to these models: no dropout,
    grouped keys, a gated feed-forward layer, experts with even loads. Inputs of the norms and the
    first linear layers are split over tensor ranks only with sequence parallelism. With as many
    keys as queries and f = 8 h / 3 it is the paper's 34 h less 2 h of dropout masks. Attention is
    fused everywhere and keeps no scores: the term 5 a s / h is 0, and "selective" saves nothing.
    `recompute` as in JobSpec: "full" keeps a layer's input alone. "layernorm" is counted as on
    layers of torch; Transformer Engine's, which contain their norms, save nothing by it. `fp8`: the
    inputs of linear layers are kept in eight bits, that of the output projection in both forms.
    On CPUs attention's output is kept in two orders, and an activation's; in bfloat16 torch's norms
    also keep their inputs in float32, and their quotients. transformers' own modules fuse little:
    see `_unfused`.
    """
    if model.backend == "transformers":
        return size * model.hidden if recompute == "full" else _unfused(model, size)
    hidden, queries = model.hidden, model.heads * model.head_size
    keys = model.kv_heads * model.head_size
    split = layout.tensor if layout.sequence_parallel else 1
    if recompute == "full":
        return size * hidden / split
    modules, of_linear = recompute.split(","), 1 if fp8 else size
    attention = size * (2 * queries + 2 * keys)  # q, k, v and the output projection's input
    if fp8:
        attention += queries
    if model.qk_norm:
        attention += size * (queries + keys)  # the norms' inputs
    routing, copies, width = 0.0, 1, model.ffn / layout.tensor
    feed = 0.0
    if model.experts:  # a token's copies on the way to its experts and back
        copies, width = model.experts_per_token, model.expert_ffn / layout.tensor
        feed = copies * (of_linear + size) * hidden
        routing = 8.0 * model.experts  # logits and probabilities, float32
    feed += copies * width * 2 * size  # gate and up
    if "moe_act" not in modules:
        feed += copies * width * of_linear  # their product
    if "mlp" in modules or "moe" in modules:
        feed = routing = 0.0
    around = 2 * hidden * size / split  # the norms' inputs, and their outputs
    if on_cpu:
        attention += size * queries
        if feed:
            feed += copies * width * size
        if size == 2:
            around += 2 * hidden * (4 + size) / split
            attention += (queries + keys) * (4 + size) if model.qk_norm else 0
    if "layernorm" not in modules:
        around += 2 * hidden * of_linear / split
    return around + attention / layout.tensor + feed + routing


def _unfused(model: Architecture, size: int) -> float:
    """Return the bytes that a layer of transformers keeps for the backward pass of one token.

    A norm keeps its input in float32, and the product before and after its weight. Attention keeps
    queries, keys and values, its output, and that once more in the order of the projection. A gated
    layer keeps its gate before and after the activation, the other half, and their product. From
    above, four norms and those of queries and keys are counted for kinds whose layers are not
    known, such as Gemma has.
    """
    hidden, queries = model.hidden, model.heads * model.head_size
    keys = model.kv_heads * model.head_size
    known = model.kind in SUPPORTED
    norms = (2 if known else 4) * hidden * (4 + 2 * size)
    if model.qk_norm or not known:
        norms += (queries + keys) * (4 + size)
    attention = size * (3 * queries + 2 * keys)
    if not model.experts:
        return norms + attention + 4 * size * model.ffn
    copies = model.experts_per_token
    feed = copies * size * (2 * hidden + 4 * model.expert_ffn) + 12 * model.experts
    return norms + attention + feed
