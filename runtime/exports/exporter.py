"""Exporter: write runs or a dataset in a format of other tools, to a file or a folder.

`export` survives kills: started again, it resumes and ends with the same bytes. `stream` yields
lines for a client. Called by the command line and export_process.py. Read next:
sources/export_source.py for the items, writers/jsonl_files.py and writers/parquet_files.py for the
writing, formats/catalog.py for the formats.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.queries import RunFilter
from cray_agents.records import digest
from cray_agents.runtime.datasets import read_dataset, shards
from cray_agents.runtime.datasets.reader import SplitName
from cray_agents.runtime.exports.export_format import LineFormat
from cray_agents.runtime.exports.formats.catalog import FORMATS
from cray_agents.runtime.exports.sources.dataset_source import DatasetRuns
from cray_agents.runtime.exports.sources.export_source import ExportSource
from cray_agents.runtime.exports.sources.store_source import StoredRuns
from cray_agents.runtime.exports.writers.counts import (
    ExportCounts,
    ExportProgress,
    LossRules,
    OnProgress,
    Summary,
    describe_losses,
)
from cray_agents.runtime.exports.writers.jsonl_files import blocks, write_lines, writer_of
from cray_agents.runtime.exports.writers.parquet_files import (
    TableExport,
    TableFormat,
    check_target,
    reads_shards,
)
from cray_agents.runtime.exports.writers.resume_journal import ExportDraft, ResumeJournal
from cray_agents.runtime.store import Store

__all__ = [
    "SHARD_SIZE",
    "ExportCounts",
    "ExportOptions",
    "Format",
    "LossRules",
    "Summary",
    "describe_losses",
    "export",
    "format_named",
    "has_validation",
    "open_dataset",
    "open_runs",
    "stream",
]

EXPORTS = 2  # version of the bytes written: half-done exports of another version are refused
SHARD_SIZE = 10_000  # rows

Format = LineFormat | TableFormat


@dataclass(frozen=True)
class ExportOptions:
    """Options of an export. `shard_size` is the number of rows in a folder's Parquet file.

    `restart` removes what an interrupted export left.
    """

    rules: LossRules = field(default_factory=LossRules)
    shard_size: int = SHARD_SIZE
    restart: bool = False


def format_named(name: str) -> Format:
    """Return the format of this name. Raises BadInput naming the nearest one."""
    if name in FORMATS:
        return FORMATS[name]
    near = difflib.get_close_matches(name, FORMATS, 1, 0.5)
    hint = f", perhaps {near[0]!r} is meant" if near else ""
    raise BadInput(
        f"format {name!r} is not known{hint}; valid: {', '.join(FORMATS)}",
        param="format",
        code="unknown_format",
    )


def open_runs(
    home: Home,
    query: RunFilter,
    ages: dict[str, str],
    skip_missing: bool,
    names: Sequence[str] = (),
) -> ExportSource:
    """Return the stored runs that match, or those of these names, as a source: see StoredRuns."""
    return StoredRuns(Store(home), query, ages, skip_missing, tuple(names))


def open_dataset(
    home: Home,
    dataset: str,
    form: Format,
    split: str,
    skip_missing: bool,
    store: Store | None = None,
) -> ExportSource:
    """Return a dataset as a source: its pairs for a format of pairs, else its runs.

    Raises NotFound, and BadInput if the split does not exist.
    """
    if split not in get_args(SplitName):
        raise BadInput(
            f"a dataset has the splits {' and '.join(get_args(SplitName))}, not {split!r}",
            param="split",
        )
    paired = read_dataset(home, dataset).get("method") == "dpo"
    pairs = paired and isinstance(form, LineFormat) and form.write_pair is not None
    source = DatasetRuns(
        store or Store(home), home, dataset, cast(SplitName, split), pairs, skip_missing
    )
    source.shards()  # raises if the split does not exist
    return source


def has_validation(home: Home, dataset: str) -> bool:
    """Tell whether a dataset has a validation split, which is exported on its own."""
    return bool(shards(home, dataset, "validation"))


def export(
    source: ExportSource,
    form: Format,
    target: Path,
    *,
    options: ExportOptions | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Summary:
    """Write an export to a file or a folder, resuming one that was killed.

    Raises BadInput if the source does not fit the format or the rules, if half of another export
    lies beside the target, or if the folder exists. Raises StoreError if the target cannot be
    written.
    """
    options = options or ExportOptions()
    target = target.resolve()  # replaces the file behind a link, not the link
    draft = ExportDraft(target)
    identity = _identity(source, form, target, options)
    source = source.with_state(draft.state(identity) or {}) if not options.restart else source
    if isinstance(form, LineFormat):
        writer_of(source, form)
        _check_file(form, target)
    elif not draft.whole(identity):
        check_target(form, target)
    if isinstance(form, LineFormat) or not reads_shards(source, form):
        source.check()
    fresh = ResumeJournal(identity, f"{form.name} of {source.description}", source.state())
    journal, resumed = draft.begin(fresh, restart=options.restart)
    if isinstance(form, LineFormat):
        journal = write_lines(source, form, draft, journal, options.rules, on_progress)
    else:
        tables = TableExport(source, form, draft, options.rules, on_progress, options.shard_size)
        journal = tables.write(journal)
    losses = describe_losses(journal.losses)
    files = journal.files or 1
    return Summary(journal.records, journal.runs, files, journal.bytes, losses, resumed)


def _check_file(form: LineFormat, target: Path) -> None:
    if form.page is not None and target.suffix == ".zst":
        raise BadInput(f"no browser opens {target.name}: name it {form.suffix}", param="output")
    if target.exists() and not target.is_file():
        kind = "a directory" if target.is_dir() else "no file"
        raise BadInput(
            f"{target} is {kind}, and lines go into a file; without -o they go to stdout",
            param="output",
        )


def stream(
    source: ExportSource,
    form: Format,
    tally: ExportCounts,
    rules: LossRules,
    on_progress: OnProgress,
) -> Iterator[bytes]:
    """Return the lines of an export as blocks, counted in `tally` as they are read.

    Raises BadInput, StoreError.
    """
    if not isinstance(form, LineFormat) or form.pack is not None:
        made = "one file" if isinstance(form, LineFormat) else "Parquet files"
        raise BadInput(
            f"format {form.name!r} makes {made}, not lines: give -o a folder or a file",
            param="output",
        )
    writer_of(source, form)
    source.check()
    return _stream_blocks(source, form, tally, rules, on_progress)


def _stream_blocks(
    source: ExportSource,
    form: LineFormat,
    tally: ExportCounts,
    rules: LossRules,
    on_progress: OnProgress,
) -> Iterator[bytes]:
    sent, total = 0, source.count()
    for block in blocks(source, form, tally, rules):
        yield block.data
        sent += len(block.data)
        on_progress(ExportProgress(tally.records, tally.runs, sent, total))


def _identity(source: ExportSource, form: Format, target: Path, options: ExportOptions) -> str:
    """Return a digest that is equal for equal exports; the rules for losses are no part of it."""
    layout: dict[str, int] = {"zst": target.suffix == ".zst"}
    if isinstance(form, TableFormat):
        layout = {"single": target.suffix == ".parquet", "shard_size": options.shard_size}
    return digest([EXPORTS, form.name, source.identity(), layout])
