"""Simulation: a cluster of up to 100,000 nodes in discrete events, under a controller.

`Simulation` plays a trace (traces.py). Its controller has the platform's rules (controller.py), or
is the static split of static_split.py. Requests of a step are one cohort, so a day of 10,000 nodes
takes seconds. Times of waiting are exact to a step.

What is simplified: an answer takes its class's mean time; a replica has one node; a sleeping one
leaves its GPUs to others and keeps host memory, one a node; a job that is asked to leave always
saves in time; what a node's failure broke off is answered again from the beginning.
"""

import heapq
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from functools import partial
from itertools import chain, count, islice
from typing import NamedTuple, Protocol

from bench.cluster.traces import HOUR, Failure, JobTrace, ServingTrace, Trace
from cray_agents.runtime.scaling.decision import ServingView, TrainingView

PERIOD = 5.0  # seconds between two decisions
_LOOK_AHEAD = 256  # waiting jobs that the controller is shown


@dataclass(frozen=True, slots=True)
class Action:
    """One thing to do: start, wake, sleep or end replicas of a class; preempt or admit a job."""

    kind: str
    name: str
    count: int = 1
    level: int = 0


@dataclass(slots=True)
class ClassView(ServingView):
    """One class of serving. `waited`: seconds that its oldest waiting request has waited."""

    name: str = ""
    waited: float = 0.0


class ClusterView(NamedTuple):
    """The cluster at one moment: `Observed` with several classes, and the jobs that wait."""

    time: float
    hour: float
    nodes: int
    free: int
    leaving: int
    serving: list[ClassView]
    running: list[TrainingView]
    queued: list[TrainingView]


class Controller(Protocol):
    """`Cluster` | `StaticSplit`."""

    def decide(self, seen: ClusterView) -> list[Action]: ...


@dataclass
class Simulated:
    """Outcome of a trace under a controller. Node-seconds are of nodes that were up.

    Attributes:
        waits: requests by seconds that they waited.
        answered_work: node-seconds of answers that began in time, at full replicas.
        trained_work: node-seconds of steps that were kept.
        lost_steps: steps that failures undid.
        unanswered: requests that waited at the end.
    """

    node_seconds: float = 0.0
    held_seconds: float = 0.0
    answered_work: float = 0.0
    trained_work: float = 0.0
    lost_steps: float = 0.0
    preemptions: int = 0
    starts: int = 0
    wakes: int = 0
    unanswered: int = 0
    jobs_done: int = 0
    waits: dict[float, int] = field(default_factory=dict)

    @property
    def goodput(self) -> float:
        """Share of all node-seconds whose work was kept and came in time."""
        return (self.answered_work + self.trained_work) / self.node_seconds

    @property
    def utilisation(self) -> float:
        """Share of all node-seconds in which a replica or a job had the node."""
        return self.held_seconds / self.node_seconds

    def wait(self, share: float) -> float:
        """Return the seconds within which that share of the requests began to be answered."""
        left = share * sum(self.waits.values())
        for seconds in sorted(self.waits):
            left -= self.waits[seconds]
            if left <= 1e-9:
                return seconds
        return 0.0


class _Serving:
    """The requests and replicas of one class."""

    def __init__(self, trace: ServingTrace) -> None:
        self.trace = trace
        self.view = ClassView(name=trace.name, answer_seconds=trace.answer)
        self.queue: deque[tuple[float, int]] = deque()  # (arrival, requests)
        self.flights: deque[tuple[float, int, int]] = deque()  # (end, requests, those in time)
        self.serving: dict[int, None] = {}  # nodes, the longest serving first
        self.coming: dict[int, int] = {}  # node -> token of the event that ends it
        self.draining: set[int] = set()
        self.arrived = 0

    @property
    def capacity(self) -> int:
        return len(self.serving) * self.trace.slots


@dataclass(slots=True)
class _Job:
    """A job that waits or runs."""

    trace: JobTrace
    view: TrainingView
    nodes: list[int] = field(default_factory=list)
    kept: float = 0.0  # seconds of work that are saved
    began: float = 0.0  # when its steps began; work is done since, unless it saves
    saving: bool = False
    token: int = 0  # events with another one are of an earlier run


