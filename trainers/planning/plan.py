"""Plan: estimate a run's time and cost from its operations and its GPUs.

    seconds = tokens * operations per token / (MFU * peak * GPUs) * the layout's slowdown

`plan train` prints it. The slowdown is relative to GPUs that only multiply large matrices,
which is what `mfu` is of (see step_time.py). Of a model of which only the size is known, it is of
the whole run, 40 % by default. docs/planning.md says how far published runs differ. What is no
benchmark can be slower: ClimateGPT (arXiv 2401.09646, 4.2 billion tokens on H100s) reached, with
6 N operations a token, 32 % with 7B, 31 % with 13B, 23 % with 70B, 27 % over 319.5 billion tokens
from scratch. No torch. Read next: layouts.py.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from math import ceil
from typing import Any

from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.planning.arithmetic import (
    GIB,
    Memory,
    adapter_weights,
    count_weights,
    flops_per_scored_token,
    flops_per_token,
    weights_per_token,
)
from cray_agents.trainers.planning.layouts import (
    Choice,
    LayoutCandidate,
    LayoutQuestion,
    choose_layout,
)
from cray_agents.trainers.planning.step_time import Gpu, without_engine
from cray_agents.training_jobs import Hyperparameters, Layout, MethodName

BY_SIZE = 0.4  # share of the peak, of a model of which only the size is known

# forward passes beside training: over all samples before the first step, and in every epoch. A
# teacher's comes on top; one that is not known counts as a second of the student's
SCORED_ONCE: dict[MethodName, int] = {"sft": 0, "dpo": 1, "kto": 2, "grpo": 1, "distill": 1}
SCORED_EACH: dict[MethodName, int] = {"sft": 0, "dpo": 0, "kto": 1, "grpo": 0, "distill": 0}


@dataclass(frozen=True)
class Workload:
    """The data of a run: tokens of one epoch, and tokens of a sequence.

    `size`: bytes of text, if the tokens were estimated from these.
    """

    tokens: float
    sequence_length: int
    epochs: float = 1.0
    method: MethodName = "sft"
    size: float | None = None

    @property
    def scored(self) -> float:
        """The tokens of the model's own passes without training: baselines and kto's drift."""
        once, each = SCORED_ONCE[self.method], SCORED_EACH[self.method]
        return self.tokens * (once + each * self.epochs)

    @property
    def judged(self) -> float:
        """The tokens of a teacher's passes."""
        return self.tokens if self.method == "distill" else 0.0

    @property
    def sending(self) -> float:
        """The seconds to send the text over a network of 1 Gb/s."""
        return (self.size or 0.0) * 8 / 1e9


@dataclass(frozen=True)
class Cluster:
    """The GPUs of a run. `mfu`: the share of its peak that a GPU reaches when it never waits.

    None: as published runs have it, if the model is known, else 40 % with all its waiting.
    `spare_nodes` are held beside them, and cost as much.
    """

    gpu: Gpu
    gpus: int
    gpus_per_node: int = 8
    mfu: float | None = None
    price: float | None = None  # dollars per GPU and hour, if not the table's
    spare_nodes: int = 0

    @property
    def held(self) -> int:
        """The GPUs that train, and those of the spare nodes."""
        return self.gpus + self.spare_nodes * self.gpus_per_node

    def seconds(self, flops: float, slowdown: float | None = None) -> float:
        """Return the seconds that `flops` operations take, with a layout's slowdown if known."""
        speed = self.gpu.teraflops * 1e12 * self.share(slowdown) * self.gpus
        return flops / speed * (slowdown or 1.0)

    def share(self, slowdown: float | None) -> float:
        """Return the share of the peak that `slowdown` is relative to."""
        return self.mfu or (BY_SIZE if slowdown is None else self.gpu.reached)

    def dollars(self, seconds: float) -> float | None:
        """Return the cost of all held GPUs for `seconds`; None if no price is known."""
        price = self.gpu.price if self.price is None else self.price
        return None if price is None else seconds / 3600 * self.held * price


@dataclass(frozen=True)
class NodeBytes:
    """Bytes of files that a node reads or writes. A node's ranks read a weight once together.

    `load`: of the parent, before the first step. `save`: a resume point's share; a node reads as
    much when it resumes. `publish`: its share of the checkpoint. `swap`: a serving node reads all
    of the checkpoint, or gets as much from the trainer directly.
    """

    load: float
    save: float
    publish: float
    swap: float


def node_bytes(
    model: Architecture, layout: Layout, hyper: Hyperparameters, gpus_per_node: int
) -> NodeBytes:
    """Return what nodes read and write; ranks are placed tensor first, pipeline last.

    A resume point has a float32 weight and two moments of all that is trained. Adapters are
    published in float32, without the weights below them.
    """
    counts, size = count_weights(model), 4 if hyper.dtype == "float32" else 2
    each = min(gpus_per_node, layout.world)
    nodes = ceil(layout.world / each)
    stage = layout.world // layout.pipeline  # ranks of a pipeline stage: neighbours
    stages = max(1.0, each / stage) / layout.pipeline
    within = min(each, stage)
    dense = stages * min(1.0, within / layout.tensor)
    sparse = stages * min(1.0, within / (layout.tensor * layout.expert))
    load = size * ((counts.total - counts.experts) * dense + counts.experts * sparse)
    if hyper.lora is not None:
        trained = adapter_weights(model, hyper.lora)
        return NodeBytes(load, 12 * trained / nodes, 4 * trained / nodes, 4 * trained)
    total = counts.total
    return NodeBytes(load, 12 * total / nodes, size * total / nodes, size * total)


