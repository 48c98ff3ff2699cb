"""Delta checkpoints: a version stored as what changed in its parent, and made whole when needed.

A delta checkpoint is a checkpoint directory without its files of weights:

    checkpoints/<id>/manifest.json   of the full result: the hashes of all its files; `delta`: the
                                     parent's id, and the hashes of the files below
    checkpoints/<id>/delta/<file>    what changed in <file>: see vllm_plugins/delta_codec.py
    checkpoints/<id>/config.json...  as in any checkpoint

`materialize` adds the files of weights to the directory; nothing else changes then. `shadow` makes
a whole copy on this host's own disk, to be served. Both write the parent's tensors with the changes
put in, and compare the hash of each file with the manifest. Written by the trainer's
weight_files.py. The platform makes a version whole before it is promoted or trained from. Read
next: runtime/vllm_plugins/delta_codec.py.
"""

import fcntl
import logging
import os
import shutil
from collections import deque
from collections.abc import Collection, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from pathlib import Path
from typing import TYPE_CHECKING, Any, BinaryIO

from cray_agents.errors import Corrupt, CrayError, NotFound
from cray_agents.paths import Home
from cray_agents.records import Manifest, new_id
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import foreign_model
from cray_agents.runtime.registry.checkpoints import (
    DELTA,
    MANIFEST,
    READERS,
    REBUILD,
    base_of,
    is_ours,
    is_whole,
    read_manifest,
    refuse_pruned,
    weight_files,
)

if TYPE_CHECKING:
    from cray_agents.runtime.vllm_plugins.delta_codec import Words

LOCK = "lock"  # the file that a living process has locked in its folder of copies
log = logging.getLogger(__name__)


class Parent:
    """The tensors of a whole checkpoint, read when they are asked for.

    Used as a context manager.
    """

    def __init__(self, directory: Path) -> None:
        self.tensors: Mapping[str, Words] = {}
        self._directory = directory.resolve()
        self._open = ExitStack()

    def __enter__(self) -> "Parent":
        stored = foreign_model.read_weights(self._directory)
        files = {
            file: self._open.enter_context(foreign_model.open_file(self._directory, file)).fileno()
            for file in {tensor.file for tensor in stored.values()}
        }
        self.tensors = _StoredWords(stored, files)
        return self

    def __exit__(self, *error: object) -> None:
        self.tensors = {}
        self._open.close()


class _StoredWords(Mapping[str, "Words"]):
    """Tensors of open files as unsigned integers. Each look reads a tensor anew.

    The files are not mapped into memory: a shared filesystem may lose them, which would end the
    process. `stored` is as `foreign_model.read_weights` returns it.
    """

    def __init__(self, stored: Mapping[str, Any], files: Mapping[str, int]) -> None:
        self._stored, self._files = stored, files

    def __getitem__(self, name: str) -> "Words":
        import numpy as np

        from cray_agents.runtime.vllm_plugins.delta_codec import words_of

        tensor = self._stored[name]
        content = np.empty(tensor.end - tensor.start, np.uint8)
        left, place = content.data, tensor.start
        while left:
            count = os.preadv(self._files[tensor.file], [left], place)
            if not count:
                raise Corrupt(f"{tensor.file} ends before its tensor {name}")
            left, place = left[count:], place + count
        return content.view(words_of(tensor.dtype))

    def __iter__(self) -> Iterator[str]:
        return iter(self._stored)

    def __len__(self) -> int:
        return len(self._stored)


def read_delta(directory: Path, file: str, sha256: str) -> bytes:
    """Return a packed file of a delta checkpoint, verified. Raises Corrupt."""
    path = directory / DELTA / file
    try:
        content = path.read_bytes()
    except FileNotFoundError as error:
        raise Corrupt(f"{path} is missing") from error
    if (actual := durable.sha256(content)) != sha256:
        raise Corrupt(f"{path} is damaged: its SHA-256 is {actual}, and it was {sha256}")
    return content


