"""Missed tool calls: find and count a model's calls that its server did not understand.

A server without the right tool-call parser returns such calls as plain text. The run ends with that
text as its answer, which looks like a bad model. `Agent(tool_calls="auto")` counts them in `parser`
and warns when there are many. It changes to constrained calls by itself when the server refuses
tools altogether. Called by agent/agent.py. Read next: json_tool_calls.py.
"""

import json
import logging
import re
from collections.abc import AsyncIterator, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from cray_agents.engines.chat_completions import Assembly, first_choice, tidy
from cray_agents.engines.json_tool_calls import ConstrainedEngine
from cray_agents.errors import EngineError
from cray_agents.exact_json import bounded, parse_json
from cray_agents.ports import ChatEngine
from cray_agents.records import Message, ModelCall

ToolCalls = Literal["auto", "native", "constrained"]

WARN_AFTER = 3  # failures, if they also are at least
WARN_FROM = 0.1  # of the messages that call tools, or try to

#: Openings of a call in the chat templates of known models. A text with one is an intended call.
_OPENINGS = (
    "<tool_call>", "<function=", "<function_call>", "<|tool_call|>", "<|tool_calls|>",
    "<|python_tag|>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>",
    "<start_function_call>", "[TOOL_CALLS]", "<|action_start|>", "functools[", "```tool_code",
    "<invoke name=",
)  # fmt: skip
#: The text before the JSON of an opened call: nothing, or the tool's name.
_JSON_AHEAD = re.compile(r"[\w.:-]*>?\s*(?=[{\[])")
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_PYTHON = re.compile(r"\[?\s*([\w-]+)\((.*)\)\s*\]?", re.DOTALL)

log = logging.getLogger(__name__)


