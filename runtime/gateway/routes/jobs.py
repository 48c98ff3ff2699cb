"""Training jobs: submitted to the Trainer, read from their folders under the home.

The Trainer may call Slurm, so it runs in threads. A client may train by commands, one after the
other, which it numbers. The Trainer writes them into their job's folder, and keeps the job running
while one waits for its result.
"""

import asyncio
import time
from pathlib import Path
from typing import Annotated, Any

from fastapi import Query
from starlette.requests import Request
from starlette.responses import Response

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, paging
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.auth import caller_of, may_name
from cray_agents.runtime.gateway.http.bodies import (
    answer_read,
    field,
    json_response,
    last_lines,
    page,
    parse,
)
from cray_agents.runtime.gateway.http.error_envelope import without_paths
from cray_agents.runtime.gateway.http.fields import (
    ID,
    After,
    Count,
    JobId,
    Limit,
    ListPage,
    RecordSchema,
    Trace,
    names_in,
    numbered,
)
from cray_agents.runtime.gateway.http.routing import Router
from cray_agents.runtime.gateway.services import Current, Services
from cray_agents.runtime.registry import checkpoints, deltas
from cray_agents.runtime.telemetry.timeline import job_timeline
from cray_agents.runtime.views.job_hardware import JobHardware, job_events, job_hardware, job_series
from cray_agents.runtime.views.view_records import JobSeries
from cray_agents.training_commands import CommandRequest, CommandResult
from cray_agents.training_jobs import JobSpec, JobState, JobStatus

MOST_POINTS = 20_000  # of a series
MOST_NODES = 100  # in a page of a job's hardware
LONGEST_WAIT = 30  # seconds that a question for a command's result is held
POLL_INTERVAL = 0.005  # seconds between two looks for it
Roots = tuple[Path, ...] | None  # the folders that a request may name directories of
PARENT = "parent"  # as optimizer_from: the job that made the parent, if its optimizer can go on
ACTION_FAILS = "404 not_found, 400 job_ended, 400 job_not_paused"
Points = Annotated[int, Query(ge=3, le=MOST_POINTS, description="Of each series, at most.")]
Names = Annotated[str, Query(description="Series, with commas; all unless given.")]


class JobEvents(Record):
    """Events of a job. `last`: how many there are, to ask for those after."""

    data: list[Any]
    last: int


class CommandState(Record):
    """The result of a command, null while there is none, and the job's state."""

    state: JobState
    result: CommandResult | None


router = Router("Training")


@router.get("/v1/jobs", Role.train, answer=ListPage[JobStatus], long=True)
def list_jobs(services: Current, limit: Limit = 20, after: After = None) -> dict[str, Any]:
    """List the jobs, newest first."""
    specs = services.home.jobs.glob("job-*/spec.json")
    newest = sorted(((path.stat().st_mtime, path.parent.name) for path in specs), reverse=True)
    ids = paging.behind([name for _, name in newest], str, after, "job")
    listing = checksums.list_whole(ids, lambda name: _public(services.trainer.status(name)), limit)
    return page(listing.rows, listing.has_more, damaged=listing.damaged)


@router.post(
    "/v1/jobs",
    Role.train,
    answer=JobStatus,
    fails="400 invalid_value, 404 model_not_found",
)
async def create_job(
    services: Current,
    request: Request,
    body: Annotated[dict[str, Any], RecordSchema(JobSpec, ["parent", "hyperparameters"])],
) -> Response:
    """Train on a dataset.

    The same spec is the same job. `parent`, `reference` and `teacher`: a name, `name@N`, or a
    checkpoint's id or directory. Their hashes and `code` are filled in where they are left out. A
    spec without a `layout` gets one of the trainer's, and the event `layout` says why that one. One
    without a `dtype` gets bfloat16 on GPUs and float32 on CPUs, and one without
    `max_tokens_per_microbatch` what a GPU's memory takes, or 4,096 on CPUs; the job's id counts
    both. A failed job is tried again where it is to run otherwise: another layout, `recompute`,
    `save_every`, `keep`, `evaluate_every` or `logprob_limit`. A layout that takes more cores,
    memory or GPUs than there are is refused without `oversubscribe` (role admin). `optimizer_from`
    may be `parent`: the job that made the parent, if it did so here and both train the same
    weights: all of them, or adapters of the same `lora`.
    """
    roots = may_name(request, services.model_roots)
    if body.get("oversubscribe"):
        act = "`oversubscribe`, which may bring this machine down,"
        caller_of(request).check_role(Role.admin, act)
    spec = await asyncio.to_thread(job_spec, services, body, roots)
    return _status(await asyncio.to_thread(services.trainer.submit, spec))


