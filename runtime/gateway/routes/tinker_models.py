"""Tinker's models: jobs by commands, with a command for each request, and the weights they save.

A script numbers its requests to a model from 1, and the job's commands have the same numbers. So a
request that is sent twice is one command, done exactly once (trainers/job/command_run.py), and
its future outlives this process. Saved weights become versions `name@N` of the base's name, with
the base's prompts.
Called by tinker.py for futures. Read next: gateway/tinker/training_runs.py, what is kept.
"""

import asyncio
import contextlib
from datetime import UTC, datetime
from functools import partial
from typing import Annotated, Any

from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, EngineError, JobError, NotFound
from cray_agents.records import ModelVersion
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.disk.durable import kept_state
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import Caller, caller_of
from cray_agents.runtime.gateway.http.bodies import damage_told, json_response, parse, read_body
from cray_agents.runtime.gateway.http.client_work import aside, await_or_disconnect
from cray_agents.runtime.gateway.http.fields import (
    NUMBER,
    Count,
    Fields,
    Limit,
    RecordSchema,
    named,
)
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.ownership import check_owner
from cray_agents.runtime.gateway.routes.jobs import await_result, job_spec
from cray_agents.runtime.gateway.services import Current, Services
from cray_agents.runtime.gateway.tinker import forward_backward
from cray_agents.runtime.gateway.tinker.requests import (
    CreateModel,
    LoadWeights,
    LoraConfig,
    ModelRequest,
    NewModel,
    SaveRequest,
    StepRequest,
)
from cray_agents.runtime.gateway.tinker.training_runs import (
    BASE,
    Sampler,
    SavedKind,
    SavedWeights,
    TinkerModel,
    name_of_model,
    name_of_sampler,
    session_of,
)
from cray_agents.training_commands import CommandResult, OptimStep, Publish, Save, TrainingCommand

HOLD = 20  # seconds that a question for a result is held; the client waits for 45
RANKS = "commands"  # the session of the Python client, too: all take turns on its ranks
ALPHA = 32.0  # of Tinker's adapters, whatever their rank
FUTURE = dict[str, str]
FAILS = "404 not_found, 400 invalid_value"

TinkerId = Annotated[str, named("model", "model_id")]

router = Router("Tinker")


class SavedPath(Fields):
    """The path of saved weights."""

    tinker_path: str


# ---- models
@router.post(
    "/api/v1/create_model",
    Role.train,
    answer=FUTURE,
    fails="404 model_not_found, 400 invalid_value",
)
async def create_tinker_model(services: Current, request: Request, body: CreateModel) -> Response:
    """Begin to train a model by requests of a script.

    `base_model` is a name of this platform, `name@N`, or a hub's `owner/name`.
    """
    base = base_version(services, body.base_model)
    lora = body.lora_config
    job = {"parent": base.id, "hyperparameters": _hyper(lora)}
    names = (body.base_model, None if lora is None else lora.rank)
    caller = caller_of(request)
    model = await asyncio.to_thread(_begin, services, caller, body, job, base, *names)
    return _future(f"{model.id}/create", model.id)


@router.post("/api/v1/load_weights", Role.train, answer=FUTURE, fails=FAILS)
async def load_tinker_weights(
    services: Current, request: Request, body: Annotated[dict[str, Any], RecordSchema(LoadWeights)]
) -> Response:
    """Begin to train a model from saved weights, with their optimizer's state or a new one."""
    if body.get("model_id") is not None:
        raise BadInput(
            "a model does not load other weights: make a new one with"
            " create_training_client_from_state",
            param="model_id",
        )
    new = parse(LoadWeights, body)
    saved = await asyncio.to_thread(services.tinker.saved, new.path)
    version = await asyncio.to_thread(saved_version, services, saved)
    before = await asyncio.to_thread(services.tinker.model, saved.model)
    job = await asyncio.to_thread(_job_from, services, new, saved, version)
    names = (before.base_model, before.rank)
    caller = caller_of(request)
    model = await asyncio.to_thread(_begin, services, caller, new, job, version, *names)
    return _future(f"{model.id}/load", model.id)


@router.post("/api/v1/unload_model", Role.train, answer=FUTURE, fails="404 not_found")
async def unload_tinker_model(services: Current, request: Request, body: ModelRequest) -> Response:
    """End a model's job. What it saved stays."""
    model = await _own_model(services, request, body.model_id)
    await asyncio.to_thread(services.trainer.cancel, model.job)
    return _future(f"{model.id}/unload", model.id)


