"""Decision: whether replicas start, wake, sleep or end, and which jobs leave their nodes for them.

Pure code: no I/O and no clock. `Scaler.decide` is called once a period with what was observed. It
remembers only the needs of the last minutes, so that a new controller can begin at any moment: it
gives no replica back before it has watched for as long as the rule says.

There must be as many replicas as the load asks for (Little's law: requests in flight = arrivals a
second x seconds of an answer), with what it takes to answer the waiting ones in time. They grow at
once. They shrink to the most that were needed within `calm` seconds. So a replica that was started
for a burst is not given back within that time, and need that goes up and down moves nothing. Nodes
come from the free ones, then from jobs: those of low priority first, as few nodes more than needed
as possible, and of the same size the one that has least to lose. When a job gets its nodes again is
Slurm's to say. Called by cray_agents/server/replica_count.py; bench/cluster/simulation.py runs it.
"""

from bisect import bisect_right, insort
from collections import deque
from dataclasses import dataclass
from math import ceil
from typing import Literal

from cray_agents.errors import BadInput

ActionKind = Literal["start", "wake", "sleep", "end", "preempt"]


@dataclass(slots=True)
class ServingView:
    """The requests, and the replicas that answer them.

    Attributes:
        waiting: requests that wait.
        in_flight: requests that are being answered.
        arrivals: requests a second, over the last period.
        answer_seconds: mean seconds of an answer once it has begun.
        starting: replicas that will serve: they start, wake, or wait for a place.
        draining: replicas that answer their last requests.
        asleep: sleeping replicas, at level 1 and at level 2.
        wakeable: those of them whose nodes are free.
    """

    waiting: int = 0
    in_flight: int = 0
    arrivals: float = 0.0
    answer_seconds: float = 1.0
    serving: int = 0
    starting: int = 0
    draining: int = 0
    asleep: tuple[int, int] = (0, 0)
    wakeable: tuple[int, int] = (0, 0)

    @property
    def replicas(self) -> int:
        """Replicas that serve or soon will."""
        return self.serving + self.starting


@dataclass(slots=True)
class TrainingView:
    """A training job or session that runs.

    Attributes:
        since: when it began to run.
        sleepers: sleeping replicas on its nodes.
        saved_at: when its newest resume point was made; None: when it began.
    """

    name: str
    nodes: int
    since: float
    priority: int = 0
    sleepers: int = 0
    saved_at: float | None = None

    def unsaved(self, time: float) -> float:
        """Return the seconds of work that would be lost if it could not save once more."""
        return max(0.0, time - (self.since if self.saved_at is None else self.saved_at))


@dataclass(slots=True)
class Observed:
    """A cluster at one moment.

    Attributes:
        time: seconds; it only grows.
        hour: hour of the day, 0 to 24.
        nodes: nodes that are up.
        free: those that nobody holds.
        leaving: those whose replica drains or whose job saves.
    """

    time: float
    hour: float
    nodes: int
    free: int
    leaving: int
    serving: ServingView
    running: list[TrainingView]


@dataclass(frozen=True, slots=True)
class ScalingAction:
    """One thing to do.

    `name` is the rule's (start, wake, sleep, end) or a job's (preempt). `count`: replicas. `level`:
    of the sleep that begins or ends. Which replicas sleep or end is the executor's choice; the
    least busy ones lose least.
    """

    kind: ActionKind
    name: str
    count: int = 1
    level: int = 0
    why: str = ""


@dataclass(frozen=True)
class ServingRule:
    """Rule by which replicas are scaled.

    Attributes:
        slots: requests that a replica answers at once.
        nodes: nodes of a replica.
        least, most: replicas; with `least` 0 it goes down to none. `most` None: no limit.
        use: share of the slots to fill.
        spare: replicas beyond those, while there are requests.
        clear: seconds within which waiting requests are to be answered.
        calm: seconds for which fewer replicas were needed before one is given back.
        empty: seconds without a request before the last replica goes.
        warm, cold: replicas that may sleep at level 1 and at level 2; those beyond are ended.
    """

    name: str
    slots: int
    nodes: int = 1
    least: int = 0
    most: int | None = None
    use: float = 0.8
    spare: int = 0
    clear: float = 30.0
    calm: float = 600.0
    empty: float = 1800.0
    warm: int = 0
    cold: int = 0

    def __post_init__(self) -> None:
        """Raise BadInput for a rule that cannot be followed."""
        if self.slots < 1 or self.nodes < 1 or not 0 < self.use <= 1:
            raise BadInput(f"{self.name}: slots, nodes and use must be positive, use <= 1")
        if self.least < 0 or (self.most is not None and self.most < max(1, self.least)):
            raise BadInput(f"{self.name}: least = {self.least} and most = {self.most} do not fit")
        if min(self.clear, self.calm) <= 0 or self.empty < self.calm:
            raise BadInput(f"{self.name}: give clear > 0, calm > 0, and empty >= calm, in seconds")


@dataclass(frozen=True)
class ScalingRules:
    """The rules of a cluster.

    Attributes:
        training_nodes: nodes of running jobs that serving never takes.
        least_run: seconds that a job runs before it may be preempted.
        quiet_hours: (from, to) in hours of the day, in which no job is preempted, but for a first
            replica.
        preempts: False: serving waits until jobs end.
    """

    serving: ServingRule
    training_nodes: int = 0
    least_run: float = 300.0
    quiet_hours: tuple[tuple[float, float], ...] = ()
    preempts: bool = True

    def is_quiet(self, hour: float) -> bool:
        """Tell whether an hour of the day is quiet; a span may pass midnight."""
        return any(a <= hour < b if a <= b else hour >= a or hour < b for a, b in self.quiet_hours)


