"""Scripted trainer: publish the parent's files as the next checkpoint, without learning.

Tests of loops use it instead of training. Like the real trainer it is idempotent, names jobs by
their spec, keeps a job's folder and publishes a manifest. Unlike the real one, it reports the
metrics given to it. With `by_hand` it does nothing by itself: a test advances its jobs. Commands
are carried out at once, with the same log-probability for every token. A state that a command keeps
is an empty folder. A publish that meets a full disk has that as its result. No torch.
"""

import shutil
import threading
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cray_agents.errors import FULL, BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.records import Manifest, ProbePrompt
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.job.job_state import read_status
from cray_agents.trainers.job.journal import CommandJournal, JobJournal
from cray_agents.trainers.models.architecture import with_learning_rate
from cray_agents.training_commands import (
    CommandResult,
    Datum,
    End,
    ForwardBackward,
    OptimStep,
    Publish,
    Save,
    Score,
    TrainingCommand,
)
from cray_agents.training_jobs import MICROBATCH, Dtype, JobSpec, JobStatus, with_dtype

LOGPROB = -0.5  # of every trained token


class ScriptedTrainer:
    """A ports.Trainer. `metrics` and `probe` go into each manifest.

    `failures[n]` is the error of the n-th job submitted here, counted from 0. `by_hand`: jobs go no
    further than `advance` takes them, so that they can be paused and cancelled. `dtype` and
    `tokens`, of a micro-batch: of jobs whose spec gives none.
    """

    def __init__(
        self,
        home: Home,
        metrics: Mapping[str, Any] | None = None,
        probe: list[ProbePrompt] | None = None,
        failures: Mapping[int, str] | None = None,
        *,
        by_hand: bool = False,
        dtype: Dtype = "float32",
        tokens: int = MICROBATCH,
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
        self.by_hand = by_hand
        self._dtype: Dtype = dtype
        self.tokens = tokens
        self.submitted: list[JobSpec] = []
        self._one_command = threading.Lock()

    def dtype(self, parent: Path) -> Dtype:
        """Return the dtype of jobs whose spec gives none, of any parent."""
        return self._dtype

    def microbatch(self, parent: Path) -> int:
        """Return the tokens of a micro-batch, of any parent."""
        return self.tokens

    def submit(self, spec: JobSpec) -> JobStatus:
        """Do the job, or find it done. Raises NotFound if the parent is missing."""
        spec = with_learning_rate(with_dtype(spec, self._dtype), self.home.root / spec.parent)
        journal = JobJournal(self.home, spec.id)
        if not journal.exists:
            self._parent(spec)
            self._state(spec)
            self.submitted.append(spec)
            journal.write_spec(spec)
        if not self.by_hand and spec.commands is None:
            self.advance(spec.id)
        return self.status(spec.id)

    def advance(self, job_id: str, step: int | None = None) -> JobStatus:
        """Train a job up to `step`, or to its end, unless it is paused or over. Raises NotFound."""
        journal = JobJournal(self.home, job_id)
        spec = journal.spec()
        if self.status(job_id).state in ("queued", "running"):
            self._train(journal, spec, spec.hyperparameters.steps if step is None else step)
        return self.status(job_id)

    def status(self, job_id: str) -> JobStatus:
        """Return the job's status. Raises NotFound."""
        return read_status(self.home, job_id).model_copy(update={"scheduler": "scripted"})

    def command(self, job_id: str, sequence: int, command: TrainingCommand) -> None:
        """Carry out the next command, unless it was before. Raises NotFound, BadInput."""
        if (state := self.status(job_id).state) not in ("queued", "running"):
            raise BadInput(f"{job_id} is {state}: it takes no commands", param="job_id")
        commands = self._commands_of(job_id)
        commands.append(sequence, command)
        with self._one_command:
            if commands.result(sequence) is None:
                commands.write_result(self._carry_out(job_id, sequence, command))

    def last_command(self, job_id: str) -> int:
        """Return the number of the newest command; 0 without one. Raises NotFound, BadInput."""
        return self._commands_of(job_id).last

    def result(self, job_id: str, sequence: int) -> CommandResult | None:
        """Return a command's result. Raises NotFound, BadInput."""
        if (result := self._commands_of(job_id).result(sequence)) is None:
            raise NotFound(f"{job_id} has no command {sequence}", param="sequence")
        return result

    def _commands_of(self, job_id: str) -> CommandJournal:
        journal = JobJournal(self.home, job_id)
        if journal.spec().commands is None:
            raise BadInput(f"{job_id} trains on a dataset, not by commands", param="job_id")
        return CommandJournal(journal.folder)

    def _carry_out(self, job_id: str, sequence: int, command: TrainingCommand) -> CommandResult:
        spec = JobJournal(self.home, job_id).spec()
        if isinstance(command, Publish | Save) and command.keep_state:
            kept = durable.kept_state(self.home.job(job_id) / "megatron", sequence)
            kept.mkdir(parents=True, exist_ok=True)
        match command:
            case ForwardBackward() | Score():
                marks = [_trained(datum) for datum in command.data]
                rows = [[LOGPROB * mark for mark in row] for row in marks]
                loss = None
                if isinstance(command, ForwardBackward):
                    loss = -LOGPROB * sum(
                        sum((datum.weights or row)[1:])
                        for datum, row in zip(command.data, marks, strict=True)
                    )
                return CommandResult(sequence=sequence, loss=loss, logprobs=rows)
            case OptimStep():
                return CommandResult(sequence=sequence, grad_norm=1.0)
            case Publish():
                name = f"{job_id}-{sequence}"
                try:
                    self._publish(spec, name)
                except OSError as error:
                    if error.errno not in FULL:
                        raise
                    problem = f"the checkpoint was not written: {error.strerror}"
                    return CommandResult(sequence=sequence, error=problem)
                return CommandResult(sequence=sequence, checkpoint=name)
            case End():
                self.advance(job_id)
                return CommandResult(sequence=sequence, checkpoint=job_id)
            case Save():
                return CommandResult(sequence=sequence)

    def unchanged(self) -> set[str]:
        """Return no job: each is looked at."""
        return set()

    def cancel(self, job_id: str) -> JobStatus:
        """End the job, unless it has ended. Without `by_hand` a job ends within `submit`."""
        if self.status(job_id).state in ("queued", "running", "paused"):
            JobJournal(self.home, job_id).cancel()
        return self.status(job_id)

    def pause(self, job_id: str) -> JobStatus:
        """Make `advance` do nothing. Raises NotFound, BadInput."""
        if (state := self.status(job_id).state) not in ("queued", "running", "paused"):
            message = f"{job_id} has ended ({state}): there is nothing left to pause"
            raise BadInput(message, param="job_id", code="job_ended")
        JobJournal(self.home, job_id).pause()
        return self.status(job_id)

    def resume(self, job_id: str) -> JobStatus:
        """Let `advance` train again. Raises NotFound, BadInput."""
        if (state := self.status(job_id).state) != "paused":
            message = f"{job_id} is {state}, not paused"
            raise BadInput(message, param="job_id", code="job_not_paused")
        JobJournal(self.home, job_id).resume()
        return self.status(job_id)

    def _train(self, journal: JobJournal, spec: JobSpec, until: int) -> None:
        """Write the events of the steps up to `until`, and the end if that is the last step."""
        steps, done = spec.hyperparameters.steps, journal.step
        journal.event("started", attempt=journal.claim_attempt(), from_step=done, left_out=0)
        for step in range(done + 1, until + 1):
            journal.event("step", **self._step(step, steps))
            every = spec.publish_every
            if every is not None and step < steps and step % every.steps == 0:
                name = f"{spec.id}-{step}"
                self._publish(spec, name)
                manifest = checkpoints.read_manifest(self.home.checkpoint(name))
                registry = Registry(self.home)
                version = registry.register(every.name, name, manifest, every.prompts)
                loss = self._step(step, steps)["loss"]
                about = {"version": version.id, "checkpoint": name, "step": step, "loss": loss}
                journal.event("version", **about)
        journal.close()
        if until >= steps:
            error = self._failure(spec)
            if error is None:
                self._publish(spec, spec.id)
            journal.write_status(self._end(journal, spec, error))

    def _step(self, step: int, steps: int) -> dict[str, Any]:
        """Return a step's event, with a loss that falls in a straight line."""
        first, last = self.metrics["loss_first"], self.metrics["loss_last"]
        fraction = (step - 1) / max(1, steps - 1)
        tokens, seconds = self.metrics["trained_tokens"] // steps, self.metrics["seconds"] / steps
        return {
            "step": step,
            "loss": first + (last - first) * fraction,
            "lr": 1e-3,
            "grad_norm": 1.0,
            "tokens": tokens,
            "tokens_per_second": tokens / seconds if seconds else 0.0,
            "seconds": seconds,
        }

    def _failure(self, spec: JobSpec) -> str | None:
        """Return the job's scripted error; None for a job submitted to another trainer."""
        ids = [submitted.id for submitted in self.submitted]
        return self.failures.get(ids.index(spec.id)) if spec.id in ids else None

    def _end(self, journal: JobJournal, spec: JobSpec, error: str | None) -> JobStatus:
        steps, attempts = spec.hyperparameters.steps, journal.attempts
        if error is not None:
            return JobStatus(
                id=spec.id,
                state="failed",
                step=journal.step,
                steps=steps,
                attempts=attempts,
                error=error,
            )
        return JobStatus(
            id=spec.id,
            state="succeeded",
            scheduler="scripted",
            step=steps,
            steps=steps,
            attempts=attempts,
            loss_first=self.metrics["loss_first"],
            loss_last=self.metrics["loss_last"],
            trained_tokens=self.metrics["trained_tokens"],
            seconds=self.metrics["seconds"],
            checkpoint=spec.id,
        )

    def _parent(self, spec: JobSpec) -> Path:
        parent = self.home.root / spec.parent
        if not parent.is_dir():
            raise NotFound(f"no checkpoint directory {parent}", param="parent")
        return parent

    def _state(self, spec: JobSpec) -> None:
        """Look for the state that a run begins with. Raises NotFound."""
        if spec.state_from is None:
            return
        job, _, number = spec.state_from.partition("/")
        if not durable.kept_state(self.home.job(job) / "megatron", int(number)).is_dir():
            raise NotFound(f"no state {spec.state_from}", param="state_from")

    def _publish(self, spec: JobSpec, name: str) -> None:
        parent = self._parent(spec)
        draft = self.home.checkpoint(f".{name}.scripted")
        shutil.rmtree(draft, ignore_errors=True)
        draft.mkdir(parents=True)
        for path in parent.iterdir():
            if path.suffix in checkpoints.SUFFIXES and path.name != checkpoints.MANIFEST:
                shutil.copyfile(path, draft / path.name)
        files = checkpoints.hash_files(draft)
        manifest = Manifest(
            files=files,
            weights_sha256=checkpoints.weights_sha256(files),
            parent_sha256=spec.parent_sha256,
            job=spec.id,
            dataset=spec.dataset or None,
            metrics={**self.metrics, "steps": spec.hyperparameters.steps},
            probe=self._probe_of(spec),
        )
        text = checksums.with_crc(manifest.model_dump_json(indent=1).encode())
        durable.replace_file(draft / "manifest.json", text)
        if not checkpoints.publish_folder(draft, self.home.checkpoint(name)):
            shutil.rmtree(draft)

    def _probe_of(self, spec: JobSpec) -> list[ProbePrompt]:
        """Return the given probe, or the parent's: the weights are the same."""
        if self.probe is not None:
            return self.probe
        path = self.home.root / spec.parent / "manifest.json"
        return checksums.read_record(Manifest, path).probe if path.exists() else []


def _trained(datum: Datum) -> list[float]:
    """Return 1 for every token that is trained on, else 0."""
    weights = datum.weights or [1.0] * len(datum.token_ids)
    return [0.0, *(float(weight != 0) for weight in weights[1:])]
