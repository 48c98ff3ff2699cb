"""A delta checkpoint of 1 GB: its size, and the time to apply it against that of a full load."""

import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np

from bench.rounds import row, side_by_side
from cray_agents.paths import Home
from cray_agents.runtime.disk import durable
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.runtime.registry.deltas import Parent, Shadows, read_delta
from cray_agents.runtime.vllm_plugins.delta_codec import by_tensor
from tests.support.delta_checkpoints import bfloat16, changed, full, with_changes

TENSORS, ELEMENTS = 16, 1 << 25  # of 64 MiB each, in bfloat16
SHARE = 0.01
FILE = "model.safetensors"


async def main(home: Path) -> None:
    """Rows: sizes; verified changes put into tensors in memory; a copy on disk; loads of all.

    All files are in the page cache. Both sides hash what they read, as replicas do.
    """
    root = Home(home)
    before = {f"layer.{n}": bfloat16(ELEMENTS, n) for n in range(TENSORS)}
    after = {name: with_changes(words, SHARE, 50) for name, words in before.items()}
    parent = full(root, "parent", {FILE: before})
    size = (parent / FILE).stat().st_size
    del before
    began = time.perf_counter()
    child, sizes = changed(root, "child", "parent", {FILE: after})
    row(
        f"delta of {SHARE:.0%} changed of {size / 1e9:.2f} GB in bfloat16",
        "size; time to write it, with the SHA-256 of the full file",
        f"{sizes[FILE] / size:.2%} of the full size; {time.perf_counter() - began:.2f} s",
    )
    del after
    held = _load(parent)
    delta = read_manifest(child).delta
    assert delta is not None
    sha256 = delta.files[FILE]

    def patch() -> None:
        for entry, places, values in by_tensor(read_delta(child, FILE, sha256)):
            held[entry.name][places] = values

    def copy() -> None:
        shadows = Shadows(root, home / "shadows" / "1")
        shadows.directory(child)
        shadows.remove()

    def load() -> None:
        durable.sha256_file(parent / FILE)
        _load(parent)

    what = f"load of {size / 1e9:.2f} GB whose last {SHARE:.0%} changed"
    measures = {
        "changes put in place": _timed(patch),
        "copy made whole on disk": _timed(copy),
        "all loaded": _timed(load),
    }
    await side_by_side(what, "s", measures)


def _load(directory: Path) -> dict[str, Any]:
    """Read all tensors into memory."""
    with Parent(directory) as stored:
        return {name: np.array(words) for name, words in stored.tensors.items()}


def _timed(act: Callable[[], None]) -> Any:
    async def measure() -> float:
        began = time.perf_counter()
        act()
        return time.perf_counter() - began

    return measure
