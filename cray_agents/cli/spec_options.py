"""Spec options of `jobs submit`: make a JobSpec from a file, options and defaults.

Keys are dotted as in the records: `learning_rate`, `policy.kl`, `layout.data`. Hyperparameters need
no prefix. Read next: cray_agents/training_jobs.py for the meaning of each key; submit.py.
"""

import difflib
from math import ceil
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from cray_agents.cli.options import key_value
from cray_agents.errors import BadInput, NotFound
from cray_agents.exact_json import parse_json
from cray_agents.paths import Home
from cray_agents.records import StrictRecord
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.registry import Registry
from cray_agents.tasks.record_source import read_whole
from cray_agents.training_jobs import Backend, Hyperparameters, JobSpec

HYPER = "hyperparameters"
COMPARED = ("reference", "teacher")  # models that a job reads beside its parent
Fields = dict[str, Any]


# ---- reading the file and the options
def read_fields(file: Path | None, options: Fields, settings: list[str]) -> Fields:
    """Return a spec file's fields, overridden by options and by `key=value` settings.

    Options have dotted keys; None means not given. Raises BadInput.
    """
    fields = _read(file) if file is not None else {}
    for key, value in options.items():
        if value is not None:
            put(fields, key, value)
    for text in settings:
        put(fields, *key_value(text, "set"))
    return fields


def layout_of(text: str) -> Fields:
    """Read a layout such as `data=2,tensor=2`. Raises BadInput."""
    return dict(key_value(part, "layout") for part in text.split(","))


def put(fields: Fields, key: str, value: Any) -> None:
    """Set a dotted key; a key that is no field of JobSpec is a hyperparameter."""
    names = key.split(".")
    if names[0] not in JobSpec.model_fields:
        names = [HYPER, *names]
    for name in names[:-1]:
        if not isinstance(fields.get(name), dict):
            fields[name] = {}
        fields = fields[name]
    fields[names[-1]] = value


def _read(file: Path) -> Fields:
    try:
        fields = parse_json(read_whole(file))
    except (OSError, ValueError) as error:
        raise BadInput(f"{file} is no job's spec: {error}", param="spec") from error
    if not isinstance(fields, dict) or not isinstance(fields.get(HYPER, {}), dict):
        raise BadInput(f"{file} is no job's spec: it must be an object like a JobSpec's, and its"
                       f" {HYPER} one, too", param="spec")  # fmt: skip
    return fields


# ---- making the spec
def build_spec(home: Home, fields: Fields, epochs: float | None = None) -> JobSpec:
    """Make the spec. Defaults are the dataset's method and one epoch.

    A parent, reference or teacher that is a plain Hugging Face directory is imported under the
    home. Raises BadInput, NotFound, Corrupt.
    """
    from cray_agents.runtime.datasets.reader import read_dataset
    from cray_agents.trainers.job.job_command import code_version
    from cray_agents.trainers.models.architecture import with_backend, with_learning_rate
    from cray_agents.trainers.planning.layouts import check_layout

    for name in ("parent", "dataset"):
        if not isinstance(fields.get(name), str):
            raise BadInput(f"--{name} is missing: see `cray-agents jobs submit --help`", param=name)
    dataset = read_dataset(home, fields["dataset"])
    hyper = fields.get(HYPER, {})
    if epochs is not None and "steps" in hyper:
        raise BadInput("--steps and --epochs say the same: leave one of them out", param="epochs")
    fields = {
        "method": dataset["method"],
        "parent_sha256": "",
        **{f"{role}_sha256": "" for role in COMPARED if fields.get(role)},
        **fields,
        HYPER: {"steps": 1, **hyper},
    }
    spec = _validate(fields)  # before anything is copied
    if spec.method != dataset["method"]:
        raise BadInput(
            f"dataset {spec.dataset} is made for {dataset['method']}, not for {spec.method}: leave"
            f" --method out, or build one with `cray-agents dataset build --method {spec.method}`",
            param="method",
        )
    if "steps" not in hyper:
        steps = steps_of_epochs(dataset, spec, 1.0 if epochs is None else epochs)
        spec = spec.model_copy(update={HYPER: spec.hyperparameters.model_copy(update=steps)})
    registry = Registry(home)
    directory = _directory(registry, spec.parent)
    spec = with_learning_rate(with_backend(spec, directory), directory)
    init, backend = spec.hyperparameters.init, spec.hyperparameters.backend
    model = _trainable(directory, "parent", init, backend)
    compared = [role for role in COMPARED if getattr(spec, role) is not None]
    for role in compared:
        _trainable(_directory(registry, getattr(spec, role)), role, "parent", backend)
    if "layout" in spec.model_fields_set:
        check_layout(model, spec.layout)
    places = _checkpoint(registry, spec, "parent", afresh=spec.hyperparameters.init == "random")
    for role in compared:
        places |= _checkpoint(registry, spec, role, afresh=False)
    return spec.model_copy(update={**places, "code": code_version()})


