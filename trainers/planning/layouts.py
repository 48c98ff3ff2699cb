"""Layouts: which ones a model supports, and which of them is the fastest that fits in memory.

job/job_inputs.py checks a job's layout with `check_layout` before it starts ranks. job_layout.py
calls `choose_layout` for jobs without a layout, plan.py shows the whole ranking. Memory and speed
are estimates, see arithmetic.py and step_time.py. No torch.
"""

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from itertools import product
from math import log2
from typing import get_args

from cray_agents.errors import BadInput
from cray_agents.trainers.models.architecture import SUPPORTED, Architecture
from cray_agents.trainers.models.megatron_bridge.bridged_kinds import WHOLE_EXPERTS, why_not_bridged
from cray_agents.trainers.planning.arithmetic import GIB, Memory, count_weights, estimate_memory
from cray_agents.trainers.planning.step_time import Gpu, slowdown
from cray_agents.training_jobs import Backend, Hyperparameters, Layout, Sharding

PROPOSED = 6  # layouts that an error names at most
#: Share of a rank's memory for CUDA, NCCL, the allocator's losses, and the batch of weights on its
#: way to a replica (weight_transfer.py: 1 GiB, or a larger tensor).
RESERVE = 0.1
LONG = 8192  # tokens; sequences so long may use context parallelism


def why_unfit(model: Architecture, layout: Layout) -> str | None:
    """Return the reason why a model does not support a layout; None if it does.

    Key-value heads must divide evenly, too. Megatron could give several tensor ranks the same head,
    but would gather every rank's projections in each layer, and models/weights.py cuts between
    heads. The vocabulary need not divide: it is padded. Nor need the layers: Layout.chunk_layers.
    """
    tensor, pipeline, chunks, expert = (
        layout.tensor,
        layout.pipeline,
        layout.interleave,
        layout.expert,
    )
    if layout.sharding == "full" and layout.data == 1:
        return "sharding=full has no effect with data=1"
    if model.backend == "transformers":
        return _why_not_data_alone(model, layout)
    if model.backend == "megatron-bridge" and (chunks > 1 or layout.context > 1):
        return (
            "backend=megatron-bridge was tried with data, tensor, pipeline and expert alone, not"
            " with interleave or context"
        )
    if model.backend == "megatron-bridge" and model.kind in WHOLE_EXPERTS and tensor > 1:
        return (
            f"tensor={tensor} cuts its experts, whose biases Megatron-core takes whole: split it by"
            " expert and pipeline"
        )
    if layout.sharding == "full":
        return (
            "sharding=full divides transformers' own modules (backend=transformers), and this model"
            f" is trained by backend={model.backend}, which tensor, pipeline and expert divide"
        )
    for name, size in _split_by_tensor(model):
        if size % tensor:
            return f"tensor={tensor} does not divide its {size} {name}"
    if chunks > 1 and pipeline == 1:
        return f"interleave={chunks} needs pipeline > 1"
    if model.layers < pipeline * chunks:
        return (
            f"pipeline={pipeline} times interleave={chunks} are more chunks than its"
            f" {model.layers} layers"
        )
    if expert > 1 and not model.experts:
        return f"expert={expert}, but it has no experts"
    if expert > 1 and (model.experts or 0) % expert:
        return f"expert={expert} does not divide its {model.experts} experts"
    if layout.data * layout.context % expert:
        return (
            f"expert={expert} does not divide the {layout.data * layout.context} ranks it lives in"
            f" (data={layout.data} times context={layout.context})"
        )
    if reason := _why_not_so_many_optimizers(model, layout):
        return reason
    if layout.sequence_parallel and tensor == 1:
        return "sequence_parallel has no effect with tensor=1"
    if model.experts and tensor > 1 and not layout.sequence_parallel:
        return "experts with tensor>1 need sequence_parallel=true"
    return None


def _why_not_so_many_optimizers(model: Architecture, layout: Layout) -> str | None:
    """Return why the ranks that share an optimizer cannot be cut into its instances."""
    sharing = {"": layout.data * layout.context}
    if model.experts:
        sharing["of an expert "] = layout.data * layout.context // layout.expert
    for of, ranks in sharing.items():
        if ranks % layout.optimizer_instances:
            return (
                f"optimizer_instances={layout.optimizer_instances} does not divide the {ranks}"
                f" ranks {of}that share an optimizer"
            )
    return None


