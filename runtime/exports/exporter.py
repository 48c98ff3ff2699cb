"""Exporter: write runs or a dataset in a format of other tools, to a file or a folder.

`export` writes a draft and renames it, so a killed one leaves no half file under the target's name;
started again, it begins anew. `stream` yields lines for a client. Called by the command line and
export_process.py. FORMATS has the formats by name. Read next: sources.py for the items,
export_files.py for the writing.
"""

import difflib
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import cast, get_args

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.queries import RunFilter
from cray_agents.runtime.datasets.reader import SplitName, read_dataset, shards
from cray_agents.runtime.exports.export_files import (
    SHARD_SIZE,
    OnProgress,
    TableFormat,
    draft_of,
    reads_shards,
    stream_lines,
    write_lines,
    write_tables,
    writer_of,
)
from cray_agents.runtime.exports.export_format import (
    ExportCounts,
    ExportLoss,
    LineFormat,
    LossRules,
    describe_losses,
)
from cray_agents.runtime.exports.formats.atif import ATIF
from cray_agents.runtime.exports.formats.fine_tuning_lines import (
    OPENAI,
    OPENAI_PREFERENCE,
    TRL,
    TRL_PREFERENCE,
    TRL_PROMPT_COMPLETION,
)
from cray_agents.runtime.exports.formats.html import HTML
from cray_agents.runtime.exports.formats.huggingface import HUGGINGFACE
from cray_agents.runtime.exports.formats.inspect_eval import EVAL
from cray_agents.runtime.exports.formats.jsonl import JSONL, OPENENV
from cray_agents.runtime.exports.formats.otel import OTEL
from cray_agents.runtime.exports.formats.sharegpt import SHAREGPT
from cray_agents.runtime.exports.formats.tokens import TOKENS
from cray_agents.runtime.exports.formats.verl import VERL
from cray_agents.runtime.exports.sources import DatasetRuns, ExportSource, StoredRuns
from cray_agents.runtime.store import Store

Format = LineFormat | TableFormat
#: An added format is listed here.
_LISTED: tuple[Format, ...] = (
    *(JSONL, OPENAI, OPENAI_PREFERENCE, TRL, TRL_PROMPT_COMPLETION, TRL_PREFERENCE, SHAREGPT, ATIF),
    *(OTEL, OPENENV, EVAL, TOKENS, VERL, HUGGINGFACE, HTML),
)
FORMATS = {each.name: each for each in _LISTED}


@dataclass(frozen=True)
class Summary:
    """Result of an export: `records` lines or rows of `runs` runs (or pairs, or samples)."""

    records: int
    runs: int
    files: int
    bytes: int
    losses: dict[str, ExportLoss]


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
    home: Home, query: RunFilter, skip_missing: bool, names: Sequence[str] = ()
) -> ExportSource:
    """Return the stored runs that match, or those of these names, as a source: see StoredRuns."""
    return StoredRuns(Store(home), query, skip_missing, tuple(names))


def open_dataset(
    home: Home,
    dataset: str,
    form: Format,
    split: str,
    skip_missing: bool,
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
    source = DatasetRuns(Store(home), home, dataset, cast(SplitName, split), pairs, skip_missing)
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
    rules: LossRules | None = None,
    shard_size: int = SHARD_SIZE,
    on_progress: OnProgress = lambda progress: None,
) -> Summary:
    """Write an export to a file or a folder whose Parquet files have `shard_size` rows.

    Raises BadInput if the source does not fit the format or the rules, or if the folder exists.
    Raises StoreError if the target cannot be written.
    """
    target = target.resolve()  # replaces the file behind a link, not the link
    counts = ExportCounts(rules or LossRules())
    if isinstance(form, LineFormat):
        writer_of(source, form)
        _check_file(form, target)
    else:
        _check_folder(form, target)
    if isinstance(form, LineFormat) or not reads_shards(source, form):
        source.check()
    with draft_of(target) as draft:
        files = [draft]
        if isinstance(form, LineFormat):
            compress = target.suffix == ".zst" and form.pack is None
            write_lines(source, form, draft, counts, on_progress, compress=compress)
        else:
            size = None if target.suffix == ".parquet" else shard_size
            files = write_tables(source, form, draft, counts, on_progress, size)
        size_bytes = sum(path.stat().st_size for path in files)
    losses = describe_losses(counts.losses)
    return Summary(counts.records, counts.runs, len(files), size_bytes, losses)


def _check_file(form: LineFormat, target: Path) -> None:
    if form.page is not None and target.suffix == ".zst":
        raise BadInput(f"no browser opens {target.name}: name it {form.suffix}", param="output")
    if target.exists() and not target.is_file():
        kind = "a directory" if target.is_dir() else "no file"
        raise BadInput(
            f"{target} is {kind}, and lines go into a file; without -o they go to stdout",
            param="output",
        )


def _check_folder(form: TableFormat, target: Path) -> None:
    if target.suffix == ".parquet":
        if form.finish is not None:
            raise BadInput(
                f"format {form.name!r} is a folder: {target} looks like a file", param="output"
            )
    elif target.is_file() or (target.is_dir() and any(target.iterdir())):
        single = " (one that ends in .parquet becomes a single file)" if not form.finish else ""
        raise BadInput(
            f"{target} exists already: remove it, or give another -o{single}",
            param="output",
            code="target_exists",
        )


def stream(
    source: ExportSource,
    form: Format,
    counts: ExportCounts,
    on_progress: OnProgress = lambda progress: None,
) -> Iterator[bytes]:
    """Return the lines of an export as blocks, counted in `counts` as they are read.

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
    return stream_lines(source, form, counts, on_progress)
