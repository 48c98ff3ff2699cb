"""Parquet exports: write a folder of shards that is published whole, or a single file.

A shard ends at the item that fills `shard_size` rows. It gets its name in the hidden part, then the
journal records it. A shard that a kill interrupts is written again, so a folder has the same bytes
however often its export was killed. Called by exporter.py; the formats are formats/tokens.py,
verl.py and huggingface.py. pyarrow is imported only when a file is written.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.errors import BadInput, StoreError
from cray_agents.records import Run
from cray_agents.runtime.disk import durable
from cray_agents.runtime.exports.export_format import Written
from cray_agents.runtime.exports.sources.export_source import ExportSource
from cray_agents.runtime.exports.writers.counts import (
    ExportCounts,
    ExportProgress,
    LossRules,
    OnProgress,
)
from cray_agents.runtime.exports.writers.resume_journal import ExportDraft, ResumeJournal

ROWS = 64  # rows of runs that become columns at once
GROUP = 16 << 20  # bytes of columns in a row group, about
JOINED = "joined.parquet"


class RowBatch(NamedTuple):
    """Some rows as an Arrow record batch, and the cursor of the last item in them."""

    batch: Any
    cursor: str


DatasetWriter = Callable[[ExportSource, ExportCounts, LossRules, str], Iterator[RowBatch]]


@dataclass(frozen=True)
class FolderContents:
    """Contents of a finished folder, for the files that a format adds to its shards."""

    path: Path
    shards: Sequence[Path]
    rows: Sequence[int]
    split: str
    source: ExportSource
    losses: dict[str, int]


@dataclass(frozen=True)
class TableFormat:
    """A format whose files are Parquet.

    `write_run` gets a run and the index of its first row. `write_dataset` rewrites a dataset's own
    shards, without the store. `by_task` demands one run of each task. `within` is the folder of the
    shards. `finish` adds further files to the folder; such a format is never a single file.
    """

    name: str
    title: str
    about: str
    schema: Callable[[], Any]
    write_run: Callable[[Run, int], Written]
    write_dataset: DatasetWriter | None = None
    by_task: bool = False
    within: str = ""
    finish: Callable[[FolderContents], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)


@dataclass(frozen=True)
class TableExport:
    """An export in the making: its draft, its rules, and the rows of a folder's file."""

    source: ExportSource
    form: TableFormat
    draft: ExportDraft
    rules: LossRules
    on_progress: OnProgress
    shard_size: int

    def write(self, journal: ResumeJournal) -> ResumeJournal:
        """Write a folder or a single file from the journal's cursor on and publish it.

        Raises BadInput, StoreError.
        """
        draft = self.draft
        single = draft.target.suffix == ".parquet"
        made = draft.part / JOINED if single else draft.part
        if journal.whole:
            draft.publish(journal, made)
            return journal
        try:
            journal = self._write_shards(journal)
            files = self._finish_files(journal, made if single else None)
        except OSError as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                f"the export cannot be written: {error}; when it can be, the same command goes on"
            ) from error
        size = sum(path.stat().st_size for path in files)
        journal = replace(journal, bytes=size, files=len(files))
        draft.publish(journal, made)
        return journal

    def _write_shards(self, journal: ResumeJournal) -> ResumeJournal:
        """Write the shards that are missing."""
        self._folder.mkdir(parents=True, exist_ok=True)
        tally, total = journal.tally(), self._total()
        shard: Shard | None = None
        for batch in self._batches(tally, journal.cursor):
            shard = shard or self._new_shard(journal)
            shard.add(batch.batch)
            if shard.rows >= self.shard_size:
                journal = self._close(shard, journal, batch.cursor, tally)
                shard = None
            written = journal.bytes + (shard.bytes if shard else 0)
            self.on_progress(ExportProgress(tally.records, tally.runs, written, total))
            cursor = batch.cursor
        if shard is not None:
            journal = self._close(shard, journal, cursor, tally)
        elif not journal.shards:
            journal = self._close(self._new_shard(journal), journal, "", tally)
        return journal

    def _new_shard(self, journal: ResumeJournal) -> "Shard":
        return Shard(self._draft_name(len(journal.shards)), self.form)

    def _close(
        self, shard: "Shard", journal: ResumeJournal, cursor: str, tally: ExportCounts
    ) -> ResumeJournal:
        size = journal.bytes + shard.close()
        shards = [*journal.shards, shard.rows]
        journal = replace(journal.advance(cursor, size, tally), shards=shards)
        self.draft.save(journal)
        return journal

    def _total(self) -> int | None:
        """Return the number of items, or of rows in the shards; None if unknown."""
        from pyarrow import parquet

        if reads_shards(self.source, self.form):
            return sum(int(parquet.read_metadata(each).num_rows) for each in self.source.shards())
        return self.source.count()

    def _batches(self, tally: ExportCounts, after: str) -> Iterator[RowBatch]:
        if self.form.write_dataset is not None and reads_shards(self.source, self.form):
            return self.form.write_dataset(self.source, tally, self.rules, after)
        return self._batches_of_runs(tally, after)

    def _batches_of_runs(self, tally: ExportCounts, after: str) -> Iterator[RowBatch]:
        """Yield the rows of runs in batches whose borders depend on their shard alone."""
        import pyarrow

        form, schema = self.form, self.form.schema()
        rows: list[dict[str, Any]] = []
        in_shard, cursor = 0, ""
        for item in self.source.items(after, by_task=form.by_task):
            written = tally.write_item(
                item, lambda run: form.write_run(run, tally.records), self.rules
            )
            rows += written.records
            cursor = item.cursor
            if len(rows) >= min(ROWS, self.shard_size - in_shard):
                yield RowBatch(pyarrow.RecordBatch.from_pylist(rows, schema=schema), cursor)
                in_shard += len(rows)
                in_shard = 0 if in_shard >= self.shard_size else in_shard
                rows, cursor = [], ""
        if cursor:
            yield RowBatch(pyarrow.RecordBatch.from_pylist(rows, schema=schema), cursor)

    def _finish_files(self, journal: ResumeJournal, joined: Path | None) -> list[Path]:
        """Name the shards, add the format's further files and return all files. Repeatable."""
        folder, split, part = self._folder, self.source.split, self.draft.part
        count = len(journal.shards)
        named = [folder / f"{split}-{n:05}-of-{count:05}.parquet" for n in range(count)]
        for number, path in enumerate(named):
            if not path.exists():
                self._draft_name(number).replace(path)
        for left in (*folder.glob("*.draft"), *folder.glob("shard-*")):
            left.unlink()  # a kill left it
        if joined is not None:
            _join(named, joined, self.form)
            return [joined]
        if self.form.finish is not None:
            self.form.finish(
                FolderContents(part, named, journal.shards, split, self.source, journal.losses)
            )
        durable.sync(folder)
        durable.sync(part)
        return [path for path in sorted(part.rglob("*")) if path.is_file()]

    @property
    def _folder(self) -> Path:
        return self.draft.part / self.form.within

    def _draft_name(self, number: int) -> Path:
        return self._folder / f"shard-{number:05}.parquet"


