"""Line format: an event as a line of JSON whose last key is a checksum of the line.

    {"id":"...","run_id":"...","kind":"call","time":1.5,"body":{...},"crc":"0a1b2c3d"}

`crc` is zlib's CRC-32 over the line's bytes before `,"crc"`, as 8 hex digits. A line can thus be
verified anywhere, and is still plain JSON. One of a newer format has a `format` (checksums.py).
Written by store.py; read by store.py, indexing.py and compaction.py. The names of segment files are
parsed here too.

The facts of an event are the few plain values that the index keeps. Increase the version of the
index (index/database.py) when they change; they are then extracted again.
"""

from pathlib import Path
from typing import Any, NamedTuple, cast

import orjson
from pydantic_core import from_json

from cray_agents.errors import Corrupt, StoreError
from cray_agents.exact_json import dump_json
from cray_agents.messages import text_of, text_or_json
from cray_agents.records import Event, StopReason, new_id
from cray_agents.runtime.disk.checksums import FORMAT, NEEDS, check_version, is_whole, with_crc

EVENT_FORMAT = 1  # of a line
HEAD = 160  # characters of an input or output that are kept
ANSWER_HEAD = 200  # characters of an answer that identify it


class Fact(NamedTuple):
    """The facts of one event. The keys of `about` depend on the kind; its values are JSON.

    call: model, started, seconds, ending, tags, prompt, cached, sampled (tokens), redacted, owner;
    and if a conversation may continue it: asked (a hash of its request), said ([tool call ids],
    text).
    run: model, agent, loop, generation, attempt, task, split, stop_reason, started, seconds, error,
    infrastructure, tags, rewards ([[name, source, value, time, turn, giver]]), turns, input and
    output (heads), imported, redacted, owner.
    reward: name, source, value, time, turn, giver.     forget: reason.
    `generation` is a run's iteration, which bodies of earlier versions call so.
    """

    id: str
    run_id: str
    kind: str
    time: float
    about: dict[str, Any]


def facts_of(event: dict[str, Any]) -> Fact:
    """Return the facts of an event, given as in a line. Raises KeyError, TypeError if invalid."""
    kind, body = event["kind"], event["body"]
    if kind == "call":
        about = _call_facts(body)
    elif kind == "run":
        about = _run_facts(body)
    elif kind == "reward":
        about = _reward_facts(body)
    elif kind == "forget":
        about = {"reason": str(body.get("reason", ""))}
    else:
        raise TypeError(f"an event of an unknown kind {kind!r}")
    return Fact(str(event["id"]), str(event["run_id"]), kind, float(event["time"]), about)


def _call_facts(body: dict[str, Any]) -> dict[str, Any]:
    about = {
        "model": body["model"],
        "started": float(body["started"]),
        "seconds": float(body.get("seconds") or 0.0),
        "ending": ending_of(body.get("finish_reason"), body.get("message") or {}),
        "tags": body.get("tags") or [],
        "prompt": _prompt_length(body),
        "cached": int(body.get("cached_tokens") or 0),
        "sampled": len(body.get("token_ids") or ()),
        "redacted": bool(body.get("redacted")),
        "owner": body.get("owner") or "",
    }
    if body.get("asked"):
        answer = body["message"]
        ids = [str(call.get("id")) for call in answer.get("tool_calls") or ()]
        about["asked"] = body["asked"]
        about["said"] = [ids, text_of(answer).strip()[:ANSWER_HEAD]]
    return about


def _prompt_length(body: dict[str, Any]) -> int:
    """Return the number of a call's prompt tokens; of a delta, with those it goes on from."""
    if after := body.get("after"):
        return int(after["tokens"]) + len(body["added_tokens"])
    return len(body.get("prompt_token_ids") or ())


def _run_facts(body: dict[str, Any]) -> dict[str, Any]:
    task, error = body.get("task") or {}, body.get("error") or {}
    return {
        "model": body["model"],
        "agent": body["agent"],
        "loop": body.get("loop"),
        "generation": body.get("iteration", body.get("generation")),
        "attempt": body.get("attempt"),
        "task": task.get("id"),
        "split": task.get("split", "train") if task else None,
        "stop_reason": body["stop_reason"],
        "started": float(body.get("started") or 0.0),
        "seconds": float(body.get("seconds") or 0.0),
        "error": error.get("type"),
        "infrastructure": bool(error.get("infrastructure")),
        "tags": body.get("tags") or [],
        "rewards": [list(_reward_facts(reward).values()) for reward in body.get("rewards") or ()],
        "turns": len((body.get("trajectory") or {}).get("turns") or ()),
        "input": head_of(body["input"]),
        "output": head_of(text_or_json(body.get("output"))),
        "imported": body.get("imported"),
        "redacted": bool(body.get("redacted")),
        "owner": body.get("owner") or "",
    }


