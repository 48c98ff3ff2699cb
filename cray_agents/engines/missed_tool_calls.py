"""Tool calls that a model wrote and its server did not understand: found, counted, told.

A server without the right tool-call parser hands them over as plain text, and the run ends with
that text as its answer, which looks like a bad model. `Agent(tool_calls="auto")` counts them in
`parser`, warns when there are many, and changes to constrained calls by itself when the server
refuses tools outright. Called by agent.py. Read next: constrained.py.
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
from cray_agents.ports import ChatEngine
from cray_agents.records import Message, ModelCall

ToolCalls = Literal["auto", "native", "constrained"]

WARN_AFTER = 3  # failures, if they are
WARN_FROM = 0.1  # of the messages that call tools, or try to, at least

#: How the chat templates of the known models open a call. A text that holds one was meant as one.
_OPENINGS = (
    "<tool_call>", "<function=", "<function_call>", "<|tool_call|>", "<|tool_calls|>",
    "<|python_tag|>", "<|tool_calls_section_begin|>", "<｜tool▁calls▁begin｜>",
    "<start_function_call>", "[TOOL_CALLS]", "<|action_start|>", "functools[", "```tool_code",
    "<invoke name=",
)  # fmt: skip
#: Where the JSON of an opened call begins: at once, or after the tool's name.
_JSON_AHEAD = re.compile(r"[\w.:-]*>?\s*(?=[{\[])")
_FENCED = re.compile(r"```(?:json)?\s*\n(.*?)```", re.DOTALL)
_PYTHON = re.compile(r"\[?\s*([\w-]+)\((.*)\)\s*\]?", re.DOTALL)

log = logging.getLogger(__name__)


def unparsed_tool_call(message: Message, tools: Sequence[Mapping[str, Any]]) -> str | None:
    """The call of one of the tools that a server left in an assistant's text; None: none.

    The text opens a call as models do, or is one as JSON or Python. A call whose JSON is broken is
    the model's mistake, which no parser would have understood: it does not count.
    """
    text = message.get("content")
    if not tools or message.get("tool_calls") or not isinstance(text, str) or not text:
        return None
    for opening in _OPENINGS:
        if opening in text:
            begin = text.index(opening)
            return text[begin:] if _well_formed(text[begin + len(opening) :]) else None
    names = {tool["function"]["name"] for tool in tools}
    for part in (text.strip(), *_FENCED.findall(text)):
        if _called(part.strip()) & names:
            return str(part)
    return None


def _well_formed(opened: str) -> bool:
    """Whether what follows an opening is a whole call. Only of JSON can it be told."""
    opened = opened.strip()
    if ahead := _JSON_AHEAD.match(opened):
        try:
            json.JSONDecoder().raw_decode(opened, ahead.end())
        except ValueError:
            return False
    return True


def _called(text: str) -> set[str]:
    """The names that a text calls, if it is nothing but calls."""
    if spelled := _PYTHON.fullmatch(text):
        return {spelled[1]}
    value = _json(text) if text[:1] in ("{", "[") else None
    said = value if isinstance(value, list) else [value]
    found = set()
    for item in said:
        if not isinstance(item, dict):
            continue
        function = item.get("function")
        call = function if isinstance(function, dict) else item
        if {"arguments", "parameters", "args", "input"} & call.keys():
            found |= {name for key in ("name", "tool", "function") if (name := call.get(key))
                      and isinstance(name, str)}  # fmt: skip
    return found


def _json(text: str) -> Any:
    try:
        return json.loads(text)
    except ValueError:
        return None


@dataclass
class ParserCounts:
    """How a server's tool-call parser does: `calls` messages that it understood, `failures` not."""

    calls: int = 0
    failures: int = 0

    @property
    def failed(self) -> float:
        """The fraction of messages with a call that was not understood; 0 while there are none."""
        return self.failures / (self.calls + self.failures) if self.failures else 0.0

    def see(self, message: Message, tools: Sequence[Mapping[str, Any]]) -> str | None:
        """Count a message; returns the call in it that was not understood."""
        missed = unparsed_tool_call(message, tools)
        if missed is not None:
            self.failures += 1
        elif tools and message.get("tool_calls"):
            self.calls += 1
        return missed


def parser_counts(calls: Iterable[ModelCall]) -> ParserCounts:
    """The counts over recorded calls, such as `run.calls`."""
    counts = ParserCounts()
    for call in calls:
        counts.see(call.message, call.tools)
    return counts


@dataclass
class ServerCapabilities:
    """What runs have found out about the `server` of their model; an agent's copies share it.

    `warned`: whether its parser was complained of; `tools`, `schemas`: whether it takes tools, and
    a JSON schema for an answer.
    """

    server: Any = None
    parser: ParserCounts = field(default_factory=ParserCounts)
    warned: bool = False
    tools: bool = True
    schemas: bool = True

    def for_engine(self, engine: ChatEngine) -> "ServerCapabilities":
        """This, if it is of the engine's server or of none yet; else a new one."""
        server = getattr(engine, "base_url", engine)
        if self.server is None:
            self.server = server
        return self if self.server == server else ServerCapabilities(server)


def with_tool_calls(
    engine: ChatEngine, mode: ToolCalls, server: ServerCapabilities | None = None
) -> ChatEngine:
    """The engine for an agent's `tool_calls`; see Agent."""
    if mode == "constrained":
        return ConstrainedEngine(engine)
    return AutoEngine(engine, server) if mode == "auto" else engine


class AutoEngine:
    """An engine whose tool calls are counted, and constrained once its server refuses tools."""

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
            return await self._instead(error, request).chat(request)
        self._see(completion, request)
        return completion

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """See ChatEngine."""
        native, assembly = self.server.tools, Assembly()
        engine = self.engine if native else self._constrained
        counted, begun = native and bool(request.get("tools")), False
        try:
            async for chunk in engine.stream(request):
                begun = True
                if counted:
                    assembly.add(chunk)
                yield chunk
        except EngineError as error:
            if begun or not counted:
                raise
            async for chunk in self._instead(error, request).stream(request):
                yield chunk
            return
        if counted:
            self._see(assembly.completion(), request)

    def _instead(self, error: EngineError, request: Mapping[str, Any]) -> ConstrainedEngine:
        """Constrained calls from now on, if tools are what was refused. Else raises the error."""
        refused = error.status in (400, 404, 422, 501) and "tool" in str(error).lower()
        if not refused or not request.get("tools"):
            raise error
        if self.server.tools:
            log.warning("the model server takes no tools, so calls are constrained: %s", error)
            self.server.tools = False
        return self._constrained

    def _see(self, completion: Mapping[str, Any], request: Mapping[str, Any]) -> None:
        if not request.get("tools"):
            return
        try:
            message = tidy(first_choice(completion)["message"])
        except (EngineError, AttributeError, KeyError, TypeError):
            return  # the agent, who reads it next, says what is wrong with it
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
