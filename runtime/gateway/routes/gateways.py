"""Routes for further gateways alone: what they report to the controller, and ask of it.

Called by runtime/gateway/controller_link.py, with the platform's own key; for a proof without it.
"""

import asyncio

from pydantic import Field
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.records import Record
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.bodies import field, json_response, read_json, read_record
from cray_agents.runtime.gateway.http.routing import Router, query
from cray_agents.runtime.gateway.http.shapes import REAL, TEXT, object_of
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.vllm_plugins import proof

router = Router("Platform")


class SessionOutcome(Record):
    """An answer to a live session of a model that has a canary."""

    model: str
    session: str
    version: str
    failed: bool


class EngineFailure(Record):
    """A replica, by its place, whose engine was found dead when it had lost `losses` processes."""

    replica: int
    losses: int
    why: str


class GatewayReport(Record):
    """A gateway's name, its requests inside and waiting, and what happened since its last report.

    `rewarded`: runs that got a reward.
    """

    gateway: str = Field(max_length=200)
    demand: int = Field(ge=0, le=10**9)
    outcomes: list[SessionOutcome] = Field(default_factory=list)
    rewarded: list[str] = Field(default_factory=list)
    failures: list[EngineFailure] = Field(default_factory=list)


@router.post("/v1/gateways", Role.admin, body=GatewayReport, answer=object_of({"share": REAL}))
async def report_gateway(services: Services, request: Request) -> Response:
    """Take a further gateway's report, and return its share of the engines.

    Gateways send it; see `up --gateway-only`.
    """
    report = await read_record(GatewayReport, request, services.max_settings)
    services.note_other_gateways()
    services.shares.note(report.gateway, report.demand)
    for failure in report.failures:
        services.pool.fail(failure.replica, failure.losses, failure.why)
    live, admission = services.versions.live, services.admission
    for one in report.outcomes:
        live.note_outcome(one.model, one.session, one.version, failed=one.failed)
    for run_id in report.rewarded:
        await live.note_reward(run_id)
    share = services.shares.of(report.gateway, admission.demand)
    return json_response({"share": share})


@router.post(
    "/v1/gateways/load",
    Role.admin,
    body=object_of({"version": TEXT}),
    answer=object_of({}),
    fails="404 model_not_found, 503 model_not_loaded",
)
async def load_for_gateway(services: Services, request: Request) -> Response:
    """Load a version that a request at a further gateway needs, where that displaces nothing.

    Gateways ask for it; it returns when the version is loaded, or will be in any case.
    """
    version = field(await read_json(request, services.max_settings), "version", str)
    loading = services.versions.load_on_demand(services.registry.resolve(version).id)
    if loading is not None:
        await asyncio.shield(loading)
    return json_response({})


@router.get(proof.PATH, "open", answer=object_of({"proof": TEXT}), query={"nonce": TEXT})
async def prove_gateway(services: Services, request: Request) -> Response:
    """Prove that this gateway is of the platform whose claim on the root the caller has read.

    `nonce`: 64 random hexadecimal digits.
    """
    nonce = query(request).get("nonce", "")
    if (answer := proof.proof_of(services.token, nonce, *request.scope["server"])) is None:
        raise BadInput("nonce must be 64 hexadecimal digits, of a platform", param="nonce")
    return json_response({"proof": answer})
