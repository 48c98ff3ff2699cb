"""Time and money: what a run computes, over what its GPUs do in an hour.

    seconds = tokens * operations per token / (MFU * peak * GPUs) * the layout's slowdown

`cray-agents plan` prints it. Held against what was published, with 6 N operations a token:
ClimateGPT (arXiv 2401.09646, 4.2 billion tokens on H100s) reached 32 % MFU with 7B, 31 % with 13B,
23 % with 70B, and 27 % over 319.5 billion tokens from scratch. So the default of 40 % is what a
GPU reaches that waits for nobody; give --mfu 0.3 for what a cluster did. No torch. Read next:
choosing.py for the layouts.
"""

from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.planning.arithmetic import (
    count,
    flops_per_scored_token,
    flops_per_token,
    multiplied,
)
from cray_agents.trainers.planning.hardware import Gpu
from cray_agents.trainers.planning.layout_choice import Choice, LayoutCandidate, choose_layout
from cray_agents.trainers.planning.memory import GIB, Memory, Recompute
from cray_agents.training_jobs import Hyperparameters, MethodName

# forward passes beside training: over all samples before the first step, and in every epoch
SCORED_ONCE: dict[MethodName, int] = {"sft": 0, "dpo": 1, "kto": 2, "grpo": 1}
SCORED_EACH: dict[MethodName, int] = {"sft": 0, "dpo": 0, "kto": 1, "grpo": 0}


@dataclass(frozen=True)
class Workload:
    """What is to be trained on: tokens of one epoch, in sequences of so many.

    `size`: bytes of text, where the tokens were estimated from them.
    """

    tokens: float
    sequence_length: int
    epochs: float = 1.0
    method: MethodName = "sft"
    size: float | None = None

    @property
    def scored(self) -> float:
        """Tokens of forward passes alone, in all: references, and who sampled them."""
        once, each = SCORED_ONCE[self.method], SCORED_EACH[self.method]
        return self.tokens * (once + each * self.epochs)

    @property
    def sending(self) -> float:
        """Seconds that the text takes over a network of 1 Gb/s."""
        return (self.size or 0.0) * 8 / 1e9


@dataclass(frozen=True)
class Cluster:
    """`mfu`: the share of a GPU's peak that it reaches where it waits for no other."""

    gpu: Gpu
    gpus: int
    gpus_per_node: int = 8
    mfu: float = 0.4
    price: float | None = None  # dollars per GPU and hour, if not the table's

    def seconds(self, flops: float, slowdown: float = 1.0) -> float:
        """How long so many operations take."""
        return flops / (self.gpu.teraflops * 1e12 * self.mfu * self.gpus) * slowdown

    def dollars(self, seconds: float) -> float | None:
        """What all GPUs cost for so long; None: nobody said a price."""
        price = self.gpu.price if self.price is None else self.price
        return None if price is None else seconds / 3600 * self.gpus * price


@dataclass(frozen=True)
class Plan:
    """What a run will take. `choice` is None where only a number of parameters was known."""

    parameters: float
    multiplied: float  # by each token: without the embedding and the experts it is not sent to
    workload: Workload
    cluster: Cluster
    flops: float
    slowdown: float
    floor: float  # bytes of a GPU for weights, gradients and optimizer, all of them split evenly
    choice: Choice | None = None

    @property
    def seconds(self) -> float:
        """Of training, from the first step to the last."""
        return self.cluster.seconds(self.flops, self.slowdown)

    def data(self) -> dict[str, Any]:
        """The plan as JSON has it."""
        choice = self.choice
        return {
            "parameters": self.parameters,
            "parameters_per_token": self.multiplied,
            "workload": asdict(self.workload),
            "cluster": asdict(self.cluster) | {"gpu": self.cluster.gpu.name},
            "flops": self.flops,
            "seconds_to_send": self.workload.sending,
            "seconds": self.seconds,
            "gpu_hours": self.seconds / 3600 * self.cluster.gpus,
            "dollars": self.cluster.dollars(self.seconds),
            "layout": choice.layout.model_dump() if choice else None,
            "recompute": choice.recompute if choice else None,
            "fits": choice.fits if choice else None,
            "memory_gib": gib(choice.memory) if choice else None,
            "least_gib": self.floor / GIB,
            "reasons": choice.reasons if choice else [],
            "layouts": self.rows(choice.ranking) if choice else [],
        }

    def rows(self, candidates: Sequence[LayoutCandidate]) -> list[dict[str, Any]]:
        """A line for each layout: what it needs and how long it would take."""
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
    recompute: Recompute | None = None,
) -> Plan:
    """Plan a run of a model. Its time is that of the layout which would be chosen."""
    choice = choose_layout(
        model,
        cluster.gpus,
        memory_gib_per_rank=cluster.gpu.gib,
        ranks_per_node=cluster.gpus_per_node,
        hyper=hyper,
        sequence_length=workload.sequence_length,
        recompute=recompute,
    )
    length = workload.sequence_length
    flops = workload.tokens * workload.epochs * flops_per_token(model, length, hyper.lora)
    flops += workload.scored * flops_per_scored_token(model, length)
    total, used = count(model).total, multiplied(model)
    floor = least_memory(total, cluster, lora=hyper.lora is not None, half=hyper.dtype != "float32")
    return Plan(total, used, workload, cluster, flops, choice.slowdown, floor, choice)


def plan_by_size(
    parameters: float, workload: Workload, cluster: Cluster, *, lora: bool = False
) -> Plan:
    """Plan with nothing known of a bfloat16 model but its size: 6 N operations a token.

    4 N with LoRA, whose own weights do not count; 2 N for a forward pass alone.
    """
    flops = workload.tokens * workload.epochs * (4 if lora else 6) * parameters
    flops += workload.scored * 2 * parameters
    floor = least_memory(parameters, cluster, lora=lora, half=True)
    return Plan(parameters, parameters, workload, cluster, flops, 1.0, floor)


def least_memory(parameters: float, cluster: Cluster, *, lora: bool, half: bool) -> float:
    """Bytes of a GPU without activations, if everything is split evenly over all of them.

    Of a weight in bfloat16: 2, and 4 for its gradient, 12 for the optimizer; in float32 4 + 4 + 8.
    """
    trained = 0 if lora else 16 if half else 12
    return parameters * ((2 if half else 4) + trained) / cluster.gpus


def gib(memory: Memory) -> dict[str, float]:
    """The parts of a memory estimate in GiB, and their sum."""
    parts = {name: size / GIB for name, size in asdict(memory).items()}
    return {**parts, "total": memory.gib}
