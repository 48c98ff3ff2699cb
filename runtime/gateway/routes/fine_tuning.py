"""OpenAI's fine-tuning jobs: /v1/fine_tuning/jobs; runtime/fine_tuning does the work.

Supervised training and dpo, and only what has an effect: what is not supported is refused by name.
Two things differ from OpenAI. A job's id is a hash of all that decides the resulting weights, and
without a `seed` it is 0, so the same request is the same job, also after it was cancelled: change
the seed to train once more. And the result is the next version `name@N` of the model it was trained
from, or of `suffix`: it answers at /v1/chat/completions by that name. What is promoted is served
on: the first request has it loaded as an adapter or by a spare replica (config's `spare_replicas`);
where neither can be, it is refused at once with what to do (503 model_not_loaded).

OpenAI has no status for a paused job: it is `queued`, and its metadata has `paused: "true"`, which
a list can be filtered by. While it saves and stops it is still `running`. We add to the metadata
`job` (see /v1/jobs/{job}), `scheduler`, and `slurm_job_id` or `scheduler_job_id`.
"""

import asyncio
import re
import time
from collections.abc import Callable
from typing import Any

from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import BadInput
from cray_agents.records import digest
from cray_agents.runtime.fine_tuning.job_events import events
from cray_agents.runtime.fine_tuning.request import CreateJob, as_asked
from cray_agents.runtime.fine_tuning.tuning_jobs import JobState
from cray_agents.runtime.gateway.http.auth import caller_of
from cray_agents.runtime.gateway.http.bodies import (
    answer,
    listed,
    number,
    parse,
    path_id,
    read_json,
)
from cray_agents.runtime.gateway.http.server_paths import without_paths
from cray_agents.runtime.gateway.services import Services

MOST = 1000  # jobs or events in a page
METADATA = re.compile(r"metadata\[(.{1,64})\]")


def routes(services: Services) -> list[Route]:
    """Everything under /v1/fine_tuning/jobs. The trainer may ask Slurm, hence the threads."""
    tuning = services.fine_tuning

    async def create(request: Request) -> Response:
        body = parse(CreateJob, await read_json(request, services.max_body))
        owner = caller_of(request).key_id
        asked = await asyncio.to_thread(
            as_asked, body, services.registry, tuning.files, services.code, owner
        )
        asked = await asyncio.to_thread(tuning.create, asked)
        return await shown(tuning.look, asked.id)

    async def listing(request: Request) -> Response:
        page = await asyncio.to_thread(_list, services, dict(request.query_params))
        for job in page["data"]:
            if job["finished_at"] is None:
                tuning.follow(job["id"])
        return answer(page)

    async def one(request: Request) -> Response:
        return await shown(tuning.look, _job_id(request))

    async def cancel(request: Request) -> Response:
        return await shown(tuning.cancel, _job_id(request))

    async def pause(request: Request) -> Response:
        return await shown(tuning.pause, _job_id(request))

    async def resume(request: Request) -> Response:
        return await shown(tuning.resume, _job_id(request))

    async def shown(act: Callable[[str], JobState], job_id: str) -> Response:
        standing = await asyncio.to_thread(act, job_id)
        if standing.ended is None:
            tuning.follow(job_id)
        return answer(_shown(standing))

    async def told(request: Request) -> Response:
        standing = await asyncio.to_thread(tuning.look, _job_id(request))
        found = await asyncio.to_thread(
            events, services.home, standing.asked, standing.validated, standing.ended
        )
        found = [{**event, "message": without_paths(event["message"])} for event in found]
        return answer(_page(found, _query(request), "event"))

    async def checkpoints(request: Request) -> Response:
        standing = await asyncio.to_thread(tuning.look, _job_id(request))
        return answer(_page(_checkpoints(standing), _query(request), "checkpoint"))

    jobs, job = "/v1/fine_tuning/jobs", "/v1/fine_tuning/jobs/{fine_tuning_job_id}"
    return [
        Route(jobs, listing, methods=["GET"]),
        Route(jobs, create, methods=["POST"]),
        Route(job, one),
        Route(f"{job}/cancel", cancel, methods=["POST"]),
        Route(f"{job}/pause", pause, methods=["POST"]),
        Route(f"{job}/resume", resume, methods=["POST"]),
        Route(f"{job}/events", told),
        Route(f"{job}/checkpoints", checkpoints),
    ]


def _job_id(request: Request) -> str:
    return path_id(request, "fine_tuning_job_id", "fine-tuning job")