@router.post(
    "/api/v1/get_info", Role.train, answer=dict[str, Any], fails="404 not_found", audited=False
)
async def retrieve_tinker_model(services: Current, body: ModelRequest) -> Response:
    """Return the base and the kind of a model."""
    model = await asyncio.to_thread(services.tinker.model, body.model_id)
    data = {"model_name": model.base_model, "tokenizer_id": model.base_model}
    return json_response(
        {
            "type": "get_info",
            "model_data": data,
            "model_id": model.id,
            "model_name": model.base_model,
            "is_lora": model.rank is not None,
            "lora_rank": model.rank,
        }
    )


async def _own_model(services: Services, request: Request, model_id: str) -> TinkerModel:
    """Return a model that the caller may change. Raises AccessDenied, NotFound."""
    model = await asyncio.to_thread(services.tinker.model, model_id)
    check_owner(caller_of(request), model.owner, f"model {model_id!r}")
    return model


# ---- commands
@router.post(
    "/api/v1/forward_backward", Role.train, answer=FUTURE, fails=FAILS, audited=False, bare=True
)
async def send_tinker_pass(services: Services, request: Request) -> Response:
    """Add a loss's gradient, or only compute the loss and log-probabilities.

    The body is a protocol buffer, and so is the result.
    """
    body = bytes(await read_body(request, services.max_body))
    read = partial(forward_backward.read_request, body)
    given = await await_or_disconnect(request, None, aside(request, read, long=True))
    model = await _own_model(services, request, given.model_id)
    return await _send(services, model, given.sequence, given.command, "pass")


@router.post("/api/v1/optim_step", Role.train, answer=FUTURE, fails=FAILS, audited=False)
async def send_tinker_step(
    services: Current, request: Request, body: Annotated[dict[str, Any], RecordSchema(StepRequest)]
) -> Response:
    """Take a step of AdamW with the gradients since the last one."""
    if "optimizer_params" in body:
        raise BadInput("only Adam is served: give adam_params", param="optimizer_params")
    step = parse(StepRequest, body)
    adam = step.adam_params.model_dump()
    clip = adam.pop("grad_clip_norm")
    model = await _own_model(services, request, step.model_id)
    await asyncio.to_thread(services.tinker.note_step, step.model_id, step.seq_id)
    command = OptimStep(**adam, clip_grad=clip)
    return await _send(services, model, step.seq_id, command, "step")


@router.post("/api/v1/save_weights", Role.train, answer=FUTURE, fails=FAILS)
async def save_tinker_weights(services: Current, request: Request, body: SaveRequest) -> Response:
    """Save weights under a name, to train on from them."""
    return await _save(services, request, body, "weights")


@router.post("/api/v1/save_weights_for_sampler", Role.train, answer=FUTURE, fails=FAILS)
async def save_tinker_weights_for_sampler(
    services: Current, request: Request, body: SaveRequest
) -> Response:
    """Save weights to sample from, under a name or for one sampler alone."""
    return await _save(services, request, body, "sampler_weights")


async def _save(
    services: Services, request: Request, save: SaveRequest, kind: SavedKind
) -> Response:
    sampler = ""
    if save.path is None:
        if save.sampling_session_seq_id is None:
            raise BadInput("path must be given: it names the weights", param="path")
        sampler = name_of_sampler(session_of(save.model_id), save.sampling_session_seq_id)
    model = await _own_model(services, request, save.model_id)

    def result_of(sequence: int) -> CommandResult | None:
        try:
            return services.trainer.result(model.job, sequence)
        except NotFound:  # it was not sent yet
            return None

    saved = await asyncio.to_thread(
        services.tinker.add_saved,
        save.model_id,
        kind,
        save.seq_id,
        save.path or "",
        result_of=result_of,
        sampler=sampler,
        metadata=save.user_metadata,
    )
    # weights that were published before are not written again, and the request still counts
    keep = kind == "weights"  # to go on from, also with the optimizer
    command: TrainingCommand
    if saved.published_by == save.seq_id:
        command = Publish(keep_state=keep)
    else:
        command = Save(keep_state=keep)
    place = f"{kind}/{saved.name}"
    return await _send(services, model, save.seq_id, command, place)


async def _send(
    services: Services, model: TinkerModel, sequence: int, command: TrainingCommand, kind: str
) -> Response:
    await asyncio.to_thread(services.trainer.command, model.job, sequence, command)
    return _future(f"{model.id}/{sequence}/{kind}", model.id)


