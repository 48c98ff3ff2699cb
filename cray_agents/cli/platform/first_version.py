"""What a platform serves at first: the version its name means already, else the model it is given.

A model that was given and is none of the name's versions is an error: it would be ignored. It is
compared by what manifests say, and by hash only where its files are as large as a version's.
Called by compose.py. Read next: runtime/checkpoints.py, what a checkpoint is.
"""

import contextlib
from functools import cache
from pathlib import Path

from cray_agents.errors import BadInput, NotFound
from cray_agents.records import ModelVersion
from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry.checkpoints import (
    MANIFEST,
    SUFFIXES,
    changes_of,
    read_manifest,
    weights_sha256,
)
from cray_agents.runtime.registry.model_config import read_config
from cray_agents.runtime.registry.model_files import read_weights
from cray_agents.runtime.registry.registry import Registry


def first_version(registry: Registry, model: Path | None, name: str) -> ModelVersion:
    """What to serve at first. Raises BadInput when nothing is, or when `model` would not be."""
    model = model.expanduser().absolute() if model is not None else None
    with contextlib.suppress(NotFound):
        promoted = registry.promoted(name)
        if promoted is not None:
            if model is not None and not is_version(registry, name, model):
                raise BadInput(
                    f"{name!r} means {promoted.id} on {registry.home.root}, and {model} is none of "
                    f"its versions{'' if model.is_dir() else ' (it is no directory)'}: leave out "
                    "--model to serve what is promoted, or serve the model by another name "
                    "(--name) or on another root (--home)",
                    param="model",
                )
            return promoted
    if model is None:
        names = registry.names()
        known = ", ".join(names) or "none"
        raise BadInput(
            f"no version of {name!r} is promoted on {registry.home.root} (names there: {known}): "
            f"give a Hugging Face checkpoint directory with --model"
            f"{', or one of these names with --name' if names else ''}",
            param="model",
        )
    checkpoint, manifest = registry.import_checkpoint(model)
    version = registry.register(name, checkpoint, manifest)
    registry.promote(name, version.number, who="up", reason=f"first model, from {model}")
    return version


def is_version(registry: Registry, name: str, model: Path) -> bool:
    """Whether a checkpoint directory is one of a name's versions."""
    if not model.is_dir():
        return False
    told = read_manifest(model).files if (model / MANIFEST).is_file() else None
    sizes = {path.name: path.stat().st_size for path in model.iterdir() if _counts(path)}
    changed = _changed(model)
    sizes |= {name: len(content) for name, content in changed.items()}

    @cache
    def sha256(file: str) -> str:
        if file in changed:
            return durable.sha256(changed[file])
        return durable.sha256_file(model / file)

    def same(version: ModelVersion) -> bool:
        kept = registry.home.checkpoint(version.checkpoint)
        if kept.resolve() == model.resolve():
            return True
        try:
            files = read_manifest(kept).files
            kept_sizes = {file: (kept / file).stat().st_size for file in files}
        except (NotFound, FileNotFoundError):  # removed; what it weighed is still known
            hashes = told or {file: sha256(file) for file in sizes if file.endswith(".safetensors")}
            return weights_sha256(hashes) == version.weights_sha256
        if told is not None:
            return files == told | {file: sha256(file) for file in changed}
        smallest_first = sorted(sizes, key=sizes.__getitem__)
        return sizes == kept_sizes and all(sha256(file) == files[file] for file in smallest_first)

    return any(same(version) for version in registry.versions(name))


def _changed(model: Path) -> dict[str, bytes]:
    """What is taken in otherwise than it is; of what is no model nothing is."""
    with contextlib.suppress(BadInput, NotFound):
        config, weights = read_config(model), read_weights(model.resolve())
        return changes_of(model.resolve(), config, weights)
    return {}


def _counts(path: Path) -> bool:
    """Whether a file is taken in with a checkpoint that has no manifest."""
    return path.is_file() and path.suffix in SUFFIXES and not path.name.startswith(".")
