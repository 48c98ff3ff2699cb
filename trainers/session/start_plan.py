"""Start plan: from where a session takes what its next job begins with.

A session has its last job's weights and optimizer in memory, and copies of earlier ones parked in
host memory. Whatever of them is what a job would read from its files is taken instead, to the bit.
resident.py carries a plan out.
"""

from dataclasses import dataclass
from typing import Any, Literal

from cray_agents.trainers.models.lora import AdapterBase
from cray_agents.trainers.session.parked_states import Parked, ParkedStates, StateOrigin

PlanName = Literal["resume", "continue", "unpark", "begin", "read"]


@dataclass(frozen=True)
class JobStart:
    """The start of a job: its build, its weights, and the job that it goes on from.

    `build`: see RankTraining. `parent`: its weights; None: random ones, of no file. `base`: those
    below its adapters. `resumes`: it goes on from a resume point whose content its session holds or
    has parked.
    """

    job: str
    build: tuple[Any, ...]
    parent: AdapterBase | None
    optimizer_from: str | None = None
    base: AdapterBase | None = None
    lora: bool = False
    resumes: bool = False


@dataclass(frozen=True)
class StartPlan:
    """The beginning of a job: `state` is restored, `over` are the weights below its adapters.

    `trained_stays`, `frozen_stays`: what the job keeps of the weights in memory: those that were
    trained, or those below adapters.
    """

    name: PlanName
    state: Parked | None = None
    over: AdapterBase | None = None
    trained_stays: bool = False
    frozen_stays: bool = False

    @property
    def keeps_optimizer(self) -> bool:
        """True if the job goes on with an optimizer of this session."""
        return self.name in ("resume", "continue", "unpark")

    @property
    def stays(self) -> bool:
        """True if the weights in memory need not come from elsewhere."""
        return self.trained_stays or self.frozen_stays


def plan_start(here: StateOrigin | None, start: JobStart, parked: ParkedStates) -> StartPlan:
    """Return the plan of the first row that holds.

    `here`: the origin of the state in memory, if the job could be trained with the same build.

    plan      when                                                    optimizer  trained weights
    resume    it resumes, and its own state is in memory              memory     memory
    unpark    it resumes, and its own state is parked                 parked     parked
    continue  the state in memory is what it goes on with             memory     memory
    unpark    a parked state is what it goes on with                  parked     parked
    begin     its adapters begin over the frozen weights in memory    new        new
    begin     its parent was published of the weights in memory       new        memory
    begin     its parent was published of parked weights; no LoRA     new        parked
    read      else                                                    new        files, or new

    A state is what a job goes on with if the job of `optimizer_from` left it, ended and published
    as this one's parent. Frozen weights below adapters come from memory, are parked, or are read.
    """
    if start.resumes and here is not None and here.job == start.job:
        return StartPlan("resume", trained_stays=True, frozen_stays=True)
    own = parked.of_job(start.build, start.job) if start.resumes else None
    if own is not None:
        return _restore("unpark", own, here, start)
    parent = None if start.parent is None else start.parent.sha256
    published = here is not None and parent is not None and here.weights == parent
    if here is not None and published and _is_continued(here, start):
        return StartPlan("continue", trained_stays=True, frozen_stays=True)
    if (before := _left_parked(here, start, parked)) is not None:
        return _restore("unpark", before, here, start)
    if start.base is not None and here is not None and here.base == start.base:
        return StartPlan("begin", over=start.base, frozen_stays=True)
    if published:
        return StartPlan("begin", over=start.parent, trained_stays=True)
    weights = parked.of_weights(start.build, parent) if parent and not start.lora else None
    if weights is not None:
        return StartPlan("begin", weights)
    return StartPlan("read", over=start.base)


def _restore(name: PlanName, state: Parked, here: StateOrigin | None, start: JobStart) -> StartPlan:
    """Return the plan to restore a state, over the frozen weights in memory if these are its."""
    origin = state.origin
    over = start.base if origin is None or origin.base is None else origin.base
    over = over if start.lora else None
    below = over is not None and here is not None and here.base == over
    return StartPlan(name, state, over, frozen_stays=below)


def _is_continued(origin: StateOrigin, start: JobStart) -> bool:
    """Return True if a state is that of a job that ended, and that this one goes on with."""
    known = origin.base is not None or not start.lora
    return bool(origin.job) and not origin.seal and origin.job == start.optimizer_from and known


def _left_parked(here: StateOrigin | None, start: JobStart, parked: ParkedStates) -> Parked | None:
    """Return the parked state that a job goes on with, if the weights below it are at hand."""
    state = parked.of_job(start.build, start.optimizer_from or "")
    origin = None if state is None else state.origin
    if origin is None or origin.seal or start.parent is None:
        return None
    if origin.weights != start.parent.sha256:
        return None
    if (base := origin.base) is None:
        return None if start.lora else state
    at_hand = here is not None and here.base == base
    return state if at_hand or parked.frozen(start.build, base.sha256) is not None else None
