"""Job layout: choose a job's micro-batch and layout if it names none; refuse too large ones.

MegatronTrainer calls `decide_hyperparameters` before it takes a job's id, and
`choose_default_layout` and `check_layout_fits` before it writes the spec. `plan train` calls
`choose_microbatch`. All go by the estimate of arithmetic.py, which no GPU was measured for.
"""

from contextlib import suppress
from dataclasses import replace
from math import ceil
from pathlib import Path

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.datasets.reader import mean_length, read_dataset
from cray_agents.trainers.models.architecture import (
    Architecture,
    read_architecture,
    with_backend,
    with_learning_rate,
)
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.planning.arithmetic import count_weights, estimate_memory
from cray_agents.trainers.planning.cluster_resources import Gpus, HostResources, Resources
from cray_agents.trainers.planning.layouts import LayoutQuestion, choose_layout, describe_layout
from cray_agents.training_jobs import (
    BFLOAT16_FROM,
    MICROBATCH,
    Dtype,
    Hyperparameters,
    JobSpec,
    Layout,
    with_dtype,
)

SIZES = tuple(MICROBATCH << doublings for doublings in range(4, -1, -1))  # 65,536 first
_SAME = 1.001  # slowdowns so close are equal
COMMANDED = 1024  # tokens of a sequence that a client sends
PROCESS_GIB = 0.3  # of a rank besides the model: torch, gloo, buffers
DATA_ONLY = "on CPUs ranks only share the data: what splits the model costs more than it saves"
LOUD = (
    "IT DOES NOT FIT by this estimate and will most likely run out of memory; it is started all"
    " the same, for the estimate is one from above"
)
ANYWAY = "; or run it all the same: --oversubscribe, in Python and over HTTP oversubscribe=true"


# ---- the micro-batch
def decide_hyperparameters(spec: JobSpec, home: Home, resources: Resources) -> JobSpec:
    """Return the spec with the dtype and the micro-batch of the resources, where it gives none.

    So it is with the learning rate that suits its parent, and the backend that its layout needs.
    The job's id counts all four. So a job that exists with an automatic size or dtype keeps it,
    also if there are other GPUs now. A parent or dataset that cannot be read leaves the size
    undecided: the checks that follow say what is wrong.
    """
    parent = home.root / spec.parent
    decided = with_learning_rate(with_backend(spec, parent), parent)
    spec = with_dtype(decided, usual_dtype(parent, resources))
    hyper, gpus = spec.hyperparameters, resources.gpus
    if gpus is None and hyper.dtype == "bfloat16":  # jobs of earlier versions were in float32
        earlier = with_dtype(decided, "float32")
        if (home.job(earlier.id) / "spec.json").exists():
            return earlier
    if gpus is None or "max_tokens_per_microbatch" in hyper.model_fields_set:
        return spec
    sized = {tokens: _sized(spec, tokens) for tokens in SIZES}
    for one in sized.values():
        if (home.job(one.id) / "spec.json").exists():
            return one
    try:
        model = read_architecture(parent, hyper.backend)
        question = _question_of(spec, home, resources, gpus, model)
    except (BadInput, NotFound):
        return spec
    layout = spec.layout if "layout" in spec.model_fields_set else None
    return sized[choose_microbatch(replace(question, layout=layout))]


def usual_dtype(parent: Path, resources: Resources) -> Dtype:
    """Return the dtype of a parent's jobs whose spec gives none.

    It is bfloat16 on GPUs, and for a large parent that is stored in it on a CPU that multiplies in
    it: twice as fast there, and the optimizer's weights are float32 all the same.
    """
    if resources.gpus is not None:
        return "bfloat16"
    if resources.host is not None and resources.host.bfloat16:
        with suppress(BadInput, NotFound):
            model = read_architecture(parent)
            if model.dtype == "bfloat16" and count_weights(model).total >= BFLOAT16_FROM:
                return "bfloat16"
    return "float32"


