"""A model's answers on file: recorded once from a real one, replayed in tests.

    engine = RecordingEngine(OpenAIEngine(url), "tests/answers.jsonl")     # once
    engine = ReplayEngine("tests/answers.jsonl")                           # from then on
    run = await agent.override(engine=engine).run("What is 2 + 2?")
    assert engine.remaining == 0

A line is a request and its answer: `{"request": {...}, "completion" | "chunks" | "error": ...}`.
Headers (run ids, keys) are left out, so a file holds no secret but what was said. What an agent
asks must be exactly what it asked then, in whatever order: a changed prompt or tool shows as a
difference to look at, and is recorded anew. See also scripted.py, for answers written by hand.
"""

import difflib
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import orjson

from cray_agents.engines.chat_completions import Assembly, first_choice
from cray_agents.errors import (
    BadInput,
    Corrupt,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    ReplayMismatch,
)
from cray_agents.ports import ChatEngine
from cray_agents.records import canonical

_ERRORS = {kind.__name__: kind for kind in (EngineError, EngineTimeout, EngineUnavailable)}
_NOT_ASKED = ("extra_headers", "stream_options")
_CONTEXT = 2  # lines around a difference


class RecordingEngine:
    """Passes requests on to an engine, and writes them with their answers to a new file."""

    def __init__(self, engine: ChatEngine, path: str | Path) -> None:
        self.engine = engine
        self.path = Path(path)
        self.record = getattr(engine, "record", None)
        self._lock = threading.Lock()  # agents may run on several event loops
        self.path.parent.mkdir(parents=True, exist_ok=True)
        self.path.write_bytes(b"")

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """See ChatEngine."""
        try:
            completion = await self.engine.chat(request)
        except EngineError as error:
            self._write(request, error=_told(error))
            raise
        self._write(request, completion=completion)
        return completion

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """See ChatEngine. A stream that the caller leaves early is not recorded."""
        chunks: list[dict[str, Any]] = []
        try:
            async for chunk in self.engine.stream(request):
                chunks.append(chunk)
                yield chunk
        except EngineError as error:
            self._write(request, chunks=chunks, error=_told(error))
            raise
        self._write(request, chunks=chunks)

    def _write(self, request: dict[str, Any], **answer: Any) -> None:
        line = orjson.dumps({"request": _bare(request), **answer}) + b"\n"
        with self._lock, self.path.open("ab") as file:
            file.write(line)


@dataclass(frozen=True)
class _Exchange:
    request: dict[str, Any]
    completion: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] | None = None
    error: dict[str, Any] | None = None


class ReplayEngine:
    """Answers from a file that RecordingEngine wrote, each line once.

    `remaining` says how many lines were not asked for yet. What was recorded whole may be streamed
    and the other way round. Raises ReplayMismatch, which no run hides, for a request that is not
    in the file; BadInput for a file that is not there, Corrupt for one of another kind.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._left = _read(self.path)
        self._lock = threading.Lock()

    @property
    def remaining(self) -> int:
        """How many recorded exchanges were not asked for."""
        return len(self._left)

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """The recorded answer. Raises the error that was recorded in its place."""
        found = self._take(request)
        if found.error is not None:
            raise _error(found.error)
        if found.completion is not None:
            return found.completion
        assembly = Assembly()
        for chunk in found.chunks or ():
            assembly.add(chunk)
        return assembly.completion()

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """The recorded chunks, then the error that was recorded, if any."""
        found = self._take(request)
        if found.completion is not None:
            yield _as_chunk(found.completion)
        for chunk in found.chunks or ():
            yield chunk
        if found.error is not None:
            raise _error(found.error)

    def _take(self, request: dict[str, Any]) -> _Exchange:
        """The first unused exchange of this very request."""
        asked = canonical(_bare(request))
        with self._lock:
            for place, exchange in enumerate(self._left):
                if canonical(exchange.request) == asked:
                    return self._left.pop(place)
        raise ReplayMismatch(self._difference(_bare(request)))

    def _difference(self, request: dict[str, Any]) -> str:
        if not self._left:
            return f"{self.path}: all answers were given, and one more request came: {request!r}"
        now = _lines(request)

        def likeness(exchange: _Exchange) -> float:
            return difflib.SequenceMatcher(None, _lines(exchange.request), now).ratio()

        nearest = max(self._left, key=likeness)
        changed = difflib.unified_diff(
            _lines(nearest.request), now, "recorded", "asked", lineterm="", n=_CONTEXT
        )
        return (
            f"{self.path} has no answer to this request (left: {len(self._left)}); record it anew "
            "if it is meant to differ. To the nearest one:\n" + "\n".join(changed)
        )


def _bare(request: dict[str, Any]) -> dict[str, Any]:
    """A request without its headers, which differ from run to run, and how it is answered."""
    return {key: value for key, value in request.items() if key not in _NOT_ASKED}


def _lines(request: dict[str, Any]) -> list[str]:
    return json.dumps(request, indent=1, sort_keys=True, ensure_ascii=False).splitlines()


def _told(error: EngineError) -> dict[str, Any]:
    told = {"status": error.status, "param": error.param, "code": error.code}
    return {"type": type(error).__name__, "message": str(error), **told}


def _error(told: dict[str, Any]) -> EngineError:
    kind = _ERRORS.get(told["type"], EngineError)
    fields = {key: told.get(key) for key in ("param", "code")}
    return kind(told["message"], status=told.get("status", 0), **fields)


def _as_chunk(completion: dict[str, Any]) -> dict[str, Any]:
    choice = first_choice(completion)
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
    streamed = {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}
    return {**completion, "object": "chat.completion.chunk", "choices": [streamed]}


def _read(path: Path) -> list[_Exchange]:
    try:
        lines = path.read_bytes().splitlines()
    except OSError as error:
        raise BadInput(
            f"no recording can be read at {path} ({error}): make it with RecordingEngine",
            param="path",
        ) from error
    try:
        return [_Exchange(**orjson.loads(line)) for line in lines]
    except (orjson.JSONDecodeError, TypeError) as error:
        raise Corrupt(f"{path} is no recording of a RecordingEngine: {error}") from error
