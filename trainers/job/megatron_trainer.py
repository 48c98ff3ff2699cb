"""Training jobs over a scheduler: submit once, watch, start again what died, pause, cancel.

The platform process holds one `MegatronTrainer`. It keeps no state: a job's folder says everything,
so a restarted platform goes on watching. keeping.py asks after the jobs that no client asks after.
A spec without a layout gets one before it is written down (spreading.py). The work itself is
job.py, in processes of its own.
"""

import hashlib
import importlib.metadata
import sys
import threading
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.ports import Command, CommandStatus, Scheduler
from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import checkpoints
from cray_agents.trainers.job.journal import JobJournal, changes, measures
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.trainers.planning.default_layout import spread
from cray_agents.trainers.planning.layout_limits import hold
from cray_agents.trainers.planning.layouts import described
from cray_agents.training_jobs import JobSpec, JobState, JobStatus

MAX_RESTARTS = 3  # in a row without a step forward


def code_version() -> str:
    """What decides, besides data and hyperparameters, what a job computes (`JobSpec.code`)."""
    digest = hashlib.sha256()
    folder = Path(__file__).parent
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    for package in ("megatron-core", "torch"):
        digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    return digest.hexdigest()[:16]


class Handover(Record):
    """What was last given to the scheduler. `restarts` counts those in a row from `step`.

    `resumed`: a pause ended it, or an end that is set aside, so its end was neither a
    cancellation nor a death.
    """

    id: str = ""
    step: int = 0
    restarts: int = 0
    resumed: bool = False


