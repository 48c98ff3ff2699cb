"""Site environment: the variables, modules and container that `[job]` gives to a command.

Called by batch_script.py and local.py, and by `doctor`, which shows the variables.
"""

import fnmatch
import os
import shlex
import sys
from collections.abc import Mapping, Sequence

from cray_agents.config.job_section import FABRICS, RESERVED, JobContainer, JobSettings
from cray_agents.errors import SchedulerError
from cray_agents.ports import Command

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
    return {**site, **command.environment, **settings.environment}


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
