"""Checkpoint directories: verify their files, and import foreign model directories.

A checkpoint is a Hugging Face directory with `manifest.json` beside the weights, published last. A
LoRA job's has `adapter/` in PEFT's layout in place of the weights, and its manifest names the
checkpoint that the adapter is over (adapters.py); older ones have merged weights too. The registry
imports checkpoints; the pool and the trainer read them. Only safetensors are
imported: a pickle can run code when it is loaded. `inspect` refuses a directory that cannot be a
model before a byte is copied. The copy is readable by this user, and by a group that the root is
open to. A checkpoint that runtime/retention.py removed leaves the file `<id>.pruned`.
Read next: foreign_model.py, the reader of foreign directories.
"""

import json
import os
import re
import shutil
import stat
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor
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
from cray_agents.runtime.registry import foreign_model
from cray_agents.runtime.registry.foreign_model import (
    CONFIG,
    KINDS,
    TIED,
    WEIGHTS,
    changed_settings,
    is_tied,
    read_config,
)

MANIFEST = "manifest.json"
ADAPTER = "adapter"
_OVER = f"{ADAPTER}/"
DELTA = "delta"  # the folder of what changed in the parent: see deltas.py
READERS = 8  # files hashed at a time
ASIDE = ".aside_"  # in the name of a whole checkpoint that retention.py is about to remove
REBUILD = "rebuild"  # in the name of a draft of a delta checkpoint's files of weights
DRAFT_SECONDS = 86400.0  # without a change; an older draft is left over from a dead process
# the files of a Hugging Face directory for serving and training; no code and no pickles
SUFFIXES = {".safetensors", ".json", ".jinja", ".txt", ".model", ".tiktoken", ".md"}
NO_SETTINGS = {MANIFEST, "generation_config.json"}
_INDEX = ".index.json"  # ends the name of a file that maps tensors to files
_OBJECTS = ("tokenizer.json", "tokenizer_config.json", "generation_config.json")  # JSON objects
_PLAIN = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,199}")  # names of checkpoints, jobs, datasets


def weights_sha256(files: dict[str, str], base: str | None = None) -> str:
    """Return one hash of a manifest's weights: a SHA-256 over names and hashes, 64 hex digits.

    An adapter's files count if they are over weights with the hash `base`, and not merged.
    """
    if base is not None:
        return digest({"base": base} | {n: h for n, h in files.items() if n.startswith(_OVER)}, 64)
    weights = {n: h for n, h in files.items() if n.endswith(".safetensors") and "/" not in n}
    return digest(weights, 64)


