"""Delta export: write what changed in the parent's weights, and hash the files that result.

A `DeltaFile` takes the bytes of a file of weights. It writes the elements that differ from the
parent's into `delta/`, and hashes the whole, which is never written. Every rank does so for its
share of the tensors. The parent's values are read from its files. Called by hf_export.py. Read
next: runtime/vllm_plugins/delta_codec.py.
"""

import hashlib
import os
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Self

import numpy as np

from cray_agents.runtime.disk.checksums import BLAKE3, FileHash
from cray_agents.runtime.registry.checkpoints import DELTA
from cray_agents.runtime.vllm_plugins.delta_codec import (
    Entry,
    Words,
    elements,
    entries_of,
    pack_changes,
    pack_header,
)

LARGEST_SHARE = 0.5  # of the full size, in bytes; above it the full files are written


class DeltaFile:
    """The packed changes of one file of weights, which is given from its header on.

    `base` are the parent's tensors. The file is `delta/<name>` beside `path`.
    """

    def __init__(self, path: Path, base: Mapping[str, Words]) -> None:
        folder = path.parent / DELTA
        folder.mkdir(exist_ok=True)
        self._file = (folder / path.name).open("xb")
        self._base = base
        self._whole, self._packed = FileHash(BLAKE3), hashlib.sha256()
        self._entries: list[Entry] | None = None
        self._number = 0
        self.size = 0

    @property
    def hash(self) -> str:
        """The BLAKE3 of the whole file."""
        return str(self._whole)

    @property
    def packed_sha256(self) -> str:
        """The hex SHA-256 of the packed file."""
        return self._packed.hexdigest()

    def write(self, content: memoryview) -> None:
        """Take the header, then one tensor after the other. Raises OSError."""
        self._whole.update(content)
        if self._entries is None:
            header = bytes(content)
            self._entries = entries_of(header)
            self._put(pack_header(header))
            return
        entry = self._entries[self._number]
        new = np.frombuffer(content, entry.words)
        for block in pack_changes(self._number, new, elements(self._base, entry)):
            self._put(block)
        self._number += 1

    def _put(self, packed: bytes) -> None:
        self._packed.update(packed)
        self._file.write(packed)
        self.size += len(packed)

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        with self._file:
            if error is None:
                self._file.flush()
                os.fsync(self._file.fileno())
