"""Progress counts of running batches, from sealed chunks and open result files.

A sealed chunk never changes, so its head is read once. Of a result file, only lines appended since
the last count are read. Called by queue.py, in threads.
"""

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from cray_agents.errors import Corrupt
from cray_agents.runtime.batches.batch_records import NO_TOKENS, LineCounts, Tokens, add_tokens
from cray_agents.runtime.batches.chunks import read_seal, seal_path, sealed_chunks
from cray_agents.runtime.batches.folder import BatchFolder
from cray_agents.runtime.disk.checksums import verify_crc

log = logging.getLogger(__name__)

HEAD = 40  # the "ok" of a result lies within its first bytes


@dataclass
class OpenResults:
    """The counted results of one result file, up to byte `offset`."""

    offset: int = 0
    completed: int = 0
    failed: int = 0


@dataclass
class CountedBatch:
    """The counts of one batch so far."""

    chunks: set[int] = field(default_factory=set)
    completed: int = 0
    failed: int = 0
    tokens: Tokens = NO_TOKENS
    open: dict[Path, OpenResults] = field(default_factory=dict)


class BatchProgress:
    """The counts of all running batches."""

    def __init__(self) -> None:
        self._batches: dict[str, CountedBatch] = {}
        self._lock = threading.Lock()

    def forget(self, batch_id: str) -> None:
        """Drop the counts of an ended batch; end.json holds its counts."""
        with self._lock:
            self._batches.pop(batch_id, None)

    def counts(self, folder: BatchFolder, total: int) -> tuple[LineCounts, Tokens]:
        """Count completed and failed lines so far. Tokens cover sealed chunks only."""
        with self._lock:
            counted = self._batches.setdefault(folder.id, CountedBatch())
            counted.open = _open_results(folder, counted.open)
            for chunk in sealed_chunks(folder):
                _count_seal(folder, chunk, counted)
            open_files = [
                file for path, file in counted.open.items() if _chunk(path) not in counted.chunks
            ]
            failed = min(total, counted.failed + sum(file.failed for file in open_files))
            completed = counted.completed + sum(file.completed for file in open_files)
            counts = LineCounts(
                total=total, completed=min(completed, total - failed), failed=failed
            )
            return counts, counted.tokens


def _count_seal(folder: BatchFolder, chunk: int, counted: CountedBatch) -> None:
    if chunk in counted.chunks:
        return
    try:
        seal = read_seal(seal_path(folder, chunk))
    except FileNotFoundError:  # the batch has ended meanwhile
        return
    counted.chunks.add(chunk)
    counted.completed += seal.counts.completed
    counted.failed += seal.counts.failed
    counted.tokens = add_tokens(counted.tokens, seal.tokens)


def _open_results(folder: BatchFolder, known: dict[Path, OpenResults]) -> dict[Path, OpenResults]:
    results: dict[Path, OpenResults] = {}
    try:
        paths = [path for path in folder.results.iterdir() if path.suffix == ".jsonl"]
    except FileNotFoundError:  # the batch has ended meanwhile
        return results
    for path in paths:
        counts = known.get(path, OpenResults())
        try:
            with path.open("rb") as file:
                file.seek(counts.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    counts.offset += len(line)
                    if not _is_sound(line, path):
                        continue
                    if b'"ok":true' in line[:HEAD]:
                        counts.completed += 1
                    else:
                        counts.failed += 1
        except FileNotFoundError:  # sealed meanwhile
            continue
        results[path] = counts
    return results


def _is_sound(line: bytes, path: Path) -> bool:
    """Tell whether a result is undamaged. The worker sends a damaged one's line again."""
    try:
        verify_crc(line, path)
    except Corrupt as error:
        log.error("%s: a result that does not count, and is asked again", error)
        return False
    return True


def _chunk(path: Path) -> int:
    return int(path.name.split(".")[0])
