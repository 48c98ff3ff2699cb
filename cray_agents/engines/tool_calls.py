"""Tool calls of models whose server has no parser for them, or the wrong one.

`Agent(tool_calls="auto")` asks as usual (`AutoEngine`). A server without the right parser returns
calls as plain text, and the run ends with that text as its answer, which looks like a bad model. So
calls that were missed are counted, with a warning when there are many. When the server refuses
tools altogether, calls are constrained from then on.

`Agent(tool_calls="constrained")` makes the model write its calls as JSON that the server keeps to a
schema (`ConstrainedEngine`): `{"tool": NAME, "arguments": {...}}` or `{"answer": ...}`. The request
enforces this as `response_format` (JSON schema), so that each call names an existing tool, with
arguments of their types. The agent sees ordinary tool calls and text. The message keeps the model's
own text in `written`, and the model reads that text on the next turn, word for word.

The schema restricts the model's distribution, so the recorded log-probabilities are not its own.
Such calls suit `sft` and `rft`, not the ratios of `grpo`. A small model may write blanks without
end, where JSON allows them; vLLM's flag
`--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'` prevents
that. Called by agent/description.py.
"""

import json
import logging
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from pydantic_core import from_json

from cray_agents.engines.chat_completions import Assembly, first_choice, tidy
from cray_agents.errors import EngineError
from cray_agents.exact_json import bounded, parse_json
from cray_agents.ports import ChatEngine
from cray_agents.records import Message, digest

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

_FENCE = "```"
_JSON = json.JSONDecoder()  # raw_decode ignores text after the JSON: models may go on writing
_CHUNK_KEYS = ("id", "object", "created", "model")
_TOOL_KEYS = ("tools", "tool_choice", "parallel_tool_calls")

log = logging.getLogger(__name__)


class ConstrainedEngine:
    """A ChatEngine that adds tools to an engine without them.

    Requests without tools, in conversations without tool calls, are passed on unchanged. The tools
    are described in the system message. A message calls one tool at most. One that is neither call
    nor answer (cut off, or of a server that keeps to no schema) stays text.
    """

    def __init__(self, engine: ChatEngine) -> None:
        self.engine = engine
        self.record = getattr(engine, "record", None)

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """See ChatEngine."""
        if not _involves_tools(request):
            return await self.engine.chat(request)
        completion = await self.engine.chat(constrain_request(request))
        choice = first_choice(completion)
        reply = parse_reply(_text(choice["message"]), request)
        message = {**choice["message"], "content": None, **reply}
        finish = _finish_reason(choice.get("finish_reason"), reply)
        read = {**choice, "message": message, "finish_reason": finish}
        return {**completion, "choices": [read, *completion["choices"][1:]]}

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """See ChatEngine. An answer's text comes piece by piece, a call when it is complete."""
        if not _involves_tools(request):
            async for chunk in self.engine.stream(request):
                yield chunk
            return
        text, sent, finish = "", "", None
        head: dict[str, Any] = {}
        async for chunk in self.engine.stream(constrain_request(request)):
            if not chunk.get("choices"):
                yield chunk
                continue
            choice = chunk["choices"][0]
            delta = dict(choice.get("delta") or {})
            text += _text(delta)
            delta.pop("content", None)
            answer = _answer_so_far(text)
            if answer.startswith(sent) and answer != sent:
                delta["content"] = answer[len(sent) :]
                sent = answer
            finish = choice.get("finish_reason") or finish
            head = {key: chunk[key] for key in _CHUNK_KEYS if key in chunk}
            partial = {**choice, "delta": delta, "finish_reason": None}
            yield {**chunk, "choices": [partial]}
        if finish is None:
            raise EngineError("the model server's stream ended in the middle of an answer")
        reply = parse_reply(text, request)
        delta = {**reply, "content": (reply.get("content") or "").removeprefix(sent)}
        if calls := reply.get("tool_calls"):
            delta["tool_calls"] = [{**call, "index": 0} for call in calls]
        end = {"index": 0, "delta": delta, "finish_reason": _finish_reason(finish, reply)}
        yield {**head, "choices": [end]}