def _why_not_data_alone(model: Architecture, layout: Layout) -> str | None:
    """Return why the transformers backend does not support a layout."""
    named = layout.model_dump(exclude_defaults=True, exclude={"data", "sharding"})
    if not named:
        return None
    other = f"; {why_not_bridged(model.kind)}"
    if model.kind in SUPPORTED:
        other = "; backend=megatron splits it"
    elif why_not_bridged(model.kind) is None:
        other = "; backend=megatron-bridge splits it by tensor, pipeline and expert"
    fields = ", ".join(f"{name}={value}" for name, value in named.items())
    return (
        f"{fields}, but each rank computes transformers' own module whole (backend=transformers):"
        f" only data parallelism divides its work, and sharding=full its weights{other}"
    )


def _split_by_tensor(model: Architecture) -> list[tuple[str, int]]:
    feed = (
        ("feed-forward units of an expert", model.expert_ffn)
        if model.experts
        else ("feed-forward units", model.ffn)
    )
    return [("attention heads", model.heads), ("key-value heads", model.kv_heads), feed]


def check_layout(model: Architecture, layout: Layout) -> None:
    """Raise BadInput for an unsupported layout, with the nearest layouts of the same world size."""
    reason = why_unfit(model, layout)
    if reason is None:
        return
    nearest = sorted(
        possible_layouts(model, layout.world), key=lambda other: _distance(layout, other)
    )
    raise BadInput(
        f"a {model.kind} model does not fit {describe_layout(layout)}: {reason}."
        f" On {layout.world} ranks these fit: "
        + "; ".join(describe_layout(other) for other in nearest[:PROPOSED]),
        param="layout",
    )


def possible_layouts(model: Architecture, world: int) -> Iterator[Layout]:
    """Yield the layouts of a world size, with sequence parallelism if tensor > 1.

    For the transformers backend: data parallelism, with and without full sharding.
    Else all supported ones without interleaving and with one optimizer, which a job may name.
    """
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    tensors = [n for n in sizes if not any(size % n for _, size in _split_by_tensor(model))]
    stages = [n for n in sizes if n <= model.layers]
    experts = [n for n in sizes if not (model.experts or 1) % n]
    if model.backend == "transformers":
        layouts = (Layout(data=world, sharding=each) for each in get_args(Sharding))
        yield from (layout for layout in layouts if why_unfit(model, layout) is None)
        return
    for tensor, pipeline, context in product(tensors, stages, sizes):
        data, left_over = divmod(world, tensor * pipeline * context)
        if left_over:
            continue
        for expert in experts:
            layout = Layout(
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                context=context,
                expert=expert,
                sequence_parallel=tensor > 1,
            )
            if why_unfit(model, layout) is None:
                yield layout


def describe_layout(layout: Layout) -> str:
    """Describe a layout without its default values, as in "data=4 tensor=2"."""
    fields = layout.model_dump(exclude_defaults=True, exclude={"sequence_parallel"})
    fields = {"data": layout.data} | fields
    named = " ".join(f"{name}={value}" for name, value in fields.items())
    return named + (" sequence_parallel=true" if layout.sequence_parallel else "")


def scoring_backend(layout: Layout) -> Backend | None:
    """Return the backend of a model that only scores in a layout; None: its kind's own."""
    return "transformers" if layout.sharding == "full" else None


def _distance(wanted: Layout, other: Layout) -> tuple[float, int]:
    """Return the sort key of a layout: its distance in doublings, then most data ranks."""
    names = ("data", "tensor", "pipeline", "interleave", "context", "expert")
    ratios = [getattr(other, name) / getattr(wanted, name) for name in names]
    return sum(abs(log2(ratio)) for ratio in ratios), -other.data


