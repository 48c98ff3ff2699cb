"""Micro-batch: choose the tokens of a job's micro-batches by the memory of its GPUs.

Large micro-batches keep a GPU busy. MegatronTrainer calls `decide_hyperparameters` before it takes
a job's id, `cray-agents plan` calls `choose_microbatch`. No GPU was seen. Read next: memory.py for
the estimate, layout_choice.py for the layouts.
"""

from pathlib import Path

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.trainers.models.architecture import (
    Architecture,
    read_architecture,
    with_learning_rate,
    with_way,
)
from cray_agents.trainers.planning.cluster_resources import Gpus, Resources
from cray_agents.trainers.planning.default_layout import COMMANDED, teacher_of, usual_length
from cray_agents.trainers.planning.layout_choice import RESERVE, choose_layout
from cray_agents.trainers.planning.memory import estimate_memory
from cray_agents.trainers.planning.step_time import slowdown
from cray_agents.training_jobs import MICROBATCH, Hyperparameters, JobSpec, Layout, with_dtype

SIZES = tuple(MICROBATCH << doublings for doublings in range(4, -1, -1))  # 65,536 first
_SAME = 1.001  # slowdowns so close are equal


def decide_hyperparameters(spec: JobSpec, home: Home, resources: Resources) -> JobSpec:
    """Return the spec with the dtype and the micro-batch of the resources, where it gives none.

    So it is with the learning rate that suits its parent, and the way that its layout needs. The
    job's id counts all four. So a job that exists
    with an automatic size keeps it, also if there are other GPUs now. A parent or dataset that
    cannot be read leaves the size undecided: the checks that follow say what is wrong.
    """
    parent = home.root / spec.parent
    spec = with_learning_rate(with_way(with_dtype(spec, resources.dtype), parent), parent)
    hyper, gpus = spec.hyperparameters, resources.gpus
    if gpus is None or "max_tokens_per_microbatch" in hyper.model_fields_set:
        return spec
    sized = {tokens: _sized(spec, tokens) for tokens in SIZES}
    for one in sized.values():
        if (home.job(one.id) / "spec.json").exists():
            return one
    try:
        model = read_architecture(parent, hyper.way)
        length, teacher = usual_length(spec, home), teacher_of(spec, home)
    except (BadInput, NotFound):
        return spec
    layout = spec.layout if "layout" in spec.model_fields_set else None
    recompute = spec.recompute if "recompute" in spec.model_fields_set else None
    return sized[_on_gpus(model, hyper, resources, gpus, length, layout, recompute, teacher)]


def usual_microbatch(parent: Path, resources: Resources) -> int:
    """Return the tokens of a micro-batch for a parent whose data and settings come later.

    4,096 for a parent that cannot be read: the job's checks will say what is wrong.
    """
    if resources.gpus is None:
        return MICROBATCH
    try:
        model = read_architecture(parent)
    except (BadInput, NotFound):
        return MICROBATCH
    hyper = Hyperparameters(steps=1, dtype=resources.dtype)
    return _on_gpus(model, hyper, resources, resources.gpus, COMMANDED)


def _on_gpus(
    model: Architecture,
    hyper: Hyperparameters,
    resources: Resources,
    gpus: Gpus,
    length: int,
    layout: Layout | None = None,
    recompute: str | None = None,
    teacher: Architecture | None = None,
) -> int:
    return choose_microbatch(
        model,
        hyper,
        resources.ranks,
        memory_gib_per_rank=gpus.gib,
        ranks_per_node=resources.ranks_per_node,
        sequence_length=length,
        layout=layout,
        recompute=recompute,
        teacher=teacher,
    )


def _sized(spec: JobSpec, tokens: int) -> JobSpec:
    changed = {"max_tokens_per_microbatch": tokens}
    hyper = spec.hyperparameters.model_copy(update=changed)
    return spec.model_copy(update={"hyperparameters": hyper})


def choose_microbatch(
    model: Architecture,
    hyper: Hyperparameters,
    ranks: int,
    *,
    memory_gib_per_rank: float,
    ranks_per_node: int,
    sequence_length: int,
    layout: Layout | None = None,
    recompute: str | None = None,
    teacher: Architecture | None = None,
) -> int:
    """Choose the most tokens whose predicted memory fits, with a reserve, and that cost no speed.

    A size costs speed if its best layout is slower, by the planner's estimate, than that of 4,096
    tokens: it would compute activations twice, split the model further, or leave stages of a
    pipeline idle. The answer is 4,096 if not even that fits. `layout`, `recompute`: the job's own,
    if it names them. `teacher`: a model that scores the samples first.
    """

    def judge(tokens: int) -> tuple[bool, float]:
        sized = hyper.model_copy(update={"max_tokens_per_microbatch": tokens})
        if layout is None:
            choice = choose_layout(
                model,
                ranks,
                memory_gib_per_rank=memory_gib_per_rank,
                ranks_per_node=ranks_per_node,
                hyper=sized,
                sequence_length=sequence_length,
                recompute=recompute,
                teacher=teacher,
            )
            return choice.fits, choice.slowdown
        memory = estimate_memory(
            model,
            layout,
            sized,
            sequence_length=sequence_length,
            recompute=recompute or "none",
            teacher=teacher,
        )
        fits = memory.gib <= memory_gib_per_rank * (1 - RESERVE)
        slower = slowdown(
            model, layout, sized, sequence_length, ranks_per_node, recompute=recompute or "none"
        )
        return fits, slower

    _, usual = judge(MICROBATCH)
    for tokens in SIZES[:-1]:
        fits, slower = judge(tokens)
        if fits and slower <= usual * _SAME:
            return tokens
    return MICROBATCH
