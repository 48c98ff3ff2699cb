"""What a client asks for, checked and resolved: the body of POST /v1/fine_tuning/jobs as an Asked.

What is not supported is refused by name: an option that is taken has an effect. Called by the
gateway's routes/fine_tuning.py; what the file holds is looked at later, by preparing.py.
"""

import re
from typing import Any

from pydantic import Field

from cray_agents.errors import BadInput, NotFound
from cray_agents.records import StrictRecord
from cray_agents.runtime.files import Files
from cray_agents.runtime.fine_tuning.records import ADDED, Asked
from cray_agents.runtime.registry import NAME, Registry

FILE_ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")
LONGEST_NAME = 64  # of a suffix
MOST_EPOCHS, MOST_BATCH, MOST_RATE, MOST_SEED = 50, 4096, 1000.0, 2**31 - 1


class Method(StrictRecord):
    """How to train. OpenAI's other two have settings of their own, which are not read."""

    type: str
    supervised: dict[str, Any] | None = None
    dpo: dict[str, Any] | None = None
    reinforcement: dict[str, Any] | None = None


class CreateJob(StrictRecord):
    """The body of POST /v1/fine_tuning/jobs."""

    model: str
    training_file: str
    validation_file: str | None = None
    method: Method | None = None
    hyperparameters: dict[str, Any] | None = None
    suffix: str | None = None
    seed: int | None = Field(None, ge=0, le=MOST_SEED)
    integrations: list[Any] | None = None
    metadata: dict[str, str] | None = None


def as_asked(
    body: CreateJob, registry: Registry, files: Files, code: str, owner: str = ""
) -> Asked:
    """The request, checked and resolved. Raises BadInput, NotFound (the model)."""
    _check_supported(body)
    version = registry.resolve(body.model)
    name = body.suffix or version.name
    if len(name) > LONGEST_NAME or not NAME.fullmatch(name):
        raise BadInput(
            f"the suffix {name[:100]!r} cannot name a model: at most {LONGEST_NAME} letters, "
            "digits, '.', '_' and '-'",
            param="suffix",
        )
    return Asked(
        model=version.id,
        name=name,
        parent=version.checkpoint,
        parent_sha256=version.weights_sha256,
        training_file=body.training_file,
        training_sha256=_training_file(files, body.training_file),
        **_hyperparameters(body),
        seed=body.seed or 0,
        metadata=_metadata(body.metadata or {}),
        code=code,
        owner=owner,
    )


def _check_supported(body: CreateJob) -> None:
    """Refuse what would have no effect."""
    if body.method is not None and body.method.type != "supervised":
        raise BadInput(
            f"method.type {body.method.type!r} is not supported: today there is 'supervised'",
            param="method.type",
            code="unsupported_value",
        )
    if body.validation_file is not None:
        raise BadInput(
            "no validation loss is computed yet, so a validation_file would have no effect: leave "
            "it out, and judge the result on tasks of your own before you promote it",
            param="validation_file",
            code="unsupported_value",
        )
    if body.integrations:
        raise BadInput(
            "integrations are not supported: metrics are in the job's events and result file",
            param="integrations",
            code="unsupported_value",
        )


def _training_file(files: Files, file_id: str) -> str:
    """The SHA-256 of the file's content. Raises BadInput."""
    code = "invalid_training_file"
    try:
        if not FILE_ID.fullmatch(file_id):
            raise NotFound(f"{file_id[:200]!r} cannot name a file")
        file = files.get(file_id)
    except NotFound as error:
        message = f"invalid training_file: {error}"
        raise BadInput(message, param="training_file", code=code) from error
    if file.purpose != "fine-tune":
        raise BadInput(
            f"the file {file_id} has the purpose {file.purpose!r}; upload it with 'fine-tune'",
            param="training_file",
            code=code,
        )
    return file.sha256


def _hyperparameters(body: CreateJob) -> dict[str, Any]:
    """Each as a number or "auto", from `method` or the older place. Raises BadInput."""
    given, where = body.hyperparameters or {}, "hyperparameters"
    if body.method is not None and body.method.supervised:
        for name in body.method.supervised.keys() - {"hyperparameters"}:
            raise BadInput(f"unknown field {name!r}", param=f"method.supervised.{name}")
        newer = body.method.supervised.get("hyperparameters") or {}
        if given and given != newer:
            message = "given here and in method.supervised, and they differ: leave these out"
            raise BadInput(f"hyperparameters: {message}", param=where)
        given, where = newer, "method.supervised.hyperparameters"
    limits = {
        "n_epochs": (int, MOST_EPOCHS),
        "batch_size": (int, MOST_BATCH),
        "learning_rate_multiplier": (float, MOST_RATE),
    }
    if not isinstance(given, dict):
        raise BadInput(f"{where} must be an object", param=where)
    for name in given.keys() - limits.keys():
        message = f"unknown hyperparameter {name!r}; there are {', '.join(limits)}"
        raise BadInput(message, param=f"{where}.{name}", code="unknown_parameter")
    return {
        name: _number(given[name], f"{where}.{name}", *limits[name])
        for name in limits
        if given.get(name) is not None
    }


def _number(value: Any, param: str, kind: type[Any], most: float) -> Any:
    if value == "auto":
        return value
    whole = kind is int
    fits = isinstance(value, int if whole else int | float) and not isinstance(value, bool)
    if not fits or not 0 < value <= most:
        what = f"a whole number from 1 to {most}" if whole else f"above 0 and at most {most:g}"
        raise BadInput(f"{param} must be 'auto' or {what}, not {value!r}", param=param)
    return kind(value)


def _metadata(given: dict[str, str]) -> dict[str, str]:
    if len(given) > 16 or any(len(k) > 64 or len(v) > 512 for k, v in given.items()):
        message = "metadata holds at most 16 pairs, of keys up to 64 and values up to 512 letters"
        raise BadInput(message, param="metadata")
    for name in given.keys() & ADDED:
        raise BadInput(f"metadata.{name} is set by the platform", param=f"metadata.{name}")
    return given
