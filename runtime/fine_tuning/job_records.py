"""What is written of a fine-tuning job, and where. Times are unix seconds."""

import time
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.records import Record, canonical, digest
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.fine_tuning.examples import Kind
from cray_agents.training_jobs import JobSpec

Auto = Literal["auto"]
Kept = TypeVar("Kept", bound=Record)

PREFIX = "ftjob-"
ADDED = {"job", "paused", "scheduler", "scheduler_job_id", "slurm_job_id"}  # metadata that we add


class TuningRequest(Record):
    """A fine-tuning job as it was asked for. `name` is what its result is registered as.

    `model` is the version `name@N` that the client's model meant then, `parent` its checkpoint;
    the hashes of that are those of the JobSpec.
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
    owner: str = ""
    created: float = Field(default_factory=time.time)

    @property
    def id(self) -> str:
        """`ftjob-` and a hash of all that decides the JobSpec, known before the file is read.

        Two that were asked for differently can still come to one JobSpec ("auto" and the number it
        means): they then share its training job, which is paused and cancelled for both.
        """
        what = [
            *(self.training_sha256, self.parent_sha256, self.code, self.seed),
            *(self.n_epochs, self.batch_size, self.learning_rate_multiplier),
        ]
        if self.parent_settings_sha256 is not None:
            what += ["settings", self.parent_settings_sha256]
        if self.validation_sha256 is not None:
            what += ["validation", self.validation_sha256]
        if self.method != "supervised":
            what += [self.method, self.beta]
        return PREFIX + digest(what, 24)


class Validated(Record):
    """The files were good: what they became. `left_out` are examples that were there twice, in
    either file; `validation` are the validation file's examples, `examples` the other's.
    """

    spec: JobSpec
    n_epochs: int
    learning_rate_multiplier: float
    examples: int
    left_out: int
    samples: int
    validation: int = 0
    time: float = Field(default_factory=time.time)


class Ended(Record):
    """How it ended. `error` is OpenAI's: code, message, param."""

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
    """The files of all fine-tuning jobs. Each is made once; none is ever changed."""

    def __init__(self, home: Home) -> None:
        self._root = home.fine_tuning

    def ask(self, asked: TuningRequest) -> TuningRequest:
        """Write down what is asked, or find it. Raises BadInput if it was asked for differently."""
        text = checksums.with_crc(canonical(asked.model_dump()))
        if durable.create_file(self._path(asked.id, ".json"), text):
            return asked
        first = self.asked(asked.id)
        for name in ("name", "metadata"):
            before, now = getattr(first, name), getattr(asked, name)
            if before != now:
                raise BadInput(
                    f"{first.id} is this very training, asked for with another {name}: {before!r},"
                    f" not {now!r}. It is not done twice; use that job, or change the seed",
                    param="suffix" if name == "name" else name,
                    code="job_exists",
                )
        return first

    def asked(self, job_id: str) -> TuningRequest:
        """What was asked. Raises NotFound."""
        asked = self._read(job_id, ".json", TuningRequest)
        if asked is None:
            raise NotFound(f"no fine-tuning job {job_id!r}", param="fine_tuning_job_id")
        return asked

    def validated(self, job_id: str) -> Validated | None:
        """What its file became; None while that is not known."""
        return self._read(job_id, ".validated", Validated)

    def ended(self, job_id: str) -> Ended | None:
        """How it ended; None while it has not."""
        return self._read(job_id, ".ended", Ended)

    def validate(self, job_id: str, validated: Validated) -> None:
        """Write down what its file became."""
        left_open = {"spec": {"layout", "recompute"}}  # the trainer's to choose
        content = checksums.with_crc(
            canonical(validated.model_dump(mode="json", exclude=left_open))
        )
        durable.create_file(self._path(job_id, ".validated"), content)

    def end(self, job_id: str, ended: Ended) -> None:
        """Write down how it ended; the first end stays."""
        text = checksums.with_crc(canonical(ended.model_dump()))
        durable.create_file(self._path(job_id, ".ended"), text)

    def all(self) -> list[TuningRequest]:
        """Everything that was asked, newest first."""
        if not self._root.is_dir():
            return []
        found = [self.asked(path.stem) for path in self._root.glob(f"{PREFIX}*.json")]
        return sorted(found, key=lambda asked: (asked.created, asked.id), reverse=True)

    def unfinished(self) -> list[str]:
        """The ids of those that have not ended."""
        return [a.id for a in self.all() if not self._path(a.id, ".ended").exists()]

    def _path(self, job_id: str, suffix: str) -> Path:
        return self._root / f"{job_id}{suffix}"

    def _read(self, job_id: str, suffix: str, kind: type[Kept]) -> Kept | None:
        try:
            return checksums.read_record(kind, self._path(job_id, suffix))
        except FileNotFoundError:
            return None
