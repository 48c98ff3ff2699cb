"""Step time: a table of GPUs, and how much slower a layout is than large matrices alone on them.

    slowdown = (matrices + messages) * bubble * uneven shares + sum of gradients, over work / peak

layouts.py ranks layouts by it, plan.py turns it into hours, and the trainer takes a GPU's peak for
its MFU. GPUS is the table to edit: add a GPU, or write down what you measured of one. Its `reached`
and the constants below it were fitted to published runs of NVIDIA's Megatron and others, on H100,
H800 and A100 GPUs. published_runs.py in tests/support/trainers compares the estimate with each.
This trainer's own speed was not measured. No torch.
"""

from dataclasses import dataclass
from math import ceil, sqrt

from cray_agents.errors import BadInput
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.planning.arithmetic import (
    count_weights,
    expert_weights,
    flops_per_scored_token,
    flops_per_token,
    micro_batches,
    mlp_weights,
    weight_share,
    weights_per_token,
)
from cray_agents.training_jobs import Hyperparameters, Layout


@dataclass(frozen=True)
class Gpu:
    """A GPU model. All `marks` are in CUDA's name of the device, in any case.

    `teraflops`: dense bfloat16 with float32 sums, from the vendor's data sheet, which prints twice
    as much for sparsity. `gib`: as nvidia-smi shows it. `link`: GB/s each way to the node's other
    GPUs. `network`: GB/s each way to other nodes, of usual machines. `price`: dollars an hour, or
    None. `reached`: the share of its peak that large matrices reach in bfloat16. `memory`: TB/s to
    its own memory, from the data sheet.
    """

    name: str
    marks: tuple[str, ...]
    teraflops: float
    gib: float
    price: float | None = None
    link: float = 450
    network: float = 50
    reached: float = 0.61
    memory: float = 3.35


# Prices: EC2 Capacity Blocks per accelerator, end of 2024. On demand cost 2.5 times as much then
# (p5.48xlarge, 8 x H100: about $100/h); other clouds ask half. More specific names come first.
GPUS = (
    Gpu("GB200", ("GB200",), 2500, 184, link=900, memory=8),
    Gpu("B300", ("B300",), 2250, 268, link=900, network=100, memory=8),
    Gpu("B200", ("B200",), 2250, 179, link=900, memory=8),
    Gpu("GH200", ("GH200",), 989.4, 95, memory=4),
    Gpu("H200", ("H200",), 989.4, 140, 5.41, memory=4.8),
    Gpu("H100-NVL", ("H100", "NVL"), 835, 93, link=64, memory=3.9),
    Gpu("H100-PCIe", ("H100", "PCIE"), 756, 79, link=64, memory=2),
    Gpu("H100", ("H100",), 989.4, 79, 4.92),
    Gpu("H800", ("H800",), 989.4, 79, link=200),
    Gpu("H20", ("H20",), 148, 95, memory=4),
    Gpu("A100-40GB", ("A100", "40GB"), 312, 40, 1.84, 300, 25, memory=1.6),
    Gpu("A100", ("A100",), 312, 80, None, 300, 25, memory=2),
    Gpu("L40S", ("L40S",), 362, 45, None, 32, 25, memory=0.9),
    Gpu("L4", ("L4",), 121, 22, None, 32, 12, memory=0.3),
    Gpu("A10G", ("A10G",), 70, 22, None, 32, 12, memory=0.6),
    Gpu("RTX-4090", ("RTX", "4090"), 165, 24, None, 32, 12, memory=1),
    Gpu("MI300X", ("MI300X",), 1307, 192, memory=5.3),
)


def identify(device_name: str) -> Gpu | None:
    """Return the GPU with CUDA's device name ("NVIDIA H100 80GB HBM3"), if the table has it."""
    words = device_name.upper().replace("-", " ").split()
    return next((gpu for gpu in GPUS if all(mark in words for mark in gpu.marks)), None)


def peak_flops(device_name: str) -> float | None:
    """Return a device's peak bfloat16 operations per second; None if it is unknown."""
    gpu = identify(device_name)
    return gpu.teraflops * 1e12 if gpu else None


