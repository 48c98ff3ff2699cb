"""Fine-tuning request: check the body of POST /v1/fine_tuning/jobs, resolve model and files.

An unsupported option is refused by name, so that every accepted option has an effect. Called by
gateway/routes/fine_tuning.py. The files' contents are read later, by job_inputs.py.
"""

import re
from typing import Any

from pydantic import Field

from cray_agents.errors import BadInput, NotFound
from cray_agents.ports import Trainer
from cray_agents.records import StrictRecord
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.fine_tuning.examples import Kind
from cray_agents.runtime.fine_tuning.job_records import ADDED, TuningRequest
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.registry import NAME, Registry

FILE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
LONGEST_NAME = 64  # of a suffix
MOST_EPOCHS, MOST_BATCH, MOST_RATE, MOST_BETA, MOST_SEED = 50, 4096, 1000.0, 10.0, 2**31 - 1
LIMITS: dict[str, tuple[type[int | float], float]] = {
    "n_epochs": (int, MOST_EPOCHS),
    "batch_size": (int, MOST_BATCH),
    "learning_rate_multiplier": (float, MOST_RATE),
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
        dtype=trainer.dtype,
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
