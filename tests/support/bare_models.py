"""The smallest directory that the registry takes for a model: config and one tensor."""

import json
from pathlib import Path


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
