"""How far batches are: counted from the heads of sealed chunks, each read once, and open results.

A sealed chunk never changes, so what was counted of it is kept; of the few results that lie open
only what was appended since the last look is read. Called by queue.py, in threads.
"""

import logging
import threading
from dataclasses import dataclass, field
from pathlib import Path

from cray_agents.errors import Corrupt
from cray_agents.runtime.batches.batch_records import NO_TOKENS, LineCounts, Tokens, add
from cray_agents.runtime.batches.chunks import read_seal, seal_path, sealed
from cray_agents.runtime.batches.folder import BatchFolder
from cray_agents.runtime.disk.checksums import proven

log = logging.getLogger(__name__)

HEAD = 40  # bytes of a result within which its "ok" stands


@dataclass
class Open:
    """Results of a chunk that is not sealed: so far read to `offset`."""

    offset: int = 0
    completed: int = 0
    failed: int = 0


@dataclass
class CountedBatch:
    """What has been counted of a batch."""

    chunks: set[int] = field(default_factory=set)
    completed: int = 0
    failed: int = 0
    tokens: Tokens = NO_TOKENS
    open: dict[Path, Open] = field(default_factory=dict)


class BatchProgress:
    """Counts of the batches that are under way."""

    def __init__(self) -> None:
        self._seen: dict[str, CountedBatch] = {}
        self._lock = threading.Lock()

    def forget(self, batch_id: str) -> None:
        """The batch has ended: its counts stand in its end."""
        with self._lock:
            self._seen.pop(batch_id, None)

    def counts(self, folder: BatchFolder, total: int) -> tuple[LineCounts, Tokens]:
        """Lines answered and failed by now; tokens only of sealed chunks."""
        with self._lock:
            seen = self._seen.setdefault(folder.id, CountedBatch())
            seen.open = _open_results(folder, seen.open)
            for chunk in sealed(folder):
                _count_seal(folder, chunk, seen)
            running = [part for path, part in seen.open.items() if _chunk(path) not in seen.chunks]
            failed = min(total, seen.failed + sum(part.failed for part in running))
            completed = seen.completed + sum(part.completed for part in running)
            counts = LineCounts(
                total=total, completed=min(completed, total - failed), failed=failed
            )
            return counts, seen.tokens


def _count_seal(folder: BatchFolder, chunk: int, seen: CountedBatch) -> None:
    if chunk in seen.chunks:
        return
    try:
        seal = read_seal(seal_path(folder, chunk))
    except FileNotFoundError:  # the batch has ended meanwhile
        return
    seen.chunks.add(chunk)
    seen.completed += seal.counts.completed
    seen.failed += seal.counts.failed
    seen.tokens = add(seen.tokens, seal.tokens)


def _open_results(folder: BatchFolder, known: dict[Path, Open]) -> dict[Path, Open]:
    found: dict[Path, Open] = {}
    for path in folder.results.glob("*.jsonl"):
        part = known.get(path, Open())
        try:
            with path.open("rb") as file:
                file.seek(part.offset)
                for line in file:
                    if not line.endswith(b"\n"):
                        break
                    part.offset += len(line)
                    if not _is_sound(line, path):
                        continue
                    if b'"ok":true' in line[:HEAD]:
                        part.completed += 1
                    else:
                        part.failed += 1
        except FileNotFoundError:  # sealed meanwhile
            continue
        found[path] = part
    return found


def _is_sound(line: bytes, path: Path) -> bool:
    """Whether a result counts; the worker asks again for one that is damaged."""
    try:
        proven(line, path)
    except Corrupt as error:
        log.error("%s: a result that does not count, and is asked again", error)
        return False
    return True


def _chunk(path: Path) -> int:
    return int(path.name.split(".")[0])