def steps_of_epochs(dataset: Fields, spec: JobSpec, epochs: float) -> dict[str, int]:
    """Return the `steps` for so many epochs, and the `batch_size`, at most the whole dataset.

    Raises BadInput if the dataset is empty.
    """
    samples: int = dataset["splits"].get("train", {}).get("samples", 0)
    if not samples:
        raise BadInput(f"dataset {spec.dataset} has no samples to train on", param="dataset")
    units = ceil(samples / 2) if spec.method == "dpo" else samples  # a pair counts as two samples
    if dataset.get("documents"):  # contexts
        units = ceil(dataset["splits"]["train"]["trained_tokens"] / dataset["recipe"]["max_tokens"])
    batch = min(spec.hyperparameters.batch_size, units)
    return {"batch_size": batch, "steps": ceil(epochs * units / batch)}


def _directory(registry: Any, model: str) -> Path:
    from cray_agents.runtime.registry.deltas import materialize

    return materialize(registry.home, registry.named(model))


def _trainable(directory: Path, param: str, init: str, backend: Backend | None) -> Any:
    """Read the model in a directory, before its files are copied. Raises BadInput, NotFound."""
    from cray_agents.trainers.models.tensors import read_parent

    try:
        return read_parent(directory, init, backend)
    except (BadInput, NotFound) as error:
        raise type(error)(str(error), param=param) from error


def _checkpoint(registry: Any, spec: JobSpec, role: str, *, afresh: bool) -> dict[str, str]:
    """Return the fields of a role: its checkpoint's directory under the home, and its hashes."""
    model = getattr(spec, role)
    directory = _directory(registry, model)
    if afresh:  # only its config and tokenizer are read
        sha256, files = checkpoints.config_sha256(directory), checkpoints.settings_in(directory)
    else:
        name, manifest = registry.import_checkpoint(directory)
        directory, sha256 = registry.home.checkpoint(name), manifest.weights_sha256
        files = manifest.files
    hashes = {f"{role}_sha256": sha256}
    if role == "parent":
        hashes["parent_settings_sha256"] = checkpoints.settings_sha256(files)
    for param, actual in hashes.items():
        if (given := getattr(spec, param)) not in ("", None, actual):
            raise BadInput(
                f"{param} is {given}, but what {model} holds is {actual}: leave it out, or name"
                " another",
                param=param,
            )
    return {role: str(directory), **hashes}


# ---- checking the fields
def _validate(fields: Fields) -> JobSpec:
    try:
        return JobSpec.model_validate(fields)
    except ValidationError as error:
        problems = error.errors(include_url=False)
        first = next((e for e in problems if e["type"] == "extra_forbidden"), problems[0])
        key = ".".join(map(str, first["loc"])).removeprefix(f"{HYPER}.")
        if first["type"] == "extra_forbidden":
            raise BadInput(f"unknown key {key!r}: {_nearest(key)}", param=key) from error
        reason = first["msg"].removeprefix("Value error, ")
        text = f"{key} = {first['input']!r}: {reason}" if key else reason
        raise BadInput(text, param=key) from error


def _nearest(key: str) -> str:
    """Suggest the known keys closest to an unknown one, or list all keys."""
    known = [*_keys(Hyperparameters), *(k for k in _keys(JobSpec) if not k.startswith(HYPER))]
    last = key.rpartition(".")[2]
    near = [k for k in known if k.rpartition(".")[2] == last]
    near = near or difflib.get_close_matches(key, known, 1)
    return f"did you mean {' or '.join(near)}?" if near else f"valid keys: {', '.join(known)}"


def _keys(record: type[StrictRecord]) -> list[str]:
    """Return the dotted keys of a record and of its nested records."""
    keys = []
    for name, field in record.model_fields.items():
        kinds = (field.annotation, *get_args(field.annotation))
        inner = next(
            (k for k in kinds if isinstance(k, type) and issubclass(k, StrictRecord)), None
        )
        keys += [f"{name}.{key}" for key in _keys(inner)] if inner is not None else [name]
    return keys
