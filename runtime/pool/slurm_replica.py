"""SlurmReplica: a vLLM server in a Slurm job on another node, with a local one's interface.

The job runs replica_supervisor.py, which starts vLLM there. This module submits the job, finds its
lease (job_lease.py), and then speaks HTTP: with the supervisor about starts, ends and deaths
(`SupervisorClient`), with vLLM as vllm_engine.py does. Weights are read on the node, by their
path on the shared root.

A place is lost when Slurm says that the job has ended, or when its supervisor neither answers nor
renews its lease. An engine may also die alone: then its successor starts on the same place. A
platform that was killed leaves its jobs; the next one finds them by their leases and takes them
over. replica.py proves them before they serve.
"""

import asyncio
import logging
import time
from collections.abc import Callable
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

from cray_agents.errors import CrayError, EngineError, EngineUnavailable, NotFound, SchedulerError
from cray_agents.ports import Command, CommandStatus, Scheduler
from cray_agents.processes import python
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.controller_lease import unguarded
from cray_agents.runtime.pool.golden_probe import same_shape, weights_of
from cray_agents.runtime.pool.job_lease import (
    ANSWER,
    SECRET,
    STATE_SECONDS,
    LapseClock,
    PlacedEngine,
    ReplicaSpec,
    SupervisorClient,
    SupervisorState,
    attempts,
    new_attempt,
    read_lease,
    read_spec,
)
from cray_agents.runtime.pool.start_phases import StartPhase
from cray_agents.runtime.pool.vllm_engine import VllmEngine
from cray_agents.runtime.pool.vllm_http import CA, client_context
from cray_agents.runtime.pool.vllm_process import VllmHost
from cray_agents.runtime.registry.deltas import rebuilt_bytes

POLL_INTERVAL = 2.0  # seconds between two questions to Slurm about all jobs together
_ANSWERS = 10.0  # of all supervisors in a second while there is no news, where leases allow it
LAPSE = 30.0  # seconds without a heartbeat or an answer after which a supervisor counts as dead
DRAIN = 60.0  # seconds before the end of a job's time in which it gets no more requests, at most
_SUPERVISOR = "cray_agents.runtime.pool.replica_supervisor"
_LEASE_INTERVAL = 0.25  # seconds between two looks for a lease
_GOODBYE = 5.0  # seconds that a supervisor has to answer an order to end
_LOG_TAIL = 2000  # bytes of a job's log in an error

log = logging.getLogger(__name__)


class JobBoard:
    """The states of all replicas' jobs. Slurm is asked about all of them at once.

    `term`: returns the controller's term, which supervisors are told.
    """

    def __init__(
        self,
        scheduler: Scheduler,
        seconds: float = POLL_INTERVAL,
        term: Callable[[], int] = unguarded,
    ) -> None:
        self.scheduler, self.term = scheduler, term
        self.watched = 0  # jobs, at the last poll
        self._seconds = seconds
        self._next = 0.0
        self._waiting: dict[str, list[tuple[asyncio.Future[CommandStatus], Any]]] = {}
        self._tasks = BackgroundTasks()
        self._polls = False

    async def status(self, name: str, seen: CommandStatus | None = None) -> CommandStatus:
        """Return a job's status at the next poll, or when it is no longer the one that was `seen`.

        Raises SchedulerError.
        """
        future: asyncio.Future[CommandStatus] = asyncio.get_running_loop().create_future()
        self._waiting.setdefault(name, []).append((future, seen))
        if not self._polls:
            self._polls = True
            self._tasks.keep("job board", self._poll)
        return await future

    async def _poll(self) -> None:
        while self._waiting:
            await asyncio.sleep(max(0.0, self._next - time.monotonic()))
            self._next = time.monotonic() + self._seconds
            waiting, self._waiting = self._waiting, {}
            self.watched = len(waiting)
            answers: dict[str, CommandStatus | Exception] = {}
            try:
                answers = await asyncio.to_thread(self._ask, list(waiting))
            finally:  # who asked in vain asks again at the next poll
                for name in waiting.keys() - answers.keys():
                    self._waiting.setdefault(name, []).extend(waiting[name])
            for name, answer in answers.items():
                for future, seen in waiting[name]:
                    if future.done():  # who asked was cancelled
                        continue
                    if answer == seen:
                        self._waiting.setdefault(name, []).append((future, seen))
                    elif isinstance(answer, CommandStatus):
                        future.set_result(answer)
                    else:
                        future.set_exception(answer)
        self._polls = False

    def _ask(self, names: list[str]) -> dict[str, CommandStatus | Exception]:
        answers: dict[str, CommandStatus | Exception] = {}
        for name in names:
            try:
                answers[name] = self.scheduler.status(name)
            except (CrayError, OSError, ValueError) as error:  # each asker gets it
                answers[name] = error
        return answers