def build(directory: Path, manifest: Manifest, parent: Path, target: Path) -> None:
    """Write a delta checkpoint's files of weights into a folder, several at a time.

    `parent` is a whole checkpoint. Raises Corrupt where a file is not what the manifest says.
    """
    delta = manifest.delta
    assert delta is not None
    with Parent(parent) as base, ThreadPoolExecutor(READERS) as threads:

        def write(file: str) -> None:
            content = read_delta(directory, file, delta.files.get(file, ""))
            with (target / file).open("xb") as out:
                hasher = checksums.FileHash(manifest.files[file])
                _write_file(content, base, out, directory / DELTA / file, hasher)
            if (actual := str(hasher)) != manifest.files[file]:
                raise Corrupt(
                    f"{directory.name} is not rebuilt: {parent.name} with its changes gives"
                    f" {file} the hash {actual}, and the manifest says {manifest.files[file]}."
                    f" One of them is damaged: `cray-agents maintain fsck` tells which"
                )

        for _ in threads.map(write, weight_files(manifest)):
            pass


def _write_file(
    content: bytes, base: Parent, out: BinaryIO, place: Path, hasher: checksums.FileHash
) -> None:
    """Write and hash one file of weights."""
    import numpy as np

    from cray_agents.runtime.vllm_plugins import delta_codec

    try:
        header, entries, changes = delta_codec.unpack(content)
        hasher.update(header)
        out.write(header)
        tensor, places, values = next(changes, (-1, None, None))
        for number, entry in enumerate(entries):
            count = (entry.end - entry.start) // entry.words.itemsize
            old = delta_codec.elements(base.tensors, entry)
            for first in range(0, count, delta_codec.STEP):
                size = min(delta_codec.STEP, count - first)
                if old is None:
                    step = np.zeros(size, entry.words)
                else:
                    step = old[first : first + size].astype(entry.words)
                if tensor == number and places is not None and places[0] < first + size:
                    step[places - first] = values
                    tensor, places, values = next(changes, (-1, None, None))
                hasher.update(step.data)
                out.write(step.data)
    except (delta_codec.BadPacking, IndexError) as error:
        raise Corrupt(f"{place} is damaged: {error}") from error
    out.flush()
    os.fsync(out.fileno())


def materialize(home: Home, directory: Path) -> Path:
    """Make a checkpoint of this root whole, and return its directory; whole ones are left alone.

    Its ancestors are made whole on the way. A process that is killed leaves a delta checkpoint, and
    a draft: whoever makes the checkpoint whole deletes it (see also `find_leftovers`). Raises
    NotFound, code `delta_parent`, where the parent's weights are gone; Corrupt.
    """
    if not is_ours(home, directory) or not (directory / MANIFEST).is_file():
        return directory
    manifest = read_manifest(directory)
    if manifest.delta is None or is_whole(directory, manifest):
        return directory
    parent = materialize(home, _parent_of(home, directory, manifest))
    draft = directory.with_name(f".{directory.name}.{new_id(REBUILD)}")
    draft.mkdir(parents=True)
    try:
        build(directory, manifest, parent, draft)
        for file in weight_files(manifest):
            (draft / file).replace(directory / file)
        durable.sync(directory)
    except FileNotFoundError:  # another process was first, and deleted this draft
        if not is_whole(directory, manifest):
            raise
    finally:
        shutil.rmtree(draft, ignore_errors=True)
    for other in directory.parent.glob(f".{directory.name}.{REBUILD}_*"):
        shutil.rmtree(other, ignore_errors=True)
    return directory


def _parent_of(home: Home, directory: Path, manifest: Manifest) -> Path:
    assert manifest.delta is not None
    parent = home.checkpoint(manifest.delta.parent)
    try:
        refuse_pruned(parent)
        origin = read_manifest(parent)
    except NotFound as error:
        raise NotFound(
            f"{directory.name} holds what changed in {parent.name} alone, and the weights of"
            f" {parent.name} are gone: {error}",
            param="checkpoint",
            code="delta_parent",
        ) from error
    if origin.weights_sha256 != manifest.delta.parent_weights_sha256:
        raise Corrupt(
            f"{directory.name} holds what changed in weights {manifest.delta.parent_weights_sha256}"
            f", and {parent} has {origin.weights_sha256}"
        )
    return parent