class MegatronTrainer:
    """A ports.Trainer: each job is one command, named after the job, on a scheduler."""

    def __init__(
        self, home: Home, scheduler: Scheduler, resources: Resources | None = None
    ) -> None:
        self.home, self.scheduler = home, scheduler
        self.resources = resources or Resources()
        self._starting = threading.Lock()  # jobs, in whichever way

    def submit(self, spec: JobSpec) -> JobStatus:
        """Start the job, or find it; an ended job is returned as it is.

        But a failed one that is to be run otherwise (see JobSpec) is tried again so, from its
        newest resume point, and one whose weights were pruned is trained again. Raises
        SchedulerError, Corrupt; BadInput and NotFound if its parent can never be trained, if no
        layout can be chosen for it, or it does not fit into what is there.
        """
        journal = JobJournal(self.home, spec.id)
        with self._starting:
            if not journal.exists:
                self._check(spec)
                journal.write_spec(self._settled(journal, spec))
                self._hand_over(journal, Handover())
            elif to_try_again(journal, spec):
                settled = self._settled(journal, spec)
                self._note_resumed(journal)
                journal.set_end_aside(settled)  # `status` does the rest, also if we are killed
        return self.status(spec.id)

    def _check(self, spec: JobSpec) -> None:
        """Raises BadInput, NotFound for a parent that no start of the job could read."""
        places = {"parent": (spec.parent, spec.hyperparameters.init)}
        if spec.reference is not None:
            places["reference"] = (spec.reference, "parent")
        for param, (place, init) in places.items():
            try:
                read_parent(self.home.root / place, init)
            except (BadInput, NotFound) as error:
                raise type(error)(str(error), param=param) from error

    def _settled(self, journal: JobJournal, spec: JobSpec) -> JobSpec:
        """The spec with a layout; where it had none, why that one is told before."""
        settled, reasons = spread(spec, self.home, self.resources)
        hold(settled, self.home, self.resources, chosen=bool(reasons))
        # there are events, if we were killed before the spec
        if reasons and (journal.exists or not journal.events()):
            journal.folder.mkdir(parents=True, exist_ok=True)
            told = {"layout": settled.layout.model_dump(), "recompute": settled.recompute}
            journal.event("layout", **told, reasons=reasons)
            journal.close()
            with journal.log.open("a") as log:
                print(f"layout {described(settled.layout)}:", *reasons, sep="\n  ", file=log)
        return settled

    def status(self, job_id: str) -> JobStatus:
        """Where it stands; starts it again if its process died. Raises NotFound."""
        journal = JobJournal(self.home, job_id)
        spec = journal.spec()
        found = self._look(journal, spec)
        if isinstance(found, JobStatus):
            return found
        with self._starting:  # whoever looked at the same time may have started it again
            found = self._look(journal, spec)
            if isinstance(found, JobStatus):
                return found
            return self._go_on(journal, journal.adopt(), found)

    def _look(self, journal: JobJournal, spec: JobSpec) -> JobStatus | CommandStatus:
        """Where a job stands, or how its command ended when the job itself has not."""
        if journal.cancelled:
            return self._describe(journal, spec, "cancelled")
        if (ended := self._ended(journal)) is not None:
            return ended
        command = self.scheduler.status(journal.job_id)
        if command.state == "queued" and journal.paused:
            self.scheduler.cancel(journal.job_id)  # no process of it yet could see the pause
            return self._describe(journal, spec, "paused")
        if command.state in ("queued", "running"):
            return self._describe(journal, spec, command.state)
        if (ended := self._ended(journal)) is not None:  # it ended between the two looks
            return ended
        return self._describe(journal, spec, "paused") if journal.paused else command

    def _go_on(self, journal: JobJournal, spec: JobSpec, command: CommandStatus) -> JobStatus:
        """Start a job again whose command ended before its time."""
        if handover(journal).resumed:
            self._hand_over(journal, Handover(step=journal.step))
            return self._describe(journal, spec, "queued")
        if command.state == "cancelled":  # by somebody else, with the scheduler's own tools
            journal.cancel()
            return self._describe(journal, spec, "cancelled")
        return self._restart(journal, spec, command)

    def cancel(self, job_id: str) -> JobStatus:
        """End it for good. A job that has ended before stays what it is. Raises NotFound."""
        journal = JobJournal(self.home, job_id)
        journal.spec()
        if (ended := self._ended(journal)) is not None:
            return ended
        journal.cancel()
        self.scheduler.cancel(job_id)
        return self.status(job_id)

    def pause(self, job_id: str) -> JobStatus:
        """Let the job save and stop after its present step. Raises NotFound, BadInput.

        The ranks see the pause themselves: a signal would leave a big model only the scheduler's
        grace period to save in.
        """
        journal = JobJournal(self.home, job_id)
        journal.spec()
        if journal.cancelled or self._ended(journal) is not None:
            state = self.status(job_id).state
            message = f"{job_id} has ended ({state}): there is nothing left to pause"
            raise BadInput(message, param="job_id", code="job_ended")
        journal.pause()
        return self.status(job_id)

    def resume(self, job_id: str) -> JobStatus:
        """Start a paused job again, from its newest resume point. Raises NotFound, BadInput."""
        journal = JobJournal(self.home, job_id)
        journal.spec()
        if not journal.paused or journal.cancelled or self._ended(journal) is not None:
            message = f"{job_id} is {self.status(job_id).state}, not paused"
            raise BadInput(message, param="job_id", code="job_not_paused")
        with self._starting:
            self._note_resumed(journal)
            journal.resume()
        return self.status(job_id)

    def _note_resumed(self, journal: JobJournal) -> None:
        _note(journal, handover(journal).model_copy(update={"resumed": True}))

    # ---- restarts
    def _restart(self, journal: JobJournal, spec: JobSpec, command: CommandStatus) -> JobStatus:
        last, step = handover(journal), journal.step
        restarts = 1 if step > last.step else last.restarts + 1
        if restarts <= MAX_RESTARTS:
            self._hand_over(journal, Handover(step=step, restarts=restarts))
            return self._describe(journal, spec, "queued")
        how = f"exit code {command.exit_code}" if command.exit_code is not None else command.state
        error = (
            f"died at step {step} ({how} {command.reason}) and {MAX_RESTARTS} restarts brought it"
            f" no further; the end of {journal.log}:\n{journal.log_tail()}"
        )
        failed = self._describe(journal, spec, "failed").model_copy(update={"error": error})
        journal.write_status(failed)
        return failed

    def _hand_over(self, journal: JobJournal, what: Handover) -> None:
        spec = journal.spec()
        world, gpus = spec.layout.world, self.resources.gpus is not None
        environment = {"OMP_NUM_THREADS": str(self.resources.cpus_per_rank)}
        if not gpus:  # of a node that has some
            environment["CUDA_VISIBLE_DEVICES"] = ""
        _note(journal, what)
        command = Command(
            name=journal.job_id,
            argv=[
                sys.executable,
                "-m",
                "cray_agents.trainers.job.job",
                str((journal.folder / "spec.json").resolve()),
            ],
            directory=str(journal.folder.resolve()),
            log=str(journal.log.resolve()),
            environment=environment,
            nodes=self.resources.nodes_for(world),
            ranks=world,
            cpus_per_rank=self.resources.cpus_per_rank,
            gpus=gpus,
            minutes=self.resources.minutes,
        )
        given = self.scheduler.submit(command)
        _note(journal, what.model_copy(update={"id": given}))

    # ---- what to say
    def _ended(self, journal: JobJournal) -> JobStatus | None:
        status = journal.status()
        if status is None:
            return None
        # we may have been killed between the scheduler's answer and our note of it
        given = handover(journal).id or self.scheduler.status(journal.job_id).id
        told = {"scheduler": self.scheduler.name, "scheduler_job_id": given}
        return status.model_copy(update={**told, "metrics": newest_measures(journal)})

    def _describe(self, journal: JobJournal, spec: JobSpec, state: JobState) -> JobStatus:
        described = describe(journal, spec, state)
        return described.model_copy(update={"scheduler": self.scheduler.name})


