"""Megatron trainer: submit, watch, restart, pause and cancel training jobs over a scheduler.

The platform process has one `MegatronTrainer`. All state is in the jobs' folders, so a restarted
platform goes on. What a look at a job leads to is a table in job_state.py, where
`restart_unfinished_jobs` asks for the status of jobs that no client asks for. A spec without dtype,
learning rate or micro-batch gets them before its id is taken, and one without a layout before it is
written (planning/job_layout.py). The work itself is job.py, in its own processes.
"""

import os
import threading
import time
from pathlib import Path
from typing import Literal

from cray_agents.errors import BadInput, NotFound, SchedulerError
from cray_agents.paths import Home
from cray_agents.ports import Command, CommandStatus, Scheduler
from cray_agents.runtime.controller_lease import Guard, unguarded
from cray_agents.runtime.scheduler.excluded_nodes import exclude_node
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.trainers.job.failures.failure import FailureSettings, FailureVerdict, judge
from cray_agents.trainers.job.failures.rank_monitor import forget_end, read_end
from cray_agents.trainers.job.job_command import build_command, check_submitted, nodes_left_out
from cray_agents.trainers.job.job_state import (
    Handover,
    JobFacts,
    Move,
    describe,
    died_at_start,
    free_idle_sessions,
    handed_to,
    left,
    newest_measures,
    note_handover,
    progress_of,
    read_handover,
    session_of,
    session_view,
    should_retry,
    slurm_cancelled,
    waits_for_commands,
)
from cray_agents.trainers.job.journal import (
    GIVEN_UP,
    CommandJournal,
    JobJournal,
    size_of_log,
    tail_from,
)
from cray_agents.trainers.job.session_journal import SessionJournal, SessionSpec
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.trainers.planning.job_layout import (
    check_layout_fits,
    choose_default_layout,
    decide_hyperparameters,
    usual_dtype,
    usual_microbatch,
)
from cray_agents.trainers.planning.layouts import describe_layout
from cray_agents.training_commands import CommandResult, TrainingCommand
from cray_agents.training_jobs import Dtype, JobSpec, JobState, JobStatus

MAX_RESTARTS = 3  # in a row without a step forward
MAX_MOVES = 10  # likewise, of starts that ended for what the job did not do: nodes, preemption
SMALLEST_MICROBATCH = 256  # tokens


