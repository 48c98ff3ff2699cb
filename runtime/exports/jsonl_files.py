"""Exports whose files are JSON lines: to a file that survives kills, or as a stream.

Lines are made in blocks whose borders depend on the items alone: a compressed file is a frame per
block, so that an export which goes on after a kill ends with the same bytes. Called by exporting.py
and the gateway's export route. Read next: journal.py.
"""

import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cray_agents.errors import BadInput, StoreError
from cray_agents.runtime.disk import durable
from cray_agents.runtime.exports.counts import ExportCounts, ExportProgress, LossRules, OnProgress
from cray_agents.runtime.exports.line_formats import LineFormat, Written, line_of
from cray_agents.runtime.exports.resume_journal import ExportDraft, ResumeJournal
from cray_agents.runtime.exports.sources import ExportSource

ITEMS = 500  # in a block, at most
BLOCK = 2 << 20  # bytes of lines that end a block
EVERY_SECONDS = 0.25  # between two journals
LEVEL = 3  # zstd's own default


class Block(NamedTuple):
    """Some items' lines, and where the export stands with them."""

    data: bytes
    cursor: str


def blocks(
    source: ExportSource, form: LineFormat, tally: ExportCounts, rules: LossRules, after: str = ""
) -> Iterator[Block]:
    """The lines of the items after a cursor; `tally` goes along. Raises BadInput, StoreError."""
    write = writer_of(source, form)
    lines: list[bytes] = []
    size = held = 0
    for item in source.items(after):
        written = tally.of(item, write, rules)
        for record in written.records:
            line = line_of(item.runs[0], record)
            lines += (line, b"\n")
            size += len(line) + 1
        held += 1
        if held >= ITEMS or size >= BLOCK:
            yield Block(b"".join(lines), item.cursor)
            lines, size, held = [], 0, 0
        cursor = item.cursor
    if held:
        yield Block(b"".join(lines), cursor)


def writer_of(source: ExportSource, form: LineFormat) -> Callable[..., Written]:
    """What writes an item of this source. Raises BadInput where they do not go together."""
    write = form.of_pair if source.pairs else form.of_run
    if write is None:
        raise BadInput(
            f"format {form.name!r} is of pairs, and {source.says} has none: build a dataset of "
            "pairs with `cray-agents dataset build --method dpo` and export that",
            param="format",
            code="no_pairs",
        )
    return write


def write_lines(
    source: ExportSource,
    form: LineFormat,
    draft: ExportDraft,
    journal: ResumeJournal,
    rules: LossRules,
    on: OnProgress,
) -> ResumeJournal:
    """Go on with a file of lines and publish it. Raises BadInput, StoreError."""
    if not journal.whole:
        compress = compressor(draft.target)
        tally, total = journal.tally(), source.count()
        with _opened(draft.part, journal.bytes) as file:
            saved = time.monotonic()
            for block in blocks(source, form, tally, rules, journal.cursor):
                _write(file, compress(block.data))
                journal = journal.moved(block.cursor, file.tell(), tally)
                if time.monotonic() - saved > EVERY_SECONDS:
                    _flush(file)
                    draft.save(journal)
                    saved = time.monotonic()
                on(ExportProgress(journal.records, journal.runs, journal.bytes, total))
            _flush(file)
    draft.publish(journal, draft.part)
    return journal


def compressor(target: Path) -> Callable[[bytes], bytes]:
    """What a block's bytes become in a file of this name: a zstd frame each in a `.zst`."""
    if target.suffix != ".zst":
        return bytes
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress


def _opened(part: Path, size: int) -> BinaryIO:
    """The part, cut to what the journal knows of, to be appended to."""
    file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    if size == 0:
        durable.sync(part.parent)  # its name
    file.truncate(size)
    file.seek(size)
    return file


def _write(file: BinaryIO, data: bytes) -> None:
    try:
        file.write(data)
    except OSError as error:
        raise _unwritten(error) from error


def _flush(file: BinaryIO) -> None:
    try:
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise _unwritten(error) from error


def _unwritten(error: OSError) -> StoreError:
    return StoreError(
        f"the export cannot be written: {error.strerror}; when it can be, the same command goes on"
    )
