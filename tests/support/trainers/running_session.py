"""A training session's process, forked from the test, for tests of sessions and their commands."""

import os
import sys
import time
from collections.abc import Callable
from pathlib import Path

from cray_agents.paths import Home
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.session_journal import SessionJournal, SessionSpec
from cray_agents.training_jobs import JobSpec, Layout


class RunningSession:
    """A session's process, forked from this one: Megatron is loaded already."""

    def __init__(
        self,
        home: Home,
        layout: Layout,
        idle_seconds: float = 600.0,
        *,
        turns: bool = False,
        parked_gib: float = 0.0,
        weight_transfer: str = "files",
        within: Callable[[], None] | None = None,
        inside: Home | None = None,
    ) -> None:
        """`within` is called in the process, which has `home` at `inside` afterwards."""
        from cray_agents.trainers.models.megatron_fixes import load_megatron
        from cray_agents.trainers.session import resident, session_process  # noqa: F401

        load_megatron()
        spec = SessionSpec(
            name="loop",
            layout=layout,
            idle_seconds=idle_seconds,
            turns=turns,
            parked_gib=parked_gib,
            weight_transfer=weight_transfer,
            platform_host=os.uname().nodename,
        )
        self.journal = SessionJournal(home, spec.id)
        self.journal.write_spec(spec)
        self.pid = os.fork()
        if self.pid == 0:
            code = 99
            try:
                if within is not None and inside is not None:
                    within()
                    self.journal = SessionJournal(inside, spec.id)
                log = os.open(self.journal.log, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                sys.stdout = sys.stderr = os.fdopen(log, "w", buffering=1)
                code = session_process.main([str(self.journal.folder)])
            finally:
                os._exit(code)

    def train(self, spec: JobSpec) -> JobJournal:
        """Hand a job over, and wait for its end."""
        job = self.start(spec)
        self.until(lambda: job.ended and self.journal.current != spec.id)
        return job

    def start(self, spec: JobSpec) -> JobJournal:
        job = JobJournal(self.journal.home, spec.id)
        job.write_spec(spec)
        self.journal.hand_over(spec.id)
        return job

    def until(self, condition: Callable[[], object]) -> None:
        """Wait for something that is true while the session goes on."""
        while not condition():
            self.check()
            time.sleep(0.002)

    def check(self) -> None:
        """Fail if the session has ended."""
        ended, _ = os.waitpid(self.pid, os.WNOHANG)
        current = JobJournal(self.journal.home, self.journal.current or "none")
        assert not ended, f"{self.log}\n{current.log_tail()}\n{current.status()}"

    def end(self) -> int:
        self.journal.ask_to_end()
        return self.wait()

    def wait(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def log(self) -> str:
        logs = sorted((self.journal.folder / "logs").glob("*"))
        return "\n".join([self.journal.log.read_text(), *(p.read_text() for p in logs)])


def children_of(pid: int) -> list[int]:
    """Return a process's children: of a session's process, its ranks in order."""
    return [int(p) for p in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
