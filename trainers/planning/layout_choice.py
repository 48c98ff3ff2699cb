"""Layout choice: find the fastest layout that fits in memory, and give the reasons.

default_layout.py calls `choose_layout` for jobs without a layout; plan.py shows the whole ranking.
Speed is an estimate: see step_time.py. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from cray_agents.trainers.models.architecture import Architecture
from cray_agents.trainers.planning.arithmetic import count_weights
from cray_agents.trainers.planning.hardware import Gpu
from cray_agents.trainers.planning.layouts import describe_layout, possible_layouts, why_unfit
from cray_agents.trainers.planning.memory import GIB, Memory, estimate_memory
from cray_agents.trainers.planning.step_time import slowdown
from cray_agents.training_jobs import Hyperparameters, Layout

RESERVE = 0.1  # share of a rank's memory for CUDA, NCCL and the allocator's losses
LONG = 8192  # tokens; sequences so long may use context parallelism
CHUNKS = (1, 2)  # candidates for interleaving, which shortens the bubble but multiplies messages


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout, its memory, and its slowdown against ranks that are always busy."""

    layout: Layout
    recompute: str
    memory: Memory
    slowdown: float
    fits: bool


@dataclass(frozen=True)
class Choice:
    """The chosen layout, the reasons in words, and the ranking of all candidates."""

    layout: Layout
    recompute: str
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
    recompute: str | None = None,
    gpu: Gpu | None = None,
    teacher: Architecture | None = None,
) -> Choice:
    """Choose the fastest layout of `ranks` ranks; if none fits, the one with the least memory.

    `sequence_length`: tokens of a usual sequence. `recompute` None lets the choice decide. `gpu`
    for its speed and links; None: an H100. `teacher`: a model that the layout must hold beside
    this one, before the first step (distill).
    """
    feed = [] if model.way == "universal" else ["moe" if model.experts else "mlp"]
    ways = ["none", *feed, "full"] if recompute is None else [recompute]
    ranking = rank_layouts(
        model,
        ranks,
        room=memory_gib_per_rank * (1 - RESERVE),
        ranks_per_node=ranks_per_node,
        hyper=hyper,
        sequence_length=sequence_length,
        ways=ways,
        gpu=gpu,
        teacher=teacher,
    )
    best = ranking[0]
    if not best.fits:
        best = min(ranking, key=lambda candidate: candidate.memory.total)
    premises = _premises(model, ranks, memory_gib_per_rank, hyper)
    reasons = [premises, *_decisions(best, ranking)]
    return Choice(**vars(best), reasons=reasons, ranking=ranking)


def rank_layouts(
    model: Architecture,
    ranks: int,
    *,
    room: float,
    ranks_per_node: int,
    hyper: Hyperparameters,
    sequence_length: int,
    ways: Sequence[str] = ("none", "full"),
    gpu: Gpu | None = None,
    teacher: Architecture | None = None,
) -> list[LayoutCandidate]:
    """Rank all sensible layouts, the best first. `room`: GiB that a rank may use."""
    candidates = []
    for layout in _sensible(model, ranks, ranks_per_node, sequence_length):
        sharded = layout.sharding == "full"
        if sharded and hyper.lora is not None:
            continue
        if teacher is not None and not sharded and why_unfit(teacher, layout) is not None:
            continue
        for way in ways:
            memory = estimate_memory(
                model,
                layout,
                hyper,
                sequence_length=sequence_length,
                recompute=way,
                teacher=teacher,
            )
            slower = slowdown(
                model, layout, hyper, sequence_length, ranks_per_node, recompute=way, gpu=gpu
            )
            fits = memory.gib <= room
            candidates.append(LayoutCandidate(layout, way, memory, slower, fits))
    return sorted(candidates, key=_order)