def constrain_request(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the request for the server: without tools, with a schema of the reply."""
    schema = reply_schema(request)
    messages = [_render(message) for message in _merge_tool_results(request["messages"])]
    messages = _with_note(messages, describe_tools(_callable_tools(request)))
    bare = {key: value for key, value in request.items() if key not in _TOOL_KEYS}
    form = {"name": "reply", "strict": True, "schema": schema}
    return {
        **bare,
        "messages": messages,
        "response_format": {"type": "json_schema", "json_schema": form},
    }


def reply_schema(request: Mapping[str, Any]) -> dict[str, Any]:
    """Return the JSON schema of a call of one of the request's tools, or of an answer.

    An answer is a text, or follows the request's own `response_format`.
    """
    definitions: dict[str, Any] = {}
    replies = []
    for tool in _callable_tools(request):
        name, parameters = tool["function"]["name"], tool["function"].get("parameters") or {}
        if "#/" in json.dumps(parameters):
            definitions[name] = _rebase_references(parameters, f"#/$defs/{name}/")
            parameters = {"$ref": f"#/$defs/{name}"}
        replies.append(_object(tool={"const": name}, arguments=parameters or {"type": "object"}))
    if request.get("tool_choice", "auto") in ("auto", "none", None) or not replies:
        replies.append(_object(answer=_answer_schema(request, definitions)))
    schema = replies[0] if len(replies) == 1 else {"anyOf": replies}
    return schema | ({"$defs": definitions} if definitions else {})


def describe_tools(tools: Sequence[Mapping[str, Any]]) -> str:
    """Return the model's description of its tools and of their use."""
    if not tools:
        return 'Reply with JSON alone: {"answer": ANSWER}.'
    lines = ["You have these tools:"]
    for tool in tools:
        function = tool["function"]
        about = " ".join((function.get("description") or "").split())
        lines.append(f"- {function['name']}: {about}".rstrip(": "))
        lines.append(f"  arguments: {json.dumps(function.get('parameters') or {})}")
    lines.append(
        'Reply with JSON alone: {"tool": NAME, "arguments": {...}} to use a tool, whose result '
        'you are then told, or {"answer": ANSWER} to answer.'
    )
    return "\n".join(lines)


def _without_fence(text: str) -> str:
    """Return the inside of a Markdown code block, if the text is one; else the text.

    Not by a regular expression: models may write blanks without end.
    """
    inside = text.strip()
    if len(inside) < 2 * len(_FENCE) or not (inside.startswith(_FENCE) and inside.endswith(_FENCE)):
        return text
    kind, line, inside = inside[len(_FENCE) : -len(_FENCE)].partition("\n")
    return inside if line and kind.strip() in ("", "json") else text


def parse_reply(text: str, request: Mapping[str, Any]) -> Message:
    """Parse a model's text into fields of a message: `tool_calls` or `content`, and `written`.

    An answer that was cut off stays incomplete. Text that is neither call nor answer is `content`.
    """
    try:
        value = bounded(_JSON.raw_decode(_without_fence(text).lstrip())[0])
    except (ValueError, RecursionError):
        partial = _answer_so_far(text)
        return {"content": partial, "written": text} if partial else {"content": text}
    match value:
        case {"tool": str(name), "arguments": dict(arguments)}:
            function = {"name": name, "arguments": json.dumps(arguments, ensure_ascii=False)}
            place = len(request["messages"])
            call_id = f"call_{digest([place, text], 12)}"
            call = {"id": call_id, "type": "function", "function": function}
            return {"tool_calls": [call], "written": text}
        case {"answer": str(answer)}:
            return {"content": answer, "written": text}
        case {"answer": answer}:
            return {"content": json.dumps(answer, ensure_ascii=False), "written": text}
    return {"content": text}


def _involves_tools(request: Mapping[str, Any]) -> bool:
    tool_messages = (m.get("role") == "tool" or m.get("tool_calls") for m in request["messages"])
    return bool(request.get("tools")) or any(tool_messages)


def _callable_tools(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Return the tools that may be called. `tool_choice` may exclude all, or name one."""
    choice, tools = request.get("tool_choice", "auto"), request.get("tools") or []
    if choice == "none":
        return []
    if isinstance(choice, dict):
        named = choice["function"]["name"]
        return [tool for tool in tools if tool["function"]["name"] == named]
    return list(tools)


def _answer_schema(request: Mapping[str, Any], definitions: dict[str, Any]) -> dict[str, Any]:
    form = request.get("response_format") or {}
    if form.get("type") != "json_schema":
        return {"type": "object"} if form.get("type") == "json_object" else {"type": "string"}
    schema: dict[str, Any] = form["json_schema"].get("schema") or {}
    if "#/" not in json.dumps(schema):
        return schema
    definitions["answer."] = _rebase_references(schema, "#/$defs/answer./")
    return {"$ref": "#/$defs/answer."}


def _rebase_references(node: Any, root: str) -> Any:
    """Return a schema whose references start at another root."""
    if isinstance(node, dict):
        return {
            key: root + value[2:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#/")
            else _rebase_references(value, root)
            for key, value in node.items()
        }
    return [_rebase_references(item, root) for item in node] if isinstance(node, list) else node


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _merge_tool_results(messages: Sequence[Message]) -> list[Message]:
    """Return the conversation with consecutive tool results joined into one user message."""
    names = {
        call["id"]: call["function"]["name"]
        for message in messages
        for call in message.get("tool_calls") or ()
    }
    merged: list[Message] = []
    results: list[str] = []
    for message in [*messages, {}]:
        if message.get("role") == "tool":
            name = names.get(message.get("tool_call_id", ""), "the tool")
            results.append(f"Result of {name}: {message.get('content')}")
            continue
        if results:
            merged.append({"role": "user", "content": "\n".join(results)})
            results = []
        if message:
            merged.append(message)
    return merged


def _render(message: Message) -> Message:
    """Return an assistant's message as the text that it wrote, or would write under the schema."""
    if message.get("role") != "assistant":
        return message
    written = message.get("written")
    if written is None and (calls := message.get("tool_calls")):
        written = "\n".join(
            f'{{"tool": {json.dumps(call["function"]["name"])}, '
            f'"arguments": {call["function"]["arguments"] or "{}"}}}'
            for call in calls
        )
    elif written is None:
        written = json.dumps({"answer": message.get("content") or ""}, ensure_ascii=False)
    return {"role": "assistant", "content": written}


def _with_note(messages: list[Message], note: str) -> list[Message]:
    if messages and messages[0].get("role") == "system":
        first = {**messages[0], "content": f"{messages[0]['content']}\n\n{note}"}
        return [first, *messages[1:]]
    return [{"role": "system", "content": note}, *messages]


def _text(part: Mapping[str, Any]) -> str:
    """Return the text of a message or a delta. Raises EngineError if it is not a text."""
    content = part.get("content")
    if content is not None and not isinstance(content, str):
        raise EngineError(f"the model server's answer has no known shape: content {content!r}")
    return content or ""


def _answer_so_far(text: str) -> str:
    """Return the text of an answer in JSON that may be incomplete; empty without such a text."""
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return ""
    answer = value.get("answer") if isinstance(value, dict) else None
    return answer if isinstance(answer, str) else ""


def _finish_reason(reason: str | None, reply: Message) -> str:
    return "tool_calls" if reply.get("tool_calls") else reason or "stop"


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
