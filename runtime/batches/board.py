"""Board: one worker's view of the open batches; it chooses the next chunk to claim.

The oldest batch gets half of a worker, or all of it while no other batch is open. The other batches
take turns in the other half, one chunk at a time. So a small batch does not wait for a huge one.
All methods block. worker.py calls them from one thread at a time.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Literal

from cray_agents.errors import Corrupt, NewerFormat
from cray_agents.paths import Home
from cray_agents.runtime.batches import claims
from cray_agents.runtime.batches.batch_records import (
    PREFIX,
    Accepted,
    BatchEnd,
    BatchFolder,
    BatchRequest,
    LineError,
    Stopped,
)
from cray_agents.runtime.batches.chunks import chunk_name, seal_path, sealed_chunks
from cray_agents.runtime.batches.claims import Holder
from cray_agents.runtime.batches.validation import Row, read_index

SWEEP_INTERVAL = 5.0  # seconds between searches for chunks whose worker has died

log = logging.getLogger(__name__)

Lane = Literal["oldest", "others"]
Chore = Literal["validation", "final"]


@dataclass(eq=False)
class OpenBatch:
    """A batch without an end.json."""

    folder: BatchFolder
    request: BatchRequest
    accepted: Accepted | None = None
    index: list[Row] = field(default_factory=list)
    next: int = 0  # the first chunk that this worker has not tried to claim
    own: set[int] = field(default_factory=set)  # chunks that this worker holds
    done: set[int] = field(default_factory=set)  # chunks known to be sealed
    stopped: Stopped | None = None
    busy: bool = False  # this worker validates or publishes it
    swept_at: float = 0.0  # time.monotonic() of the last search for chunks of dead workers
    served_at: float = 0.0  # time.monotonic() when the lane "others" last took a chunk


@dataclass(frozen=True)
class ClaimedChunk:
    """A chunk that this worker has claimed."""

    batch: OpenBatch
    chunk: int
    fence: int


class Board:
    """The open batches of a home."""

    def __init__(self, home: Home, holder: Holder) -> None:
        self._home = home
        self._holder = holder
        self._open: dict[str, OpenBatch] = {}
        self._ended: set[str] = set()
        self._oldest = ""  # the batch from which the lane "oldest" last took a chunk

    def refresh(self) -> None:
        """Read new batches, decisions to stop, and ends from the disk."""
        for path in self._home.batches.glob(f"{PREFIX}*"):
            if path.name not in self._open and path.name not in self._ended:
                self._begin(BatchFolder(path))
        for name, batch in list(self._open.items()):
            if batch.folder.end_file.exists():
                self._end(name, batch)
                continue
            batch.stopped = batch.folder.stopped(batch.request)
            try:
                if batch.accepted is None and (accepted := batch.folder.accepted()) is not None:
                    batch.index = read_index(batch.folder.index, accepted.index_sha256)
                    batch.accepted = accepted
            except Corrupt as error:
                self.fail(batch, error)
                continue
            except FileNotFoundError:  # another worker has ended it since
                continue
            if batch.accepted is not None and batch.next >= len(batch.index):
                batch.done.update(sealed_chunks(batch.folder))

    def claim_chore(self, chore: Chore) -> OpenBatch | None:
        """Claim a batch to validate or to publish. Return None if there is none."""
        for batch in self._by_age():
            if batch.busy or _due_chore(batch) != chore:
                continue
            if chore == "validation" and batch.stopped:
                batch.folder.finish(BatchEnd(at=int(time.time()), status=batch.stopped))
                continue
            newest = claims.fences(batch.folder.claims).get(chore, 0)
            if self._holder.take(batch.folder.claims, chore, newest):
                batch.busy = True
                return batch
        return None

    def claim(self, lane: Lane) -> ClaimedChunk | None:
        """Claim a chunk for a lane. Return None if there is none."""
        batches = self._by_age()
        if lane == "others":
            batches = [batch for batch in batches if batch.folder.id != self._oldest]
            batches.sort(key=lambda batch: batch.served_at)
        for batch in batches:
            if (claimed := self._claim_chunk(batch)) is not None:
                if lane == "oldest":
                    self._oldest = batch.folder.id
                else:
                    batch.served_at = time.monotonic()
                return claimed
        return None

    def release(self, claimed: ClaimedChunk) -> None:
        """Mark a chunk as sealed, and remove the claims on it."""
        claimed.batch.done.add(claimed.chunk)
        claimed.batch.own.discard(claimed.chunk)
        claims.release(claimed.batch.folder.claims, chunk_name(claimed.chunk), claimed.fence)

    def fail(self, batch: OpenBatch, error: Corrupt) -> None:
        """End a batch that has a damaged file. The other batches go on."""
        log.error("%s failed: %s", batch.folder.id, error)
        errors = [LineError(code="damaged", message=str(error))]
        batch.folder.finish(BatchEnd(at=int(time.time()), status="failed", errors=errors))

    def _by_age(self) -> list[OpenBatch]:
        return sorted(self._open.values(), key=_age)

    def _begin(self, folder: BatchFolder) -> None:
        try:
            self._open[folder.id] = OpenBatch(folder, folder.request())
        except (Corrupt, NewerFormat) as error:  # one such batch must not block the others
            log.error("%s is left alone: %s", folder.id, error)
            self._ended.add(folder.id)

    def _end(self, name: str, batch: OpenBatch) -> None:
        """Forget a batch. Clean its folder if a worker died after ending it and before cleaning."""
        self._ended.add(name)
        del self._open[name]
        if batch.folder.claims.exists():
            batch.folder.clean()

    def _claim_chunk(self, batch: OpenBatch) -> ClaimedChunk | None:
        if batch.accepted is None or len(batch.done) == len(batch.index):
            return None
        exhausted = batch.next >= len(batch.index)
        if exhausted or time.monotonic() - batch.swept_at >= SWEEP_INTERVAL:
            if (claimed := self._sweep(batch, exhausted)) is not None:
                return claimed
            batch.swept_at = time.monotonic()
        while batch.next < len(batch.index):
            chunk = batch.next
            batch.next += 1
            if chunk not in batch.done and (claimed := self._take(batch, chunk, 0)) is not None:
                return claimed
        return None

    def _sweep(self, batch: OpenBatch, exhausted: bool) -> ClaimedChunk | None:
        """Claim a chunk of a dead worker. Try every unsealed chunk if no fresh one is left."""
        newest = claims.fences(batch.folder.claims)
        batch.done.update(sealed_chunks(batch.folder))
        names = {chunk_name(chunk): chunk for chunk in range(len(batch.index))} if exhausted else {}
        names |= {name: int(name) for name in newest if name.isdecimal()}
        for name, chunk in sorted(names.items()):
            if chunk in batch.done or chunk in batch.own:
                continue
            if (claimed := self._take(batch, chunk, newest.get(name, 0))) is not None:
                if claimed.fence > 1:
                    log.info(
                        "%s: took chunk %d over, claim %d", batch.folder.id, chunk, claimed.fence
                    )
                return claimed
        return None

    def _take(self, batch: OpenBatch, chunk: int, newest: int) -> ClaimedChunk | None:
        folder = batch.folder
        fence = self._holder.take(folder.claims, chunk_name(chunk), newest)
        if fence is None:
            return None
        # sealing removes the claims, so a chunk can be claimed again; ending removes the seals
        if seal_path(folder, chunk).exists() or folder.end_file.exists():
            claims.release(folder.claims, chunk_name(chunk), fence)
            batch.done.add(chunk)
            return None
        batch.own.add(chunk)
        return ClaimedChunk(batch, chunk, fence)


def _due_chore(batch: OpenBatch) -> Chore | None:
    if batch.accepted is None:
        return "validation"
    return "final" if len(batch.done) == len(batch.index) else None


def _age(batch: OpenBatch) -> tuple[int, str]:
    return batch.request.created_at, batch.folder.id