def _sensible(
    model: Architecture, ranks: int, ranks_per_node: int, sequence_length: int
) -> Iterator[Layout]:
    """Yield layouts with tensor ranks in a node, little interleaving, context only if long."""
    node = min(ranks, ranks_per_node)
    for layout in possible_layouts(model, ranks):
        if node % layout.tensor or layout.interleave not in CHUNKS:
            continue
        if layout.context == 1 or sequence_length >= LONG:
            yield layout


def _order(candidate: LayoutCandidate) -> tuple[float, ...]:
    """Return the sort key: fitting first, then fast, then little splitting, by tensor first."""
    layout = candidate.layout
    return (
        not candidate.fits,
        round(candidate.slowdown, 3),
        layout.world // layout.data,
        -layout.tensor,
        -layout.context,
        layout.expert,
    )


def _premises(model: Architecture, ranks: int, gib: float, hyper: Hyperparameters) -> str:
    billions = count_weights(model).total / 1e9
    trained = f"LoRA of rank {hyper.lora.rank} on" if hyper.lora else "all weights of"
    return (
        f"{trained} a {model.kind} model of {billions:.3g} billion parameters in {hyper.dtype}, "
        f"{ranks} {'ranks' if ranks > 1 else 'rank'} of {gib:.4g} GiB, of which {RESERVE:.0%} "
        f"stay free, micro-batches of {hyper.max_tokens_per_microbatch:,} tokens"
    )


def _decisions(best: LayoutCandidate, ranking: Sequence[LayoutCandidate]) -> Iterator[str]:
    """Yield a sentence for each decision."""
    layout, whole = best.layout, Layout(data=best.layout.world)
    unsplit = next(c for c in ranking if c.layout == whole and c.recompute == best.recompute)
    if not best.fits:
        yield (
            f"nothing fits: {describe_layout(layout)} needs the least, {best.memory.gib:.1f} GiB a"
            " rank; take more ranks, LoRA, or fewer max_tokens_per_microbatch"
        )
    elif layout == whole:
        yield f"a rank holds the whole model: {best.memory.gib:.1f} GiB"
    elif not unsplit.fits:
        yield (
            f"a rank needs {best.memory.gib:.1f} GiB; with the whole model on each it would be"
            f" {unsplit.memory.gib:.1f} GiB"
        )
    else:
        yield (
            f"with the whole model on each rank a step would take"
            f" {unsplit.slowdown / best.slowdown:.1f} times as long: the batch is too small for"
            f" data={whole.data}"
        )
    for name, meaning in _MEANING.items():
        if (size := getattr(layout, name)) > 1:
            yield f"{name}={size}: {meaning}"
    if layout.sharding == "full":
        yield (
            "sharding=full: weights and gradients are divided too, and each layer's weights are"
            " fetched twice in each micro-batch"
        )
    if best.memory.teacher:
        yield f"the teacher takes {best.memory.teacher / GIB:.1f} GiB of it before the first step"
    if best.recompute != "none":
        again = [c for c in ranking if c.layout == layout and c.recompute == "none"]
        slower = f" {best.slowdown / again[0].slowdown:.2f} times as long" if again else " longer"
        yield (
            f"recompute={best.recompute}: {_AGAIN[best.recompute]} computed again, so that a step"
            f" takes{slower}"
        )
    all_of_them = layout.data == layout.world
    yield f"data={layout.data}: {'all ranks' if all_of_them else 'the ranks that are left'}"
    if best.slowdown > 1.005:
        yield (
            f"a step takes {best.slowdown:.2f} times what it would on ranks that only multiply"
            " large matrices"
        )


_MEANING = {
    "tensor": "each layer is split within a node, activations too (sequence_parallel)",
    "pipeline": "layers are split into stages, which send little and wait for each other",
    "interleave": "each stage is several chunks of layers, which shortens the waiting",
    "context": "long sequences are split over ranks",
    "expert": "experts are split over the data and context ranks",
}
_AGAIN = {
    "full": "activations are",
    "mlp": "feed-forward layers are",
    "moe": "experts are",
}
