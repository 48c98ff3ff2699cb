"""A scripted trainer whose jobs last a set time by the clock, across restarts of the platform."""

import threading
import time
from pathlib import Path

from cray_agents.paths import Home
from cray_agents.training_commands import CommandResult, TrainingCommand
from cray_agents.training_jobs import JobSpec, JobStatus
from tests.support.scripted_platform import PROBE
from tests.support.scripted_trainer import ScriptedTrainer


class TimedTrainer:
    """A ports.Trainer. Each job takes `seconds` from when it was submitted."""

    def __init__(self, home: Home, seconds: float) -> None:
        metrics = {"seconds": seconds, "trained_tokens": 100}
        self.scripted = ScriptedTrainer(home, metrics, PROBE, by_hand=True)
        self.seconds = seconds
        self.dtype = self.scripted.dtype
        self.microbatch = self.scripted.microbatch
        self._one_at_a_time = threading.Lock()

    def submit(self, spec: JobSpec) -> JobStatus:
        return self._moved_on(self.scripted.submit(spec))

    def status(self, job_id: str) -> JobStatus:
        return self._moved_on(self.scripted.status(job_id))

    def unchanged(self) -> set[str]:
        return set()  # all jobs move on by the clock

    def cancel(self, job_id: str) -> JobStatus:
        return self.scripted.cancel(job_id)

    def pause(self, job_id: str) -> JobStatus:
        return self.scripted.pause(job_id)

    def resume(self, job_id: str) -> JobStatus:
        return self.scripted.resume(job_id)

    def command(self, job_id: str, sequence: int, command: TrainingCommand) -> None:
        self.scripted.command(job_id, sequence, command)

    def last_command(self, job_id: str) -> int:
        return self.scripted.last_command(job_id)

    def result(self, job_id: str, sequence: int) -> CommandResult | None:
        return self.scripted.result(job_id, sequence)

    def _moved_on(self, job: JobStatus) -> JobStatus:
        if job.state not in ("queued", "running"):
            return job
        spec: Path = self.scripted.home.job(job.id) / "spec.json"
        if time.time() - spec.stat().st_mtime < self.seconds:
            return job
        with self._one_at_a_time:
            return self.scripted.advance(job.id)
