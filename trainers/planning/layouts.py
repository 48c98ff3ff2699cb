"""Layouts: list the layouts that a model supports, and refuse others with alternatives.

job/job.py checks a job's layout with `check_layout` before it forks. Read next: layout_choice.py,
which ranks the layouts.
"""

from collections.abc import Iterator
from itertools import product
from math import log2
from typing import get_args

from cray_agents.errors import BadInput
from cray_agents.trainers.models.architecture import SUPPORTED, Architecture
from cray_agents.trainers.models.bridge.bridged_kinds import WHOLE_EXPERTS, why_not_bridged
from cray_agents.training_jobs import Layout, Sharding, Way

PROPOSED = 6  # layouts that an error names at most


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
    if model.way == "universal":
        return _why_not_data_alone(model, layout)
    if model.way == "bridge" and (chunks > 1 or layout.context > 1):
        return (
            "way=bridge was tried with data, tensor, pipeline and expert parallelism alone, not"
            " with interleave or context"
        )
    if model.way == "bridge" and model.kind in WHOLE_EXPERTS and tensor > 1:
        return (
            f"tensor={tensor} cuts its experts, whose biases Megatron-core takes whole: split it by"
            " expert and pipeline"
        )
    if layout.sharding == "full":
        return (
            "sharding=full divides transformers' own modules (way=universal), and this model is"
            f" trained the {model.way} way, which tensor, pipeline and expert divide"
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
    """Return why a model that is trained the universal way does not support a layout."""
    named = layout.model_dump(exclude_defaults=True, exclude={"data", "sharding"})
    if not named:
        return None
    other = f"; {why_not_bridged(model.kind)}"
    if model.kind in SUPPORTED:
        other = "; way=native splits it"
    elif why_not_bridged(model.kind) is None:
        other = "; way=bridge splits it by tensor, pipeline and expert"
    fields = ", ".join(f"{name}={value}" for name, value in named.items())
    return (
        f"{fields}, but transformers' own module is computed whole on each rank (way=universal):"
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

    Of a model that is trained the universal way data parallelism, with and without full sharding.
    Else all supported ones, but of chunks for interleaving only those that are equal when embedding
    and loss count as a layer each, or when they do not count; and one optimizer.
    """
    sizes = [n for n in range(1, world + 1) if world % n == 0]
    tensors = [n for n in sizes if not any(size % n for _, size in _split_by_tensor(model))]
    stages = [n for n in sizes if n <= model.layers]
    experts = [n for n in sizes if not (model.experts or 1) % n]
    if model.way == "universal":
        layouts = (Layout(data=world, sharding=each) for each in get_args(Sharding))
        yield from (layout for layout in layouts if why_unfit(model, layout) is None)
        return
    for tensor, pipeline, context in product(tensors, stages, sizes):
        data, left_over = divmod(world, tensor * pipeline * context)
        if left_over:
            continue
        for interleave, expert in product(_interleaves(model.layers, pipeline), experts):
            layout = Layout(
                data=data,
                tensor=tensor,
                pipeline=pipeline,
                interleave=interleave,
                context=context,
                expert=expert,
                sequence_parallel=tensor > 1,
            )
            if why_unfit(model, layout) is None:
                yield layout


def _interleaves(layers: int, pipeline: int) -> Iterator[int]:
    yield 1
    for chunks in range(2, layers // pipeline + 1 if pipeline > 1 else 2):
        if any(cells % (pipeline * chunks) == 0 for cells in (layers, layers + 2)):
            yield chunks


def describe_layout(layout: Layout) -> str:
    """Describe a layout without its default values, as in "data=4 tensor=2"."""
    fields = layout.model_dump(exclude_defaults=True, exclude={"sequence_parallel"})
    fields = {"data": layout.data} | fields
    named = " ".join(f"{name}={value}" for name, value in fields.items())
    return named + (" sequence_parallel=true" if layout.sequence_parallel else "")


def scoring_way(layout: Layout) -> Way | None:
    """Return the way of a model that only scores in a layout; None: its kind's own."""
    return "universal" if layout.sharding == "full" else None


def _distance(wanted: Layout, other: Layout) -> tuple[float, int]:
    """Return the sort key of a layout: its distance in doublings, then most data ranks."""
    names = ("data", "tensor", "pipeline", "interleave", "context", "expert")
    ratios = [getattr(other, name) / getattr(wanted, name) for name in names]
    return sum(abs(log2(ratio)) for ratio in ratios), -other.data
