"""Stored tokens: the samples of documents on this host's own disk, read as steps take them.

A set of documents may be larger than memory. The first process of a host that trains on it writes
the tokens of its shards, which it verifies, into a folder of the host's cache
($CRAY_AGENTS_CACHE), `tokens/<dataset>-<split>-<hash of the shards>/`:

    tokens      int32, one sample after another
    samples     tokens and CRC-32 of each sample
    index.json  written last, with a checksum

Ranks read a step's samples with `pread`, and check the CRC-32 of each. A rank keeps about 60 bytes
a sample in memory. host_copies.py makes and deletes such folders; samples.py makes Samples of one.
"""

import os
import shutil
import zlib
from collections.abc import Sequence
from itertools import pairwise
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt
import orjson

from cray_agents.errors import Corrupt, SetupError
from cray_agents.records import digest
from cray_agents.runtime.datasets.reader import SplitName, shards_in
from cray_agents.runtime.disk import checksums, durable
from cray_agents.trainers.host_copies import check_room, host_copy
from cray_agents.trainers.progress import CLOCK

Row = npt.NDArray[np.int32]
TOKENS, SAMPLES, INDEX = "tokens", "samples", "index.json"
INDEX_FORMAT = 1


class StoredTokens(Sequence[Row]):
    """The token ids of samples, [length] each, read when they are asked for.

    `lengths`: [samples]. `lowest` and `highest` bound all ids. Raises SetupError for damaged files,
    which it deletes: the job is then started again, and copies them anew.
    """

    def __init__(self, folder: Path) -> None:
        index = checksums.read_json(folder / INDEX, INDEX_FORMAT)
        self.folder = folder
        self.lowest, self.highest = int(index["lowest"]), int(index["highest"])
        content = (folder / SAMPLES).read_bytes()
        if zlib.crc32(content) != index["crc32"]:
            raise self._damaged(SAMPLES)
        about = np.frombuffer(content, "<u4").reshape(-1, 2)
        self.lengths = about[:, 0].astype(np.int32)
        self._crcs = about[:, 1].copy()
        self._starts = np.cumsum(self.lengths, dtype=np.int64) - self.lengths
        self._file = os.open(folder / TOKENS, os.O_RDONLY)

    def __del__(self) -> None:
        if hasattr(self, "_file"):
            os.close(self._file)

    def __len__(self) -> int:
        return len(self.lengths)

    def __getitem__(self, place: int, /) -> Row:  # type: ignore[override]  # slices are not needed
        size = 4 * int(self.lengths[place])
        content = os.pread(self._file, size, 4 * int(self._starts[place]))
        if zlib.crc32(content) != self._crcs[place]:
            raise self._damaged(TOKENS)
        return np.frombuffer(content, "<i4")

    def _damaged(self, name: str) -> SetupError:
        shutil.rmtree(self.folder, ignore_errors=True)
        return SetupError(
            f"{self.folder / name} is damaged: it is not what its checksum says. It was a copy on"
            " this host's own disk, and is deleted: the job's next start makes it anew"
        )


class Repeated(Sequence[Any]):
    """The same row for samples, cut to the length of each; without `lengths`, the same value."""

    def __init__(self, value: Any, count: int, lengths: npt.NDArray[Any] | None = None) -> None:
        self._value, self._count, self._lengths = value, count, lengths

    def __len__(self) -> int:
        return self._count

    def __getitem__(self, place: Any, /) -> Any:
        if place >= self._count:
            raise IndexError(place)
        return self._value if self._lengths is None else self._value[: self._lengths[place]]


class Contexts(Sequence[range]):
    """The samples of each context: those whose inputs fill it, one after another.

    `costs`: the inputs of each sample, [samples]. Raises Corrupt where a sample crosses the end of
    a context.
    """

    def __init__(self, costs: npt.NDArray[Any], context: int) -> None:
        ends = np.cumsum(costs, dtype=np.int64)
        number = (ends - costs) // context
        if ((ends - 1) // context != number).any():
            raise Corrupt(f"samples do not fit into contexts of {context} tokens: build them again")
        self.starts = np.flatnonzero(np.diff(number, prepend=-1))
        self._bounds = np.append(self.starts, len(costs))

    def __len__(self) -> int:
        return len(self.starts)

    def __getitem__(self, place: Any, /) -> Any:
        if isinstance(place, slice):
            return [self[i] for i in range(*place.indices(len(self)))]
        if place >= len(self):
            raise IndexError(place)
        return range(int(self._bounds[place]), int(self._bounds[place + 1]))


def store_tokens(dataset: Path, manifest: dict[str, Any], split: SplitName) -> StoredTokens | None:
    """Return the tokens of a split, which are copied to this host's disk if they are not there.

    Returns None if there is no such split. Raises Corrupt, and StoreError where the disk has no
    room.
    """
    files = {
        name: entry["sha256"]
        for name, entry in sorted(manifest.get("files", {}).items())
        if name.startswith(f"{split}-")
    }
    if not files:
        return None

    def make(draft: Path) -> None:
        size = 4 * int(manifest["splits"][split]["tokens"])
        check_room(draft, size, f"the tokens of {dataset.name}")
        _write(draft, shards_in(dataset, manifest, split))

    name = f"{dataset.name}-{split}-{digest(files)}"
    folder = host_copy("tokens", name, make)
    try:
        return StoredTokens(folder)
    except (OSError, SetupError):  # damaged, or deleted just now
        shutil.rmtree(folder, ignore_errors=True)
        return StoredTokens(host_copy("tokens", name, make))


def _write(draft: Path, shards: Sequence[Path]) -> None:
    """Write the token ids of shards, their lengths and checksums."""
    import pyarrow as pa
    import pyarrow.parquet as pq

    lowest, highest, crc32 = 2**31 - 1, 0, 0
    with (draft / TOKENS).open("wb") as tokens, (draft / SAMPLES).open("wb") as samples:
        for shard in shards:
            try:
                with pq.ParquetFile(shard) as file:
                    for group in range(file.num_row_groups):
                        CLOCK.tick()
                        column = file.read_row_group(group, columns=["input_ids"])["input_ids"]
                        for chunk in column.chunks:
                            flat = np.asarray(chunk.flatten(), dtype="<i4")
                            offsets = np.asarray(chunk.offsets, dtype=np.int64)
                            bounds = (4 * (offsets - offsets[0])).tolist()
                            content = memoryview(flat.tobytes())
                            crcs = [zlib.crc32(content[a:b]) for a, b in pairwise(bounds)]
                            rows = np.column_stack([np.diff(offsets), crcs])
                            about = rows.astype("<u4").tobytes()
                            crc32 = zlib.crc32(about, crc32)
                            tokens.write(content)
                            samples.write(about)
                            lowest = min(lowest, int(flat.min(initial=lowest)))
                            highest = max(highest, int(flat.max(initial=highest)))
            except (pa.ArrowInvalid, KeyError) as problem:
                raise Corrupt(f"cannot read {shard}: {problem}") from problem
    for name in (TOKENS, SAMPLES):
        durable.sync(draft / name)
    index = {"format": INDEX_FORMAT, "lowest": lowest, "highest": highest, "crc32": crc32}
    durable.write_file(draft / INDEX, checksums.with_crc(orjson.dumps(index)))
