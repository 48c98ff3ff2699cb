"""OpenAI's fine-tuning jobs: /v1/fine_tuning/jobs; runtime/fine_tuning does the work.

Supervised training and dpo, and only fields with an effect: a field without one is refused by name.
Two things differ from OpenAI. First, a job's id is a hash of everything that decides the resulting
weights, and `seed` is 0 by default. So the same request is the same job, also after the job was
cancelled: change the seed to train once more. Second, the result is the next version `name@N` of
the trained model, or of `suffix`, and answers at /v1/chat/completions by that name. Promoted
versions stay served. The first request loads the result as an adapter, or into a spare replica
(config's `spare_replicas`). Where neither is possible, it is refused at once with a remedy (503
model_not_loaded).

OpenAI has no status for a paused job. Here it is `queued`, and its metadata has `paused: "true"`,
which a list can be filtered by. While it saves and stops it is still `running`. We add to the
metadata `job` (see /v1/jobs/{job}), `scheduler`, and `slurm_job_id` or `scheduler_job_id`. The
trainer may call Slurm, so it runs in threads.
"""

import asyncio
import re
import time
from collections.abc import Callable, Sequence
from typing import Annotated, Any, Literal

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput
from cray_agents.records import Record, digest
from cray_agents.runtime.disk import journal, paging
from cray_agents.runtime.disk.checksums import list_whole
from cray_agents.runtime.fine_tuning.job_events import events
from cray_agents.runtime.fine_tuning.job_records import CreateJob, resolve_request
from cray_agents.runtime.fine_tuning.tuning_jobs import JobState
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import check_known, json_response, page
from cray_agents.runtime.gateway.http.error_envelope import without_paths
from cray_agents.runtime.gateway.http.fields import After, Limit, ListPage, named
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.services import Current, Services
from cray_agents.training_jobs import JobVersion, versions_in

METADATA = re.compile(r"metadata\[(.{1,64})\]")
ACTION_FAILS = "404 not_found, 400 job_ended, 400 job_not_started, 400 job_not_paused"
TuningId = Annotated[str, named("fine-tuning job", "fine_tuning_job_id")]

router = Router("Training")


class FineTuningJob(Record):
    """A fine-tuning job."""

    id: str
    object: Literal["fine_tuning.job"]
    created_at: int
    finished_at: int | None
    model: str
    fine_tuned_model: str | None
    status: Literal["validating_files", "queued", "running", "succeeded", "failed", "cancelled"]
    training_file: str
    validation_file: str | None
    hyperparameters: dict[str, Any]
    method: dict[str, Any]
    trained_tokens: int | None
    result_files: list[str]
    error: dict[str, Any] | None
    seed: int
    metadata: dict[str, Any]


class FineTuningEvent(Record):
    """An event of a fine-tuning job."""

    id: str
    object: Literal["fine_tuning.job.event"]
    created_at: int
    level: Literal["info", "warn", "error"]
    message: str


class FineTuningCheckpoint(Record):
    """Weights that a fine-tuning job published: while it trained, or at its end."""

    id: str
    object: Literal["fine_tuning.job.checkpoint"]
    step_number: int


@router.get("/v1/fine_tuning/jobs", Role.train, answer=ListPage[FineTuningJob], own_query=True)
async def list_fine_tuning_jobs(
    services: Current,
    request: Request,
    after: After = None,
    limit: Limit = 20,
    metadata: Annotated[str | None, Query(description="`null`: jobs without any.")] = None,
) -> Response:
    """List the fine-tuning jobs, newest first.

    Filter with `metadata[key]=value`; `metadata=null` for jobs without any.
    """
    if metadata not in (None, "null", ""):
        raise BadInput("filter by metadata[key]=value, or metadata=null", param="metadata")
    params = dict(request.query_params)
    filters = {m[1]: params.pop(name) for name in list(params) if (m := METADATA.fullmatch(name))}
    check_known(params, ("after", "limit", "metadata"))
    none = metadata is not None
    jobs = await asyncio.to_thread(_list, services, filters, none, after, limit)
    for job in jobs["data"]:
        if job["finished_at"] is None:
            services.fine_tuning.follow(job["id"])
    return json_response(jobs)


