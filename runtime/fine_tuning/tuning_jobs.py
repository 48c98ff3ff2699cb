"""Fine-tuning jobs: create, validate, submit, register, cancel, pause and resume them.

The gateway holds one FineTuning (gateway/routes/fine_tuning.py). A task of its event loop follows
each job that has not ended. After a restart `start` begins these tasks, as does every request that
shows a job. Methods without `async` block and are called in threads. Read next: job_records.py,
job_inputs.py, job_events.py.
"""

import asyncio
import csv
import io
import logging
import os
import sys
import threading
import time
from asyncio.subprocess import DEVNULL, PIPE
from dataclasses import dataclass
from functools import partial
from typing import Any

from cray_agents.errors import BadInput, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.ports import Trainer
from cray_agents.processes import python
from cray_agents.records import digest
from cray_agents.runtime.background import BackgroundTasks
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.fine_tuning import job_inputs
from cray_agents.runtime.fine_tuning.job_events import metrics
from cray_agents.runtime.fine_tuning.job_inputs import validate
from cray_agents.runtime.fine_tuning.job_records import (
    Ended,
    TuningFolder,
    TuningRequest,
    Validated,
)
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.registry import Registry
from cray_agents.training_jobs import JobSpec, JobStatus, PublishEvery

SMALL_BYTES = 1 << 16  # of files that a thread may validate, where torch is imported already
POLL_INTERVAL = 1.0  # between looks at a job that trains
COLUMNS = {  # of the result file, with their names in a step event
    "step": "step",
    "train_loss": "loss",
    "valid_loss": "valid_loss",
    "full_valid_loss": "valid_loss",
    "learning_rate": "lr",
    "grad_norm": "grad_norm",
    "tokens": "tokens",
    "seconds": "seconds",
}

log = logging.getLogger(__name__)


@dataclass(frozen=True)
class JobState:
    """The state of a fine-tuning job. `job` is the training job's status, once submitted."""

    request: TuningRequest
    validated: Validated | None
    ended: Ended | None
    job: JobStatus | None

    @property
    def paused(self) -> bool:
        """True while the job is paused."""
        return self.ended is None and self.job is not None and self.job.state == "paused"

    @property
    def status(self) -> str:
        """OpenAI's status. A paused job is `queued`, as OpenAI has no word for it.

        A job that is started again, after a lost node or its time limit, stays `running`.
        """
        if self.ended is not None:
            return self.ended.state
        if self.validated is None:
            return "validating_files"
        if self.job is None or self.job.state == "paused":
            return "queued"
        return "queued" if self.job.state == "queued" and not self.job.attempts else "running"