def unparsed_tool_call(message: Message, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """Return the call of one of the tools that a server left in an assistant's text, if any.

    The text opens a call as models do, or is one as JSON or Python. A call with broken JSON does
    not count: it is the model's mistake, and no parser would understand it.
    """
    text = message.get("content")
    if not tools or message.get("tool_calls") or not isinstance(text, str) or not text:
        return None
    for opening in _OPENINGS:
        if opening in text:
            begin = text.index(opening)
            return text[begin:] if _is_whole_call(text[begin + len(opening) :]) else None
    names = {tool["function"]["name"] for tool in tools}
    for part in (text.strip(), *_FENCED.findall(text)):
        if _called_names(part.strip()) & names:
            return str(part)
    return None


def _is_whole_call(opened: str) -> bool:
    """Return True if the text after an opening is a whole call. Only JSON is checked."""
    opened = opened.strip()
    if ahead := _JSON_AHEAD.match(opened):
        try:
            bounded(json.JSONDecoder().raw_decode(opened, ahead.end())[0])
        except (ValueError, RecursionError):
            return False
    return True


def _called_names(text: str) -> set[str]:
    """Return the names that a text calls, if it consists of calls alone."""
    if spelled := _PYTHON.fullmatch(text):
        return {spelled[1]}
    value = _parse_json(text) if text[:1] in ("{", "[") else None
    items = value if isinstance(value, list) else [value]
    names = set()
    for item in items:
        if not isinstance(item, dict):
            continue
        function = item.get("function")
        call = function if isinstance(function, dict) else item
        if {"arguments", "parameters", "args", "input"} & call.keys():
            names |= {name for key in ("name", "tool", "function") if (name := call.get(key))
                      and isinstance(name, str)}  # fmt: skip
    return names


def _parse_json(text: str) -> Any:
    try:
        return parse_json(text)
    except ValueError:
        return None


@dataclass
class ParserCounts:
    """Counts of messages with tool calls: `calls` that a server's parser understood, `failures`."""

    calls: int = 0
    failures: int = 0

    @property
    def failed(self) -> float:
        """The fraction of messages with a call that was not understood; 0 without any."""
        return self.failures / (self.calls + self.failures) if self.failures else 0.0

    def see(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Count a message; return the call in it that was not understood."""
        missed = unparsed_tool_call(message, tools)
        if missed is not None:
            self.failures += 1
        elif tools and message.get("tool_calls"):
            self.calls += 1
        return missed


def parser_counts(calls: Iterable[ModelCall]) -> ParserCounts:
    """Count over recorded calls, such as `run.calls`."""
    counts = ParserCounts()
    for call in calls:
        counts.see(call.message, call.tools)
    return counts


@dataclass
class ServerCapabilities:
    """Capabilities of a model's `server` as runs observed them; an agent's copies share them.

    `warned` is true after a warning about its parser. `tools` and `schemas` are true while the
    server accepts tools, and a JSON schema for an answer.
    """

    server: Any = None
    parser: ParserCounts = field(default_factory=ParserCounts)
    warned: bool = False
    tools: bool = True
    schemas: bool = True

    def for_engine(self, engine: ChatEngine) -> "ServerCapabilities":
        """Return this object if it is of the engine's server or of none yet, else a new one."""
        server = getattr(engine, "base_url", engine)
        if self.server is None:
            self.server = server
        return self if self.server == server else ServerCapabilities(server)


def with_tool_calls(
    engine: ChatEngine, mode: ToolCalls, server: ServerCapabilities | None = None
) -> ChatEngine:
    """Return the engine for an agent's `tool_calls`; see Agent."""
    if mode == "constrained":
        return ConstrainedEngine(engine)
    return AutoEngine(engine, server) if mode == "auto" else engine


class AutoEngine:
    """An engine that counts tool calls, and constrains them once its server refuses tools."""

    def __init__(self, engine: ChatEngine, server: ServerCapabilities | None = None) -> None:
        self.engine = engine
        self.record = getattr(engine, "record", None)
        self.server = server or ServerCapabilities()
        self._constrained = ConstrainedEngine(engine)

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """See ChatEngine."""
        if not self.server.tools:
            return await self._constrained.chat(request)
        try:
            completion = await self.engine.chat(request)
        except EngineError as error:
            return await self._fall_back(error, request).chat(request)
        self._count(completion, request)
        return completion

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """See ChatEngine."""
        native, assembly = self.server.tools, Assembly()
        engine = self.engine if native else self._constrained
        counted, started = native and bool(request.get("tools")), False
        try:
            async for chunk in engine.stream(request):
                started = True
                if counted:
                    assembly.add(chunk)
                yield chunk
        except EngineError as error:
            if started or not counted:
                raise
            async for chunk in self._fall_back(error, request).stream(request):
                yield chunk
            return
        if counted:
            self._count(assembly.completion(), request)

    def _fall_back(self, error: EngineError, request: Mapping[str, Any]) -> ConstrainedEngine:
        """Change to constrained calls if the server refused tools. Else raise the error."""
        refused = error.status in (400, 404, 422, 501) and "tool" in str(error).lower()
        if not refused or not request.get("tools"):
            raise error
        if self.server.tools:
            log.warning("the model server takes no tools, so calls are constrained: %s", error)
            self.server.tools = False
        return self._constrained

    def _count(self, completion: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        if not request.get("tools"):
            return
        try:
            message = tidy(first_choice(completion)["message"])
        except (EngineError, AttributeError, KeyError, TypeError):
            return  # the agent reads the message next, and raises the error
        server, counts = self.server, self.server.parser
        missed = counts.see(message, request["tools"])
        if missed is None or server.warned or counts.failures < WARN_AFTER:
            return
        if counts.failed < WARN_FROM:
            return
        server.warned = True
        log.warning(
            "%d of %d tool calls of model %s were not understood by its server and became plain "
            "text, the last: %.200r. Serve it with its own parser (vLLM: --tool-call-parser), or "
            'use Agent(tool_calls="constrained")',
            counts.failures,
            counts.calls + counts.failures,
            request.get("model"),
            missed,
        )
