"""Records of a fine-tuning job and the folder of their files. Times are unix seconds."""

import time
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.records import Record, canonical, digest
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.fine_tuning.examples import Kind
from cray_agents.training_jobs import MICROBATCH, Dtype, JobSpec

Auto = Literal["auto"]
RecordType = TypeVar("RecordType", bound=Record)

PREFIX = "ftjob-"
#: Metadata keys that the platform adds.
ADDED = {"job", "paused", "scheduler", "scheduler_job_id", "slurm_job_id"}


class TuningRequest(Record):
    """A requested fine-tuning job. Its result is registered under `name`.

    `model` is the version `name@N` that the client's model meant at that time, and `parent` its
    checkpoint. The parent's hashes and `dtype` are those of the JobSpec. `microbatch` counts the
    tokens of its micro-batches, unless a sample has more.
    """

    model: str
    name: str
    parent: str
    parent_sha256: str
    parent_settings_sha256: str | None = None
    training_file: str
    training_sha256: str
    validation_file: str | None = None
    validation_sha256: str | None = None
    method: Kind = "supervised"
    n_epochs: int | Auto = "auto"
    batch_size: int | Auto = "auto"
    learning_rate_multiplier: float | Auto = "auto"
    beta: float | Auto = "auto"
    seed: int = 0
    metadata: dict[str, str] = Field(default_factory=dict)
    code: str = ""
    dtype: Dtype = "float32"
    microbatch: int = MICROBATCH
    owner: str = ""
    created: float = Field(default_factory=time.time)

    @property
    def id(self) -> str:
        """`ftjob-` and a hash of all that decides the JobSpec, known before the file is read.

        Different requests may lead to one JobSpec, such as "auto" and the number it means. They
        share its training job, which is paused and cancelled for both.
        """
        identity = [
            *(self.training_sha256, self.parent_sha256, self.code, self.seed),
            *(self.n_epochs, self.batch_size, self.learning_rate_multiplier),
        ]
        if self.parent_settings_sha256 is not None:
            identity += ["settings", self.parent_settings_sha256]
        if self.validation_sha256 is not None:
            identity += ["validation", self.validation_sha256]
        if self.method != "supervised":
            identity += [self.method, self.beta]
        if self.dtype != "float32":
            identity += ["dtype", self.dtype]
        if self.microbatch != MICROBATCH:
            identity += ["microbatch", self.microbatch]
        return PREFIX + digest(identity, 24)


class Validated(Record):
    """The result of valid files: the JobSpec and its counts.

    `examples` counts the training file's examples, `validation` the validation file's, and
    `left_out` the duplicates in either. `losses` are the dataset's.
    """

    spec: JobSpec
    n_epochs: int
    learning_rate_multiplier: float
    examples: int
    left_out: int
    samples: int
    validation: int = 0
    losses: dict[str, int] = Field(default_factory=dict)
    time: float = Field(default_factory=time.time)


class Ended(Record):
    """The end of a job. `error` has OpenAI's fields: code, message, param."""

    state: Literal["succeeded", "failed", "cancelled"]
    model: str | None = None  # name@N
    result_file: str | None = None
    trained_tokens: int | None = None
    step: int = 0
    loss: float | None = None
    valid_loss: float | None = None
    scheduler: str = ""
    scheduler_job_id: str = ""
    error: dict[str, Any] | None = None
    time: float = Field(default_factory=time.time)


class TuningFolder:
    """The files of all fine-tuning jobs. Each is made once and never changed."""

    def __init__(self, home: Home) -> None:
        self._root = home.fine_tuning

    def create(self, request: TuningRequest) -> TuningRequest:
        """Write a request, or return the one of the same id.

        Raises BadInput if that one has another name or other metadata.
        """
        text = checksums.with_crc(canonical(request.model_dump()))
        if durable.create_file(self._path(request.id, ".json"), text):
            return request
        first = self.read_request(request.id)
        for name in ("name", "metadata"):
            before, now = getattr(first, name), getattr(request, name)
            if before != now:
                raise BadInput(
                    f"{first.id} is this very training, asked for with another {name}: {before!r},"
                    f" not {now!r}. It is not done twice; use that job, or change the seed",
                    param="suffix" if name == "name" else name,
                    code="job_exists",
                )
        return first

    def read_request(self, job_id: str) -> TuningRequest:
        """Return a job's request. Raises NotFound."""
        request = self._read(job_id, ".json", TuningRequest)
        if request is None:
            raise NotFound(f"no fine-tuning job {job_id!r}", param="fine_tuning_job_id")
        return request

    def read_validated(self, job_id: str) -> Validated | None:
        """Return the result of validation, or None before it."""
        return self._read(job_id, ".validated", Validated)

    def read_ended(self, job_id: str) -> Ended | None:
        """Return a job's end, or None before it."""
        return self._read(job_id, ".ended", Ended)

    def write_validated(self, job_id: str, validated: Validated) -> None:
        """Write the result of validation."""
        left_open = {"spec": {"layout", "recompute"}}  # chosen by the trainer
        content = checksums.with_crc(
            canonical(validated.model_dump(mode="json", exclude=left_open))
        )
        durable.create_file(self._path(job_id, ".validated"), content)

    def write_ended(self, job_id: str, ended: Ended) -> None:
        """Write a job's end. If there is one already, that one stays."""
        text = checksums.with_crc(canonical(ended.model_dump()))
        durable.create_file(self._path(job_id, ".ended"), text)

    def all(self) -> checksums.Listing[TuningRequest]:
        """Return all requests, newest first."""
        listing = checksums.list_whole(self._ids(), self.read_request)
        requests = sorted(listing.rows, key=lambda r: (r.created, r.id), reverse=True)
        return checksums.Listing(requests, listing.damaged)

    def unfinished_ids(self) -> list[str]:
        """Return the ids of jobs that have not ended."""
        return [name for name in self._ids() if not self._path(name, ".ended").exists()]

    def _ids(self) -> list[str]:
        return sorted(path.stem for path in self._root.glob(f"{PREFIX}*.json"))

    def _path(self, job_id: str, suffix: str) -> Path:
        return self._root / f"{job_id}{suffix}"

    def _read(self, job_id: str, suffix: str, kind: type[RecordType]) -> RecordType | None:
        try:
            return checksums.read_record(kind, self._path(job_id, suffix))
        except FileNotFoundError:
            return None
