"""A job's layout where none was asked for: the quickest that fits in memory, and why.

The platform calls `choose_layout` for jobs without a layout and prints the reasons; plan.py shows
the whole ranking. How quick is arithmetic with one rough number for communication: see `slowdown`.
No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from math import ceil, log2

from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.planning.arithmetic import count
from cray_agents.trainers.planning.layouts import described, possible_layouts
from cray_agents.trainers.planning.memory import (
    Memory,
    Recompute,
    estimate_memory,
    micro_batches,
)
from cray_agents.training_jobs import Hyperparameters, Layout

RESERVE = 0.1  # of a rank's memory: for CUDA, NCCL, and what the allocator cannot use
LONG = 16384  # tokens of a micro-batch from which on context parallelism is considered
CHUNKS = (1, 2)  # interleaving considered: it shortens the bubble and multiplies the messages
RECOMPUTED = 4 / 3  # a second forward pass, beside one forward and a backward of two
SPLIT = 1.08  # for each halving of the model: 77 % of linear in 8 (arXiv 1909.08053, figure 5)
SPLIT_ACROSS = 1.25  # the same between nodes: a guess


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout, what it needs, and by how much it is slower than ranks that are always busy."""

    layout: Layout
    recompute: Recompute
    memory: Memory
    slowdown: float
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The layout to take, in words why, and what was ranked behind it."""

    layout: Layout
    recompute: Recompute
    memory: Memory
    slowdown: float
    fits: bool
    reasons: list[str]
    ranking: Sequence[LayoutCandidate]


def choose_layout(
    model: Architecture,
    ranks: int,
    *,
    memory_gib_per_rank: float,
    ranks_per_node: int,
    hyper: Hyperparameters,
    sequence_length: int,
    recompute: Recompute | None = None,
) -> Choice:
    """The best layout of so many ranks; where none fits, the one that needs the least memory.

    `sequence_length`: tokens of a usual sequence. `recompute` None: as is needed.
    """
    ways: list[Recompute] = ["none", "full"] if recompute is None else [recompute]
    ranking = rank_layouts(
        model,
        ranks,
        room=memory_gib_per_rank * (1 - RESERVE),
        ranks_per_node=ranks_per_node,
        hyper=hyper,
        sequence_length=sequence_length,
        ways=ways,
    )
    best = ranking[0]
    if not best.fits:
        best = min(ranking, key=lambda candidate: candidate.memory.total)
    about = _about(model, ranks, memory_gib_per_rank, hyper)
    reasons = [about, *_why(best, ranking)]
    return Choice(**vars(best), reasons=reasons, ranking=ranking)


def rank_layouts(
    model: Architecture,
    ranks: int,
    *,
    room: float,
    ranks_per_node: int,
    hyper: Hyperparameters,
    sequence_length: int,
    ways: Sequence[Recompute] = ("none", "full"),
) -> list[LayoutCandidate]:
    """Every layout that is worth a thought, the best first. `room`: GiB of a rank to be used."""
    found = []
    for layout in _sensible(model, ranks, ranks_per_node, hyper):
        slower = slowdown(model, layout, hyper, sequence_length, ranks_per_node)
        for way in ways:
            memory = estimate_memory(
                model, layout, hyper, sequence_length=sequence_length, recompute=way
            )
            again = RECOMPUTED if way == "full" else 1.0
            found.append(LayoutCandidate(layout, way, memory, slower * again, memory.gib <= room))
    return sorted(found, key=_order)


def slowdown(
    model: Architecture,
    layout: Layout,
    hyper: Hyperparameters,
    sequence_length: int,
    ranks_per_node: int,
) -> float:
    """Time of a step over the time of ranks that only compute, and are always busy.

    The pipeline's bubble of (p - 1) / (m v) (arXiv 2104.04473, section 2.2); ranks that idle where
    they do not divide the batch; and for communication a factor for each halving of the model,
    twice for an expert's small matrices. The sum of gradients over data ranks is left out.
    """
    batches = micro_batches(layout, hyper, sequence_length)
    bubble = (layout.pipeline - 1) / (batches * layout.interleave)
    uneven = ceil(hyper.batch_size / layout.data) * layout.data / hyper.batch_size
    talking = layout.tensor * layout.context * layout.expert
    inside = min(talking, ranks_per_node)
    halvings = log2(inside * layout.pipeline * (layout.tensor if model.experts else 1))
    split: float = SPLIT**halvings * SPLIT_ACROSS ** log2(talking / inside)
    return (1 + bubble) * uneven * split


def _sensible(
    model: Architecture, ranks: int, ranks_per_node: int, hyper: Hyperparameters
) -> Iterator[Layout]:
    """Tensor ranks within a node, context only for long micro-batches, little interleaving."""
    node = min(ranks, ranks_per_node)
    for layout in possible_layouts(model, ranks):
        if node % layout.tensor or layout.interleave not in CHUNKS:
            continue
        if layout.context == 1 or hyper.max_tokens_per_microbatch >= LONG:
            yield layout


def _order(candidate: LayoutCandidate) -> tuple[float, ...]:
    """What fits, then what is quick, then what splits least, tensor first."""
    layout = candidate.layout
    return (
        not candidate.fits,
        round(candidate.slowdown, 3),
        layout.world // layout.data,
        -layout.tensor,
        -layout.context,
        layout.expert,
    )


def _about(model: Architecture, ranks: int, gib: float, hyper: Hyperparameters) -> str:
    billions = count(model).total / 1e9
    trained = f"LoRA of rank {hyper.lora.rank} on" if hyper.lora else "all weights of"
    return (
        f"{trained} a {model.kind} model of {billions:.3g} billion parameters in {hyper.dtype}, "
        f"{ranks} {'ranks' if ranks > 1 else 'rank'} of {gib:.4g} GiB, of which {RESERVE:.0%} "
        f"stay free, micro-batches of {hyper.max_tokens_per_microbatch:,} tokens"
    )


def _why(best: LayoutCandidate, ranking: Sequence[LayoutCandidate]) -> Iterator[str]:
    """A sentence for each thing that was decided."""
    layout, whole = best.layout, Layout(data=best.layout.world)
    other = next(c for c in ranking if c.layout == whole and c.recompute == best.recompute)
    if not best.fits:
        yield (
            f"nothing fits: {described(layout)} needs the least, {best.memory.gib:.1f} GiB a rank;"
            " take more ranks, LoRA, or fewer max_tokens_per_microbatch"
        )
    elif layout == whole:
        yield f"a rank holds the whole model: {best.memory.gib:.1f} GiB"
    elif not other.fits:
        yield (
            f"a rank needs {best.memory.gib:.1f} GiB; with the whole model on each it would be"
            f" {other.memory.gib:.1f} GiB"
        )
    else:
        yield (
            f"with the whole model on each rank a step would take"
            f" {other.slowdown / best.slowdown:.1f} times as long: the batch is too small for"
            f" data={whole.data}"
        )
    for name, meaning in _MEANING.items():
        if (size := getattr(layout, name)) > 1:
            yield f"{name}={size}: {meaning}"
    if best.recompute == "full":
        yield "recompute=full: activations are computed again, so that a step takes a third longer"
    yield f"data={layout.data}: {'all ranks' if layout == whole else 'the ranks that are left'}"
    if best.slowdown > 1.005:
        yield f"a step takes {best.slowdown:.2f} times what it would on ranks that never wait"


_MEANING = {
    "tensor": "each layer is split within a node, activations too (sequence_parallel)",
    "pipeline": "layers are split into stages, which send little and wait for each other",
    "interleave": "each stage is several chunks of layers, which shortens the waiting",
    "context": "long sequences are split over ranks",
    "expert": "experts are split over the data and context ranks",
}
