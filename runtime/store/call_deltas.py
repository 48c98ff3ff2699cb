"""Call deltas: the line of a call holds what the call adds to an earlier one of its run.

A conversation's request repeats all messages before it, and its prompt all their tokens. So a
call's body is stored without them:

    "after": {"call": "chatcmpl-1", "crc": "0a1b2c3d", "messages": 12, "tokens": 850, "tools": true}

The first 12 messages are those of that call and its answer, and `added_messages` has the others.
The first 850 tokens of the prompt are those of its prompt and its sampled ones, and `added_tokens`
has the others. `tools`: they are the same ones. `crc`: of that call's line, as two processes may
record a call under one id. Without `after` a body is whole, as all were before there were deltas.
A call goes on from one that is on the disk, or in the same append. What goes on from a call that
cannot be read cannot be read either.

Written and read by store.py, which hands out whole bodies alone.
"""

import threading
from array import array
from collections import OrderedDict
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cray_agents.errors import Corrupt
from cray_agents.exact_json import dump_json

MOST = 256 * 2**20  # bytes of calls remembered, about
BRANCHES = 4  # conversations remembered of a run
WORTH = 256  # bytes that a delta saves at least

Body = dict[str, Any]
Event = dict[str, Any]  # a decoded line


@dataclass(slots=True)
class KnownCall:
    """What a later call may begin with: messages as JSON, and tokens, each with the answer's.

    `replaces`: the call that it goes on from, of which it has everything. `crc`: of its line.
    """

    run_id: str
    id: str
    replaces: str
    messages: list[bytes]
    tokens: "array[int]"
    tools: bytes
    size: int
    crc: str = ""


class KnownCalls:
    """The newest calls of the newest runs, from which later ones go on. Safe in any thread."""

    def __init__(self, most: int = MOST) -> None:
        self._most = most
        self._runs: OrderedDict[str, list[KnownCall]] = OrderedDict()
        self._size = 0
        self._lock = threading.Lock()

    def learn(self, call: KnownCall) -> None:
        """Remember a call that is on the disk."""
        with self._lock:
            known = [one for one in self._runs.get(call.run_id, ()) if one.id != call.replaces]
            self._forget(call.run_id)
            self._runs[call.run_id] = known = [*known, call][-BRANCHES:]
            self._size += sum(one.size for one in known)
            while self._size > self._most:
                self._forget(next(iter(self._runs)))

    def forget(self, run_id: str) -> None:
        """Let no later call go on from a run's calls, which are forgotten."""
        with self._lock:
            self._forget(run_id)

    def _forget(self, run_id: str) -> None:
        self._size -= sum(call.size for call in self._runs.pop(run_id, ()))

    def shorten(self, body: Body, newer: Sequence[KnownCall] = ()) -> tuple[Body, KnownCall | None]:
        """Return a call's body as it is written, and what a later call may begin with.

        `newer`: calls of this run that are written with it, before it. None where the body is such
        that nothing goes on from it.
        """
        try:
            tokens = array("i", body["prompt_token_ids"])
            sampled = array("i", body["token_ids"])
            messages = [dump_json(message) for message in body["messages"]]
            answer, tools = dump_json(body["message"]), dump_json(body["tools"])
        except (KeyError, TypeError, OverflowError):  # an import may lack some
            return body, None
        with self._lock:
            known = [*self._runs.get(body["run_id"], ()), *newer]
        written, saved, replaces = body, WORTH, ""
        for call in reversed(known):
            same = _shared(call.messages, messages)
            read = _shared(call.tokens, tokens)
            saves = sum(map(len, messages[:same])) + 5 * read
            if saves > saved:
                after = {"call": call.id, "crc": call.crc, "messages": same, "tokens": read}
                written, saved = _without(body, {**after, "tools": tools == call.tools}), saves
                replaces = call.id if same >= len(call.messages) - 1 else ""
        messages.append(answer)
        tokens += sampled
        size = sum(map(len, messages)) + 4 * len(tokens) + len(tools)
        known_call = KnownCall(body["run_id"], body["id"], replaces, messages, tokens, tools, size)
        return written, known_call


def _without(body: Body, after: dict[str, Any]) -> Body:
    """Return a body without the beginning that another call has."""
    dropped = {"messages", "prompt_token_ids"} | ({"tools"} if after["tools"] else set())
    return {
        **{name: value for name, value in body.items() if name not in dropped},
        "after": after,
        "added_messages": body["messages"][after["messages"] :],
        "added_tokens": body["prompt_token_ids"][after["tokens"] :],
    }


def _shared(known: Sequence[Any], other: Sequence[Any]) -> int:
    """Return with how many equal items two sequences of one type begin."""
    low, high = 0, min(len(known), len(other))
    if known[:high] == other[:high]:
        return high
    while low + 1 < high:  # the first `low` are equal, the first `high` are not
        middle = (low + high) // 2
        if known[low:middle] == other[low:middle]:
            low = middle
        else:
            high = middle
    return low


class WholeCalls:
    """Makes bodies whole again. `load` returns a run's calls as they are written, by id.

    Here an event is a decoded line; its `crc` tells it from another one of its id.
    """

    def __init__(self, load: Callable[[str], Mapping[str, Event]]) -> None:
        self._load = load
        self._run_id = ""
        self._written: Mapping[str, Event] = {}
        self._last: Event = {"id": ""}  # made whole; the next call mostly goes on from it

    def whole(self, event: Event) -> Body:
        """Return the body of an event, with what a delta goes on from. Raises Corrupt."""
        body: Body = event["body"]
        if event["kind"] != "call":
            return body
        if after := body.get("after"):
            if event["run_id"] != self._run_id:
                self._run_id, self._written = event["run_id"], self._load(event["run_id"])
            made = {name: value for name, value in body.items() if name not in _OF_DELTA}
            made["messages"] = self._beginning(event, "messages", "added_messages")
            made["prompt_token_ids"] = self._beginning(event, "tokens", "added_tokens")
            if after["tools"]:
                made["tools"] = self._tools(event)
            body = made
        self._last = {**event, "body": body}
        return body

    def _beginning(self, event: Event, count: str, added: str) -> list[Any]:
        """Return all messages, or prompt tokens, of a delta."""
        passed: set[str] = set()
        pieces, wanted = [event["body"][added]], event["body"]["after"][count]
        while wanted:
            base = self._base(event, passed)
            body = base["body"]
            shared = body["after"][count] if "after" in body else 0
            if count == "tokens":
                own = body.get("added_tokens", body.get("prompt_token_ids")) + body["token_ids"]
            else:
                own = [*body.get("added_messages", body.get("messages")), body["message"]]
            if len(own) + shared < wanted:
                raise Corrupt(f"call {event['id']} goes on from more than {base['id']} has")
            if wanted > shared:
                pieces.append(own[: wanted - shared])
                wanted = shared
            event = base
        return [item for piece in reversed(pieces) for item in piece]

    def _tools(self, event: Event) -> Any:
        passed: set[str] = set()
        while "tools" not in event["body"]:
            event = self._base(event, passed)
        return event["body"]["tools"]

    def _base(self, event: Event, passed: set[str]) -> Event:
        """Return the event that a delta goes on from; `passed` gets its name."""
        after = event["body"]["after"]
        name = after["call"]
        base = self._last if self._last["id"] == name else self._written.get(name)
        if base is None or base["crc"] != after["crc"] or name in passed:
            raise Corrupt(f"call {event['id']} goes on from {name}, which cannot be read")
        passed.add(name)
        return base


_OF_DELTA = {"after", "added_messages", "added_tokens"}
