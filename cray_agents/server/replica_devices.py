"""Replica devices: the GPUs, cores and memory that each replica of `up` has. Called by compose.py.

Read next: runtime/pool/serving_plan.py, the settings that follow from them.
"""

import os
from collections.abc import Sequence
from contextlib import suppress

from cray_agents.config import Config
from cray_agents.errors import BadInput, ConfigError
from cray_agents.ports import Command
from cray_agents.processes import SAFE_IMPORTS
from cray_agents.runtime.accounting.ledger import HeldDevices
from cray_agents.runtime.pool.serving_plan import ServingDevice
from cray_agents.runtime.pool.vllm_process import has_gpu_build
from cray_agents.runtime.registry import foreign_model
from cray_agents.runtime.scheduler.gpu_placement import GpuPlacement, gpu_type, gpus_per_server
from cray_agents.server.platform_process import ReplicaCount
from cray_agents.trainers.planning.cluster_resources import gpu_of_host, this_host
from cray_agents.trainers.planning.step_time import identify


def serving_device(config: Config, replicas: ReplicaCount, *, gpu: bool) -> ServingDevice:
    """Describe what each replica has: of this host, or in a Slurm job on GPUs that are named."""
    if gpu:
        named = (config.job.gpu_type or config.train_gpu or "").replace("_", " ")
        known = identify(named) if replicas.jobs else None
        kind, gib = ("", 0.0) if known is None else (known.name, known.gib)
        if replicas.here:
            with suppress(ConfigError):
                kind, gib = gpu_of_host()
        return ServingDevice(gib, gpus_per_server(config.engine_args), kind)
    if replicas.jobs:
        command = replica_command(config)
        return ServingDevice(cores=command.cpus_per_rank * command.ranks // command.nodes)
    host, share = this_host(), replicas.here
    if not share:  # nothing is served, and any model fits
        return ServingDevice()
    cores = max(1, host.cores // share)
    return ServingDevice(host.gib / share, cores=cores, bfloat16=host.bfloat16)


def replica_command(config: Config) -> Command:
    """Return what all replicas' jobs ask Slurm for. Raises BadInput for nodes that do not fit."""
    gpus = gpus_per_server(config.engine_args) if has_gpu_build() else 0
    nodes = config.replica_nodes
    ranks = gpus or nodes
    if ranks % nodes:
        raise BadInput(
            f"a replica of {gpus} GPUs (engine_args) does not divide over replica_nodes = {nodes}",
            param="replica_nodes",
        )
    cores = config.replica_cpus or (4 * gpus or 2 * nodes)
    trusted = os.pathsep.join(map(str, foreign_model.allowed_directories()))
    return Command(
        name="replica",
        kind="replica",
        argv=[],
        directory="",
        log="",
        environment=SAFE_IMPORTS | ({foreign_model.VARIABLE: trusted} if trusted else {}),
        nodes=nodes,
        ranks=ranks,
        cpus_per_rank=-(-cores // ranks),
        gpus=gpus > 0,
    )


def devices_of_replicas(
    config: Config, placement: GpuPlacement, jobs: int, threads: Sequence[int]
) -> list[HeldDevices]:
    """Return what each replica holds, for the ledger: those of this host first, then Slurm jobs.

    A job's GPUs are numbered within it. A server on GPUs of this host has no cores of its own. One
    on its CPU has as many as it computes with: `threads`, of each.
    """
    if has_gpu_build():
        kind = config.job.gpu_type or gpu_type()
        own = [HeldDevices(gpus, kind) for gpus in placement.replicas]
    else:
        own = [HeldDevices(cores=each) for each in threads]
    if not jobs:
        return own
    command = replica_command(config)
    numbers = tuple(str(number) for number in range(command.ranks if command.gpus else 0))
    cores = command.ranks * command.cpus_per_rank
    return [*own, *[HeldDevices(numbers, config.job.gpu_type or "", cores)] * jobs]
