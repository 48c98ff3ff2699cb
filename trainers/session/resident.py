"""Resident rank: one rank of a training session, which trains job after job.

Between two jobs model and optimizer stay in memory. A job whose parent is what the job before it
published starts from memory, to the bit as it would from the files: with master weights, or
adapters over their base, if it goes on with the optimizer, and rounded without. So does a job by
commands that goes on where it was left. What the session leaves for another job is parked in host
memory (parked_states.py), and taken from there when it comes back: start_plan.py has the cases. A
job of another kind of model has everything built anew. Rank 0 looks for the next job in the
session's queue, and the others wait for its word. Where replicas use the same GPUs by turns, a
session waits for its turn before each job, and moves its state to host memory after it.
session_process.py calls `run` in its process. Read next: job/rank.py, whose `execute` trains a job.
"""

import contextlib
import gc
import json
import os
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from datetime import timedelta
from functools import partial
from typing import Any

import torch
from torch.distributed import distributed_c10d

from cray_agents.errors import (
    FULL,
    Corrupt,
    CrayError,
    NewerFormat,
    NotFound,
    SetupError,
    StoreError,
)
from cray_agents.records import Manifest
from cray_agents.runtime.accounting.ledger import LedgerFile
from cray_agents.runtime.disk import checksums
from cray_agents.trainers.checkpointing import resume
from cray_agents.trainers.checkpointing.save import step_of
from cray_agents.trainers.checkpointing.weight_sender import LINKS, WeightSender
from cray_agents.trainers.job import rank as job_rank
from cray_agents.trainers.job.failures.rank_monitor import BadEnd, node_name, note_end
from cray_agents.trainers.job.job_inputs import JobInputs, choose_start, read_inputs
from cray_agents.trainers.job.job_state import already_ended, record_failure, record_success
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import (
    EX_TEMPFAIL,
    StopFlag,
    note_steps,
    open_log,
    restart_may_help,
)
from cray_agents.trainers.job.session_journal import SessionJournal
from cray_agents.trainers.job.weights_check import (
    FailedEverywhere,
    UnwrittenEverywhere,
    check_parent,
    check_start,
)
from cray_agents.trainers.models.lora import AdapterBase
from cray_agents.trainers.progress import CLOCK
from cray_agents.trainers.session.parked_states import ParkedStates, StateOrigin, restore_parked
from cray_agents.trainers.session.start_plan import JobStart, StartPlan, plan_start
from cray_agents.trainers.training.offload import Offload
from cray_agents.trainers.training.parallel_groups import (
    Relay,
    broadcast_from_rank0,
    gather_from_ranks,
    is_rank0,
)
from cray_agents.trainers.training.train_step import RankTraining, build_of
from cray_agents.training_jobs import JobSpec, WeightsSource

PATIENCE, LONGEST_TURN = 0.2, 10.0  # seconds of a job by commands that others wait for
TURN_PATIENCE = 2.0  # seconds without a command after which it leaves GPUs that replicas use, too
SHORTEST_WAIT, LONGEST_WAIT = 0.002, 0.1  # seconds between two looks at the queue
FULL_WAIT = 0.5  # seconds between two trials to write on a full disk
ALL_REFUSE = 120.0  # seconds from the first rank's refusal of a job to the last one's


@dataclass(frozen=True)
class Order:
    """A job to train; `attempt` is the job's own. `job` None: the session ends with `code`."""

    job: str | None
    attempt: int = 0
    code: int = 0


def run(
    session: SessionJournal, attempt: int, on_cpu: bool, rank: int, store: Any, stop: StopFlag
) -> int:
    """Train the session's jobs until it has been idle for too long, or is asked to stop."""
    spec = session.spec()
    job_rank.join(spec.layout, rank, store, on_cpu)
    sender = make_sender(session, rank)
    resident = Resident(session, attempt, on_cpu, stop, sender)
    orders = Orders(session, attempt, stop)
    while (order := orders.next()).job is not None:
        if spec.turns:
            resident.come_to_gpu()
        resident.train(JobJournal(session.home, order.job), order.attempt)
        if spec.turns:
            resident.leave_gpu()
    if sender is not None:
        sender.close()
    torch.distributed.barrier()  # rank 0 holds the store that the others read the order from
    torch.distributed.destroy_process_group()
    return order.code


