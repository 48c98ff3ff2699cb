"""Observed state of a cluster, and the actions that follow from it.

A controller makes one `Observed` a period, of a real cluster or of a simulated one. decision.py
turns it into actions. All times are in seconds of the observer's clock. A node is the unit: a
replica and a job hold whole nodes.
"""

from dataclasses import dataclass, field
from typing import Literal

ActionKind = Literal["start", "wake", "sleep", "end", "preempt", "admit"]


@dataclass(slots=True)
class ServingView:
    """One class of serving: the requests for a model, and the replicas that answer them.

    Attributes:
        waiting: requests that wait.
        waited: seconds that the oldest of them has waited.
        in_flight: requests that are being answered.
        arrivals: requests a second, over the last period.
        answer_seconds: mean seconds of an answer once it has begun.
        kv_use: share of the KV cache in use, 0 to 1.
        starting: replicas that will serve: they start, wake, or wait for a place.
        draining: replicas that answer their last requests.
        asleep: sleeping replicas, at level 1 and at level 2.
        wakeable: those of them whose nodes are free.
    """

    name: str
    waiting: int = 0
    waited: float = 0.0
    in_flight: int = 0
    arrivals: float = 0.0
    answer_seconds: float = 1.0
    kv_use: float = 0.0
    serving: int = 0
    starting: int = 0
    draining: int = 0
    asleep: tuple[int, int] = (0, 0)
    wakeable: tuple[int, int] = (0, 0)


@dataclass(slots=True)
class TrainingView:
    """A training job or session that runs or waits.

    Attributes:
        since: when it began to run, or to wait.
        save_seconds: seconds from the request to stop until its state is saved.
        sleepers: sleeping replicas on its nodes, by class of serving.
        saved_at: when its newest resume point was made; None: when it began.
        save_every: seconds from there to each further resume point; 0: none is known of.
    """

    name: str
    nodes: int
    since: float
    priority: int = 0
    preemptible: bool = True
    save_seconds: float = 60.0
    sleepers: dict[str, int] = field(default_factory=dict)
    saved_at: float | None = None
    save_every: float = 0.0

    def unsaved(self, time: float) -> float:
        """Return the seconds of work that would be lost if it could not save once more."""
        seconds = max(0.0, time - (self.since if self.saved_at is None else self.saved_at))
        return seconds % self.save_every if self.save_every else seconds


@dataclass(slots=True)
class Observed:
    """A cluster at one moment.

    Attributes:
        time: seconds; it only grows.
        hour: hour of the day, 0 to 24.
        nodes: nodes that are up.
        free: those that nobody holds.
        leaving: those whose replica drains or whose job saves.
        queued: jobs that wait, the next one first.
    """

    time: float
    hour: float
    nodes: int
    free: int
    leaving: int
    serving: list[ServingView]
    running: list[TrainingView]
    queued: list[TrainingView]


@dataclass(frozen=True, slots=True)
class ScalingAction:
    """One thing to do.

    `name` is a class of serving (start, wake, sleep, end) or a job (preempt, admit). `count`:
    replicas. `level`: of the sleep that begins or ends. Which replicas of a class sleep or end is
    the executor's choice; the least busy ones lose least.
    """

    kind: ActionKind
    name: str
    count: int = 1
    level: int = 0
    why: str = ""