def _reward_facts(body: dict[str, Any]) -> dict[str, Any]:
    return {
        "name": body["name"],
        "source": body.get("source", "function"),
        "value": float(body["value"]),
        "time": float(body["time"]),
        "turn": body.get("turn"),
        "giver": body.get("giver") or "",
    }


def ending_of(finish_reason: Any, answer: dict[str, Any]) -> StopReason:
    """Return the stop reason of an undescribed run, from the end and message of its last call."""
    if finish_reason == "cancelled":
        return StopReason.cancelled
    if finish_reason == "error":
        return StopReason.error
    if answer.get("tool_calls"):
        return StopReason.unanswered
    return StopReason.max_tokens if finish_reason == "length" else StopReason.completed


def head_of(text: str) -> str:
    """Return the head of an input or output that the index keeps."""
    return text if len(text) <= HEAD else text[: HEAD - 1] + "…"


# ---- lines
QUOTED = 60  # bytes of a bad line that a message quotes


class LinePlace(NamedTuple):
    """The place of a line: `length` bytes (without its newline) from `offset` in the segment.

    The offset counts uncompressed bytes, so a place stays the same when its segment is sealed.
    """

    segment: str
    offset: int
    length: int

    @property
    def end(self) -> int:
        """The offset of the next line."""
        return self.offset + self.length + 1


class Placed(NamedTuple):
    """The facts of an event, with the place of its line."""

    fact: Fact
    place: LinePlace


def line_of(event: Event) -> bytes:
    """Return the line of an event, without newline. Raises StoreError if its body is not JSON."""
    plain = {
        "id": event.id,
        "run_id": event.run_id,
        "kind": event.kind,
        "time": event.time,
        "body": event.body,
    }
    try:
        text = dump_json(plain)
    except TypeError as error:  # orjson's JSONEncodeError is one
        raise StoreError(f"event {event.id} is not JSON: {error}") from error
    return with_crc(text)


def event_in(line: bytes) -> dict[str, Any]:
    """Decode a line: keys id, run_id, kind, time, body, crc. Raises Corrupt, NewerFormat."""
    if not is_whole(line):
        raise Corrupt(f"not an event, or a damaged one: {line[:QUOTED]!r}")
    try:
        event = parse_line(line)
    except ValueError as error:
        raise Corrupt(f"not an event ({error}): {line[:QUOTED]!r}") from error
    check_version(event.get(FORMAT), EVENT_FORMAT, f"event {event.get('id')}", event.get(NEEDS))
    return event


def parse_line(line: bytes) -> dict[str, Any]:
    """Parse a line; whole numbers keep all digits. Raises ValueError."""
    try:
        return cast("dict[str, Any]", from_json(line))
    except ValueError:  # it may be nested deeper than from_json reads
        return cast("dict[str, Any]", orjson.loads(line))


OPEN, LEFT, SEALED = ".jsonl", ".left.jsonl", ".jsonl.zst"
FORMS = (SEALED, LEFT, OPEN)  # LEFT before OPEN, since it ends the same
COMPACTED = "compacted_"  # prefix of the stem of a segment that replaces others


class Name(NamedTuple):
    """A parsed file name: the stem of a segment, and its form (OPEN, LEFT, SEALED)."""

    stem: str
    form: str


def name_of(name: str) -> Name | None:
    """Parse the name of a segment's file; None for drafts and other files."""
    if name.startswith("."):
        return None
    for form in FORMS:
        if name.endswith(form) and len(name) > len(form):
            return Name(name.removesuffix(form), form)
    return None


def draft_of(target: Path) -> Path:
    """Return a new name for a draft of a file."""
    return target.with_name(f".{target.name}.{new_id('draft')}")


def is_draft(name: str) -> bool:
    """Tell whether a file is a draft, which may still be written or was abandoned."""
    return name.startswith(".") and ".draft_" in name