def usual_microbatch(parent: Path, resources: Resources) -> int:
    """Return the tokens of a micro-batch for a parent whose data and settings come later.

    4,096 for a parent that cannot be read: the job's checks will say what is wrong.
    """
    gpus = resources.gpus
    if gpus is None:
        return MICROBATCH
    try:
        model = read_architecture(parent)
    except (BadInput, NotFound):
        return MICROBATCH
    hyper, each = Hyperparameters(steps=1, dtype="bfloat16"), resources.ranks_per_node
    question = LayoutQuestion(model, hyper, resources.ranks, gpus.gib, each, COMMANDED)
    return choose_microbatch(question)


def choose_microbatch(question: LayoutQuestion) -> int:
    """Choose the most tokens whose predicted memory fits, with a reserve, and that cost no speed.

    A size costs speed if its best layout is slower, by the planner's estimate, than that of 4,096
    tokens: it would compute activations twice, split the model further, or leave stages of a
    pipeline idle. The answer is 4,096 if not even that fits.
    """

    def choice(tokens: int) -> tuple[bool, float]:
        sizes = {"max_tokens_per_microbatch": tokens}
        hyper = question.hyper.model_copy(update=sizes)
        best = choose_layout(replace(question, hyper=hyper))
        return best.fits, best.slowdown

    _, usual = choice(MICROBATCH)
    for tokens in SIZES[:-1]:
        fits, slower = choice(tokens)
        if fits and slower <= usual * _SAME:
            return tokens
    return MICROBATCH


def _sized(spec: JobSpec, tokens: int) -> JobSpec:
    changed = {"max_tokens_per_microbatch": tokens}
    hyper = spec.hyperparameters.model_copy(update=changed)
    return spec.model_copy(update={"hyperparameters": hyper})


def _question_of(
    spec: JobSpec, home: Home, resources: Resources, gpus: Gpus, model: Architecture
) -> LayoutQuestion:
    return LayoutQuestion(
        model,
        spec.hyperparameters,
        resources.ranks,
        gpus.gib,
        resources.ranks_per_node,
        usual_length(spec, home),
        recompute=spec.recompute if "recompute" in spec.model_fields_set else None,
        teacher=teacher_of(spec, home),
    )


# ---- the layout of a spec that names none
def choose_default_layout(
    spec: JobSpec, home: Home, resources: Resources
) -> tuple[JobSpec, list[str]]:
    """Return the spec with a layout, and the reasons, which are empty if the spec names a layout.

    A missing `recompute` is chosen with the layout. Raises BadInput and NotFound if the model or
    the dataset allows no choice.
    """
    if "layout" in spec.model_fields_set:
        return spec, []
    hyper, gpus = spec.hyperparameters, resources.gpus
    if gpus is None:
        data = min(hyper.batch_size, resources.ranks)
        fewer = f" of {resources.ranks} ranks: a batch has no more; "
        reason = f"data={data}{': ' if data == resources.ranks else fewer}{DATA_ONLY}"
        return spec.model_copy(update={"layout": Layout(data=data)}), [reason]
    model = read_parent(home.root / spec.parent, hyper.init, hyper.backend)
    choice = choose_layout(_question_of(spec, home, resources, gpus, model))
    reasons = choice.reasons if choice.fits else [LOUD, *choice.reasons]
    chosen = {"layout": choice.layout, "recompute": choice.recompute}
    return spec.model_copy(update=chosen), reasons


def teacher_of(spec: JobSpec, home: Home) -> Architecture | None:
    """Return the model that judges a job's samples; None without one. Raises BadInput, NotFound."""
    return None if spec.teacher is None else read_architecture(home.root / spec.teacher)


def usual_length(spec: JobSpec, home: Home) -> int:
    """Return the tokens of a usual unit: a training sample's mean, twice that for a pair.

    Of a job by commands, whose samples come later, it is a guess.
    """
    if spec.commands is not None:
        return COMMANDED
    mean = mean_length(read_dataset(home, spec.dataset))
    if not mean:
        raise BadInput(f"dataset {spec.dataset} has no samples to train on", param="dataset")
    return max(1, round(2 * mean if spec.method == "dpo" else mean))