def publish_folder(draft: Path, final: Path) -> bool:
    """Rename a finished folder into place; return False if a published folder has the name."""
    for path in draft.rglob("*"):
        durable.sync(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    return durable.publish_directory(draft, final)


def hash_files(folder: Path, known: Mapping[str, str] | None = None) -> dict[str, str]:
    """Map each file below a folder, except its manifest, to its hash; `known` ones are kept."""
    hashes = dict(known or {})
    for path in folder.rglob("*"):
        name = path.relative_to(folder).as_posix()
        if path.is_file() and name != MANIFEST and name not in hashes:
            hashes[name] = durable.sha256_file(path)
    return dict(sorted(hashes.items()))


def settings_sha256(files: dict[str, str]) -> str:
    """Return one hash of the settings that a job inherits: config, tokenizer, chat template.

    `files` are a manifest's, or `settings_in` a directory.
    """
    return digest({n: h for n, h in files.items() if _is_setting(n)}, 64)


def settings_in(directory: Path) -> dict[str, str]:
    """Return the settings files of a directory, not of its manifest: name -> SHA-256.

    Raises BadInput, also where a file is a link that leads out of the directory.
    """
    directory = directory.resolve()
    names = [n for n in foreign_model.names_in(directory, SUFFIXES) if _is_setting(n)]
    return {name: foreign_model.sha256_file(directory, name) for name in names}


def _is_setting(name: str) -> bool:
    """Tell whether a file is a setting, by exclusion: the names of a tokenizer's files vary."""
    read = Path(name).suffix in SUFFIXES - {".safetensors", ".md"} and name not in NO_SETTINGS
    return read and "/" not in name and not name.startswith(".") and not name.endswith(_INDEX)


def max_tokens(config: dict[str, Any]) -> int:
    """Return the longest sequence to train a model on, by its config.json. Raises BadInput.

    It is within the positions, the sliding window of a kind with native layers, and the length up
    to which RoPE's frequencies are constant. longrope changes them beyond the original length,
    dynamic beyond the positions. Of a model with a `text_config`, that decides.
    """
    native, text = config.get("model_type") in KINDS, config.get("text_config")
    config = {**config, **text} if isinstance(text, dict) else config
    positions = config.get("max_position_embeddings")
    if not isinstance(positions, int):
        message = "the model's config.json has no max_position_embeddings: it cannot be trained"
        raise BadInput(message, param="model")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    limits = [window] if native else []
    for one in (rope, *rope.values()):  # some have one for each type of layer
        if isinstance(one, dict) and one.get("rope_type", one.get("type")) == "longrope":
            name = "original_max_position_embeddings"
            limits.append(config.get(name) or one.get(name))
    most: int = min([positions, *filter(None, limits)])
    return most


class Pruned(Record):
    """The record of a removed checkpoint: its manifest, and the time of removal."""

    manifest: Manifest
    time: float = Field(default_factory=time.time)


def pruned_file(directory: Path) -> Path:
    """Return the path of the record that a removed checkpoint leaves."""
    return directory.with_name(f"{directory.name}.pruned")


def manifest_of(directory: Path) -> Manifest:
    """Read a checkpoint's manifest, also of a pruned one. Raises NotFound, Corrupt."""
    try:
        return read_manifest(directory)
    except NotFound:
        if (pruned := read_pruned(directory)) is None:
            raise
        return pruned.manifest


def refuse_pruned(directory: Path) -> None:
    """Raise NotFound, code `pruned`, where a checkpoint was removed. Raises Corrupt."""
    if (pruned := read_pruned(directory)) is not None:
        since = datetime.fromtimestamp(pruned.time, UTC).strftime("%Y-%m-%d %H:%M UTC")
        raise NotFound(
            f"the weights of {directory.name} were removed by `cray-agents maintain prune models`"
            f" ({since}): its records stay, but it can be neither served nor trained from; take"
            " another version, `cray-agents models list` shows which have their weights",
            param="checkpoint",
            code="pruned",
        )


def read_pruned(directory: Path) -> Pruned | None:
    """Read the record of a removed checkpoint; None while the checkpoint exists. Raises Corrupt."""
    return None if directory.is_dir() else checksums.find_record(Pruned, pruned_file(directory))


def config_sha256(directory: Path) -> str:
    """Return the hash of config.json, which identifies random initial weights.

    Raises NotFound, BadInput.
    """
    refuse_pruned(directory)
    read_config(directory)
    return foreign_model.sha256_file(directory.resolve(), CONFIG)


def read_manifest(directory: Path) -> Manifest:
    """Read a checkpoint's manifest. Raises NotFound without one, Corrupt if it cannot be read.

    A foreign manifest is not trusted: names that are paths are refused.
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


def stated_hashes(directory: Path) -> dict[str, str]:
    """Return the hashes of a directory's files by its manifest; empty where it has none to read."""
    try:
        return read_manifest(directory).files
    except (NotFound, Corrupt):
        return {}


def _check_names(manifest: Manifest) -> None:
    """Raise ValueError for a name that leads out of the directory."""
    for name in (*manifest.files, *delta_files(manifest)):
        steps = name.split("/")
        if len(steps) > 2 or not {"", ".", ".."}.isdisjoint(steps) or "\0" in name:
            raise ValueError(f"{name[:200]!r} is not the name of a file in it")
    parent = manifest.delta.parent if manifest.delta is not None else None
    for record in (manifest.job, manifest.dataset, parent, manifest.base):
        if record is not None and not _PLAIN.fullmatch(record):
            raise ValueError(f"{record[:200]!r} names no job, dataset or checkpoint")


def base_of(directory: Path) -> Path | None:
    """Return the checkpoint that an adapter version is over; None: the directory has weights.

    Raises NotFound, code `adapter_base`, where the base is gone, and Corrupt where it has become
    another one.
    """
    if not (directory / ADAPTER).is_dir() or not (directory / MANIFEST).is_file():
        return None
    manifest = read_manifest(directory)
    if manifest.base is None:
        return None
    base = directory.with_name(manifest.base)
    try:
        weights = read_manifest(base).weights_sha256
    except NotFound as error:
        raise NotFound(
            f"{directory.name} is an adapter over {base.name}, and that is gone: {error}",
            param="checkpoint",
            code="adapter_base",
        ) from error
    if weights != manifest.base_sha256:
        raise Corrupt(
            f"{directory} is an adapter over weights {manifest.base_sha256}, and {base} has"
            f" {weights}"
        )
    return base


def verify(directory: Path) -> Manifest:
    """Hash every file of the manifest, once a process; see runtime/disk/checksums.py.

    Several files are hashed at a time. Of a delta checkpoint that is not whole, the files of
    changes are hashed in place of the weights. The base of an adapter version is verified with it.
    Raises Corrupt, naming the first file that differs; NotFound where the base is gone.
    """
    manifest = read_manifest(directory)
    if (base := base_of(directory)) is not None:
        verify(base)
    files = dict(manifest.files)
    if manifest.delta is not None and not is_whole(directory, manifest):
        for name in weight_files(manifest):
            del files[name]
        files |= delta_files(manifest)
    with ThreadPoolExecutor(READERS) as threads:
        paths = [directory / name for name in files]
        for _ in threads.map(checksums.prove, paths, files.values()):
            pass
    return manifest


def weight_files(manifest: Manifest) -> list[str]:
    """Return the names of the files of weights, without an adapter's."""
    return [name for name in manifest.files if name.endswith(WEIGHTS) and "/" not in name]


def delta_files(manifest: Manifest) -> dict[str, str]:
    """Return the names and hashes of the files of changes; empty for a full checkpoint."""
    files = manifest.delta.files if manifest.delta is not None else {}
    return {f"{DELTA}/{name}": sha256 for name, sha256 in files.items()}


def is_whole(directory: Path, manifest: Manifest) -> bool:
    """Tell whether the files of weights are there."""
    return all((directory / name).is_file() for name in weight_files(manifest))


def verify_settings(directory: Path) -> None:
    """Hash config, tokenizer and chat template, if in the manifest. Raises Corrupt."""
    if (directory / MANIFEST).is_file():
        for name, expected in read_manifest(directory).files.items():
            if _is_setting(name):
                checksums.prove(directory / name, expected)


def _compare(path: Path, actual: str, expected: str) -> None:
    if actual != expected:
        raise Corrupt(
            f"{path} is not its manifest's: {checksums.describe(actual)}, and the manifest says"
            f" {expected}"
        )


def is_ours(home: Home, directory: Path) -> bool:
    """Tell by its path whether a directory is a checkpoint of this root."""
    plain = _PLAIN.fullmatch(directory.name) is not None
    return plain and directory.parent.resolve() == home.checkpoint("x").parent.resolve()


def take_in(home: Home, source: Path) -> tuple[str, Manifest]:
    """Copy a checkpoint under the home, unless it is there already; return its id and manifest.

    The files are verified by the manifest; a plain Hugging Face directory gets one. The same
    content gives the same id `hf-<hash>`. Raises BadInput, Corrupt.
    """
    if is_ours(home, source):
        return source.name, verify(source)
    manifest, changed = inspect(source)
    checkpoint_id = f"hf-{digest(manifest.files)}"
    target = home.checkpoint(checkpoint_id)
    if (target / MANIFEST).is_file():
        return checkpoint_id, verify(target)
    _copy(source.resolve(), target, manifest, changed, copy_mode(home))
    return checkpoint_id, verify(target)  # also proves the copy


def inspect(source: Path, *, with_manifest: bool = False) -> tuple[Manifest, dict[str, bytes]]:
    """Check a foreign directory; return its manifest, and the content of files to change.

    The copy's config.json is changed where it ties embedding and head, and these differ:
    transformers then leaves them separate, but the engine would tie them and serve another model.
    Of a directory whose code may run, references to it are made whole (foreign_model.py).

    Raises BadInput for a directory that cannot be a model. Examples are a bad config.json, weights
    that are cut off, missing, infinite or NaN, and a link that leads out. Raises Corrupt where a
    file differs from the directory's own manifest. Raises NotFound where `with_manifest` is set
    and there is no manifest.
    """
    source = source.resolve()
    own = _own_manifest(source)
    if own is not None and own.base is not None:
        raise BadInput(
            f"{source} is an adapter over {own.base} of another root: merge it there first"
            " (`cray-agents models export`), and bring what that makes",
            param="checkpoint",
        )
    if own is None and with_manifest:
        raise NotFound(f"{source} has no {MANIFEST}: it is not a checkpoint", param="checkpoint")
    names = own.files if own is not None else foreign_model.names_in(source, SUFFIXES)
    names = sorted(name for name in names if name != MANIFEST)
    _refuse_other_files(source, names)
    if CONFIG not in names:
        message = f"{source} has no {CONFIG}: it is no Hugging Face model directory"
        raise BadInput(message, param="checkpoint")
    if not any(name.endswith(WEIGHTS) for name in names):
        message = f"{source} has no *.safetensors; save the model with safetensors first"
        raise BadInput(message, param="checkpoint")
    config, weights = read_config(source), foreign_model.read_weights(source)
    for name in names:
        if name in _OBJECTS:
            foreign_model.read_json(source, name)
        elif not name.endswith(WEIGHTS):
            foreign_model.refuse_large(source, name)
    for name in {tensor.file for tensor in weights.values()} - set(names):
        raise BadInput(f"{source / name} is not named by its {MANIFEST}", param="checkpoint")
    stated = own.files if own is not None else {}
    files = {
        name: foreign_model.hash_weights(source, name, weights, stated.get(name, ""))
        if name.endswith(WEIGHTS)
        else foreign_model.sha256_file(source, name)
        for name in names
    }
    for name, expected in stated.items():
        if name != MANIFEST:
            _compare(source / name, files[name], expected)
    sha256 = weights_sha256(files)
    if own is not None and own.weights_sha256 != sha256:
        message = f"the weights in {source} have hash {sha256}, and its {MANIFEST} says another"
        raise Corrupt(message)
    changed = changes_of(source, config, weights)
    files |= {name: durable.sha256(content) for name, content in changed.items()}
    if own is not None:
        return own.model_copy(update={"files": files, "delta": None}), changed
    return Manifest(files=files, weights_sha256=sha256), changed


def changes_of(
    source: Path, config: dict[str, Any], weights: dict[str, foreign_model.Tensor]
) -> dict[str, bytes]:
    """Return the new content of files that are changed on import; see `inspect`."""
    changed = changed_settings(source)
    if config.get(TIED) and not is_tied(source, config, weights):
        changed[CONFIG] = {**changed.get(CONFIG, config), TIED: False}
    return {n: json.dumps(content, indent=2).encode() + b"\n" for n, content in changed.items()}


def _own_manifest(source: Path) -> Manifest | None:
    """Read a foreign directory's own manifest; None if it has none. Raises BadInput."""
    if not os.path.lexists(source / MANIFEST):
        return None
    content = foreign_model.read_json(source, MANIFEST)
    try:
        manifest = Manifest.model_validate(content)
        _check_names(manifest)
    except ValueError as error:
        message = f"{source / MANIFEST} is not a checkpoint's manifest: {error}"
        raise BadInput(message, param="checkpoint") from error
    return manifest


def _refuse_other_files(source: Path, names: Iterable[str]) -> None:
    for name in names:
        path = Path(name)
        if path.parts not in ((path.name,), (ADAPTER, path.name)) or path.suffix not in SUFFIXES:
            raise BadInput(
                f"{source} holds {name!r}, which is not taken in: only plain model files",
                param="checkpoint",
            )


def copy_mode(home: Home) -> int:
    """Return a copy's permission bits: the owner's, and the group's where the root has them."""
    mode = home.root.stat().st_mode if home.root.exists() else 0
    return 0o770 if mode & 0o070 == 0o070 and not mode & 0o007 else 0o700


def _copy(
    source: Path, target: Path, manifest: Manifest, changed: dict[str, bytes], access: int
) -> None:
    """Copy the manifest's files, and publish them; others may read them at no time."""
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
            with (
                foreign_model.open_file(source, name) as old,
                open(path, "wb", opener=opener) as new,
            ):
                shutil.copyfileobj(old, new, foreign_model.BLOCK)
            durable.sync(path)
        for folder in {(draft / name).parent for name in manifest.files}:
            durable.sync(folder)
        text = orjson.dumps(manifest.model_dump(mode="json"))
        durable.write_file(draft / MANIFEST, checksums.with_crc(text), access & 0o666)
        durable.publish_directory(draft, target)
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def find_leftovers(home: Home) -> list[Path]:
    """Return checkpoints that a killed process left half-written or half-deleted.

    A draft is left over after a day without changes, since imports and exports may still write
    it. A half-deleted checkpoint is left over at once; so is a rebuilt one that is whole by now.
    """
    folder, now = home.checkpoint("x").parent, time.time()
    hidden = [path for path in folder.glob(".*") if path.is_dir() and ASIDE not in path.name]
    return [
        path
        for path in hidden
        if OLD in path.name or _is_rebuilt(path) or now - _last_change(path, now) > DRAFT_SECONDS
    ]


def _is_rebuilt(draft: Path) -> bool:
    """Tell whether a draft is of a delta checkpoint that is whole without it, or is gone."""
    name, mark, _ = draft.name[1:].partition(f".{REBUILD}_")
    directory = draft.with_name(name)
    if not mark or not (directory / MANIFEST).is_file():
        return mark != ""
    try:
        return is_whole(directory, read_manifest(directory))
    except Corrupt:
        return False


def delete_leftovers(home: Home) -> int:
    """Delete leftovers; return the bytes that were freed."""
    return sum(remove(path) for path in find_leftovers(home))


def _last_change(folder: Path, now: float) -> float:
    """Return the time of the last change in a folder; `now`, if the folder is vanishing."""
    try:
        return max(path.lstat().st_mtime for path in (folder, *folder.rglob("*")))
    except FileNotFoundError:
        return now