def make_sender(session: SessionJournal, rank: int) -> WeightSender | None:
    """Return what offers a rank's published weights to replicas; None if they read files."""
    spec = session.spec()
    if spec.weight_transfer == "files":
        return None
    host = os.uname().nodename
    place = "127.0.0.1" if host == spec.platform_host else host
    link = LINKS[spec.weight_transfer]
    early = not spec.turns  # replicas sleep until the turn ends, after the files are written
    return WeightSender(session.folder, rank, spec.layout.world, link, place, early=early)


class Orders:
    """The next job, chosen by rank 0."""

    def __init__(self, session: SessionJournal, attempt: int, stop: StopFlag) -> None:
        self._session, self._spec, self._attempt = session, session.spec(), attempt
        self._stop, self._relay = stop, Relay("order")

    def next(self) -> Order:
        """Return the next order, the same on every rank."""
        return Order(**self._relay.next(lambda: vars(self._choose())))

    def _choose(self) -> Order:
        """Return the next job that has not ended, as this attempt's. On a full disk it waits."""
        while not self._stop.set:
            try:
                return self._await_job()
            except OSError as error:
                if error.errno not in FULL:
                    raise
                print(f"the session waits for room on its disk: {error}", flush=True)
            CLOCK.tick()
            time.sleep(FULL_WAIT)
        return Order(None, code=EX_TEMPFAIL)

    def _await_job(self) -> Order:
        """Wait for a job that has not ended, claim it, and return it."""
        idle_since, wait = time.monotonic(), SHORTEST_WAIT
        self._session.note_current(None)
        while True:
            CLOCK.tick()
            if self._stop.set or self._session.attempts > self._attempt:
                return Order(None, code=EX_TEMPFAIL)
            turn = self._spec.turns and self._session.has_turn  # first: a job comes before its turn
            for job_id in self._session.queue():
                journal = JobJournal(self._session.home, job_id)
                if self._nothing_to_do(journal):
                    self._session.withdraw(job_id)
                elif self._spec.turns and not turn:
                    idle_since = time.monotonic()
                    break
                else:
                    self._session.note_current(job_id)
                    return Order(job_id, journal.claim_attempt())
            else:
                if turn:  # for a job that was taken back
                    self._session.end_turn()
            ends = self._session.asked_to_end and not self._session.queue()
            if ends or time.monotonic() - idle_since > self._spec.idle_seconds:
                return Order(None)
            time.sleep(wait)
            wait = min(LONGEST_WAIT, wait * 1.02)

    def _nothing_to_do(self, journal: JobJournal) -> bool:
        """Return True for a job that has ended, or whose spec cannot be read."""
        try:
            return already_ended(journal, journal.spec()) is not None
        except (
            Corrupt,
            NewerFormat,
            NotFound,
        ) as problem:  # whoever asks for the job's status gets the same answer
            print(f"{journal.job_id} cannot be read: {problem}", flush=True)
            return True


