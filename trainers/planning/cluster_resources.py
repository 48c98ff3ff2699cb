"""Cluster resources: the ranks, nodes, GPUs, cores and time that training jobs may use.

`cray-agents up` makes a `Resources` of the configuration for MegatronTrainer, and `doctor` shows
it. This module never opens CUDA: the platform's process forks, and must hold no GPU. Read next:
job_layout.py, which chooses a job's layout over these resources.
"""

import os
import re
import subprocess
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import dataclass
from itertools import count
from math import ceil
from pathlib import Path

from cray_agents.config import Config
from cray_agents.errors import BadInput, ConfigError
from cray_agents.runtime.scheduler.gpu_placement import is_sliced, nvidia_devices
from cray_agents.trainers.planning.step_time import find_gpu, identify

CPU_RANKS = 2  # per node; more rarely pays over gloo
GPUS_PER_NODE = 8
CORES_PER_GPU = 4  # for the rank itself, the backward pass, and writing resume points
NVIDIA_SMI = ("nvidia-smi", "--query-gpu=name,memory.total", "--format=csv,noheader,nounits")


@dataclass(frozen=True)
class Gpus:
    """A node's GPUs; `name`: step_time.py's, if it has one. `gib`: the smallest GPU's memory."""

    name: str
    gib: float
    per_node: int


@dataclass(frozen=True)
class HostResources:
    """The cores and the GiB of memory that this process may use on its host.

    `bfloat16`: the CPU multiplies in it.
    """

    cores: int
    gib: float
    bfloat16: bool = False


def this_host() -> HostResources:
    """Return this host's cores and memory, within a container's limits."""
    gib = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE") / 2**30
    limit = Path("/sys/fs/cgroup/memory.max")
    with suppress(OSError, ValueError):  # no cgroup, or "max"
        gib = min(gib, int(limit.read_text()) / 2**30)
    return HostResources(len(os.sched_getaffinity(0)), gib, cpu_has_bfloat16())


def cpu_has_bfloat16(cpuinfo: Path = Path("/proc/cpuinfo")) -> bool:
    """Tell whether this CPU multiplies in bfloat16: AVX-512 BF16, AMX, or Arm's instructions."""
    text = cpuinfo.read_text() if cpuinfo.is_file() else ""
    return re.search(r"\b(avx512_bf16|amx_bf16|bf16)\b", text) is not None


def free_gib() -> float:
    """Return the GiB that processes of this host may still take, as Linux estimates it."""
    lines = Path("/proc/meminfo").read_text().splitlines()
    [kib] = [line.split()[1] for line in lines if line.startswith("MemAvailable:")]
    return int(kib) / 2**20


