"""Replica devices: the GPUs and cores that each replica of `up` takes. Called by compose.py."""

import os
from collections.abc import Sequence

from cray_agents.config import Config
from cray_agents.errors import BadInput
from cray_agents.ports import Command
from cray_agents.processes import SAFE_IMPORTS
from cray_agents.runtime.pool.engine.vllm_replica import has_gpu_build
from cray_agents.runtime.registry import model_code
from cray_agents.runtime.scaling.ledger import HeldDevices
from cray_agents.runtime.scheduler.gpu_placement import GpuPlacement, gpu_type, gpus_per_server


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
    trusted = os.pathsep.join(map(str, model_code.allowed_directories()))
    return Command(
        name="replica",
        kind="replica",
        argv=[],
        directory="",
        log="",
        environment=SAFE_IMPORTS | ({model_code.VARIABLE: trusted} if trusted else {}),
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
