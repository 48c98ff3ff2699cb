"""Checkpoint directories: proving one whole, and taking a foreign one in.

A checkpoint is a Hugging Face directory with `manifest.json` beside the weights, published last;
one that LoRA made also has `adapter/` in PEFT's layout, which does the same over the parent. The
registry takes them in; the pool and the trainer read them. Only safetensors come in: a pickle can
run code when it is loaded. A directory that cannot be a model is refused before a byte of it is
copied (`inspect`), and the copy is this user's alone. Of one that pruning.py has removed
`<id>.pruned` tells in its place. Read next: model_files.py, how a foreign directory is read.
"""

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable
from datetime import UTC, datetime
from functools import partial
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Manifest, Record, digest
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.disk.durable import OLD, remove
from cray_agents.runtime.registry import model_files
from cray_agents.runtime.registry.model_config import TIED, is_tied, read_config
from cray_agents.runtime.registry.model_files import CONFIG, WEIGHTS

MANIFEST = "manifest.json"
ADAPTER = "adapter"
ASIDE = ".aside_"  # in the name of a whole checkpoint that pruning.py is about to remove
DRAFT_SECONDS = 86400.0  # after which a draft that nobody touched is a dead process's
# what a Hugging Face directory needs to be served and trained; code and pickles stay outside
SUFFIXES = {".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".md"}
NO_SETTINGS = {MANIFEST, "generation_config.json"}
_INDEX = ".index.json"  # which weights are in which file
_OBJECTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")  # as config.json
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # of checkpoints, jobs, datasets


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
    """Those files of a directory, whatever its manifest says: name -> SHA-256.

    Raises BadInput, also where one is a link that leads out of the directory.
    """
    directory = directory.resolve()
    names = [n for n in model_files.names_in(directory, SUFFIXES) if _is_setting(n)]
    return {name: model_files.sha256_file(directory, name) for name in names}


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
        return checksums.read_record(Pruned, path)
    except FileNotFoundError:
        return None


def config_sha256(directory: Path) -> str:
    """What names the weights that a job starts from at random: its config.json.

    Raises NotFound, BadInput.
    """
    refuse_pruned(directory)
    read_config(directory)
    return model_files.sha256_file(directory.resolve(), CONFIG)


def read_manifest(directory: Path) -> Manifest:
    """A checkpoint's manifest. Raises NotFound without one, Corrupt if it cannot be read.

    What it names are files and records of ours, never paths: it may be somebody else's.
    """
    path = directory / MANIFEST
    try:
        manifest = checksums.read_record(Manifest, path)
        _check_names(manifest)
    except FileNotFoundError as error:
        refuse_pruned(directory)
        raise NotFound(
            f"{directory} has no {MANIFEST}: it is not a checkpoint", param="checkpoint"
        ) from error
    except ValueError as error:
        raise Corrupt(f"{path} is not a checkpoint's manifest: {error}") from error
    return manifest


def _check_names(manifest: Manifest) -> None:
    """Raises ValueError for a name that leads elsewhere."""
    for name in manifest.files:
        parts = name.split("/")
        if len(parts) > 2 or not {"", ".", ".."}.isdisjoint(parts) or "\0" in name:
            raise ValueError(f"{name[:200]!r} is not the name of a file in it")
    for record in (manifest.job, manifest.dataset):
        if record is not None and not _PLAIN.fullmatch(record):
            raise ValueError(f"{record[:200]!r} names no job and no dataset")


def verify(directory: Path) -> Manifest:
    """Hash every file that the manifest names, once a process; see checked.py.

    Raises Corrupt, naming the file that differs.
    """
    manifest = read_manifest(directory)
    for name, expected in manifest.files.items():
        checksums.prove(directory / name, expected)
    return manifest


def verify_settings(directory: Path) -> None:
    """Hash config, tokenizer and chat template, where a manifest names them. Raises Corrupt."""
    if (directory / MANIFEST).is_file():
        for name, expected in read_manifest(directory).files.items():
            if _is_setting(name):
                checksums.prove(directory / name, expected)


def _compare(path: Path, found: str, expected: str) -> None:
    if found != expected:
        raise Corrupt(f"{path} has SHA-256 {found}, but the manifest says {expected}")


def is_ours(home: Home, directory: Path) -> bool:
    """Whether it is a checkpoint of this root, by its place."""
    plain = _PLAIN.fullmatch(directory.name) is not None
    return plain and directory.parent.resolve() == home.checkpoint("x").parent.resolve()


def take_in(home: Home, source: Path) -> tuple[str, Manifest]:
    """The id and manifest of a checkpoint, copied under the home unless it lies there already.

    With a manifest it is verified; without one, `source` is a plain Hugging Face directory and gets
    one. The same content gives the same id `hf-<hash>`. Raises BadInput, Corrupt.
    """
    if is_ours(home, source):
        return source.name, verify(source)
    manifest, changed = inspect(source)
    checkpoint_id = f"hf-{digest(manifest.files)}"
    target = home.checkpoint(checkpoint_id)
    if (target / MANIFEST).is_file():
        return checkpoint_id, verify(target)
    _copy(source.resolve(), target, manifest, changed, _access(home))
    return checkpoint_id, verify(target)  # also proves the copy


def inspect(source: Path, *, with_manifest: bool = False) -> tuple[Manifest, dict[str, bytes]]:
    """The manifest of a foreign directory, with all of it looked at, and what is changed of it.

    Raises BadInput for what can never be a model: a config.json that is none, weights that are cut
    off, missing, infinite or NaN, a link that leads out of it. Corrupt where it is not what its own
    manifest says; `with_manifest`: NotFound where it has none.

    Changed is at most the copy's config.json: where it ties embedding and head, and these differ,
    transformers does not tie them, but the engine would, and would serve another model.
    """
    source = source.resolve()
    told = _told_of(source)
    if told is None and with_manifest:
        raise NotFound(f"{source} has no {MANIFEST}: it is not a checkpoint", param="checkpoint")
    names = told.files if told is not None else model_files.names_in(source, SUFFIXES)
    names = sorted(name for name in names if name != MANIFEST)
    _refuse_others(source, names)
    if CONFIG not in names:
        message = f"{source} has no {CONFIG}: it is no Hugging Face model directory"
        raise BadInput(message, param="checkpoint")
    if not any(name.endswith(WEIGHTS) for name in names):
        message = f"{source} has no *.safetensors; save the model with safetensors first"
        raise BadInput(message, param="checkpoint")
    config, weights = read_config(source), model_files.read_weights(source)
    for name in _OBJECTS:
        if name in names:
            model_files.read_json(source, name)
    for name in {tensor.file for tensor in weights.values()} - set(names):
        raise BadInput(f"{source / name} is not named by its {MANIFEST}", param="checkpoint")
    files = {
        name: model_files.hash_weights(source, name, weights)
        if name.endswith(WEIGHTS)
        else model_files.sha256_file(source, name)
        for name in names
    }
    for name, expected in told.files.items() if told is not None else ():
        if name != MANIFEST:
            _compare(source / name, files[name], expected)
    sha256 = weights_sha256(files)
    if told is not None and told.weights_sha256 != sha256:
        message = f"the weights in {source} have hash {sha256}, and its {MANIFEST} says another"
        raise Corrupt(message)
    changed = changes_of(source, config, weights)
    files |= {name: durable.sha256(content) for name, content in changed.items()}
    if told is not None:
        return told.model_copy(update={"files": files}), changed
    return Manifest(files=files, weights_sha256=sha256), changed


def changes_of(
    source: Path, config: dict[str, Any], weights: dict[str, model_files.Tensor]
) -> dict[str, bytes]:
    """The content of those files that are taken in otherwise than they are; see `inspect`."""
    if not config.get(TIED) or is_tied(source, config, weights):
        return {}
    return {CONFIG: json.dumps({**config, TIED: False}, indent=2).encode() + b"\n"}


def _told_of(source: Path) -> Manifest | None:
    """A foreign directory's manifest; None if it has none. Raises BadInput."""
    if not os.path.lexists(source / MANIFEST):
        return None
    told = model_files.read_json(source, MANIFEST)
    try:
        manifest = Manifest.model_validate(told)
        _check_names(manifest)
    except ValueError as error:
        message = f"{source / MANIFEST} is not a checkpoint's manifest: {error}"
        raise BadInput(message, param="checkpoint") from error
    return manifest


def _refuse_others(source: Path, names: Iterable[str]) -> None:
    for name in names:
        path = Path(name)
        if path.parts not in ((path.name,), (ADAPTER, path.name)) or path.suffix not in SUFFIXES:
            raise BadInput(
                f"{source} holds {name!r}, which is not taken in: only plain model files",
                param="checkpoint",
            )


def _access(home: Home) -> int:
    """What a copy's mode may have: its owner's bits, and those of a group that shares the root."""
    mode = home.root.stat().st_mode if home.root.exists() else 0
    return 0o770 if mode & 0o070 == 0o070 and not mode & 0o007 else 0o700


def _copy(
    source: Path, target: Path, manifest: Manifest, changed: dict[str, bytes], access: int
) -> None:
    """Copy what the manifest names, and publish it; nobody else may read it meanwhile or later."""
    draft = durable.draft_directory(target)
    draft.chmod(stat.S_IMODE(draft.stat().st_mode) & (0o7000 | access))
    opener = partial(os.open, mode=access & 0o666)
    try:
        for name in manifest.files:
            path = draft / name
            path.parent.mkdir(access, exist_ok=True)
            if name in changed:
                durable.write_file(path, changed[name], access & 0o666)
                continue
            with model_files.open_file(source, name) as old, open(path, "wb", opener=opener) as new:
                shutil.copyfileobj(old, new, model_files.BLOCK)
            durable.sync(path)
        for folder in {(draft / name).parent for name in manifest.files}:
            durable.sync(folder)
        text = orjson.dumps(manifest.model_dump(mode="json"))
        durable.write_file(draft / MANIFEST, checksums.with_crc(text), access & 0o666)
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
