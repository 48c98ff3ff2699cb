"""Replay: record a real model's answers to a file once, and replay them in tests.

    engine = RecordingEngine(OpenAIEngine(url), "tests/answers.jsonl")     # once
    engine = ReplayEngine("tests/answers.jsonl")                           # from then on
    run = await agent.override(engine=engine).run("What is 2 + 2?")
    assert engine.remaining == 0

A line is a request and its answer: `{"request": {...}, "completion" | "chunks" | "error": ...}`.
Headers (run ids, keys) are left out, so the only secrets in a file are those of the conversations.
An agent's requests must equal the recorded ones, in any order. A changed prompt or tool raises an
error with the difference, and has to be recorded anew. See also scripted.py, for answers written by
hand.
"""

import difflib
import json
import threading
from collections.abc import AsyncIterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cray_agents.engines.chat_completions import Assembly, first_choice
from cray_agents.errors import (
    BadInput,
    Corrupt,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    ReplayMismatch,
)
from cray_agents.exact_json import DEEPEST_FOREIGN, dump_json, parse_json
from cray_agents.ports import ChatEngine
from cray_agents.records import canonical
from cray_agents.tasks.record_source import lines_of

_ERROR_TYPES = {kind.__name__: kind for kind in (EngineError, EngineTimeout, EngineUnavailable)}
_IGNORED_KEYS = ("extra_headers", "stream_options")
_CONTEXT = 2  # lines around a difference


class RecordingEngine:
    """An engine that passes requests on to another, and writes them with the answers to a file."""

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
            self._write(request, error=_describe_error(error))
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
            self._write(request, chunks=chunks, error=_describe_error(error))
            raise
        self._write(request, chunks=chunks)

    def _write(self, request: dict[str, Any], **answer: Any) -> None:
        line = dump_json({"request": _comparable(request), **answer}) + b"\n"
        with self._lock, self.path.open("ab") as file:
            file.write(line)


@dataclass(frozen=True)
class _Exchange:
    request: dict[str, Any]
    completion: dict[str, Any] | None = None
    chunks: list[dict[str, Any]] | None = None
    error: dict[str, Any] | None = None


class ReplayEngine:
    """An engine that answers from a file of RecordingEngine, using each line once.

    `remaining` counts the unused lines. An answer recorded whole may be streamed, and the other way
    round. Raises ReplayMismatch, which no run hides, for a request that is not in the file. Raises
    BadInput for a missing file, Corrupt for one of another kind.
    """

    def __init__(self, path: str | Path) -> None:
        self.path = Path(path)
        self._unused = _read_exchanges(self.path)
        self._lock = threading.Lock()

    @property
    def remaining(self) -> int:
        """The number of unused exchanges."""
        return len(self._unused)

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """Return the recorded answer. Raises the error that was recorded in its place."""
        exchange = self._take(request)
        if exchange.error is not None:
            raise _rebuild_error(exchange.error)
        if exchange.completion is not None:
            return exchange.completion
        assembly = Assembly()
        for chunk in exchange.chunks or ():
            assembly.add(chunk)
        return assembly.completion()

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """Yield the recorded chunks, then raise the recorded error, if any."""
        exchange = self._take(request)
        if exchange.completion is not None:
            yield _as_chunk(exchange.completion)
        for chunk in exchange.chunks or ():
            yield chunk
        if exchange.error is not None:
            raise _rebuild_error(exchange.error)

    def _take(self, request: dict[str, Any]) -> _Exchange:
        """Take the first unused exchange with an equal request. Raises ReplayMismatch."""
        wanted = canonical(_comparable(request))
        with self._lock:
            for place, exchange in enumerate(self._unused):
                if canonical(exchange.request) == wanted:
                    return self._unused.pop(place)
        raise ReplayMismatch(self._difference(_comparable(request)))

    def _difference(self, request: dict[str, Any]) -> str:
        if not self._unused:
            return f"{self.path}: all answers were given, and one more request came: {request!r}"
        now = _lines(request)

        def likeness(exchange: _Exchange) -> float:
            return difflib.SequenceMatcher(None, _lines(exchange.request), now).ratio()

        nearest = max(self._unused, key=likeness)
        changed = difflib.unified_diff(
            _lines(nearest.request), now, "recorded", "asked", lineterm="", n=_CONTEXT
        )
        return (
            f"{self.path} has no answer to this request (left: {self.remaining}); record it anew "
            "if it is meant to differ. To the nearest one:\n" + "\n".join(changed)
        )


def _comparable(request: dict[str, Any]) -> dict[str, Any]:
    """Return a request without its headers and stream options, which differ between runs."""
    return {key: value for key, value in request.items() if key not in _IGNORED_KEYS}


def _lines(request: dict[str, Any]) -> list[str]:
    return json.dumps(request, indent=1, sort_keys=True, ensure_ascii=False).splitlines()


def _describe_error(error: EngineError) -> dict[str, Any]:
    record = {"status": error.status, "param": error.param, "code": error.code}
    return {"type": type(error).__name__, "message": str(error), **record}


def _rebuild_error(record: dict[str, Any]) -> EngineError:
    kind = _ERROR_TYPES.get(record["type"], EngineError)
    fields = {key: record.get(key) for key in ("param", "code")}
    return kind(record["message"], status=record.get("status", 0), **fields)


def _as_chunk(completion: dict[str, Any]) -> dict[str, Any]:
    choice = first_choice(completion)
    delta = dict(choice["message"])
    if calls := delta.get("tool_calls"):
        delta["tool_calls"] = [{**call, "index": index} for index, call in enumerate(calls)]
    streamed = {key: value for key, value in choice.items() if key != "message"} | {"delta": delta}
    return {**completion, "object": "chat.completion.chunk", "choices": [streamed]}


def _read_exchanges(path: Path) -> list[_Exchange]:
    try:
        with path.open("rb") as file:
            return [_Exchange(**parse_json(line, DEEPEST_FOREIGN)) for _, line in lines_of(file)]
    except OSError as error:
        raise BadInput(
            f"no recording can be read at {path} ({error}): make it with RecordingEngine",
            param="path",
        ) from error
    except (ValueError, TypeError) as error:
        raise Corrupt(f"{path} is no recording of a RecordingEngine: {error}") from error
