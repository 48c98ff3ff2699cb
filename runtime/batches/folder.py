"""A batch's folder: its paths, and the files that record its state.

Each state file is made once, by an exclusive link, and never changes. So any process can take the
next step, and repeating a step has no effect. Used by all of batches/.
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
    """The folder `batches/<id>` under the home."""

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
        """Read the request for the batch. Raises FileNotFoundError, Corrupt."""
        return _parse(BatchRequest, self.request_file)

    def accepted(self) -> Accepted | None:
        """Read in_progress.json, which exists once the input is valid."""
        return _read(Accepted, self.accepted_file)

    def finalizing(self) -> Finalizing | None:
        """Read finalizing.json, which exists once every line has its result."""
        return _read(Finalizing, self.finalizing_file)

    def end(self) -> BatchEnd | None:
        """Read end.json, which exists once the batch has ended."""
        return _read(BatchEnd, self.end_file)

    def cancelled_at(self) -> int | None:
        """Return the time of the request to cancel the batch."""
        cancelling = _read(Cancelling, self.cancelling_file)
        return cancelling.at if cancelling else None

    def stopped(self, request: BatchRequest) -> Stopped | None:
        """Return the reason to send no more lines, or None."""
        if self.cancelling_file.exists():
            return "cancelled"
        return "expired" if time.time() >= request.expires_at else None

    def accept(self, accepted: Accepted) -> None:
        """Record that the input is valid. The index must be written before."""
        durable.create_file(self.accepted_file, _json(accepted))

    def cancel(self) -> None:
        """Record a request to send no more lines."""
        durable.create_file(self.cancelling_file, _json(Cancelling(at=int(time.time()))))

    def finalize(self, finalizing: Finalizing) -> Finalizing:
        """Record the outcome of the batch. Return the outcome recorded first."""
        durable.create_file(self.finalizing_file, _json(finalizing))
        return _parse(Finalizing, self.finalizing_file)

    def finish(self, end: BatchEnd) -> None:
        """Record the end of the batch. An end recorded earlier stays."""
        durable.create_file(self.end_file, _json(end))

    def clean(self) -> None:
        """Remove the working files of an ended batch. Its output files hold all lines."""
        for directory in (self.claims, self.results, self.done):
            shutil.rmtree(directory, ignore_errors=True)
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
