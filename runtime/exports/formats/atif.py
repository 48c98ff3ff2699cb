"""ATIF, the Agent Trajectory Interchange Format: write a run as one document per line.

Documents are of version 1.7, the first with `extra` on tool calls and results; later versions only
add fields. An agent's step holds its exact tokens, the results of its tool calls, and in `extra`
the call's id, sampling and times. Rewards, tags, task and stop reason have no field, so they are in
the root's `extra`. Only fields of content parts, such as an image's detail, are left out. Listed
in exporter.py.
"""

import re
from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from cray_agents.exact_json import read_arguments
from cray_agents.messages import FIELDS, function_of, reasoning_of
from cray_agents.records import Message, ModelCall, Run, ToolCall, Turn
from cray_agents.runtime.exports.export_format import (
    Json,
    LineFormat,
    Written,
    json_text,
    unsupported,
)
from cray_agents.runtime.exports.formats.jsonl import check_finite
from cray_agents.runtime.store.run_conversation import Conversation, conversation_of

VERSION = "ATIF-v1.7"
UNKNOWN = "unknown"  # for fields that the schema requires and a run may lack
_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_RESULTS = ("tool", "function")
_IMAGES = {"jpg": "image/jpeg", "jpeg": "image/jpeg", "png": "image/png", "gif": "image/gif",
           "webp": "image/webp"}  # fmt: skip


def _write_run(run: Run) -> Written:
    check_finite(run)
    conversation = conversation_of(run)
    steps = _steps(run, conversation)
    document = {
        "schema_version": VERSION,
        "session_id": run.id,
        "trajectory_id": run.id,
        "agent": _agent(run, conversation.tools),
        "steps": steps,
        "final_metrics": _final_metrics(steps),
        "extra": _root_extra(run, conversation),
    }
    more = any(_has_uncarried_fields(message.get("content")) for message in conversation.messages)
    return Written([document], ("message_fields",) if more else ())


def _agent(run: Run, tools: list[Json]) -> Json:
    """Return the agent with its tools in OpenAI's shape; tools of another shape also in `extra`."""
    functions = [function_of(tool) for tool in tools]
    defined = [
        {"type": "function", "function": function} if function is not None else tool
        for tool, function in zip(tools, functions, strict=True)
    ]
    agent: Json = {"name": run.agent or UNKNOWN, "version": UNKNOWN, "model_name": run.model}
    agent |= {"tool_definitions": defined, "extra": {"tools": tools} if defined != tools else None}
    return {name: value for name, value in agent.items() if value}


def _steps(run: Run, conversation: Conversation) -> list[Json]:
    """Return a step for each message; tool results join the step that called the tools."""
    steps: list[Json] = []
    history_end = _history_end(conversation)
    for index, message in enumerate(conversation.messages):
        content = _content_of(run, f"messages[{index}].content", message.get("content"))
        if message.get("role") in _RESULTS:
            _add_result(steps, message, content)
            continue
        step: Json = {
            "step_id": len(steps) + 1,
            "source": _SOURCES.get(str(message.get("role")), "user"),
            "message": content or "",
        }
        extra = _extra_fields(message)
        if step["source"] == "agent":
            _add_answer(step, extra, index, conversation)
        if extra:
            step["extra"] = extra
        if index < history_end and step["source"] != "system":
            step["is_copied_context"] = True
        steps.append(step)
    if not steps:  # the run ended before its first message, or its messages were not kept
        steps.append({"step_id": 1, "source": "user", "message": run.input})
    return steps


def _extra_fields(message: Message) -> Json:
    """Return the fields of a message that a step has no field for."""
    extra = {
        name: value
        for name, value in message.items()
        if value and (name == "name" or name not in FIELDS)
    }
    if "weight" in message:
        extra["weight"] = message["weight"]
    if message.get("role") not in ("system", "user", "assistant", "tool"):
        extra["role"] = message.get("role")
    return extra


