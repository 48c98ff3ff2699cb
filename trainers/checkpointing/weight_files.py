"""Weight files: write tensors as safetensors files, and hash the files while they are written.

Each file is as safetensors' own writer makes it, byte for byte: larger types first, then by name. A
tensor is written when it comes, so that memory holds a bounded part of a file. Two threads hash and
write at the same time, in small blocks that stay in the processor's cache. The disk is asked early
to begin, and is busy from the start to the end. A DeltaFile takes the same bytes, and stores only
what changed in the parent's weights. Called by hf_export.py. Read next:
runtime/vllm_plugins/delta_codec.py.
"""

import hashlib
import json
import os
from collections import defaultdict, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from math import prod
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import numpy as np
import torch

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

BLOCK = 1 << 20  # bytes hashed and written at a time
AHEAD_BYTES = 256 << 20  # that wait for the disk
BEGIN_BYTES = 32 << 20  # written before the disk is asked to begin with them
# stored types in safetensors' order
_NAMES = {
    torch.int64: "I64",
    torch.float64: "F64",
    torch.float32: "F32",
    torch.int32: "I32",
    torch.bfloat16: "BF16",
    torch.float16: "F16",
    torch.int16: "I16",
    torch.int8: "I8",
    torch.uint8: "U8",
    torch.bool: "BOOL",
}
_ORDER = {dtype: place for place, dtype in enumerate(_NAMES)}
LARGEST_SHARE = 0.5  # of the full size, in bytes; above it the full files are written


class DeltaFile:
    """The packed changes of one file of weights, which is given from its header on.

    The elements that differ from the parent's are written. The whole is hashed, and never written.

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


def in_file_order(dtypes: Mapping[str, torch.dtype]) -> list[str]:
    """Return the tensors' names in the order of a file, which keeps each one aligned."""
    return sorted(dtypes, key=lambda name: (_ORDER[dtypes[name]], name))


def write_files(
    folder: Path,
    files: Mapping[str, Sequence[str]],
    shapes: Mapping[str, tuple[int, ...]],
    dtypes: Mapping[str, torch.dtype],
    tensors: Iterator[tuple[str, torch.Tensor]],
    open_file: "Callable[[Path], _HashedFile | DeltaFile] | None" = None,
) -> dict[str, str]:
    """Write and fsync files of named tensors; return each file's BLAKE3.

    `open_file` may open another kind of file, such as DeltaFile. `tensors` yields them in nearly
    the same order, whole or in pieces along axis 0: what comes early is kept. They are read to
    their end. Raises OSError, as of a full disk.
    """
    hashes: dict[str, str] = {}
    early: dict[str, deque[torch.Tensor]] = defaultdict(deque)
    try:
        for file, names in files.items():
            with (open_file or _HashedFile)(folder / file) as written:
                written.write(_header({name: (dtypes[name], shapes[name]) for name in names}))
                for name in names:
                    missing = prod(shapes[name])
                    while missing:
                        while not early[name]:
                            came, tensor = next(tensors)
                            early[came].append(tensor.to("cpu", dtypes[came]).contiguous())
                        piece = early[name].popleft().reshape(-1)
                        written.write(piece.view(torch.uint8).numpy().data)
                        missing -= len(piece)
            hashes[file] = written.hash
    finally:
        deque(tensors, maxlen=0)  # the peers' own files need this rank's slices
    return hashes


def _header(tensors: Mapping[str, tuple[torch.dtype, tuple[int, ...]]]) -> memoryview:
    """Return the head of a safetensors file: its length, and JSON padded to 8 bytes."""
    entries: dict[str, Any] = {"__metadata__": {"format": "pt"}}
    end = 0
    for name, (dtype, shape) in tensors.items():
        start, end = end, end + prod(shape) * dtype.itemsize
        entries[name] = {"dtype": _NAMES[dtype], "shape": shape, "data_offsets": (start, end)}
    text = json.dumps(entries, separators=(",", ":"), ensure_ascii=False).encode()
    text += b" " * (-len(text) % 8)
    return memoryview(len(text).to_bytes(8, "little") + text)


class _HashedFile:
    """A new file that one thread hashes and another writes, while its writer goes on."""

    def __init__(self, path: Path) -> None:
        self._file = path.open("xb", buffering=0)
        self._hasher = FileHash(BLAKE3)
        self._hashing, self._writing = ThreadPoolExecutor(1), ThreadPoolExecutor(1)
        self._pending: deque[tuple[Future[None], Future[None], int]] = deque()
        self._pending_bytes = 0
        self._written = self._begun = 0

    @property
    def hash(self) -> str:
        """The BLAKE3 of what was written."""
        return str(self._hasher)

    def write(self, content: memoryview) -> None:
        """Take the next bytes, which must not change until the file is closed. Raises OSError."""
        hashed = self._hashing.submit(self._hash, content)
        self._pending.append((hashed, self._writing.submit(self._write, content), len(content)))
        self._pending_bytes += len(content)
        while self._pending_bytes > AHEAD_BYTES:
            self._settle()

    def _settle(self) -> None:
        hashed, written, size = self._pending.popleft()
        hashed.result()
        written.result()
        self._pending_bytes -= size

    def _hash(self, content: memoryview) -> None:
        for start in range(0, len(content), BLOCK):
            self._hasher.update(content[start : start + BLOCK])

    def _write(self, content: memoryview) -> None:
        for start in range(0, len(content), BLOCK):
            block = content[start : start + BLOCK]
            while block:
                count = self._file.write(block)
                block = block[count:]
                self._written += count
            if (size := self._written - self._begun) >= BEGIN_BYTES:
                # Linux begins to write these bytes, without waiting, and keeps them in memory
                os.posix_fadvise(self._file.fileno(), self._begun, size, os.POSIX_FADV_DONTNEED)
                self._begun = self._written

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        at: TracebackType | None,
    ) -> None:
        try:
            while self._pending and error is None:
                self._settle()
        finally:
            for thread in (self._hashing, self._writing):
                thread.shutdown(cancel_futures=True)
            with self._file:
                if error is None:
                    os.fsync(self._file.fileno())
