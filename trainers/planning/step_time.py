"""Step time: estimate how much slower a layout is than GPUs that only multiply large matrices.

    slowdown = (matrices + messages) * bubble * uneven shares + sum of gradients, over work / peak

layout_choice.py ranks layouts by it, plan.py turns it into hours. The seven constants were fitted
to published runs of NVIDIA's Megatron and others, on H100, H800 and A100 GPUs; docs/planning.md
compares the estimate with each run, and says which were held out. No torch. Read next: hardware.py
for links.
"""

from math import ceil, sqrt

from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.planning.arithmetic import (
    expert_weights,
    flops_per_scored_token,
    flops_per_token,
    mlp_weights,
    weights_per_token,
)
from cray_agents.trainers.planning.hardware import Gpu, find_gpu
from cray_agents.trainers.planning.memory import micro_batches, weight_share
from cray_agents.training_jobs import Hyperparameters, Layout

KERNELS = 0.61  # share of a GPU's peak that large matrices reach in bfloat16
NARROW = 1150.0  # a matrix so wide is multiplied at half that speed
EXPOSED = 0.33  # share of a layer's messages that no computation hides
EXPOSED_COPIES = 0.25  # the same of tokens' copies for experts, which travel in small pieces
STALL = 3.1e-3  # seconds of a mixture's layer for a micro-batch: kernels to launch, loads to read
EXPOSED_SUM = 0.15  # the same of the sum of gradients and the new weights, once a step
FP8_GAIN = 1.82  # how much faster matrices are multiplied in eight bits


def slowdown(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    sequence_length: int,
    ranks_per_node: int,
    *,
    recompute: str = "none",
    gpu: Gpu | None = None,
    once_per_node: bool = False,
) -> float:
    """Estimate a step's time, relative to GPUs that always multiply at KERNELS of their peak.

    These count: narrow matrices, which FP8 does not mend; FP8; what is computed twice; messages
    within a layer, through the node's links or the network (tensor, context and expert
    parallelism); a stall in each layer of a mixture; the pipeline's bubble of (p - 1) / (m v)
    (arXiv 2104.04473, section 2.2) and its largest stage; ranks that idle if they do not divide
    the batch; and the sum of gradients over data ranks, once a step, or with full sharding in each
    micro-batch, as the weights are fetched twice in each. `gpu` None: an H100, to whose
    links and speed most are alike in proportion. `once_per_node`: a token travels once to a node
    with several of its experts, as with DeepEP; this trainer sends each copy.
    """
    gpu = find_gpu("H100") if gpu is None else gpu
    flops = flops_per_token(model, sequence_length, hyper.lora)
    ranks = layout.tensor * layout.pipeline * layout.context
    ideal = flops / ranks / (gpu.teraflops * 1e12 * KERNELS)  # seconds of a rank for a token
    busy = ideal * _matrices(model, layout, hyper, flops, sequence_length, recompute)
    waits = EXPOSED * _messages(model, layout, hyper, ranks_per_node, gpu)
    waits += EXPOSED_COPIES * _copies(
        model, layout, hyper, ranks_per_node, gpu, once_per_node=once_per_node
    )
    if model.experts:
        layers = max(layout.stage_layers(model.layers))
        waits += STALL * layers / hyper.max_tokens_per_microbatch
    count = micro_batches(layout, hyper, sequence_length)
    bubble = 1 + (layout.pipeline - 1) / (count * layout.interleave)
    largest = _largest_stage(model, layout)
    uneven = ceil(hyper.batch_size / layout.data) * layout.data / hyper.batch_size
    tokens = hyper.batch_size * sequence_length / layout.data
    summed = _sum_of_gradients(model, layout, hyper, ranks_per_node, gpu, count) / tokens
    whole = (busy + waits) * bubble * largest * uneven + EXPOSED_SUM * summed
    return whole / ideal


def _matrices(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    flops: float,
    length: int,
    recompute: str,
) -> float:
    """Return the time of a rank's own work, relative to large matrices and nothing done twice."""
    width = (model.expert_ffn if model.experts else model.ffn) / layout.tensor
    side = sqrt(model.hidden * width)
    matrices = (4 if hyper.lora else 6) * weights_per_token(model) / flops
    faster = FP8_GAIN if hyper.fp8 is not None else 1.0
    forward = flops_per_scored_token(model, length)
    again = {"full": forward, "mlp": 2 * _feed(model), "moe": 2 * _feed(model)}
    twice = sum(again.get(part, 0.0) for part in recompute.split(",")) / flops
    return matrices * (1 / faster + NARROW / side) + 1 - matrices + twice / faster


