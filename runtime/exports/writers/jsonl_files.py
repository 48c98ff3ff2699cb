"""Exports of lines, or of one page: write them to a file that survives kills, or stream them.

Lines are made in blocks whose borders depend on the items alone. A compressed file has a frame per
block, so an export resumed after a kill ends with the same bytes. Called by exporter.py. Read next:
resume_journal.py.
"""

import os
import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import BinaryIO, NamedTuple

from cray_agents.errors import BadInput, StoreError
from cray_agents.records import Run
from cray_agents.runtime.disk import durable
from cray_agents.runtime.exports.export_format import FULL, Json, LineFormat, Written, line_of
from cray_agents.runtime.exports.sources.export_source import ExportSource
from cray_agents.runtime.exports.writers.counts import (
    ExportCounts,
    ExportProgress,
    LossRules,
    OnProgress,
)
from cray_agents.runtime.exports.writers.resume_journal import ExportDraft, ResumeJournal

ITEMS = 500  # in a block, at most
BLOCK = 2 << 20  # bytes of lines that end a block
EVERY_SECONDS = 0.25  # between two saves of the journal
LEVEL = 3  # zstd's own default


class Block(NamedTuple):
    """The lines of some items, and the cursor of the last of them."""

    data: bytes
    cursor: str


def blocks(
    source: ExportSource,
    form: LineFormat,
    tally: ExportCounts,
    rules: LossRules,
    after: str = "",
    before: int = 0,
) -> Iterator[Block]:
    """Yield the lines of the items after a cursor and count them in `tally`.

    `before`: the bytes of earlier blocks. Raises BadInput, StoreError.
    """
    write, page = writer_of(source, form), form.page
    if page is None:
        encode: Callable[[Run, Json], bytes] = line_of
    elif tally.losses[FULL]:  # a kill came before the end was noted
        return
    else:
        encode = page.encode
        if before == 0:
            head = page.head()
            before = len(head)
            yield Block(head, after)
    lines: list[bytes] = []
    size = items = 0
    cursor = after
    for item in source.items(after):
        if page is not None and before + size >= page.most_bytes:
            left = (source.count() or tally.runs + 1) - tally.runs
            tally.add(FULL, left, rules)
            yield Block(b"".join((*lines, page.full)), cursor)
            return
        written = tally.write_item(item, write, rules)
        for record in written.records:
            line = encode(item.runs[0], record)
            lines += (line, b"\n")
            size += len(line) + 1
        items += 1
        cursor = item.cursor
        if items >= ITEMS or size >= BLOCK:
            yield Block(b"".join(lines), cursor)
            before += size
            lines, size, items = [], 0, 0
    if items:
        yield Block(b"".join(lines), cursor)


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


def write_lines(
    source: ExportSource,
    form: LineFormat,
    draft: ExportDraft,
    journal: ResumeJournal,
    rules: LossRules,
    on_progress: OnProgress,
) -> ResumeJournal:
    """Write a file of lines from the journal's cursor on and publish it.

    Raises BadInput, StoreError.
    """
    if not journal.whole:
        compress = bytes if form.pack else compressor(draft.target)
        tally, total = journal.tally(), source.count()
        with _open_part(draft.part, journal.bytes) as file:
            saved = time.monotonic()
            for block in blocks(source, form, tally, rules, journal.cursor, journal.bytes):
                _write(file, compress(block.data))
                journal = journal.advance(block.cursor, file.tell(), tally)
                if time.monotonic() - saved > EVERY_SECONDS:
                    _flush(file)
                    draft.save(journal)
                    saved = time.monotonic()
                on_progress(ExportProgress(journal.records, journal.runs, journal.bytes, total))
            _flush(file)
    if form.pack is None:
        draft.publish(journal, draft.part)
        return journal
    if not journal.whole:
        draft.save(journal)
        journal = replace(journal, bytes=_pack(form.pack, draft))
    draft.publish(journal, draft.packed)
    return journal


def _pack(pack: Callable[[Iterable[bytes], Path], None], draft: ExportDraft) -> int:
    """Make the file of the lines; return its size."""
    try:
        with draft.part.open("rb") as lines:
            pack(lines, draft.packed)
        return draft.packed.stat().st_size
    except OSError as error:
        raise _write_error(error) from error


def compressor(target: Path) -> Callable[[bytes], bytes]:
    """Return the encoder of a block's bytes: a zstd frame per block for a `.zst` target."""
    if target.suffix != ".zst":
        return bytes
    import zstandard

    return zstandard.ZstdCompressor(level=LEVEL, write_checksum=True).compress


def _open_part(part: Path, size: int) -> BinaryIO:
    """Open the part for appending, cut to the size that the journal records."""
    file = os.fdopen(os.open(part, os.O_RDWR | os.O_CREAT, 0o666), "r+b")
    if size == 0:
        durable.sync(part.parent)  # makes the new name durable
    file.truncate(size)
    file.seek(size)
    return file


def _write(file: BinaryIO, data: bytes) -> None:
    try:
        file.write(data)
    except OSError as error:
        raise _write_error(error) from error


def _flush(file: BinaryIO) -> None:
    try:
        file.flush()
        os.fsync(file.fileno())
    except OSError as error:
        raise _write_error(error) from error


def _write_error(error: OSError) -> StoreError:
    return StoreError(
        f"the export cannot be written: {error.strerror}; when it can be, the same command goes on"
    )
