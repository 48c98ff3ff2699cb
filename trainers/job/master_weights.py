"""Master weights: the float32 numbers that an optimizer changes, carried on from job to job.

A step of bfloat16 training changes a weight by less than its files can store. So a job that goes on
with another's optimizer takes its master weights too, wherever they round to the parent's files.
Of adapters the master is theirs: they go on over the weights that they were trained over, where
the two make the parent's files. What a job moved, and what of it its files show, is measured here.
Called by rank.py and session/. Read next: checkpointing/resume.py, which reads resume points.
"""

import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.adapters import CONFIG
from cray_agents.trainers.checkpointing import resume
from cray_agents.trainers.checkpointing.state import (
    allocate_moments,
    local_ranges,
    optimizers,
    owned_ranges,
)
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.weights_check import FailedEverywhere, check_weights
from cray_agents.trainers.models.backends import fill_chunks, source_of
from cray_agents.trainers.models.lora import AdapterBase, adapters, continued_base, without_adapters
from cray_agents.trainers.training.parallel_groups import broadcast_from_rank0, is_rank0
from cray_agents.trainers.training.train_step import RankTraining

PIECE = 1 << 24  # weights that are compared at a time
OTHER = "its weights do not round to the parent's files: they are of another step, or job"


def carry_on(training: RankTraining, point: Path, home: Home) -> str:
    """Take over the optimizer of another job's resume point, and its master weights if they fit.

    `training` holds the parent's weights. Return why the master weights could not be carried on, or
    "". The moments go on in any case, but not those of adapters, which begin anew. Collective.
    """
    if training.hyper.lora is not None:
        why = _carry_adapters(training, point, home)
        if why:
            allocate_moments(training, 0)
        return why
    types, differ = training.stored_types(), torch.zeros((), device=training.ranks.device)
    masters = resume.load_moments(training, point)
    for owned, master in masters:
        for values, weights in _pieces(master, owned.weights[: len(master)]):
            rounded = _as_stored(values.to(weights.device), weights, types.get(owned.parameter))
            differ += (rounded != weights).any()
    if training.ranks.on_any(bool(differ)):
        return OTHER
    for owned, master in masters:
        owned.tensors[0][: len(master)].copy_(master)
    training.optimizer_to_weights()
    return ""


def _carry_adapters(training: RankTraining, point: Path, home: Home) -> str:
    """Put adapters of a resume point, and the weights that they are over, in place of the parent's.

    Only if merged they are the parent to the bit; else return why not, with the parent in place and
    new adapters over it. Of an adapter version the adapters alone are compared, with its own.
    """
    files = [each.detach().clone() for each in adapter_weights(training)]
    resume.load(training, point)
    training.done, training.saved = 0, None
    if continued_base(training.parent, training.hyper.lora) is not None:
        now = zip(files, adapter_weights(training), strict=True)
        if training.ranks.on_any(any(not torch.equal(*pair) for pair in now)):
            training.start_from_weights()
            return OTHER
        return ""
    known, why = broadcast_from_rank0(_find_base(training.parent, home) if is_rank0() else None)
    if known is None:
        training.start_from_weights()
        return str(why)
    base, why = AdapterBase(**known), ""
    folder, types = home.root / base.path, training.stored_types()
    differ = torch.zeros((), device=training.ranks.device)
    with without_adapters(training.chunks) as around:
        of = around.copy()

    def put(weight: torch.Tensor, values: torch.Tensor) -> None:
        before = weight.clone()
        weight.copy_(values)
        adapter = of.get(weight)
        merged = weight if adapter is None else adapter.merged(adapter.a, adapter.b)
        differ.add_((_as_stored(merged, weight, types.get(weight)) != before).any())

    try:
        with check_weights(folder, base.sha256), torch.no_grad():
            fill_chunks(training.chunks, training.model, source_of(folder, training.model), put)
    except (FailedEverywhere, BadInput, NotFound) as problem:  # the same on every rank
        why = str(problem)
    if training.ranks.on_any(bool(differ)):
        why = why or "the adapters and the weights below them do not make the parent's files"
    if why:
        training.take_weights()
        return why
    training.base = base
    return ""