class Simulation:
    """A cluster, its trace and its controller. `run` plays the trace to its end."""

    def __init__(
        self,
        trace: Trace,
        controller: Controller,
        patience: float,
        watch: bool = False,
        period: float = PERIOD,
    ) -> None:
        """`patience`: seconds of waiting after which an answer counts for nothing.

        `watch`: check after each decision that no node is held twice or forgotten. `period`:
        seconds between two decisions.
        """
        self.trace, self.controller, self.patience, self.watch = trace, controller, patience, watch
        self.period = period
        self.now = 0.0
        self.result = Simulated()
        self.classes = {each.name: _Serving(each) for each in trace.serving}
        # free nodes: without a sleeping replica, and with one of a class and level
        self.bare = dict.fromkeys(range(trace.nodes))
        self.wakeable: dict[tuple[str, int], dict[int, None]] = {
            (name, level): {} for name in self.classes for level in (1, 2)
        }
        self.asleep = dict.fromkeys(self.wakeable, 0)
        self.down: dict[int, int] = {}  # node -> failures that are not repaired
        self.sleepers: dict[int, tuple[str, int]] = {}  # node -> (class, level)
        self.holder: dict[int, _Job] = {}
        self.jobs: dict[str, _Job] = {}
        self.queued: dict[str, _Job] = {}
        self.running: dict[str, _Job] = {}
        self.actions: list[tuple[float, Action]] = []
        self._leaving = 0
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = count(1)
        self._counted = 0.0
        for each in trace.jobs:
            view = TrainingView(each.name, each.nodes, 0.0, each.priority)
            self.jobs[each.name] = self.queued[each.name] = _Job(each, view)
        by_priority = sorted(self.queued.values(), key=lambda job: -job.trace.priority)
        self.queued = {job.trace.name: job for job in by_priority}

    def run(self) -> Simulated:
        """Play the trace; return what came of it."""
        for failure in self.trace.failures:
            self._at(failure.time, partial(self._fail, failure))
        self._at(0.0, lambda: self._arrive(0))
        self._at(0.0, self._decide)
        while self._events and self._events[0][0] < self.trace.seconds:
            time, _, event = heapq.heappop(self._events)
            self._pass_to(time)
            event()
        self._pass_to(self.trace.seconds)
        for job in (*self.running.values(), *self.queued.values()):
            runs = job.trace.name in self.running and not job.saving
            self.result.trained_work += (self._done(job) if runs else job.kept) * job.trace.nodes
        for each in self.classes.values():
            self.result.unanswered += each.view.waiting
            for arrival, some in each.queue:  # they have waited at least so long
                self._note_wait(self.now - arrival, some)
        return self.result

    @property
    def free(self) -> int:
        """Nodes that are up and held by nobody."""
        return len(self.bare) + sum(map(len, self.wakeable.values()))

    def _give(self, node: int) -> None:
        """Note that nobody holds a node any more."""
        if node not in self.down:
            self._place(node)[node] = None

    def _take(self, node: int) -> None:
        del self._place(node)[node]

    def _place(self, node: int) -> dict[int, None]:
        return self.wakeable[self.sleepers[node]] if node in self.sleepers else self.bare

    def _forget_sleeper(self, node: int) -> None:
        """Forget what sleeps on a node that is not free."""
        if node in self.sleepers:
            self.asleep[self.sleepers.pop(node)] -= 1

    def _at(self, time: float, event: Callable[[], None]) -> int:
        number = next(self._numbers)
        heapq.heappush(self._events, (time, number, event))
        return number

    def _pass_to(self, time: float) -> None:
        """Count the node-seconds since the last event."""
        up = self.trace.nodes - len(self.down)
        self.result.node_seconds += (time - self.now) * up
        self.result.held_seconds += (time - self.now) * (up - self.free)
        self.now = time

    # ---- requests
    def _arrive(self, step: int) -> None:
        for each in self.classes.values():
            if some := each.trace.arrivals[step]:
                each.queue.append((self.now, some))
                each.view.waiting += some
                each.arrived += some
            self._answer(each)
        if (step + 1) * self.trace.step < self.trace.seconds:
            self._at(self.now + self.trace.step, lambda: self._arrive(step + 1))

    def _answer(self, each: _Serving) -> None:
        """End answers that are complete, and begin those that there are slots for."""
        view, flights = each.view, each.flights
        while flights and flights[0][0] <= self.now:
            view.in_flight -= flights.popleft()[1]
        slots, begun, good = each.capacity - view.in_flight, 0, 0
        while slots > 0 and each.queue:
            arrival, some = each.queue[0]
            taken = min(slots, some)
            if taken == some:
                each.queue.popleft()
            else:
                each.queue[0] = (arrival, some - taken)
            waited = self.now - arrival
            self._note_wait(waited, taken)
            good += taken if waited <= self.patience else 0
            slots, begun = slots - taken, begun + taken
        if begun:
            flights.append((self.now + each.trace.answer, begun, good))
            self.result.answered_work += good * each.trace.answer / each.trace.slots
            view.in_flight += begun
            view.waiting -= begun

    def _note_wait(self, seconds: float, some: int) -> None:
        self.result.waits[seconds] = self.result.waits.get(seconds, 0) + some

    # ---- decisions
    def _decide(self) -> None:
        for each in self.classes.values():
            self._observe(each)
        for job in self.running.values():
            since = max(0.0, self.now - job.began)
            job.view.saved_at = self.now - since % job.trace.save_every
        seen = ClusterView(
            time=self.now,
            hour=self.now / HOUR % 24,
            nodes=self.trace.nodes - len(self.down),
            free=self.free,
            leaving=self._leaving,
            serving=[each.view for each in self.classes.values()],
            running=[job.view for job in self.running.values() if not job.saving],
            queued=[job.view for job in islice(self.queued.values(), _LOOK_AHEAD)],
        )
        for action in self.controller.decide(seen):
            self.actions.append((self.now, action))
            self._carry_out(action)
        if self.watch:
            self._check()
        self._at(self.now + self.period, self._decide)

    def _observe(self, each: _Serving) -> None:
        view = each.view
        view.waited = self.now - each.queue[0][0] if each.queue else 0.0
        view.arrivals, each.arrived = each.arrived / self.period, 0
        view.serving, view.starting = len(each.serving), len(each.coming)
        view.draining = len(each.draining)
        one, two = (view.name, 1), (view.name, 2)
        view.asleep = (self.asleep[one], self.asleep[two])
        view.wakeable = (len(self.wakeable[one]), len(self.wakeable[two]))

    def _carry_out(self, action: Action) -> None:
        match action.kind:
            case "start" | "wake":
                for _ in range(action.count):
                    self._start(self.classes[action.name], action.level)
            case "sleep" | "end":
                for _ in range(action.count):
                    self._drain(self.classes[action.name], action.level)
            case "preempt":
                self._preempt(self.running[action.name])
            case "admit":
                self._admit(self.queued[action.name])

    def _start(self, each: _Serving, level: int) -> None:
        """Begin to start a replica, or to wake one that sleeps at a level.

        A node where it sleeps may be gone to a class before it in the same decision.
        """
        if level and (asleep := self.wakeable[each.trace.name, level]):
            node = next(iter(asleep))
            self._take(node)
            self._forget_sleeper(node)
            seconds = each.trace.wake[level - 1]
            self.result.wakes += 1
        else:
            node = next(self._free_nodes())
            self._take(node)
            seconds = each.trace.start
            self.result.starts += 1
        token = self._at(self.now + seconds, lambda: self._serve(each, node, token))
        each.coming[node] = token

    def _serve(self, each: _Serving, node: int, token: int) -> None:
        if each.coming.get(node) == token:
            del each.coming[node]
            each.serving[node] = None
            self._answer(each)

    def _drain(self, each: _Serving, level: int) -> None:
        """Take the replica that serves for the shortest time; it ends its answers first."""
        node, _ = each.serving.popitem()
        each.draining.add(node)
        self._leaving += 1
        self._at(self.now + each.trace.answer, lambda: self._drained(each, node, level))

    def _drained(self, each: _Serving, node: int, level: int) -> None:
        if node not in each.draining:
            return
        each.draining.discard(node)
        self._leaving -= 1
        if level:
            self._forget_sleeper(node)
            self.sleepers[node] = (each.trace.name, level)
            self.asleep[each.trace.name, level] += 1
        self._give(node)

    def _free_nodes(self) -> Iterator[int]:
        """Yield the free nodes, last those where a replica sleeps."""
        return chain(self.bare, *self.wakeable.values())

    # ---- training
    def _done(self, job: _Job) -> float:
        """Return the seconds of work that a job has done, saved or not."""
        return min(job.trace.work, job.kept + max(0.0, self.now - job.began))

    def _admit(self, job: _Job) -> None:
        del self.queued[job.trace.name]
        self.running[job.trace.name] = job
        nodes = list(islice(self._free_nodes(), job.trace.nodes))
        for node in nodes:
            self._take(node)
            self.holder[node] = job
        job.nodes, job.began = nodes, self.now + job.trace.load
        job.view.since = self.now
        job.view.sleepers = sum(node in self.sleepers for node in nodes)
        end = job.began + job.trace.work - job.kept
        token = self._at(end, lambda: self._finish(job, token))
        job.token = token

    def _finish(self, job: _Job, token: int) -> None:
        if job.token == token:
            self.result.trained_work += job.trace.work * job.trace.nodes
            self.result.jobs_done += 1
            self._leave(job)

    def _preempt(self, job: _Job) -> None:
        """Ask a job to leave. It keeps what it has done, and its nodes until that is saved."""
        self.result.preemptions += 1
        job.kept, job.saving = self._done(job), True
        self._leaving += len(job.nodes)
        token = self._at(self.now + job.trace.save, lambda: self._saved(job, token))
        job.token = token

    def _saved(self, job: _Job, token: int) -> None:
        if job.token == token:
            self._leaving -= len(job.nodes)
            job.saving = False
            self._leave(job)
            self._queue(job)

    def _leave(self, job: _Job) -> None:
        del self.running[job.trace.name]
        job.token = 0
        for node in job.nodes:
            del self.holder[node]
            self._give(node)
        job.nodes = []

    def _queue(self, job: _Job) -> None:
        """Put a job that was interrupted at the front of the queue."""
        job.view.since = self.now
        self.queued = {job.trace.name: job, **self.queued}

    # ---- failures
    def _fail(self, failure: Failure) -> None:
        node = failure.node
        self._place(node).pop(node, None)
        self.down[node] = self.down.get(node, 0) + 1
        self._at(failure.time + failure.repair, lambda: self._repair(node))
        self._forget_sleeper(node)
        if job := self.holder.get(node):
            self._break_off(job)
        for each in self.classes.values():
            each.coming.pop(node, None)
            if node in each.draining:
                each.draining.discard(node)
                self._leaving -= 1
            if node in each.serving:
                self._lose_answers(each, 1 / len(each.serving))
                del each.serving[node]

    def _repair(self, node: int) -> None:
        self.down[node] -= 1
        if not self.down[node]:
            del self.down[node]
            self._give(node)

    def _break_off(self, job: _Job) -> None:
        """Let a job lose what it did since its last save, and wait again."""
        if job.saving:
            self._leaving -= len(job.nodes)
            job.saving = False
        else:
            done = self._done(job)
            since = done - job.kept
            kept = job.kept + since - since % job.trace.save_every
            self.result.lost_steps += (done - kept) / job.trace.step
            job.kept = kept
        self._leave(job)
        self._queue(job)

    def _lose_answers(self, each: _Serving, share: float) -> None:
        """Let a share of the answers in flight wait again; what they had of a node counts not."""
        lost = 0
        for at, (end, some, good) in enumerate(each.flights):
            gone, useless = round(some * share), round(good * share)
            each.flights[at] = (end, some - gone, good - useless)
            self.result.answered_work -= useless * each.trace.answer / each.trace.slots
            lost += gone
        if lost:
            each.view.in_flight -= lost
            each.view.waiting += lost
            each.queue.appendleft((self.now, lost))

    def _check(self) -> None:
        """Raise AssertionError where a node is held twice, or by nobody and not free."""
        holders = [*self.holder, *self._free_nodes(), *self.down]
        for each in self.classes.values():
            holders += [*each.serving, *each.coming, *each.draining]
            assert each.view.in_flight >= 0 and each.view.waiting >= 0
            assert each.view.waiting == sum(some for _, some in each.queue)
        assert sorted(holders) == list(range(self.trace.nodes)), (
            "a node is held twice, or by nobody"
        )
        leaving = sum(len(each.draining) for each in self.classes.values())
        leaving += sum(len(job.nodes) for job in self.running.values() if job.saving)
        assert leaving == self._leaving
