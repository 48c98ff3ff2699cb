"""Records of a fine-tuning job, the folder of their files, and the check of a client's request.

An unsupported option is refused by name, so that every accepted option has an effect. The files'
contents are read later, by job_inputs.py. Times are unix seconds.
"""

import re
import time
from pathlib import Path
from typing import Any, Literal, TypeVar

from pydantic import Field

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.ports import Trainer
from cray_agents.records import Prompt, Record, StrictRecord, canonical, digest
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.fine_tuning.examples import Kind
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.registry import NAME, Registry
from cray_agents.training_jobs import MICROBATCH, Dtype, JobSpec

Auto = Literal["auto"]
RecordType = TypeVar("RecordType", bound=Record)

PREFIX = "ftjob-"
TUNING_FORMAT = 1  # of a job's files
#: Metadata keys that the platform adds.
ADDED = {"job", "paused", "scheduler", "scheduler_job_id", "slurm_job_id"}


class TuningRequest(Record):
    """A requested fine-tuning job. Its result is registered under `name`.

    `publish_every` steps of training its weights become a version of `name`; "auto": never.
    `model` is the version `name@N` that the client's model meant at that time, and `parent` its
    checkpoint. `prompts` are that version's, and those of what is made of it. The parent's hashes
    and `dtype` are those of the JobSpec. `microbatch` counts the tokens of its micro-batches,
    unless a sample has more.
    """

    model: str
    name: str
    parent: str
    parent_sha256: str
    parent_settings_sha256: str | None = None
    prompts: dict[str, Prompt] = Field(default_factory=dict)
    training_file: str
    training_sha256: str
    validation_file: str | None = None
    validation_sha256: str | None = None
    method: Kind = "supervised"
    n_epochs: int | Auto = "auto"
    batch_size: int | Auto = "auto"
    learning_rate_multiplier: float | Auto = "auto"
    publish_every: int | Auto = "auto"
    beta: float | Auto = "auto"
    seed: int = 0
    metadata: dict[str, str] = Field(default_factory=dict)
    code: str = ""
    dtype: Dtype = "float32"
    microbatch: int = MICROBATCH
    owner: str = ""
    format: int = TUNING_FORMAT
    created: float = Field(default_factory=time.time)

    @property
    def id(self) -> str:
        """`ftjob-` and a hash of all that decides the JobSpec, known before the file is read.

        Different requests may lead to one JobSpec, such as "auto" and the number it means. They
        share its training job, which is paused and cancelled for both. A second one that asks for
        another `publish_every`, or for it under another name or with other prompts, is refused.
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
        if self.prompts:
            prompts = {agent: prompt.id for agent, prompt in self.prompts.items()}
            identity += ["prompts", digest(prompts)]
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
        for name in ("name", "metadata", "publish_every"):
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
        return checksums.find_record(kind, self._path(job_id, suffix), TUNING_FORMAT)


FILE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
LONGEST_NAME = 64  # of a suffix
MOST_EPOCHS, MOST_BATCH, MOST_RATE, MOST_BETA, MOST_SEED = 50, 4096, 1000.0, 10.0, 2**31 - 1
MOST_STEPS = 2**31 - 1
LIMITS: dict[str, tuple[type[int | float], float]] = {
    "n_epochs": (int, MOST_EPOCHS),
    "batch_size": (int, MOST_BATCH),
    "learning_rate_multiplier": (float, MOST_RATE),
    "publish_every": (int, MOST_STEPS),
}
KINDS: dict[Kind, dict[str, tuple[type[int | float], float]]] = {
    "supervised": LIMITS,
    "dpo": {**LIMITS, "beta": (float, MOST_BETA)},
}


class TuningMethod(StrictRecord):
    """A training method: its `type`, and the settings under that name."""

    type: str
    supervised: dict[str, Any] | None = None
    dpo: dict[str, Any] | None = None
    reinforcement: dict[str, Any] | None = None


class CreateJob(StrictRecord):
    """The body of POST /v1/fine_tuning/jobs."""

    model: str
    training_file: str
    validation_file: str | None = None
    method: TuningMethod | None = None
    hyperparameters: dict[str, Any] | None = None
    suffix: str | None = None
    seed: int | None = Field(None, ge=0, le=MOST_SEED)
    integrations: list[Any] | None = None
    metadata: dict[str, str] | None = None


def resolve_request(
    body: CreateJob,
    registry: Registry,
    files: Files,
    code: str,
    trainer: Trainer,
    owner: str = "",
) -> TuningRequest:
    """Return the checked and resolved request. Raises BadInput, NotFound (the model).

    `code` is the trainer's, which also gives dtype and micro-batch.
    """
    kind = _parse_method(body)
    version = registry.resolve(body.model)
    name = body.suffix or version.name
    if len(name) > LONGEST_NAME or not NAME.fullmatch(name):
        raise BadInput(
            f"the suffix {name[:100]!r} cannot name a model: at most {LONGEST_NAME} letters, "
            "digits, '.', '_' and '-'",
            param="suffix",
        )
    folder = registry.home.checkpoint(version.checkpoint)
    parent = checkpoints.manifest_of(folder)
    validation = body.validation_file
    return TuningRequest(
        model=version.id,
        name=name,
        parent=version.checkpoint,
        parent_sha256=version.weights_sha256,
        parent_settings_sha256=checkpoints.settings_sha256(parent.files),
        prompts=version.prompts,
        training_file=body.training_file,
        training_sha256=_file_sha256(files, body.training_file, "training_file"),
        validation_file=validation,
        validation_sha256=(
            None if validation is None else _file_sha256(files, validation, "validation_file")
        ),
        method=kind,
        **_parse_hyperparameters(body, kind),
        seed=body.seed or 0,
        metadata=_check_metadata(body.metadata or {}),
        code=code,
        dtype=trainer.dtype(folder),
        microbatch=trainer.microbatch(folder),
        owner=owner,
    )


def _parse_method(body: CreateJob) -> Kind:
    """Return the method. Raises BadInput for an unknown one, and for settings without effect."""
    if body.integrations:
        raise BadInput(
            "integrations are not supported: metrics are in the job's events and result file",
            param="integrations",
            code="unsupported_value",
        )
    if body.method is None:
        return "supervised"
    kind: Kind | None = next((kind for kind in KINDS if kind == body.method.type), None)
    if kind is None:
        why = (
            "its answers are sampled and graded while it trains, and a job here has no engine;"
            " collect and score runs with a loop (`cray-agents loop`), which trains on them with"
            " grpo"
            if body.method.type == "reinforcement"
            else f"there are {', '.join(KINDS)}"
        )
        raise BadInput(
            f"method.type {body.method.type!r} is not supported: {why}",
            param="method.type",
            code="unsupported_value",
        )
    for other in ("supervised", "dpo", "reinforcement"):
        if other != kind and getattr(body.method, other) is not None:
            message = f"method.{other} has no effect with the type {kind!r}: leave it out"
            raise BadInput(message, param=f"method.{other}")
    return kind


def _file_sha256(files: Files, file_id: str, param: str) -> str:
    """Return the SHA-256 of a file's content. Raises BadInput."""
    code = f"invalid_{param}"
    try:
        if not FILE_ID.fullmatch(file_id):
            raise NotFound(f"{file_id[:200]!r} cannot name a file")
        file = files.get(file_id)
    except NotFound as error:
        raise BadInput(f"invalid {param}: {error}", param=param, code=code) from error
    if file.purpose != "fine-tune":
        raise BadInput(
            f"the file {file_id} has the purpose {file.purpose!r}; upload it with 'fine-tune'",
            param=param,
            code=code,
        )
    return file.sha256


