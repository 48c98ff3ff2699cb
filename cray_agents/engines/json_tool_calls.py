"""Tool calls as JSON that a server keeps to a schema: for servers without a tool-call parser, and
for models too small to write a call right by themselves.

    agent = Agent(..., tool_calls="constrained")

The model writes `{"tool": NAME, "arguments": {...}}` or `{"answer": ...}`; the request asks for
that as `response_format` (JSON schema), so that a call is always of a tool there is, and its
arguments of their types. The agent sees ordinary tool calls and text. What the model wrote stays in
the message's `written`, and is what it reads of itself on the next turn, word for word.

The schema cuts the model's distribution down, so the recorded log-probabilities are not its own:
such calls suit `sft` and `rft`, not the ratios of `grpo`. A small model that writes blanks without
end, where JSON allows them, is cured by vLLM's flag
`--structured-outputs-config '{"backend": "xgrammar", "disable_any_whitespace": true}'`.

Called by unparsed.py, which finds out whether this is needed: read it next.
"""

import json
import re
from collections.abc import AsyncIterator, Mapping, Sequence
from typing import Any

from pydantic_core import from_json

from cray_agents.engines.chat_completions import first_choice
from cray_agents.errors import EngineError
from cray_agents.ports import ChatEngine
from cray_agents.records import Message, digest

_FENCE = re.compile(r"\s*```(?:json)?\s*\n(.*?)\n?\s*```\s*", re.DOTALL)
_JSON = json.JSONDecoder()  # reads what stands first: without a schema, models chat on after it
_HEAD = ("id", "object", "created", "model")  # of a chunk
_ABOUT_TOOLS = ("tools", "tool_choice", "parallel_tool_calls")


class ConstrainedEngine:
    """A ChatEngine without `tools`, made into one with them.

    Requests without tools, in conversations without tool calls, are passed on as they are. A
    message calls one tool at most. `unreadable` counts the messages that were neither call nor
    answer, out of `messages`: cut off, or of a server that keeps to no schema. They stay text.

    With `note` the tools are described in the system message. Without, they are also sent as
    `tools` (with `tool_choice` none), for chat templates that list them.
    """

    def __init__(self, engine: ChatEngine, *, note: bool = True) -> None:
        self.engine = engine
        self.record = getattr(engine, "record", None)
        self.messages = 0
        self.unreadable = 0
        self._note = note

    async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
        """See ChatEngine."""
        if not _about_tools(request):
            return await self.engine.chat(request)
        completion = await self.engine.chat(constrained(request, note=self._note))
        choice = first_choice(completion)
        said = self._read(_text(choice["message"]), request)
        message = {**choice["message"], "content": None, **said}
        finish = _finish(choice.get("finish_reason"), said)
        read = {**choice, "message": message, "finish_reason": finish}
        return {**completion, "choices": [read, *completion["choices"][1:]]}

    async def stream(self, request: dict[str, Any]) -> AsyncIterator[dict[str, Any]]:
        """See ChatEngine. An answer's text comes as it is written, a call when it is complete."""
        if not _about_tools(request):
            async for chunk in self.engine.stream(request):
                yield chunk
            return
        text, shown, finish = "", "", None
        head: dict[str, Any] = {}
        async for chunk in self.engine.stream(constrained(request, note=self._note)):
            if not chunk.get("choices"):
                yield chunk
                continue
            choice = chunk["choices"][0]
            delta = dict(choice.get("delta") or {})
            text += _text(delta)
            delta.pop("content", None)
            grown = _answer_so_far(text)
            if grown.startswith(shown) and grown != shown:
                delta["content"] = grown[len(shown) :]
                shown = grown
            finish = choice.get("finish_reason") or finish
            head = {key: chunk[key] for key in _HEAD if key in chunk}
            held = {**choice, "delta": delta, "finish_reason": None}
            yield {**chunk, "choices": [held]}
        if finish is None:
            raise EngineError("the model server's stream ended in the middle of an answer")
        said = self._read(text, request)
        delta = {**said, "content": (said.get("content") or "").removeprefix(shown)}
        if calls := said.get("tool_calls"):
            delta["tool_calls"] = [{**call, "index": 0} for call in calls]
        end = {"index": 0, "delta": delta, "finish_reason": _finish(finish, said)}
        yield {**head, "choices": [end]}

    def _read(self, text: str, request: Mapping[str, Any]) -> Message:
        said = read_written(text, request)
        self.messages += 1
        self.unreadable += "written" not in said
        return said


