"""Session journal: a training session's folder on the shared root.

    spec.json       the SessionSpec, and the number of the folder's `format`; 1 without one
    attempts/<n>    created exclusively by the n-th start: the fence. Only the newest takes jobs
    queue/<job>     a job handed to the session, until it has ended; the oldest is taken first
    current         the job that the newest attempt works on, or none
    end             asks an idle session to end; a session that takes a job removes it
    turn            on GPUs that replicas use too: the session may use them, until it removes this
    offloaded       the seconds in which it left the GPUs, written before `turn` is removed
    offers/         where its latest weights can be fetched: see runtime/registry/weight_offers.py
    log.txt, logs/  the output of the launcher and of the ranks

The trainer that submits and the session's processes share this module. Nothing here decides a
job's result or its end: that is in the job's own journal, so a session may die at any moment. Read
next: resident.py.
"""

import time
from contextlib import suppress
from pathlib import Path

from pydantic import Field

from cray_agents.errors import Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Record, canonical, digest
from cray_agents.runtime.disk import checksums, durable
from cray_agents.trainers.job.journal import claim_attempt, count_attempts, numbered
from cray_agents.training_jobs import Layout

SESSION_FORMAT = 1  # of a session's folder


class SessionSpec(Record):
    """A session's name and ranks. It ends after `idle_seconds` without a job.

    `turns`: it waits for its turn on the GPUs before each job, and leaves them after it.
    `parked_gib`: the host memory of all its ranks together for the trainings that it left.
    `weight_transfer`: how its ranks send published weights to replicas; "files": they do not.
    `platform_host`: the host from which these are asked for.
    """

    name: str
    layout: Layout = Field(default_factory=Layout)
    idle_seconds: float = Field(600.0, gt=0)
    turns: bool = False
    parked_gib: float = Field(0.0, ge=0)
    weight_transfer: str = "files"
    platform_host: str = ""

    @property
    def id(self) -> str:
        """The text `session-` and a hash of name and layout."""
        return f"session-{digest({'name': self.name, 'layout': self.layout.model_dump()})}"


class SessionJournal:
    """The folder of one session. Cheap to make, and without state of its own."""

    def __init__(self, home: Home, session_id: str) -> None:
        self.home, self.session_id = home, session_id
        self.folder = home.sessions / session_id
        self.log = self.folder / "log.txt"

    def spec(self) -> SessionSpec:
        """Return the session's spec. Raises NotFound, Corrupt, NewerFormat."""
        try:
            return checksums.read_record(SessionSpec, self.folder / "spec.json", SESSION_FORMAT)
        except FileNotFoundError:
            message = f"no training session {self.session_id!r} in {self.home.sessions}"
            raise NotFound(message, param="session") from None

    def write_spec(self, spec: SessionSpec) -> None:
        """Record the spec; a later one of the same session changes when it is idle for too long."""
        path = self.folder / "spec.json"
        if not path.exists() or self.spec() != spec:
            durable.replace_file(path, numbered(spec, SESSION_FORMAT))

    # ---- attempts
    @property
    def attempts(self) -> int:
        """The number of starts so far."""
        return count_attempts(self.folder)

    def claim_attempt(self) -> int:
        """Become the newest attempt; older ones see this and take no more jobs."""
        return claim_attempt(self.folder)

    # ---- jobs
    def hand_over(self, job_id: str) -> None:
        """Put a job into the queue, unless it is there."""
        path = self.folder / "queue" / job_id
        if not path.exists():
            durable.create_file(path, checksums.with_crc(canonical({"time": time.time()})))

    def withdraw(self, job_id: str) -> None:
        """Take a job out of the queue. The job's own journal says if and how it ended."""
        (self.folder / "queue" / job_id).unlink(missing_ok=True)

    def queue(self) -> list[str]:
        """Return the jobs that were handed over and have not ended, the oldest first."""
        waiting = []
        for name in _names(self.folder / "queue"):
            try:
                written = (self.folder / "queue" / name).stat().st_mtime_ns
            except FileNotFoundError:  # withdrawn meanwhile
                continue
            waiting.append((written, name))
        return [name for _, name in sorted(waiting)]

    @property
    def current(self) -> str | None:
        """The job that the session works on; None between two jobs. Raises Corrupt."""
        try:
            return checksums.read_json(self.folder / "current")["job"] or None
        except FileNotFoundError:
            return None

    def note_current(self, job_id: str | None) -> None:
        """Record the job that runs now; not waited for by the disk: a kill makes it stale."""
        if job_id is None:  # needs no room on the disk
            (self.folder / "current").unlink(missing_ok=True)
            return
        draft = self.folder / ".current"
        draft.write_bytes(checksums.with_crc(canonical({"job": job_id})))
        draft.replace(self.folder / "current")

    # ---- turns on the GPUs
    @property
    def has_turn(self) -> bool:
        """True while the session may use the GPUs."""
        return (self.folder / "turn").exists()

    def give_turn(self) -> None:
        """Let the session use the GPUs, for one job."""
        (self.folder / "offloaded").unlink(missing_ok=True)
        (self.folder / "turn").touch()

    def end_turn(self, seconds: dict[str, float] | None = None) -> None:
        """End the turn: all ranks have left the GPUs, in these seconds by phase."""
        if seconds is not None:
            draft = self.folder / ".offloaded"
            with suppress(OSError):  # a full disk costs the seconds alone
                draft.write_bytes(checksums.with_crc(canonical(seconds)))
                draft.replace(self.folder / "offloaded")
        (self.folder / "turn").unlink(missing_ok=True)

    @property
    def turn_seconds(self) -> dict[str, float]:
        """Seconds by phase in which the session came to the GPUs and left them; {} if unknown."""
        try:
            seconds = checksums.read_json(self.folder / "offloaded")
        except (FileNotFoundError, Corrupt):
            return {}
        return {name: float(seconds[name]) for name in ("onload", "offload")}

    # ---- end
    @property
    def asked_to_end(self) -> bool:
        """True if an idle session is to end before its time."""
        return (self.folder / "end").exists()

    def ask_to_end(self) -> None:
        """Let the session end as soon as it has no job."""
        self.folder.mkdir(parents=True, exist_ok=True)
        (self.folder / "end").touch()

    def stay(self) -> None:
        """Take an earlier request to end back."""
        (self.folder / "end").unlink(missing_ok=True)


def sessions(home: Home) -> list[SessionJournal]:
    """Return all sessions of a root."""
    return [SessionJournal(home, name) for name in sorted(_names(home.sessions))]


def _names(folder: Path) -> list[str]:
    """Return the names in a folder, without drafts; none if it does not exist."""
    return [name for name in durable.names_in(folder) if not name.startswith(".")]
