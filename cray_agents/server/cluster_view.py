"""Cluster view: the nodes of a Slurm cluster and the training on them, as the controller sees them.

replica_count.py looks through it while requests need more replicas than there are, and lets it
preempt. The unit is a place: what one replica takes of a node, in GPUs, or in cores without any. So
a node of eight GPUs has four places for replicas of two. Only training of this root is preempted.

All state is Slurm's and in the jobs' folders, but for nodes on their way from a job that has ended.
So a controller that takes over sees the same, also which jobs save already. All methods block: call
them in a thread.
"""

import logging
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path

from cray_agents.errors import CrayError
from cray_agents.paths import Home
from cray_agents.ports import Command
from cray_agents.runtime.accounting.ledger import LedgerFile
from cray_agents.runtime.pool.job_lease import JOB_PREFIX
from cray_agents.runtime.scaling.decision import TrainingView
from cray_agents.runtime.scheduler.slurm import Job, Slurm, node_names
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.session_journal import SessionJournal
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.training_jobs import JobSpec, Layout

LEAVE_SECONDS = 600.0  # that a job may take to save before Slurm ends it
RETURN_SECONDS = 60.0  # that a node may take from the end of its job until it is free
#: Why Slurm lets a job wait that nodes would help; "": it has not looked yet.
ROOM_REASONS = ("", "Resources", "Priority", "BeginTime", "ReqNodeNotAvail")
IDLE_SESSION = -(10**6)  # priority of a session without a job: it has nothing to lose

log = logging.getLogger(__name__)


@dataclass
class ClusterState:
    """Places of a cluster at one moment: see `Observed`, whose fields these are.

    `waiting`, `replicas`: replicas whose job is in Slurm's queue, and those whose job runs.
    `used`: nodes with training, which also leaves before a replica that sleeps there wakes.
    """

    waiting: int = 0
    replicas: int = 0
    nodes: int = 0
    free: int = 0
    leaving: int = 0
    running: list[TrainingView] = field(default_factory=list)
    used: set[str] = field(default_factory=set)