@dataclass(frozen=True)
class LayoutQuestion:
    """A training run that needs a layout, on `ranks` ranks with `gib` GiB of memory each.

    `sequence_length`: tokens of a usual sequence. `recompute`, `layout`: the job's own; None lets
    the choice decide. `teacher`: a model that the layout must hold beside this one, before the
    first step (distill). `gpu` for its speed and links; None: an H100.
    """

    model: Architecture
    hyper: Hyperparameters
    ranks: int
    gib: float
    ranks_per_node: int
    sequence_length: int
    recompute: str | None = None
    layout: Layout | None = None
    teacher: Architecture | None = None
    gpu: Gpu | None = None

    def layouts(self) -> Iterator[Layout]:
        """Yield the layouts to choose from: tensor ranks in a node, context only if long."""
        if self.layout is not None:
            yield self.layout
            return
        node = min(self.ranks, self.ranks_per_node)
        for layout in possible_layouts(self.model, self.ranks):
            if node % layout.tensor or (layout.context > 1 and self.sequence_length < LONG):
                continue
            sharded = layout.sharding == "full"
            if sharded and self.hyper.lora is not None:
                continue
            if sharded or self.teacher is None or why_unfit(self.teacher, layout) is None:
                yield layout

    def recomputes(self) -> list[str]:
        """Return the values of `recompute` to choose from."""
        if self.recompute is not None or self.layout is not None:
            return [self.recompute or "none"]
        feed = (
            [] if self.model.backend == "transformers" else ["moe" if self.model.experts else "mlp"]
        )
        return ["none", *feed, "full"]

    def candidate(self, layout: Layout, recompute: str) -> "LayoutCandidate":
        """Estimate what a layout takes."""
        memory = estimate_memory(
            self.model,
            layout,
            self.hyper,
            sequence_length=self.sequence_length,
            recompute=recompute,
            teacher=self.teacher,
        )
        slower = slowdown(
            self.model,
            layout,
            self.hyper,
            self.sequence_length,
            self.ranks_per_node,
            recompute=recompute,
            gpu=self.gpu,
        )
        fits = memory.gib <= self.gib * (1 - RESERVE)
        return LayoutCandidate(layout, recompute, memory, slower, fits)


@dataclass(frozen=True)
class LayoutCandidate:
    """A layout, its memory, and its slowdown against ranks that are always busy."""

    layout: Layout
    recompute: str
    memory: Memory
    slowdown: float
    fits: bool


@dataclass(frozen=True)
class Choice(LayoutCandidate):
    """The chosen layout, the reasons in words, and the ranking of all candidates."""

    reasons: list[str]
    ranking: Sequence[LayoutCandidate]


def choose_layout(question: LayoutQuestion) -> Choice:
    """Choose the fastest layout; if none fits, the one with the least memory."""
    candidates = (
        question.candidate(layout, recompute)
        for layout in question.layouts()
        for recompute in question.recomputes()
    )
    ranking = sorted(candidates, key=_order)
    best = ranking[0]
    if not best.fits:
        best = min(ranking, key=lambda candidate: candidate.memory.total)
    reasons = [_premises(question), *_decisions(best, ranking)]
    return Choice(**vars(best), reasons=reasons, ranking=ranking)


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


def _premises(question: LayoutQuestion) -> str:
    model, hyper, ranks = question.model, question.hyper, question.ranks
    billions = count_weights(model).total / 1e9
    trained = f"LoRA of rank {hyper.lora.rank} on" if hyper.lora else "all weights of"
    return (
        f"{trained} a {model.kind} model of {billions:.3g} billion parameters in {hyper.dtype}, "
        f"{ranks} {'ranks' if ranks > 1 else 'rank'} of {question.gib:.4g} GiB, of which"
        f" {RESERVE:.0%} stay free, micro-batches of {hyper.max_tokens_per_microbatch:,} tokens"
    )


def _decisions(best: LayoutCandidate, ranking: Sequence[LayoutCandidate]) -> Iterator[str]:
    """Yield a sentence for each decision."""
    layout, whole = best.layout, Layout(data=best.layout.world)
    alike = (c for c in ranking if c.layout == whole and c.recompute == best.recompute)
    unsplit, gib = next(alike, best), best.memory.gib
    if not best.fits:
        yield (
            f"nothing fits: {describe_layout(layout)} needs the least, {gib:.1f} GiB a rank; take"
            " more ranks, LoRA, or fewer max_tokens_per_microbatch"
        )
    elif layout == whole:
        yield f"a rank holds the whole model: {gib:.1f} GiB"
    elif not unsplit.fits:
        yield f"a rank needs {gib:.1f} GiB; unsplit it would be {unsplit.memory.gib:.1f} GiB"
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
        yield "sharding=full: weights and gradients are divided too, at the cost of more messages"
    if best.memory.teacher:
        yield f"the teacher takes {best.memory.teacher / GIB:.1f} GiB of it before the first step"
    if best.recompute != "none":
        yield f"recompute={best.recompute}: {_AGAIN.get(best.recompute, 'some')} computed again"
    if best.slowdown > 1.005:
        yield (
            f"a step takes {best.slowdown:.2f} times what it would on ranks that only multiply"
            " large matrices"
        )


_MEANING = {
    "tensor": "each layer is split within a node, activations too (sequence_parallel)",
    "pipeline": "layers are split into stages, which send little and wait for each other",
    "context": "long sequences are split over ranks",
    "expert": "experts are split over the data and context ranks",
    "data": "ranks share the batch",
}
_AGAIN = {"full": "activations are", "mlp": "feed-forward layers are", "moe": "experts are"}
