"""Loops: the records of their iterations, other entries of their journals, and rollouts.

A record is written once. Rollouts are runs that loops ask for and workers of other frameworks'
environments carry out: see docs/environments.md. Read next: runtime/gateway/rollout_queue.py.
"""

import asyncio
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query
from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, NotFound
from cray_agents.exact_json import dump_json
from cray_agents.queries import RunQuery
from cray_agents.records import Record, Reward, StrictRecord
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import answer_read, damage_told, json_response, page
from cray_agents.runtime.gateway.http.fields import (
    ID,
    After,
    Count,
    DataList,
    IterationNumber,
    Limit,
    ListPage,
    LoopId,
    RunId,
    Trace,
    named,
)
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.rollout_queue import (
    SOURCE,
    RolloutResult,
    RolloutSpec,
    RolloutState,
)
from cray_agents.runtime.gateway.services import Current
from cray_agents.runtime.store.feedback import check_rewards
from cray_agents.runtime.store.loop_records import LoopRecords
from cray_agents.runtime.telemetry.timeline import MOST_RUNS, iteration_timeline
from cray_agents.runtime.views.evaluations import EvaluatedModel, evaluated_models
from cray_agents.runtime.views.iteration_evidence import iteration_detail, loops_page, pairs_page
from cray_agents.runtime.views.job_hardware import job_events
from cray_agents.runtime.views.view_records import (
    IterationDetail,
    LoopSummary,
    PairOutcome,
    PairPage,
)

LONGEST_WAIT = 60  # seconds
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
EntryName = Annotated[str, named("entry", "entry")]

router = Router("Training")


class LeaseRequest(StrictRecord):
    """A worker's request for a run: the lease's length and how long to wait, in seconds."""

    environment: str = Field(pattern=NAME)
    worker: str = Field(min_length=1, max_length=200)
    seconds: float = Field(60.0, ge=1, le=3600)
    wait: float = Field(0.0, ge=0, le=LONGEST_WAIT)


class LeaseRenewal(StrictRecord):
    """A worker that goes on with its run."""

    lease: str
    seconds: float = Field(60.0, ge=1, le=3600)


class EnvironmentRuns(Record):
    """The runs of an environment that wait or go on, and its workers."""

    environment: str
    queued: int
    running: int
    workers: int


class RolloutStatus(Record):
    """The state of a run, and how many workers its environment has."""

    state: RolloutState
    workers: int


class LeasedRollout(RolloutSpec):
    """A run with the lease of the worker that carries it out."""

    lease: str


@router.get("/v1/loops", Role.train, answer=ListPage[LoopSummary], long=True)
def list_loops(services: Current, limit: Limit = 20, after: After = None) -> dict[str, Any]:
    """List the loops with their last iteration and held-out success, newest change first."""
    listing = loops_page(services.home, after, limit)
    return page(listing.rows, listing.has_more, damaged=listing.damaged)


@router.get("/v1/evaluations", Role.train, answer=DataList[EvaluatedModel])
async def list_evaluations(
    services: Current, request: Request, loop: str | None = None
) -> Response:
    """List the models that `eval` evaluated: success with interval, seconds, cost of a request.

    `loop`: the name under which an evaluation's runs are recorded; all unless given.
    """

    def read() -> dict[str, Any]:
        rows = evaluated_models(services.home, services.store, services.prices, loop)
        return {"data": [row.model_dump(mode="json") for row in rows]}

    return await answer_read(request, read, long=True)


@router.get("/v1/loops/{loop}/iterations/{number}/timeline", Role.train, answer=Trace)
def read_iteration_timeline(
    services: Current, loop: LoopId, number: IterationNumber
) -> dict[str, Any]:
    """Return the phases, job and runs of a finished iteration in Chrome's trace format.

    Perfetto (ui.perfetto.dev) opens it. `ts` and `dur` are microseconds since `otherData.begin`.
    """
    records = LoopRecords(services.home, loop)
    record, ended = records.content(number), records.ended(number)
    events = job_events(services.home, str(record.get("job_id") or ""))
    which = RunQuery(loop=loop, iteration=number, order="oldest", limit=MOST_RUNS)
    runs = services.store.stream(which)
    return iteration_timeline(loop, record, ended, job_events=events, runs=runs)


@router.get("/v1/loops/{loop}/iterations/{number}", Role.train, answer=IterationDetail)
def read_iteration(services: Current, loop: LoopId, number: IterationNumber) -> Any:
    """Return a finished iteration with the decision on its candidate, and the wealth behind it."""
    return iteration_detail(services.home, services.registry, loop, number)


@router.get("/v1/loops/{loop}/iterations/{number}/pairs", Role.train, answer=PairPage)
def list_pairs(
    services: Current,
    loop: LoopId,
    number: IterationNumber,
    outcome: PairOutcome | None = None,
    at: Annotated[Count, Query(description="The first pair, from 0.")] = 0,
    limit: Limit = 100,
) -> Any:
    """List the held-out tasks that a decision compared, with both runs, in their order."""
    return pairs_page(services.home, loop, number, outcome, at, limit)


