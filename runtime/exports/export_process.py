"""Export process: make an export for a client of the gateway, on a core of its own.

    python -m cray_agents.runtime.exports.export_process <parent's pid>  < ExportRequest as JSON

Stdout is a line of JSON, {"type", "name", "length"?, "losses"?} or {"error"}, and then the bytes. A
small export of lines, a Parquet file, a log and a folder are made whole before the line, so it has
their length and losses, and a failure is an error. A large export of lines is streamed; if strict,
it is made twice, and the line has its losses. After a failure in the bytes this process exits with
FAILED, and the gateway breaks off the connection. Called by gateway/routes/exports.py.
"""

import os
import shutil
import sys
import tarfile
import time
from collections.abc import Iterator
from contextlib import suppress
from itertools import chain
from pathlib import Path
from typing import Any

import orjson
from pydantic import Field

from cray_agents.errors import CrayError
from cray_agents.paths import Home
from cray_agents.processes import die_with_parent
from cray_agents.queries import RunFilter
from cray_agents.records import StrictRecord, new_id
from cray_agents.runtime.exports import exporter
from cray_agents.runtime.exports.export_format import ExportCounts, LineFormat, LossRules
from cray_agents.runtime.exports.sources import ExportSource

NICE = 10  # the gateway goes first
FAILED = 3  # the exit code
SMALL = 4 << 20  # bytes of lines made before any is sent
PIECE = 1 << 20  # bytes of a file read at a time
LEFT_SECONDS = 86_400.0  # until a killed export's folder is removed
LINES, PARQUET, TAR = "application/x-ndjson", "application/vnd.apache.parquet", "application/x-tar"
PAGE = "text/html; charset=utf-8"
ZIP = "application/zip"


class ExportRequest(StrictRecord):
    """A client's request: a dataset, or the runs of a filter."""

    home: Path
    format: str = "jsonl"
    dataset: str | None = None
    split: str = "train"
    filter: RunFilter = Field(default_factory=RunFilter)
    strict: bool = False
    allow: list[str] = Field(default_factory=list)
    skip_missing: bool = False
    skip_unsupported: bool = False


def main() -> int:
    """Answer on stdout and return the exit code."""
    die_with_parent(int(sys.argv[1]))
    os.nice(NICE)
    out = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # prints go to stderr, not between the bytes
    started = False
    try:
        request = ExportRequest.model_validate_json(sys.stdin.buffer.read())
        for data in answer(request):
            out.write(data)
            out.flush()
            started = True
    except CrayError as error:
        if started:
            print(f"an export broke off: {error}", file=sys.stderr)
        else:
            out.write(_line({"error": error_json(error)}))
            out.flush()
        return FAILED
    return 0


def error_json(error: CrayError) -> dict[str, Any]:
    """Return an error as JSON, from which the gateway makes the same error."""
    return {
        "type": type(error).__name__,
        "message": str(error),
        "code": error.code,
        "param": getattr(error, "param", None),
    }


def answer(request: ExportRequest) -> Iterator[bytes]:
    """Yield the line about the export, then its bytes. Raises CrayError."""
    home, form = Home(request.home), exporter.format_named(request.format)
    if request.dataset is not None:
        source = exporter.open_dataset(
            home, request.dataset, form, request.split, request.skip_missing
        )
    else:
        source = exporter.open_runs(home, request.filter, request.skip_missing)
    rules = LossRules(request.strict, frozenset(request.allow), request.skip_unsupported)
    if isinstance(form, LineFormat) and form.pack is None:
        return _lines(source, form, rules)
    return _files(home, source, form, rules)


def _lines(source: ExportSource, form: LineFormat, rules: LossRules) -> Iterator[bytes]:
    counts = ExportCounts(rules)
    data = exporter.stream(source, form, counts)
    first, size = [], 0
    while size < SMALL and (piece := next(data, None)) is not None:
        first.append(piece)
        size += len(piece)
    media = LINES if form.page is None else PAGE
    head: dict[str, Any] = {"type": media, "name": f"{source.name}.{form.name}{form.suffix}"}
    if size < SMALL:
        head |= {"length": size, "losses": dict(counts.losses)}
    elif rules.strict:
        checked = ExportCounts(rules)
        for _ in exporter.stream(source, form, checked):
            pass
        head |= {"losses": dict(checked.losses)}
    yield _line(head)
    yield from chain(first, data)


def _files(
    home: Home, source: ExportSource, form: exporter.Format, rules: LossRules
) -> Iterator[bytes]:
    """Yield a file, or a folder as a tar, made whole before it is sent."""
    for left in home.exports.iterdir() if home.exports.exists() else ():  # of killed exports
        with suppress(FileNotFoundError):  # another export has ended
            if time.time() - left.stat().st_mtime > LEFT_SECONDS:
                shutil.rmtree(left, ignore_errors=True)
    folder = home.exports / new_id("export")
    name = f"{source.name}.{form.name}"
    if isinstance(form, LineFormat):
        kind, target = ZIP, folder / f"{source.name}{form.suffix}"
    else:
        kind, target = PARQUET, folder / (name if form.finish else f"{name}.parquet")
    try:
        done = exporter.export(source, form, target, rules=rules)
        losses = {code: loss.count for code, loss in done.losses.items()}
        if target.is_dir():
            kind, target = TAR, _packed(target)
        size = target.stat().st_size
        yield _line({"type": kind, "name": target.name, "length": size, "losses": losses})
        with target.open("rb") as file:
            while piece := file.read(PIECE):
                yield piece
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def _packed(folder: Path) -> Path:
    """Pack a folder into a tar beside it, and return that; it has no times."""
    packed = folder.with_name(f"{folder.name}.tar")
    with tarfile.open(packed, "w", format=tarfile.USTAR_FORMAT) as tar:
        for path in sorted(path for path in folder.rglob("*") if path.is_file()):
            about = tarfile.TarInfo(path.relative_to(folder.parent).as_posix())
            about.size = path.stat().st_size
            with path.open("rb") as file:
                tar.addfile(about, file)
    return packed


def _line(value: dict[str, Any]) -> bytes:
    return orjson.dumps(value) + b"\n"


if __name__ == "__main__":
    sys.exit(main())
