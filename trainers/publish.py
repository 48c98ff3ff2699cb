"""How training puts files on the shared root: whole or not at all, and named by their content.

The journal, resume points and exports are published here, over runtime/durable.py: bytes are
fsynced before the rename that makes them visible. Read next: journal.py, a job's folder.
"""

from pathlib import Path

from cray_agents.errors import NotFound
from cray_agents.runtime import checkpoints, durable


def publish_folder(draft: Path, final: Path) -> bool:
    """Rename a finished folder into place; False if the name is taken (published folders stay)."""
    for file in draft.iterdir():
        durable.sync(file)
    final.parent.mkdir(parents=True, exist_ok=True)
    return durable.publish_directory(draft, final)


def hash_files(folder: Path) -> dict[str, str]:
    """File name -> SHA-256, for every plain file directly in a folder but its manifest."""
    return {
        path.name: durable.sha256_file(path)
        for path in sorted(folder.iterdir())
        if path.is_file() and path.name != checkpoints.MANIFEST
    }


def weights_sha256(checkpoint: Path) -> str:
    """The hash that names a checkpoint directory's weights (`JobSpec.parent_sha256`).

    Computed from the files, whatever a manifest says. Raises NotFound without safetensors.
    """
    files = {p.name: durable.sha256_file(p) for p in sorted(checkpoint.glob("*.safetensors"))}
    if not files:
        raise NotFound(f"{checkpoint} holds no *.safetensors: give a Hugging Face checkpoint")
    return checkpoints.weights_sha256(files)
