"""What a job's ranks are given: all inputs, read and checked before the ranks are forked."""

from dataclasses import dataclass, replace
from pathlib import Path

from cray_agents.trainers.data.samples import Samples
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.training_jobs import JobSpec


@dataclass(frozen=True)
class JobInputs:
    """A job's inputs. `at` sets at most one of the two resume points."""

    journal: JobJournal
    spec: JobSpec
    attempt: int
    parent: Path
    model: Architecture
    samples: Samples
    comparable: Samples  # those of them that the parent sampled: agreement.py
    validation: Samples | None = None
    reference: Path | None = None  # None: the parent
    resume_from: Path | None = None  # of this job: go on exactly
    optimizer_from: Path | None = None  # of another: only its moments

    @property
    def megatron(self) -> Path:
        """Where this job's resume points are."""
        return self.journal.folder / "megatron"

    def at(self, resume_from: Path | None, optimizer_from: Path | None) -> "JobInputs":
        """The same work, starting there."""
        return replace(self, resume_from=resume_from, optimizer_from=optimizer_from)