def find_gpu(name: str) -> Gpu:
    """Return a GPU by the table's or CUDA's name. Raises BadInput with a list of known GPUs."""
    named = [gpu for gpu in GPUS if gpu.name.upper() == name.upper()]
    gpu = named[0] if named else identify(name)
    if gpu is None:
        raise BadInput(
            f"no GPU {name!r} is known; known are {', '.join(gpu.name for gpu in GPUS)}",
            param="gpu",
        )
    return gpu


NARROW = 1150.0  # a matrix so wide is multiplied at half that speed
EXPOSED = 0.33  # share of a layer's messages that no computation hides
EXPOSED_SUM = 0.15  # the same of the sum of gradients and the new weights, once a step
FP8_GAIN = 1.82  # how much faster matrices are multiplied in eight bits
FLASH_2 = 0.35  # share of an H100's peak that FlashAttention 2 reaches (arXiv 2407.08608)
ROTATION = 28  # bytes a number of queries and keys that rotation in several passes moves more
SUM = 4  # bytes a weight that its gradient moves more if it is added up by an operation of its own
COPY = 8  # bytes of an expert's weight: read and written once more in each of the two passes


def slowdown(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    sequence_length: int,
    ranks_per_node: int,
    *,
    recompute: str = "none",
    gpu: Gpu | None = None,
) -> float:
    """Estimate a step's time, relative to GPUs that always multiply large matrices.

    These count: narrow matrices, which FP8 does not mend; FP8; what is computed twice; messages
    within a layer, through the node's links or the network (tensor, context and expert
    parallelism); the pipeline's bubble of (p - 1) / (m v) (arXiv 2104.04473, section 2.2) and its
    largest stage; ranks that idle if they do not divide the batch; and the sum of gradients over
    data ranks, once a step, or with full sharding in each micro-batch, as the weights are fetched
    twice in each. `gpu` None: an H100, to whose links and speed most are alike in proportion.
    """
    gpu = find_gpu("H100") if gpu is None else gpu
    step = _Step(model, layout, hyper, ranks_per_node, gpu, sequence_length)
    ranks = layout.tensor * layout.pipeline * layout.context
    # seconds of a rank for a token
    ideal = step.flops / ranks / (gpu.teraflops * 1e12 * gpu.reached)
    busy = ideal * step.matrices(recompute)
    waits = EXPOSED * (step.messages() + step.copies())
    count = micro_batches(layout, hyper, sequence_length)
    bubble = 1 + (layout.pipeline - 1) / (count * layout.interleave)
    uneven = ceil(hyper.batch_size / layout.data) * layout.data / hyper.batch_size
    tokens = hyper.batch_size * sequence_length / layout.data
    summed = EXPOSED_SUM * step.sum_of_gradients(count) / tokens
    return ((busy + waits) * bubble * _largest_stage(model, layout) * uneven + summed) / ideal


def without_engine(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    sequence_length: int,
    gpu: Gpu,
    slowdown: float,
) -> tuple[float, float]:
    """Estimate a step's time without Transformer Engine, relative to that with it: (plain, FA3).

    By the bytes that go through memory once more, and by the speed of FlashAttention 2 where
    FlashAttention 3 is not installed. `slowdown`: the layout's. Not measured.
    """
    step = _Step(model, layout, hyper, 1, gpu, sequence_length)
    ideal = step.flops / (gpu.teraflops * 1e12 * gpu.reached)  # a token's seconds on one GPU
    rotated = ROTATION * model.layers * (model.heads + model.kv_heads) * model.head_size
    microbatch = max(hyper.max_tokens_per_microbatch, sequence_length)
    counts = count_weights(model)
    mine = counts.total - counts.experts * (1 - 1 / layout.expert)
    summed = 0.0 if hyper.lora else SUM * mine / microbatch
    copied = COPY * counts.experts / layout.expert / microbatch
    more = (rotated + summed + copied) / (gpu.memory * 1e12) / ideal
    attention = 1 - (4 if hyper.lora else 6) * weights_per_token(model) / step.flops
    slower = attention * (gpu.reached / FLASH_2 - 1)
    return 1 + (more + slower) / slowdown, 1 + more / slowdown


def _largest_stage(model: Architecture, layout: Layout) -> float:
    """Return the work of the pipeline stage with the most of it, relative to equal shares.

    The output layer is of the last stage, and counts as so many layers as it has weights.
    """
    head = model.vocab * model.hidden
    each = (weights_per_token(model) - head) / model.layers
    stages = [float(layers) for layers in layout.stage_layers(model.layers)]
    stages[-1] += head / each
    return max(stages) * layout.pipeline / sum(stages)


