"""Files of an export: lines, one page or Parquet, written to a draft that is renamed when whole.

A killed export leaves its draft, `.<target>.part`; the next export to the target removes it. A
folder of Parquet holds shards of `shard_size` rows; a target in `.parquet` is one file. pyarrow is
imported only when a table is written. Called by exporter.py.
"""

import shutil
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput, store_errors
from cray_agents.records import Run
from cray_agents.runtime.disk import durable
from cray_agents.runtime.disk.host_lock import HostLock
from cray_agents.runtime.exports.export_format import (
    FULL,
    ExportCounts,
    Json,
    LineFormat,
    Written,
    line_of,
)
from cray_agents.runtime.exports.sources import ExportSource

ITEMS = 500  # in a block, at most
BLOCK = 2 << 20  # bytes of lines that end a block
LEVEL = 3  # zstd's own default
ROWS = 64  # rows of runs that become columns at once
GROUP = 16 << 20  # bytes of columns in a row group, about
SHARD_SIZE = 10_000  # rows


@dataclass(frozen=True)
class ExportProgress:
    """Progress of an export. `total` is the number of all items, None if unknown."""

    records: int
    runs: int
    bytes: int
    total: int | None = None


OnProgress = Callable[[ExportProgress], None]


@dataclass(frozen=True)
class FolderContents:
    """Contents of a finished folder, for the files that a format adds. `rows`: of each shard."""

    path: Path
    rows: Sequence[int]
    source: ExportSource
    losses: dict[str, int]


