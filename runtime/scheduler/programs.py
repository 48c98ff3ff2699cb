"""Slurm's programs on this machine: find them and make their environment.

Called by `choose.py`, slurm.py, private_cluster.py, local.py and `doctor`. Read next: choose.py.
"""

import os
import shutil
from collections.abc import Mapping

#: Daemons and clients that a private cluster needs.
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")

#: Command that installs them on Debian and Ubuntu (as root; 14 MB).
INSTALL_LINE = "apt-get install -y --no-install-recommends munge slurmctld slurmd slurm-client"

#: Variables that a command inherits from the platform; all others are given to it by name.
INHERITED = (
    *("PATH", "HOME", "USER", "LOGNAME", "LANG", "SHELL", "TMPDIR", "SLURM_CONF"),
    "CUDA_DEVICE_ORDER",  # a GPU's number is the same for vLLM and for jobs
)

#: Daemons live in sbin, which is not on every user's PATH.
SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def search_path() -> str:
    """Return PATH with the daemons' folders."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join([*folders, *(folder for folder in SBIN if folder not in folders)])


def missing_programs() -> list[str]:
    """Return the programs that are not installed; none if a private cluster can start."""
    path = search_path()
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """Return a command's environment: a few inherited variables, then `extra`.

    Inside a job, inherited `SLURM_*` and `SBATCH_*` would silently become options of a new one.
    """
    inherited = {key: os.environ[key] for key in INHERITED if key in os.environ}
    return {**inherited, "PATH": search_path(), **(extra or {})}
