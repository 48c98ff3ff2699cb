"""Datasets and runs in other people's formats, streamed from a process that makes them.

What can be known to fail is an error; what fails later breaks the connection off, so that nobody
takes half an export for a whole one. Read next: runtime/exports/serving.py, the process.
"""

import asyncio
import logging
import os
import sys
from asyncio.subprocess import Process
from collections.abc import AsyncIterator
from typing import Any

import orjson
from starlette.requests import Request
from starlette.responses import Response, StreamingResponse
from starlette.routing import Route
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
from cray_agents.queries import RunFilter
from cray_agents.runtime.gateway.http.bodies import path_id, query
from cray_agents.runtime.gateway.routes.trajectories import FILTERS, one_of, run_query
from cray_agents.runtime.gateway.services import Services

log = logging.getLogger(__name__)

MOST = 4  # exports at once: each takes a core
RETRY_SECONDS = 10.0
PIECE = 1 << 18  # bytes sent at a time
HOW = ("format", "strict", "allow", "skip_missing", "skip_unsupported")
FLAGS = ("strict", "skip_missing", "skip_unsupported")


def routes(services: Services) -> list[Route]:
    """The two exports."""
    running: set[Process] = set()

    async def of_dataset(request: Request) -> Response:
        dataset = path_id(request, "dataset_id", "dataset")
        given = query(request, *HOW, "split")
        asked = {"dataset": dataset, "split": given.get("split", "train")}
        return await _export(request, {**_how(request, given), **asked})

    async def of_runs(request: Request) -> Response:
        given = query(request, *HOW, *FILTERS, "tag")
        wanted = run_query(request, given, None).model_dump(include=set(RunFilter.model_fields))
        return await _export(request, {**_how(request, given), "filter": wanted})

    async def _export(request: Request, asked: dict[str, Any]) -> Response:
        if len(running) >= MOST:
            raise TooManyRequests(
                f"{MOST} exports are under way: come again when one is done",
                retry_after=RETRY_SECONDS,
            )
        process = await _started()
        running.add(process)
        try:
            head = await _asked(process, {"home": str(services.home.root), **asked})
        except BaseException:
            running.discard(process)
            await _ended(process)
            raise
        return Exported(process, head, running)

    return [
        Route("/v1/datasets/{dataset_id}/export", of_dataset, methods=["GET"]),
        Route("/v1/trajectories/export", of_runs, methods=["GET"]),
    ]


class Exported(StreamingResponse):
    """What the process writes, until it ends; it ends with the client."""

    def __init__(self, process: Process, head: dict[str, Any], running: set[Process]) -> None:
        headers = {"content-disposition": f'attachment; filename="{head["name"]}"'}
        if "length" in head:
            headers["content-length"] = str(head["length"])
        if "losses" in head:
            losses = sorted(head["losses"].items())
            headers["x-export-losses"] = ", ".join(f"{code}={count}" for code, count in losses)
        super().__init__(self._pieces(process), 200, headers, head["type"])
        self._process = process
        self._running = running

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        """As of any response."""
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._running.discard(self._process)
            await _ended(self._process)

    async def _pieces(self, process: Process) -> AsyncIterator[bytes]:
        assert process.stdout is not None
        while piece := await process.stdout.read(PIECE):
            yield piece
        if code := await process.wait():
            raise StoreError(f"an export broke off (exit code {code}): see the platform's log")


async def _started() -> Process:
    argv = (sys.executable, "-m", "cray_agents.runtime.exports.export_process", str(os.getpid()))
    pipe = asyncio.subprocess.PIPE
    return await asyncio.create_subprocess_exec(*argv, stdin=pipe, stdout=pipe)


async def _asked(process: Process, asked: dict[str, Any]) -> dict[str, Any]:
    """What the process says of the export before its bytes. Raises CrayError."""
    assert process.stdout is not None and process.stdin is not None
    process.stdin.write(orjson.dumps(asked))
    process.stdin.close()
    line = await process.stdout.readline()
    if not line.endswith(b"\n"):
        code = await process.wait()
        raise StoreError(f"an export failed (exit code {code}): see the platform's log")
    head: dict[str, Any] = orjson.loads(line)
    if "error" in head:
        raise _again(head["error"])
    return head


async def _ended(process: Process) -> None:
    """End the process; what it had written is read, for until then `wait` does not return."""
    if process.returncode is None:
        process.kill()
    assert process.stdout is not None
    while await process.stdout.read(PIECE):
        pass
    await process.wait()


def _again(told: dict[str, Any]) -> CrayError:
    """The error that the process met."""
    kind: type[CrayError] = getattr(errors, told["type"], StoreError)
    if issubclass(kind, BadInput | NotFound):
        return kind(told["message"], param=told["param"], code=told["code"])
    if issubclass(kind, StoreError | SetupError):
        return kind(told["message"])
    return StoreError(told["message"])


def _how(request: Request, given: dict[str, str]) -> dict[str, Any]:
    """The format and the rules for losses. Raises BadInput."""
    flags = {name: one_of(given, name, ("false", "true")) == "true" for name in FLAGS}
    return {
        "format": given.get("format", "jsonl"),
        "allow": request.query_params.getlist("allow"),
        **flags,
    }
