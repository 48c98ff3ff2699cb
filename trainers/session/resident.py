"""Resident rank: one rank of a training session, which trains job after job.

Between two jobs model and optimizer stay in memory. A job whose parent is what the job before it
published starts from memory, to the bit as it would from the files. A job of another kind of model
has everything built anew. Rank 0 looks for the next job in the session's queue, and the others wait
for its word. Where replicas use the same GPUs by turns, a session waits for its turn before each
job, and moves its state to host memory after it. session_process.py calls `run` in a forked
process. Read next: job/rank.py, whose `execute` trains a job.
"""

import contextlib
import gc
import json
import os
import time
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch

from cray_agents.errors import Corrupt, CrayError, SetupError, StoreError
from cray_agents.records import Manifest
from cray_agents.runtime.disk import checksums
from cray_agents.trainers.checkpointing.weight_links import LINKS
from cray_agents.trainers.checkpointing.weight_sender import WeightSender
from cray_agents.trainers.job import rank as job_rank
from cray_agents.trainers.job.job_end import already_ended, record_failure, record_success
from cray_agents.trainers.job.job_inputs import JobInputs, choose_start, read_inputs
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import EX_TEMPFAIL, StopFlag
from cray_agents.trainers.job.weights_check import FailedEverywhere, check_parent
from cray_agents.trainers.session.session_journal import SessionJournal
from cray_agents.trainers.training.offload import Offload
from cray_agents.trainers.training.parallel_groups import (
    broadcast_from_rank0,
    gather_from_ranks,
    is_rank0,
)
from cray_agents.trainers.training.relay import Relay
from cray_agents.trainers.training.train_step import Training
from cray_agents.training_jobs import JobSpec

PATIENCE, LONGEST_TURN = 0.2, 10.0  # seconds of a job by commands that others wait for
TURN_PATIENCE = 2.0  # seconds without a command after which it leaves GPUs that replicas use, too
SHORTEST_WAIT, LONGEST_WAIT = 0.002, 0.1  # seconds between two looks at the queue


@dataclass(frozen=True)
class Order:
    """A job to train; `attempt` is the job's own. `job` None: the session ends with `code`."""

    job: str | None
    attempt: int = 0
    code: int = 0


@dataclass
class InMemory:
    """The state that a rank holds: the weights of `sha256`, and the optimizer that `job` left."""

    sha256: str
    job: str


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
    return WeightSender(session.folder, rank, spec.layout.world, LINKS[spec.weight_transfer], place)


