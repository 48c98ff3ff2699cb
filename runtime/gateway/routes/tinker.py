"""Tinker's wire API: sessions, samplers and samples, and the futures of all requests.

A script of the `tinker` client runs against this platform with `TINKER_BASE_URL` and a key. Every
request that takes time is answered with a name, under which its result is fetched; the name is made
of the request, so that the same request again is the same future. What is not served is refused by
name. Read next: tinker_models.py, models and their commands; gateway/tinker/, the wire.
"""

import asyncio
import logging
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, Corrupt, CrayError, EngineError, NotFound
from cray_agents.records import new_id
from cray_agents.runtime.disk.turns import off_loop
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import json_response, read_record
from cray_agents.runtime.gateway.http.error_envelope import envelope, status_of, without_paths
from cray_agents.runtime.gateway.http.fields import ID, Fields, named
from cray_agents.runtime.gateway.http.routing import BINARY, Router
from cray_agents.runtime.gateway.model_calls.answer import TAG_LENGTH, start_call
from cray_agents.runtime.gateway.model_calls.apis.chat import COMPLETIONS
from cray_agents.runtime.gateway.ownership import check_owner
from cray_agents.runtime.gateway.routes.tinker_models import (
    HOLD,
    base_version,
    saved_version,
    training_future,
)
from cray_agents.runtime.gateway.services import Current, Services
from cray_agents.runtime.gateway.tinker.requests import NewSampler, SampleRequest
from cray_agents.runtime.gateway.tinker.samples import (
    TinkerSample,
    completion_request,
    write_samples,
)
from cray_agents.runtime.gateway.tinker.training_runs import Sampler, name_of_sampler

JSON, PROTOBUF = "application/json", "application/x-protobuf"
GONE = 410  # tells a script to sample again
#: Flags that this platform sets in every client.
CLIENT_FLAGS = {
    "pjwt_auth_enabled": False,
    "parallel_fwdbwd_chunks": False,  # commands come in their order
    "proto_compress_fwdbwd": False,
    "sample_use_retrieve_futures": False,
    "sample_join_sampling_session": False,
    "custom_loss_server_side": False,  # losses of one's own run in the script
}
WARNING = (
    "cray-agents: adapters are of the attention and MLP layers; train_unembed has no effect, and"
    " weights are kept until `cray-agents maintain prune models`, whatever their ttl_seconds"
)
#: Paths that the client has, and this platform does not.
REFUSED = {
    "auth/token": "keys are not exchanged for tokens",
    "join_sampling_session": "the clients of a sampler number their samples themselves",
    "retrieve_futures": "futures are fetched one by one",
    "create_custom_loss": "losses of your own run in your script: forward_backward_custom",
    "copy_weights": "weights stay where they were saved",
    "save_weights_external": "`cray-agents models list` names the folder of a version's weights",
}

log = logging.getLogger(__name__)

router = Router("Tinker")


class Future(Fields):
    """The name of a request whose result is wanted."""

    request_id: str


# ---- sessions
@router.get("/api/v1/healthz", "open", answer=dict[str, str])
async def check_tinker_health() -> Response:
    """Tell that the gateway is there."""
    return json_response({"status": "ok"})


@router.post("/api/v1/client/config", Role.use, answer=dict[str, Any])
async def read_tinker_flags() -> Response:
    """Return the flags that a client goes by."""
    return json_response(CLIENT_FLAGS)


@router.post("/api/v1/client/dynamic_config", Role.use, answer=dict[str, Any])
async def read_tinker_changing_flags() -> Response:
    """Return the flags that a client asks for again and again."""
    return json_response({"sample_cancel_enabled": True})


@router.get("/api/v1/get_server_capabilities", Role.use, answer=dict[str, Any])
async def list_tinker_models(services: Current) -> Response:
    """List the models that scripts may train and sample from: the promoted names."""
    names = await asyncio.to_thread(_promoted_names, services)
    models = [{"model_name": name, "trainable": True, "sampleable": True} for name in names]
    return json_response({"supported_models": models})


