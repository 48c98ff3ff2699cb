"""Job inputs: everything a job's ranks need, read and checked before they are forked."""

from dataclasses import dataclass, replace
from pathlib import Path

from cray_agents.trainers.data.samples import Samples
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.models.architecture import Architecture
from cray_agents.training_jobs import JobSpec


@dataclass(frozen=True)
class JobInputs:
    """A job's inputs. At most one of the two resume points is set, with `at`."""

    journal: JobJournal
    spec: JobSpec
    attempt: int
    parent: Path
    model: Architecture
    samples: Samples
    parent_places: list[int]  # of the versions with the parent's weights: engine_agreement.py
    validation: Samples | None = None
    reference: Path | None = None  # None: the parent
    resume_from: Path | None = None  # a point of this job: continue exactly
    optimizer_from: Path | None = None  # a point of another job: take its optimizer moments only

    @property
    def megatron(self) -> Path:
        """The folder of this job's resume points."""
        return self.journal.folder / "megatron"

    def at(self, resume_from: Path | None, optimizer_from: Path | None) -> "JobInputs":
        """Return the same inputs with another starting point."""
        return replace(self, resume_from=resume_from, optimizer_from=optimizer_from)
