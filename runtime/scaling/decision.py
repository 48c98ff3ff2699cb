"""Decision: which replicas start, wake, sleep or end, and which jobs leave or get their nodes.

Pure code: no I/O and no clock. `Scaler.decide` is called once a period with what was observed. It
remembers only the needs of the last minutes, so that a new controller can begin at any moment: it
gives no replica back before it has watched for as long as the rule says.

A class of serving needs as many replicas as its load asks for (Little's law: requests in flight =
arrivals a second x seconds of an answer), with what it takes to answer the waiting ones in time.
It grows at once. It shrinks to the most that it needed within `calm` seconds. So a replica that
was started for a burst is not given back within that time, and need that goes up and down moves
nothing. Nodes come from the free ones, then from jobs: those of low priority first, as few nodes
more than needed as possible, and of the same size the one that has least to lose. simulation.py
runs the same code.
"""

from bisect import bisect_right, insort
from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field
from math import ceil
from typing import Literal

from cray_agents.errors import BadInput

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


_LOOK_AHEAD = 200  # waiting jobs that are considered in a period
_FULL_KV = 0.9  # use of the KV cache above which vLLM begins to preempt requests


@dataclass(frozen=True)
class ServingRule:
    """Rule by which one class of serving is scaled.

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
        share: weight of the class where all classes together need more than there is.
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
    share: float = 1.0

    def __post_init__(self) -> None:
        """Raise BadInput for a rule that cannot be followed."""
        if self.slots < 1 or self.nodes < 1 or not 0 < self.use <= 1 or self.share <= 0:
            raise BadInput(f"{self.name}: slots, nodes, use and share must be positive, use <= 1")
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
        quiet_hours: (from, to) in hours of the day, in which no job is preempted. A class without
            any replica still gets its first one.
        preempts: False: serving waits until jobs end.
        starve: seconds after which a waiting job is not overtaken by smaller ones.
    """

    serving: tuple[ServingRule, ...]
    training_nodes: int = 0
    least_run: float = 300.0
    quiet_hours: tuple[tuple[float, float], ...] = ()
    preempts: bool = True
    starve: float = 3600.0

    def is_quiet(self, hour: float) -> bool:
        """Tell whether an hour of the day is quiet; a span may pass midnight."""
        return any(a <= hour < b if a <= b else hour >= a or hour < b for a, b in self.quiet_hours)


@dataclass
class _Memory:
    """Memory of one class of serving."""

    watched_since: float
    last_request: float
    needs: deque[tuple[float, int]] = field(default_factory=deque)  # falling: a maximum over time

    def note(self, time: float, need: int, seconds: float) -> int:
        """Remember a need; return the largest one of the last `seconds`."""
        while self.needs and self.needs[-1][1] <= need:
            self.needs.pop()
        self.needs.append((time, need))
        while self.needs[0][0] < time - seconds:
            self.needs.popleft()
        return self.needs[0][1]