@router.post(
    "/v1/fine_tuning/jobs",
    Role.train,
    answer=FineTuningJob,
    fails=(
        "404 model_not_found, 400 invalid_training_file, 400 invalid_validation_file, "
        "400 unsupported_value, 400 job_exists"
    ),
)
async def create_fine_tuning_job(services: Current, request: Request, body: CreateJob) -> Response:
    """Train on an uploaded file (OpenAI's API, supervised and dpo).

    The same request is the same job. The job is answered at once, and then validates its files. The
    result is a version that waits for promotion: `fine_tuned_model`, the next one of `suffix` or of
    the model's own name.
    """
    tuning = services.fine_tuning
    trainer = (services.code, services.trainer)
    owner = caller_of(request).key_id
    spec = await asyncio.to_thread(
        resolve_request, body, services.registry, tuning.files, *trainer, owner
    )
    spec = await asyncio.to_thread(tuning.folder.create, spec)
    return await _act(services, tuning.look, spec.id)


@router.get("/v1/fine_tuning/jobs/{fine_tuning_job_id}", Role.train, answer=FineTuningJob)
async def retrieve_fine_tuning_job(services: Current, fine_tuning_job_id: TuningId) -> Response:
    """Return the state of a fine-tuning job.

    A paused job is `queued`, with `paused: "true"` in its metadata.
    """
    return await _act(services, services.fine_tuning.look, fine_tuning_job_id)


@router.post(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/cancel",
    Role.train,
    answer=FineTuningJob,
    fails=ACTION_FAILS,
)
async def cancel_fine_tuning_job(services: Current, fine_tuning_job_id: TuningId) -> Response:
    """End a fine-tuning job for good."""
    return await _act(services, services.fine_tuning.cancel, fine_tuning_job_id)


@router.post(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/pause",
    Role.train,
    answer=FineTuningJob,
    fails=ACTION_FAILS,
)
async def pause_fine_tuning_job(services: Current, fine_tuning_job_id: TuningId) -> Response:
    """Let a fine-tuning job save and stop."""
    return await _act(services, services.fine_tuning.pause, fine_tuning_job_id)


@router.post(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/resume",
    Role.train,
    answer=FineTuningJob,
    fails=ACTION_FAILS,
)
async def resume_fine_tuning_job(services: Current, fine_tuning_job_id: TuningId) -> Response:
    """Continue a paused fine-tuning job from its last save."""
    return await _act(services, services.fine_tuning.resume, fine_tuning_job_id)


@router.get(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/events", Role.train, answer=ListPage[FineTuningEvent]
)
async def list_fine_tuning_events(
    services: Current, fine_tuning_job_id: TuningId, after: After = None, limit: Limit = 20
) -> Response:
    """List the events of a fine-tuning job, newest first."""
    state = await asyncio.to_thread(services.fine_tuning.look, fine_tuning_job_id)
    spec, validated, ended = state.request, state.validated, state.ended
    rows = await asyncio.to_thread(events, services.home, spec, validated, ended)
    rows = [{**event, "message": without_paths(event["message"])} for event in rows]
    return json_response(page(*paging.after(rows, _id_of, after, limit, "event")))


@router.get(
    "/v1/fine_tuning/jobs/{fine_tuning_job_id}/checkpoints",
    Role.train,
    answer=ListPage[FineTuningCheckpoint],
)
async def list_fine_tuning_checkpoints(
    services: Current, fine_tuning_job_id: TuningId, after: After = None, limit: Limit = 20
) -> Response:
    """List the versions that a fine-tuning job published, the newest first.

    A job that was created with the hyperparameter `publish_every` publishes one after so many
    steps, and each job one at its end. Each is a model of its own, `fine_tuned_model_checkpoint`.
    """
    state = await asyncio.to_thread(services.fine_tuning.look, fine_tuning_job_id)
    rows = await asyncio.to_thread(_checkpoints, services, state)
    return json_response(page(*paging.after(rows, _id_of, after, limit, "checkpoint")))


async def _act(services: Services, act: Callable[[str], JobState], job_id: str) -> Response:
    """Answer with the job's state after an act, and follow it until it ends."""
    state = await asyncio.to_thread(act, job_id)
    if state.ended is None:
        services.fine_tuning.follow(job_id)
    return json_response(_render(state))


def _list(
    services: Services, filters: dict[str, str], none: bool, after: str | None, limit: int
) -> dict[str, Any]:
    """Return a page of jobs, newest first. Without a filter only jobs on the page are read.

    `filters`: of the metadata; `none`: only jobs without any.
    """
    folder = services.fine_tuning.folder.all()
    ids: Sequence[str] = [spec.id for spec in folder.rows if not none or not spec.metadata]
    damaged = list(folder.damaged)

    def read(job_id: str) -> dict[str, Any]:
        return _render(services.fine_tuning.look(job_id))

    if filters:
        jobs = list_whole(ids, read)
        damaged += jobs.damaged
        ids = [job["id"] for job in jobs.rows if filters.items() <= job["metadata"].items()]
    rest = list_whole(paging.behind(ids, str, after, "job"), read, limit)
    return page(rest.rows, rest.has_more, damaged=[*damaged, *rest.damaged])


