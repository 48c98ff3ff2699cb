"""Checkpoint directories: proving one whole, and taking a foreign one in.

A checkpoint is a Hugging Face directory with `manifest.json` beside the weights, published last;
one that LoRA made also has `adapter/` in PEFT's layout, which does the same over the parent. The
registry takes them in; the pool and the trainer read them. Only safetensors come in: a pickle can
run code when it is loaded. Of one that pruning.py has removed `<id>.pruned` tells in its place.
"""

import shutil
import time
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Manifest, Record, digest
from cray_agents.runtime import durable
from cray_agents.runtime.removing import OLD, remove

MANIFEST = "manifest.json"
ADAPTER = "adapter"
ASIDE = ".aside_"  # in the name of a whole checkpoint that pruning.py is about to remove
DRAFT_SECONDS = 86400.0  # after which a draft that nobody touched is a dead process's
# what a Hugging Face directory needs to be served and trained; code and pickles stay outside
SUFFIXES = {".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".md"}
NO_SETTINGS = {MANIFEST, "generation_config.json"}
_INDEX = ".index.json"  # which weights are in which file


def weights_sha256(files: dict[str, str]) -> str:
    """One hash for the weights among a manifest's files: 64 hex digits over names and hashes.

    An adapter's are not among them: they are merged into the others.
    """
    weights = {n: h for n, h in files.items() if n.endswith(".safetensors") and "/" not in n}
    return digest(weights, 64)


def settings_sha256(files: dict[str, str]) -> str:
    """One hash for what else a job takes from its parent: config, tokenizer, chat template.

    `files` are a manifest's, or `settings_in` a directory.
    """
    return digest({n: h for n, h in files.items() if _is_setting(n)}, 64)


def settings_in(directory: Path) -> dict[str, str]:
    """Those files of a directory, whatever its manifest says: name -> SHA-256."""
    paths = [p for p in directory.iterdir() if p.is_file() and _is_setting(p.name)]
    return {path.name: durable.sha256_file(path) for path in paths}


def _is_setting(name: str) -> bool:
    """Whatever is neither weights, for readers nor for the engine alone: tokenizers vary."""
    read = Path(name).suffix in SUFFIXES - {".safetensors", ".md"} and name not in NO_SETTINGS
    return read and "/" not in name and not name.startswith(".") and not name.endswith(_INDEX)


def max_tokens(config: dict[str, Any]) -> int:
    """The longest sequence that a model is trained on, by its config.json. Raises BadInput.

    Within its positions, its sliding window, and where RoPE's frequencies do not depend on the
    sequence's length: longrope takes others beyond the original length, dynamic beyond positions.
    """
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        message = "the model's config.json has no max_position_embeddings: it cannot be trained"
        raise BadInput(message, param="model")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    original = None
    if rope.get("rope_type", rope.get("type")) == "longrope":
        name = "original_max_position_embeddings"
        original = config.get(name) or rope.get(name)
    return min(positions, window or positions, original or positions)


class Pruned(Record):
    """What stays of a checkpoint that was removed, and since when."""

    manifest: Manifest
    time: float = Field(default_factory=time.time)


def pruned_file(directory: Path) -> Path:
    """Where that stands, beside the directory's place."""
    return directory.with_name(f"{directory.name}.pruned")


def record_of(directory: Path) -> Manifest:
    """A checkpoint's manifest, also of one that was pruned. Raises NotFound, Corrupt."""
    try:
        return read_manifest(directory)
    except NotFound:
        if (gone := pruned(directory)) is None:
            raise
        return gone.manifest


def refuse_pruned(directory: Path) -> None:
    """Raises NotFound, code `pruned`, where a checkpoint is no more. Corrupt."""
    if (gone := pruned(directory)) is not None:
        since = datetime.fromtimestamp(gone.time, UTC).strftime("%Y-%m-%d %H:%M UTC")
        raise NotFound(
            f"the weights of {directory.name} were removed by `cray-agents models prune` ({since}):"
            " its records stay, but it can be neither served nor trained from; take another"
            " version, `cray-agents models list` shows which have their weights",
            param="checkpoint",
            code="pruned",
        )


def pruned(directory: Path) -> Pruned | None:
    """What stays of a checkpoint that was removed; None while it is there. Raises Corrupt."""
    path = pruned_file(directory)
    if directory.is_dir():
        return None
    try:
        return Pruned.model_validate(orjson.loads(path.read_bytes()))
    except FileNotFoundError:
        return None
    except ValueError as error:
        raise Corrupt(f"{path} cannot be read: {error}") from error


def config_sha256(directory: Path) -> str:
    """What names the weights that a job starts from at random: its config.json. Raises NotFound."""
    path = directory / "config.json"
    refuse_pruned(directory)
    if not path.is_file():
        raise NotFound(f"{directory} has no config.json: it is no model directory", param="parent")
    return durable.sha256_file(path)


def read_manifest(directory: Path) -> Manifest:
    """A checkpoint's manifest. Raises NotFound without one, Corrupt if it cannot be read."""
    path = directory / MANIFEST
    try:
        return Manifest.model_validate(orjson.loads(path.read_bytes()))
    except FileNotFoundError as error:
        refuse_pruned(directory)
        raise NotFound(
            f"{directory} has no {MANIFEST}: it is not a checkpoint", param="checkpoint"
        ) from error
    except ValueError as error:
        raise Corrupt(f"{path} is not a checkpoint's manifest: {error}") from error


def verify(directory: Path) -> Manifest:
    """Hash every file that the manifest names. Raises Corrupt, naming the file that differs."""
    manifest = read_manifest(directory)
    for name, expected in manifest.files.items():
        path = directory / name
        if not path.is_file():
            raise Corrupt(f"{path} is missing, but the manifest names it")
        found = durable.sha256_file(path)
        if found != expected:
            raise Corrupt(f"{path} has SHA-256 {found}, but the manifest says {expected}")
    return manifest


def take_in(home: Home, source: Path) -> tuple[str, Manifest]:
    """The id and manifest of a checkpoint, copied under the home unless it lies there already.

    With a manifest it is verified; without one, `source` is a plain Hugging Face directory and gets
    one. The same content gives the same id `hf-<hash>`. Raises BadInput, Corrupt.
    """
    if source.parent.resolve() == home.checkpoint("x").parent.resolve():
        return source.name, verify(source)
    manifest = verify(source) if (source / MANIFEST).is_file() else _describe(source)
    for name in manifest.files:
        path = Path(name)
        if path.parts not in ((path.name,), (ADAPTER, path.name)) or path.suffix not in SUFFIXES:
            raise BadInput(
                f"{source} holds {name!r}, which is not taken in: only plain model files",
                param="checkpoint",
            )
    checkpoint_id = f"hf-{digest(manifest.files)}"
    target = home.checkpoint(checkpoint_id)
    if (target / MANIFEST).is_file():
        return checkpoint_id, verify(target)
    _copy(source, target, manifest)
    return checkpoint_id, verify(target)  # also proves the copy


def _describe(source: Path) -> Manifest:
    names = sorted(
        path.name
        for path in source.iterdir()
        if path.is_file() and path.suffix in SUFFIXES and not path.name.startswith(".")
    )
    if "config.json" not in names:
        message = f"{source} has no config.json: it is no Hugging Face model directory"
        raise BadInput(message, param="checkpoint")
    if not any(name.endswith(".safetensors") for name in names):
        message = f"{source} has no *.safetensors; save the model with safetensors first"
        raise BadInput(message, param="checkpoint")
    files = {name: durable.sha256_file(source / name) for name in names}
    return Manifest(files=files, weights_sha256=weights_sha256(files))


def _copy(source: Path, target: Path, manifest: Manifest) -> None:
    draft = durable.draft_directory(target)
    try:
        for name in manifest.files:
            (draft / name).parent.mkdir(exist_ok=True)
            shutil.copyfile(source / name, draft / name)
            durable.sync(draft / name)
        for folder in {(draft / name).parent for name in manifest.files}:
            durable.sync(folder)
        durable.write_file(draft / MANIFEST, orjson.dumps(manifest.model_dump(mode="json")))
        durable.publish_directory(draft, target)
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def left_over(home: Home) -> list[Path]:
    """What killed processes left half-written or half-deleted: nobody has touched it for a day.

    Imports and exports write there; what is half-deleted is so at once.
    """
    folder, now = home.checkpoint("x").parent, time.time()
    hidden = [path for path in folder.glob(".*") if path.is_dir() and ASIDE not in path.name]
    return [
        path for path in hidden if OLD in path.name or now - _touched(path, now) > DRAFT_SECONDS
    ]


def sweep(home: Home) -> int:
    """Delete that; returns the bytes that this gave back."""
    return sum(remove(path) for path in left_over(home))


def _touched(folder: Path, now: float) -> float:
    """When something in a folder was changed last; now, if it is just vanishing."""
    try:
        return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except FileNotFoundError:
        return now
