"""Slurm's programs on this machine: which are there, which are missing, how they are called.

Called by `choose.py`, by the scheduler's modules, by `doctor` and by set-up. Read next: choose.py.
"""

import os
import shutil
from collections.abc import Mapping

#: What a private cluster takes, daemons and clients.
PROGRAMS = ("munged", "slurmctld", "slurmd", "sbatch", "squeue", "scontrol", "scancel", "sinfo")

#: The line that installs them on Debian and Ubuntu (as root; 14 MB).
INSTALL_LINE = "apt-get install -y --no-install-recommends munge slurmctld slurmd slurm-client"

#: All that a command inherits of the platform's environment; the rest it is given by name.
INHERITED = ("PATH", "HOME", "USER", "LOGNAME", "LANG", "SHELL", "TMPDIR", "SLURM_CONF")

#: Daemons live in sbin, which is not on every user's PATH.
SBIN = ("/usr/local/sbin", "/usr/sbin", "/sbin")


def search_path() -> str:
    """PATH, and the folders that daemons are in."""
    folders = os.environ.get("PATH", os.defpath).split(os.pathsep)
    return os.pathsep.join([*folders, *(folder for folder in SBIN if folder not in folders)])


def missing_programs() -> list[str]:
    """Slurm's programs that are not installed here; empty if a private cluster can start."""
    path = search_path()
    return [program for program in PROGRAMS if shutil.which(program, path=path) is None]


def clean_environment(extra: Mapping[str, str] | None = None) -> dict[str, str]:
    """A command's environment: a few inherited variables, then those it was given.

    Inside of a job, inherited `SLURM_*` and `SBATCH_*` would silently become options of a new one.
    """
    kept = {key: os.environ[key] for key in INHERITED if key in os.environ}
    return {**kept, "PATH": search_path(), **(extra or {})}
