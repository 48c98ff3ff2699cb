"""Which events exist and where they lie, by run: the part of the store that is kept in memory.

Bodies stay on the disk; what is kept of a run is its places and the few fields that queries ask
for. Events may come in any order. Called by store.py; assembly.py makes Runs of what it finds.
"""

import bisect
from dataclasses import dataclass
from typing import Any

from cray_agents.runtime.conversations import Conversations
from cray_agents.runtime.segments import Place

_NEVER = (0.0, "")


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


@dataclass(slots=True)
class Entry:
    """What is known of one run. `run` is the place of its newest `run` event.

    There may be millions: what most runs lack is shared, and nothing is a container before it must.
    """

    run_id: str
    run: Place | None = None
    run_rank: tuple[float, str] = _NEVER
    calls: tuple[Place, ...] = ()
    rewards: tuple[Place, ...] = ()
    facts: dict[str, Any] | None = None
    models: frozenset[str] = frozenset()
    last_call: float = 0.0
    cancelled: bool = False


class RunIndex:
    """Where each event lies, by its id, and an Entry per run."""

    def __init__(self) -> None:
        self.places: dict[str, Place] = {}
        self.conversations = Conversations()
        self._entries: dict[str, Entry] = {}
        self._order: list[str] = []  # run ids, sorted but for the fresh ones
        self._fresh = False
        self._models: dict[tuple[frozenset[str], str], frozenset[str]] = {}

    def add(self, event: dict[str, Any], place: Place) -> bool:
        """Take an event in; False if its id is known. Raises KeyError, TypeError on nonsense."""
        event_id, run_id, kind, body = event["id"], event["run_id"], event["kind"], event["body"]
        if event_id in self.places:
            return False
        entry = self._entries.get(run_id) or Entry(run_id)
        if kind == "call":
            self._add_call(entry, body, place)
        elif kind == "run":
            self._add_run(entry, event, place)
        elif kind == "reward":
            entry.rewards += (place,)
        else:
            raise TypeError(f"an event of an unknown kind {kind!r}")
        if run_id not in self._entries:
            self._entries[run_id] = entry
            self._order.append(run_id)
            self._fresh = True
        self.places[event_id] = place
        return True

    def get(self, run_id: str) -> Entry | None:
        """The run's entry, if any event of it is known."""
        return self._entries.get(run_id)

    def select(self, query: RunQuery) -> list[Entry]:
        """The matching runs that have been said or done: a reward alone makes no run."""
        if self._fresh:
            self._order.sort()
            self._fresh = False
        start = bisect.bisect_right(self._order, query.after) if query.after else 0
        found = []
        for run_id in self._order[start:]:
            entry = self._entries[run_id]
            if (entry.run or entry.calls) and _matches(entry, query):
                found.append(entry)
                if len(found) == query.limit:
                    break
        return found

    def _add_call(self, entry: Entry, body: dict[str, Any], place: Place) -> None:
        started = float(body["started"])
        entry.models = self._with(entry.models, body["model"])
        entry.calls += (place,)
        if started >= entry.last_call:
            entry.last_call = started
            entry.cancelled = body.get("finish_reason") == "cancelled"
        if "asked" in body:
            self.conversations.learn(body["asked"], entry.run_id, body["message"])

    def _add_run(self, entry: Entry, event: dict[str, Any], place: Place) -> None:
        body = event["body"]
        rank = (float(event["time"]), str(event["id"]))
        entry.models = self._with(entry.models, body["model"])
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

    def _with(self, models: frozenset[str], model: str) -> frozenset[str]:
        """These models and one more, by its name too; equal sets are one set."""
        found = self._models.get((models, model))
        if found is None:
            found = models | {model, model.partition("@")[0]}
            found = self._models.setdefault((frozenset(), " ".join(sorted(found))), found)
            self._models[models, model] = found
        return found


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
