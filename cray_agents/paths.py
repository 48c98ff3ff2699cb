"""Every path under the shared root, named once.

    <home>/
      segments/<writer>.jsonl          the store: one writer a file, append-only
      datasets/<id>/                   immutable: samples.parquet, manifest.json (last)
      jobs/<id>/                       spec.json, events.jsonl, status.json, log.txt,
                                       attempts/<n>, megatron/step-<n>/ (resume points)
      checkpoints/<id>/                immutable: a Hugging Face directory, manifest.json (last)
      models/<name>/<n>.json           versions, append-only
      models/<name>/promotions/<n>.json  which version the bare name meant, append-only
      loops/<name>/                    what a loop was asked, and a record per generation
      slurm/                           the private cluster of a laptop
      platform.json, logs/             of the platform that runs now

Rules for NFS, Lustre, Weka and a laptop alike: one writer per file, publish by rename, the
manifest last, claims by exclusive create.
"""

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True)
class Home:
    """The shared root, `$CRAY_AGENTS_HOME`."""

    root: Path

    @property
    def segments(self) -> Path:
        return self.root / "segments"

    def dataset(self, dataset_id: str) -> Path:
        return self.root / "datasets" / dataset_id

    @property
    def jobs(self) -> Path:
        return self.root / "jobs"

    def job(self, job_id: str) -> Path:
        return self.jobs / job_id

    def checkpoint(self, checkpoint_id: str) -> Path:
        return self.root / "checkpoints" / checkpoint_id

    @property
    def models(self) -> Path:
        return self.root / "models"

    def loop(self, name: str) -> Path:
        return self.root / "loops" / name

    @property
    def slurm(self) -> Path:
        return self.root / "slurm"

    @property
    def platform(self) -> Path:
        return self.root / "platform.json"

    @property
    def logs(self) -> Path:
        return self.root / "logs"