def _render(state: JobState) -> dict[str, Any]:
    spec, validated, ended = state.request, state.validated, state.ended
    hyperparameters: dict[str, float | str] = {
        "n_epochs": validated.n_epochs if validated else spec.n_epochs,
        "batch_size": (validated.spec.hyperparameters.batch_size if validated else spec.batch_size),
        "learning_rate_multiplier": (
            validated.learning_rate_multiplier if validated else spec.learning_rate_multiplier
        ),
    }
    if spec.publish_every != "auto":
        hyperparameters["publish_every"] = spec.publish_every
    if spec.method == "dpo":
        beta = validated.spec.hyperparameters.preference.beta if validated else spec.beta
        hyperparameters["beta"] = beta
    return {
        "id": spec.id,
        "object": "fine_tuning.job",
        "created_at": int(spec.created),
        "finished_at": int(ended.time) if ended else None,
        "model": spec.model,
        "fine_tuned_model": ended.model if ended else None,
        "organization_id": "cray-agents",
        "status": state.status,
        "training_file": spec.training_file,
        "validation_file": spec.validation_file,
        "hyperparameters": hyperparameters,
        "method": {"type": spec.method, spec.method: {"hyperparameters": hyperparameters}},
        "trained_tokens": ended.trained_tokens if ended else None,
        "result_files": [ended.result_file] if ended and ended.result_file else [],
        "error": _public_error(ended.error) if ended and ended.error else None,
        "seed": spec.seed,
        "estimated_finish": _estimate(state),
        "integrations": [],
        "metadata": {**spec.metadata, **_added(state)},
    }


def _public_error(error: dict[str, Any]) -> dict[str, Any]:
    """Return the error of a job without the paths of this machine."""
    return {**error, "message": without_paths(str(error["message"]))}


def _added(state: JobState) -> dict[str, str]:
    """Return our additions to the metadata."""
    added = {"paused": "true"} if state.paused else {}
    if state.validated is not None:
        added["job"] = state.validated.spec.id
    if (job := state.ended or state.job) is not None:
        added["scheduler"] = job.scheduler
        name = "slurm_job_id" if job.scheduler == "slurm" else "scheduler_job_id"
        added[name] = job.scheduler_job_id
    return {name: value for name, value in added.items() if value}


def _estimate(state: JobState) -> int | None:
    """Return the time of the last step, at the pace of the steps so far."""
    job = state.job
    if state.status != "running" or job is None or not job.step:
        return None
    return int(time.time() + (job.steps - job.step) * job.seconds / job.step)


def _checkpoints(services: Services, state: JobState) -> list[dict[str, Any]]:
    """Return the versions of a job, the newest first. Resume points are none: none serves them."""
    ended, versions = state.ended, list[JobVersion]()
    if state.validated is not None:
        folder = services.home.job(state.validated.spec.id)
        found = versions_in(journal.read(folder / "events.jsonl"))
        own = f"{state.request.name}@"  # of a refused job it is another job's training
        versions = [one for one in found if one.version.startswith(own)]
    if ended is not None and ended.model is not None:
        about = {"step": ended.step, "loss": ended.loss, "validation_loss": ended.valid_loss}
        versions.append(JobVersion(version=ended.model, checkpoint="", time=ended.time, **about))
    return [_checkpoint(state.request.id, version) for version in reversed(versions)]


def _checkpoint(job_id: str, version: JobVersion) -> dict[str, Any]:
    metrics, valid_loss = (
        {"step": version.step, "train_loss": version.loss},
        version.validation_loss,
    )
    if valid_loss is not None:
        metrics |= {"valid_loss": valid_loss, "full_valid_loss": valid_loss}
    return {
        "id": f"ftckpt-{digest([job_id, version.step], 24)}",
        "object": "fine_tuning.job.checkpoint",
        "created_at": int(version.time),
        "fine_tuning_job_id": job_id,
        "fine_tuned_model_checkpoint": version.version,
        "step_number": version.step,
        "metrics": metrics,
    }


def _id_of(row: dict[str, Any]) -> str:
    return str(row["id"])