@dataclass(frozen=True)
class Plan:
    """The needs of a run. Without `choice`, `microbatch` only a number of parameters was known.

    `plain`: the time relative to `seconds` without Transformer Engine, and with FlashAttention 3 in
    its place.
    """

    parameters: float
    weights_per_token: float  # without the embedding and idle experts
    workload: Workload
    cluster: Cluster
    flops: float
    slowdown: float | None  # None: the layout is not known
    floor: float  # bytes of a GPU for weights, gradients and optimizer, if all are split evenly
    choice: Choice | None = None
    microbatch: int | None = None  # tokens
    files: NodeBytes | None = None
    plain: tuple[float, float] | None = None

    @property
    def seconds(self) -> float:
        """The seconds of training, from the first step to the last."""
        return self.cluster.seconds(self.flops, self.slowdown)

    def data(self) -> dict[str, Any]:
        """Return the plan as JSON data."""
        choice = self.choice
        return {
            "parameters": self.parameters,
            "parameters_per_token": self.weights_per_token,
            "workload": asdict(self.workload),
            "cluster": asdict(self.cluster)
            | {"gpu": self.cluster.gpu.name, "mfu": self.cluster.share(self.slowdown)},
            "flops": self.flops,
            "seconds_to_send": self.workload.sending,
            "seconds": self.seconds,
            "gpu_hours": self.seconds / 3600 * self.cluster.held,
            "dollars": self.cluster.dollars(self.seconds),
            "layout": choice.layout.model_dump() if choice else None,
            "recompute": choice.recompute if choice else None,
            "microbatch_tokens": self.microbatch,
            "fits": choice.fits if choice else None,
            "memory_gib": gib(choice.memory) if choice else None,
            "least_gib": self.floor / GIB,
            "node_bytes": asdict(self.files) if self.files else None,
            "without_transformer_engine": self.plain,
            "reasons": choice.reasons if choice else [],
            "layouts": self.rows(choice.ranking) if choice else [],
        }

    def rows(self, candidates: Sequence[LayoutCandidate]) -> list[dict[str, Any]]:
        """Return a row for each layout, with its memory, time and cost."""
        return [
            candidate.layout.model_dump()
            | {
                "recompute": candidate.recompute,
                "gib": candidate.memory.gib,
                "fits": candidate.fits,
                "hours": (took := self.cluster.seconds(self.flops, candidate.slowdown)) / 3600,
                "dollars": self.cluster.dollars(took),
            }
            for candidate in candidates
        ]


def make_plan(
    model: Architecture,
    workload: Workload,
    cluster: Cluster,
    hyper: Hyperparameters,
    recompute: str | None = None,
    teacher: Architecture | None = None,
) -> Plan:
    """Plan a run of a model, with the time of the layout that would be chosen.

    `teacher`: the model that judges the samples of distill.
    """
    length = workload.sequence_length
    choice = choose_layout(
        LayoutQuestion(
            model,
            hyper,
            cluster.gpus,
            cluster.gpu.gib,
            cluster.gpus_per_node,
            length,
            recompute,
            teacher=teacher,
            gpu=cluster.gpu,
        )
    )
    flops = workload.tokens * workload.epochs * flops_per_token(model, length, hyper.lora)
    flops += workload.scored * flops_per_scored_token(model, length)
    flops += workload.judged * flops_per_scored_token(teacher or model, length)
    total, used = count_weights(model).total, weights_per_token(model)
    floor = least_memory(total, cluster, lora=hyper.lora is not None, half=hyper.dtype != "float32")
    tokens = hyper.max_tokens_per_microbatch
    files = node_bytes(model, choice.layout, hyper, cluster.gpus_per_node)
    slow = choice.slowdown
    plain = without_engine(model, choice.layout, hyper, length, cluster.gpu, slow)
    return Plan(total, used, workload, cluster, flops, slow, floor, choice, tokens, files, plain)


def plan_by_size(
    parameters: float, workload: Workload, cluster: Cluster, *, lora: bool = False
) -> Plan:
    """Plan a bfloat16 model known only by its size: 6 N operations a token.

    LoRA takes 4 N, without its own weights, and a forward pass alone 2 N.
    """
    flops = workload.tokens * workload.epochs * (4 if lora else 6) * parameters
    flops += (workload.scored + workload.judged) * 2 * parameters
    floor = least_memory(parameters, cluster, lora=lora, half=True)
    return Plan(parameters, parameters, workload, cluster, flops, None, floor)


def least_memory(parameters: float, cluster: Cluster, *, lora: bool, half: bool) -> float:
    """Return the bytes of a GPU without activations, if everything is split evenly over all GPUs.

    A bfloat16 weight takes 2, its gradient 4, its optimizer 12; in float32 they take 4 + 4 + 8.
    """
    trained = 0 if lora else 16 if half else 12
    return parameters * ((2 if half else 4) + trained) / cluster.gpus


def gib(memory: Memory) -> dict[str, float]:
    """Return a memory estimate in GiB by purpose, and the most at a time."""
    sizes = {name: size / GIB for name, size in asdict(memory).items()}
    if not memory.teacher:
        del sizes["teacher"]
    return {**sizes, "total": memory.gib}