def _history_end(conversation: Conversation) -> int:
    """Return the end of the history given to the run: its last answer and that one's results."""
    messages = conversation.messages[: conversation.own_start]
    answers = [n for n, message in enumerate(messages) if message.get("role") == "assistant"]
    if not answers:
        return 0
    end = answers[-1] + 1
    while end < len(messages) and messages[end].get("role") in _RESULTS:
        end += 1
    return end


def _add_answer(step: Json, extra: Json, index: int, conversation: Conversation) -> None:
    message, turn = conversation.messages[index], conversation.turns_by_message.get(index)
    if thought := reasoning_of(message):
        step["reasoning_content"] = str(thought)
    if message.get("tool_calls"):
        step["tool_calls"] = _tool_calls(message, turn, _answered_ids(conversation.messages, index))
    if turn is not None and turn.call is not None:
        _add_call(step, extra, turn.call, conversation)
    elif turn is not None:
        extra["call_id"] = turn.call_id


def _tool_calls(message: Message, turn: Turn | None, answered: set[str]) -> list[Json]:
    calls = message["tool_calls"]
    raw_calls = turn.call.message.get("tool_calls") if turn is not None and turn.call else None
    done = {call.id: call for call in turn.tool_calls} if turn is not None else {}
    return [
        _tool_call_of(call, raw, done.get(str(call.get("id"))), str(call.get("id")) in answered)
        for call, raw in zip(calls, raw_calls or calls, strict=True)
    ]


def _answered_ids(messages: Sequence[Message], index: int) -> set[str]:
    """Return the ids of the calls whose results stand right after a message."""
    answered = set()
    for message in messages[index + 1 :]:
        if message.get("role") not in _RESULTS:
            break
        answered.add(str(message.get("tool_call_id")))
    return answered


def _add_call(step: Json, extra: Json, call: ModelCall, conversation: Conversation) -> None:
    step["model_name"] = call.model
    step["llm_call_count"] = 1
    if call.started:
        started = datetime.fromtimestamp(call.started, UTC)
        step["timestamp"] = started.isoformat().replace("+00:00", "Z")
    if call.prompt_token_ids or call.token_ids:
        step["metrics"] = {
            "prompt_tokens": len(call.prompt_token_ids),
            "completion_tokens": len(call.token_ids),
            "prompt_token_ids": call.prompt_token_ids,
            "completion_token_ids": call.token_ids,
            "logprobs": call.logprobs,
        }
    known = {
        "call_id": call.id,
        "api": call.api,
        "finish_reason": call.finish_reason,
        "seconds": call.seconds,
        "sampling": call.sampling,
        "tags": call.tags,
        "redacted": [removed.model_dump() for removed in call.redacted],
    }
    extra |= {name: value for name, value in known.items() if value}
    if conversation.messages[: len(call.messages)] != call.messages:  # it read another history
        extra["messages"] = call.messages
    if call.tools != conversation.tools:
        extra["tools"] = call.tools


def _add_result(steps: list[Json], message: Message, content: Any) -> None:
    """Add a tool's result to the last step, or to a new step if the last did not call the tool."""
    call_id = str(message.get("tool_call_id") or "")
    result: Json = {"content": content if content is not None else ""}
    extra = _extra_fields(message)
    step = steps[-1] if steps else {}
    if any(call["tool_call_id"] == call_id for call in step.get("tool_calls") or ()):
        result["source_call_id"] = call_id
    else:
        step = {"step_id": len(steps) + 1, "source": "system", "message": ""}
        steps.append(step)
        extra |= {"role": message.get("role"), "tool_call_id": call_id}
    if extra:
        result["extra"] = extra
    step.setdefault("observation", {"results": []})["results"].append(result)


def _content_of(run: Run, path: str, content: Any) -> str | list[Json] | None:
    """Return a message's content: a text, or a list of text and image parts.

    A prompt of /v1/completions that is token ids or several texts becomes its JSON. Raises
    BadInput for parts that this version of the schema lacks, such as audio.
    """
    if content is None or isinstance(content, str):
        return content
    if isinstance(content, list) and all(isinstance(part, dict) for part in content):
        return [_part(run, path, part) for part in content]
    return json_text(run, path, content)


