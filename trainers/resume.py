"""Resume points: Megatron's distributed checkpoints of model and optimizer, found and proven.

    megatron/step-00000050/    published by rename when complete; SEALED.json has every file's hash
    megatron/.step-...         being written, or left half-written by a killed job: never loaded

A resume point loads under any layout; under its own, training goes on bit for bit. One that is not
what its seal says is set aside by name, and the one before it used. Read next: train.py.
"""

import json
import shutil
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import torch

from cray_agents.errors import Corrupt, NotFound
from cray_agents.records import canonical
from cray_agents.runtime import durable
from cray_agents.trainers.publish import publish_folder
from cray_agents.trainers.train import Training

KEEP = 2
SEAL = "SEALED.json"
_CONTENT = {
    "distrib_optim_sharding_type": "fully_reshardable",
    "chained_optim_avoid_prefix": True,
    "singleton_local_shards": True,
}


def points(folder: Path) -> list[Path]:
    """The published resume points in a job's megatron/ folder, newest first."""
    return sorted(folder.glob("step-*"), reverse=True) if folder.exists() else []


def step_of(point: Path) -> int:
    """The number of steps that were done at a resume point."""
    return int(point.name.removeprefix("step-"))


def verify(point: Path) -> None:
    """Raises Corrupt, naming the file, when a resume point is not what its seal says."""
    try:
        seal: dict[str, str] = json.loads((point / SEAL).read_bytes())
    except (FileNotFoundError, ValueError):
        raise Corrupt(f"resume point {point}: no readable {SEAL}") from None
    for name, expected in seal.items():
        path = point / name
        if not path.exists():
            raise Corrupt(f"resume point {point}: {name} is missing")
        if durable.sha256_file(path) != expected:
            raise Corrupt(f"resume point {point}: {name} is not what was written (bad checksum)")


def choose(folder: Path) -> tuple[Path | None, list[str]]:
    """(the newest sound resume point, what is wrong with newer ones). Sets corrupt ones aside.

    Called by one process, before the ranks start.
    """
    problems: list[str] = []
    for point in points(folder):
        try:
            verify(point)
        except Corrupt as problem:
            problems.append(str(problem))
            aside = folder / f".corrupt-{point.name}"
            shutil.rmtree(aside, ignore_errors=True)
            point.rename(aside)
        else:
            return point, problems
    return None, problems


def last_of(folder: Path, job_id: str) -> Path:
    """The newest resume point of another job, for its optimizer. Raises NotFound or Corrupt."""
    found = points(folder)
    if not found:
        raise NotFound(
            f"optimizer_from={job_id!r}: that job has no resume point in {folder}; start without"
            " optimizer_from, or name a finished job of this home",
            param="optimizer_from",
        )
    verify(found[0])
    return found[0]


def sweep(folder: Path) -> None:
    """Remove what a killed job left half-written. Called by one process, before the ranks start."""
    for draft in folder.glob(".step-*") if folder.exists() else []:
        shutil.rmtree(draft, ignore_errors=True)


def save(training: Training, folder: Path, attempt: int, common: dict[str, Any]) -> None:
    """Write a resume point of the present step and publish it. Collective.

    `common` is plain data that comes back from `load`.
    """
    from megatron.core import dist_checkpointing

    name = f"step-{training.done:08d}"
    if (folder / name).exists():
        return
    draft = folder / f".{name}.{attempt}"
    rank = torch.distributed.get_rank()
    if rank == 0:
        draft.mkdir(parents=True)
    torch.distributed.barrier()
    state = {**_sharded(training, loading=False), "common": common, "step": training.done}
    dist_checkpointing.save(state, str(draft), _save_strategy(), content_metadata=_CONTENT)
    mine = {p.name: durable.sha256_file(p) for p in draft.glob(f"__{rank}_*")}
    gathered: list[Any] = [None] * torch.distributed.get_world_size()
    torch.distributed.all_gather_object(gathered, mine)
    if rank == 0:
        seal = {n: h for part in gathered for n, h in part.items()}
        seal |= {p.name: durable.sha256_file(p) for p in draft.iterdir() if p.name not in seal}
        durable.replace_file(draft / SEAL, canonical(seal))
        publish_folder(draft, folder / name)
        _forget(points(folder)[KEEP:])
        durable.sync(folder)
    torch.distributed.barrier()


def _forget(old: Iterable[Path]) -> None:
    for point in old:
        shutil.rmtree(point, ignore_errors=True)


def load(training: Training, point: Path) -> dict[str, Any]:
    """Restore weights, moments and step count; returns what `save` was given. Collective."""
    from megatron.core import dist_checkpointing
    from megatron.core.dist_checkpointing.serialization import get_default_load_sharded_strategy

    _allocate_moments(training.optimizer)
    state = {**_sharded(training, loading=True), "common": None, "step": None}
    state = dist_checkpointing.load(
        state, str(point), get_default_load_sharded_strategy(str(point)), strict="raise_all"
    )
    training.inner.load_state_dict(state["model"])
    training.optimizer.load_state_dict(state["optimizer"])
    training.done = state["step"]
    common: dict[str, Any] = state["common"]
    return common


def _sharded(training: Training, loading: bool) -> dict[str, Any]:
    from megatron.core import parallel_state as ps

    metadata = {**_CONTENT, "dp_cp_group": ps.get_data_parallel_group(with_context_parallel=True)}
    model = training.inner.sharded_state_dict(metadata=metadata)
    return {
        "optimizer": training.optimizer.sharded_state_dict(
            model, is_loading=loading, metadata=metadata
        ),
        "model": model,
    }


def _save_strategy() -> Any:
    from megatron.core import parallel_state as ps
    from megatron.core.dist_checkpointing.serialization import get_default_save_sharded_strategy
    from megatron.core.dist_checkpointing.strategies.fully_parallel import (
        FullyParallelSaveStrategyWrapper,
    )

    strategy = get_default_save_sharded_strategy()
    strategy.thread_count = 1  # a forked writer per rank
    group = ps.get_data_parallel_group(with_context_parallel=True)
    return FullyParallelSaveStrategyWrapper(strategy, group)


def _allocate_moments(optimizer: Any) -> None:
    """Give torch's AdamW, which fills its state lazily, the state that loading writes into."""
    for part in getattr(optimizer, "chained_optimizers", [optimizer]):
        adam = part.optimizer
        if not isinstance(adam, torch.optim.Adam):
            continue
        for parameter in (p for group in adam.param_groups for p in group["params"]):
            if not adam.state[parameter]:
                adam.state[parameter] = {
                    "step": torch.tensor(0.0),
                    "exp_avg": torch.zeros_like(parameter),
                    "exp_avg_sq": torch.zeros_like(parameter),
                }