# ---- limits
def check_layout_fits(spec: JobSpec, home: Home, resources: Resources, *, chosen: bool) -> None:
    """Raise BadInput, with a remedy, if a spec with a layout exceeds the resources.

    `oversubscribe` in the spec skips the check. Jobs of this host are checked against this host.
    Slurm checks its jobs against its nodes itself, but does not know the memory of a GPU, which is
    checked here. `chosen`: the trainer chose the layout. On GPUs such a layout is not refused for
    its memory: no better one exists, and the job's log warns that it may not fit.
    """
    if spec.oversubscribe:
        return
    host, gpus = resources.host, resources.gpus
    if host is not None:
        _check_ranks(spec, host, resources)
    if gpus is not None and not chosen:
        need = _estimated_gib(spec, home)
        if need > gpus.gib:
            raise _refusal(
                spec,
                f"takes {need:.1f} GiB a rank by an estimate from above, and a {gpus.name} has"
                f" {gpus.gib:.4g}",
                "no layout at all, and the trainer chooses one; LoRA; fewer"
                " max_tokens_per_microbatch",
            )
    elif gpus is None and host is not None:
        _check_host_memory(spec, home, host)


def _check_ranks(spec: JobSpec, host: HostResources, resources: Resources) -> None:
    """Raise BadInput unless the host has cores, and a GPU, for each rank."""
    world, each = spec.layout.world, resources.cores_each(spec.layout.world)
    if resources.gpus is not None and world > resources.gpus.per_node:
        raise _refusal(
            spec,
            f"takes {world} GPUs, one a rank, and this host has {resources.gpus.per_node}",
            f"a layout of at most {resources.gpus.per_node} ranks",
            anyway="",
        )
    if world * each > host.cores:
        cores = f"{each} cores for each of its" if each > 1 else "a core for each of its"
        fits = host.cores // each
        remedy = f"a layout of at most {fits} {'ranks' if fits > 1 else 'rank'}"
        raise _refusal(
            spec,
            f"takes {cores} {world} ranks, and this host has {host.cores}",
            remedy if fits else f"train_cpus_per_rank = {host.cores} at most",
        )


def _check_host_memory(spec: JobSpec, home: Home, host: HostResources) -> None:
    """Raise BadInput if the ranks, all processes of this host, exceed its memory.

    Full memory takes down everything on the machine, yet a job that would run must not be refused.
    The estimate therefore assumes micro-batches of the dataset's usual samples.
    """
    hyper = spec.hyperparameters
    tokens = max(1, ceil(hyper.batch_size / spec.layout.data) * usual_length(spec, home))
    usual = _sized(spec, min(hyper.max_tokens_per_microbatch, tokens))
    need = spec.layout.world * (_estimated_gib(usual, home, on_cpu=True) + PROCESS_GIB)
    if need > host.gib:
        ranks = "its rank" if spec.layout.world == 1 else f"its {spec.layout.world} ranks"
        raise _refusal(
            spec,
            f"takes about {need:.1f} GiB for {ranks}, and this host has {host.gib:.1f}",
            "fewer ranks, LoRA, a smaller batch or fewer max_tokens_per_microbatch",
        )


def _estimated_gib(spec: JobSpec, home: Home, *, on_cpu: bool = False) -> float:
    return estimate_memory(
        read_architecture(home.root / spec.parent, spec.hyperparameters.backend),
        spec.layout,
        spec.hyperparameters,
        sequence_length=usual_length(spec, home),
        recompute=spec.recompute,
        on_cpu=on_cpu,
        teacher=teacher_of(spec, home),
    ).gib


def _refusal(spec: JobSpec, why: str, remedy: str, anyway: str = ANYWAY) -> BadInput:
    return BadInput(
        f"layout {describe_layout(spec.layout)} {why}: ask for {remedy}{anyway}",
        param="layout",
        code="does_not_fit",
    )
