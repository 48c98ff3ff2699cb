"""A trainer that learns nothing: it publishes the parent's files as the next checkpoint, at once.

Loops are tested with it where training only gets in the way. Like the real one it is named by its
spec, idempotent, and publishes a manifest; unlike it, it takes its metrics as given. No torch.
"""

import shutil
from collections.abc import Mapping
from typing import Any

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.records import JobSpec, JobStatus, Manifest, ProbePrompt
from cray_agents.runtime import checkpoints, durable
from cray_agents.trainers.journal import Journal
from cray_agents.trainers.publish import hash_files, publish_folder


class ScriptedTrainer:
    """A ports.Trainer. `metrics` and `probe` go into each manifest; `failures` are by job number.

    `failures[n]` is the error of the n-th job submitted here, counted from 0.
    """

    def __init__(
        self,
        home: Home,
        metrics: Mapping[str, Any] | None = None,
        probe: list[ProbePrompt] | None = None,
        failures: Mapping[int, str] | None = None,
    ) -> None:
        self.home = home
        self.metrics = {
            "loss_first": 2.0,
            "loss_last": 1.0,
            "trained_tokens": 0,
            "seconds": 0.0,
            **(metrics or {}),
        }
        self.probe = probe
        self.failures = dict(failures or {})
        self.submitted: list[JobSpec] = []

    def submit(self, spec: JobSpec) -> JobStatus:
        """Do the job, or find it done. Raises NotFound when there is no such parent."""
        journal = Journal(self.home, spec.id)
        if not journal.exists:
            number = len(self.submitted)
            self.submitted.append(spec)
            if number not in self.failures:
                self._publish(spec)
            journal.write_spec(spec)
            journal.write_status(self._end(spec, self.failures.get(number)))
        return self.status(spec.id)

    def status(self, job_id: str) -> JobStatus:
        """How it ended. Raises NotFound."""
        journal = Journal(self.home, job_id)
        journal.spec()
        status = journal.status()
        if status is None:
            raise BadInput(f"{job_id} is not a scripted job: it has no status.json")
        return status

    def cancel(self, job_id: str) -> JobStatus:
        """Too late, always: a scripted job has ended when `submit` returns."""
        return self.status(job_id)

    def _end(self, spec: JobSpec, error: str | None) -> JobStatus:
        steps = spec.hyperparameters.steps
        if error is not None:
            return JobStatus(id=spec.id, state="failed", steps=steps, attempts=1, error=error)
        return JobStatus(
            id=spec.id,
            state="succeeded",
            scheduler="scripted",
            step=steps,
            steps=steps,
            attempts=1,
            loss_first=self.metrics["loss_first"],
            loss_last=self.metrics["loss_last"],
            trained_tokens=self.metrics["trained_tokens"],
            seconds=self.metrics["seconds"],
            checkpoint=spec.id,
        )

    def _publish(self, spec: JobSpec) -> None:
        parent = self.home.root / spec.parent
        if not parent.is_dir():
            raise NotFound(f"no checkpoint directory {parent}", param="parent")
        draft = self.home.checkpoint(f".{spec.id}.scripted")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for path in parent.iterdir():
            if path.suffix in checkpoints.SUFFIXES and path.name != checkpoints.MANIFEST:
                shutil.copyfile(path, draft / path.name)
        files = hash_files(draft)
        manifest = Manifest(
            files=files,
            weights_sha256=checkpoints.weights_sha256(files),
            parent_sha256=spec.parent_sha256,
            job=spec.id,
            dataset=spec.dataset,
            metrics={**self.metrics, "steps": spec.hyperparameters.steps},
            probe=self._probe_of(spec),
        )
        durable.replace_file(draft / "manifest.json", manifest.model_dump_json(indent=1).encode())
        if not publish_folder(draft, self.home.checkpoint(spec.id)):
            shutil.rmtree(draft)

    def _probe_of(self, spec: JobSpec) -> list[ProbePrompt]:
        """The given probe, or the parent's: the weights are the same."""
        if self.probe is not None:
            return self.probe
        path = self.home.root / spec.parent / "manifest.json"
        return Manifest.model_validate_json(path.read_bytes()).probe if path.exists() else []