class Resident:
    """Model and optimizer of one rank, from job to job. Methods are collective."""

    def __init__(
        self,
        session: SessionJournal,
        attempt: int,
        on_cpu: bool,
        stop: StopFlag,
        sender: WeightSender | None = None,
    ) -> None:
        self._session, self._attempt, self._on_cpu, self._stop = session, attempt, on_cpu, stop
        self._sender = sender
        self._training: RankTraining | None = None
        self._built = False  # as yet: nothing but imports is frozen
        self._origin: StateOrigin | None = None  # by `_training`
        self._parked = ParkedStates()
        self._ledger = LedgerFile(session.home.ledger, session.session_id)
        self._turn = 0.0  # when the current job began
        self._offload: Offload | None = None
        self._onload_seconds = 0.0

    def come_to_gpu(self) -> None:
        """Take model and optimizer back from host memory."""
        begun = time.perf_counter()
        if self._offload is not None:
            self._offload.move_in()
        self._onload_seconds = time.perf_counter() - begun

    def leave_gpu(self) -> None:
        """Move model and optimizer to host memory; end the turn when all ranks have."""
        begun = time.perf_counter()
        if self._training is None:
            self._offload = None
        elif self._offload is None or self._offload.training is not self._training:
            self._offload = Offload(self._training)
        if self._offload is not None:
            self._offload.move_out()
        gc.collect()
        if not self._on_cpu:
            torch.cuda.empty_cache()
        torch.distributed.barrier()
        if is_rank0():
            offload = time.perf_counter() - begun
            mib = 0.0 if self._offload is None else self._offload.nbytes / 2**20
            print(f"left the GPU: {mib:.1f} MiB of rank 0 in {offload:.2f} s", flush=True)
            self._session.end_turn({"onload": self._onload_seconds, "offload": offload})

    def train(self, journal: JobJournal, attempt: int) -> None:
        """Train one job to its end, or until it is stopped, paused, superseded or makes room.

        A job that can never be trained is recorded as failed, and the session goes on. So it does
        after a job whose files a disk took no more of: the trainer starts that one again. Raises
        SetupError, which another start may mend, and the error of a job that not all ranks refuse
        alike: the ranks are out of step, and end.
        """
        spec, self._turn = journal.spec(), time.monotonic()
        with _job_log(journal), self._unpublished_taken_back():
            try:
                work, resumes = self._read(journal, spec, attempt)
                with refusing_together(f"{spec.id}/{attempt}"):
                    finished = self._execute(work, resumes)
                record: Callable[[], object]
                record = partial(self._record, journal, spec, attempt, finished)
            except (FailedEverywhere, UnwrittenEverywhere) as reason:
                if self._origin is None:  # else the job failed before it began
                    self._training = None
                mendable = isinstance(reason, UnwrittenEverywhere)
                record = partial(
                    _note_unwritten if mendable else record_failure, journal, str(reason)
                )
            if is_rank0():
                try:
                    record()
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    _note_unwritten(journal, f"the job's end was not written: {error}")
                note_steps(self._ledger, journal, (self._session.session_id, self._attempt))
                journal.close()
        if is_rank0() and not self._stop.set:
            self._session.withdraw(spec.id)

    @contextlib.contextmanager
    def _unpublished_taken_back(self) -> Iterator[None]:
        """Let replicas that received weights go back, if the context publishes none."""
        try:
            yield
        finally:
            if self._sender is not None:
                self._sender.take_back_unpublished()

    def _record(self, journal: JobJournal, spec: JobSpec, attempt: int, finished: bool) -> None:
        """Record how a job went, as job.py does. Called on rank 0."""
        if why := journal.fenced(attempt):
            print(f"stopped without publishing: {why}", flush=True)
        elif finished:
            record_success(journal, spec)
        else:
            print(f"stopped after step {journal.step}; start it again to go on", flush=True)

    def _read(self, journal: JobJournal, spec: JobSpec, attempt: int) -> tuple[JobInputs, bool]:
        """Read and check the inputs on every rank; choose the starting point on rank 0.

        Returns also True if that is a resume point whose content the ranks hold or have parked.
        """
        problem, work, resumes = None, None, False
        try:
            work = read_inputs(journal, spec, attempt)
            if is_rank0():
                seal = self._left_at(work)
                work = choose_start(
                    work,
                    self._on_cpu,
                    self._ledger,
                    optimizer_in_memory=self._plan(work).keeps_optimizer,
                    point_in_memory=seal,
                )
                point = work.resume_from
                resumes = seal != "" and point is not None and resume.seal_of(point) == seal
                journal.close()
        except CrayError as error:
            problem = error
        except OSError as error:
            problem = StoreError.of(f"{spec.id} cannot be started", error)
        agree(problem)
        assert work is not None  # or `agree` has raised
        *points, resumes = broadcast_from_rank0((*work.points, resumes))
        work = work.at(attempt, *points)
        if not resumes:
            choose = partial(choose_start, on_cpu=self._on_cpu, ledger=None)
            in_memory = self._plan(work).keeps_optimizer
            work = check_start(work, partial(choose, optimizer_in_memory=in_memory))
        return work, resumes

    def _left_at(self, work: JobInputs) -> str:
        """Return the seal of the point where the attempt before this one left the job, else ""."""
        origin, spec = self._origin, work.spec
        if origin is None or origin.job != spec.id or not self._fits(work):
            parked = self._parked.of_job(build_of_job(work), spec.id)
            origin = None if parked is None else parked.origin
        return origin.seal if origin is not None and origin.attempt + 1 == work.attempt else ""

    def _fits(self, work: JobInputs) -> bool:
        """Return True if the job can be trained with the model and optimizer that are built."""
        training = self._training
        return training is not None and training.build == build_of_job(work)

    def _plan(self, work: JobInputs, *, resumes: bool = False) -> StartPlan:
        """Return from where a job takes what it begins with."""
        spec, hyper = work.spec, work.spec.hyperparameters
        read = hyper.init == "parent"
        start = JobStart(
            spec.id,
            build_of_job(work),
            AdapterBase(spec.parent, spec.parent_sha256) if read else None,
            spec.optimizer_from,
            AdapterBase.of_job(spec, work.parent),
            hyper.lora is not None,
            resumes,
        )
        return plan_start(self._origin if self._fits(work) else None, start, self._parked)

    def _execute(self, work: JobInputs, resumes: bool) -> bool:
        plan, begun = self._plan(work, resumes=resumes), time.perf_counter()
        source, restored, optimizer = self._load_start(work, plan), None, plan.keeps_optimizer
        self._origin = None  # until the job is left
        training, point = self._training, work.resume_from
        assert training is not None  # `_load_start` has built it
        if point is not None and work.spec.commands is not None:
            if resumes:
                restored = broadcast_from_rank0(resume.read_common(point) if is_rank0() else None)
                training.saved = point
            else:
                job_rank.begin(training, work, optimizer_in_memory=optimizer)
                restored, source = resume.load(training, point), "files"
        elif work.state_from is not None:
            source = "files"
        if is_rank0():
            work.journal.event(
                "taken_up",
                attempt=work.attempt,
                source=source,
                seconds=time.perf_counter() - begun,
                parked_bytes=self._parked.nbytes,
            )
        finished = job_rank.execute(
            training, work, optimizer_in_memory=optimizer, restored=restored, leave=self._leave
        )
        self._origin = self._published(training, work) if finished else self._left(training, work)
        return finished

    def _load_start(self, work: JobInputs, plan: StartPlan) -> WeightsSource:
        """Put what a job begins with in place; say from where. What else is in memory is parked."""
        spec, build = work.spec, build_of_job(work)
        hyper, check = spec.hyperparameters, job_rank.stop_check(work, self._stop)
        if plan.name == "resume" and self._training is not None:
            self._training.switch_job(work.parent, hyper, spec.method, check)
            return "memory"
        fits = self._fits(work)
        missing = plan.over.sha256 if plan.over is not None and not plan.stays else None
        base = self._parked.frozen(build, missing)  # before parking may drop it
        self._parked.drop(spec.id)  # it goes on from here
        self._park(spec.id, trained=plan.trained_stays, frozen=plan.frozen_stays)
        base = base or self._parked.frozen(build, missing)
        complete = plan.stays or base is not None or (plan.state is not None and hyper.lora is None)
        if fits and self._training is not None:
            self._training.switch_job(work.parent, hyper, spec.method, check)
            if not complete:
                with check_parent(work.parent, spec):
                    self._training.take_weights()
        else:
            self._training = self._offload = None  # before the next one takes as much memory
            if self._built:  # to look through all that was imported takes long, and copies it
                gc.unfreeze()  # job_rank.build froze it
                gc.collect()
            self._built = True
            if not self._on_cpu:
                torch.cuda.empty_cache()
            self._training = job_rank.build(work, self._on_cpu, self._stop, loaded=not complete)
            self._training.sender = self._sender
        for parked in (base, plan.state):
            if parked is not None:
                restore_parked(self._training, parked)
                self._parked.note_use(parked)
        if not plan.keeps_optimizer:
            if plan.name == "begin" and not plan.frozen_stays:
                self._training.settle()
            self._training.start_from_weights()
        if not complete:
            return "files"
        return "memory" if plan.stays and plan.state is None else "parked"

    def _park(self, job: str, *, trained: bool, frozen: bool) -> None:
        """Park what is in memory, before `job` takes its place.

        `trained`: it begins with the trained weights there; published ones are then not parked.
        `frozen`: it has its adapters over the frozen ones.
        """
        training, origin = self._training, self._origin
        if training is not None and origin is not None:
            limit = self._session.spec().parked_gib
            if origin.job not in ("", job) and (origin.seal or not trained):
                self._parked.park(training, origin, limit)
            if not frozen and origin.base is not None:
                self._parked.park_frozen(training, origin.base.sha256, limit)
        self._origin = None

    def _leave(self, idle: float) -> bool:
        """Return True if a job without a command for `idle` seconds is to make room."""
        if self._session.spec().turns and idle > TURN_PATIENCE:
            return True  # what it waits for may need the replicas
        if len(self._session.queue()) > 1 or self._session.asked_to_end:
            return idle > PATIENCE or time.monotonic() - self._turn > LONGEST_TURN
        return idle > self._session.spec().idle_seconds

    def _left(self, training: RankTraining, work: JobInputs) -> StateOrigin | None:
        """Return the state in memory after a job was left before its end.

        A job on a dataset may have been left while another model's weights were scored.
        """
        spec, seal, point = work.spec, "", training.saved
        if spec.commands is None:
            return None
        if is_rank0() and point is not None and step_of(point) == training.done:
            seal = resume.seal_of(point)
            if work.journal.fenced(work.attempt) is not None:
                seal = ""
        seal = broadcast_from_rank0(seal)
        return StateOrigin(spec.id if seal else "", None, work.attempt, seal, training.base)

    def _published(self, training: RankTraining, work: JobInputs) -> StateOrigin | None:
        """Return the state in memory after a job of this session was published.

        None if another attempt published the job: this rank's state may be another one then.
        """
        sha256 = None
        if is_rank0() and work.journal.fenced(work.attempt) is None:
            path = work.journal.home.checkpoint(work.spec.id) / "manifest.json"
            sha256 = checksums.read_record(Manifest, path).weights_sha256
        sha256 = broadcast_from_rank0(sha256)
        return None if sha256 is None else StateOrigin(work.spec.id, sha256, base=training.base)