@router.post("/api/v1/create_session", Role.use, answer=dict[str, str])
async def create_tinker_session() -> Response:
    """Begin a session of a script."""
    return json_response(
        {"type": "create_session", "session_id": new_id("tinker"), "warning_message": WARNING}
    )


@router.post("/api/v1/session_heartbeat", Role.use, answer=dict[str, Any])
async def continue_tinker_session() -> Response:
    """Take note of nothing: a job without commands gives its place to others by itself."""
    return json_response({"type": "session_heartbeat"})


@router.post("/api/v1/telemetry", Role.use, answer=dict[str, Any])
async def drop_tinker_telemetry() -> Response:
    """Drop a client's reports about itself."""
    return json_response({"status": "accepted"})


# ---- samplers
@router.post(
    "/api/v1/create_sampling_session",
    Role.use,
    answer=dict[str, str],
    fails="404 model_not_found, 404 not_found, 400 invalid_value",
)
async def create_tinker_sampler(services: Current, request: Request, body: NewSampler) -> Response:
    """Make a sampler of a model, or of saved weights. It stays with their version."""
    name = name_of_sampler(body.session_id, body.sampling_session_seq_id)
    if body.model_path is not None:
        saved = await asyncio.to_thread(services.tinker.saved, body.model_path)
        version = await asyncio.to_thread(saved_version, services, saved)
        base = (await asyncio.to_thread(services.tinker.model, saved.model)).base_model
    elif body.base_model is not None:
        version, base = base_version(services, body.base_model), body.base_model
    else:
        raise BadInput("base_model or model_path must be given", param="base_model")
    sampler = Sampler(
        id=name,
        version=version.id,
        base_model=base,
        path=body.model_path,
        owner=caller_of(request).key_id,
    )
    _check_sampler(request, await asyncio.to_thread(services.tinker.add_sampler, sampler))
    return json_response({"type": "create_sampling_session", "sampling_session_id": name})


@router.get("/api/v1/samplers/{sampler_id}", Role.use, answer=dict[str, Any])
async def retrieve_tinker_sampler(
    services: Current, sampler_id: Annotated[str, named("sampler", "sampler_id")]
) -> Response:
    """Return a sampler's base model and weights."""
    sampler = await asyncio.to_thread(services.tinker.sampler, sampler_id)
    fields = {"base_model": sampler.base_model, "model_path": sampler.path}
    return json_response({"sampler_id": sampler.id, **fields})


@router.post(
    "/api/v1/asample",
    Role.use,
    bare=True,
    body=SampleRequest,
    answer=dict[str, Any],
    fails="404 not_found, 400 invalid_value, 429 rate_limit_exceeded",
)
async def begin_tinker_sample(services: Services, request: Request) -> Response:
    """Sample from a sampler's version. Recorded as a completion of token ids is."""
    given = await read_record(SampleRequest, request, services.max_body)
    sampler = await asyncio.to_thread(services.tinker.sampler, given.sampling_session_id)
    _check_sampler(request, sampler)
    request_id = f"{sampler.id}/sample/{given.seq_id}"
    if services.tinker_samples.get(request_id) is None:
        wanted = completion_request(given, sampler.version)
        call, task = await start_call(services, request, COMPLETIONS, wanted)
        call.tags.append(sampler.id[:TAG_LENGTH])
        services.tinker_samples.add(request_id, TinkerSample(call, task))
    ids = [f"{request_id}/{number}" for number in range(given.num_samples)]
    return json_response({"request_id": request_id, "sample_sequence_ids": ids})


@router.post("/api/v1/cancel_future", Role.use, answer=dict[str, Any])
async def cancel_tinker_future(services: Current, request: Request, body: Future) -> Response:
    """End a sample that nobody waits for; anything else goes on."""
    sample = _own_sample(services, request, body.request_id)
    if sample is not None:
        sample.task.cancel()
    return json_response({})


