"""Delta codec: the changed elements of one file of weights, packed into a small file.

    magic | head: bytes of the safetensors header, zstd | blocks
    block: tensor, first element, count, size | zstd of the places, then of the values

A block covers STEP elements of a tensor; a block without a change is left out. A place is coded as
its distance from the place before. Numbers are stored byte by byte (all lowest bytes first, and so
on), which zstd packs better. The values are the new ones, as stored. Nothing is verified here: the
manifest has the hash of each packed file and of each full one. Used inside vLLM (worker.py), by the
trainer's weight_files.py, and by runtime/registry/deltas.py.
"""

import json
import struct
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import zstandard

MAGIC = b"CRAYDLT1"
STEP = 1 << 22  # elements of a block; a place takes three bytes
LEVEL = 3
_BLOCK = struct.Struct("<IQII")
_PLACE_BYTES = 3
#: Bytes of an element, by the stored type's name.
_WIDTHS = {"BOOL": 1, "U8": 1, "I8": 1, "F8_E4M3": 1, "F8_E5M2": 1, "I16": 2, "U16": 2, "F16": 2}
_WIDTHS |= {"BF16": 2, "I32": 4, "U32": 4, "F32": 4, "I64": 8, "U64": 8, "F64": 8}

Words = npt.NDArray[Any]  # elements as unsigned integers of their width


class BadPacking(ValueError):
    """A packed file is damaged, or none."""


def words_of(dtype: str) -> np.dtype[Any]:
    """Return the type of a stored type's elements as unsigned integers; bytes where unknown."""
    return np.dtype(f"<u{_WIDTHS.get(dtype, 1)}")


@dataclass(frozen=True)
class Entry:
    """A tensor of a file of weights: its bytes `start` to `end` after the file's header."""

    name: str
    dtype: str
    shape: tuple[int, ...]
    start: int
    end: int

    @property
    def words(self) -> np.dtype[Any]:
        """The type of its elements as unsigned integers."""
        return words_of(self.dtype)


def entries_of(header: bytes) -> list[Entry]:
    """Return the tensors of a safetensors header (with its length before it), in their order."""
    tensors = json.loads(header[8:])
    tensors.pop("__metadata__", None)
    entries = [
        Entry(name, one["dtype"], tuple(one["shape"]), *one["data_offsets"])
        for name, one in tensors.items()
    ]
    return sorted(entries, key=lambda entry: (entry.start, entry.end))


def pack_header(header: bytes) -> bytes:
    """Return the beginning of a packed file."""
    packed = _compress(header)
    return MAGIC + len(packed).to_bytes(4, "little") + packed


def pack_changes(tensor: int, new: Words, old: Words | None) -> Iterator[bytes]:
    """Yield the blocks of the elements that differ; of all elements without `old`."""
    for first in range(0, len(new), STEP):
        step = new[first : first + STEP]
        if old is None:
            places = np.arange(len(step), dtype=np.int64)
        else:
            places = np.flatnonzero(step != old[first : first + STEP])
        if not len(places):
            continue
        gaps = np.diff(places, prepend=-1).astype("<u4") - 1
        packed = _compress(_planes(gaps)[: _PLACE_BYTES * len(gaps)] + _planes(step[places]))
        yield _BLOCK.pack(tensor, first, len(places), len(packed)) + packed


def unpack(content: bytes) -> tuple[bytes, list[Entry], Iterator[tuple[int, Words, Words]]]:
    """Return a packed file's header, its tensors, and its changes.

    A change is (the tensor's number, flat places, new values). Raises BadPacking.
    """
    if content[: len(MAGIC)] != MAGIC:
        raise BadPacking("it is no packed file of changed weights")
    try:
        start = len(MAGIC) + 4
        end = start + int.from_bytes(content[len(MAGIC) : start], "little")
        header = _decompress(content[start:end])
        entries = entries_of(header)
    except (ValueError, KeyError, TypeError, zstandard.ZstdError) as error:
        raise BadPacking(f"its header cannot be read: {error}") from error
    return header, entries, _unpack_blocks(content, end, entries)


def whole_bytes(path: Path) -> int:
    """Return the size of the file of weights whose changes a packed file holds.

    Reads the head alone. Raises BadPacking.
    """
    with path.open("rb") as file:
        start = file.read(len(MAGIC) + 4)
        head = file.read(int.from_bytes(start[len(MAGIC) :], "little"))
    header, entries, _ = unpack(start + head)
    return len(header) + max((entry.end for entry in entries), default=0)


def _unpack_blocks(
    content: bytes, at: int, entries: list[Entry]
) -> Iterator[tuple[int, Words, Words]]:
    try:
        while at < len(content):
            tensor, first, count, size = _BLOCK.unpack_from(content, at)
            at += _BLOCK.size
            words = entries[tensor].words
            raw = _decompress(content[at : at + size])
            at += size
            split = _PLACE_BYTES * count
            planes = np.zeros((4, count), np.uint8)
            planes[:_PLACE_BYTES] = np.frombuffer(raw[:split], np.uint8).reshape(-1, count)
            gaps = planes.T.copy().view("<u4").ravel()
            places = np.cumsum(gaps.astype(np.int64) + 1) + (first - 1)
            values = np.frombuffer(raw[split:], np.uint8).reshape(words.itemsize, count)
            if places[-1] >= (entries[tensor].end - entries[tensor].start) // words.itemsize:
                raise ValueError("a place lies beyond its tensor")
            yield tensor, places, values.T.copy().view(words).ravel()
    except (ValueError, IndexError, struct.error, zstandard.ZstdError) as error:
        raise BadPacking(f"its changes cannot be read: {error}") from error


def by_tensor(content: bytes) -> Iterator[tuple[Entry, Words, Words]]:
    """Yield (tensor, all its changed places, new values) of a packed file. Raises BadPacking."""
    _, entries, changes = unpack(content)
    changes_of: dict[int, list[tuple[Words, Words]]] = {}
    for tensor, places, values in changes:
        changes_of.setdefault(tensor, []).append((places, values))
    for tensor, pieces in changes_of.items():
        places, values = (np.concatenate(side) for side in zip(*pieces, strict=True))
        yield entries[tensor], places, values


def _planes(words: Words) -> bytes:
    """Return the bytes of numbers, all lowest ones first."""
    width = words.dtype.itemsize
    return words.view(np.uint8).reshape(-1, width).T.tobytes() if len(words) else b""


def _compress(content: bytes) -> bytes:
    return zstandard.ZstdCompressor(level=LEVEL).compress(content)


def _decompress(content: bytes) -> bytes:
    return zstandard.ZstdDecompressor().decompress(content)


def elements(content: Mapping[str, Words], entry: Entry) -> Words | None:
    """Return a tensor's old elements, if there are as many of the same type."""
    old = content.get(entry.name)
    count = (entry.end - entry.start) // entry.words.itemsize
    return old if old is not None and len(old) == count else None
