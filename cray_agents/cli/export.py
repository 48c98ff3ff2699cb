"""`export` command: write runs or a dataset in a format of another tool.

An interrupted export leaves nothing under the target's name. Read next: runtime/exports/.
"""

import json
import signal
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import asdict
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn, TextColumn

from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import check_stored, errors, note, progress_bar, settings, size
from cray_agents.cli.where import WhereOption, parse_where
from cray_agents.errors import BadInput, StoreError
from cray_agents.runtime.exports import exporter
from cray_agents.runtime.exports.export_files import SHARD_SIZE, ExportProgress, OnProgress
from cray_agents.runtime.exports.export_format import ExportCounts, LossRules, describe_losses
from cray_agents.runtime.exports.exporter import FORMATS, Summary
from cray_agents.server.permissions import make_private

SAY_EVERY = 10.0  # seconds between lines of progress where there is no terminal

HELP = """Write runs, or a dataset, in a format that other tools read.

What a format leaves out is told at the end.

\b
Formats:
""" + "\n".join(f"{each.name:<22} {each.title}" for each in FORMATS.values())

OutputOption = Annotated[
    Path | None,
    typer.Option(
        "--output",
        "-o",
        help="A file; .zst compresses lines; for Parquet a folder, or one file in .parquet. "
        "Without it lines go to stdout.",
    ),
]


commands = Commands()


@commands.command("export", help=HELP)
def export(
    runs: Annotated[
        list[str] | None,
        typer.Argument(
            metavar="[RUN]...",
            help="The ids of the runs to export \\[default: all that match].",
            show_default=False,
        ),
    ] = None,
    form: Annotated[str, typer.Option("--format", "-f", help="One of those above.")] = "jsonl",
    output: OutputOption = None,
    dataset: Annotated[
        str | None, typer.Option("--dataset", help="Export this dataset, not runs.")
    ] = None,
    split: Annotated[
        str | None,
        typer.Option("--split", help="With --dataset: train (the default) or validation."),
    ] = None,
    terms: WhereOption = None,
    strict: Annotated[bool, typer.Option("--strict", help="Treat a loss as an error.")] = False,
    allow: Annotated[
        list[str] | None,
        typer.Option("--allow", help="With --strict: allow the loss of this code; repeatable."),
    ] = None,
    skip_missing: Annotated[
        bool, typer.Option("--skip-missing", help="Leave out runs that were pruned or are damaged.")
    ] = False,
    skip_unsupported: Annotated[
        bool,
        typer.Option("--skip-unsupported", help="Leave out runs that the format cannot carry."),
    ] = False,
    shard_size: Annotated[
        int | None, typer.Option("--shard-size", min=1, help="The rows of a Parquet shard [10000].")
    ] = None,
    quiet: Annotated[bool, typer.Option("--quiet", "-q", help="Say nothing but errors.")] = False,
) -> None:
    """See HELP."""
    chosen = exporter.format_named(form)
    config = settings()
    root = config.root
    check_stored(root)
    make_private(root.root, config.group)  # the export itself gets the modes of the user's umask
    chosen_runs = parse_where(terms)
    if dataset is not None:
        if terms:
            raise BadInput(
                "--where does not go with --dataset, whose runs are chosen when it is built",
                param="where",
            )
        if runs:
            raise BadInput("name runs, or a dataset, not both", param="runs")
        source = exporter.open_dataset(root, dataset, chosen, split or "train", skip_missing)
    else:
        if split:
            raise BadInput("--split is a dataset's: give --dataset, or --where", param="split")
        if runs and terms:
            raise BadInput("--where does not go with the names of runs", param="where")
        source = exporter.open_runs(root, chosen_runs, skip_missing, runs or ())
    rules = LossRules(strict, frozenset(allow or ()), skip_unsupported)
    with _show_progress(quiet) as on_progress:
        if output is None:
            summary = _to_stdout(source, chosen, rules, on_progress)
        else:
            try:
                summary = exporter.export(
                    source,
                    chosen,
                    output,
                    rules=rules,
                    shard_size=shard_size or SHARD_SIZE,
                    on_progress=on_progress,
                )
            except StoreError as error:
                raise BadInput(str(error), param="output") from error
    if given().json:
        report = {"format": form, "output": str(output) if output else None, **asdict(summary)}
        print(json.dumps(report, indent=2), file=sys.stdout if output else sys.stderr)
    elif not quiet:
        _print_summary(summary, output)
        if dataset is not None and split is None and exporter.has_validation(root, dataset):
            note("  the dataset's validation split is not in it: --split validation")


def _to_stdout(source: Any, form: Any, rules: Any, on_progress: Any) -> Summary:
    """Stream lines to stdout; the reader may stop early, as `head` does."""
    if hasattr(signal, "SIGPIPE"):
        signal.signal(signal.SIGPIPE, signal.SIG_DFL)
    counts, written = ExportCounts(rules), 0
    for data in exporter.stream(source, form, counts, on_progress):
        sys.stdout.buffer.write(data)
        written += len(data)
    sys.stdout.buffer.flush()
    losses = describe_losses(counts.losses)
    summary: Summary = exporter.Summary(counts.records, counts.runs, 1, written, losses)
    return summary


@contextmanager
def _show_progress(quiet: bool) -> Iterator[OnProgress]:
    """Show progress: a bar on a terminal, a line every SAY_EVERY seconds in a log."""
    if quiet:
        yield lambda progress: None
    elif errors.is_terminal:
        counts = (MofNCompleteColumn(), "runs", TextColumn("{task.fields[size]}"))
        with progress_bar(*counts) as bars:
            task = bars.add_task("exporting", total=None, size="")
            yield lambda now: bars.update(
                task, completed=now.runs, total=now.total, size=size(now.bytes)
            )
    else:
        yield _Lines()


class _Lines:
    """Progress as lines of a log."""

    def __init__(self) -> None:
        self._last_print = time.monotonic()

    def __call__(self, now: ExportProgress) -> None:
        if time.monotonic() - self._last_print > SAY_EVERY:
            self._last_print = time.monotonic()
            total = f" of {now.total:,}" if now.total is not None else ""
            note(f"{now.runs:,}{total} runs, {size(now.bytes)}")


def _print_summary(summary: Summary, output: Path | None) -> None:
    """Print the counts of an export and its losses."""
    destination = f" to {output}" if output else ""
    note(
        f"{summary.records:,} records of {summary.runs:,} runs, {size(summary.bytes)}{destination}"
    )
    for code, loss in summary.losses.items():
        note(f"  {loss.count:,} times: {loss.sentence} ({code})")