@router.get("/v1/jobs/{job_id}", Role.train, answer=JobStatus)
async def retrieve_job(services: Current, job_id: JobId) -> Response:
    """Return the status of a job."""
    return _status(await asyncio.to_thread(services.trainer.status, job_id))


@router.get("/v1/jobs/{job_id}/spec", Role.train, answer=dict[str, Any])
def read_job_spec(services: Current, job_id: JobId) -> dict[str, Any]:
    """Return what a job was asked to do, as it was recorded: a JobSpec, without folders."""
    try:
        spec: dict[str, Any] = checksums.read_json(services.home.job(job_id) / "spec.json")
    except FileNotFoundError:
        raise NotFound(f"no job {job_id!r}", param="job_id") from None
    models = ("parent", "reference", "teacher")
    return spec | {name: Path(spec[name]).name for name in models if spec.get(name)}


@router.get("/v1/jobs/{job_id}/events", Role.train, answer=JobEvents)
def list_job_events(services: Current, job_id: JobId, after: Count = 0) -> dict[str, Any]:
    """List a job's events, after the first `after`."""
    _folder(services, job_id)
    lines = job_events(services.home, job_id)
    events = [_without_paths(event) for event in lines[after:]]
    return {"data": events, "last": max(after, len(lines))}


@router.get("/v1/jobs/{job_id}/series", Role.train, answer=JobSeries)
def read_job_series(
    services: Current, job_id: JobId, names: Names = "", points: Points = 600
) -> Any:
    """Return a job's measures by step, thinned for a chart without losing its peaks (LTTB)."""
    _folder(services, job_id)
    return job_series(job_id, job_events(services.home, job_id), names_in(names), points)


@router.get("/v1/jobs/{job_id}/hardware", Role.train, answer=JobHardware)
def read_job_hardware(
    services: Current,
    job_id: JobId,
    names: Names = "",
    points: Points = 200,
    limit: Annotated[int, Query(ge=0, le=MOST_NODES, description="How many nodes.")] = 8,
    after: Annotated[str, Query(description="The last node of the page before.")] = "",
) -> JobHardware:
    """Return a job on its nodes: GPUs and network ports over time, the slowest rank, why it waits.

    A training job's launcher samples each node every ten seconds. `slurm` is the cluster's own
    account, where it keeps one.
    """
    _folder(services, job_id)
    status, wanted = services.trainer.status(job_id), names_in(names)
    return job_hardware(
        services.home, status, wanted, points, limit=limit, after=after, now=time.time()
    )


@router.get("/v1/jobs/{job_id}/timeline", Role.train, answer=Trace)
def read_job_timeline(services: Current, job_id: JobId) -> dict[str, Any]:
    """Return a job's attempts, steps and saves in Chrome's trace format, which Perfetto opens."""
    _folder(services, job_id)
    events = [_without_paths(event) for event in job_events(services.home, job_id)]
    return job_timeline(job_id, events)


@router.get("/v1/jobs/{job_id}/logs", Role.train, media={"text/plain": {"type": "string"}})
def read_job_log(
    services: Current,
    job_id: JobId,
    tail: Annotated[Count, Query(description="How many lines.")] = 200,
) -> bytes:
    """Return the last lines of a job's log."""
    return last_lines(_folder(services, job_id) / "log.txt", tail)


