"""Fine-tuning jobs: asked for, validated, trained, registered; what a client may do to them.

The gateway holds one FineTuning (routes/fine_tuning.py). A task of its event loop follows each job
that has not ended; `start` begins that after a restart, and so does whoever looks at a job. Methods
without `async` block, and are called in threads. Read next: records.py, preparing.py, events.py.
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
from typing import Any

from cray_agents.errors import BadInput, CrayError, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.ports import Trainer
from cray_agents.records import digest
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
from cray_agents.training_jobs import JobStatus

SMALL_BYTES = 1 << 16  # of files that a thread may validate
LOOK_SECONDS = 1.0  # between looks at a job that trains
TROUBLE_SECONDS = 10.0  # ... after one that failed
COLUMNS = {  # of the result file, and what the step's event calls them
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
    """Where a fine-tuning job stands. `job` is the training job's, once it was submitted."""

    asked: TuningRequest
    validated: Validated | None
    ended: Ended | None
    job: JobStatus | None

    @property
    def paused(self) -> bool:
        """Whether it waits for its resume."""
        return self.ended is None and self.job is not None and self.job.state == "paused"

    @property
    def status(self) -> str:
        """OpenAI's word. It has none for a paused job, which is `queued`.

        One that is started again, after a node was lost or its time was over, stays `running`.
        """
        if self.ended is not None:
            return self.ended.state
        if self.validated is None:
            return "validating_files"
        if self.job is None or self.job.state == "paused":
            return "queued"
        return "queued" if self.job.state == "queued" and not self.job.attempts else "running"