class FineTuning:
    """All fine-tuning jobs of a home. Safe to use from threads; the platform has one."""

    def __init__(
        self,
        home: Home,
        registry: Registry,
        trainer: Trainer,
        files: Files,
        *,
        code: str,
    ) -> None:
        self.home, self.registry, self.trainer, self.files = home, registry, trainer, files
        self.code = code
        self.folder = TuningFolder(home)
        self._job_lock = threading.Lock()  # to submit, cancel, pause or resume
        self._validation_lock = asyncio.Lock()  # one at a time: it takes a core and memory
        self._tasks = BackgroundTasks()
        self._followed: set[str] = set()

    # ---- following jobs
    async def start(self) -> None:
        """Follow every job that has not ended. Called once by the platform."""
        for job_id in await asyncio.to_thread(self.folder.unfinished_ids):
            self.follow(job_id)

    def follow(self, job_id: str) -> None:
        """Bring a job to its end in a task of this event loop, unless one does so already."""
        if job_id not in self._followed:
            self._followed.add(job_id)
            work = partial(self._follow, job_id)
            task = self._tasks.keep("fine-tuning job", work, job_id)
            task.add_done_callback(lambda _: self._followed.discard(job_id))

    async def close(self) -> None:
        """Stop following. The jobs go on, and the next platform follows them."""
        await self._tasks.close()

    async def _follow(self, job_id: str) -> None:
        async with self._validation_lock:
            await self._validate(job_id)
        while not await asyncio.to_thread(self.advance, job_id):  # noqa: ASYNC110 - files tell
            await asyncio.sleep(POLL_INTERVAL)

    async def _validate(self, job_id: str) -> None:
        """Make a JobSpec of the job's files, or end the job."""
        state = await asyncio.to_thread(self.look, job_id)
        if state.validated is not None or state.ended is not None:
            return
        request = state.request
        contents = [request.training_sha256, request.validation_sha256]
        sizes = [self.files.blobs.size(sha256) or 0 for sha256 in contents if sha256 is not None]
        # transformers would import torch, with 340 MB, into a process that has not done so
        if "torch" in sys.modules and sum(sizes) <= SMALL_BYTES:
            await asyncio.to_thread(validate, self.home, job_id, self.code)
            return
        argv = python("-m", job_inputs.__name__, str(self.home.root), job_id)
        argv += [self.code, str(os.getpid())]
        process = await asyncio.create_subprocess_exec(*argv, stdin=DEVNULL, stderr=PIPE)
        try:
            _, stderr = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            tail = stderr.decode(errors="replace")[-2000:]
            raise SetupError(f"validating ended with exit code {process.returncode}:\n{tail}")

    # ---- the steps of a job
    def advance(self, job_id: str) -> bool:
        """Submit the job if it was not yet, and record its end; return True if it has ended."""
        state = self.look(job_id)
        if state.ended is None and state.job is None:
            self._submit(job_id)
        return self.folder.read_ended(job_id) is not None

    def _submit(self, job_id: str) -> None:
        with self._job_lock:
            validated = self.folder.read_validated(job_id)
            if validated is None or self.folder.read_ended(job_id) is not None:
                return
            try:
                self.trainer.submit(validated.spec)  # idempotent
            except (BadInput, NotFound) as error:  # such a model is not trained here
                problem = {"code": "training_failed", "message": str(error), "param": None}
                self.folder.write_ended(job_id, Ended(state="failed", error=problem))

    def look(self, job_id: str) -> JobState:
        """Return a job's state, after recording its end if training has ended. Raises NotFound."""
        request = self.folder.read_request(job_id)
        validated = self.folder.read_validated(job_id)
        ended, status = self.folder.read_ended(job_id), None
        if validated is not None and ended is None:
            status = self._training_status(validated)
            end = None if status is None else self._refuse_other_versions(validated)
            if status is not None and status.state in ("succeeded", "failed", "cancelled"):
                end = end or self._finish(request, validated, status)
            if end is not None:
                self.folder.write_ended(job_id, end)
                ended = self.folder.read_ended(job_id)
        return JobState(request, validated, ended, status)

    def _training_status(self, validated: Validated) -> JobStatus | None:
        """Return the training job's status, or None before it is submitted."""
        try:
            return self.trainer.status(validated.spec.id)
        except NotFound:
            return None

    def _refuse_other_versions(self, validated: Validated) -> Ended | None:
        """Return the end of a job whose training was begun by a job that publishes otherwise."""
        asked = validated.spec
        begun = checksums.read_record(JobSpec, self.home.job(asked.id) / "spec.json")
        if begun.publish_every == asked.publish_every:
            return None
        before, now = (_told(spec.publish_every) for spec in (begun, asked))
        message = (
            f"{asked.id} is this very training, begun for another job with another publish_every:"
            f" {before!r}, not {now!r}. It is not done twice; use that job, or change the seed"
        )
        problem = {"code": "job_exists", "message": message, "param": "publish_every"}
        return Ended(state="failed", error=problem)

    def _finish(self, request: TuningRequest, validated: Validated, status: JobStatus) -> Ended:
        """Return the end of a training job; register a success and publish its metrics."""
        steps = metrics(self.home.job(validated.spec.id))
        outcome: dict[str, Any] = {
            "step": status.step,
            "loss": status.loss_last,
            "valid_loss": steps[-1]["valid_loss"] if steps else None,
            "scheduler": status.scheduler,
            "scheduler_job_id": status.scheduler_job_id,
        }
        if status.state == "cancelled":
            return Ended(state="cancelled", **outcome)
        if status.state == "failed" or status.checkpoint is None:
            message = status.error or "the training job failed without a reason"
            problem = {"code": "training_failed", "message": message, "param": None}
            return Ended(state="failed", error=problem, **outcome)
        manifest = checkpoints.read_manifest(self.home.checkpoint(status.checkpoint))
        made = (request.name, status.checkpoint, manifest, request.prompts)
        version = self.registry.register(*made)
        return Ended(
            state="succeeded",
            model=version.id,
            result_file=self._publish_metrics(request, steps),
            trained_tokens=status.trained_tokens,
            time=max(manifest.created, validated.time),
            **outcome,
        )

    def _publish_metrics(self, request: TuningRequest, steps: list[dict[str, Any]]) -> str:
        """Publish the metrics of all steps as a CSV file; return its id, the same each time."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([step[name] for name in COLUMNS.values()] for step in steps)
        file_id = f"file-{digest(['fine-tune-results', request.id], 24)}"
        with self.files.blobs.draft() as draft:
            draft.write(text.getvalue().encode())
            blob = draft.publish()
        try:
            self.files.publish(
                blob,
                filename=f"{request.id}-step_metrics.csv",
                purpose="fine-tune-results",
                file_id=file_id,
                owner=request.owner,
            )
        except NotFound:  # deleted by the client between two of our attempts
            log.info("%s: its result file %s was deleted", request.id, file_id)
        return file_id

    # ---- requests of clients
    def cancel(self, job_id: str) -> JobState:
        """End a job for good. Raises NotFound; BadInput if it has ended otherwise."""
        with self._job_lock:
            state = self.look(job_id)
            if state.ended is not None and state.ended.state != "cancelled":
                raise _refusal(state, "it has ended", "job_ended")
            if state.validated is not None and state.job is not None:
                self.trainer.cancel(state.validated.spec.id)
            elif state.ended is None:
                self.folder.write_ended(job_id, Ended(state="cancelled", time=time.time()))
        return self.look(job_id)

    def pause(self, job_id: str) -> JobState:
        """Let a job save and stop until `resume`. Raises NotFound, BadInput."""
        self._submit(job_id)
        with self._job_lock:
            state = self.look(job_id)
            if state.ended is not None:
                raise _refusal(state, "there is nothing left to pause", "job_ended")
            if state.validated is None:
                why = "it can be paused when its file is validated, or cancelled now"
                raise _refusal(state, why, "job_not_started")
            self.trainer.pause(state.validated.spec.id)
        return self.look(job_id)

    def resume(self, job_id: str) -> JobState:
        """Continue a paused job. Raises NotFound, BadInput."""
        with self._job_lock:
            state = self.look(job_id)
            if state.ended is not None or state.validated is None or state.job is None:
                raise _refusal(state, "it is not paused", "job_not_paused")
            self.trainer.resume(state.validated.spec.id)
        return self.look(job_id)


def _told(every: PublishEvery | None) -> dict[str, Any] | None:
    """Return how often a job publishes, for a message: prompts by their hashes."""
    if every is None:
        return None
    prompts = {agent: prompt.id for agent, prompt in every.prompts.items()}
    fields = every.model_dump(exclude_none=True, exclude={"prompts"})
    return {**fields, "prompts": prompts} if prompts else fields


def _refusal(state: JobState, why: str, code: str) -> BadInput:
    message = f"{state.request.id} is {state.status}: {why}"
    return BadInput(message, param="fine_tuning_job_id", code=code)
