"""The section `[job]`: how jobs start at a site, and the options for sbatch that may be given.

runtime/scheduler/site_environment.py turns it into variables and lines of bash, batch_script.py
beside it into a batch script.
"""

import re
from collections.abc import Sequence
from typing import Annotated, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, field_validator

#: What a command of the scheduler is for.
JobKind = Literal["training", "session", "replica", "script"]
Fabric = Literal["plain", "efa", "ucx", "none"]

#: Variables for commands with GPUs, by the site's network. NCCL's own choices are good elsewhere:
#: a wrong hint is worse than none. efa: libfabric's provider, and forks, as the ranks are forks.
#: ucx: the plugin of HPC-X.
FABRICS: dict[Fabric, dict[str, str]] = {
    "none": {},
    "plain": {"NCCL_DEBUG": "WARN"},
    "efa": {"NCCL_DEBUG": "WARN", "FI_PROVIDER": "efa", "FI_EFA_FORK_SAFE": "1"},
    "ucx": {"NCCL_DEBUG": "WARN", "NCCL_PLUGIN_P2P": "ucx"},
}

#: Variables of the platform's process that commands get, too: where libraries, modules and caches
#: are, and how the network is used. No secrets, and nothing that decides which GPUs are seen.
INHERITED = (
    *("LD_LIBRARY_PATH", "PYTHONPATH", "CUDA_HOME", "CUDA_PATH", "HF_HOME", "HF_HUB_OFFLINE"),
    *("XDG_CACHE_HOME", "TRITON_CACHE_DIR", "TORCH_HOME"),
    *("MODULEPATH", "MODULESHOME", "MODULES_*", "LMOD_*"),
    *("NCCL_*", "TORCH_NCCL_*", "OFI_NCCL_*", "FI_*", "UCX_*"),
    *("GLOO_SOCKET_IFNAME", "TP_SOCKET_IFNAME"),
)

#: Beginnings of variables that the platform and Slurm set themselves.
RESERVED = ("SLURM_", "SBATCH_", "CRAY_AGENTS_", "CUDA_VISIBLE_DEVICES")

#: The sbatch options that the platform sets itself, to define a job and to find and read it again.
SLURM_OWN = (
    "array",
    "chdir",
    "clusters",
    "cpus-per-task",
    "error",
    "export",
    "gpus-per-node",
    "job-name",
    "no-kill",
    "no-requeue",
    "nodes",
    "ntasks",
    "ntasks-per-node",
    "open-mode",
    "output",
    "parsable",
    "requeue",
    "signal",
    "test-only",
    "time",
    "wait",
    "wrap",
)
#: The sbatch options that a single job may have. Whoever may train may name them, so none of them
#: changes what runs, or where its output goes.
SLURM_PER_JOB = (
    *("account", "begin", "constraint", "contiguous", "deadline", "exclude", "exclusive"),
    *("licenses", "mem", "mem-per-cpu", "mem-per-gpu", "nice", "nodelist", "partition"),
    *("prefer", "priority", "qos", "reservation", "switches", "tmp"),
)

VARIABLE = re.compile(r"[A-Za-z_][A-Za-z0-9_]*")


def matching(pattern: str, why: str) -> AfterValidator:
    """Return the check of a text by a pattern; `why` says what is wrong, and what to write."""

    def check(text: str) -> str:
        if not re.fullmatch(pattern, text, re.DOTALL):
            raise ValueError(f"{text!r} {why}")
        return text

    return AfterValidator(check)


def _check_variable(pattern: str) -> str:
    name = pattern.removesuffix("*")
    if not VARIABLE.fullmatch(name):
        raise ValueError(f"{pattern!r} cannot name environment variables")
    if name.startswith(RESERVED):
        raise ValueError(f"{pattern!r} cannot be given: Slurm and the platform set it themselves")
    return pattern


VariablePattern = Annotated[str, AfterValidator(_check_variable)]
Mount = Annotated[
    str,
    matching("/[^:,]*(:/[^:,]*(:[A-Za-z+]+)?)?", "is no mount: write it as /a, /a:/b or /a:/b:ro"),
]
Option = Annotated[str, matching("--.*", "is no option: write it as --name or --name=value")]
Module = Annotated[
    str, matching("[A-Za-z0-9][A-Za-z0-9_.+:/-]*", "is no module's name: write it as cuda/12.9")
]
Folder = Annotated[str, matching("/.*", "is no whole path: write it as /local/nvme")]
PrologLine = Annotated[
    str, matching(r"(?!\s*#SBATCH).*", "has no effect in a prolog: use slurm_options")
]