def build_of_job(work: JobInputs) -> tuple[Any, ...]:
    """Return what decides how a job's model and optimizer are built."""
    spec = work.spec
    return build_of(work.model, spec.layout, spec.hyperparameters, spec.recompute)


def agree(problem: CrayError | None) -> None:
    """Raise on every rank if any rank has a problem: the first rank's. Collective.

    Raises FailedEverywhere for a fault of the job, UnwrittenEverywhere for one of the disk, and
    SetupError for one of the machine.
    """
    mine = None
    if problem is not None:
        mine = (str(problem), restart_may_help(problem), isinstance(problem, StoreError))
    every = [json.loads(one) for one in gather_from_ranks(json.dumps(mine).encode())]
    for text, mendable, disk in filter(None, every):
        if mendable:
            raise (UnwrittenEverywhere if disk else SetupError)(text)
        raise FailedEverywhere(text)


@contextlib.contextmanager
def refusing_together(name: str) -> Iterator[None]:
    """Let ranks that all refuse a job within the context stay in step. `name` is used once.

    A rank that refuses may be the only one, and the others wait for it in a collective. So it
    reports that in the ranks' store, and waits there. Raises FailedEverywhere if all refused at the
    same point, or UnwrittenEverywhere. Else the rank's own error comes out, and its end ends the
    others.
    """
    try:
        yield
    except FailedEverywhere:
        raise
    except CrayError as problem:
        disk = isinstance(problem, StoreError)
        mendable = restart_may_help(problem)
        if (mendable and not disk) or (reason := _refusal_of_all(name, problem)) is None:
            raise
        raise (UnwrittenEverywhere if mendable else FailedEverywhere)(reason) from problem


