"""The plans by which a session's next job begins: each row of the table, and all combinations."""

from itertools import product

import pytest

from cray_agents.trainers.models.lora import AdapterBase
from cray_agents.trainers.session.parked_states import Parked, ParkedStates, StateOrigin, frozen_key
from cray_agents.trainers.session.start_plan import JobStart, PlanName, StartPlan, plan_start

BUILD = ("model", "layout", "none", "float32")
PARENT, BASE = AdapterBase("models/p", "p" * 64), AdapterBase("models/b", "b" * 64)
FULL = JobStart("job", BUILD, PARENT, optimizer_from="before")
LORA = JobStart("job", BUILD, PARENT, optimizer_from="before", base=PARENT, lora=True)


def parked(*origins: StateOrigin, frozen: AdapterBase | None = None) -> ParkedStates:
    """Parked states without tensors."""
    states = ParkedStates()
    for origin in origins:
        states._states.append(Parked((BUILD, origin.job), origin, [], 0, 0, []))
    if frozen is not None:
        states._states.append(Parked(frozen_key(BUILD, frozen.sha256), None, [], 0, 0, []))
    return states


def resuming(start: JobStart) -> JobStart:
    return JobStart(**{**vars(start), "resumes": True})


OWN = StateOrigin("job", None, 1, "seal", BASE)
BEFORE = StateOrigin("before", PARENT.sha256)
BEFORE_LORA = StateOrigin("before", PARENT.sha256, base=BASE)
OTHER = StateOrigin("other", PARENT.sha256)
LEFT = StateOrigin("before", PARENT.sha256, 1, "seal")  # not ended: nothing may go on with it


@pytest.mark.parametrize(
    ("here", "start", "states", "plan"),
    [
        (OWN, resuming(LORA), parked(), "resume memory memory"),
        (OTHER, resuming(FULL), parked(OWN), "unpark parked -"),
        (StateOrigin("x", None, base=BASE), resuming(LORA), parked(OWN), "unpark parked memory"),
        (None, resuming(LORA), parked(OWN, frozen=BASE), "unpark parked b"),
        (BEFORE, FULL, parked(), "continue memory memory"),
        (BEFORE_LORA, LORA, parked(), "continue memory memory"),
        (OTHER, FULL, parked(BEFORE), "unpark parked -"),
        (OTHER, LORA, parked(BEFORE_LORA, frozen=BASE), "unpark parked b"),
        (StateOrigin("x", None, base=BASE), LORA, parked(BEFORE_LORA), "unpark parked memory"),
        (StateOrigin("x", None, base=PARENT), LORA, parked(), "begin - memory"),
        (OTHER, FULL, parked(), "begin memory -"),
        (LEFT, FULL, parked(), "begin memory -"),
        (BEFORE, LORA, parked(), "begin memory p"),  # its base is not known
        (None, FULL, parked(OTHER), "begin parked -"),
        (None, FULL, parked(LEFT), "read - -"),
        (None, LORA, parked(BEFORE_LORA), "read - p"),  # the frozen weights are not at hand
        (None, LORA, parked(OTHER), "read - p"),
        (BEFORE, JobStart("job", BUILD, None, "before"), parked(BEFORE), "read - -"),
    ],
)  # fmt: skip
def test_each_row(
    here: StateOrigin | None, start: JobStart, states: ParkedStates, plan: str
) -> None:
    """`plan`: its name, where trained weights come from, and frozen ones: memory, or a hash's."""
    found = plan_start(here, start, states)
    trained = "memory" if found.trained_stays else "parked" if found.state else "-"
    elsewhere = "-" if found.over is None or found.trained_stays else found.over.sha256[0]
    if found.name == "begin" and found.trained_stays:
        elsewhere = "p" if start.lora else "-"
    assert f"{found.name} {trained} {'memory' if found.frozen_stays else elsewhere}" == plan


def test_no_combination_takes_what_is_not_the_jobs() -> None:
    origins = [None, OWN, BEFORE, BEFORE_LORA, OTHER, LEFT, StateOrigin("x", None, base=PARENT)]
    seen: set[PlanName] = set()
    for here, one, other in product(origins, repeat=3):
        kept = [origin for origin in (one, other) if origin is not None]
        for start, frozen in product((FULL, LORA, resuming(FULL), resuming(LORA)), (None, BASE)):
            plan = plan_start(here, start, parked(*kept, frozen=frozen))
            seen.add(plan.name)
            check(plan, here, start)
    assert seen == {"resume", "continue", "unpark", "begin", "read"}


def check(plan: StartPlan, here: StateOrigin | None, start: JobStart) -> None:
    assert start.parent is not None
    if plan.stays:
        assert here is not None
    if plan.name == "resume":
        assert start.resumes and here is not None and here.job == start.job
    if plan.trained_stays and plan.name != "resume":
        assert here is not None and here.weights == start.parent.sha256
    if plan.frozen_stays and plan.name in ("unpark", "begin"):
        assert start.lora and here is not None and here.base == plan.over
    origin = None if plan.state is None else plan.state.origin
    if plan.keeps_optimizer and not start.resumes:
        left = here if origin is None else origin
        assert left is not None and left.job == start.optimizer_from and not left.seal
    if origin is not None:
        assert origin.job == start.job or origin.weights == start.parent.sha256