class MegatronTrainer:
    """A ports.Trainer: each job is one command, named after the job, on a scheduler.

    `parked_gib`: see SessionSpec; None: a quarter of this host's memory if it runs all jobs, else
    none. `failures`: numbers of the rules that failure.py states.
    `turns`: jobs use GPUs by turns with replicas. `weight_transfer`: how sessions offer what they
    publish to replicas of this host and others, beside files. `engine_dtype`: see JobSpec. `guard`:
    called before a job is started or started again; a controller's `check`.
    """

    def __init__(
        self,
        home: Home,
        scheduler: Scheduler,
        resources: Resources | None = None,
        session_idle_seconds: float = 600.0,
        *,
        turns: bool = False,
        parked_gib: float | None = None,
        weight_transfer: str = "files",
        engine_dtype: Literal["bfloat16", "fp8"] | None = None,
        failures: FailureSettings | None = None,
        guard: Guard = unguarded,
    ) -> None:
        self.failures = failures or FailureSettings()
        self.turns, self.weight_transfer = turns, weight_transfer
        self._engine_dtype = engine_dtype
        self._guard = guard
        self.home, self.scheduler = home, scheduler
        self.resources = resources or Resources()
        self.session_idle_seconds = session_idle_seconds
        host = self.resources.host
        usual = 0.0 if host is None else host.gib / 4
        self.parked_gib = usual if parked_gib is None else parked_gib
        self._starting = threading.Lock()  # taken by everything that may start a job
        self._seen: dict[str, CommandStatus] = {}  # of jobs with commands of their own, if live
        self._left_out: list[str] = []  # nodes, at the last call of `unchanged`

    def dtype(self, parent: Path) -> Dtype:
        """Return the dtype of a parent's jobs whose spec gives none: see `usual_dtype`."""
        return usual_dtype(parent, self.resources)

    def microbatch(self, parent: Path) -> int:
        """Return the tokens of a micro-batch that suit all weights of a parent."""
        return usual_microbatch(parent, self.resources)

    def submit(self, spec: JobSpec) -> JobStatus:
        """Start the job, or find it; return an ended job's status unchanged.

        Two ended jobs start again: a failed one whose spec changes how it runs (see JobSpec), from
        its newest resume point, and one whose weights were pruned. Raises SchedulerError and
        Corrupt. Raises BadInput or NotFound if its parent can never be trained, if no layout can be
        chosen for it, or if it does not fit the resources.
        """
        spec = decide_hyperparameters(spec, self.home, self.resources)
        engine = spec.engine_dtype or self._engine_dtype
        spec = spec.model_copy(update={"engine_dtype": engine})
        journal = JobJournal(self.home, spec.id)
        with self._starting:
            self._guard()
            if not journal.exists:
                alone = self.resources.host is not None
                name, turns = self.scheduler.name, self.turns
                check_submitted(spec, self.home, name, turns=turns, one_host=alone)
                if spec.commands is not None:
                    CommandJournal(journal.folder).prepare()
                journal.write_spec(self._choose_layout(journal, spec))
                self._hand_over(journal, Handover())
            elif should_retry(journal, spec):
                complete = self._choose_layout(journal, spec)
                self._note_resumed(journal)
                journal.prepare_retry(complete)  # `status` does the rest, even after a kill here
        return self.status(spec.id)

    def _choose_layout(self, journal: JobJournal, spec: JobSpec) -> JobSpec:
        """Return the spec with a layout; a chosen one is explained by an event and in the log.

        Raises BadInput for one that cannot run here.
        """
        complete, reasons = choose_default_layout(spec, self.home, self.resources)
        check_layout_fits(complete, self.home, self.resources, chosen=bool(reasons))
        if isinstance(self.scheduler, Slurm):
            try:
                self.scheduler.script(self.command_of(complete))
            except SchedulerError as error:
                raise BadInput(str(error)) from error
        # a kill between the event and the spec leaves events without a job
        if reasons and (journal.exists or not journal.events()):
            journal.folder.mkdir(parents=True, exist_ok=True)
            choice = {"layout": complete.layout.model_dump(), "recompute": complete.recompute}
            journal.event("layout", **choice, reasons=reasons)
            journal.close()
            with journal.log.open("a") as log:
                print(f"layout {describe_layout(complete.layout)}:", *reasons, sep="\n  ", file=log)
        return complete

    def status(self, job_id: str) -> JobStatus:
        """Return the job's status; restart it if its process died. Raises NotFound."""
        journal = JobJournal(self.home, job_id)
        spec = journal.spec()
        facts, command = self._look(journal, spec)
        if facts.row.starts:
            with self._starting:  # another thread may have restarted it since our look
                facts, command = self._look(journal, spec)
                if facts.row.starts:
                    self._guard()
                    spec = journal.adopt_next_spec()
                    return self._go_on(journal, spec, facts.row.move, command)
        if facts.row.move == "withdraw":
            self._withdraw(journal)
        if facts.ended is not None and not facts.cancelled:
            return facts.ended
        return self._describe(journal, spec, facts.row.state, command.reason)

    def unchanged(self) -> set[str]:
        """Return the jobs whose commands wait or run as they did at the last look.

        A job of a session is none of them: its state is the session's as well. What clients ask
        for, such as a pause, acts at once. Raises SchedulerError.
        """
        seen = self._seen.copy()
        waiting = {job_id for job_id, command in seen.items() if command.state == "queued"}
        if waiting:
            free_idle_sessions(self.home, "")
        if (left_out := nodes_left_out(self.home)) == self._left_out:
            waiting = set()
        self._left_out = left_out
        rest = seen.keys() - waiting
        return {job_id for job_id in rest if self.scheduler.status(job_id) == seen[job_id]}

    def _look(self, journal: JobJournal, spec: JobSpec) -> tuple[JobFacts, CommandStatus]:
        """Return the facts about a job, as far as its row needs them, and its command's status."""
        self._seen.pop(journal.job_id, None)
        command = CommandStatus(state="unknown")
        if journal.cancelled:
            return JobFacts(cancelled=True), command
        if (ended := self._final_status(journal)) is not None:
            return JobFacts(ended=ended), command
        session, last = handed_to(journal), read_handover(journal)
        elsewhere = session is not None and session.current != journal.job_id
        if elsewhere and waits_for_commands(spec, journal):
            return JobFacts(all_done=True), command
        command = self.scheduler.status(session.session_id if session else journal.job_id)
        if command.state == "queued":  # a session that was busy at its submission may be idle now
            free_idle_sessions(self.home, session.session_id if session else "")
            if not journal.paused and last.left_out != nodes_left_out(self.home):
                return JobFacts(command="queued", nodes_changed=True), command
        if session is not None and command.state == "running":
            command = session_view(session, journal, command)
        paused = journal.paused
        if command.state in ("queued", "running"):
            if not (paused and command.state == "queued"):
                journal.note_wait(command.reason if command.state == "queued" else None)
                if session is None:
                    self._seen[journal.job_id] = command
            return JobFacts(command=command.state, paused=paused), command
        not_begun = cannot_begin = False
        if session is not None and session.current != journal.job_id and not left(journal):
            not_begun, cannot_begin = True, died_at_start(session, command)
        facts = JobFacts(
            ended=self._final_status(journal),  # since the look before
            command=command.state,
            paused=paused,
            resumed=last.resumed,
            not_begun=not_begun,
            cannot_begin=cannot_begin,
            due=last.due > 0,
            by_somebody=command.state == "cancelled" and not slurm_cancelled(journal, last),
        )
        return facts, command

    def _go_on(
        self, journal: JobJournal, spec: JobSpec, move: Move, command: CommandStatus
    ) -> JobStatus:
        """Carry out a move that starts the job again, or ends it."""
        last, reason = read_handover(journal), ""
        if move == "resubmit":
            again, reason = self.command_of(spec), command.reason
            self.scheduler.submit(again)
            note_handover(journal, last.model_copy(update={"left_out": again.exclude}))
        elif move == "hand_over":
            self._hand_over(journal, Handover(step=progress_of(spec, journal)))
        elif move == "hand_over_again":
            self._hand_over(journal, last)
        elif move == "start_when_due":
            return self._start_when_due(journal, spec, last)
        elif move == "cancel":
            journal.cancel()
            return self._describe(journal, spec, "cancelled")
        else:
            failed = handed_to(journal) if move == "restart_session" else None
            return self._restart(journal, spec, command, failed)
        return self._describe(journal, spec, "queued", reason)

    def cancel(self, job_id: str) -> JobStatus:
        """End the job for good; one that has ended keeps its status. Raises NotFound."""
        journal = self._journal(job_id)
        if (ended := self._final_status(journal)) is not None:
            return ended
        journal.cancel()
        self._withdraw(journal)
        return self.status(job_id)

    def _journal(self, job_id: str) -> JobJournal:
        """Return the journal of a job that there is. Raises NotFound."""
        journal = JobJournal(self.home, job_id)
        journal.spec()
        return journal

    def _withdraw(self, journal: JobJournal) -> None:
        """End a job's command, or take it from its session, whose ranks see its end themselves."""
        if (session := handed_to(journal)) is None:
            self.scheduler.cancel(journal.job_id)
        else:
            session.withdraw(journal.job_id)

    def pause(self, job_id: str) -> JobStatus:
        """Let the job save and stop after its current step. Raises NotFound, BadInput.

        The ranks see the pause themselves: a signal would leave a big model only the scheduler's
        grace period to save in.
        """
        journal = self._journal(job_id)
        if journal.cancelled or self._final_status(journal) is not None:
            state = self.status(job_id).state
            message = f"{job_id} has ended ({state}): there is nothing left to pause"
            raise BadInput(message, param="job_id", code="job_ended")
        journal.pause()
        return self.status(job_id)

    def resume(self, job_id: str) -> JobStatus:
        """Start a paused job again, from its newest resume point. Raises NotFound, BadInput."""
        journal = self._journal(job_id)
        if not journal.paused or journal.cancelled or self._final_status(journal) is not None:
            message = f"{job_id} is {self.status(job_id).state}, not paused"
            raise BadInput(message, param="job_id", code="job_not_paused")
        with self._starting:
            self._note_resumed(journal)
            journal.resume()
        return self.status(job_id)

    # ---- commands of a client
    def command(self, job_id: str, sequence: int, command: TrainingCommand) -> None:
        """Add a command to a job that trains by commands. Raises NotFound, BadInput."""
        if (state := self.status(job_id).state) not in ("queued", "running"):
            again = ": open its session again" if state == "failed" else ""
            raise BadInput(f"{job_id} is {state} and takes no commands{again}", param="job_id")
        self._commands_of(job_id).append(sequence, command)
        self.status(job_id)  # a session that left the job for want of commands resumes it

    def last_command(self, job_id: str) -> int:
        """Return the number of the newest command; 0 without one. Raises NotFound, BadInput."""
        return self._commands_of(job_id).last

    def result(self, job_id: str, sequence: int) -> CommandResult | None:
        """Return a command's result; None if it has none yet. Raises NotFound, BadInput."""
        commands = self._commands_of(job_id)
        if (result := commands.result(sequence)) is None and not commands.exists(sequence):
            raise NotFound(f"{job_id} has no command {sequence}", param="sequence")
        return result

    def _commands_of(self, job_id: str) -> CommandJournal:
        journal = JobJournal(self.home, job_id)
        if journal.spec().commands is None:
            raise BadInput(f"{job_id} trains on a dataset, not by commands", param="job_id")
        return CommandJournal(journal.folder)

    def _note_resumed(self, journal: JobJournal) -> None:
        note_handover(journal, read_handover(journal).model_copy(update={"resumed": True}))

    # ---- restarts
    def _restart(
        self,
        journal: JobJournal,
        spec: JobSpec,
        command: CommandStatus,
        session: SessionJournal | None = None,
    ) -> JobStatus:
        """Start the job again by the rule of its failure, or fail it with the end of its log.

        `session`: the one that could not start, whose log and report count.
        """
        last, step = read_handover(journal), progress_of(spec, journal)
        runner = session or handed_to(journal) or journal  # who left report and log
        if left(journal):
            runner = journal
        verdict = judge(
            command,
            read_end(runner.folder),
            tail_from(runner.log, last.log_bytes),
            started=journal.attempts > last.attempts,
            on_cpu=self.resources.gpus is None,
        )
        restarts = 1 if step > last.step else last.restarts + 1
        unlucky = verdict.rule == "elsewhere" or verdict.kind == "preempted"
        tokens = None
        if verdict.rule == "smaller":
            tokens = (journal.microbatch or spec.hyperparameters.max_tokens_per_microbatch) // 2
        given_up = (
            verdict.rule == "give_up"
            or restarts > (MAX_MOVES if unlucky else MAX_RESTARTS)
            or (tokens is not None and tokens < SMALLEST_MICROBATCH)
        )
        done = GIVEN_UP if given_up else self._apply(journal, verdict, tokens, restarts)
        how = f"exit code {command.exit_code}" if command.exit_code is not None else command.state
        place = f"step {step}" if spec.commands is None else f"command {step + 1}"
        self._note_verdict(journal, verdict, done, place)
        if not given_up:
            pause = self.failures.pause(verdict, restarts)
            due = time.time() + pause if pause else 0.0
            handover = Handover(step=step, restarts=restarts, due=due, why=str(verdict))
            if not due:
                self._hand_over(journal, handover)
                return self._describe(journal, spec, "queued")
            note_handover(journal, handover.model_copy(update={"session": last.session}))
            return self._start_when_due(journal, spec, handover)
        log = journal.log if session is None else session.log
        vainly = f" and {restarts - 1} restarts brought it no further" if restarts > 1 else ""
        error = (
            f"died at {place} ({how} {command.reason}){vainly}: {verdict}. What can be done:"
            f" {verdict.remedy}. The end of {log}:\n{journal.log_tail(log=log)}"
        )
        failed = self._describe(journal, spec, "failed").model_copy(update={"error": error})
        journal.write_status(failed)
        return failed

    def _apply(
        self, journal: JobJournal, verdict: FailureVerdict, tokens: int | None, restarts: int
    ) -> str:
        """Prepare the next start as a verdict's rule says; return in words what was done."""
        if verdict.rule == "elsewhere" and self.resources.host is not None:
            return "started again here, as there is no other node"
        if verdict.rule == "elsewhere" and verdict.node:
            minutes = self.failures.exclude_minutes
            folder, why = self.home.excluded_nodes, str(verdict)
            if exclude_node(folder, verdict.node, minutes, why, journal.job_id):
                return f"started again; {verdict.node} is left out for {minutes:g} minutes"
        if tokens is not None:
            journal.note_microbatch(tokens)
            return f"started again with {tokens} tokens a micro-batch"
        if pause := self.failures.pause(verdict, restarts):
            return f"started again after {pause:g} s"
        return "started again"

    def _note_verdict(
        self, journal: JobJournal, verdict: FailureVerdict, done: str, place: str
    ) -> None:
        """Record a verdict, and what was done, among the job's events and in its log."""
        journal.event(
            "verdict",
            attempt=journal.attempts,
            cause=verdict.kind,
            node=verdict.node,
            message=str(verdict),
            done=done,
        )
        journal.close()
        with journal.log.open("a") as log:
            print(f"attempt {journal.attempts} ended at {place}: {verdict}; {done}", file=log)

    def _start_when_due(self, journal: JobJournal, spec: JobSpec, last: Handover) -> JobStatus:
        """Start a job again whose pause after a failure is over; else say when that is."""
        seconds = last.due - time.time()
        if seconds > 0 and not journal.paused:
            reason = f"starts again in {seconds:.0f} s: {last.why}"
            journal.note_wait(f"starts again after a pause: {last.why}")
            return self._describe(journal, spec, "queued", reason)
        self._hand_over(journal, Handover(step=last.step, restarts=last.restarts))
        return self._describe(journal, spec, "queued")

    def _hand_over(self, journal: JobJournal, handover: Handover) -> None:
        """Start the job's command, or put it into its session's queue and see that this runs."""
        spec = journal.spec()
        noted = {"attempts": journal.attempts, "due": 0.0, "left_out": nodes_left_out(self.home)}
        handover = handover.model_copy(update=noted)
        if spec.session is None:
            forget_end(journal.folder)
            handover = handover.model_copy(update={"log_bytes": size_of_log(journal.log)})
            note_handover(journal, handover)
        else:
            session_spec = self._session_spec(spec)
            session = SessionJournal(self.home, session_spec.id)
            session.write_spec(session_spec)
            session.stay()
            forget_end(journal.folder)
            if read_end(session.folder) is not None:  # to ask the scheduler takes long
                live = self.scheduler.status(session.session_id).state in ("queued", "running")
                if not live:
                    forget_end(session.folder)
            log_bytes = size_of_log(session.log)
            handover = handover.model_copy(
                update={"session": session_spec.id, "log_bytes": log_bytes}
            )
            note_handover(journal, handover)
            session.hand_over(journal.job_id)
        command = self.command_of(spec)
        scheduler_id = self.scheduler.submit(command)
        note_handover(journal, handover.model_copy(update={"id": scheduler_id}))
        if self.scheduler.status(command.name).state == "queued":
            free_idle_sessions(self.home, handover.session)

    def command_of(self, spec: JobSpec) -> Command:
        """Return the scheduler's command of a submitted job, or of the session that it names."""
        journal = JobJournal(self.home, spec.id)
        if spec.session is None:
            name, log, argument = journal.job_id, journal.log, journal.folder / "spec.json"
            return self._command(name, log, "job.job", argument, spec)
        session = SessionJournal(self.home, self._session_spec(spec).id)
        name, module = session.session_id, "session.session_process"
        return self._command(name, session.log, module, session.folder, spec)

    def _session_spec(self, spec: JobSpec) -> SessionSpec:
        """Return the training session that a job names."""
        assert spec.session is not None
        return SessionSpec(
            name=spec.session,
            layout=spec.layout,
            idle_seconds=self.session_idle_seconds,
            turns=self.turns,
            parked_gib=self.parked_gib,
            weight_transfer=self.weight_transfer,
            platform_host=os.uname().nodename,
        )

    def _command(self, name: str, log: Path, module: str, argument: Path, spec: JobSpec) -> Command:
        hang_seconds, given = self.failures.hang_seconds, self.resources
        return build_command(self.home, spec, given, hang_seconds, name, log, module, argument)

    # ---- statuses
    def _final_status(self, journal: JobJournal) -> JobStatus | None:
        status = journal.status()
        if status is None:
            return None
        # a kill between the scheduler's answer and our note of it leaves no id
        last = read_handover(journal)
        scheduler_id = last.id or self.scheduler.status(last.session or journal.job_id).id
        added = {"scheduler": self.scheduler.name, "scheduler_job_id": scheduler_id}
        added |= session_of(journal, last)
        return status.model_copy(update={**added, "metrics": newest_measures(journal)})

    def _describe(
        self, journal: JobJournal, spec: JobSpec, state: JobState, reason: str = ""
    ) -> JobStatus:
        added = {"scheduler": self.scheduler.name}
        if state == "queued":
            added["reason"] = reason
        return describe(journal, spec, state).model_copy(update=added)
