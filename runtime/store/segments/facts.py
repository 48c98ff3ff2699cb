"""What the index knows of an event without its body: a few plain values, told when it is written.

A sealed segment carries the facts of its events, so that an index is rebuilt without reading the
bodies. Made by the store (events on their way in), sealed.py and reading.py (lines); used by
index.py. FACTS changes when what is told changes: then facts are told again, from the bodies.
"""

from typing import Any, NamedTuple

import orjson

from cray_agents.records import StopReason

FACTS = 3  # the version of what `facts_of` tells
HEAD = 160  # characters of an input or output that are kept
SAID = 200  # characters of an answer by which it is recognised


class Fact(NamedTuple):
    """One event. `about` is by kind; every value in it is JSON.

    call: model, started, seconds, ending, tags, prompt, sampled (tokens), redacted, owner; and
    where a conversation may go on: asked (a hash), said ([tool call ids], text).
    run: model, agent, loop, generation, attempt, task, split, stop_reason, started, seconds, error,
    infrastructure, tags, rewards ([[name, source, value, time, turn, giver]]), turns, input and
    output (heads), imported, redacted, owner.
    reward: name, source, value, time, turn, giver.     forget: reason.
    """

    id: str
    run_id: str
    kind: str
    time: float
    about: dict[str, Any]


def facts_of(event: dict[str, Any]) -> Fact:
    """The facts of an event as it stands in a line. Raises KeyError, TypeError on nonsense."""
    kind, body = event["kind"], event["body"]
    if kind == "call":
        about = _of_call(body)
    elif kind == "run":
        about = _of_run(body)
    elif kind == "reward":
        about = _of_reward(body)
    elif kind == "forget":
        about = {"reason": str(body.get("reason", ""))}
    else:
        raise TypeError(f"an event of an unknown kind {kind!r}")
    return Fact(str(event["id"]), str(event["run_id"]), kind, float(event["time"]), about)


def _of_call(body: dict[str, Any]) -> dict[str, Any]:
    about = {
        "model": body["model"],
        "started": float(body["started"]),
        "seconds": float(body.get("seconds") or 0.0),
        "ending": ending_of(body.get("finish_reason"), body.get("message") or {}),
        "tags": body.get("tags") or [],
        "prompt": len(body.get("prompt_token_ids") or ()),
        "sampled": len(body.get("token_ids") or ()),
        "redacted": bool(body.get("redacted")),
        "owner": body.get("owner") or "",
    }
    if body.get("asked"):
        said = body["message"]
        ids = [str(call.get("id")) for call in said.get("tool_calls") or ()]
        about["asked"] = body["asked"]
        about["said"] = [ids, text_of(said).strip()[:SAID]]
    return about


def _of_run(body: dict[str, Any]) -> dict[str, Any]:
    task, error = body.get("task") or {}, body.get("error") or {}
    return {
        "model": body["model"],
        "agent": body["agent"],
        "loop": body.get("loop"),
        "generation": body.get("generation"),
        "attempt": body.get("attempt"),
        "task": task.get("id"),
        "split": task.get("split", "train") if task else None,
        "stop_reason": body["stop_reason"],
        "started": float(body.get("started") or 0.0),
        "seconds": float(body.get("seconds") or 0.0),
        "error": error.get("type"),
        "infrastructure": bool(error.get("infrastructure")),
        "tags": body.get("tags") or [],
        "rewards": [list(_of_reward(reward).values()) for reward in body.get("rewards") or ()],
        "turns": len((body.get("trajectory") or {}).get("turns") or ()),
        "input": _head(body["input"]),
        "output": _head(_text(body.get("output"))),
        "imported": body.get("imported"),
        "redacted": bool(body.get("redacted")),
        "owner": body.get("owner") or "",
    }


def _of_reward(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": body["name"],
        "source": body.get("source", "function"),
        "value": float(body["value"]),
        "time": float(body["time"]),
        "turn": body.get("turn"),
        "giver": body.get("giver") or "",
    }


def ending_of(finish_reason: Any, said: dict[str, Any]) -> StopReason:
    """How a run that nobody described has ended, by the last of its calls and what that said."""
    if finish_reason == "cancelled":
        return StopReason.cancelled
    if finish_reason == "error":
        return StopReason.error
    return StopReason.unanswered if said.get("tool_calls") else StopReason.completed


def text_of(message: dict[str, Any]) -> str:
    """The text of a message, also where it is a list of parts."""
    content = message.get("content")
    if isinstance(content, list):
        parts = [part.get("text") for part in content if isinstance(part, dict)]
        return "".join(part for part in parts if isinstance(part, str))
    return _text(content)


def _text(value: Any) -> str:
    if isinstance(value, str):
        return value
    return orjson.dumps(value).decode() if value else ""


def _head(text: str) -> str:
    return text if len(text) <= HEAD else text[: HEAD - 1] + "…"
