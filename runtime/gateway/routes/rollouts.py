"""Rollouts: runs that loops ask for and workers of other frameworks' environments carry out.

See docs/environments.md. Read next: runtime/gateway/rollout_queue.py.
"""

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.records import Reward, StrictRecord
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import (
    ID,
    answer_read,
    json_response,
    number,
    path_id,
    read_record,
)
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import (
    COUNT,
    TEXT,
    Described,
    all_of,
    count_up_to,
    data_of,
    object_of,
    or_none,
)
from cray_agents.runtime.gateway.rollout_queue import (
    SOURCE,
    RolloutResult,
    RolloutSpec,
)
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.store.feedback import check_rewards

LONGEST_WAIT = 60  # seconds
NAME = r"^[A-Za-z0-9][A-Za-z0-9._-]{0,99}$"
STATE = {"enum": ["queued", "running", "done"]}

router = Router("Training")


class LeaseRequest(StrictRecord):
    """A worker that has room for a run. `seconds`: of the lease; `wait`: until a run comes."""

    environment: str = Field(pattern=NAME)
    worker: str = Field(min_length=1, max_length=200)
    seconds: float = Field(60.0, ge=1, le=3600)
    wait: float = Field(0.0, ge=0, le=LONGEST_WAIT)


class LeaseRenewal(StrictRecord):
    """A worker that goes on with its run."""

    lease: str
    seconds: float = Field(60.0, ge=1, le=3600)


@router.get(
    "/v1/rollouts",
    Role.train,
    answer=data_of(
        object_of({"environment": TEXT, "queued": COUNT, "running": COUNT, "workers": COUNT})
    ),
)
async def list_rollouts(services: Services, request: Request) -> Response:
    """Count the runs that wait or go on, and the workers, by environment."""
    return json_response({"data": services.rollouts.overview()})


@router.post("/v1/rollouts", Role.train, body=RolloutSpec, answer=object_of({"state": STATE}))
async def ask_for_rollout(services: Services, request: Request) -> Response:
    """Ask for a run by a worker. The same run again is the same; one on record is done.

    The run is given up unless somebody asks for its state every two minutes until it begins.
    """
    spec = await read_record(RolloutSpec, request, services.max_body)
    if not ID.fullmatch(spec.run_id):
        raise BadInput(f"run_id: {spec.run_id[:200]!r} is no run's id", param="run_id")
    caller = caller_of(request)
    owners = await services.run_owners.owners(caller, [spec.run_id], [])
    state = await services.rollouts.submit(spec, owners[spec.run_id])
    return json_response({"state": state})


@router.get(
    "/v1/rollouts/{run_id}",
    Role.train,
    query={"wait": Described(count_up_to(LONGEST_WAIT), "Seconds to wait for its end.")},
    answer=object_of({"state": STATE, "workers": COUNT}),
    fails="404 not_found",
)
async def wait_for_rollout(services: Services, request: Request) -> Response:
    """Return a run's state, and how many workers its environment has."""
    seconds = number(query(request), "wait", 0, LONGEST_WAIT)
    state, workers = await services.rollouts.wait(path_id(request, "run_id", "run"), seconds)
    return json_response({"state": state, "workers": workers})


@router.post(
    "/v1/rollouts/lease",
    Role.train,
    body=LeaseRequest,
    answer=object_of({"rollout": or_none(all_of(RolloutSpec, object_of({"lease": TEXT})))}),
)
async def lease_rollout(services: Services, request: Request) -> Response:
    """Lease the oldest waiting run of an environment, for a worker that has room.

    Its model calls go to the base URL `/runs/RUN/v1`.
    """
    wanted = await read_record(LeaseRequest, request, services.max_settings)
    leased = await services.rollouts.lease(
        wanted.environment, wanted.worker, wanted.seconds, wanted.wait
    )
    return await answer_read(request, lambda: {"rollout": leased})


@router.post(
    "/v1/rollouts/{run_id}/renew",
    Role.train,
    body=LeaseRenewal,
    answer=object_of({}),
    fails="400 lease_lost",
)
async def renew_rollout(services: Services, request: Request) -> Response:
    """Keep a run; without this it ends as failed by its worker when the lease does."""
    renewal = await read_record(LeaseRenewal, request, services.max_settings)
    services.rollouts.renew(path_id(request, "run_id", "run"), renewal.lease, renewal.seconds)
    return json_response({})


@router.post(
    "/v1/rollouts/{run_id}/result",
    Role.train,
    body=RolloutResult,
    answer=object_of({}),
    fails="400 lease_lost, 400 invalid_value",
)
async def finish_rollout(services: Services, request: Request) -> Response:
    """Record the end of a run: its rewards, or the error of its environment.

    An error is a failure of the infrastructure and no reward. The first end stays.
    """
    result = await read_record(RolloutResult, request, services.max_body)
    rewards = [Reward(**given.model_dump(), source=SOURCE) for given in result.rewards]
    check_rewards(rewards, services.reward_limit, "rewards")
    await services.rollouts.finish(path_id(request, "run_id", "run"), result)
    return json_response({})