class FineTuning:
    """All fine-tuning jobs of a home. Safe to use from threads; one a home (the platform's)."""

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
        self._turn = threading.Lock()  # submitting, cancelling, pausing: one after the other
        self._validating = asyncio.Lock()  # one at a time: it takes a core and memory
        self._tasks: dict[str, asyncio.Task[None]] = {}

    # ---- following
    async def start(self) -> None:
        """Go on with every job that has not ended. Called once by the platform."""
        for job_id in await asyncio.to_thread(self.folder.unfinished):
            self.follow(job_id)

    def follow(self, job_id: str) -> None:
        """See a job through to its end, in a task of this event loop, unless one does already."""
        if job_id not in self._tasks:
            task = asyncio.create_task(self._follow(job_id), name=job_id)
            self._tasks[job_id] = task
            task.add_done_callback(lambda _: self._tasks.pop(job_id, None))

    async def close(self) -> None:
        """Stop following; the jobs go on, and the next platform follows them."""
        tasks = list(self._tasks.values())
        for task in tasks:
            task.cancel()
        await asyncio.gather(*tasks, return_exceptions=True)

    async def _follow(self, job_id: str) -> None:
        valid, pause = False, LOOK_SECONDS
        while True:
            try:
                if not valid:
                    async with self._validating:
                        await self._validate(job_id)
                    valid = True
                if await asyncio.to_thread(self.advance, job_id):
                    return
                pause = LOOK_SECONDS
            except CrayError as error:  # Slurm is away, the disk is full: that passes
                log.warning("%s: %s; tried again in %g s", job_id, error, TROUBLE_SECONDS)
                pause = TROUBLE_SECONDS
            except Exception:  # the outermost edge of a task that nobody awaits
                log.exception("%s: following it failed", job_id)
                pause = TROUBLE_SECONDS
            await asyncio.sleep(pause)

    async def _validate(self, job_id: str) -> None:
        """Turn its files into a JobSpec, or end the job."""
        standing = await asyncio.to_thread(self.look, job_id)
        if standing.validated is not None or standing.ended is not None:
            return
        asked = standing.asked
        contents = [asked.training_sha256, asked.validation_sha256]
        sizes = [self.files.blobs.size(sha256) or 0 for sha256 in contents if sha256 is not None]
        if sum(sizes) <= SMALL_BYTES:
            await asyncio.to_thread(validate, self.home, job_id, self.code)
            return
        argv = [sys.executable, "-m", job_inputs.__name__, str(self.home.root), job_id]
        argv += [self.code, str(os.getpid())]
        process = await asyncio.create_subprocess_exec(*argv, stdin=DEVNULL, stderr=PIPE)
        try:
            _, complaint = await process.communicate()
        finally:
            if process.returncode is None:
                process.kill()
        if process.returncode:
            tail = complaint.decode(errors="replace")[-2000:]
            raise SetupError(f"validating ended with exit code {process.returncode}:\n{tail}")

    # ---- its way
    def advance(self, job_id: str) -> bool:
        """Submit it if that is still to be done, and settle its end; returns whether it ended."""
        standing = self.look(job_id)
        if standing.ended is None and standing.job is None:
            self._submit(job_id)
        return self.folder.ended(job_id) is not None

    def _submit(self, job_id: str) -> None:
        with self._turn:
            validated = self.folder.validated(job_id)
            if validated is None or self.folder.ended(job_id) is not None:
                return
            try:
                self.trainer.submit(validated.spec)  # once, however often it is asked
            except (BadInput, NotFound) as error:  # such a model is not trained here
                problem = {"code": "training_failed", "message": str(error), "param": None}
                self.folder.end(job_id, Ended(state="failed", error=problem))

    def look(self, job_id: str) -> JobState:
        """Where it stands; a training job that has ended is settled first. Raises NotFound."""
        asked, validated = self.folder.asked(job_id), self.folder.validated(job_id)
        ended, status = self.folder.ended(job_id), None
        if validated is not None and ended is None:
            status = self._status(validated)
            if status is not None and status.state in ("succeeded", "failed", "cancelled"):
                self.folder.end(job_id, self._settle(asked, validated, status))
                ended = self.folder.ended(job_id)
        return JobState(asked, validated, ended, status)

    def _status(self, validated: Validated) -> JobStatus | None:
        """The training job's; None before it is submitted."""
        try:
            return self.trainer.status(validated.spec.id)
        except NotFound:
            return None

    def _settle(self, asked: TuningRequest, validated: Validated, status: JobStatus) -> Ended:
        """The end of a training job as ours. A success is registered and its metrics published."""
        steps = metrics(self.home.job(validated.spec.id))
        told: dict[str, Any] = {
            "step": status.step,
            "loss": status.loss_last,
            "valid_loss": steps[-1]["valid_loss"] if steps else None,
            "scheduler": status.scheduler,
            "scheduler_job_id": status.scheduler_job_id,
        }
        if status.state == "cancelled":
            return Ended(state="cancelled", **told)
        if status.state == "failed" or status.checkpoint is None:
            message = status.error or "the training job failed without a reason"
            problem = {"code": "training_failed", "message": message, "param": None}
            return Ended(state="failed", error=problem, **told)
        manifest = checkpoints.read_manifest(self.home.checkpoint(status.checkpoint))
        version = self.registry.register(asked.name, status.checkpoint, manifest)
        return Ended(
            state="succeeded",
            model=version.id,
            result_file=self._publish_metrics(asked, steps),
            trained_tokens=status.trained_tokens,
            time=max(manifest.created, validated.time),
            **told,
        )

    def _publish_metrics(self, asked: TuningRequest, steps: list[dict[str, Any]]) -> str:
        """The metrics of every step as a CSV file; returns its id, the same each time."""
        text = io.StringIO()
        writer = csv.writer(text, lineterminator="\n")
        writer.writerow(COLUMNS)
        writer.writerows([step[name] for name in COLUMNS.values()] for step in steps)
        file_id = f"file-{digest(['fine-tune-results', asked.id], 24)}"
        with self.files.blobs.draft() as draft:
            draft.write(text.getvalue().encode())
            blob = draft.publish()
        try:
            self.files.publish(
                blob,
                filename=f"{asked.id}-step_metrics.csv",
                purpose="fine-tune-results",
                file_id=file_id,
                owner=asked.owner,
            )
        except NotFound:  # deleted by the client between two tries of ours
            log.info("%s: its result file %s was deleted", asked.id, file_id)
        return file_id

    # ---- what a client may do
    def create(self, asked: TuningRequest) -> TuningRequest:
        """Write a job down, or find it; `follow` does the rest. Raises BadInput."""
        return self.folder.ask(asked)

    def cancel(self, job_id: str) -> JobState:
        """End it for good, wherever it stands. Raises NotFound; BadInput if it ended otherwise."""
        with self._turn:
            standing = self.look(job_id)
            if standing.ended is not None and standing.ended.state != "cancelled":
                raise _refused(standing, "it has ended", "job_ended")
            if standing.validated is not None and standing.job is not None:
                self.trainer.cancel(standing.validated.spec.id)
            elif standing.ended is None:
                self.folder.end(job_id, Ended(state="cancelled", time=time.time()))
        return self.look(job_id)

    def pause(self, job_id: str) -> JobState:
        """Let it save and stop until `resume`. Raises NotFound, BadInput."""
        self._submit(job_id)
        with self._turn:
            standing = self.look(job_id)
            if standing.ended is not None:
                raise _refused(standing, "there is nothing left to pause", "job_ended")
            if standing.validated is None:
                why = "it can be paused when its file is validated, or cancelled now"
                raise _refused(standing, why, "job_not_started")
            self.trainer.pause(standing.validated.spec.id)
        return self.look(job_id)

    def resume(self, job_id: str) -> JobState:
        """Go on from where it was paused. Raises NotFound, BadInput."""
        with self._turn:
            standing = self.look(job_id)
            if standing.ended is not None or standing.validated is None or standing.job is None:
                raise _refused(standing, "it is not paused", "job_not_paused")
            self.trainer.resume(standing.validated.spec.id)
        return self.look(job_id)


def _refused(standing: JobState, why: str, code: str) -> BadInput:
    message = f"{standing.asked.id} is {standing.status}: {why}"
    return BadInput(message, param="fine_tuning_job_id", code=code)