def to_try_again(journal: JobJournal, spec: JobSpec) -> bool:
    """Whether the job failed and this spec asks for another way to run it, or its weights are gone.

    Raises Corrupt.
    """
    ended = None if journal.cancelled else journal.status()
    if ended is not None and ended.checkpoint is not None:
        return checkpoints.pruned(journal.home.checkpoint(ended.checkpoint)) is not None
    return ended is not None and ended.state == "failed" and bool(changes(journal.spec(), spec))


def read_status(home: Home, job_id: str) -> JobStatus:
    """What a job's folder alone says of it; nothing is asked or started. Raises NotFound."""
    journal = JobJournal(home, job_id)
    spec = journal.spec()
    if (ended := journal.status()) is not None:
        told = {"scheduler_job_id": handover(journal).id, "metrics": newest_measures(journal)}
        return ended.model_copy(update=told)
    state: JobState = "running" if journal.attempts else "queued"
    state = "paused" if journal.paused else state
    return describe(journal, spec, "cancelled" if journal.cancelled else state)


def describe(journal: JobJournal, spec: JobSpec, state: JobState) -> JobStatus:
    """The status of a job that has not ended by itself, from its events."""
    steps = [e for e in journal.events() if e.get("event") == "step"]
    return JobStatus(
        id=spec.id,
        state=state,
        scheduler_job_id=handover(journal).id,
        step=steps[-1]["step"] if steps else 0,
        steps=spec.hyperparameters.steps,
        attempts=journal.attempts,
        loss_first=steps[0]["loss"] if steps else None,
        loss_last=steps[-1]["loss"] if steps else None,
        trained_tokens=sum(e["tokens"] for e in steps),
        seconds=sum(e["seconds"] for e in steps),
        metrics=measures(steps[-1]) if steps else {},
    )


def newest_measures(journal: JobJournal) -> dict[str, Any]:
    """`JobStatus.metrics`, of a job that has ended too."""
    newest = journal.last_step
    return measures(newest) if newest is not None else {}


def handover(journal: JobJournal) -> Handover:
    """What was last given to the scheduler for a job."""
    path = journal.folder / "scheduler.json"
    return checksums.read_record(Handover, path) if path.exists() else Handover()


def _note(journal: JobJournal, what: Handover) -> None:
    text = checksums.with_crc(what.model_dump_json().encode())
    durable.replace_file(journal.folder / "scheduler.json", text)