def _parse_hyperparameters(body: CreateJob, kind: Kind) -> dict[str, Any]:
    """Return each as a number or "auto", from `method` or the older field. Raises BadInput."""
    given, field, limits = body.hyperparameters or {}, "hyperparameters", KINDS[kind]
    settings = getattr(body.method, kind) if body.method is not None else None
    if settings:
        for name in settings.keys() - {"hyperparameters"}:
            raise BadInput(f"unknown field {name!r}", param=f"method.{kind}.{name}")
        newer = settings.get("hyperparameters") or {}
        if given and given != newer:
            message = f"given here and in method.{kind}, and they differ: leave these out"
            raise BadInput(f"hyperparameters: {message}", param=field)
        given, field = newer, f"method.{kind}.hyperparameters"
    if not isinstance(given, dict):
        raise BadInput(f"{field} must be an object", param=field)
    for name in given.keys() - limits.keys():
        message = f"unknown hyperparameter {name!r}; there are {', '.join(limits)}"
        raise BadInput(message, param=f"{field}.{name}", code="unknown_parameter")
    return {
        name: _check_number(given[name], f"{field}.{name}", *limits[name])
        for name in limits
        if given.get(name) is not None
    }


def _check_number(value: Any, param: str, kind: type[Any], most: float) -> Any:
    if value == "auto":
        return value
    whole, zero = kind is int, param.endswith("learning_rate_multiplier")
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits or not (value >= 0 if zero else value > 0) or value > most:
        least = "from 0 to" if zero else "above 0 and at most"
        what = f"a whole number from 1 to {most}" if whole else f"{least} {most:g}"
        raise BadInput(f"{param} must be 'auto' or {what}, not {value!r}", param=param)
    return kind(value)


def _check_metadata(given: dict[str, str]) -> dict[str, str]:
    if len(given) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in given.items()):
        message = "metadata holds at most 16 pairs, of keys up to 64 and values up to 512 letters"
        raise BadInput(message, param="metadata")
    for name in given.keys() & ADDED:
        raise BadInput(f"metadata.{name} is set by the platform", param=f"metadata.{name}")
    return given
