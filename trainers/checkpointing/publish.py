"""How training puts files on the shared root: whole or not at all, and named by their content.

Exported checkpoints are published here, over runtime/durable.py: bytes are fsynced before the
rename that makes them visible. Read next: journal.py, a job's folder; saving.py, resume points.
"""

from pathlib import Path

from cray_agents.errors import NotFound
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.registry import checkpoints


def publish_folder(draft: Path, final: Path) -> bool:
    """Rename a finished folder into place; False if the name is taken (published folders stay)."""
    for path in draft.rglob("*"):
        durable.sync(path)
    final.parent.mkdir(parents=True, exist_ok=True)
    return durable.publish_directory(draft, final)


def hash_files(folder: Path) -> dict[str, str]:
    """Name within a folder -> SHA-256, for all plain files there and below but its manifest."""
    files = {p.relative_to(folder).as_posix(): p for p in sorted(folder.rglob("*")) if p.is_file()}
    return {n: durable.sha256_file(p) for n, p in files.items() if n != checkpoints.MANIFEST}


def weights_sha256(checkpoint: Path) -> str:
    """The hash that names a checkpoint directory's weights (`JobSpec.parent_sha256`).

    Computed from the files, whatever a manifest says. Raises NotFound without safetensors.
    """
    files = {p.name: checksums.sha256_of(p) for p in sorted(checkpoint.glob("*.safetensors"))}
    if not files:
        raise NotFound(f"{checkpoint} holds no *.safetensors: give a Hugging Face checkpoint")
    return checkpoints.weights_sha256(files)


def parent_sha256(checkpoint: Path, init: str) -> str:
    """`JobSpec.parent_sha256`: of the weights, or of the config where they start at random."""
    return checkpoints.config_sha256(checkpoint) if init == "random" else weights_sha256(checkpoint)
