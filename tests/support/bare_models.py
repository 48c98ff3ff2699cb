"""The smallest directory that the registry takes for a model: config and one tensor."""

import json
from pathlib import Path

from cray_agents.records import Manifest, ProbePrompt
from cray_agents.runtime.registry import checkpoints


def weights(content: bytes = b"weights") -> bytes:
    """A whole safetensors file that holds these bytes."""
    entry = {"dtype": "U8", "shape": [len(content)], "data_offsets": [0, len(content)]}
    header = json.dumps({"weights": entry}).encode()
    return len(header).to_bytes(8, "little") + header + content


def bare_model(directory: Path, content: bytes = b"weights") -> Path:
    """Written to a directory, which is made."""
    directory.mkdir(parents=True)
    (directory / "config.json").write_text("{}")
    (directory / "model.safetensors").write_bytes(weights(content))
    return directory


def provable_model(directory: Path, content: bytes) -> Path:
    """One that brings a golden probe, which scripted servers answer with: scripted_server.py."""
    bare_model(directory, content)
    files = checkpoints.hash_files(directory)
    manifest = Manifest(
        files=files,
        weights_sha256=checkpoints.weights_sha256(files),
        probe=[ProbePrompt(token_ids=[1, 2, 3], logprobs=[-1.0, -1.0 - len(content)])],
    )
    (directory / checkpoints.MANIFEST).write_text(manifest.model_dump_json())
    return directory