def constrained(request: Mapping[str, Any], *, note: bool = True) -> dict[str, Any]:
    """The request for the server: no tools, but a schema of what may be written."""
    schema = reply_schema(request)
    messages = [_rendered(message) for message in _merged(request["messages"])]
    bare = {key: value for key, value in request.items() if key not in _ABOUT_TOOLS}
    if note:
        messages = _with_note(messages, describe(_offered(request)))
    elif request.get("tools"):
        bare |= {"tools": request["tools"], "tool_choice": "none"}
    form = {"name": "reply", "strict": True, "schema": schema}
    return {
        **bare,
        "messages": messages,
        "response_format": {"type": "json_schema", "json_schema": form},
    }


def reply_schema(request: Mapping[str, Any]) -> dict[str, Any]:
    """The JSON schema of a call of one of the request's tools, or of an answer.

    An answer is a text, or what the request's own `response_format` asks for.
    """
    definitions: dict[str, Any] = {}
    replies = []
    for tool in _offered(request):
        name, parameters = tool["function"]["name"], tool["function"].get("parameters") or {}
        if "#/" in json.dumps(parameters):
            definitions[name] = _moved(parameters, f"#/$defs/{name}/")
            parameters = {"$ref": f"#/$defs/{name}"}
        replies.append(_object(tool={"const": name}, arguments=parameters or {"type": "object"}))
    if request.get("tool_choice", "auto") in ("auto", "none", None) or not replies:
        replies.append(_object(answer=_answer_schema(request, definitions)))
    schema = replies[0] if len(replies) == 1 else {"anyOf": replies}
    return schema | ({"$defs": definitions} if definitions else {})


def describe(tools: Sequence[Mapping[str, Any]]) -> str:
    """What a model is told of its tools, and of how to use them."""
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


def read_written(text: str, request: Mapping[str, Any]) -> Message:
    """What a model wrote, as the fields of a message: `tool_calls`, or `content`; and `written`.

    An answer that was cut off is as long as it is; what is neither call nor answer is the text.
    """
    fenced = _FENCE.fullmatch(text)
    try:
        value, _ = _JSON.raw_decode((fenced[1] if fenced else text).lstrip())
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


def _about_tools(request: Mapping[str, Any]) -> bool:
    spoken = (m.get("role") == "tool" or m.get("tool_calls") for m in request["messages"])
    return bool(request.get("tools")) or any(spoken)


def _offered(request: Mapping[str, Any]) -> list[dict[str, Any]]:
    """The tools that may be called: `tool_choice` may leave none, or name one."""
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
    definitions["answer."] = _moved(schema, "#/$defs/answer./")
    return {"$ref": "#/$defs/answer."}


def _moved(node: Any, root: str) -> Any:
    """A schema whose references start at another root."""
    if isinstance(node, dict):
        return {
            key: root + value[2:]
            if key == "$ref" and isinstance(value, str) and value.startswith("#/")
            else _moved(value, root)
            for key, value in node.items()
        }
    return [_moved(item, root) for item in node] if isinstance(node, list) else node


def _object(**properties: Any) -> dict[str, Any]:
    return {
        "type": "object",
        "properties": properties,
        "required": [*properties],
        "additionalProperties": False,
    }


def _merged(messages: Sequence[Message]) -> list[Message]:
    """The conversation with each row of tool results as one user's message."""
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


def _rendered(message: Message) -> Message:
    """An assistant's message as it wrote it, or would have written it here."""
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
    """The text of a message or a delta. Raises EngineError if it is something else."""
    content = part.get("content")
    if content is not None and not isinstance(content, str):
        raise EngineError(f"the model server's answer has no known shape: content {content!r}")
    return content or ""


def _answer_so_far(text: str) -> str:
    """The text of an answer whose JSON may not be complete yet; empty if it is none, or no text."""
    try:
        value = from_json(text, allow_partial="trailing-strings")
    except ValueError:
        return ""
    answer = value.get("answer") if isinstance(value, dict) else None
    return answer if isinstance(answer, str) else ""


def _finish(reason: str | None, said: Message) -> str:
    return "tool_calls" if said.get("tool_calls") else reason or "stop"