def _refusal_of_all(name: str, problem: CrayError) -> str | None:
    """Return the first rank's reason if all ranks refuse after the same collectives, else None."""
    rank, world = torch.distributed.get_rank(), torch.distributed.get_world_size()
    if world == 1:
        return str(problem)
    default: Any = distributed_c10d._get_default_store()
    store, keys = default.clone(), [f"refused/{name}/{each}" for each in range(world)]
    store.set(keys[rank], json.dumps([str(problem), _collectives()]))
    try:
        store.wait(keys, timedelta(seconds=ALL_REFUSE))
    except torch.distributed.DistStoreError:
        return None
    every = [json.loads(store.get(key)) for key in keys]
    issued: dict[str, int] = {}
    for _, counts in every:
        if any(issued.setdefault(group, count) != count for group, count in counts.items()):
            return None
    return str(every[0][0])


def _collectives() -> dict[str, int]:
    """Return the number of collectives that this rank has issued in each of its groups."""
    groups: dict[Any, Any] = dict(distributed_c10d._world.pg_names)  # torch's stubs lack the method
    return {str(name): group._get_sequence_number_for_group() for group, name in groups.items()}


def _note_unwritten(journal: JobJournal, problem: str) -> None:
    """Leave the reason for the trainer, which starts the job again by the rules of failure.py."""
    print(f"stopped: {problem}", flush=True)
    with contextlib.suppress(OSError):  # without it the job is started again at once
        note_end(journal.folder, BadEnd(rank=-1, how=problem, node=node_name()))


@contextlib.contextmanager
def _job_log(journal: JobJournal) -> Iterator[None]:
    """Let rank 0 write to the job's log within the context, as a process of the job's own does."""
    if not is_rank0():
        yield
        return
    with contextlib.ExitStack() as opened:
        with contextlib.suppress(OSError):  # such as a full disk: the rank's own log has the lines
            log = opened.enter_context(open_log(journal.log))
            opened.enter_context(contextlib.redirect_stdout(log))
        yield
