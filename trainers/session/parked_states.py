"""Parked states: the trainings that a session left, in host memory, until it resumes them.

They are a cache. A state is parked only when a resume point or a checkpoint holds the same, and its
origin names that: so the least recently used may be dropped, and a kill loses nothing. Frozen
weights under adapters are parked apart from them, once for all adapters over the same weights.
Called by resident.py; the bits are those of training/offload.py.
"""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import torch

from cray_agents.trainers.checkpointing.state import adam_steps, allocate_moments
from cray_agents.trainers.models.lora import AdapterBase
from cray_agents.trainers.planning.cluster_resources import free_gib
from cray_agents.trainers.training.offload import bytes_of, storages_of, trained
from cray_agents.trainers.training.parallel_groups import (
    broadcast_from_rank0,
    gather_from_ranks,
    is_rank0,
)
from cray_agents.trainers.training.train_step import RankTraining

LARGEST_SHARE = 0.5  # of the memory that is free


@dataclass(frozen=True)
class StateOrigin:
    """The origin of a rank's state: the weights of `weights`, and the optimizer that `job` left.

    `weights` is the hash of the checkpoint that was published of them, None without one. `base` are
    the weights that adapters are over. A job that did not end was left by `attempt` at the
    resume point whose seal has the hash `seal`. Without either, `job` is "": nothing could go on.
    """

    job: str
    weights: str | None
    attempt: int = 0
    seal: str = ""
    base: AdapterBase | None = None


@dataclass(eq=False)
class Parked:
    """Host copies of a training's storages. `nbytes`: of all ranks together.

    Without `origin` they are frozen weights. `key` names the state; equal on all ranks. `first`:
    see RankTraining.
    """

    key: tuple[Any, ...]
    origin: StateOrigin | None
    copies: list[torch.Tensor]
    adam_steps: int
    nbytes: int
    first: list[torch.Tensor]


class ParkedStates:
    """The parked states of one rank, the least recently used first. Every rank has the same."""

    def __init__(self) -> None:
        self._states: list[Parked] = []

    # ---- parking
    def park(self, training: RankTraining, origin: StateOrigin, limit_gib: float) -> None:
        """Copy what a job trained, if the limit allows it; drops other states for it. Collective.

        `limit_gib` is rank 0's, and the GiB of all ranks together.
        """
        training.finish()  # the last step's weights may not be on every rank yet
        self.drop(origin.job)
        self._add((training.build, origin.job), origin, trained(training), training, limit_gib)

    def park_frozen(self, training: RankTraining, weights: str, limit_gib: float) -> None:
        """Copy the frozen weights, if parked adapters are over them. Collective."""
        key = frozen_key(training.build, weights)
        origins = [state.origin for state in self._states if state.origin is not None]
        over = any(origin.base and origin.base.sha256 == weights for origin in origins)
        if over and self._find(key) is None:
            self._add(key, None, frozen(training), training, limit_gib)

    def _add(
        self,
        key: tuple[Any, ...],
        origin: StateOrigin | None,
        tensors: Iterable[torch.Tensor],
        training: RankTraining,
        limit_gib: float,
    ) -> None:
        storages = list(storages_of(tensors, training).values())
        first = [] if origin is None else training.first
        mine = sum(each.nbytes for each in first) + sum(each.nbytes() for each in storages)
        nbytes = sum(int(each) for each in gather_from_ranks(str(mine).encode()))
        room = broadcast_from_rank0(_room(nbytes, limit_gib) if is_rank0() else None)
        if nbytes > room:
            return
        while nbytes + self.nbytes > room:
            self._states.pop(0)
        pinned = not training.on_cpu
        copies = [
            torch.empty(storage.nbytes(), dtype=torch.uint8, pin_memory=pinned)
            for storage in storages
        ]
        _copy(zip(copies, map(bytes_of, storages), strict=True), training)
        self._states.append(Parked(key, origin, copies, adam_steps(training), nbytes, first))

    @property
    def nbytes(self) -> int:
        """The bytes that all ranks have parked."""
        return sum(state.nbytes for state in self._states)

    def drop(self, job: str) -> None:
        """Forget the state of a job."""
        self._states = [s for s in self._states if s.origin is None or s.origin.job != job]

    def note_use(self, state: Parked) -> None:
        """Make a state the one used last, on every rank, unless it was dropped."""
        if state in self._states:
            self._states.remove(state)
            self._states.append(state)

    # ---- finding
    def of_job(self, build: tuple[Any, ...], job: str) -> Parked | None:
        """Return the state that a job left."""
        return self._find((build, job))

    def of_weights(self, build: tuple[Any, ...], weights: str) -> Parked | None:
        """Return a state of a published job whose weights are those."""
        for state in self._states:
            if (origin := state.origin) is None or origin.seal or origin.weights != weights:
                continue
            if state.key == (build, origin.job):
                return state
        return None

    def frozen(self, build: tuple[Any, ...], weights: str | None) -> Parked | None:
        """Return frozen weights."""
        return None if weights is None else self._find(frozen_key(build, weights))

    def _find(self, key: tuple[Any, ...]) -> Parked | None:
        return next((state for state in self._states if state.key == key), None)


def restore_parked(training: RankTraining, state: Parked) -> None:
    """Put a parked state into a training of the same build."""
    tensors = frozen(training)
    if state.origin is not None:
        allocate_moments(training, state.adam_steps)
        tensors = trained(training)
        training.first, training.base = state.first, state.origin.base
    storages = map(bytes_of, storages_of(tensors, training).values())
    _copy(zip(storages, state.copies, strict=True), training)


def frozen(training: RankTraining) -> Iterable[torch.Tensor]:
    """Yield the weights that adapters are over, and all others that no step changes."""
    for chunk in training.chunks:
        yield from (each for each in chunk.parameters() if not each.requires_grad)


def frozen_key(build: tuple[Any, ...], weights: str) -> tuple[Any, ...]:
    """Return the key of frozen weights: the same for all adapters of one model and dtype."""
    model, layout, _, dtype, *_ = build
    return ("frozen", model, layout, dtype, weights)


def _copy(pairs: Iterable[tuple[torch.Tensor, torch.Tensor]], training: RankTraining) -> None:
    with torch.no_grad():
        for target, source in pairs:
            target.copy_(source, non_blocking=True)
    if not training.on_cpu:
        torch.cuda.synchronize()


def _room(nbytes: int, limit_gib: float) -> int:
    """Return the bytes that parked states may take; 0 if memory is too short for `nbytes` more."""
    return int(limit_gib * 2**30) if nbytes <= LARGEST_SHARE * free_gib() * 2**30 else 0