async def training_future(
    services: Services, model_id: str, rest: str
) -> dict[str, Any] | bytes | None:
    """Return the result of a request to a model; None if it takes longer.

    Raises NotFound, BadInput where the request cannot be done, and EngineError where the job broke.
    """
    model = await asyncio.to_thread(services.tinker.model, model_id)
    number_, _, kind = rest.partition("/")
    if number_ in ("create", "load", "unload"):
        made = {"create": "create_model", "unload": "unload_model"}
        return {"type": made.get(number_, "load_weights"), "model_id": model.id, "path": None}
    if not NUMBER.fullmatch(number_):
        raise NotFound(f"no request {rest[:200]!r} of {model.id}", param="request_id")
    state, result = await await_result(services, model.job, int(number_), HOLD)
    if result is None:
        if state in ("queued", "running", "paused"):
            return None
        raise EngineError(
            f"{model.id}: its job {model.job} is {state}; see `cray-agents jobs show`"
        )
    if result.error is not None:
        raise BadInput(result.error)
    if kind == "pass":
        return await asyncio.to_thread(forward_backward.write_result, result)
    if kind == "step":
        return {"metrics": {"grad_norm": result.grad_norm or 0.0}}
    path = f"tinker://{model.id}/{kind}"
    saved = await asyncio.to_thread(services.tinker.saved, path)
    version = await asyncio.to_thread(saved_version, services, saved)
    request = "save_weights" if saved.kind == "weights" else "save_weights_for_sampler"
    if not saved.sampler:
        return {"type": request, "path": saved.path}
    names = {"base_model": model.base_model, "owner": model.owner}
    sampler = Sampler(id=saved.sampler, version=version.id, **names)
    await asyncio.to_thread(services.tinker.add_sampler, sampler)
    return {"type": request, "sampling_session_id": sampler.id}


# ---- lists
@router.post(
    "/api/v1/weights_info",
    Role.train,
    answer=dict[str, Any],
    fails="404 not_found",
    audited=False,
)
async def describe_tinker_weights(services: Current, body: SavedPath) -> Response:
    """Return the base and the kind of saved weights."""
    saved = await asyncio.to_thread(services.tinker.saved, body.tinker_path)
    model = await asyncio.to_thread(services.tinker.model, saved.model)
    fields = {"is_lora": model.rank is not None, "lora_rank": model.rank}
    return json_response({"base_model": model.base_model, **fields})


@router.get("/api/v1/training_runs", Role.train, answer=dict[str, Any])
async def list_tinker_models_trained(
    services: Current,
    limit: Limit = 20,
    offset: Count = 0,
    access_scope: str = "",
    project_id: str = "",
) -> Response:
    """List the models of all scripts, newest first; whatever their scope and project."""
    listing = await asyncio.to_thread(services.tinker.models)
    models = listing.rows[offset : offset + limit]
    rows = [await asyncio.to_thread(_row, services, model) for model in models]
    cursor = {"offset": offset, "limit": limit, "total_count": len(listing.rows)}
    damage = damage_told(listing.damaged)
    return json_response({"training_runs": rows, "cursor": cursor, **damage})


@router.get("/api/v1/training_runs/{model_id}", Role.train, answer=dict[str, Any])
async def retrieve_tinker_training_run(services: Current, model_id: TinkerId) -> Response:
    """Return a model of a script, and what it saved last."""
    model = await asyncio.to_thread(services.tinker.model, model_id)
    return json_response(await asyncio.to_thread(_row, services, model))


@router.get("/api/v1/training_runs/{model_id}/checkpoints", Role.train, answer=dict[str, Any])
async def list_tinker_checkpoints(services: Current, model_id: TinkerId) -> Response:
    """List the weights that a script saved under names, oldest first."""
    await asyncio.to_thread(services.tinker.model, model_id)
    listing = await asyncio.to_thread(services.tinker.list_saved, model_id)
    rows = [_checkpoint(saved) for saved in listing.rows if not saved.sampler]
    return json_response({"checkpoints": rows, **damage_told(listing.damaged)})


def _row(services: Services, model: TinkerModel) -> dict[str, Any]:
    named = [saved for saved in services.tinker.list_saved(model.id).rows if not saved.sampler]
    last = {saved.kind: _checkpoint(saved) for saved in named}
    times = [model.created, *(saved.created for saved in named)]
    return {
        "training_run_id": model.id,
        "base_model": model.base_model,
        "model_owner": model.owner,
        "is_lora": model.rank is not None,
        "lora_rank": model.rank,
        "last_request_time": _time(max(times)),
        "last_checkpoint": last.get("weights"),
        "last_sampler_checkpoint": last.get("sampler_weights"),
        "user_metadata": {name: str(value) for name, value in model.metadata.items()},
    }


def _checkpoint(saved: SavedWeights) -> dict[str, Any]:
    return {
        "checkpoint_id": f"{saved.kind}/{saved.name}",
        "checkpoint_type": "training" if saved.kind == "weights" else "sampler",
        "time": _time(saved.created),
        "tinker_path": saved.path,
        "user_metadata": {name: str(value) for name, value in saved.metadata.items()},
    }


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat()