class SlurmReplica(VllmHost):
    """A replica as a Slurm job: see `EngineHost`.

    Args:
        spec: what the job serves with; its `attempt` is chosen here.
        folder: `replicas/<n>` of the shared root.
        board: of all replicas' jobs.
        command: the resources that a job asks for. Name, program and files are filled in here.
        lead: seconds before the end of a job's time at which its successor is submitted, but at
            most half of that time.
        adopts: takes over a job that an earlier platform left.
    """

    taken_over = False

    def __init__(
        self,
        spec: ReplicaSpec,
        folder: Path,
        board: JobBoard,
        command: Command,
        *,
        lead: float = 900.0,
        lapse: float = LAPSE,
        adopts: bool = True,
    ) -> None:
        self.host = ""
        self.job: str | None = None
        self.pid: int | None = None
        self.port: int | None = None
        self.phases: dict[StartPhase, float] = {}
        super().__init__(f"replica {spec.number}", spec.settings)
        self._tls = None if spec.tls is None else client_context(spec.tls / CA)
        self._spec = spec
        self._folder = folder
        self._board = board
        self._command = command
        self._lead = lead
        self._lapse = lapse
        self._adopts = adopts
        self._attempt: ReplicaSpec | None = None  # whose job waits or runs
        self._supervisor: SupervisorClient | None = None  # of a job that has its place
        self._state: SupervisorState | None = None  # as its supervisor said last
        self._starts, self._since = 0, 0  # the number of the used engine, its start's serial
        self._why = ""
        self._waited: float | None = None  # seconds for the place that the next start is on
        self._allocating = asyncio.Lock()
        self._ended, self._leaving, self._ending = (asyncio.Event() for _ in range(3))
        self._tasks = BackgroundTasks()

    # ---- the place
    @property
    def placed(self) -> bool:
        """True while the job's supervisor is there: see `EngineHost.placed`."""
        return self._supervisor is not None

    async def allocate(self) -> None:
        """Wait for a job's place, and submit the job unless there is one: see `EngineHost`.

        Raises EngineUnavailable if the job ends before its supervisor answers.
        """
        async with self._allocating:
            if self.placed:
                return
            if self._attempt is None and self._adopts:
                self._attempt = await asyncio.to_thread(self._find_live)
            self._adopts, began = False, time.monotonic()
            if self._attempt is None:
                self._attempt = await asyncio.to_thread(new_attempt, self._folder, self._spec)
                await self._submit()
            try:
                await self._wait_for_place(self._attempt)
                self._waited = time.monotonic() - began
            except (CrayError, OSError):
                await self._give_up()
                raise

    async def _submit(self) -> None:
        assert self._attempt is not None
        folder = self._folder / str(self._attempt.attempt)
        command = self._command.model_copy(
            update={
                "name": self._attempt.job_name,
                "argv": python("-m", _SUPERVISOR, str(folder)),
                "directory": str(folder),
                "log": str(folder / "job.txt"),
                "minutes": self._spec.minutes,
            }
        )
        self.job = await asyncio.to_thread(self._board.scheduler.submit, command)

    def _find_live(self) -> ReplicaSpec | None:
        """Return the newest attempt whose job waits or runs; cancel the other ones' jobs."""
        live = None
        for number in reversed(attempts(self._folder)):
            spec = read_spec(self._folder / str(number))
            if spec is None:
                continue
            if self._board.scheduler.status(spec.job_name).state not in ("queued", "running"):
                continue
            if live is None and spec.serves_like(self._spec):
                live = spec
                continue
            log.warning("%s is cancelled: it serves otherwise than now configured", spec.job_name)
            self._board.scheduler.cancel(spec.job_name)
        return live

    async def _wait_for_place(self, attempt: ReplicaSpec) -> None:
        folder = self._folder / str(attempt.attempt)
        clock: LapseClock | None = None
        asking: asyncio.Task[CommandStatus | None] | None = None
        running_since, trouble = None, ""
        try:
            while True:
                try:
                    if await self._connect(folder):
                        return
                except (EngineError, OSError) as error:
                    trouble = str(error)
                    clock = clock or LapseClock(self._lapse)
                    if await asyncio.to_thread(clock.lapsed, folder):
                        raise EngineUnavailable(
                            f"job {self.job} has a lease that nobody renews: {error}"
                        ) from error
                asking = asking or asyncio.create_task(self._status(attempt))
                if not (await asyncio.wait([asking], timeout=_LEASE_INTERVAL))[0]:
                    continue
                status, asking = asking.result(), None
                if status is None:
                    continue
                self.job = status.id or self.job
                if status.state == "unknown":
                    await self._submit()  # a controller that was killed may forget a job
                elif status.state == "queued":
                    self._why = f"job {self.job} waits for a place: {status.reason or 'queued'}"
                elif status.state == "running":
                    self._why = f"job {self.job} begins"
                    running_since = running_since or time.monotonic()
                    if time.monotonic() - running_since > self.settings.start_timeout:
                        raise EngineUnavailable(self._silence(folder, trouble))
                else:
                    raise EngineUnavailable(
                        f"job {self.job} of replica {attempt.number} ended before it was ready"
                        f" ({status.reason or status.state}): {_tail(folder / 'job.txt')}"
                    )
        finally:
            if asking is not None:
                asking.cancel()

    async def _status(
        self, attempt: ReplicaSpec, seen: CommandStatus | None = None
    ) -> CommandStatus | None:
        """Return the state of an attempt's job: see `JobBoard.status`. None: Slurm is silent."""
        try:
            return await self._board.status(attempt.job_name, seen)
        except (CrayError, OSError, ValueError) as error:
            log.warning("the state of %s is not known: %s", attempt.job_name, error)
            return None

    def _silence(self, folder: Path, trouble: str) -> str:
        lease = read_lease(folder)
        place = f"on {lease.url} ({lease.host})" if lease else "without a lease"
        return (
            f"job {self.job} runs, and its supervisor, {place}, did not answer within "
            f"{self.settings.start_timeout:g} s (start_timeout): name an interface that the "
            f"gateway can reach (replica_interface). {trouble} {folder / 'job.txt'}: "
            f"{_tail(folder / 'job.txt')}"
        )

    @property
    def joules(self) -> float | None:
        """The energy of the job's GPUs since it began, as its supervisor said last."""
        return None if self._state is None else self._state.joules

    async def _connect(self, folder: Path) -> bool:
        """Connect to a lease's supervisor. Return False without one. Raises EngineError."""
        lease = await asyncio.to_thread(read_lease, folder)
        if lease is None:
            return False
        secret = await asyncio.to_thread((folder / SECRET).read_text)
        supervisor = SupervisorClient(
            lease.url, secret, self._lapse / 3, self._board.term, self._tls
        )
        try:
            state = self._state = await supervisor.state()
        except BaseException:
            await supervisor.close()
            raise
        self._supervisor, self.host, self.job = supervisor, lease.host, lease.job or self.job
        self._why = ""
        for event in (self._ended, self._leaving, self._ending):
            event.clear()
        follow = partial(self._follow_supervisor, supervisor, folder, state)
        self._tasks.keep("replica supervisor", follow, self._name)
        self._tasks.keep("replica job", partial(self._follow_job, supervisor), self._name)
        self._follow_time(supervisor, state)
        return True

    async def _follow_supervisor(
        self, supervisor: SupervisorClient, folder: Path, state: SupervisorState
    ) -> None:
        """Hear of deaths and of the place's end, until the supervisor is lost.

        No answer is waited for so long that its lease cannot be seen to lapse in time.
        """
        clock, wait = LapseClock(self._lapse), 0.0
        while self._supervisor is supervisor:
            try:
                async with asyncio.timeout(clock.left):
                    self._state = state = await supervisor.state(state.serial, wait)
            except (EngineError, TimeoutError) as error:
                if await asyncio.to_thread(clock.lapsed, folder):
                    why = str(error) or "no answer came"
                    self._lose(supervisor, f"its lease lapsed: {why}", cancel=True)
                wait = 0.0
                await asyncio.sleep(_LEASE_INTERVAL)
                continue
            clock = LapseClock(self._lapse)
            wait = min(max(STATE_SECONDS, self._board.watched / _ANSWERS), self._lapse / 3)
            if state.leaving:
                self._leaving.set()
                self._ending.set()
            self._note_death(state)

    def _note_death(self, state: SupervisorState) -> None:
        """Fire if the used engine has died since it was started."""
        newer = state.serial > self._since and state.starts == self._starts
        if newer and not state.alive and not self._ended.is_set():
            self._why = state.why or "its process ended"
            self._ended.set()

    async def _follow_job(self, supervisor: SupervisorClient) -> None:
        """Lose the place when Slurm says that its job has ended."""
        status = None
        while self._supervisor is supervisor and self._attempt is not None:
            status = await self._status(self._attempt, status)
            self._lose_if_ended(supervisor, status)

    def _lose_if_ended(self, supervisor: SupervisorClient, status: CommandStatus | None) -> None:
        # one that Slurm does not know may be known again
        if status is not None and status.state not in ("queued", "running", "unknown"):
            why = status.reason or status.state
            self._lose(supervisor, f"its job {self.job} on {self.host} ended: {why}")

    def _follow_time(self, supervisor: SupervisorClient, state: SupervisorState) -> None:
        """Tell in time that the job's time comes to its end."""

        def tell(event: asyncio.Event) -> None:
            if self._supervisor is supervisor:
                event.set()

        left, seconds = state.seconds_left, state.seconds
        if left is not None and seconds is not None:
            later = asyncio.get_running_loop().call_later
            later(max(0.0, left - min(self._lead, seconds / 2)), tell, self._leaving)
            later(max(0.0, left - min(DRAIN, seconds / 8)), tell, self._ending)

    def _lose(self, supervisor: SupervisorClient, why: str, *, cancel: bool = False) -> None:
        """Note that the place is lost. `cancel`: Slurm still believes in the job."""
        if self._supervisor is not supervisor:
            return
        lost, self._supervisor, self._attempt = self._attempt, None, None
        engine, self._engine = self._engine, None
        self._why, self.host, self.pid, self.port = why, "", None, None
        self._leaving.clear()
        self._ending.clear()
        self._ended.set()
        if lost is not None:
            work = self._dismiss(supervisor, lost, engine, cancel=cancel)
            self._tasks.run("dismissal of a job", work, lost.job_name)

    async def _dismiss(
        self,
        supervisor: SupervisorClient,
        attempt: ReplicaSpec,
        engine: VllmEngine | None,
        *,
        cancel: bool,
    ) -> None:
        """End a supervisor that may live on after its node or its job was given up.

        Requests to its engine fail at once: no answer may ever come from a node that is gone.
        """
        if engine is not None:
            await engine.close()
        with suppress(EngineError):
            await supervisor.order("exit", _GOODBYE)
        await supervisor.close()
        if cancel:
            await self._cancel(attempt)

    async def _cancel(self, attempt: ReplicaSpec) -> None:
        try:
            await asyncio.to_thread(self._board.scheduler.cancel, attempt.job_name)
        except SchedulerError as error:
            log.warning("%s was not cancelled: %s", attempt.job_name, error)

    async def _give_up(self) -> None:
        """Cancel a job that did not come to its place; the next allocation submits another one."""
        attempt, self._attempt = self._attempt, None
        if attempt is not None:
            await self._cancel(attempt)
        self.job = None

    async def release(self, *, drain: bool = False) -> None:
        """End the job: see `EngineHost.release`."""
        with suppress(EngineError):  # an engine that is gone answers nobody
            while drain and self._engine and await self._engine.refuse():  # noqa: ASYNC110
                await asyncio.sleep(_LEASE_INTERVAL)
        await self._close_engine()
        supervisor, self._supervisor = self._supervisor, None
        attempt, self._attempt = self._attempt, None
        await self._tasks.close()
        for event in (self._ended, self._leaving, self._ending):
            event.clear()  # it may get another place
        self.host, self.job, self._starts, self._since = "", None, 0, 0
        if attempt is not None:
            if supervisor is not None:
                await self._dismiss(supervisor, attempt, None, cancel=True)
            else:
                await self._cancel(attempt)

    async def wait_until_ending(self) -> None:
        """Return when Slurm is about to kill the job: see `EngineHost`."""
        await self._ending.wait()

    async def successor(self) -> "SlurmReplica":
        """Return the same replica in a job of its own, when this one's time or place ends."""
        await self._leaving.wait()
        return SlurmReplica(
            self._spec,
            self._folder,
            self._board,
            self._command,
            lead=self._lead,
            lapse=self._lapse,
            adopts=False,
        )

    # ---- the engine
    async def start(self, checkpoint: Path, version: str) -> None:
        """Start an engine on the place; see `EngineHost.start`.

        An engine that an earlier platform left is taken over instead, once, if it can serve this
        checkpoint. Raises EngineUnavailable.
        """
        await self._close_engine()
        supervisor, self.taken_over = self._supervisor, False
        waited, self._waited, self.phases = self._waited, None, {}
        if supervisor is None:
            raise EngineUnavailable(f"replica {self._spec.number} has no place: {self._why}")
        left = self._state
        if left is not None and left.alive and not self._starts:
            self.taken_over = await self._take_over(supervisor, left, checkpoint, version)
            if self.taken_over:
                return
        body = {
            "checkpoint": str(checkpoint),
            "version": version,
            "weights": weights_of(checkpoint),
            "lora_rank": str(self.lora_rank),
        }
        seconds = self.settings.start_timeout + ANSWER
        try:
            state = await supervisor.start(seconds, **body)
        except EngineError as error:
            if self._attempt is not None and isinstance(error, EngineUnavailable):
                self._lose_if_ended(supervisor, await self._status(self._attempt))
            why = f"on {self.host}: {error}" if self.placed else self._why
            raise EngineUnavailable(why) from error
        self.phases = state.phases if waited is None else {"place": waited, **state.phases}
        self._use(PlacedEngine(supervisor, state, self.settings, self._tls), state)

    async def _take_over(
        self, supervisor: SupervisorClient, left: SupervisorState, checkpoint: Path, version: str
    ) -> bool:
        """Use the engine of an earlier platform. Return False if it has to be started afresh."""
        self._starts = left.starts  # it is not tried again
        engine = PlacedEngine(supervisor, left, self.settings, self._tls)
        try:
            if not await asyncio.to_thread(same_shape, Path(left.started_on), checkpoint):
                raise NotFound(f"it was started on {left.started_on}, of another shape")
            if left.asleep:
                await engine.wake(Path(left.started_on), version)
            if left.weights == weights_of(checkpoint):
                await engine.take_over(checkpoint, version)
                await supervisor.order("note", version=version, weights=left.weights)
            else:
                await engine.load(checkpoint, version)
        except (CrayError, OSError) as error:
            log.warning("the engine on %s is started afresh: %s", self.host, error)
            await engine.close()
            return False
        log.info("replica %d on %s is taken over, job %s", self._spec.number, self.host, self.job)
        self._use(engine, left)
        return True

    def _use(self, engine: PlacedEngine, state: SupervisorState) -> None:
        self._engine, self._starts, self._since = engine, state.starts, state.serial
        self.pid, self.port = state.pid, state.port
        if self.placed:  # else _lose has said why it ended
            self._why = ""
            self._ended.clear()
            self._note_death(self._state or state)

    async def _close_engine(self) -> None:
        engine, self._engine = self._engine, None
        self.pid = self.port = None
        if engine is not None:
            await engine.close()

    async def stop(self) -> None:
        """End the engine, and keep the place: see `EngineHost.stop`."""
        await self._close_engine()
        if self._supervisor is not None:
            try:
                await self._supervisor.order("stop", ANSWER)
            except EngineError as error:
                log.warning("the engine on %s was not ended: %s", self.host, error)

    async def copy(self, checkpoint: Path) -> tuple[Path, str]:
        """Copy a checkpoint to the job's node: see `VllmHost.copy`."""
        # of an engine over several nodes all workers are told one path
        if self.settings.scratch is None or self._supervisor is None or self._spec.nodes > 1:
            return checkpoint, ""
        try:
            return await self._supervisor.stage(checkpoint, self.settings.load_timeout)
        except EngineError as error:
            return checkpoint, str(error)

    async def wait_until_dead(self) -> None:
        """Return when the engine, its job or its node has ended: see `EngineHost`."""
        await self._ended.wait()

    def death_reason(self) -> str:
        """Say why the engine or its place was lost: see `EngineHost.death_reason`."""
        return self._why

    def missing_resource(self, checkpoint: Path) -> str:
        """Return "": Slurm decides about resources."""
        return ""

    def sleep_level(self, checkpoint: Path) -> int:
        """Return 1 if a copy leaves half of what its job may take of the node's memory, else 2."""
        left = None if self._state is None else self._state.memory_left
        return 1 if left is not None and 2 * rebuilt_bytes(checkpoint) <= left else 2


def cancel_surplus(folder: Path, scheduler: Scheduler, keep: int) -> None:
    """Cancel the jobs that an earlier platform had for replicas from number `keep` on."""
    for number in attempts(folder):
        specs = [read_spec(folder / str(number) / str(n)) for n in attempts(folder / str(number))]
        for spec in specs if number >= keep else ():
            if spec is not None:
                scheduler.cancel(spec.job_name)


def _tail(file: Path) -> str:
    try:
        return file.read_bytes()[-_LOG_TAIL:].decode(errors="replace").strip()
    except OSError as error:
        return f"{file} cannot be read: {error.strerror}"
