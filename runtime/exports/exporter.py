"""Exports: runs or a dataset in a format that other people's tools read, to a file or a folder.

`export` survives kills: started again, it goes on where it was, and ends with the same bytes.
`stream` is for lines that go straight to a client. Called by the command line and the gateway.
Read next: sources.py, what is exported; lines.py and tables.py, how it is written; format.py,
tokens.py, verl.py and huggingface.py, the formats.
"""

import difflib
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import cast, get_args

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.queries import RunFilter
from cray_agents.records import digest
from cray_agents.runtime.datasets import read_dataset, shards
from cray_agents.runtime.datasets.reader import SplitName
from cray_agents.runtime.exports.counts import (
    ExportCounts,
    ExportProgress,
    LossRules,
    OnProgress,
    Summary,
    losses_of,
)
from cray_agents.runtime.exports.dataset_source import DatasetRuns
from cray_agents.runtime.exports.huggingface import HUGGINGFACE
from cray_agents.runtime.exports.jsonl_files import blocks, write_lines, writer_of
from cray_agents.runtime.exports.line_formats import FORMATS, LineFormat
from cray_agents.runtime.exports.parquet_files import (
    TableFormat,
    check_target,
    reads_shards,
    write_tables,
)
from cray_agents.runtime.exports.resume_journal import ExportDraft, ResumeJournal
from cray_agents.runtime.exports.sources import ExportSource
from cray_agents.runtime.exports.store_source import StoredRuns
from cray_agents.runtime.exports.tokens import TOKENS
from cray_agents.runtime.exports.verl import VERL
from cray_agents.runtime.store import Store

__all__ = [
    "SHARD_SIZE",
    "ExportCounts",
    "ExportOptions",
    "Format",
    "LossRules",
    "Summary",
    "export",
    "format_named",
    "formats",
    "has_validation",
    "losses_of",
    "of_dataset",
    "of_runs",
    "stream",
]

EXPORTS = 2  # counted up when the same export writes other bytes: halves of old ones are refused
SHARD_SIZE = 10_000  # rows

Format = LineFormat | TableFormat


@dataclass(frozen=True)
class ExportOptions:
    """How to export. `shard_size`: rows in a Parquet file of a folder."""

    rules: LossRules = field(default_factory=LossRules)
    shard_size: int = SHARD_SIZE
    restart: bool = False


def formats() -> dict[str, Format]:
    """All formats by name: lines first."""
    return {**FORMATS, **{each.name: each for each in (TOKENS, VERL, HUGGINGFACE)}}


def format_named(name: str) -> Format:
    """A format. Raises BadInput naming the nearest."""
    known = formats()
    if name in known:
        return known[name]
    near = difflib.get_close_matches(name, known, 1, 0.5)
    hint = f", perhaps {near[0]!r} is meant" if near else ""
    raise BadInput(
        f"format {name!r} is not known{hint}; valid: {', '.join(known)}",
        param="format",
        code="unknown_format",
    )


def of_runs(
    home: Home, wanted: RunFilter, ages: dict[str, str], skip_missing: bool
) -> ExportSource:
    """The stored runs that match, as a source. `ages`: what since and until were given as."""
    return StoredRuns(Store(home), wanted, ages, skip_missing)


def of_dataset(
    home: Home,
    dataset: str,
    form: Format,
    split: str,
    skip_missing: bool,
    store: Store | None = None,
) -> ExportSource:
    """A dataset as a source: its pairs for a format of pairs, else its runs.

    Raises NotFound, and BadInput where it has no such split.
    """
    if split not in get_args(SplitName):
        raise BadInput(
            f"a dataset has the splits {' and '.join(get_args(SplitName))}, not {split!r}",
            param="split",
        )
    paired = read_dataset(home, dataset).get("method") == "dpo"
    pairs = paired and isinstance(form, LineFormat) and form.of_pair is not None
    found = DatasetRuns(
        store or Store(home), home, dataset, cast(SplitName, split), pairs, skip_missing
    )
    found.shards()
    return found


def has_validation(home: Home, dataset: str) -> bool:
    """Whether a dataset has a split that is exported by itself."""
    return bool(shards(home, dataset, "validation"))


def export(
    source: ExportSource,
    form: Format,
    target: Path,
    *,
    options: ExportOptions | None = None,
    on_progress: OnProgress = lambda progress: None,
) -> Summary:
    """Write an export to a file or a folder; it goes on with what a kill left of the same one.

    Raises BadInput on what cannot be exported so, on another export's half beside the target, and
    on a folder that exists; StoreError where the target cannot be written.
    """
    options = options or ExportOptions()
    target = target.resolve()  # a link goes on being one
    draft = ExportDraft(target)
    what = _identity(source, form, target, options)
    source = source.resumed(draft.state(what) or {}) if not options.restart else source
    if isinstance(form, LineFormat):
        writer_of(source, form)
        _check_file(target)
    elif not draft.whole(what):
        check_target(form, target)
    if isinstance(form, LineFormat) or not reads_shards(source, form):
        source.check()
    fresh = ResumeJournal(what, f"{form.name} of {source.says}", source.state())
    journal, resumed = draft.begin(fresh, restart=options.restart)
    if isinstance(form, LineFormat):
        journal = write_lines(source, form, draft, journal, options.rules, on_progress)
    else:
        journal = write_tables(
            source, form, draft, journal, options.rules, on_progress, options.shard_size
        )
    losses = losses_of(journal.losses)
    files = journal.files or 1
    return Summary(journal.records, journal.runs, files, journal.bytes, losses, resumed)


def _check_file(target: Path) -> None:
    if target.exists() and not target.is_file():
        what = "a directory" if target.is_dir() else "no file"
        raise BadInput(
            f"{target} is {what}, and lines go into a file; without -o they go to stdout",
            param="output",
        )


def stream(
    source: ExportSource,
    form: Format,
    tally: ExportCounts,
    rules: LossRules,
    on_progress: OnProgress,
) -> Iterator[bytes]:
    """The lines of an export, in blocks; `tally` counts along. Raises BadInput, StoreError."""
    if not isinstance(form, LineFormat):
        raise BadInput(
            f"format {form.name!r} makes Parquet files, not lines: give -o a folder or a file",
            param="output",
        )
    writer_of(source, form)
    source.check()
    return _streamed(source, form, tally, rules, on_progress)


def _streamed(
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
    """Two exports with the same are the same one. What is skipped or refused is no part of it."""
    how: dict[str, int] = {"zst": target.suffix == ".zst"}
    if isinstance(form, TableFormat):
        how = {"single": target.suffix == ".parquet", "shard_size": options.shard_size}
    return digest([EXPORTS, form.name, source.identity(), how])