class JobContainer(BaseModel):
    """The container that the tasks of a command run in."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    runtime: Literal["pyxis", "apptainer"] = Field(
        "pyxis", description="pyxis: srun --container-image; apptainer: apptainer exec"
    )
    image: str = Field(min_length=1, description="as the runtime names it: a path or an address")
    mounts: list[Mount] = Field(
        default_factory=list,
        description="folders beside the shared root: /a, /a:/b or /a:/b:ro",
    )
    python: str | None = Field(
        None, description="the image's Python with this package; default: the platform's own path"
    )
    options: list[Option] = Field(
        default_factory=list, description="more options of srun (pyxis) or of apptainer exec"
    )


class JobSettings(BaseModel):
    """The section `[job]`: how jobs start as a site needs it."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    environment: dict[str, str] = Field(
        default_factory=dict, description="variables of each job; these win over all others"
    )
    inherit: list[VariablePattern] = Field(
        default_factory=lambda: list(INHERITED),
        description="variables of the platform that jobs get, by name or as NCCL_*",
    )
    fabric: Fabric = Field(
        "plain", description="the network's NCCL defaults for jobs with GPUs: plain, efa, ucx, none"
    )
    modules: list[Module] = Field(default_factory=list, description="for `module load`")
    prolog: list[PrologLine] = Field(
        default_factory=list, description="lines of bash on the first node, before the job's tasks"
    )
    tasks: Literal["node", "rank"] = Field(
        "node", description="what srun starts: one launcher a node, or one a rank"
    )
    cpu_bind: str = Field(
        "cores", pattern=r"^[a-z_]+(,[a-z_]+)*$", description="srun --cpu-bind, such as none"
    )
    gpu_type: str | None = Field(
        None, pattern=r"^[A-Za-z0-9_.-]+$", description="Slurm's type of GPU, as h200 in gpu:h200:8"
    )
    container: JobContainer | None = Field(None, description="what the tasks run in")
    scratch: Folder | None = Field(
        None,
        description="a folder on each node's own disk, where resume points are written first, such"
        " as /local/nvme",
    )
    slurm_options: dict[JobKind, list[str]] = Field(
        default_factory=dict,
        description="sbatch options by kind of job: training, session, replica, script",
    )

    @field_validator("environment")
    @classmethod
    def _check_environment(cls, environment: dict[str, str]) -> dict[str, str]:
        for name, value in environment.items():
            if not VARIABLE.fullmatch(_check_variable(name)):
                raise ValueError(f"{name!r} cannot name environment variables")
            if "\0" in value:
                raise ValueError(f"the value of {name} has a zero byte")
        return environment

    @field_validator("slurm_options")
    @classmethod
    def _check_slurm_options(cls, by_kind: dict[JobKind, list[str]]) -> dict[JobKind, list[str]]:
        for options in by_kind.values():
            check_slurm_options(options)
        return by_kind


def check_slurm_options(options: Sequence[str]) -> list[str]:
    """Return options for sbatch. Raises ValueError for no option, and for one of `SLURM_OWN`."""
    for option in options:
        name = option.removeprefix("--").partition("=")[0]
        if not option.startswith("--") or not name or "\n" in option:
            raise ValueError(f"{option!r} is no option: write it as --partition=gpu")
        # sbatch accepts an option abbreviated to its first letters
        if own := next((own for own in SLURM_OWN if own.startswith(name)), None):
            raise ValueError(
                f"{option!r} cannot be given, --{own} is the platform's own: what a job takes "
                "is set by train_nodes, train_ranks, train_gpus, train_cpus_per_rank and "
                "train_minutes"
            )
    return list(options)


def check_options_of_job(options: Sequence[str]) -> list[str]:
    """Return a single job's options for sbatch. Raises ValueError if not of `SLURM_PER_JOB`."""
    for option in check_slurm_options(options):
        if option.removeprefix("--").partition("=")[0] not in SLURM_PER_JOB:
            raise ValueError(
                f"{option!r} cannot be given to a single job; these can: "
                + ", ".join(f"--{name}" for name in SLURM_PER_JOB)
            )
    return list(options)
