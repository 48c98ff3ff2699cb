"""Code version: a hash of all code of a job, which is part of the job's id (`JobSpec.code`)."""

import hashlib
import importlib.metadata
from contextlib import suppress
from pathlib import Path

TRAINERS = Path(__file__).resolve().parents[1]  # all code of a job


def code_version(folder: Path = TRAINERS) -> str:
    """Return a hash of a folder's code, with the versions of its libraries.

    Along with data and hyperparameters it decides a job's result.
    """
    digest = hashlib.sha256()
    for path in sorted(folder.rglob("*.py")):
        digest.update(path.relative_to(folder).as_posix().encode() + b"\0" + path.read_bytes())
    for package in ("megatron-core", "torch"):
        digest.update(f"{package} {importlib.metadata.version(package)}".encode())
    with suppress(importlib.metadata.PackageNotFoundError):
        digest.update(f"bridge {importlib.metadata.version('megatron-bridge')}".encode())
    return digest.hexdigest()[:16]
