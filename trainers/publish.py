"""How training puts files on the shared root: whole or not at all, and named by their content.

The journal, resume points and exports are all published here: bytes are fsynced before the rename
that makes them visible, so that a reader never meets half of anything. No locks, no torch.
Read next: journal.py, a job's folder.
"""

import hashlib
import os
from pathlib import Path

from cray_agents.errors import NotFound
from cray_agents.records import digest


def sync_folder(folder: Path) -> None:
    """Make the names in a folder durable."""
    handle = os.open(folder, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def sync_file(path: Path) -> None:
    """Make a file's bytes durable."""
    handle = os.open(path, os.O_RDONLY)
    try:
        os.fsync(handle)
    finally:
        os.close(handle)


def write_atomically(path: Path, content: bytes) -> None:
    """Put `content` at `path`: readers see the old file or the whole new one."""
    path.parent.mkdir(parents=True, exist_ok=True)
    draft = path.with_name(f".{path.name}.{os.getpid()}")
    with draft.open("wb") as file:
        file.write(content)
        file.flush()
        os.fsync(file.fileno())
    draft.replace(path)
    sync_folder(path.parent)


def create_exclusively(path: Path, content: bytes) -> bool:
    """Create `path` with `content`; False if somebody else did before."""
    path.parent.mkdir(parents=True, exist_ok=True)
    try:
        with path.open("xb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
    except FileExistsError:
        return False
    sync_folder(path.parent)
    return True


def publish_folder(draft: Path, final: Path) -> bool:
    """Rename a finished folder into place; False if the name is taken (published folders stay)."""
    for file in draft.iterdir():
        sync_file(file)
    sync_folder(draft)
    final.parent.mkdir(parents=True, exist_ok=True)
    try:
        draft.rename(final)
    except OSError:
        if final.exists():
            return False
        raise
    sync_folder(final.parent)
    return True


def file_sha256(path: Path) -> str:
    """The SHA-256 of a file, as 64 hex digits."""
    with path.open("rb") as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def hash_files(folder: Path) -> dict[str, str]:
    """File name -> SHA-256, for every plain file directly in a folder but its manifest."""
    return {
        path.name: file_sha256(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != "manifest.json"
    }


def combine_weights(files: dict[str, str]) -> str:
    """One hash for a checkpoint's weights, from the hashes of its safetensors files."""
    return digest({n: h for n, h in files.items() if n.endswith(".safetensors")}, 64)


def weights_sha256(checkpoint: Path) -> str:
    """The hash that names a checkpoint directory's weights (`JobSpec.parent_sha256`).

    Raises NotFound when the directory holds no safetensors.
    """
    files = {p.name: file_sha256(p) for p in sorted(checkpoint.glob("*.safetensors"))}
    if not files:
        raise NotFound(f"{checkpoint} holds no *.safetensors: give a Hugging Face checkpoint")
    return combine_weights(files)