@router.get("/v1/loops/{loop}/settings", Role.train, answer=DataList[dict[str, Any]])
def list_settings(services: Current, loop: LoopId) -> dict[str, Any]:
    """List a loop's settings as it recorded them: those that it began with, then changed ones."""
    folder = services.home.loop(loop) / "journal"
    names = [path.stem.removeprefix("settings-") for path in folder.glob("settings-*.json")]
    numbers = sorted(int(name) for name in names if name.isdecimal())
    return {"data": [recall(folder / f"settings-{number}.json") for number in numbers]}


@router.get("/v1/loops/{loop}/journal/{entry}", Role.train, answer=dict[str, Any])
def recall_entry(services: Current, loop: LoopId, entry: EntryName) -> Any:
    """Return an entry of a loop's journal."""
    return recall(services.home.loop(loop) / "journal" / f"{entry}.json")


@router.post(
    "/v1/loops/{loop}/journal/{entry}", Role.train, answer=dict[str, bool], max_body="runs"
)
async def note_entry(
    services: Current, loop: LoopId, entry: EntryName, body: dict[str, Any]
) -> Response:
    """Note a decision of a loop; the first note stays."""
    return await _create(services.home.loop(loop) / "journal" / f"{entry}.json", body)


@router.get("/v1/loops/{loop}/iterations", Role.train, answer=DataList[dict[str, Any]])
def list_iterations(services: Current, loop: LoopId) -> dict[str, Any]:
    """List a loop's finished iterations, in the order of their numbers."""
    listing = LoopRecords(services.home, loop).listing()
    return {"data": listing.rows, **damage_told(listing.damaged)}


@router.post(
    "/v1/loops/{loop}/iterations/{number}",
    Role.train,
    answer=dict[str, bool],
    max_body="runs",
)
async def finish_iteration(
    services: Current, loop: LoopId, number: IterationNumber, body: dict[str, Any]
) -> Response:
    """Record an iteration; the first record stays."""
    return await _create(LoopRecords(services.home, loop).path(number), body)


async def _create(path: Path, record: Any) -> Response:
    created = await asyncio.to_thread(lambda: durable.create_file(path, text_of(record)))
    return json_response({"created": created})


def recall(path: Path) -> Any:
    """Return an entry of a journal. Raises NotFound, Corrupt."""
    try:
        return checksums.read_json(path)
    except FileNotFoundError:
        loop = path.parent.parent.name
        raise NotFound(f"loop {loop!r} has no entry {path.stem!r}", param="entry") from None


def text_of(record: Any) -> bytes:
    """Return the bytes of a record's file."""
    return checksums.with_crc(dump_json(record))


# ---- rollouts
@router.get("/v1/rollouts", Role.train, answer=DataList[EnvironmentRuns])
async def list_rollouts(services: Current) -> Response:
    """Count the runs that wait or go on, and the workers, by environment."""
    return json_response({"data": services.rollouts.overview()})


@router.post("/v1/rollouts", Role.train, answer=dict[str, RolloutState], max_body="runs")
async def ask_for_rollout(services: Current, request: Request, body: RolloutSpec) -> Response:
    """Ask for a run by a worker. The same run again is the same; one on record is done.

    The run is given up unless somebody asks for its state every two minutes until it begins.
    """
    if not ID.fullmatch(body.run_id):
        raise BadInput(f"run_id: {body.run_id[:200]!r} is no run's id", param="run_id")
    owners = await services.run_owners.owners(caller_of(request), [body.run_id], [])
    state = await services.rollouts.submit(body, owners[body.run_id])
    return json_response({"state": state})


@router.get("/v1/rollouts/{run_id}", Role.train, answer=RolloutStatus)
async def wait_for_rollout(
    services: Current,
    run_id: RunId,
    wait: Annotated[
        int, Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for its end.")
    ] = 0,
) -> Response:
    """Return a run's state, and how many workers its environment has."""
    state, workers = await services.rollouts.wait(run_id, wait)
    return json_response({"state": state, "workers": workers})


@router.post("/v1/rollouts/lease", Role.train, answer=dict[str, LeasedRollout | None])
async def lease_rollout(services: Current, request: Request, body: LeaseRequest) -> Response:
    """Lease the oldest waiting run of an environment, for a worker that has room.

    Its model calls go to the base URL `/runs/RUN/v1`.
    """
    leased = await services.rollouts.lease(body.environment, body.worker, body.seconds, body.wait)
    return await answer_read(request, lambda: {"rollout": leased})


@router.post(
    "/v1/rollouts/{run_id}/renew", Role.train, answer=dict[str, Any], fails="400 lease_lost"
)
async def renew_rollout(services: Current, run_id: RunId, body: LeaseRenewal) -> Response:
    """Keep a run; without this it ends as failed by its worker when the lease does."""
    services.rollouts.renew(run_id, body.lease, body.seconds)
    return json_response({})


@router.post(
    "/v1/rollouts/{run_id}/result",
    Role.train,
    answer=dict[str, Any],
    fails="400 lease_lost, 400 invalid_value",
    max_body="runs",
)
async def finish_rollout(services: Current, run_id: RunId, body: RolloutResult) -> Response:
    """Record the end of a run: its rewards, or the error of its environment.

    An error is a failure of the infrastructure and no reward. The first end stays.
    """
    rewards = [Reward(**given.model_dump(), source=SOURCE) for given in body.rewards]
    check_rewards(rewards, services.reward_limit, "rewards")
    await services.rollouts.finish(run_id, body)
    return json_response({})
