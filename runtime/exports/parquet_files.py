"""Exports whose files are Parquet: shards in a folder that is published whole, or one file of them.

A shard ends where its rows reach `shard_size`, on the border of an item; it is published within the
hidden part, and then the journal tells of it. What a kill leaves of the next one is written again.
So a folder has the same bytes however often its export was killed. Called by exporting.py; the
formats are in tokens.py, verl.py and huggingface.py. pyarrow is imported when one is written.
"""

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.errors import BadInput, StoreError
from cray_agents.records import Run
from cray_agents.runtime.disk import durable
from cray_agents.runtime.exports.counts import ExportCounts, ExportProgress, LossRules, OnProgress
from cray_agents.runtime.exports.line_formats import Written
from cray_agents.runtime.exports.resume_journal import ExportDraft, ResumeJournal
from cray_agents.runtime.exports.sources import ExportSource

ROWS = 64  # made of runs before they become columns
GROUP = 16 << 20  # bytes of columns in a row group, about
JOINED = "joined.parquet"


class RowBatch(NamedTuple):
    """Some rows as an Arrow record batch, and the cursor of the last item in them."""

    batch: Any
    cursor: str


Pieces = Callable[[ExportSource, ExportCounts, LossRules, str], Iterator[RowBatch]]


@dataclass(frozen=True)
class FolderContents:
    """What a finished folder is about, for the files that a format adds to its shards."""

    path: Path
    shards: Sequence[Path]
    rows: Sequence[int]
    split: str
    source: ExportSource
    losses: dict[str, int]


@dataclass(frozen=True)
class TableFormat:
    """A format whose files are Parquet.

    `of_run` gives the rows of a run, the first of which has the index given. `of_dataset` makes
    them of a dataset's own shards, without the store. `by_task`: it wants one run of each task.
    `finish` adds further files to the folder; a format that has it is never one file.
    """

    name: str
    title: str
    about: str
    schema: Callable[[], Any]
    of_run: Callable[[Run, int], Written]
    of_dataset: Pieces | None = None
    by_task: bool = False
    within: str = ""
    finish: Callable[[FolderContents], None] | None = None
    options: dict[str, Any] = field(default_factory=dict)


def write_tables(
    source: ExportSource,
    form: TableFormat,
    draft: ExportDraft,
    journal: ResumeJournal,
    rules: LossRules,
    on: OnProgress,
    shard_size: int,
) -> ResumeJournal:
    """Go on with a folder, or a single file, and publish it. Raises BadInput, StoreError."""
    single = draft.target.suffix == ".parquet"
    made = draft.part / JOINED if single else draft.part
    if journal.whole:
        draft.publish(journal, made)
        return journal
    try:
        journal = _shards(source, form, draft, journal, rules, on, shard_size)
        files = _finish(source, form, draft, journal, made if single else None)
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


def _shards(
    source: ExportSource,
    form: TableFormat,
    draft: ExportDraft,
    journal: ResumeJournal,
    rules: LossRules,
    on: OnProgress,
    shard_size: int,
) -> ResumeJournal:
    """Write the shards that lack."""
    folder = draft.part / form.within
    folder.mkdir(parents=True, exist_ok=True)
    tally, total = journal.tally(), _total(source, form)
    shard: Shard | None = None
    for piece in _pieces(source, form, tally, rules, journal.cursor, shard_size):
        shard = shard or Shard(_draft_name(folder, len(journal.shards)), form)
        shard.add(piece.batch)
        if shard.rows >= shard_size:
            journal = _closed(draft, journal, piece.cursor, shard, tally)
            shard = None
        written = journal.bytes + (shard.bytes if shard else 0)
        on(ExportProgress(tally.records, tally.runs, written, total))
        cursor = piece.cursor
    if shard is not None:
        journal = _closed(draft, journal, cursor, shard, tally)
    elif not journal.shards:
        journal = _closed(draft, journal, "", Shard(_draft_name(folder, 0), form), tally)
    return journal


def _closed(
    draft: ExportDraft, journal: ResumeJournal, cursor: str, shard: "Shard", tally: ExportCounts
) -> ResumeJournal:
    size = journal.bytes + shard.close()
    journal = replace(journal.moved(cursor, size, tally), shards=[*journal.shards, shard.rows])
    draft.save(journal)
    return journal


def reads_shards(source: ExportSource, form: TableFormat) -> bool:
    """Whether this format is made of a dataset's shards, and the store is not asked."""
    return form.of_dataset is not None and source.dataset is not None


