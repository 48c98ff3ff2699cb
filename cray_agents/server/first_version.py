"""The first version of a platform: the promoted one of its name, else the model of `--model`.

A model that is none of the name's versions is an error, as it would be ignored. Manifests are
compared first; files are hashed only if their sizes equal those of a version.
Called by compose.py. Read next: runtime/registry/checkpoints.py.
"""

import contextlib
from functools import cache
from pathlib import Path

from cray_agents.errors import BadInput, NotFound
from cray_agents.records import ModelVersion
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry.checkpoints import (
    MANIFEST,
    SUFFIXES,
    changes_of,
    read_manifest,
    read_pruned,
    weights_sha256,
)
from cray_agents.runtime.registry.foreign_model import read_config, read_weights
from cray_agents.runtime.registry.registry import Registry


def first_version(
    registry: Registry, model: Path | None, name: str, *, required: bool = True
) -> ModelVersion | None:
    """Return the version to serve at first, importing `model` if its name has none.

    `model` is a directory, a GGUF file or a hub's `owner/name`.
    Raises BadInput if there is neither version nor model, unless none is `required`, or if `model`
    would not be served.
    """
    with contextlib.suppress(NotFound):
        promoted = registry.promoted(name)
        if promoted is not None:
            if model is not None and (why := _why_none(registry, name, model)) is not None:
                raise BadInput(
                    f"{name!r} means {promoted.id} on {registry.home.root}, and {model} is none of "
                    f"its versions{why}: leave out "
                    "--model to serve what is promoted, or serve the model by another name "
                    "(--name) or on another root (--home)",
                    param="model",
                )
            return promoted
    if model is None and not required:
        return None
    if model is None:
        names = registry.names()
        known = ", ".join(names) or "none"
        raise BadInput(
            f"no version of {name!r} is promoted on {registry.home.root} (names there: {known}): "
            f"give a Hugging Face directory, a GGUF file or a hub's name with --model"
            f"{', or one of these names with --name' if names else ''}",
            param="model",
        )
    checkpoint, manifest = registry.import_checkpoint(registry.named(model))
    version = registry.register(name, checkpoint, manifest)
    registry.promote(name, version.number, who="up", reason=f"first model, from {model}")
    return version


def _why_none(registry: Registry, name: str, model: Path) -> str | None:
    """Return why a model is none of a name's versions; None if it is one of them."""
    try:
        directory = registry.named(model)
    except NotFound as error:
        return f" ({error})"
    return None if is_version(registry, name, directory) else ""


def is_version(registry: Registry, name: str, model: Path) -> bool:
    """Tell whether a checkpoint directory is one of a name's versions."""
    manifest_hashes = read_manifest(model).files if (model / MANIFEST).is_file() else None
    sizes = {
        path.name: path.stat().st_size for path in model.iterdir() if _is_checkpoint_file(path)
    }
    changed = _files_changed_by_import(model)
    sizes |= {name: len(content) for name, content in changed.items()}

    @cache
    def hash_of(file: str, like: str = "") -> str:
        if file in changed:
            return durable.sha256(changed[file])
        return checksums.hash_of(model / file, like)

    def is_same(version: ModelVersion) -> bool:
        kept = registry.home.checkpoint(version.checkpoint)
        if kept.resolve() == model.resolve():
            return True
        try:
            files = read_manifest(kept).files
            kept_sizes = {file: (kept / file).stat().st_size for file in files}
        except (NotFound, FileNotFoundError):  # removed; the version still has the hash
            removed = read_pruned(kept)
            like = removed.manifest.files if removed is not None else {}
            hashes = manifest_hashes or {
                file: hash_of(file, like.get(file, ""))
                for file in sizes
                if file.endswith(".safetensors")
            }
            return weights_sha256(hashes) == version.weights_sha256
        if manifest_hashes is not None:
            return files == manifest_hashes | {file: hash_of(file) for file in changed}
        smallest_first = sorted(sizes, key=sizes.__getitem__)
        return sizes == kept_sizes and all(
            hash_of(file, files[file]) == files[file] for file in smallest_first
        )

    return any(is_same(version) for version in registry.versions(name))


def _files_changed_by_import(model: Path) -> dict[str, bytes]:
    """Return the files that an import would change, with new content; none if it is no model."""
    with contextlib.suppress(BadInput, NotFound):
        config, weights = read_config(model), read_weights(model.resolve())
        return changes_of(model.resolve(), config, weights)
    return {}


def _is_checkpoint_file(path: Path) -> bool:
    """Tell whether an import takes a file of a directory without a manifest."""
    return path.is_file() and path.suffix in SUFFIXES and not path.name.startswith(".")