def _check_sampler(request: Request, sampler: Sampler) -> None:
    check_owner(caller_of(request), sampler.owner, f"sampler {sampler.id!r}")


def _own_sample(services: Services, request: Request, request_id: str) -> TinkerSample | None:
    """Return a sample; None if this process has none of that name. Raises AccessDenied."""
    sample = services.tinker_samples.get(request_id)
    if sample is not None:
        check_owner(caller_of(request), sample.call.owner, f"sample {request_id[:200]!r}")
    return sample


# ---- futures
@router.post(
    "/api/v1/retrieve_future",
    Role.use,
    bare=True,
    body=Future,
    answer=dict[str, Any],
    media={PROTOBUF: BINARY},
    fails="404 not_found, 410 sample_gone",
)
async def retrieve_tinker_future(services: Services, request: Request) -> Response:
    """Return the result of a request, or that it is not there yet.

    A request that failed has an `error`, and a `category` that says whether the script is to blame.
    """
    request_id = (await read_record(Future, request, services.max_settings)).request_id
    owner, _, rest = request_id.partition("/")
    if not ID.fullmatch(owner) or not rest:
        raise NotFound(f"no request {request_id[:200]!r}", param="request_id")
    result: dict[str, Any] | bytes | Response | None
    try:
        if rest.startswith("sample/"):
            sample = _own_sample(services, request, request_id)
            result = await _sample_result(sample, request_id)
        else:
            caller_of(request).check_role(Role.train, "the result of a training request")
            result = await training_future(services, owner, rest)
    except (BadInput, EngineError) as error:
        return json_response({"error": without_paths(str(error)), "category": _category(error)})
    if result is None:
        waiting = {"type": "try_again", "request_id": request_id, "queue_state": "active"}
        return json_response({**waiting, "queue_state_reason": None})
    if isinstance(result, bytes):
        return Response(result, media_type=PROTOBUF)
    return result if isinstance(result, Response) else json_response(result)


async def _sample_result(sample: TinkerSample | None, request_id: str) -> bytes | Response | None:
    """Return a sample's sequences; None if they take longer. Raises EngineError."""
    if sample is None:
        message = "the platform was restarted since: sample again"
        return Response(envelope(GONE, message, "sample_gone"), GONE, media_type=JSON)
    done, _ = await asyncio.wait({sample.task}, timeout=HOLD)
    if not done:
        return None
    if sample.task.cancelled():
        raise BadInput("the sample was cancelled")
    failure = sample.task.exception()
    if failure is not None and not isinstance(failure, BadInput | EngineError):
        log.error("the sample %s failed", request_id, exc_info=failure)
        # as a failed request: the client would repeat a question that failed at once, for ever
        raise EngineError(f"the sample failed: {failure or type(failure).__name__}") from failure
    answer = sample.task.result()
    return await off_loop(len(answer), write_samples, sample.call.exchange.samples, answer)


def _category(error: CrayError) -> str:
    return "user" if status_of(error) < 500 or error.code == "model_not_loaded" else "server"


def _promoted_names(services: Services) -> list[str]:
    registry = services.registry
    names = []
    for name in registry.names():
        try:
            if registry.promoted(name) is not None:
                names.append(name)
        except (NotFound, Corrupt):  # a folder without a version; GET /v1/models names damage
            continue
    return names


# ---- refusals
def _refuse(path: str, reason: str) -> None:
    async def refuse() -> Response:
        raise BadInput(f"{path} is not served: {reason}", code="unsupported")

    refuse.__name__ = f"refuse_tinker_{path.replace('/', '_')}"
    refuse.__doc__ = f"Refuse: {reason}."
    router.post(f"/api/v1/{path}", Role.use, fails="400 unsupported")(refuse)


for _path, _reason in REFUSED.items():
    _refuse(_path, _reason)
