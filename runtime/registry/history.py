"""What happened to a name: promotions, rollbacks, rejections, canaries, each with who and why.

registry.py reads it from the disk, appends to it, and asks it what the name means.
"""

import time
from typing import Any, Literal

from pydantic import Field

from cray_agents.records import ModelVersion, Record

EventKind = Literal["promoted", "rolled_back", "rejected", "canary_started", "canary_ended"]


class ModelEvent(Record):
    """What was done with a version, by whom and why; `number` counts what happened to the name.

    From a promotion or a rollback on the bare `name` means `version`. `numbers`: what it was
    decided by.
    """

    name: str
    number: int
    version: int
    kind: EventKind = "promoted"
    who: str = ""
    reason: str = ""
    numbers: dict[str, Any] = Field(default_factory=dict)
    time: float = Field(default_factory=time.time)


class History:
    """One name's history as it was read at `read_at` (monotonic seconds).

    `promoted`: the versions that the name meant, which a rollback goes back through; `canary`: the
    event that started the one that runs.
    """

    def __init__(self, versions: dict[int, ModelVersion], events: dict[int, ModelEvent]) -> None:
        self.versions = versions
        self.events = events
        self.promoted: list[int] = []
        self.canary: ModelEvent | None = None
        for number in sorted(events):
            self._follow(events[number])
        self.read_at = time.monotonic()

    def _follow(self, event: ModelEvent) -> None:
        if event.kind == "rejected":
            return
        self.canary = event if event.kind == "canary_started" else None
        if event.kind == "rolled_back" and event.version in self.promoted:
            while self.promoted[-1] != event.version:
                self.promoted.pop()
        elif event.kind in ("promoted", "rolled_back"):
            self.promoted.append(event.version)

    def last(self, version: int, *kinds: str) -> ModelEvent | None:
        """The newest event of these kinds about a version."""
        for number in sorted(self.events, reverse=True):
            event = self.events[number]
            if event.version == version and event.kind in kinds:
                return event
        return None