def _total(source: ExportSource, form: TableFormat) -> int | None:
    """How many items there are, or rows of shards."""
    from pyarrow import parquet

    if reads_shards(source, form):
        return sum(int(parquet.read_metadata(shard).num_rows) for shard in source.shards())
    return source.count()


def _pieces(
    source: ExportSource,
    form: TableFormat,
    tally: ExportCounts,
    rules: LossRules,
    after: str,
    shard_size: int,
) -> Iterator[RowBatch]:
    if form.of_dataset is not None and reads_shards(source, form):
        return form.of_dataset(source, tally, rules, after)
    return _pieces_of_runs(source, form, tally, rules, after, shard_size)


def _pieces_of_runs(
    source: ExportSource,
    form: TableFormat,
    tally: ExportCounts,
    rules: LossRules,
    after: str,
    shard_size: int,
) -> Iterator[RowBatch]:
    """The rows of runs, in pieces whose borders depend on the rows since the shard's start."""
    import pyarrow

    schema = form.schema()
    rows: list[dict[str, Any]] = []
    in_shard, cursor = 0, ""
    for item in source.items(after, by_task=form.by_task):
        rows += tally.of(item, lambda run: form.of_run(run, tally.records), rules).records
        cursor = item.cursor
        if len(rows) >= min(ROWS, shard_size - in_shard):
            yield RowBatch(pyarrow.RecordBatch.from_pylist(rows, schema=schema), cursor)
            in_shard += len(rows)
            in_shard = 0 if in_shard >= shard_size else in_shard
            rows, cursor = [], ""
    if cursor:
        yield RowBatch(pyarrow.RecordBatch.from_pylist(rows, schema=schema), cursor)


class Shard:
    """A Parquet file that is being written beside the name it gets when it is closed."""

    def __init__(self, path: Path, form: TableFormat) -> None:
        from pyarrow import parquet

        self.rows = 0
        self._path = path
        self._draft = path.with_name(f"{path.name}.draft")
        self._schema = form.schema()
        self._writer = parquet.ParquetWriter(self._draft, self._schema, **form.options)
        self._held: list[Any] = []
        self._size = 0
        self.bytes = 0  # of columns, before they are encoded

    def add(self, batch: Any) -> None:
        """Add rows; they are written a row group at a time."""
        self.rows += batch.num_rows
        self.bytes += batch.nbytes
        self._size += batch.nbytes
        self._held.append(batch)
        if self._size >= GROUP:
            self._flush()

    def close(self) -> int:
        """Publish the file; its size."""
        self._flush()
        self._writer.close()
        durable.sync(self._draft)
        self._draft.replace(self._path)
        durable.sync(self._path.parent)
        return self._path.stat().st_size

    def _flush(self) -> None:
        import pyarrow

        if sum(batch.num_rows for batch in self._held):
            table = pyarrow.Table.from_batches(self._held, self._schema)
            self._writer.write_table(table, row_group_size=max(table.num_rows, 1))
        self._held, self._size = [], 0


def _finish(
    source: ExportSource,
    form: TableFormat,
    draft: ExportDraft,
    journal: ResumeJournal,
    joined: Path | None,
) -> list[Path]:
    """Give the shards their names and add what else belongs there; all files. May be done again."""
    folder = draft.part / form.within
    count = len(journal.shards)
    named = [folder / f"{source.split}-{n:05}-of-{count:05}.parquet" for n in range(count)]
    for number, path in enumerate(named):
        if not path.exists():
            _draft_name(folder, number).replace(path)
    for left in (*folder.glob("*.draft"), *folder.glob("shard-*")):
        left.unlink()  # of a kill
    if joined is not None:
        _join(named, joined, form)
        return [joined]
    if form.finish is not None:
        form.finish(
            FolderContents(draft.part, named, journal.shards, source.split, source, journal.losses)
        )
    durable.sync(folder)
    durable.sync(draft.part)
    return [path for path in sorted(draft.part.rglob("*")) if path.is_file()]


def _join(shards: Sequence[Path], path: Path, form: TableFormat) -> None:
    """One file with the row groups of all shards."""
    from pyarrow import parquet

    with parquet.ParquetWriter(path, form.schema(), **form.options) as writer:
        for shard in shards:
            with parquet.ParquetFile(shard) as file:
                for number in range(file.num_row_groups):
                    table = file.read_row_group(number)
                    writer.write_table(table, row_group_size=max(table.num_rows, 1))
    durable.sync(path)


def _draft_name(folder: Path, number: int) -> Path:
    return folder / f"shard-{number:05}.parquet"


def check_target(form: TableFormat, target: Path) -> None:
    """Raise BadInput where a folder cannot be published under this name."""
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
