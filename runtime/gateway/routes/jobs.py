"""Training jobs: submitted to the Trainer, read from their folders under the home."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cray_agents.errors import BadInput, NotFound
from cray_agents.records import JobSpec
from cray_agents.runtime import checkpoints
from cray_agents.runtime.gateway.bodies import (
    ID,
    answer,
    field,
    number,
    parse,
    path_id,
    query,
    read_json,
)
from cray_agents.runtime.gateway.services import Services


def routes(services: Services) -> list[Route]:
    """Everything under /v1/jobs. The Trainer may ask Slurm, hence the threads."""
    trainer = services.trainer

    async def submit(request: Request) -> Response:
        body = await read_json(request, services.max_body)
        spec = await asyncio.to_thread(_spec, services, body)
        status = await asyncio.to_thread(trainer.submit, spec)
        return answer(status.model_dump(mode="json"))

    async def listing(request: Request) -> Response:
        return answer({"data": await asyncio.to_thread(_all, services)})

    async def one(request: Request) -> Response:
        status = await asyncio.to_thread(trainer.status, _job_id(request))
        return answer(status.model_dump(mode="json"))

    async def cancel(request: Request) -> Response:
        status = await asyncio.to_thread(trainer.cancel, _job_id(request))
        return answer(status.model_dump(mode="json"))

    async def pause(request: Request) -> Response:
        status = await asyncio.to_thread(trainer.pause, _job_id(request))
        return answer(status.model_dump(mode="json"))

    async def resume(request: Request) -> Response:
        status = await asyncio.to_thread(trainer.resume, _job_id(request))
        return answer(status.model_dump(mode="json"))

    async def events(request: Request) -> Response:
        after = number(query(request, "after"), "after", 0)
        folder = _folder(services, _job_id(request))
        lines = await asyncio.to_thread(_events, folder / "events.jsonl")
        return answer({"data": lines[after:], "last": max(after, len(lines))})

    async def logs(request: Request) -> Response:
        tail = number(query(request, "tail"), "tail", 200)
        folder = _folder(services, _job_id(request))
        return PlainTextResponse(await asyncio.to_thread(_tail, folder / "log.txt", tail))

    return [
        Route("/v1/jobs", listing, methods=["GET"]),
        Route("/v1/jobs", submit, methods=["POST"]),
        Route("/v1/jobs/{job_id}", one),
        Route("/v1/jobs/{job_id}/events", events),
        Route("/v1/jobs/{job_id}/logs", logs),
        Route("/v1/jobs/{job_id}/cancel", cancel, methods=["POST"]),
        Route("/v1/jobs/{job_id}/pause", pause, methods=["POST"]),
        Route("/v1/jobs/{job_id}/resume", resume, methods=["POST"]),
    ]


def _job_id(request: Request) -> str:
    return path_id(request, "job_id", "job")


def _folder(services: Services, job_id: str) -> Path:
    folder = services.home.job(job_id)
    if not folder.is_dir():
        raise NotFound(f"no job {job_id!r}", param="job_id")
    return folder


def _spec(services: Services, body: dict[str, Any]) -> JobSpec:
    """The spec with its parent resolved, and what the caller left open filled in."""
    dataset = field(body, "dataset", str)
    if not ID.fullmatch(dataset) or not services.home.dataset(dataset).is_dir():
        raise BadInput(f"no dataset {dataset!r}: POST /v1/datasets builds one", param="dataset")
    before = body.get("optimizer_from")
    if isinstance(before, str) and not ID.fullmatch(before):
        raise BadInput(f"no job {before!r}", param="optimizer_from")
    parent = services.registry.directory(field(body, "parent", str))
    manifest = checkpoints.read_manifest(parent)
    filled = {
        "parent_sha256": manifest.weights_sha256,
        "code": services.code,
        "layout": services.layout.model_dump(),
    }
    given = {name: value for name, value in body.items() if value is not None}
    return parse(JobSpec, {**filled, **given, "parent": str(parent)})


def _all(services: Services) -> list[dict[str, Any]]:
    """Every job's status, oldest first."""
    if not services.home.jobs.is_dir():
        return []
    folders = [path for path in services.home.jobs.glob("job-*") if path.is_dir()]
    folders.sort(key=lambda path: path.stat().st_mtime)
    return [services.trainer.status(path.name).model_dump(mode="json") for path in folders]


def _events(path: Path) -> list[Any]:
    """The events of a job; a last line that is still being written is left out."""
    if not path.is_file():
        return []
    lines = path.read_bytes().split(b"\n")[:-1]
    return [orjson.loads(line) for line in lines if line]


def _tail(path: Path, lines: int) -> str:
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=lines))