class ClusterView:
    """The cluster of a scheduler, in places of `replica` (a replica's command)."""

    def __init__(
        self, home: Home, scheduler: Slurm, resources: Resources, replica: Command
    ) -> None:
        self._home, self._scheduler, self._resources = home, scheduler, resources
        self._gpus = replica.gpus
        self._need = replica.ranks // replica.nodes * (1 if self._gpus else replica.cpus_per_rank)
        self._ledger = LedgerFile(home.ledger, "preemptions")
        self._nodes: dict[str, set[str]] = {}  # of the jobs that were last seen to run
        #: Of jobs that leave: their nodes, places there, and when they were last seen.
        self._leaving: dict[str, tuple[set[str], int, float]] = {}

    def look(self, now: float, asleep: Counter[str] | None = None) -> ClusterState:
        """Return the present state. Raises SchedulerError.

        `now` is the controller's clock, `asleep` the number of sleeping replicas by node.
        """
        # the jobs after the nodes: one that begins meanwhile is then not taken for one that waits
        rooms = self._scheduler.room("replica")
        free = {room.name: room.free_gpus if self._gpus else room.free_cores for room in rooms}
        state = ClusterState(
            nodes=sum(self._places(room.gpus if self._gpus else room.cores) for room in rooms),
            free=sum(map(self._places, free.values())),
        )
        past, stuck = time.time() - now, False
        places_asleep, held = asleep or Counter[str](), set[str]()
        live = self._scheduler.live()
        for name, job in live.items():
            if name.startswith(JOB_PREFIX):
                state.replicas += job.state == "running"
                state.waiting += job.state == "queued"
                stuck |= job.state == "queued" and job.reason not in ROOM_REASONS
            if job.state == "queued":
                continue
            nodes = node_names(job.nodes)
            held.update(nodes)
            view = self._view(name, job, past, free.get(job.nodes, 0))
            if view is None:
                continue
            state.used.update(nodes)
            if sleepers := sum(places_asleep.get(node, 0) for node in nodes):
                view.sleepers, view.nodes = sleepers, max(view.nodes, sleepers)
            if not view.nodes:
                continue
            if (order := self._scheduler.preemption(name, job.id)) is None:
                state.running.append(view)
                self._nodes[name] = set(nodes)
                continue
            state.leaving += view.nodes
            self._leaving[name] = set(nodes), view.nodes, time.monotonic()
            if time.time() - order.time > LEAVE_SECONDS:
                log.warning("%s has not left in %g s: Slurm ends it", name, LEAVE_SECONDS)
                self._scheduler.preempt(name, order.why, at_once=True)
        # a job that has just ended is gone before its nodes are free
        for name, (left, places, seen) in [*self._leaving.items()]:
            if name in live and not left.isdisjoint(held):
                continue
            returned = not left.isdisjoint(held) or any(free.get(node) for node in left)
            if not returned and time.monotonic() - seen < RETURN_SECONDS:
                state.leaving += places
            else:
                del self._leaving[name]
        if stuck:  # a replica's job waits for a limit or a hold: nodes would not help it
            state.running.clear()
        return state

    def preempt(self, view: TrainingView, why: str) -> bool:
        """Ask a job or session to save and leave; record it. Return False if it has ended."""
        if not self._scheduler.preempt(view.name, why):
            return False
        # it may have left before the next look
        self._leaving[view.name] = self._nodes[view.name], view.nodes, time.monotonic()
        log.info("%s is asked to save and leave: %s", view.name, why)
        kind = "session" if (self._home.sessions / view.name).is_dir() else "job"
        self._ledger.note(event="preempt", kind=kind, holder=view.name, what=why)
        return True

    def close(self) -> None:
        """Close the ledger's file."""
        self._ledger.close()

    def _places(self, units: int) -> int:
        return units // self._need

    def _view(self, name: str, job: Job, past: float, free: int) -> TrainingView | None:
        """Return a running job or session of this root; None for another command, or a broken one.

        `past`: to be subtracted from unix seconds. `free`: units of its node that no job has.
        """
        try:
            if (self._home.job(name) / "spec.json").exists():
                journal = JobJournal(self._home, name)
                spec = journal.spec()
                return self._training(name, job, spec.layout, spec, journal, past, free)
            if (self._home.sessions / name / "spec.json").exists():
                session = SessionJournal(self._home, name)
                own = JobJournal(self._home, current) if (current := session.current) else None
                spec_of_own = own.spec() if own else None
                layout = session.spec().layout
                return self._training(name, job, layout, spec_of_own, own, past, free)
        except (CrayError, OSError) as error:
            log.warning("%s is not preempted: %s", name, error)
        return None

    def _training(
        self,
        name: str,
        job: Job,
        layout: Layout,
        spec: JobSpec | None,
        journal: JobJournal | None,
        past: float,
        free: int,
    ) -> TrainingView:
        world = layout.world
        nodes, spares = self._resources.nodes_for(world), 0 if spec is None else spec.spare_nodes
        units = world // nodes * (1 if self._gpus else self._resources.cores_each(world))
        began = job.since or time.time()
        saved = time.time()  # of an idle session: it has nothing to save
        if journal is not None:
            saved = max([began, *map(_made_at, journal.resume_points[:1])])
        return TrainingView(
            name=name,
            # with what is free on its node; of several nodes that is not looked at
            nodes=(nodes + spares) * (self._places(units + free) - self._places(free)),
            since=began - past,
            priority=IDLE_SESSION if spec is None else priority_of(spec),
            saved_at=saved - past,
        )


def priority_of(spec: JobSpec) -> int:
    """Return the priority of a job: 0, or less by its own `--nice`."""
    nice = [option.partition("=")[2] for option in spec.slurm_options if "--nice" in option]
    value = nice[-1] if nice else "0"
    return -int(value) if value.removeprefix("-").isdecimal() else 0


def _made_at(point: Path) -> float:
    try:
        return point.stat().st_mtime
    except FileNotFoundError:  # a newer one has replaced it
        return time.time()
