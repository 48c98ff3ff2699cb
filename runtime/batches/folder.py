"""A batch's folder: its paths named once, and the files that say where the batch stands.

Each of these files is made once, by an exclusive link, and never changes: so any process can make
the next step, and the same step twice is the step once. Used by all of batches/.
"""

import shutil
import time
from dataclasses import dataclass
from pathlib import Path
from typing import TypeVar

from cray_agents.records import Record
from cray_agents.runtime.batches.batch_records import (
    Accepted,
    BatchEnd,
    BatchRequest,
    Cancelling,
    Finalizing,
    Stopped,
)
from cray_agents.runtime.disk import checksums, durable

PREFIX = "batch_"

Kind = TypeVar("Kind", bound=Record)


@dataclass(frozen=True)
class BatchFolder:
    """`batches/<id>` under the home."""

    root: Path

    @property
    def id(self) -> str:
        return self.root.name

    @property
    def request_file(self) -> Path:
        return self.root / "batch.json"

    @property
    def input(self) -> Path:
        return self.root / "input.jsonl"

    @property
    def index(self) -> Path:
        return self.root / "chunks.jsonl"

    @property
    def claims(self) -> Path:
        return self.root / "claims"

    @property
    def results(self) -> Path:
        return self.root / "results"

    @property
    def done(self) -> Path:
        return self.root / "done"

    @property
    def accepted_file(self) -> Path:
        return self.root / "in_progress.json"

    @property
    def cancelling_file(self) -> Path:
        return self.root / "cancelling.json"

    @property
    def finalizing_file(self) -> Path:
        return self.root / "finalizing.json"

    @property
    def end_file(self) -> Path:
        return self.root / "end.json"

    def request(self) -> BatchRequest:
        """What was asked. Raises FileNotFoundError, Corrupt."""
        return _parse(BatchRequest, self.request_file)

    def accepted(self) -> Accepted | None:
        """That the input is valid."""
        return _read(Accepted, self.accepted_file)

    def finalizing(self) -> Finalizing | None:
        """That every line has its result."""
        return _read(Finalizing, self.finalizing_file)

    def end(self) -> BatchEnd | None:
        """How the batch ended."""
        return _read(BatchEnd, self.end_file)

    def cancelled_at(self) -> int | None:
        """When the batch was asked to stop."""
        cancelling = _read(Cancelling, self.cancelling_file)
        return cancelling.at if cancelling else None

    def stopped(self, request: BatchRequest) -> Stopped | None:
        """Why no more lines are to be asked."""
        if self.cancelling_file.exists():
            return "cancelled"
        return "expired" if time.time() >= request.expires_at else None

    def accept(self, accepted: Accepted) -> None:
        """The index is there, the input valid: lines may be asked."""
        durable.create_file(self.accepted_file, _json(accepted))

    def cancel(self) -> None:
        """Ask for no more lines."""
        durable.create_file(self.cancelling_file, _json(Cancelling(at=int(time.time()))))

    def finalize(self, finalizing: Finalizing) -> Finalizing:
        """Say how the batch will end; what was said first stays."""
        durable.create_file(self.finalizing_file, _json(finalizing))
        return _parse(Finalizing, self.finalizing_file)

    def finish(self, end: BatchEnd) -> None:
        """Say how the batch ended; what was said first stays."""
        durable.create_file(self.end_file, _json(end))

    def clean(self) -> None:
        """Remove what an ended batch needs no more: all its lines are in its output files."""
        for leftover in (self.claims, self.results, self.done):
            shutil.rmtree(leftover, ignore_errors=True)
        for file in (self.input, self.index):
            file.unlink(missing_ok=True)


def _json(record: Record) -> bytes:
    return checksums.with_crc(record.model_dump_json(exclude_none=True).encode())


def _read(kind: type[Kind], path: Path) -> Kind | None:
    try:
        return _parse(kind, path)
    except FileNotFoundError:
        return None


def _parse(kind: type[Kind], path: Path) -> Kind:
    return checksums.read_record(kind, path)