def _list(services: Services, given: dict[str, str]) -> dict[str, Any]:
    """A page of jobs, newest first. Only those on it are looked at, unless there is a filter."""
    wanted = {m[1]: given.pop(name) for name in list(given) if (m := METADATA.fullmatch(name))}
    none = given.pop("metadata", None)
    if none not in (None, "null", ""):
        raise BadInput("filter by metadata[key]=value, or metadata=null", param="metadata")
    look, found = services.fine_tuning.look, services.fine_tuning.folder.all()
    if none is not None:
        found = [asked for asked in found if not asked.metadata]
    jobs: list[dict[str, Any]] = [{"id": asked.id} for asked in found]
    if wanted:
        jobs = [_shown(look(asked.id)) for asked in found]
        jobs = [job for job in jobs if wanted.items() <= job["metadata"].items()]
    page = _page(jobs, _known(given), "job")
    if not wanted:
        page["data"] = [_shown(look(job["id"])) for job in page["data"]]
    return page


def _shown(standing: JobState) -> dict[str, Any]:
    asked, validated, ended = standing.asked, standing.validated, standing.ended
    hyperparameters: dict[str, float | str] = {
        "n_epochs": validated.n_epochs if validated else asked.n_epochs,
        "batch_size": (
            validated.spec.hyperparameters.batch_size if validated else asked.batch_size
        ),
        "learning_rate_multiplier": (
            validated.learning_rate_multiplier if validated else asked.learning_rate_multiplier
        ),
    }
    if asked.method == "dpo":
        beta = validated.spec.hyperparameters.preference.beta if validated else asked.beta
        hyperparameters["beta"] = beta
    return {
        "id": asked.id,
        "object": "fine_tuning.job",
        "created_at": int(asked.created),
        "finished_at": int(ended.time) if ended else None,
        "model": asked.model,
        "fine_tuned_model": ended.model if ended else None,
        "organization_id": "cray-agents",
        "status": standing.status,
        "training_file": asked.training_file,
        "validation_file": asked.validation_file,
        "hyperparameters": hyperparameters,
        "method": {"type": asked.method, asked.method: {"hyperparameters": hyperparameters}},
        "trained_tokens": ended.trained_tokens if ended else None,
        "result_files": [ended.result_file] if ended and ended.result_file else [],
        "error": _told(ended.error) if ended and ended.error else None,
        "seed": asked.seed,
        "estimated_finish": _estimate(standing),
        "integrations": [],
        "metadata": {**asked.metadata, **_added(standing)},
    }


def _told(error: dict[str, Any]) -> dict[str, Any]:
    """Why a job failed, without the paths of this machine."""
    return {**error, "message": without_paths(str(error["message"]))}


def _added(standing: JobState) -> dict[str, str]:
    """What we add to the metadata."""
    added = {"paused": "true"} if standing.paused else {}
    if standing.validated is not None:
        added["job"] = standing.validated.spec.id
    if (told := standing.ended or standing.job) is not None:
        added["scheduler"] = told.scheduler
        name = "slurm_job_id" if told.scheduler == "slurm" else "scheduler_job_id"
        added[name] = told.scheduler_job_id
    return {name: value for name, value in added.items() if value}


def _estimate(standing: JobState) -> int | None:
    """When it will have trained its last step, at the pace of its steps so far."""
    job = standing.job
    if standing.status != "running" or job is None or not job.step:
        return None
    return int(time.time() + (job.steps - job.step) * job.seconds / job.step)


def _checkpoints(standing: JobState) -> list[dict[str, Any]]:
    """The final one: what a job saves on its way can be resumed from, and by no engine served."""
    ended = standing.ended
    if ended is None or ended.model is None:
        return []
    metrics = {"step": ended.step, "train_loss": ended.loss}
    if ended.valid_loss is not None:
        metrics |= {"valid_loss": ended.valid_loss, "full_valid_loss": ended.valid_loss}
    return [
        {
            "id": f"ftckpt-{digest([standing.asked.id, ended.step], 24)}",
            "object": "fine_tuning.job.checkpoint",
            "created_at": int(ended.time),
            "fine_tuning_job_id": standing.asked.id,
            "fine_tuned_model_checkpoint": ended.model,
            "step_number": ended.step,
            "metrics": metrics,
        }
    ]


def _query(request: Request) -> dict[str, str]:
    return _known(dict(request.query_params))


def _known(given: dict[str, str]) -> dict[str, str]:
    """The query of a page. An unknown parameter is an error, for it would have no effect."""
    for name in given.keys() - {"after", "limit"}:
        message = f"unknown query parameter {name!r}; there are after, limit"
        raise BadInput(message, param=name, code="unknown_parameter")
    return given


def _page(items: list[dict[str, Any]], given: dict[str, str], what: str) -> dict[str, Any]:
    """The items after the one that the last page ended with."""
    limit, after = number(given, "limit", 20, MOST), given.get("after")
    if after is not None:
        places = [place for place, item in enumerate(items) if item["id"] == after]
        if not places:
            raise BadInput(f"after: no {what} {after[:200]!r} is listed here", param="after")
        items = items[places[0] + 1 :]
    return listed(items[:limit], len(items) > limit)
