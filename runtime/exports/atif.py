"""ATIF, the Agent Trajectory Interchange Format: a document for each run, one to a line.

Written as version 1.7, the first with `extra` on tool calls and results; later ones only added to
it. An agent's step holds its exact tokens, the results of its tool calls, and in `extra` the call's
id, sampling and times. What the schema has no field for (rewards, tags, task, why it ended) is in
the root's `extra`, since the schema forbids other fields. Nothing is left out but what the store
does not know. Listed in format.py; the parts of a step are in atif_parts.py.
"""

from collections.abc import Sequence
from datetime import UTC, datetime
from typing import Any

from cray_agents.records import Message, ModelCall, Run, Turn
from cray_agents.runtime.exports.atif_parts import content_of, has_more, plain, tool_call_of
from cray_agents.runtime.exports.chat_messages import function_of
from cray_agents.runtime.exports.conversation import Conversation, conversation_of
from cray_agents.runtime.exports.export_format import Json, LineFormat, Written
from cray_agents.runtime.exports.jsonl import check_finite

VERSION = "ATIF-v1.7"
UNKNOWN = "unknown"  # what the schema requires and a run may lack
_TOLD = {"role", "content", "tool_calls", "tool_call_id", "reasoning", "reasoning_content"}
_SOURCES = {"system": "system", "developer": "system", "user": "user", "assistant": "agent"}
_RESULTS = ("tool", "function")


def _of_run(run: Run) -> Written:
    check_finite(run)
    told = conversation_of(run)
    steps = _steps(run, told)
    document = {
        "schema_version": VERSION,
        "session_id": run.id,
        "trajectory_id": run.id,
        "agent": _agent(run, told.tools),
        "steps": steps,
        "final_metrics": _final(steps),
        "extra": _about(run, told),
    }
    more = any(has_more(message.get("content")) for message in told.messages)
    return Written([document], ("message_fields",) if more else ())


def _agent(run: Run, tools: list[Json]) -> Json:
    """The agent, its tools in OpenAI's shape; as they were given too, where that is another."""
    functions = [function_of(tool) for tool in tools]
    defined = [
        {"type": "function", "function": function} if function is not None else tool
        for tool, function in zip(tools, functions, strict=True)
    ]
    agent = {
        "name": run.agent or UNKNOWN,
        "version": UNKNOWN,
        "model_name": run.model or None,
        "tool_definitions": defined or None,
        "extra": {"tools": tools} if defined != tools else None,
    }
    return plain(agent)


def _steps(run: Run, told: Conversation) -> list[Json]:
    """A step for each message; results of tools go with the step that asked for them."""
    steps: list[Json] = []
    copied = _copied(told)
    for place, message in enumerate(told.messages):
        where = f"messages[{place}]"
        content = content_of(run, where, message.get("content"))
        if message.get("role") in _RESULTS:
            _add_result(steps, message, content)
            continue
        step: Json = {
            "step_id": len(steps) + 1,
            "source": _SOURCES.get(str(message.get("role")), "user"),
            "message": content or "",
        }
        extra = _beside(message)
        if step["source"] == "agent":
            _add_answer(step, extra, place, told)
        if extra:
            step["extra"] = extra
        if place < copied and step["source"] != "system":
            step["is_copied_context"] = True
        steps.append(step)
    if not steps:  # a run that ended before anything was said, or whose words nobody kept
        steps.append({"step_id": 1, "source": "user", "message": run.input})
    return steps


def _beside(message: Message) -> Json:
    """What a message holds and a step has no field for."""
    beside = {name: value for name, value in message.items() if name not in _TOLD and value}
    if "weight" in message:
        beside["weight"] = message["weight"]
    if message.get("role") not in ("system", "user", "assistant", "tool"):
        beside["role"] = message.get("role")
    return beside


def _copied(told: Conversation) -> int:
    """Up to where the messages are the history that the run was given, not its own doing."""
    places = [p for p in range(told.own) if told.messages[p].get("role") == "assistant"]
    if not places:
        return 0
    last = places[-1] + 1
    while last < told.own and told.messages[last].get("role") in _RESULTS:
        last += 1
    return last


def _add_answer(step: Json, extra: Json, place: int, told: Conversation) -> None:
    message, turn = told.messages[place], told.said.get(place)
    thought = message.get("reasoning") or message.get("reasoning_content")
    if thought:
        step["reasoning_content"] = str(thought)
    if message.get("tool_calls"):
        step["tool_calls"] = _tool_calls(message, turn, _answered(told.messages, place))
    if turn is not None and turn.call is not None:
        _add_call(step, extra, turn.call, told)
    elif turn is not None:
        extra["call_id"] = turn.call_id


def _tool_calls(message: Message, turn: Turn | None, answered: set[str]) -> list[Json]:
    asked = message["tool_calls"]
    given = turn.call.message.get("tool_calls") if turn is not None and turn.call else None
    done = {done.id: done for done in turn.tool_calls} if turn is not None else {}
    return [
        tool_call_of(part, raw, done.get(str(part.get("id"))), str(part.get("id")) in answered)
        for part, raw in zip(asked, given or asked, strict=True)
    ]


def _answered(messages: Sequence[Message], place: int) -> set[str]:
    """The ids of the calls whose results stand right after a message."""
    answered = set()
    for message in messages[place + 1 :]:
        if message.get("role") not in _RESULTS:
            break
        answered.add(str(message.get("tool_call_id")))
    return answered


def _add_call(step: Json, extra: Json, call: ModelCall, told: Conversation) -> None:
    step["model_name"] = call.model
    step["llm_call_count"] = 1
    if call.started:
        step["timestamp"] = _time(call.started)
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
    if told.messages[: len(call.messages)] != call.messages:  # its history was another one
        extra["messages"] = call.messages
    if call.tools != told.tools:
        extra["tools"] = call.tools


def _add_result(steps: list[Json], message: Message, content: Any) -> None:
    """Add a tool's result to the last step, or a step of its own where that did not ask for it."""
    call_id = str(message.get("tool_call_id") or "")
    result: Json = {"content": content if content is not None else ""}
    extra = _beside(message)
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


def _final(steps: list[Json]) -> Json:
    metrics = [step["metrics"] for step in steps if "metrics" in step]
    final: Json = {"total_steps": len(steps)}
    if metrics:
        final["total_prompt_tokens"] = sum(one["prompt_tokens"] for one in metrics)
        final["total_completion_tokens"] = sum(one["completion_tokens"] for one in metrics)
    return final


def _about(run: Run, told: Conversation) -> Json:
    """All of the run that the document says nowhere else, and the calls of other conversations."""
    about = run.model_dump(mode="json", exclude={"id", "agent", "model", "trajectory"})
    about = {n: value for n, value in about.items() if n == "output" or value not in (None, [])}
    about["reward"] = run.reward
    if told.others:
        about["other_turns"] = [turn.model_dump(mode="json") for turn in told.others]
    return plain(about)


def _time(seconds: float) -> str:
    return datetime.fromtimestamp(seconds, UTC).isoformat().replace("+00:00", "Z")


ATIF = LineFormat(
    name="atif",
    title="ATIF 1.7 (Agent Trajectory Interchange Format)",
    about="a trajectory document for each run, with exact tokens and logprobs; rewards, tags and "
    "task in `extra`; any validator of 1.7 or later",
    of_run=_of_run,
)