def _largest_stage(model: Architecture, layout: Layout) -> float:
    """Return the work of the pipeline stage with the most of it, relative to equal shares.

    The output layer is of the last stage, and counts as so many layers as it has weights.
    """
    head = model.vocab * model.hidden
    each = (weights_per_token(model) - head) / model.layers
    stages = [float(layers) for layers in layout.stage_layers(model.layers)]
    stages[-1] += head / each
    return max(stages) * layout.pipeline / sum(stages)


def _feed(model: Architecture) -> float:
    """Return the weights of all feed-forward layers that a token is multiplied with."""
    if not model.experts:
        return model.layers * mlp_weights(model)
    return model.layers * model.experts_per_token * expert_weights(model)


def _messages(
    model: Architecture, layout: Layout, hyper: Hyperparameters, ranks_per_node: int, gpu: Gpu
) -> float:
    """Return the seconds that a rank sends and receives for a token, within its layers.

    Sequence parallelism gathers or scatters hidden states ten times a layer (arXiv 2205.05198,
    figure 5, forward and backward, and the input again for the weights' gradient). Context ranks
    pass on keys and values, and each chunk of a pipeline's stage hidden states and their gradients.
    """
    size = 2 if hyper.dtype == "bfloat16" else 4
    layers = max(layout.stage_layers(model.layers))
    tensor, context = layout.tensor, layout.context
    whole = size * model.hidden / context
    seconds = 10 * whole * (tensor - 1) / tensor / (gpu.link * 1e9)
    across = gpu.link if tensor * context <= ranks_per_node else gpu.network
    keys = 2 * size * model.kv_heads * model.head_size / tensor
    seconds += 3 * keys * (context - 1) / context / (across * 1e9)
    seconds *= layers
    if layout.pipeline > 1:
        across = gpu.link if layout.world <= ranks_per_node else gpu.network
        seconds += 2 * layout.interleave * whole / tensor / (across * 1e9)
    return seconds


def _copies(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    ranks_per_node: int,
    gpu: Gpu,
    *,
    once_per_node: bool,
) -> float:
    """Return the seconds that a rank sends a token's copies to experts and back, in its layers.

    That is twice forward and twice backward; tensor ranks each bring their part and then gather
    what has come.
    """
    if not model.experts:
        return 0.0
    size = 2 if hyper.dtype == "bfloat16" else 4
    tensor, expert, each = layout.tensor, layout.expert, model.experts_per_token
    copy = 4 * size * model.hidden / layout.context / tensor
    near = min(expert, max(1, ranks_per_node // tensor))  # of its ranks in a node
    far = each * (expert - near) / expert
    if once_per_node:
        nodes = expert / near
        far = (nodes - 1) * (1 - (1 - 1 / nodes) ** each)
    inside = each * (near - 1) / expert + each * (tensor - 1)
    seconds = copy * (far / (gpu.network * 1e9) + inside / (gpu.link * 1e9))
    return max(layout.stage_layers(model.layers)) * seconds


def _sum_of_gradients(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    ranks_per_node: int,
    gpu: Gpu,
    count: int,
) -> float:
    """Return the seconds of a step to sum gradients in float32 and to fetch weights."""
    copies = layout.data * layout.context
    if copies == 1 or hyper.lora is not None:
        return 0.0
    size = 2 if hyper.dtype == "bfloat16" else 4
    mine = weight_share(model, layout, 0)
    inside = layout.tensor * layout.context * layout.data * layout.pipeline <= ranks_per_node
    speed = (gpu.link if inside else gpu.network) * 1e9
    dense = mine.dense * (copies - 1) / copies
    experts = mine.experts * (1 - layout.expert / copies)
    bytes_of_weight = 4 + size
    if layout.sharding == "full":
        bytes_of_weight = count * (4 + 2 * size)
    return bytes_of_weight * (dense + experts) / speed
