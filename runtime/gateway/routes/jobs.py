"""Training jobs: submitted to the Trainer, read from their folders under the home."""

import asyncio
from collections import deque
from pathlib import Path
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response
from starlette.routing import Route

from cray_agents.errors import AccessDenied, BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of, may_name
from cray_agents.runtime.gateway.http.bodies import (
    ID,
    answer,
    field,
    listed,
    number,
    parse,
    path_id,
    query,
    read_json,
)
from cray_agents.runtime.gateway.http.server_paths import without_paths
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.registry import checkpoints
from cray_agents.training_jobs import JobSpec, JobStatus

MOST = 1000  # jobs in a page
Within = tuple[Path, ...] | None  # the folders that a request may name directories of
PARENT = "parent"  # as optimizer_from: the job that made the parent, if its optimizer can go on


def routes(services: Services) -> list[Route]:
    """Everything under /v1/jobs. The Trainer may ask Slurm, hence the threads."""
    trainer = services.trainer

    async def submit(request: Request) -> Response:
        body = await read_json(request, services.max_body)
        within, caller = may_name(request, services.model_roots), caller_of(request)
        if body.get("oversubscribe") and caller.role < Role.admin:
            raise AccessDenied(
                f"the key {caller.name!r} has the role {caller.role.name!r}; `oversubscribe`, "
                "which may bring this machine down, needs 'admin'",
                status=403,
                code="insufficient_permissions",
            )
        spec = await asyncio.to_thread(_spec, services, body, within)
        status = await asyncio.to_thread(trainer.submit, spec)
        return answer(_shown(status))

    async def listing(request: Request) -> Response:
        given = query(request, "limit", "after")
        limit = number(given, "limit", 20, MOST)
        return answer(await asyncio.to_thread(_page, services, given.get("after"), limit))

    async def one(request: Request) -> Response:
        status = await asyncio.to_thread(trainer.status, _job_id(request))
        return answer(_shown(status))

    async def cancel(request: Request) -> Response:
        status = await asyncio.to_thread(trainer.cancel, _job_id(request))
        return answer(_shown(status))

    async def pause(request: Request) -> Response:
        status = await asyncio.to_thread(trainer.pause, _job_id(request))
        return answer(_shown(status))

    async def resume(request: Request) -> Response:
        status = await asyncio.to_thread(trainer.resume, _job_id(request))
        return answer(_shown(status))

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


def _spec(services: Services, body: dict[str, Any], within: Within) -> JobSpec:
    """The spec with its checkpoints resolved; the layout, if it was left out, is the trainer's."""
    dataset = field(body, "dataset", str)
    if not ID.fullmatch(dataset) or not services.home.dataset(dataset).is_dir():
        raise BadInput(f"no dataset {dataset!r}: POST /v1/datasets builds one", param="dataset")
    before = body.get("optimizer_from")
    if isinstance(before, str) and not ID.fullmatch(before):
        raise BadInput(f"no job {before!r}", param="optimizer_from")
    given = {name: value for name, value in body.items() if value is not None}
    hyper = given.get("hyperparameters")
    afresh = isinstance(hyper, dict) and hyper.get("init") == "random"
    filled = {
        **_checkpoint(services, field(body, "parent", str), "parent", afresh, within),
        "code": services.code,
    }
    if "reference" in given:
        reference = field(given, "reference", str)
        filled |= _checkpoint(services, reference, "reference", False, within)
    elif "reference_sha256" in given:
        raise BadInput("reference_sha256 without a reference", param="reference_sha256")
    places = {name: filled[name] for name in ("parent", "reference") if name in filled}
    try:
        spec = parse(JobSpec, {**filled, **given, **places})
    except BadInput as error:
        # what no field alone is to blame for has no effect with this method
        raise BadInput(str(error), param=error.param or "method") from error
    if spec.optimizer_from != PARENT:
        return spec
    return spec.model_copy(update={"optimizer_from": _optimizer_of_parent(services.home, spec)})


def _optimizer_of_parent(home: Home, spec: JobSpec) -> str | None:
    """The job of this root that made the parent, if it trained the same weights as this one will.

    It follows from what never changes: asked again, it is the same job. None with LoRA: each job's
    adapters are new, and those before are merged into the parent.
    """
    hyper = spec.hyperparameters
    if hyper.lora is not None or hyper.init == "random":
        return None
    made = checkpoints.read_manifest(Path(spec.parent)).job
    if made is None or not ID.fullmatch(made):
        return None
    try:
        before = checksums.read_json(home.job(made) / "spec.json")
    except FileNotFoundError:  # it was trained on another root, and brought here
        return None
    return made if before["hyperparameters"].get("lora") is None else None


def _checkpoint(
    services: Services, named: str, what: str, afresh: bool, within: Within
) -> dict[str, str]:
    """A checkpoint's directory and what names it; see JobSpec.

    One that is not of this root is looked at whole: what can never be trained is refused here.
    """
    try:
        directory = services.registry.directory(named, within)
        if afresh:
            sha256 = checkpoints.config_sha256(directory)
            files = checkpoints.settings_in(directory)
        else:
            if not checkpoints.is_ours(services.home, directory):
                checkpoints.inspect(directory, with_manifest=True)
            manifest = checkpoints.read_manifest(directory)
            sha256, files = manifest.weights_sha256, manifest.files
    except (BadInput, NotFound) as error:
        raise type(error)(str(error), param=what, code=error.code) from error
    found = {what: str(directory), f"{what}_sha256": sha256}
    if what == "parent":
        found["parent_settings_sha256"] = checkpoints.settings_sha256(files)
    return found


def _page(services: Services, after: str | None, limit: int) -> dict[str, Any]:
    """The status of each job on a page, the newest first."""
    specs = services.home.jobs.glob("job-*/spec.json")
    found = sorted(((path.stat().st_mtime, path.parent.name) for path in specs), reverse=True)
    ids = [name for _, name in found]
    if after is not None:
        if after not in ids:
            raise BadInput(f"after: no job {after[:200]!r} is listed here", param="after")
        ids = ids[ids.index(after) + 1 :]
    shown = [_shown(services.trainer.status(name)) for name in ids[:limit]]
    return listed(shown, len(ids) > limit)


def _shown(status: JobStatus) -> dict[str, Any]:
    """A status as clients see it: what its error says of the host's files are their names."""
    shown = status.model_dump(mode="json")
    return {**shown, "error": status.error and without_paths(status.error)}


def _events(path: Path) -> list[Any]:
    """The events of a job; a last line that is still being written is left out."""
    if not path.is_file():
        return []
    return list(checksums.read_lines(path))


def _tail(path: Path, lines: int) -> str:
    if not path.is_file():
        return ""
    with path.open(encoding="utf-8", errors="replace") as file:
        return "".join(deque(file, maxlen=lines))