class Scaler:
    """The controller's judgement. Give it what is observed, period by period."""

    def __init__(self, rules: ScalingRules) -> None:
        self.rules = rules
        self.short: dict[str, int] = {}  # replicas by class for which the last decision had no node
        self._memories: dict[str, _Memory] = {}

    def grows(self, seen: Observed) -> bool:
        """Tell whether a class needs more replicas than it has; `decide` says what follows."""
        views = {view.name: view for view in seen.serving}
        return any(
            self._need(rule, views[rule.name], seen.time)[0] > _have(views[rule.name])
            for rule in self.rules.serving
            if rule.name in views
        )

    def decide(self, seen: Observed) -> list[ScalingAction]:
        """Return what is to be done now. The same observations give the same actions."""
        views = {view.name: view for view in seen.serving}
        rules = [rule for rule in self.rules.serving if rule.name in views]
        needs, keeps = {}, {}
        for rule in rules:
            needs[rule.name], keeps[rule.name] = self._need(rule, views[rule.name], seen.time)
        room = max(0, seen.nodes - self.rules.training_nodes)
        limits = share_nodes(rules, keeps, room)
        actions: list[ScalingAction] = []
        free, short, urgent = seen.free, 0, 0
        self.short = {}
        # a class without any replica comes first, then the one that has waited longest
        for rule in sorted(
            rules, key=lambda r: (_have(views[r.name]) > 0, -views[r.name].waited, r.name)
        ):
            view = views[rule.name]
            grow = min(needs[rule.name], limits[rule.name]) - _have(view)
            if grow > 0:
                rest = self._grow(rule, view, grow, free, actions)
                free -= (grow - rest) * rule.nodes
                self.short[rule.name] = rest
                short += rest * rule.nodes
                if rest == grow and not _have(view):
                    urgent += rule.nodes  # its first replica
            else:
                self._shrink(rule, view, min(keeps[rule.name], limits[rule.name]), seen, actions)
        missing = short - seen.leaving
        if missing > 0 and self.rules.preempts:
            if self.rules.is_quiet(seen.hour):
                missing = min(missing, urgent - seen.leaving)
            actions += self._preempt(seen, missing, set(views))
        if not short:
            actions += self._admit(seen, free)
        return actions

    def _need(self, rule: ServingRule, view: ServingView, time: float) -> tuple[int, int]:
        """Return the replicas that a class needs now, and those that it keeps."""
        memory = self._memories.setdefault(rule.name, _Memory(time, time))
        busy = view.waiting > 0 or view.in_flight > 0 or view.arrivals > 0
        if busy:
            memory.last_request = time
        load = max(view.in_flight, view.arrivals * view.answer_seconds)
        load += view.waiting * view.answer_seconds / rule.clear
        replicas = max(load / rule.slots, view.kv_use / _FULL_KV * view.serving)
        need = max(ceil(replicas / rule.use - 1e-9), 1) + rule.spare if busy else 0
        most = need if rule.most is None else rule.most
        need = max(rule.least, min(need, most))
        keep = memory.note(time, need, rule.calm)
        if time - memory.last_request < rule.empty:
            keep = max(keep, min(1, _have(view)))
        return need, keep

    def _grow(
        self,
        rule: ServingRule,
        view: ServingView,
        grow: int,
        free: int,
        actions: list[ScalingAction],
    ) -> int:
        """Wake and start replicas on free nodes; return how many found none."""
        why = f"{view.waiting} wait, {view.in_flight} in flight, {_have(view)} replicas"
        for level, wakeable in enumerate(view.wakeable, 1):
            count = min(grow, wakeable, free // rule.nodes)
            if count > 0:
                actions.append(ScalingAction("wake", rule.name, count, level, why))
                grow, free = grow - count, free - count * rule.nodes
        if (count := min(grow, free // rule.nodes)) > 0:
            actions.append(ScalingAction("start", rule.name, count, why=why))
            grow -= count
        return grow

    def _shrink(
        self,
        rule: ServingRule,
        view: ServingView,
        keep: int,
        seen: Observed,
        actions: list[ScalingAction],
    ) -> None:
        """Let replicas sleep, or end them where enough sleep already."""
        if seen.time - self._memories[rule.name].watched_since < rule.calm:
            return
        count = min(view.serving, _have(view) - keep)
        for level, (asleep, places) in enumerate(
            zip(view.asleep, (rule.warm, rule.cold), strict=True), 1
        ):
            if (some := min(count, places - asleep)) > 0:
                why = f"at most {keep} were needed for {rule.calm:g} s"
                actions.append(ScalingAction("sleep", rule.name, some, level, why))
                count -= some
        if count > 0:
            why = f"at most {keep} were needed for {rule.calm:g} s"
            actions.append(ScalingAction("end", rule.name, count, why=why))

    def _preempt(self, seen: Observed, missing: int, classes: set[str]) -> list[ScalingAction]:
        """Choose jobs whose nodes serving gets once they have saved."""
        spare = sum(job.nodes for job in seen.running) - self.rules.training_nodes
        by_priority: dict[int, list[tuple[int, int, float, float, str]]] = {}
        for job in seen.running:
            if job.preemptible and seen.time - job.since >= self.rules.least_run:
                sleepers = sum(count for name, count in job.sleepers.items() if name in classes)
                lost = job.unsaved(seen.time)
                order = (job.nodes, -sleepers, lost, job.save_seconds, job.name)
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

    def _admit(self, seen: Observed, free: int) -> list[ScalingAction]:
        """Let waiting jobs begin on free nodes, in their order; smaller ones fill the gaps."""
        actions = []
        for job in seen.queued[:_LOOK_AHEAD]:
            if free <= 0:
                break
            if job.nodes <= free:
                actions.append(ScalingAction("admit", job.name, why=f"{free} nodes are free"))
                free -= job.nodes
            elif seen.time - job.since > self.rules.starve:
                break
        return actions


def share_nodes(rules: Sequence[ServingRule], needs: dict[str, int], room: int) -> dict[str, int]:
    """Divide `room` nodes among classes; return the replicas that each may have.

    What a class needs less than its share goes to the others, by their shares. Where all fit, each
    may have what it needs.
    """
    limits: dict[str, int] = {}
    open_rules = list(rules)
    while open_rules:
        weight = sum(rule.share for rule in open_rules)
        fits = [
            rule
            for rule in open_rules
            if needs[rule.name] * rule.nodes <= room * rule.share / weight + 1e-9
        ]
        if not fits:  # all of them need more than their share
            exact = {rule.name: room * rule.share / weight / rule.nodes for rule in open_rules}
            limits |= {name: int(part + 1e-9) for name, part in exact.items()}
            room -= sum(limits[rule.name] * rule.nodes for rule in open_rules)
            for rule in sorted(open_rules, key=lambda r: limits[r.name] - exact[r.name]):
                if rule.nodes <= room:  # what is left goes to the largest fractions
                    limits[rule.name] += 1
                    room -= rule.nodes
            break
        for rule in fits:
            limits[rule.name] = needs[rule.name]
            room -= needs[rule.name] * rule.nodes
        open_rules = [rule for rule in open_rules if rule not in fits]
    return limits


def _have(view: ServingView) -> int:
    """Return the replicas of a class that serve or soon will."""
    return view.serving + view.starting
