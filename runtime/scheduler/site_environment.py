"""Site environment: Slurm's programs on this machine, and the environment of a command.

It has a few inherited variables, and the variables, modules and container that `[job]` gives.
Called by all schedulers, and by `doctor`, which shows the variables.
"""

import fnmatch
import os
import shlex
import shutil
import sys
from collections.abc import Mapping, Sequence

from cray_agents.config.job_section import FABRICS, RESERVED, JobContainer, JobSettings
from cray_agents.errors import SchedulerError
from cray_agents.paths import SCRATCH
from cray_agents.ports import Command

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


#: Variables that name places of the host, which an image has elsewhere.
OF_THE_HOST = ("LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME", "CUDA_PATH", "MODULE*", "LMOD_*")

#: `module` is a shell function, which a batch script does not inherit.
MODULE_FUNCTION = """\
if ! type module > /dev/null 2>&1; then
    source "${MODULESHOME:-/usr/share/modules}/init/bash"
fi
"""


def site_variables(
    settings: JobSettings, *, gpus: bool, platform: Mapping[str, str] = os.environ
) -> dict[str, str]:
    """Return the variables that a site's settings give to every command.

    Those of the network come first (for commands with GPUs), then those inherited from the
    platform's process, last the configured ones: later ones win.
    """
    inherited = {
        name: value
        for name, value in platform.items()
        if matches(name, settings.inherit) and not name.startswith(RESERVED)
    }
    if settings.container is not None:
        inherited = {k: v for k, v in inherited.items() if not matches(k, OF_THE_HOST)}
    network = FABRICS[settings.fabric] if gpus else {}
    return {**network, **inherited, **settings.environment}


def command_variables(settings: JobSettings, command: Command) -> dict[str, str]:
    """Return all variables of a command. Its own win over the site's, but not over configured ones.

    Raises SchedulerError for a name that no variable can have.
    """
    for name in command.environment:
        if not name.isidentifier():
            raise SchedulerError(f"{command.name}: {name!r} cannot name an environment variable")
    site = site_variables(settings, gpus=command.gpus)
    trains = command.kind in ("training", "session")
    scratch = {SCRATCH: settings.scratch} if trains and settings.scratch else {}
    return {**site, **command.environment, **scratch, **settings.environment}


def matches(name: str, patterns: Sequence[str]) -> bool:
    """Tell whether a variable is named by one of the patterns, such as `NCCL_*`."""
    return any(fnmatch.fnmatchcase(name, pattern) for pattern in patterns)


def preparation(settings: JobSettings) -> str:
    """Return the lines of bash that load modules and do the prolog. They may call `end CODE`."""
    text = ""
    if settings.modules:
        failed = '{ echo "[job] modules: module load failed" >&2; end 1; }'
        text = f"{MODULE_FUNCTION}module load {shlex.join(settings.modules)} || {failed}\n"
    return text + "".join(f"{line}\n" for line in settings.prolog)


def task_argv(settings: JobSettings, command: Command) -> list[str]:
    """Return a task's argv: the command's own, in apptainer if that is the container's runtime.

    A person's script runs outside of the container.
    """
    container = settings.container
    if container is None or command.kind == "script":
        return command.argv
    argv = list(command.argv)
    if container.python is not None and argv[0] == sys.executable:
        argv[0] = container.python
    if container.runtime == "pyxis":
        return argv
    gpus = ["--nv"] if command.gpus else []
    mounts = [f"--bind={mount}" for mount in container.mounts]
    place = f"--pwd={command.directory}"
    return ["apptainer", "exec", *gpus, *mounts, place, *container.options, container.image, *argv]


def srun_container_options(container: JobContainer | None, directory: str) -> list[str]:
    """Return srun's options for a container of pyxis; none for another one."""
    if container is None or container.runtime != "pyxis":
        return []
    mounts = [mount if ":" in mount else f"{mount}:{mount}" for mount in container.mounts]
    return [
        f"--container-image={container.image}",
        *([f"--container-mounts={','.join(mounts)}"] if mounts else []),
        f"--container-workdir={directory}",
        *container.options,
    ]


def with_shared_root(settings: JobSettings, root: str) -> JobSettings:
    """Return the settings with the shared root among the container's mounts."""
    if settings.container is None:
        return settings
    mounts = [f"{root}:{root}", *settings.container.mounts]
    container = settings.container.model_copy(update={"mounts": mounts})
    return settings.model_copy(update={"container": container})


def on_this_host(settings: JobSettings) -> JobSettings:
    """Return the settings for a Slurm or processes of this host: without a site's Slurm options."""
    return settings.model_copy(update={"gpu_type": None, "slurm_options": {}})
