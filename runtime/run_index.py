"""Which events exist and where they lie, by run: the part of the store that is kept in memory.

Bodies stay on the disk; what is kept of a run is its places and the few fields that queries ask
for. Events may come in any order. Called by store.py; assembly.py makes Runs of what it finds.
"""

import bisect
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from cray_agents.runtime.conversations import Conversations
from cray_agents.runtime.segments import Place


@dataclass(frozen=True)
class RunQuery:
    """Which runs: each field that is not None must match. In order of run id, after `after`.

    `task` is a task's id; `model` a `name@N`, or a `name` in any version.
    """

    loop: str | None = None
    generation: int | None = None
    agent: str | None = None
    task: str | None = None
    split: str | None = None
    stop_reason: str | None = None
    model: str | None = None
    after: str | None = None
    limit: int | None = None


@dataclass
class Entry:
    """What is known of one run. `run` is the place of its newest `run` event."""

    run_id: str
    run: Place | None = None
    run_rank: tuple[float, str] = (0.0, "")
    calls: dict[str, Place] = field(default_factory=dict)
    rewards: list[Place] = field(default_factory=list)
    facts: dict[str, Any] = field(default_factory=dict)
    models: set[str] = field(default_factory=set)
    last_call: tuple[float, str] = (0.0, "")
    cancelled: bool = False


class RunIndex:
    """Event ids, and an Entry per run, in order of run id."""

    def __init__(self) -> None:
        self.event_ids: set[str] = set()
        self.keyed: dict[str, Place] = {}  # calls by the key under which they may be repeated
        self.conversations = Conversations()
        self._entries: dict[str, Entry] = {}
        self._order: list[str] = []

    def add(self, event: dict[str, Any], place: Place) -> bool:
        """Take an event in; False if its id is known. Raises KeyError, TypeError on nonsense."""
        event_id, run_id, kind, body = event["id"], event["run_id"], event["kind"], event["body"]
        if event_id in self.event_ids:
            return False
        entry = self._entries.get(run_id) or Entry(run_id)
        if kind == "call":
            _add_call(entry, body, place)
            if "key" in body:
                self.keyed[body["key"]] = place
            if "asked" in body:
                self.conversations.learn(body["asked"], run_id, body["message"])
        elif kind == "run":
            _add_run(entry, event, place)
        elif kind == "reward":
            entry.rewards.append(place)
        else:
            raise TypeError(f"an event of an unknown kind {kind!r}")
        if run_id not in self._entries:
            self._entries[run_id] = entry
            bisect.insort(self._order, run_id)
        self.event_ids.add(event_id)
        return True

    def get(self, run_id: str) -> Entry | None:
        """The run's entry, if any event of it is known."""
        return self._entries.get(run_id)

    def select(self, query: RunQuery) -> list[Entry]:
        """The matching runs that have been said or done: a reward alone makes no run."""
        start = bisect.bisect_right(self._order, query.after) if query.after else 0
        found = []
        for run_id in self._order[start:]:
            entry = self._entries[run_id]
            if (entry.run or entry.calls) and _matches(entry, query):
                found.append(entry)
                if len(found) == query.limit:
                    break
        return found


def _add_call(entry: Entry, body: dict[str, Any], place: Place) -> None:
    rank = (float(body["started"]), str(body["id"]))
    entry.models.update(_names(body["model"]))
    entry.calls[rank[1]] = place
    if rank >= entry.last_call:
        entry.last_call = rank
        entry.cancelled = body.get("finish_reason") == "cancelled"


def _add_run(entry: Entry, event: dict[str, Any], place: Place) -> None:
    body = event["body"]
    rank = (float(event["time"]), str(event["id"]))
    entry.models.update(_names(body["model"]))
    if entry.run is not None and rank < entry.run_rank:
        return
    task = body.get("task") or {}
    entry.run, entry.run_rank = place, rank
    entry.facts = {
        "loop": body.get("loop"),
        "generation": body.get("generation"),
        "agent": body["agent"],
        "task": task.get("id"),
        "split": task.get("split"),
        "stop_reason": body["stop_reason"],
    }


def _names(model: str) -> Iterator[str]:
    yield model
    yield model.partition("@")[0]


def _matches(entry: Entry, query: RunQuery) -> bool:
    if query.model is not None and query.model not in entry.models:
        return False
    facts = entry.facts or {"stop_reason": "cancelled" if entry.cancelled else "completed"}
    return all(
        wanted is None or facts.get(name) == wanted
        for name, wanted in (
            ("loop", query.loop),
            ("generation", query.generation),
            ("agent", query.agent),
            ("task", query.task),
            ("split", query.split),
            ("stop_reason", query.stop_reason),
        )
    )