def _part(run: Run, path: str, part: Json) -> Json:
    if isinstance(part.get("text"), str):
        return {"type": "text", "text": part["text"]}
    url = _image_url(part)
    if url is None:
        problem = f"has a part of type {part.get('type')!r}, neither text nor image"
        raise unsupported(run, path, problem)
    if url.startswith("data:"):
        media_type = re.split("[,;]", url.removeprefix("data:"), maxsplit=1)[0].lower()
    else:
        path_of_url = re.split("[?#]", url, maxsplit=1)[0]
        media_type = _IMAGES.get(path_of_url.rpartition(".")[2].lower(), "")
    if media_type not in _IMAGES.values():
        problem = f"has an image that is not known to be JPEG, PNG, GIF or WebP: {url[:80]}"
        raise unsupported(run, path, problem)
    return {"type": "image", "source": {"media_type": media_type, "path": url}}


def _has_uncarried_fields(content: Any) -> bool:
    """Tell whether parts of a content have fields that are not carried, such as image detail."""
    if not isinstance(content, list):
        return False
    objects = [part for part in content if isinstance(part, dict)]
    images = [part["image_url"] for part in objects if isinstance(part.get("image_url"), dict)]
    return any(len(part) > 2 for part in objects) or any(len(image) > 1 for image in images)


def _image_url(part: Json) -> str | None:
    """Return the URL of an image in OpenAI's or Anthropic's shape; it may be a data URL."""
    source = part.get("source")
    if part.get("type") == "image" and isinstance(source, dict):
        if source.get("type") == "base64":
            return f"data:{source.get('media_type')};base64,{source.get('data')}"
        url = source.get("url")
    else:
        image = part.get("image_url")
        url = image.get("url") if isinstance(image, dict) else image
    return url if isinstance(url, str) else None


def _tool_call_of(call: Json, raw: Json, done: ToolCall | None, observed: bool) -> Json:
    """Return a tool call of the run's message, with further facts in `extra`.

    `raw` is the same call as the model wrote it; its arguments may be no JSON object. `observed`
    tells that the call's result stands in the observation.
    """
    function = call.get("function") or call.get("custom") or {}
    value = function.get("arguments", function.get("input"))
    arguments = read_arguments(value)
    record: Json = {
        "tool_call_id": str(call.get("id") or ""),
        "function_name": str(function.get("name") or ""),
        "arguments": arguments if arguments is not None else {},
    }
    written = (raw.get("function") or {}).get("arguments", value)
    extra: Json = {}
    if arguments is None or read_arguments(written) != arguments:
        extra["arguments"] = written
    if done is not None:
        extra |= {"seconds": done.seconds} | ({"error": done.error} if done.error else {})
        if done.result is not None and not (observed and isinstance(done.result, str)):
            extra["result"] = done.result
    if extra:
        record["extra"] = extra
    return record


def _final_metrics(steps: list[Json]) -> Json:
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    final: Json = {"total_steps": len(steps)}
    if metrics:
        final["total_prompt_tokens"] = sum(one["prompt_tokens"] for one in metrics)
        final["total_completion_tokens"] = sum(one["completion_tokens"] for one in metrics)
    return final


def _root_extra(run: Run, conversation: Conversation) -> Json:
    """Return the run's fields that the document lacks, and its turns outside the conversation."""
    extra = run.model_dump(mode="json", exclude={"id", "agent", "model", "trajectory"})
    extra["reward"] = run.reward
    extra = {n: v for n, v in extra.items() if v is not None and (v != [] or n == "output")}
    if conversation.other_turns:
        extra["other_turns"] = [turn.model_dump(mode="json") for turn in conversation.other_turns]
    return extra


ATIF = LineFormat(
    name="atif",
    title="ATIF 1.7 (Agent Trajectory Interchange Format)",
    about="a trajectory document for each run, with exact tokens and logprobs; rewards, tags and "
    "task in `extra`; any validator of 1.7 or later",
    write_run=_write_run,
)
