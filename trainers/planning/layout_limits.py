"""Whether a job's layout fits into what is there: cores, memory, GPUs.

MegatronTrainer asks before it writes a job down, whoever submits it; `oversubscribe` in the spec
goes past it. What runs on this host is held against this host. What a site's Slurm runs is held
against its nodes by Slurm, and here only against the memory of a GPU, which Slurm knows nothing of.
Read next: planning/memory.py, the estimate.
"""

from math import ceil

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.planning.cluster_resources import Gpus, HostResources, Resources
from cray_agents.trainers.planning.default_layout import usual_length
from cray_agents.trainers.planning.layouts import described
from cray_agents.trainers.planning.memory import estimate_memory
from cray_agents.training_jobs import JobSpec

ANYWAY = "; or run it all the same: --oversubscribe, in Python and over HTTP oversubscribe=true"
PROCESS_GIB = 0.3  # of a rank beside the model: torch, gloo, buffers


def hold(spec: JobSpec, home: Home, resources: Resources, *, chosen: bool) -> None:
    """Raises BadInput when a settled spec takes more than there is, with what would fit.

    chosen: the layout is the trainer's own. Of GPUs such a one is not refused for its memory: it is
    the best there is, and spreading.py says loudly that it may not fit.
    """
    if spec.oversubscribe:
        return
    host, gpus = resources.host, resources.gpus
    if host is not None:
        _hold_ranks(spec, host, resources)
    if gpus is not None and not chosen:
        _hold_gpu_memory(spec, home, gpus)
    elif gpus is None and host is not None:
        _hold_memory(spec, home, host)


def _hold_ranks(spec: JobSpec, host: HostResources, resources: Resources) -> None:
    """Each rank has its cores, and its GPU, on the one host."""
    world, each = spec.layout.world, resources.cpus_per_rank
    if resources.gpus is not None and world > resources.gpus.per_node:
        raise _refused(
            spec,
            f"takes {world} GPUs, one a rank, and this host has {resources.gpus.per_node}",
            f"a layout of at most {resources.gpus.per_node} ranks",
            anyway="",
        )
    if world * each > host.cores:
        cores = f"{each} cores for each of its" if each > 1 else "a core for each of its"
        fits = host.cores // each
        remedy = f"a layout of at most {fits} {'ranks' if fits > 1 else 'rank'}"
        raise _refused(
            spec,
            f"takes {cores} {world} ranks, and this host has {host.cores}",
            remedy if fits else f"train_cpus_per_rank = {host.cores} at most",
        )


def _hold_gpu_memory(spec: JobSpec, home: Home, gpus: Gpus) -> None:
    need = estimate_memory(
        read_architecture(home.root / spec.parent),
        spec.layout,
        spec.hyperparameters,
        sequence_length=usual_length(spec, home),
        recompute=spec.recompute,
    ).gib
    if need > gpus.gib:
        raise _refused(
            spec,
            f"takes {need:.1f} GiB a rank by an estimate from above, and a {gpus.name} has"
            f" {gpus.gib:.4g}",
            "no layout at all, and the trainer chooses one; LoRA; fewer max_tokens_per_microbatch",
        )


def _hold_memory(spec: JobSpec, home: Home, host: HostResources) -> None:
    """All ranks are processes of this host.

    A machine whose memory is full takes all else on it along, but a job that would have run is not
    to be refused: micro-batches are taken for as large as the dataset's usual samples make them.
    """
    length, hyper = usual_length(spec, home), spec.hyperparameters
    tokens = max(1, ceil(hyper.batch_size / spec.layout.data) * length)
    usual = min(hyper.max_tokens_per_microbatch, tokens)
    each = estimate_memory(
        read_architecture(home.root / spec.parent),
        spec.layout,
        hyper.model_copy(update={"max_tokens_per_microbatch": usual}),
        sequence_length=length,
        recompute=spec.recompute,
    ).gib
    need = spec.layout.world * (each + PROCESS_GIB)
    if need > host.gib:
        ranks = "its rank" if spec.layout.world == 1 else f"its {spec.layout.world} ranks"
        raise _refused(
            spec,
            f"takes about {need:.1f} GiB for {ranks}, and this host has {host.gib:.1f}",
            "fewer ranks, LoRA, a smaller batch or fewer max_tokens_per_microbatch",
        )


def _refused(spec: JobSpec, why: str, remedy: str, anyway: str = ANYWAY) -> BadInput:
    return BadInput(
        f"layout {described(spec.layout)} {why}: ask for {remedy}{anyway}",
        param="layout",
        code="does_not_fit",
    )