@dataclass(frozen=True)
class TableFormat:
    """A format whose files are Parquet.

    `write_run` gets a run and the index of its first row. `write_dataset` rewrites a dataset's own
    shards as record batches, without the store. `by_task` demands one run of each task. `within` is
    the folder of the shards. `finish` adds further files to the folder; such a format is never a
    single file.
    """

    name: str
    title: str
    about: str
    schema: Callable[[], Any]
    write_run: Callable[[Run, int], Written]
    write_dataset: Callable[[ExportSource, ExportCounts], Iterator[Any]] | None = None
    by_task: bool = False
    within: str = ""
    finish: Callable[[FolderContents], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@contextmanager
def draft_of(target: Path) -> Iterator[Path]:
    """Give an unused path to write to, which becomes the target at the end if nothing is raised.

    Raises BadInput if another process of this host exports to the target now, StoreError if it
    cannot be written.
    """
    lock = HostLock(f"export {target}")
    draft = target.with_name(f".{target.name}.part")
    try:
        if not lock.take():
            raise BadInput(
                f"{target} is being exported by another process",
                param="output",
                code="export_running",
            )
        try:
            with store_errors(f"{target} cannot be written"):
                target.parent.mkdir(parents=True, exist_ok=True)
                _remove(draft)
                yield draft
                durable.sync(draft)
                draft.replace(target)
                durable.sync(target.parent)
        finally:
            _remove(draft)
    finally:
        lock.close()


def _remove(draft: Path) -> None:
    if draft.is_dir():
        shutil.rmtree(draft)
    else:
        draft.unlink(missing_ok=True)


# ---- lines -----------------------------------------------------------------------------------


def blocks(source: ExportSource, form: LineFormat, counts: ExportCounts) -> Iterator[bytes]:
    """Yield the lines of all items in blocks, and count them. Raises BadInput, StoreError."""
    write, page = writer_of(source, form), form.page
    encode: Callable[[Run, Json], bytes] = line_of if page is None else page.encode
    before = 0
    if page is not None:
        head = page.head()
        before = len(head)
        yield head
    lines: list[bytes] = []
    size = items = 0
    for item in source.items():
        if page is not None and before + size >= page.most_bytes:
            counts.add(FULL, (source.count() or counts.runs + 1) - counts.runs)
            lines.append(page.full)
            break
        for record in counts.write_item(item, write).records:
            line = encode(item.runs[0], record)
            lines += (line, b"\n")
            size += len(line) + 1
        items += 1
        if items >= ITEMS or size >= BLOCK:
            yield b"".join(lines)
            before += size
            lines, size, items = [], 0, 0
    if items or lines:
        yield b"".join(lines)


def writer_of(source: ExportSource, form: LineFormat) -> Callable[..., Written]:
    """Return the writer of this source's items. Raises BadInput if the format has none."""
    if form.with_store is not None:
        return form.with_store(source.store)
    write = form.write_pair if source.pairs else form.write_run
    if write is None:
        raise BadInput(
            f"format {form.name!r} is of pairs, and {source.description} has none: build a dataset "
            "of pairs with `cray-agents dataset build --method dpo` and export that",
            param="format",
            code="no_pairs",
        )
    return write


def stream_lines(
    source: ExportSource, form: LineFormat, counts: ExportCounts, on_progress: OnProgress
) -> Iterator[bytes]:
    """Yield the blocks of an export and report progress after each."""
    sent, total = 0, source.count()
    for block in blocks(source, form, counts):
        yield block
        sent += len(block)
        on_progress(ExportProgress(counts.records, counts.runs, sent, total))


def write_lines(
    source: ExportSource,
    form: LineFormat,
    draft: Path,
    counts: ExportCounts,
    on_progress: OnProgress,
    *,
    compress: bool,
) -> None:
    """Write a file of lines, or what the format packs them into. Raises BadInput, OSError."""
    data = stream_lines(source, form, counts, on_progress)
    if form.pack is not None:
        form.pack((line for block in data for line in block.splitlines()), draft)
        return
    with draft.open("wb") as file:
        if not compress:
            file.writelines(data)
            return
        import zstandard

        compressor = zstandard.ZstdCompressor(level=LEVEL, write_checksum=True)
        with compressor.stream_writer(file) as out:
            for block in data:
                out.write(block)


# ---- tables ----------------------------------------------------------------------------------


def reads_shards(source: ExportSource, form: TableFormat) -> bool:
    """Tell whether the format is written from a dataset's shards, without the store."""
    return form.write_dataset is not None and source.dataset is not None


def write_tables(
    source: ExportSource,
    form: TableFormat,
    draft: Path,
    counts: ExportCounts,
    on_progress: OnProgress,
    shard_size: int | None,
) -> list[Path]:
    """Write a folder with shards of some rows, or a single file for None. Return the files.

    A shard ends at the item that fills it. Raises BadInput, OSError.
    """
    folder = draft / form.within
    if shard_size is not None:
        folder.mkdir(parents=True)
    total, written = _total(source, form), 0
    shards: list[_Shard] = []
    for batch in _batches(source, form, counts, shard_size):
        if not shards or (shard_size is not None and shards[-1].rows >= shard_size):
            path = draft if shard_size is None else folder / f"shard-{len(shards)}"
            shards.append(_Shard(path, form))
        shards[-1].add(batch)
        if shard_size is not None and shards[-1].rows >= shard_size:
            shards[-1].close()
        written += batch.nbytes
        on_progress(ExportProgress(counts.records, counts.runs, written, total))
    for shard in shards:
        shard.close()
    if shard_size is None:
        return [draft]
    for number, shard in enumerate(shards):
        shard.path.replace(folder / f"{source.split}-{number:05}-of-{len(shards):05}.parquet")
    if form.finish is not None:
        rows = [shard.rows for shard in shards]
        form.finish(FolderContents(draft, rows, source, counts.losses))
    durable.sync(folder)
    return [path for path in draft.rglob("*") if path.is_file()]


def _total(source: ExportSource, form: TableFormat) -> int | None:
    """Return the number of items, or of rows in the shards; None if unknown."""
    from pyarrow import parquet

    if reads_shards(source, form):
        return sum(int(parquet.read_metadata(each).num_rows) for each in source.shards())
    return source.count()


def _batches(
    source: ExportSource, form: TableFormat, counts: ExportCounts, shard_size: int | None
) -> Iterator[Any]:
    """Yield the rows as record batches, of which none goes beyond the item that fills a shard.

    There is at least one batch.
    """
    import pyarrow

    schema = form.schema()
    if form.write_dataset is not None and reads_shards(source, form):
        yield from form.write_dataset(source, counts)
        return
    rows: list[dict[str, Any]] = []
    in_shard = 0
    for item in source.items(by_task=form.by_task):
        rows += counts.write_item(item, lambda run: form.write_run(run, counts.records)).records
        if len(rows) >= min(ROWS, (shard_size or ROWS + in_shard) - in_shard):
            yield pyarrow.RecordBatch.from_pylist(rows, schema=schema)
            in_shard += len(rows)
            in_shard = 0 if in_shard >= (shard_size or in_shard) else in_shard
            rows = []
    if rows or not counts.records:
        yield pyarrow.RecordBatch.from_pylist(rows, schema=schema)


class _Shard:
    """A Parquet file in the making."""

    def __init__(self, path: Path, form: TableFormat) -> None:
        from pyarrow import parquet

        self.path = path
        self.rows = 0
        self._schema = form.schema()
        self._writer = parquet.ParquetWriter(path, self._schema, **form.options)
        self._batches: list[Any] = []
        self._size = 0  # bytes of the batches that are not written yet

    def add(self, batch: Any) -> None:
        """Add rows, which are written a row group at a time."""
        self.rows += batch.num_rows
        self._size += batch.nbytes
        self._batches.append(batch)
        if self._size >= GROUP:
            self._flush()

    def close(self) -> None:
        """Finish the file, once."""
        if self._writer.is_open:
            self._flush()
            self._writer.close()
            durable.sync(self.path)

    def _flush(self) -> None:
        import pyarrow

        if sum(batch.num_rows for batch in self._batches):
            table = pyarrow.Table.from_batches(self._batches, self._schema)
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._batches, self._size = [], 0