def _find_base(parent: Path, home: Home) -> tuple[dict[str, str] | None, str]:
    """Return the weights that a parent's adapters are over, or why they are not known."""
    path = parent / checkpoints.ADAPTER / CONFIG
    try:
        named = str(checksums.parse(path.read_bytes(), path)["base_model_name_or_path"])
        manifest = checkpoints.read_manifest(parent)
    except (FileNotFoundError, NotFound):
        return None, f"the parent {parent} was not trained with adapters here"
    sha256 = manifest.base_sha256 or manifest.parent_sha256
    if sha256 is None or not (home.root / named).is_dir():
        return None, f"the weights {named} below the parent's adapters are not there"
    return {"path": named, "sha256": sha256}, ""


def adapter_weights(training: RankTraining) -> list[torch.Tensor]:
    """Return this rank's share of A and B of each adapter, by turns."""
    return [each for _, _, one in adapters(training.chunks) for each in (one.a, one.b)]


def _pieces(*tensors: torch.Tensor) -> Iterator[tuple[torch.Tensor, ...]]:
    """Yield equal parts of flattened tensors: what is computed of a whole could take too much."""
    return zip(*(torch.split(one.reshape(-1), PIECE) for one in tensors), strict=True)


def _as_stored(
    values: torch.Tensor, weights: torch.Tensor, stored: set[torch.dtype] | None
) -> torch.Tensor:
    """Return numbers as they are after the files, in the type that the model computes in."""
    values = values.to(weights.dtype)
    for one in stored or ():
        values = values.to(one).to(weights.dtype)
    return values


# ---- what a job moved
@torch.no_grad()
def note_first(training: RankTraining) -> None:
    """Keep the trained weights as the parent's files have them, in host memory; of adapters a, b.

    Called before the first step, once moments are allocated.
    """
    if training.hyper.lora is not None:
        training.first = [each.to("cpu", copy=True) for each in adapter_weights(training)]
        return
    types = training.stored_types()
    training.first = [
        _as_stored(owned.weights, owned.weights, types.get(owned.parameter)).to("cpu", copy=True)
        for owned in owned_ranges(training, local_ranges(training))
    ]


@torch.no_grad()
def moved(training: RankTraining) -> dict[str, float]:
    """Return what a job changed so far, as its files will show it; a part of the job's record.

    `changed_share`: of the trained weights, those that differ in the files from the parent's.
    `update_ratio`: the norm of the files' change by that of the master weights'; left out if these
    did not move. Of adapters A and B count, and not what they make of the weights. Collective.
    """
    device = training.ranks.device
    sums = torch.zeros(4, dtype=torch.float64, device=device)  # weights, changed, file^2, master^2
    types, first = training.stored_types(), iter(training.first)
    for parameter, *tensors in _now_and_before(training, first):
        for master, weights, before in _pieces(*tensors):
            file = _as_stored(master, weights, types.get(parameter)).float()
            parent = _as_stored(before.to(device), weights, types.get(parameter)).float()
            norms = (file - parent).norm() ** 2, (master - parent).norm() ** 2
            sums[0] += file.numel()
            sums[1:] += torch.stack([each.double() for each in ((file != parent).sum(), *norms)])
    if training.layout.world > 1:
        torch.distributed.all_reduce(sums)
    count, changed, file2, master2 = sums.tolist()
    share = {"changed_share": changed / count if count else 0.0}
    return share | ({"update_ratio": math.sqrt(file2 / master2)} if master2 else {})


def note_moved(training: RankTraining, journal: JobJournal, checkpoint: str) -> dict[str, float]:
    """Record what a job moved, with a checkpoint's name; return it as `moved` does. Collective."""
    record = moved(training)
    if is_rank0():
        journal.event("moved", checkpoint=checkpoint, **record)
    if "update_ratio" in record and not record["changed_share"]:
        warn(
            journal,
            f"{checkpoint} equals its parent: the weights moved by less than its type can"
            " store. What was learnt is only in the resume points, for jobs with optimizer_from; a"
            " higher learning_rate or more steps would show",
        )
    return record


def warn(journal: JobJournal, message: str) -> None:
    """Record what was lost."""
    if is_rank0():
        print(f"warning: {message}", flush=True)
        journal.event("warning", message=message)


def _now_and_before(training: RankTraining, first: Any) -> Iterator[Any]:
    """Yield (parameter, master weights, weights computed with, those at first): each once."""
    if training.hyper.lora is not None:
        for now, before in zip(adapter_weights(training), first, strict=True):
            yield now, now, now, before
        return
    mine = all(one.distributed_optimizer_instance_id == 0 for one in optimizers(training))
    for owned in owned_ranges(training, local_ranges(training)):
        before = next(first)
        if mine and not owned.range_.copy:
            yield owned.parameter, owned.tensors[0], owned.weights, before
