"""Layout limits: refuse a job whose layout exceeds the cores, the memory or the GPUs.

MegatronTrainer checks before it writes any job; `oversubscribe` in the spec skips the check. Jobs
of this host are checked against this host. Slurm checks its jobs against its nodes itself, but does
not know the memory of a GPU, which is checked here. Read next: memory.py, the estimate.
"""

from math import ceil

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.planning.cluster_resources import Gpus, HostResources, Resources
from cray_agents.trainers.planning.default_layout import teacher_of, usual_length
from cray_agents.trainers.planning.layouts import describe_layout
from cray_agents.trainers.planning.memory import estimate_memory
from cray_agents.training_jobs import JobSpec

ANYWAY = "; or run it all the same: --oversubscribe, in Python and over HTTP oversubscribe=true"
PROCESS_GIB = 0.3  # of a rank besides the model: torch, gloo, buffers


def check_layout_fits(spec: JobSpec, home: Home, resources: Resources, *, chosen: bool) -> None:
    """Raise BadInput, with a remedy, if a spec with a layout exceeds the resources.

    `chosen`: the trainer chose the layout. On GPUs such a layout is not refused for its memory: no
    better one exists, and default_layout.py warns that it may not fit.
    """
    if spec.oversubscribe:
        return
    host, gpus = resources.host, resources.gpus
    if host is not None:
        _check_ranks(spec, host, resources)
    if gpus is not None and not chosen:
        _check_gpu_memory(spec, home, gpus)
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


def _check_gpu_memory(spec: JobSpec, home: Home, gpus: Gpus) -> None:
    need = estimate_memory(
        read_architecture(home.root / spec.parent, spec.hyperparameters.way),
        spec.layout,
        spec.hyperparameters,
        sequence_length=usual_length(spec, home),
        recompute=spec.recompute,
        teacher=teacher_of(spec, home),
    ).gib
    if need > gpus.gib:
        raise _refusal(
            spec,
            f"takes {need:.1f} GiB a rank by an estimate from above, and a {gpus.name} has"
            f" {gpus.gib:.4g}",
            "no layout at all, and the trainer chooses one; LoRA; fewer max_tokens_per_microbatch",
        )


def _check_host_memory(spec: JobSpec, home: Home, host: HostResources) -> None:
    """Raise BadInput if the ranks, all processes of this host, exceed its memory.

    Full memory takes down everything on the machine, yet a job that would run must not be refused.
    The estimate therefore assumes micro-batches of the dataset's usual samples.
    """
    length, hyper = usual_length(spec, home), spec.hyperparameters
    tokens = max(1, ceil(hyper.batch_size / spec.layout.data) * length)
    usual = min(hyper.max_tokens_per_microbatch, tokens)
    each = estimate_memory(
        read_architecture(home.root / spec.parent, spec.hyperparameters.way),
        spec.layout,
        hyper.model_copy(update={"max_tokens_per_microbatch": usual}),
        sequence_length=length,
        recompute=spec.recompute,
        on_cpu=True,
        teacher=teacher_of(spec, home),
    ).gib
    need = spec.layout.world * (each + PROCESS_GIB)
    if need > host.gib:
        ranks = "its rank" if spec.layout.world == 1 else f"its {spec.layout.world} ranks"
        raise _refusal(
            spec,
            f"takes about {need:.1f} GiB for {ranks}, and this host has {host.gib:.1f}",
            "fewer ranks, LoRA, a smaller batch or fewer max_tokens_per_microbatch",
        )


def _refusal(spec: JobSpec, why: str, remedy: str, anyway: str = ANYWAY) -> BadInput:
    return BadInput(
        f"layout {describe_layout(spec.layout)} {why}: ask for {remedy}{anyway}",
        param="layout",
        code="does_not_fit",
    )
