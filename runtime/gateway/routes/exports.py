"""Exports: datasets and runs in foreign formats, streamed from a process that makes them.

A failure before the first byte is an error. A later one breaks the connection off, so that nobody
takes half an export for a whole one. Read next: runtime/exports/export_process.py, the process.
"""

import asyncio
import logging
import os
from asyncio.subprocess import Process
from collections.abc import AsyncIterator, Callable
from functools import partial
from typing import Annotated, Any, Literal

import orjson
from fastapi import Query
from pydantic import Field
from starlette.responses import Response, StreamingResponse
from starlette.types import Receive, Scope, Send

from cray_agents import errors
from cray_agents.errors import (
    BadInput,
    CrayError,
    NotFound,
    SetupError,
    StoreError,
    TooManyRequests,
)
from cray_agents.processes import python
from cray_agents.records import StrictRecord
from cray_agents.runtime.exports.export_process import LINES, PAGE, PARQUET, TAR, ZIP
from cray_agents.runtime.exports.exporter import FORMATS
from cray_agents.runtime.gateway.http.api_keys import Role
from cray_agents.runtime.gateway.http.fields import DatasetId
from cray_agents.runtime.gateway.http.routing import BINARY, Router
from cray_agents.runtime.gateway.routes.trajectories import WhichRuns
from cray_agents.runtime.gateway.services import Current, Services

log = logging.getLogger(__name__)

MAX_RUNNING = 4  # exports at once: each takes a core
RETRY_SECONDS = 10.0
PIECE = 1 << 18  # bytes sent at a time
TEXT = {"type": "string"}
MEDIA = {LINES: TEXT, PAGE: TEXT, PARQUET: BINARY, TAR: BINARY, ZIP: BINARY}
FAILS = "400 unknown_format, 400 unsupported_export, 400 export_loss, 429 rate_limit_exceeded"

router = Router("Training")


class ExportRules(StrictRecord):
    """The parameters of a query for an export: the format, and the rules for losses."""

    format: str = Field(
        "jsonl", json_schema_extra={"enum": list(FORMATS)}, description="`jsonl` unless given."
    )
    strict: bool = Field(False, description="A loss is an error.")
    allow: list[str] = Field(default_factory=list, description="Losses that strict allows.")
    skip_missing: bool = Field(False, description="Leave out runs that were pruned or are damaged.")
    skip_unsupported: bool = Field(
        False, description="Leave out runs that the format cannot carry."
    )

    @property
    def rules(self) -> dict[str, Any]:
        """The fields above, without what else the query asks."""
        return self.model_dump(include=set(ExportRules.model_fields))


class DatasetExport(ExportRules):
    """The parameters of a query for an export of a training set."""

    split: Literal["train", "validation"] = "train"


class RunExport(ExportRules, WhichRuns):
    """The parameters of a query for an export of runs."""


@router.get(
    "/v1/datasets/{dataset_id}/export",
    Role.train,
    media=MEDIA,
    fails=f"404 not_found, 400 missing_runs, 400 no_pairs, {FAILS}",
)
async def export_dataset(
    services: Current, dataset_id: DatasetId, query: Annotated[DatasetExport, Query()]
) -> Response:
    """Stream a training set's runs, pairs or tokens in another format.

    Lines of JSON, a page (html), a Parquet file (tokens, verl), a log (eval), or a tar of a folder
    (huggingface).
    `x-export-losses: code=count, ...` lists the losses of the format, where they are known before
    the first byte: with `strict`, in Parquet, and where the export is small. An export that fails
    later ends with a broken connection, never with a short answer that looks whole.
    """
    job = {**query.rules, "dataset": dataset_id, "split": query.split}
    return await _export(services, job)


@router.get("/v1/trajectories/export", Role.train, media=MEDIA, fails=FAILS)
async def export_runs(services: Current, query: Annotated[RunExport, Query()]) -> Response:
    """Stream the matching runs in another format.

    Formats, losses and failures are those of a training set's export.
    """
    return await _export(services, {**query.rules, "filter": query.filter.model_dump()})


async def _export(services: Services, job: dict[str, Any]) -> Response:
    running, one = services.exports, object()
    if len(running) >= MAX_RUNNING:
        raise TooManyRequests(
            f"{MAX_RUNNING} exports are under way: come again when one is done",
            retry_after=RETRY_SECONDS,
        )
    running.add(one)  # before its process starts: others ask meanwhile
    try:
        process = await _start()
        try:
            head = await _read_head(process, {"home": str(services.home.root), **job})
        except BaseException:
            await _end(process)
            raise
    except BaseException:
        running.discard(one)
        raise
    return ExportResponse(process, head, partial(running.discard, one))


class ExportResponse(StreamingResponse):
    """The output of an export process, which ends with the client; `ended` is then called."""

    def __init__(self, process: Process, head: dict[str, Any], ended: Callable[[], None]) -> None:
        headers = {"content-disposition": f'attachment; filename="{head["name"]}"'}
        if "length" in head:
            headers["content-length"] = str(head["length"])
        if "losses" in head:
            losses = sorted(head["losses"].items())
            headers["x-export-losses"] = ", ".join(f"{code}={count}" for code, count in losses)
        super().__init__(self._pieces(process), 200, headers, head["type"])
        self._process = process
        self._ended = ended

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """Send the response, then end the process."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._ended()
            await _end(self._process)

    async def _pieces(self, process: Process) -> AsyncIterator[bytes]:
        assert process.stdout is not None
        while piece := await process.stdout.read(PIECE):
            yield piece
        if code := await process.wait():
            raise StoreError(f"an export broke off (exit code {code}): see the platform's log")


async def _start() -> Process:
    argv = python("-m", "cray_agents.runtime.exports.export_process", str(os.getpid()))
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)


async def _read_head(process: Process, job: dict[str, Any]) -> dict[str, Any]:
    """Return the line that the process writes before the export's bytes. Raises CrayError."""
    assert process.stdout is not None and process.stdin is not None
    process.stdin.write(orjson.dumps(job))
    process.stdin.close()
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        code = await process.wait()
        raise StoreError(f"an export failed (exit code {code}): see the platform's log")
    head: dict[str, Any] = orjson.loads(line)
    if "error" in head:
        raise _error_of(head["error"])
    return head


async def _end(process: Process) -> None:
    """End the process; `wait` does not return until its output is read."""
    if process.returncode is None:
        process.kill()
    assert process.stdout is not None
    while await process.stdout.read(PIECE):
        pass
    await process.wait()


def _error_of(report: dict[str, Any]) -> CrayError:
    """Return the error that the process met."""
    kind: type[CrayError] = getattr(errors, report["type"], StoreError)
    if issubclass(kind, BadInput | NotFound):
        return kind(report["message"], param=report["param"], code=report["code"])
    if issubclass(kind, StoreError | SetupError):
        return kind(report["message"])
    return StoreError(report["message"])
