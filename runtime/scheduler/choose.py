"""Scheduler choice: a site's Slurm, a private cluster, or local processes.

The platform calls `configured_scheduler` at its start and closes the scheduler at its end. Read
next: slurm.py, private_cluster.py, local.py.
"""

import subprocess
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Literal

from cray_agents.config import Config
from cray_agents.config.job_section import JobSettings
from cray_agents.errors import BadInput, SetupError
from cray_agents.runtime.scheduler.gpu_placement import GpuPlacement, host_gpus, place_on_host
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.site_environment import (
    clean_environment,
    on_this_host,
    with_shared_root,
)
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.runtime.store.index import identity_of

SchedulerKind = Literal["auto", "slurm", "local"]


def configured_scheduler(config: Config, replicas: int = 0) -> Slurm | LocalProcesses:
    """Open the scheduler that a configuration names.

    On this host its jobs get the GPUs that `replicas` vLLM servers leave. Raises SetupError, and
    BadInput if they leave too few.
    """
    home = config.root
    options, root = config.slurm_options, identity_of(home)

    def place() -> GpuPlacement:
        return place_on_host(config, replicas=replicas, here=True)

    return open_scheduler(
        config.scheduler,
        home.slurm,
        options=options,
        settings=with_shared_root(config.job, str(home.root)),
        root=root,
        gpus=lambda: place().training,
        turns=lambda: place().turns,
    )


def open_scheduler(
    kind: SchedulerKind,
    directory: Path,
    *,
    options: Sequence[str] = (),
    settings: JobSettings | None = None,
    root: str = "",
    gpus: Callable[[], Sequence[str]] = host_gpus,
    turns: Callable[[], bool] = lambda: False,
) -> Slurm | LocalProcesses:
    """Open a scheduler. Its `reason` explains the choice.

    Args:
        kind: `auto` takes a site's Slurm if one answers, else a private cluster if Slurm is
            installed and comes up, else local processes; `slurm` leaves out the last.
        directory: `Home.slurm`.
        options: for a site's sbatch, such as `("--partition=gpu",)`.
        settings: `[job]`. Its options for Slurm are a site's, too.
        root: the shared root's id, which keeps its jobs apart from another root's at a site.
        gpus: returns the ids of this host's GPUs that jobs may use. Not asked if jobs run at a
            site.
        turns: tells whether jobs use these GPUs by turns with replicas. They then run as local
            processes, whose start waits for its turn. Not asked either if jobs run at a site.

    Raises SetupError if `kind` is `slurm` and there is none, BadInput if that must take turns, or
    if processes would run in a container that only Slurm can start.
    """
    settings = settings or JobSettings()
    here = on_this_host(settings)
    some = options or settings.slurm_options or settings.gpu_type
    unused = "; slurm_options are a site's and not used" if some else ""

    def processes(reason: str, gpus: Sequence[str], *, turns: bool = False) -> LocalProcesses:
        if settings.container is not None and settings.container.runtime == "pyxis":
            raise BadInput(
                "job.container.runtime = 'pyxis' is a part of Slurm, and here jobs are local"
                " processes: use 'apptainer', or leave job.container out",
                param="job",
            )
        reason = f"local processes{reason}{unused}"
        return LocalProcesses(directory, reason=reason, gpus=gpus, turns=turns, settings=here)

    if kind == "local":
        return processes(", as asked for", gpus(), turns=turns())
    if site := site_cluster():
        reason = f"the Slurm cluster {site} answers"
        return Slurm(directory, options=options, settings=settings, root=root, reason=reason)
    if turns():
        if kind == "slurm":
            raise BadInput(
                "scheduler = 'slurm': a private Slurm starts jobs as soon as a GPU is free, and on"
                " this host they take turns with replicas: leave scheduler out, or share_gpus ="
                " 'split'",
                param="scheduler",
            )
        return processes(", which take turns with replicas on the GPUs", gpus(), turns=True)
    cluster = PrivateCluster(directory, gpus=gpus())
    try:
        cluster.start()
    except SetupError as error:
        if kind == "slurm":
            raise
        return processes(f": {error}", cluster.gpus)
    reason = f"a private Slurm cluster of this host{unused}"
    return Slurm(directory, cluster, settings=here, reason=reason)


def site_cluster() -> str | None:
    """Return the name of this machine's cluster, or None if no controller answers."""
    if not run_client("sinfo", "--noheader", "--format=%P"):
        return None
    configuration = run_client("scontrol", "show", "config") or ""
    names = [line for line in configuration.splitlines() if line.startswith("ClusterName")]
    return names[0].partition("=")[2].strip() if names else None


def run_client(*argv: str) -> str | None:
    """Run a Slurm client; return its output, or None if it is missing, fails or times out."""
    try:
        done = subprocess.run(
            argv,
            env=clean_environment(),
            capture_output=True,
            text=True,
            timeout=20,
            check=False,
        )
    except (FileNotFoundError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None
