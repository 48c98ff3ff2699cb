"""Jobs of a session: how far a job is by its commands, and how its training session left it.

Read from the folders of the job and of the session. Called by megatron_trainer.py.
"""

from cray_agents.ports import CommandStatus
from cray_agents.trainers.job.failures.rank_monitor import read_end
from cray_agents.trainers.job.job_status import read_handover
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.launch import EX_TEMPFAIL
from cray_agents.trainers.session.command_journal import CommandJournal
from cray_agents.trainers.session.session_journal import SessionJournal
from cray_agents.training_jobs import JobSpec

SIGNALLED = 128  # and the signal's number: the exit code of a process that a signal ended


def progress_of(spec: JobSpec, journal: JobJournal) -> int:
    """Return the number of a job's newest step, or of its newest command that has a result."""
    return journal.step if spec.commands is None else CommandJournal(journal.folder).done


def waits_for_commands(spec: JobSpec, journal: JobJournal) -> bool:
    """Return True for a job by commands that all have results: no process needs to run it."""
    return spec.commands is not None and CommandJournal(journal.folder).idle


def died_at_start(session: SessionJournal, command: CommandStatus) -> bool:
    """Return True if a session ended by an error of its own before it took up any job."""
    current = session.current
    took_one = current is not None and not JobJournal(session.home, current).ended
    return (
        not took_one
        and command.exit_code in range(1, SIGNALLED)
        and (command.exit_code != EX_TEMPFAIL)
    )


def session_view(
    session: SessionJournal, journal: JobJournal, command: CommandStatus
) -> CommandStatus:
    """Return a running session's command as one of its jobs sees it.

    The job is queued while another one is trained. A job that the session let go of unfinished, for
    a pause that is over since, is handed over again. One that it could not write for has died.
    """
    if session.current == journal.job_id:
        return command
    if left(journal):
        return command.model_copy(update={"state": "failed"})
    if not journal.ended and not journal.paused:
        session.hand_over(journal.job_id)
    waits = journal.job_id in session.queue()
    return command.model_copy(update={"state": "queued" if waits else "unknown"})


def left(journal: JobJournal) -> bool:
    """Return True if the job's session went on without it, for a disk that took no more."""
    return read_handover(journal).session != "" and read_end(journal.folder) is not None