class Shadows:
    """Whole copies of delta checkpoints on this host, for its replicas to load.

    They are in a folder of their own in `place`, with a file that this process keeps locked. The
    kernel unlocks it when the process ends, in whatever container that ran. Folders of ended
    processes are deleted. Raises OSError.
    """

    def __init__(self, home: Home, place: Path) -> None:
        self._home = home
        self._folder = place / new_id("copies")
        self._recent: deque[Path] = deque(maxlen=4)  # perhaps not yet on their replicas
        draft = self._folder.with_name(f".{self._folder.name}")
        draft.mkdir(parents=True, mode=0o700)
        self._lock = os.open(draft / LOCK, os.O_CREAT | os.O_RDWR, 0o600)
        fcntl.flock(self._lock, fcntl.LOCK_EX)
        draft.rename(self._folder)  # nobody sees the folder before it is locked
        for other in place.glob("*"):
            is_draft = other.name.startswith(".") and durable.OLD not in other.name
            if not is_draft and not _is_locked(other / LOCK):
                durable.remove(other)

    def remove(self) -> None:
        """Delete all copies."""
        durable.remove(self._folder)
        os.close(self._lock)

    def directory(self, checkpoint: Path) -> Path:
        """Return a whole directory of a checkpoint: its own, else a copy, made now if need be.

        Raises NotFound, Corrupt: see `materialize`.
        """
        manifest = read_manifest(checkpoint)
        if manifest.delta is None or is_whole(checkpoint, manifest):
            return checkpoint
        shadow = self._folder / checkpoint.name
        self._recent.append(shadow)
        if (shadow / MANIFEST).is_file() and read_manifest(shadow) == manifest:
            return shadow
        try:
            return self._copy(checkpoint, manifest, shadow)
        except CrayError as error:
            if is_whole(checkpoint, manifest):  # made whole meanwhile
                log.warning("%s is loaded from its full checkpoint: %s", checkpoint.name, error)
                return checkpoint
            raise

    def _copy(self, checkpoint: Path, manifest: Manifest, shadow: Path) -> Path:
        parent = self.directory(_parent_of(self._home, checkpoint, manifest))
        durable.remove(shadow)
        draft = self._folder / f".{shadow.name}.{new_id('draft')}"
        draft.mkdir(parents=True, mode=0o700)
        try:
            weights = set(weight_files(manifest))
            for name in (*(n for n in manifest.files if n not in weights), *_delta_names(manifest)):
                (draft / name).parent.mkdir(exist_ok=True)
                shutil.copyfile(checkpoint / name, draft / name)
            build(checkpoint, manifest, parent, draft)
            durable.replace_file(draft / MANIFEST, checksums.record_text(manifest))
            durable.publish_directory(draft, shadow)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
        return shadow

    def sweep(self, used: Collection[Path]) -> None:
        """Delete the copies that no replica uses, but for the newest."""
        for path in self._folder.glob("*"):
            if path not in used and path not in self._recent and path.is_dir():
                durable.remove(path)


def _is_locked(path: Path) -> bool:
    """Tell whether a living process has locked a file; False if there is none."""
    try:
        handle = os.open(path, os.O_RDWR)
    except FileNotFoundError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError:
        return True
    finally:
        os.close(handle)
    return False


def _delta_names(manifest: Manifest) -> Iterator[str]:
    assert manifest.delta is not None
    return (f"{DELTA}/{file}" for file in manifest.delta.files)


def rebuilt_bytes(checkpoint: Path) -> int:
    """Return the size of the files of weights that a checkpoint holds or would be rebuilt to.

    Of an adapter version those of its base. Raises Corrupt, NotFound.
    """
    from cray_agents.runtime.vllm_plugins import delta_codec

    if (base := base_of(checkpoint)) is not None:
        return rebuilt_bytes(base)
    sizes = {path.name: path.stat().st_size for path in checkpoint.glob("*.safetensors")}
    for path in (checkpoint / DELTA).glob("*.safetensors"):
        if path.name not in sizes:
            try:
                sizes[path.name] = delta_codec.whole_bytes(path)
            except delta_codec.BadPacking as error:
                raise Corrupt(f"{path} is damaged: {error}") from error
    return sum(sizes.values())


def changes_from(checkpoint: Path, weights_sha256: str) -> dict[str, str]:
    """Return the files of changes in these weights, and their hashes; empty if there are none."""
    try:
        delta = read_manifest(checkpoint).delta
    except (NotFound, Corrupt):
        return {}
    return (
        delta.files if delta is not None and delta.parent_weights_sha256 == weights_sha256 else {}
    )