@dataclass(frozen=True)
class _Step:
    """The parts of a step's time, on a rank."""

    model: Architecture
    layout: Layout
    hyper: Hyperparameters
    ranks_per_node: int
    gpu: Gpu
    length: int

    @property
    def flops(self) -> float:
        """The operations of a token."""
        return flops_per_token(self.model, self.length, self.hyper.lora)

    @property
    def layers(self) -> int:
        """The layers of the largest stage."""
        return max(self.layout.stage_layers(self.model.layers))

    @property
    def size(self) -> int:
        """The bytes of a number."""
        return 2 if self.hyper.dtype == "bfloat16" else 4

    def speed(self, ranks: int) -> float:
        """Return the bytes a second between so many neighbouring ranks."""
        near = ranks <= self.ranks_per_node
        return (self.gpu.link if near else self.gpu.network) * 1e9

    def matrices(self, recompute: str) -> float:
        """Return the time of a rank's own work, relative to large matrices computed once."""
        model, layout, hyper = self.model, self.layout, self.hyper
        feed = model.layers * mlp_weights(model)
        width = model.ffn / layout.tensor
        if model.experts:
            feed = model.layers * model.experts_per_token * expert_weights(model)
            width = model.expert_ffn / layout.tensor
        matrices = (4 if hyper.lora else 6) * weights_per_token(model) / self.flops
        faster = FP8_GAIN if hyper.fp8 is not None else 1.0
        forward = flops_per_scored_token(model, self.length)
        again = {"full": forward, "mlp": 2 * feed, "moe": 2 * feed}
        twice = sum(again.get(part, 0.0) for part in recompute.split(",")) / self.flops
        narrow = NARROW / sqrt(model.hidden * width)
        return matrices * (1 / faster + narrow) + 1 - matrices + twice / faster

    def messages(self) -> float:
        """Return the seconds that a rank sends and receives for a token, within its layers.

        Sequence parallelism gathers or scatters hidden states ten times a layer (arXiv 2205.05198,
        figure 5, forward and backward, and the input again for the weights' gradient). Context
        ranks pass on keys and values, and each chunk of a pipeline's stage hidden states and their
        gradients.
        """
        model, tensor, context = self.model, self.layout.tensor, self.layout.context
        whole = self.size * model.hidden / context
        seconds = 10 * whole * (tensor - 1) / tensor / (self.gpu.link * 1e9)
        keys = 2 * self.size * model.kv_heads * model.head_size / tensor
        seconds += 3 * keys * (context - 1) / context / self.speed(tensor * context)
        seconds *= self.layers
        if self.layout.pipeline > 1:
            chunks = self.layout.interleave
            seconds += 2 * chunks * whole / tensor / self.speed(self.layout.world)
        return seconds

    def copies(self) -> float:
        """Return the seconds that a rank sends a token's copies to experts and back, in its layers.

        That is twice forward and twice backward; tensor ranks each bring their part and then gather
        what has come.
        """
        if not self.model.experts:
            return 0.0
        tensor, expert = self.layout.tensor, self.layout.expert
        each = self.model.experts_per_token
        copy = 4 * self.size * self.model.hidden / self.layout.context / tensor
        near = min(expert, max(1, self.ranks_per_node // tensor))  # of its ranks in a node
        far = each * (expert - near) / expert
        inside = each * (near - 1) / expert + each * (tensor - 1)
        seconds = copy * (far / (self.gpu.network * 1e9) + inside / (self.gpu.link * 1e9))
        return self.layers * seconds

    def sum_of_gradients(self, count: int) -> float:
        """Return the seconds of a step to sum gradients in float32 and to fetch weights."""
        layout = self.layout
        copies = layout.data * layout.context
        if copies == 1 or self.hyper.lora is not None:
            return 0.0
        mine = weight_share(self.model, layout, 0)
        dense = mine.dense * (copies - 1) / copies
        experts = mine.experts * (1 - layout.expert / copies)
        bytes_of_weight = 4 + self.size
        if layout.sharding == "full":
            bytes_of_weight = count * (4 + 2 * self.size)
        return bytes_of_weight * (dense + experts) / self.speed(layout.world)