# ---- versions
def base_version(services: Services, base_model: str) -> ModelVersion:
    """Return the version that a script means by a base model. Raises NotFound.

    Of a hub's `owner/name` the platform serves the name.
    """
    try:
        return services.registry.resolve(base_model.rpartition("/")[2])
    except NotFound as error:
        raise NotFound(
            f"{base_model[:200]!r} is not served here, {error}; serve it with `cray-agents up"
            f" --model DIR --name {base_model.rpartition('/')[2][:100]}`",
            param="base_model",
            code="model_not_found",
        ) from error


def saved_version(services: Services, saved: SavedWeights) -> ModelVersion:
    """Return the version of saved weights; register it first if it is new.

    Raises BadInput for weights that are not written.
    """
    model = services.tinker.model(saved.model)
    base = services.registry.resolve(model.base)
    if saved.published_by == BASE:
        return base
    result = services.trainer.result(model.job, saved.published_by)
    if result is None or result.checkpoint is None:
        why = "they are not written yet" if result is None else result.error
        raise BadInput(f"{saved.path} cannot be used: {why}", param="path")
    for version in services.registry.versions(base.name):  # proven when it was registered
        if version.checkpoint == result.checkpoint:
            return version
    imported = services.registry.import_checkpoint(result.checkpoint)
    return services.registry.register(base.name, *imported, base.prompts)


# ---- helpers
def _begin(
    services: Services,
    caller: Caller,
    new: NewModel,
    job: dict[str, Any],
    base: ModelVersion,
    base_model: str,
    rank: int | None,
) -> TinkerModel:
    """Submit the job of a new model, or find the caller's.

    Raises BadInput, NotFound, JobError, AccessDenied.
    """
    model_id = name_of_model(new.session_id, new.model_seq_id)
    with contextlib.suppress(NotFound):
        check_owner(caller, services.tinker.model(model_id).owner, f"model {model_id!r}")
    if new.optimizer_config is not None and new.optimizer_config.type != "adamw":
        raise BadInput("only adamw is served as an optimizer", param="optimizer_config")
    job = {**job, "commands": model_id, "session": RANKS}
    status = services.trainer.submit(job_spec(services, job, None))
    if status.state in ("failed", "cancelled"):
        raise JobError(f"the job of {model_id} is {status.state}: {status.error or 'no reason'}")
    model = TinkerModel(
        id=model_id,
        job=status.id,
        base=base.id,
        base_model=base_model,
        rank=rank,
        metadata=new.user_metadata or {},
        owner=caller.key_id,
    )
    return services.tinker.add_model(model)


def _job_from(
    services: Services, new: LoadWeights, saved: SavedWeights, version: ModelVersion
) -> dict[str, Any]:
    """Return the fields of a job that goes on from saved weights. Raises NotFound.

    With the optimizer it begins with the state that the save kept, over the same parent. Else the
    saved version is its parent.
    """
    before = services.tinker.model(saved.model)
    if not new.optimizer:
        lora = None if before.rank is None else LoraConfig(rank=before.rank)
        return {"parent": version.id, "hyperparameters": _hyper(lora)}
    folder = services.home.job(before.job)
    if not kept_state(folder / "megatron", saved.sequence).is_dir():
        raise NotFound(
            f"the optimizer's state of {saved.path} is not there: save_state keeps it, until"
            " `maintain prune models` removes the weights; create_training_client_from_state begins"
            " with a new optimizer",
            param="optimizer",
        )
    spec = checksums.read_json(folder / "spec.json")
    return {
        "parent": str(services.home.root / spec["parent"]),
        "hyperparameters": spec["hyperparameters"],
        "state_from": f"{before.job}/{saved.sequence}",
    }


def _hyper(lora: LoraConfig | None) -> dict[str, Any]:
    """Return the hyperparameters of a job by commands. Raises BadInput."""
    hyper: dict[str, Any] = {"steps": 1}
    return hyper if lora is None else {**hyper, "lora": _adapter(lora), "seed": lora.seed or 0}


def _adapter(lora: LoraConfig) -> dict[str, Any]:
    """Return our settings of an adapter. Raises BadInput where there would be none."""
    attention = ["qkv", "proj"] if lora.train_attn else []
    mlp = ["fc1", "fc2"] if lora.train_mlp else []
    if not attention + mlp:
        raise BadInput(
            "adapters of the output layer alone are not served: set train_attn or train_mlp",
            param="lora_config",
        )
    return {"rank": lora.rank, "alpha": ALPHA, "targets": attention + mlp}


def _future(request_id: str, model_id: str) -> Response:
    return json_response({"request_id": request_id, "model_id": model_id})