class Orders:
    """The next job, chosen by rank 0."""

    def __init__(self, session: SessionJournal, attempt: int, stop: StopFlag) -> None:
        self._session, self._spec, self._attempt = session, session.spec(), attempt
        self._stop, self._relay = stop, Relay("order")

    def next(self) -> Order:
        """Return the next order, the same on every rank."""
        return Order(**self._relay.next(lambda: vars(self._choose())))

    def _choose(self) -> Order:
        """Wait for a job that has not ended, claim it, and return it."""
        idle_since, wait = time.monotonic(), SHORTEST_WAIT
        self._session.note_current(None)
        turns = self._spec.turns
        while True:
            if self._stop.set or self._session.attempts > self._attempt:
                return Order(None, code=EX_TEMPFAIL)
            for job_id in self._session.queue():
                journal = JobJournal(self._session.home, job_id)
                if already_ended(journal, journal.spec()) is not None:
                    self._session.withdraw(job_id)
                elif turns and not self._session.has_turn:
                    idle_since = time.monotonic()
                    break
                else:
                    self._session.note_current(job_id)
                    return Order(job_id, journal.claim_attempt())
            else:
                if turns and self._session.has_turn:  # for a job that was taken back
                    self._session.end_turn()
            idle = time.monotonic() - idle_since
            ends = self._session.asked_to_end and not self._session.queue()
            if ends or idle > self._spec.idle_seconds:
                return Order(None)
            time.sleep(wait)
            wait = min(LONGEST_WAIT, wait * 1.02)


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
        self._training: Training | None = None
        self._memory: InMemory | None = None
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

        A job that can never be trained is recorded as failed, and the session goes on. Raises
        SetupError and StoreError, which another start may mend.
        """
        spec, self._turn = journal.spec(), time.monotonic()
        with _job_log(journal):
            try:
                work = self._read(journal, spec, attempt)
                finished = self._execute(work)
            except FailedEverywhere as reason:
                self._training = self._memory = None
                if is_rank0():
                    record_failure(journal, str(reason))
            else:
                if is_rank0():
                    self._record(journal, spec, attempt, finished)
            if is_rank0():
                journal.close()
        if is_rank0() and not self._stop.set:
            self._session.withdraw(spec.id)

    def _record(self, journal: JobJournal, spec: JobSpec, attempt: int, finished: bool) -> None:
        """Record how a job went, as job.py does. Called on rank 0."""
        if why := journal.fenced(attempt):
            print(f"stopped without publishing: {why}", flush=True)
        elif finished:
            record_success(journal, spec)
        else:
            print(f"stopped after step {journal.step}; start it again to go on", flush=True)

    def _read(self, journal: JobJournal, spec: JobSpec, attempt: int) -> JobInputs:
        """Read and check the inputs on every rank; choose the starting point on rank 0."""
        problem, work = None, None
        try:
            work = read_inputs(journal, spec, attempt)
            if is_rank0():
                in_memory = self._continues(work)
                work = choose_start(work, self._on_cpu, optimizer_in_memory=in_memory)
                journal.close()
        except CrayError as error:
            problem = error
        agree(problem)
        assert work is not None  # or `agree` has raised
        return work.at(attempt, *broadcast_from_rank0(work.points))

    def _holds(self, spec: JobSpec) -> bool:
        """Return True if the weights in memory are the ones that a job begins with."""
        starts = spec.hyperparameters.init == "parent"
        return starts and self._memory is not None and self._memory.sha256 == spec.parent_sha256

    def _fits(self, work: JobInputs) -> bool:
        """Return True if the job can be trained with the model and optimizer that are built."""
        spec, training = work.spec, self._training
        return training is not None and training.fits(
            work.model, spec.layout, spec.hyperparameters, spec.recompute
        )

    def _continues(self, work: JobInputs) -> bool:
        """Return True if the optimizer in memory is the one that the job goes on with."""
        left_by = None if self._memory is None else self._memory.job
        return left_by is not None and left_by == work.spec.optimizer_from and self._fits(work)

    def _execute(self, work: JobInputs) -> bool:
        spec, optimizer = work.spec, self._continues(work)
        if self._training is not None and self._fits(work):
            in_memory = self._holds(spec)
            with contextlib.nullcontext() if in_memory else check_parent(work.parent, spec):
                self._training.begin(
                    work.parent,
                    spec.hyperparameters,
                    spec.method,
                    job_rank.stop_check(work, self._stop),
                    in_memory=in_memory,
                )
        else:
            self._training = self._offload = None  # before the next one takes as much memory
            gc.collect()
            if not self._on_cpu:
                torch.cuda.empty_cache()
            self._training = job_rank.build(work, self._on_cpu, self._stop)
            self._training.sender = self._sender
        self._memory = None  # until the job is published
        finished = job_rank.execute(
            self._training, work, optimizer_in_memory=optimizer, leave=self._leave
        )
        if finished:
            self._memory = self._published(work)
        return finished

    def _leave(self, idle: float) -> bool:
        """Return True if a job without a command for `idle` seconds is to make room."""
        if self._session.spec().turns and idle > TURN_PATIENCE:
            return True  # what it waits for may need the replicas
        if len(self._session.queue()) > 1 or self._session.asked_to_end:
            return idle > PATIENCE or time.monotonic() - self._turn > LONGEST_TURN
        return idle > self._session.spec().idle_seconds

    def _published(self, work: JobInputs) -> InMemory | None:
        """Return the state in memory after a job of this session was published.

        None if another attempt published the job: this rank's state may be another one then.
        """
        sha256 = None
        if is_rank0() and work.journal.fenced(work.attempt) is None:
            path = work.journal.home.checkpoint(work.spec.id) / "manifest.json"
            sha256 = checksums.read_record(Manifest, path).weights_sha256
        sha256 = broadcast_from_rank0(sha256)
        return None if sha256 is None else InMemory(sha256, work.spec.id)


def agree(problem: CrayError | None) -> None:
    """Raise on every rank if any rank has a problem: the first rank's. Collective.

    Raises FailedEverywhere for a fault of the job, SetupError for one of the machine.
    """
    mine = None
    if problem is not None:
        machine = isinstance(problem, SetupError | StoreError) and not isinstance(problem, Corrupt)
        mine = (str(problem), machine)
    every = [json.loads(one) for one in gather_from_ranks(json.dumps(mine).encode())]
    for text, machine in filter(None, every):
        raise (SetupError if machine else FailedEverywhere)(text)


@contextlib.contextmanager
def _job_log(journal: JobJournal) -> Iterator[None]:
    """Let rank 0 write to the job's log within the context, as a process of the job's own does."""
    if not is_rank0():
        yield
        return
    with journal.log.open("a", buffering=1) as log, contextlib.redirect_stdout(log):
        yield