@router.post("/v1/jobs/{job_id}/cancel", Role.train, answer=JobStatus, fails=ACTION_FAILS)
async def cancel_job(services: Current, job_id: JobId) -> Response:
    """End a job for good."""
    return _status(await asyncio.to_thread(services.trainer.cancel, job_id))


@router.post("/v1/jobs/{job_id}/pause", Role.train, answer=JobStatus, fails=ACTION_FAILS)
async def pause_job(services: Current, job_id: JobId) -> Response:
    """Let a job save and stop.

    It is `running` until it has saved and its processes have ended, then `paused`.
    """
    return _status(await asyncio.to_thread(services.trainer.pause, job_id))


@router.post("/v1/jobs/{job_id}/resume", Role.train, answer=JobStatus, fails=ACTION_FAILS)
async def resume_job(services: Current, job_id: JobId) -> Response:
    """Continue a paused job from its last save."""
    return _status(await asyncio.to_thread(services.trainer.resume, job_id))


# ---- training commands
@router.post(
    "/v1/jobs/{job_id}/commands",
    Role.train,
    answer=dict[str, str | int],
    fails="400 invalid_value",
    max_body="runs",
    audited=False,
)
async def send_training_command(services: Current, job_id: JobId, body: CommandRequest) -> Response:
    """Add the next command of a job that trains by commands.

    `sequence` counts a job's commands from 1. Sending the same command again changes nothing.
    Another command under a number that is taken is refused: a second client writes to the job.
    """
    await asyncio.to_thread(services.trainer.command, job_id, body.sequence, body.command)
    return json_response({"job_id": job_id, "sequence": body.sequence})


@router.get("/v1/jobs/{job_id}/commands", Role.train, answer=dict[str, str | int])
async def count_training_commands(services: Current, job_id: JobId) -> Response:
    """Return the number of a job's newest command, `last`, 0 without one."""
    last = await asyncio.to_thread(services.trainer.last_command, job_id)
    return json_response({"job_id": job_id, "last": last})


@router.get("/v1/jobs/{job_id}/commands/{sequence}", Role.train, answer=CommandState)
async def read_training_result(
    services: Current,
    request: Request,
    job_id: JobId,
    sequence: Annotated[int, numbered("command", "sequence")],
    wait: Annotated[
        int, Query(ge=0, le=LONGEST_WAIT, description="Seconds to wait for the result.")
    ] = 0,
) -> Response:
    """Return the result of a command, null while there is none, and the job's state."""
    state, result = await await_result(services, job_id, sequence, wait)
    return await answer_read(request, lambda: CommandState(state=state, result=result))


async def await_result(
    services: Services, job_id: str, sequence: int, seconds: float
) -> tuple[JobState, CommandResult | None]:
    """Return a job's state, and a command's result if it comes in time. Raises NotFound."""
    end, trainer = time.monotonic() + seconds, services.trainer
    state = (await asyncio.to_thread(trainer.status, job_id)).state  # starts what died
    while (result := await asyncio.to_thread(trainer.result, job_id, sequence)) is None:
        if time.monotonic() > end:
            break
        await asyncio.sleep(POLL_INTERVAL)
    return state, result


def _folder(services: Services, job_id: str) -> Path:
    folder = services.home.job(job_id)
    if not folder.is_dir():
        raise NotFound(f"no job {job_id!r}", param="job_id")
    return folder


