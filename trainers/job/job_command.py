"""Job command: what a scheduler is given to start a job, or the session that a job names.

A spec that no command could run is refused first. With each start goes a notice: how long before
its time limit the job is asked to save and stop. Saves of earlier attempts show how long one takes;
a first attempt's is estimated by the bytes that it writes. `code_version` is a hash of the code
that a command runs.
"""

import hashlib
import importlib.metadata
import os
from contextlib import suppress
from math import ceil
from pathlib import Path

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.ports import Command
from cray_agents.processes import SAFE_IMPORTS, python
from cray_agents.runtime.registry import foreign_model
from cray_agents.runtime.scheduler.excluded_nodes import excluded_nodes
from cray_agents.trainers.job.failures.rank_monitor import SILENCE_VARIABLE
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.models.megatron_bridge.bridged_kinds import check_bridged
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.planning.arithmetic import adapter_weights, count_weights
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.training_jobs import FP8_NEEDS_CAP, ON_POLICY, JobSpec

MARGIN = 60.0  # seconds: Slurm looks at time limits twice a minute, and processes have to end
SAVED_BYTES = 12  # of a trained weight: itself and both moments, in float32
WRITTEN = 5e8  # bytes a second of a node, before a save was measured
NEWEST = 5  # steps and saves from which the next one's seconds are estimated
TRAINERS = Path(__file__).resolve().parents[1]  # all code of a job


def check_submitted(
    spec: JobSpec, home: Home, scheduler: str, *, turns: bool, one_host: bool = False
) -> None:
    """Raise BadInput or NotFound for a spec that the job could never run with.

    `scheduler`: its name. `turns`: replicas use the same GPUs. `one_host`: all jobs run here.
    """
    hyper = spec.hyperparameters
    if hyper.backend == "megatron-bridge":
        check_bridged(hyper)
    places = {"parent": (spec.parent, hyper.init)}
    for role, place in (("reference", spec.reference), ("teacher", spec.teacher)):
        if place is not None:
            places[role] = (place, "parent")
    for param, (place, init) in places.items():
        try:
            read_parent(home.root / place, init, hyper.backend)
        except (BadInput, NotFound) as error:
            raise type(error)(str(error), param=param) from error
    if spec.slurm_options and scheduler == "local":
        raise BadInput(
            f"{' '.join(spec.slurm_options)}: jobs of this platform are local processes, which"
            " Slurm's options do nothing for: leave slurm_options out",
            param="slurm_options",
        )
    if spec.spare_nodes and (one_host or scheduler == "local"):
        raise BadInput(
            f"spare_nodes={spec.spare_nodes}: jobs of this platform run on its own host, which is"
            " one node: leave spare_nodes out",
            param="spare_nodes",
        )
    corrected = spec.method in ON_POLICY and spec.commands is None
    if corrected and spec.engine_dtype == "fp8" and hyper.policy.importance_cap is None:
        raise BadInput(FP8_NEEDS_CAP, param="importance_cap")
    if turns and spec.commands is not None and spec.session is None:
        raise BadInput(
            "a job by commands keeps its GPU while it waits for the next one, and here replicas"
            " use the GPU by turns: name a session, which leaves the GPU meanwhile",
            param="session",
        )


def build_command(
    home: Home,
    spec: JobSpec,
    resources: Resources,
    hang_seconds: float,
    name: str,
    log: Path,
    module: str,
    argument: Path,
) -> Command:
    """Return the command of a job or session `name` that runs a module of trainers/.

    Its ranks are ended if they do not move for `hang_seconds`.
    """
    world, gpus = spec.layout.world, resources.gpus is not None
    nodes, cores = resources.nodes_for(world), resources.cores_each(world)
    environment = SAFE_IMPORTS | {"OMP_NUM_THREADS": str(cores)}
    environment[SILENCE_VARIABLE] = f"{hang_seconds:g}"
    if not gpus:  # hide the GPUs of a node that has some
        environment["CUDA_VISIBLE_DEVICES"] = ""
        # each length of a packed micro-batch has kernels of its own, and oneDNN keeps 1,024 of them
        environment["ONEDNN_PRIMITIVE_CACHE_CAPACITY"] = "64"
    if allowed := foreign_model.allowed_directories():
        environment[foreign_model.VARIABLE] = os.pathsep.join(map(str, allowed))
    return Command(
        name=name,
        argv=python("-m", f"cray_agents.trainers.{module}", str(argument.resolve())),
        directory=str(log.parent.resolve()),
        log=str(log.resolve()),
        environment=environment,
        nodes=nodes,
        spare_nodes=spec.spare_nodes,
        ranks=world,
        cpus_per_rank=cores,
        gpus=gpus,
        minutes=resources.minutes,
        kind="training" if spec.session is None else "session",
        slurm_options=spec.slurm_options,
        notice_seconds=notice_seconds(spec, home, nodes),
        exclude=nodes_left_out(home),
    )


def nodes_left_out(home: Home) -> list[str]:
    """Return the nodes that failed lately, the newest first."""
    return [node.node for node in excluded_nodes(home.excluded_nodes)]


def notice_seconds(spec: JobSpec, home: Home, nodes: int) -> int:
    """Return the seconds between the early signal and the time limit of a job's next start.

    In that time the step under way ends, a save that is being written ends, and a last one is made.
    """
    events = JobJournal(home, spec.id).events()
    steps = _newest_seconds(events, "step")
    saves = _newest_seconds(events, "saved") or [first_save_seconds(spec, home, nodes)]
    return ceil(MARGIN + max(steps, default=0.0) + 2 * max(saves))


def first_save_seconds(spec: JobSpec, home: Home, nodes: int) -> float:
    """Estimate the seconds of a save, by the bytes of a resume point.

    0 if the parent cannot be read: the job's own process says so.
    """
    hyper = spec.hyperparameters
    try:
        model = read_architecture(home.root / spec.parent, hyper.backend)
    except (BadInput, NotFound):
        return 0.0
    lora = hyper.lora
    weights = count_weights(model).total if lora is None else adapter_weights(model, lora)
    return SAVED_BYTES * weights / (WRITTEN * nodes)


def _newest_seconds(events: list[dict[str, object]], kind: str) -> list[float]:
    """Return the seconds of the newest events of a kind."""
    seconds = [event["seconds"] for event in events if event["event"] == kind]
    return [float(value) for value in seconds[-NEWEST:] if isinstance(value, int | float)]


def code_version(folder: Path = TRAINERS) -> str:
    """Return a hash of a folder's code, with the versions of its libraries: `JobSpec.code`.

    Along with data and hyperparameters it decides a job's result.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    for package in ("megatron-core", "torch"):
        digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    with suppress(importlib.metadata.PackageNotFoundError):
        digest.update(f"bridge {importlib.metadata.version('megatron-bridge')}".encode())
    return digest.hexdigest()[:16]