def reads_shards(source: ExportSource, form: TableFormat) -> bool:
    """Tell whether the format is written from a dataset's shards, without the store."""
    return form.write_dataset is not None and source.dataset is not None


class Shard:
    """A Parquet file in the making; it gets its final name on close()."""

    def __init__(self, path: Path, form: TableFormat) -> None:
        from pyarrow import parquet

        self.rows = 0
        self._path = path
        self._draft = path.with_name(f"{path.name}.draft")
        self._schema = form.schema()
        self._writer = parquet.ParquetWriter(self._draft, self._schema, **form.options)
        self._batches: list[Any] = []
        self._size = 0  # bytes of the batches that are not written yet
        self.bytes = 0  # of all columns, before they are encoded

    def add(self, batch: Any) -> None:
        """Add rows, which are written a row group at a time."""
        self.rows += batch.num_rows
        self.bytes += batch.nbytes
        self._size += batch.nbytes
        self._batches.append(batch)
        if self._size >= GROUP:
            self._flush()

    def close(self) -> int:
        """Publish the file and return its size in bytes."""
        self._flush()
        self._writer.close()
        durable.sync(self._draft)
        self._draft.replace(self._path)
        durable.sync(self._path.parent)
        return self._path.stat().st_size

    def _flush(self) -> None:
        import pyarrow

        if sum(batch.num_rows for batch in self._batches):
            table = pyarrow.Table.from_batches(self._batches, self._schema)
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._batches, self._size = [], 0


def _join(shards: Sequence[Path], path: Path, form: TableFormat) -> None:
    """Write one file with the row groups of all shards."""
    from pyarrow import parquet

    with parquet.ParquetWriter(path, form.schema(), **form.options) as writer:
        for shard in shards:
            with parquet.ParquetFile(shard) as file:
                for number in range(file.num_row_groups):
                    table = file.read_row_group(number)
                    writer.write_table(table, row_group_size=max(table.num_rows, 1))
    durable.sync(path)


def check_target(form: TableFormat, target: Path) -> None:
    """Raise BadInput if the export cannot be published under this name."""
    if form.finish is not None and target.suffix == ".parquet":
        raise BadInput(
            f"format {form.name!r} is a folder: {target} looks like a file", param="output"
        )
    if target.suffix == ".parquet":
        return
    if target.is_file() or (target.is_dir() and any(target.iterdir())):
        raise BadInput(
            f"{target} exists already: remove it, or give another -o (one that ends in .parquet "
            "becomes a single file)"
            if form.finish is None
            else f"{target} exists already: remove it, or give another -o",
            param="output",
            code="target_exists",
        )