def job_spec(services: Services, body: dict[str, Any], roots: Roots) -> JobSpec:
    """Return the spec with its checkpoints resolved; a missing layout is left to the trainer."""
    by_commands = body.get("commands") is not None
    dataset = "" if by_commands else field(body, "dataset", str)
    if by_commands and body.get("dataset"):
        raise BadInput("a job by commands has no dataset: leave it out", param="dataset")
    if not by_commands and (
        not ID.fullmatch(dataset) or not services.home.dataset(dataset).is_dir()
    ):
        raise BadInput(f"no dataset {dataset!r}: POST /v1/datasets builds one", param="dataset")
    before = body.get("optimizer_from")
    if isinstance(before, str) and not ID.fullmatch(before):
        raise BadInput(f"no job {before!r}", param="optimizer_from")
    given = {name: value for name, value in body.items() if value is not None}
    hyper = given.get("hyperparameters")
    afresh = isinstance(hyper, dict) and hyper.get("init") == "random"
    filled = {
        **_checkpoint(services, field(body, "parent", str), "parent", afresh, roots),
        "code": services.code,
        "dataset": dataset,
        "changes_only": services.delta_checkpoints,
    }
    for role in ("reference", "teacher"):
        if role in given:
            filled |= _checkpoint(services, field(given, role, str), role, False, roots)
        elif (sha256 := f"{role}_sha256") in given:
            raise BadInput(f"{sha256} without a {role}", param=sha256)
    roles = ("parent", "reference", "teacher")
    directories = {name: filled[name] for name in roles if name in filled}
    try:
        spec = parse(JobSpec, {**filled, **given, **directories})
    except BadInput as error:
        # a conflict of several fields: the method decides which of them have an effect
        raise BadInput(str(error), param=error.param or "method") from error
    if (every := spec.publish_every) is not None and not every.prompts:
        prompts = services.registry.prompts_of(field(body, "parent", str))
        every = every.model_copy(update={"prompts": prompts})
        spec = spec.model_copy(update={"publish_every": every})
    if spec.optimizer_from != PARENT:
        return spec
    return spec.model_copy(update={"optimizer_from": _optimizer_of_parent(services.home, spec)})


def _optimizer_of_parent(home: Home, spec: JobSpec) -> str | None:
    """Return the job of this root that made the parent, if it trained the same weights.

    The answer never changes, so the same request is the same job. Adapters are the same weights
    where `lora` is equal.
    """
    hyper = spec.hyperparameters
    if hyper.init == "random":
        return None
    made = checkpoints.read_manifest(Path(spec.parent)).job
    if made is None or not ID.fullmatch(made):
        return None
    try:
        before = checksums.read_json(home.job(made) / "spec.json")
    except FileNotFoundError:  # it was trained on another root, and brought here
        return None
    lora = None if hyper.lora is None else hyper.lora.model_dump(mode="json")
    return made if before["hyperparameters"].get("lora") == lora else None


def _checkpoint(
    services: Services, name: str, param: str, afresh: bool, roots: Roots
) -> dict[str, str]:
    """Return the fields of JobSpec that name a checkpoint: its directory and hashes.

    A checkpoint from outside this root is inspected whole, to refuse here what cannot be trained.
    """
    try:
        directory = services.registry.directory(name, roots)
        if afresh:
            sha256 = checkpoints.config_sha256(directory)
            files = checkpoints.settings_in(directory)
        else:
            if not checkpoints.is_ours(services.home, directory):
                checkpoints.inspect(directory, with_manifest=True)
            deltas.materialize(services.home, directory)
            manifest = checkpoints.read_manifest(directory)
            sha256, files = manifest.weights_sha256, manifest.files
    except (BadInput, NotFound) as error:
        raise type(error)(str(error), param=param, code=error.code) from error
    fields = {param: str(directory), f"{param}_sha256": sha256}
    if param == "parent":
        fields["parent_settings_sha256"] = checkpoints.settings_sha256(files)
    return fields


def _status(status: JobStatus) -> Response:
    return json_response(_public(status))


def _public(status: JobStatus) -> dict[str, Any]:
    """Return a status for clients: its texts name files without their folders."""
    fields = status.model_dump(mode="json")
    error = status.error and without_paths(status.error)
    return {**fields, "error": error, "reason": without_paths(status.reason)}


def _without_paths(event: dict[str, Any]) -> dict[str, Any]:
    """Return a job's event without the paths of this machine in its message."""
    message = event.get("message")
    return {**event, "message": without_paths(message)} if isinstance(message, str) else event