class Scaler:
    """The controller's judgement. Give it what is observed, period by period."""

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self.short = 0  # replicas for which the last decision had no node
        self._needs = deque[tuple[float, int]]()  # falling: a maximum over time
        self._watched_since = self._last_request = float("-inf")

    def grows(self, seen: Observed) -> bool:
        """Tell whether more replicas are needed than there are; `decide` says what follows."""
        return self.need(seen.serving, seen.time)[0] > seen.serving.replicas

    def decide(self, seen: Observed) -> list[ScalingAction]:
        """Return what is to be done now. The same observations give the same actions."""
        rules, rule, view = self.rules, self.rules.serving, seen.serving
        need, keep = self.need(view, seen.time)
        limit = max(0, seen.nodes - rules.training_nodes) // rule.nodes
        grow = min(need, limit) - view.replicas
        self.short = 0
        if grow <= 0:
            return self.shrink(view, min(keep, limit), seen.time)
        actions, self.short = self.grow(view, grow, seen.free)
        missing = self.short * rule.nodes - seen.leaving
        if missing > 0 and rules.preempts:
            if rules.is_quiet(seen.hour):
                first = self.short == grow and not view.replicas
                missing = min(missing, rule.nodes - seen.leaving if first else 0)
            actions += self.preempt(seen.running, missing, seen.time)
        return actions

    def need(self, view: ServingView, time: float) -> tuple[int, int]:
        """Return the replicas that are needed now, and those that are kept."""
        rule = self.rules.serving
        if not self._needs:
            self._watched_since = self._last_request = time
        busy = view.waiting > 0 or view.in_flight > 0 or view.arrivals > 0
        if busy:
            self._last_request = time
        load = max(view.in_flight, view.arrivals * view.answer_seconds)
        load += view.waiting * view.answer_seconds / rule.clear
        need = max(ceil(load / rule.slots / rule.use - 1e-9), 1) + rule.spare if busy else 0
        most = need if rule.most is None else rule.most
        need = max(rule.least, min(need, most))
        keep = self._note(time, need)
        if time - self._last_request < rule.empty:
            keep = max(keep, min(1, view.replicas))
        return need, keep

    def _note(self, time: float, need: int) -> int:
        """Remember a need; return the largest one of the last `calm` seconds."""
        while self._needs and self._needs[-1][1] <= need:
            self._needs.pop()
        self._needs.append((time, need))
        while self._needs[0][0] < time - self.rules.serving.calm:
            self._needs.popleft()
        return self._needs[0][1]

    def grow(self, view: ServingView, grow: int, free: int) -> tuple[list[ScalingAction], int]:
        """Wake and start replicas on free nodes; return how many found none, too."""
        rule, actions = self.rules.serving, []
        why = f"{view.waiting} wait, {view.in_flight} in flight, {view.replicas} replicas"
        for level, wakeable in enumerate(view.wakeable, 1):
            count = min(grow, wakeable, free // rule.nodes)
            if count > 0:
                actions.append(ScalingAction("wake", rule.name, count, level, why))
                grow, free = grow - count, free - count * rule.nodes
        if (count := min(grow, free // rule.nodes)) > 0:
            actions.append(ScalingAction("start", rule.name, count, why=why))
            grow -= count
        return actions, grow

    def shrink(self, view: ServingView, keep: int, time: float) -> list[ScalingAction]:
        """Let replicas sleep, or end them where enough sleep already."""
        rule = self.rules.serving
        actions: list[ScalingAction] = []
        if time - self._watched_since < rule.calm:
            return actions
        count = min(view.serving, view.replicas - keep)
        why = f"at most {keep} were needed for {rule.calm:g} s"
        light, deep = view.asleep
        light += max(0, deep - rule.cold)  # they found no memory for level 1, and have its places
        for level, (asleep, places) in enumerate(((light, rule.warm), (deep, rule.cold)), 1):
            if (some := min(count, places - asleep)) > 0:
                actions.append(ScalingAction("sleep", rule.name, some, level, why))
                count -= some
        if count > 0:
            actions.append(ScalingAction("end", rule.name, count, why=why))
        return actions

    def preempt(
        self, running: list[TrainingView], missing: int, time: float
    ) -> list[ScalingAction]:
        """Choose jobs whose nodes serving gets once they have saved."""
        spare = sum(job.nodes for job in running) - self.rules.training_nodes
        by_priority: dict[int, list[tuple[int, int, float, str]]] = {}
        for job in running:
            if time - job.since >= self.rules.least_run:
                order = (job.nodes, -job.sleepers, job.unsaved(time), job.name)
                insort(by_priority.setdefault(job.priority, []), order)
        actions = []
        for priority in sorted(by_priority):
            jobs = by_priority[priority]
            while missing > 0 and jobs:
                # the largest that does not exceed what is missing, else the smallest
                at = max(0, bisect_right(jobs, missing, key=lambda job: job[0]) - 1)
                nodes = jobs[at][0]
                while at and jobs[at - 1][0] == nodes:
                    at -= 1  # of the same size: with the most sleepers, then the least to lose
                nodes, *_, name = jobs.pop(at)
                if nodes > spare:
                    continue
                why = f"serving is {missing} nodes short"
                actions.append(ScalingAction("preempt", name, why=why))
                missing, spare = missing - nodes, spare - nodes
        return actions