@dataclass(frozen=True)
class Resources:
    """The resources of a job without a layout: `ranks`, spread evenly over `nodes`.

    A job with a layout gets as many nodes as its ranks need. `gpus` None: ranks are processes on
    CPU cores. `minutes` is Slurm's time limit. `host` is this host if it runs all jobs, so that no
    layout exceeds it; None at a site's Slurm, which knows its nodes. `divides`: `cpus_per_rank`
    divides this host's cores, and with more ranks each has fewer.
    """

    ranks: int = 1
    nodes: int = 1
    gpus: Gpus | None = None
    cpus_per_rank: int = 1
    minutes: int | None = None
    host: HostResources | None = None
    divides: bool = False

    def cores_each(self, world: int) -> int:
        """Return the cores of each of `world` ranks."""
        if self.host is None or not self.divides:
            return self.cpus_per_rank
        return min(self.cpus_per_rank, max(1, self.host.cores // world))

    @property
    def ranks_per_node(self) -> int:
        """The ranks per node of a job without a layout."""
        return self.ranks // self.nodes

    def nodes_for(self, world: int) -> int:
        """Return the number of nodes for `world` ranks: even shares, and a GPU for each rank."""
        if self.gpus is None:
            return next(n for n in range(self.nodes, 0, -1) if world % n == 0)
        return next(n for n in count(ceil(world / self.ranks_per_node)) if world % n == 0)

    def __str__(self) -> str:
        """Describe the resources, as in "16 ranks on 2 nodes of 8 x H100 (79 GiB)"."""
        ranks = f"{self.ranks} {'ranks' if self.ranks > 1 else 'rank'}"
        nodes = f"{self.nodes} nodes" if self.nodes > 1 else "a node"
        of = "CPU cores"
        if self.gpus is not None:
            of = f"{self.gpus.per_node} x {self.gpus.name} ({self.gpus.gib:.4g} GiB)"
        cores = f", {self.cpus_per_rank} {'cores' if self.cpus_per_rank > 1 else 'core'} each"
        limit = f", for at most {self.minutes} minutes" if self.minutes else ""
        return f"{ranks} on {nodes} of {of}{cores}{limit}"


def resources_of(
    config: Config, *, here: bool = False, host_gpus: Sequence[str] | None = None
) -> Resources:
    """Return the configured resources, with this host's as defaults. Raises ConfigError.

    `here`: the scheduler runs all jobs on this host. `host_gpus`: the ids of the GPUs that they may
    use here (gpu_placement.py); None: as detected.
    """
    gpus, cores, nodes = _gpus(config, host_gpus), len(os.sched_getaffinity(0)), config.train_nodes
    most = gpus.per_node if gpus is not None else min(CPU_RANKS, cores)
    ranks = config.train_ranks or nodes * most
    if ranks % nodes:
        raise ConfigError(
            f"train_ranks = {ranks} cannot be spread evenly over train_nodes = {nodes}",
            param="train_ranks",
        )
    if gpus is not None and ranks // nodes > most:
        raise ConfigError(
            f"train_ranks = {ranks} on train_nodes = {nodes} are {ranks // nodes} on a node, and it"
            f" has {most} GPUs (train_gpus_per_node): a rank needs one of its own",
            param="train_ranks",
        )
    divides = here and gpus is None and config.train_cpus_per_rank is None
    each = max(1, cores // (ranks // nodes)) if divides else 1
    if gpus is not None:
        devices = len(nvidia_devices())
        each = min(CORES_PER_GPU, max(1, cores // devices)) if devices else CORES_PER_GPU
    host = this_host() if here else None
    each = config.train_cpus_per_rank or each
    return Resources(ranks, nodes, gpus, each, config.train_minutes, host, divides)


def gpu_of_host() -> tuple[str, float]:
    """Return the name of this host's GPUs and the smallest one's GiB. Raises ConfigError."""
    return parse_nvidia_smi(_run_nvidia_smi())


def _gpus(config: Config, host_gpus: Sequence[str] | None) -> Gpus | None:
    """Return the GPUs of the nodes that train; None if they train on CPU cores."""
    name, devices = config.train_gpu, nvidia_devices() if host_gpus is None else host_gpus
    if config.train_gpus == "off":
        if name is not None:
            raise ConfigError(
                f"train_gpu = {name!r} has no effect with train_gpus = 'off': leave one of them"
                " out",
                param="train_gpu",
            )
        return None
    if config.train_gpus == "auto" and name is None and not devices:
        return None
    per_node = config.train_gpus_per_node or len(devices) or GPUS_PER_NODE
    if host_gpus and is_sliced(host_gpus):
        per_node = 1  # a job sees no second MIG instance
    if name is not None:
        try:
            known = find_gpu(name)
        except BadInput as error:
            raise ConfigError(f"train_gpu: {error}", param="train_gpu") from error
        return Gpus(known.name, known.gib, per_node)
    if not devices:
        raise ConfigError(
            "train_gpus = 'on', but this host has no NVIDIA GPU that could be asked: say which the"
            " nodes that train have, as in train_gpu = 'H100'",
            param="train_gpu",
        )
    kind, gib = gpu_of_host()
    return Gpus(kind, gib, per_node)


def parse_nvidia_smi(text: str) -> tuple[str, float]:
    """Parse nvidia-smi's output: a GPU's name, and the smallest GPU's GiB. Raises ConfigError."""
    gpus = [line.rpartition(",") for line in text.splitlines()]
    try:
        gib = min(float(mib) / 1024 for _, _, mib in gpus)
    except ValueError:  # no line, or memory "[N/A]"
        raise _unknown(f"nvidia-smi says {text.strip()!r}") from None
    gpu = identify(gpus[0][0])
    return gpu.name if gpu is not None else gpus[0][0], gib


def _run_nvidia_smi() -> str:
    try:
        done = subprocess.run(NVIDIA_SMI, capture_output=True, text=True, timeout=60, check=True)
    except (OSError, subprocess.SubprocessError) as error:
        raise _unknown(str(error)) from error
    return done.stdout


def _unknown(why: str) -> ConfigError:
    return ConfigError(
        f"this host has NVIDIA GPUs, but not to be learned which ({why}): name them, as in"
        " train_gpu = 'H100', or train on the CPU with train_gpus = 'off'",
        param="train_gpu",
    )
