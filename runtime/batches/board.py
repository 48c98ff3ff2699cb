"""What there is to do, as one worker sees it: the open batches, and which chunk to take next.

The oldest batch has one half of a worker, and all of it while it is alone; the others take turns in
the other half, a chunk at a time, so that a small batch behind a huge one does not wait for it.
Everything here blocks and is called by one thread at a time: worker.py sees to that.
"""

import logging
import time
from dataclasses import dataclass, field
from typing import Literal

from cray_agents.errors import Corrupt
from cray_agents.paths import Home
from cray_agents.runtime.batches import claims
from cray_agents.runtime.batches.batch_records import (
    Accepted,
    BatchEnd,
    BatchRequest,
    LineError,
    Stopped,
)
from cray_agents.runtime.batches.chunks import chunk_name, seal_path, sealed
from cray_agents.runtime.batches.claims import Holder
from cray_agents.runtime.batches.folder import PREFIX, BatchFolder
from cray_agents.runtime.batches.validation import Row, read_index

SWEEP = 5.0  # seconds between looks for chunks whose worker has died

log = logging.getLogger(__name__)

Lane = Literal["oldest", "others"]


@dataclass(eq=False)
class OpenBatch:
    """A batch that has not ended."""

    folder: BatchFolder
    request: BatchRequest
    accepted: Accepted | None = None
    index: list[Row] = field(default_factory=list)
    next: int = 0  # the first chunk that was never looked at
    mine: set[int] = field(default_factory=set)  # chunks that this worker holds
    done: set[int] = field(default_factory=set)  # chunks known to be sealed
    stopped: Stopped | None = None
    busy: bool = False  # this worker validates or finishes it
    swept: float = 0.0
    served: float = 0.0  # when the lane of the others last took a chunk of it


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
        self._oldest = ""  # the batch whose chunk the lane of the oldest took last

    def refresh(self) -> None:
        """Look what is new: batches, decisions to stop, ends."""
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
            if batch.accepted is not None and batch.next >= len(batch.index):
                batch.done.update(sealed(batch.folder))

    def chore(self, what: Literal["validation", "final"]) -> OpenBatch | None:
        """A batch whose input this worker is to look at, or whose files it is to publish."""
        for batch in self._sorted():
            if batch.busy or _due(batch) != what:
                continue
            if what == "validation" and batch.stopped:
                batch.folder.finish(BatchEnd(at=int(time.time()), status=batch.stopped))
                continue
            newest = claims.fences(batch.folder.claims).get(what, 0)
            if self._holder.take(batch.folder.claims, what, newest):
                batch.busy = True
                return batch
        return None

    def claim(self, lane: Lane) -> ClaimedChunk | None:
        """Claim a chunk for a lane."""
        batches = self._sorted()
        if lane == "others":
            batches = [batch for batch in batches if batch.folder.id != self._oldest]
            batches.sort(key=lambda batch: batch.served)
        for batch in batches:
            if (work := self._claim_of(batch)) is not None:
                if lane == "oldest":
                    self._oldest = batch.folder.id
                else:
                    batch.served = time.monotonic()
                return work
        return None

    def release(self, work: ClaimedChunk) -> None:
        """A chunk is sealed, by this worker or another."""
        work.batch.done.add(work.chunk)
        work.batch.mine.discard(work.chunk)
        claims.release(work.batch.folder.claims, chunk_name(work.chunk), work.fence)

    def fail(self, batch: OpenBatch, error: Corrupt) -> None:
        """End a batch that cannot be finished, for one of its files is damaged; the rest go on."""
        log.error("%s failed: %s", batch.folder.id, error)
        told = [LineError(code="damaged", message=str(error))]
        batch.folder.finish(BatchEnd(at=int(time.time()), status="failed", errors=told))

    def _sorted(self) -> list[OpenBatch]:
        return sorted(self._open.values(), key=_age)

    def _begin(self, folder: BatchFolder) -> None:
        try:
            self._open[folder.id] = OpenBatch(folder, folder.request())
        except Corrupt as error:  # it must not keep the others waiting
            log.error("%s is left alone: %s", folder.id, error)
            self._ended.add(folder.id)

    def _end(self, name: str, batch: OpenBatch) -> None:
        """Forget a batch; clean up after a worker that died between its end and its cleaning."""
        self._ended.add(name)
        del self._open[name]
        if batch.folder.claims.exists():
            batch.folder.clean()

    def _claim_of(self, batch: OpenBatch) -> ClaimedChunk | None:
        if batch.accepted is None or len(batch.done) == len(batch.index):
            return None
        exhausted = batch.next >= len(batch.index)
        if exhausted or time.monotonic() - batch.swept >= SWEEP:
            if (work := self._sweep(batch, exhausted)) is not None:
                return work
            batch.swept = time.monotonic()
        while batch.next < len(batch.index):
            chunk = batch.next
            batch.next += 1
            if chunk not in batch.done and (work := self._take(batch, chunk, 0)) is not None:
                return work
        return None

    def _sweep(self, batch: OpenBatch, exhausted: bool) -> ClaimedChunk | None:
        """A chunk of a dead worker; of all that is left if there are no fresh ones."""
        newest = claims.fences(batch.folder.claims)
        batch.done.update(sealed(batch.folder))
        names = {chunk_name(chunk): chunk for chunk in range(len(batch.index))} if exhausted else {}
        names |= {name: int(name) for name in newest if name.isdecimal()}
        for name, chunk in sorted(names.items()):
            if chunk in batch.done or chunk in batch.mine:
                continue
            if (work := self._take(batch, chunk, newest.get(name, 0))) is not None:
                if work.fence > 1:
                    log.info("%s: took chunk %d over, claim %d", batch.folder.id, chunk, work.fence)
                return work
        return None

    def _take(self, batch: OpenBatch, chunk: int, newest: int) -> ClaimedChunk | None:
        folder = batch.folder
        fence = self._holder.take(folder.claims, chunk_name(chunk), newest)
        if fence is None:
            return None
        # what is sealed has no claims, so this one may be in vain; and what has ended has no seals
        if seal_path(folder, chunk).exists() or folder.end_file.exists():
            claims.release(folder.claims, chunk_name(chunk), fence)
            batch.done.add(chunk)
            return None
        batch.mine.add(chunk)
        return ClaimedChunk(batch, chunk, fence)


def _due(batch: OpenBatch) -> Literal["validation", "final"] | None:
    if batch.accepted is None:
        return "validation"
    return "final" if len(batch.done) == len(batch.index) else None


def _age(batch: OpenBatch) -> tuple[int, str]:
    return batch.request.created_at, batch.folder.id
