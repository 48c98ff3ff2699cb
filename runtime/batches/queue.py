"""The batch queue for the gateway: create, show, list and cancel batches.

It only reads and writes small files; the workers do the work (worker.py). All methods block: call
them in a thread.
"""

import os
import shutil
import threading
import time
from contextlib import suppress
from dataclasses import dataclass, field
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.records import digest, new_id
from cray_agents.runtime.batches.batch_records import (
    NO_TOKENS,
    PREFIX,
    Accepted,
    Batch,
    BatchEnd,
    BatchFolder,
    BatchRequest,
    BatchUsage,
    LineCounts,
    LineErrors,
    Status,
    Tokens,
    add_tokens,
    window_seconds,
)
from cray_agents.runtime.batches.chunks import read_seal, seal_path, sealed_chunks
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.files.files import Files

FIELDS = ("input_file_id", "endpoint", "completion_window", "metadata", "output_expires_after")
PURPOSE = "batch"  # the purpose that an input file must have


@dataclass
class _Progress:
    """The sealed chunks of a batch that were counted, and their lines and tokens."""

    chunks: set[int] = field(default_factory=set)
    completed: int = 0
    failed: int = 0
    tokens: Tokens = NO_TOKENS


class BatchQueue:
    """The batches of a home."""

    def __init__(self, home: Home, files: Files) -> None:
        self._home = home
        self._files = files
        self._progress: dict[str, _Progress] = {}  # of batches that have not ended
        self._lock = threading.Lock()  # of the progress
        self._created: dict[str, int] = {}  # creation times by id

    def create(self, body: dict[str, Any], key: str | None = None, caller: str = "") -> Batch:
        """Queue a batch. The same idempotency `key` of a `caller` returns the same batch.

        Raises BadInput for an invalid body, or if the key was used with another body. Raises
        NotFound if the input file does not exist.
        """
        batch_id = f"{PREFIX}{digest(['key', caller, key], 24)}" if key else new_id("batch")
        request = _request(body, batch_id, int(time.time())).model_copy(update={"owner": caller})
        folder = self._folder(batch_id)
        if not folder.request_file.is_file():
            self._publish(request, folder)
        _check_same(request, folder.request())
        return self._to_batch(folder)

    def _publish(self, request: BatchRequest, folder: BatchFolder) -> None:
        """Make the folder of a batch, unless another process makes it first."""
        try:
            file = self._files.get(request.input_file_id)
        except NotFound as error:
            raise NotFound(str(error), param="input_file_id") from error
        if file.purpose != PURPOSE:
            raise BadInput(
                f"file {file.id} has purpose {file.purpose!r}: upload it with purpose {PURPOSE!r}",
                param="input_file_id",
            )
        complete = request.model_copy(update={"input_sha256": file.sha256})
        draft = BatchFolder(durable.draft_directory(folder.root))
        published = False
        try:
            for directory in (draft.claims, draft.results, draft.done):
                directory.mkdir()
            # a link, so that the batch keeps its input if the file is deleted
            os.link(self._files.path(request.input_file_id), draft.input)
            durable.write_file(draft.request_file, checksums.record_text(complete))
            published = durable.publish_directory(draft.root, folder.root)
        finally:
            if not published:
                shutil.rmtree(draft.root)

    def get(self, batch_id: str) -> Batch:
        """Return one batch. Raises NotFound."""
        return self._to_batch(self.folder(batch_id))

    def owner(self, batch_id: str) -> str:
        """Return the owner of a batch. Raises NotFound."""
        return self.folder(batch_id).request().owner

    def page(self, after: str | None, limit: int) -> checksums.Listing[Batch]:
        """Return batches after `after`, newest first, without damaged ones.

        Raises NotFound if there is no batch `after`.
        """
        ids = self._ids()
        start = 0
        if after is not None:
            if after not in ids:
                raise NotFound(f"no batch {after!r}", param="after")
            start = ids.index(after) + 1
        return checksums.list_whole(
            ids[start:], lambda name: self._to_batch(self._folder(name)), limit
        )

    def cancel(self, batch_id: str) -> Batch:
        """Cancel a batch. Raises NotFound; BadInput if it is ending or has ended otherwise."""
        folder = self.folder(batch_id)
        batch = self._to_batch(folder)
        if batch.status in ("finalizing", "completed", "failed", "expired"):
            raise BadInput(
                f"batch {batch_id} is {batch.status}: it cannot be cancelled any more",
                param="batch_id",
                code="invalid_status",
            )
        if batch.status not in ("cancelling", "cancelled"):
            folder.cancel()
        return self._to_batch(folder)

    def _folder(self, batch_id: str) -> BatchFolder:
        return BatchFolder(self._home.batches / batch_id)

    def folder(self, batch_id: str) -> BatchFolder:
        """Return the folder of a batch. Raises NotFound."""
        folder = self._folder(batch_id)
        if not batch_id.startswith(PREFIX) or not folder.request_file.is_file():
            raise NotFound(f"no batch {batch_id!r}", param="batch_id")
        return folder

    def _ids(self) -> list[str]:
        if not self._home.batches.is_dir():
            return []
        names = [path.name for path in self._home.batches.glob(f"{PREFIX}*")]
        new = [name for name in names if name not in self._created]
        checksums.list_whole(new, self._note_creation)  # a damaged one is the oldest
        return sorted(names, key=lambda name: (self._created.get(name, 0), name), reverse=True)

    def _note_creation(self, name: str) -> None:
        self._created[name] = self._folder(name).request().created_at

    def _to_batch(self, folder: BatchFolder) -> Batch:
        """Build OpenAI's object from the state files. The end is written last, and read first."""
        request, end = folder.request(), folder.end()
        accepted, finalizing = folder.accepted(), folder.finalizing()
        cancelled_at = folder.cancelled_at()
        counts, tokens = LineCounts(), None
        if accepted is not None and end is None:
            counts, tokens = self._count(folder, accepted.lines)
        status: Status = "validating" if accepted is None else "in_progress"
        if finalizing is not None:
            status = "finalizing"
        if cancelled_at is not None and (finalizing is None or finalizing.outcome == "cancelled"):
            status = "cancelling"
        batch = Batch(
            **request.model_dump(
                exclude={"format", "output_expires_after", "owner", "input_sha256"}
            ),
            status=status,
            model=accepted.model if accepted else None,
            in_progress_at=accepted.at if accepted else None,
            finalizing_at=finalizing.at if finalizing else None,
            cancelling_at=cancelled_at if status == "cancelling" else None,
            request_counts=counts,
            usage=BatchUsage.of(tokens) if tokens else None,
        )
        if end is None:  # what was counted is gone where it ended meanwhile
            return batch if folder.end() is None else self._to_batch(folder)
        with self._lock:
            self._progress.pop(folder.id, None)
        return _with_end(batch, end, accepted, cancelled_at)

    def _count(self, folder: BatchFolder, total: int) -> tuple[LineCounts, Tokens]:
        """Count the lines and tokens of sealed chunks, whose heads are read once."""
        with self._lock:
            progress = self._progress.setdefault(folder.id, _Progress())
            for chunk in set(sealed_chunks(folder)) - progress.chunks:
                with suppress(FileNotFoundError):  # the batch has ended meanwhile
                    seal = read_seal(seal_path(folder, chunk))
                    progress.chunks.add(chunk)
                    progress.completed += seal.counts.completed
                    progress.failed += seal.counts.failed
                    progress.tokens = add_tokens(progress.tokens, seal.tokens)
            counts = LineCounts(total=total, completed=progress.completed, failed=progress.failed)
            return counts, progress.tokens


def _with_end(
    batch: Batch, end: BatchEnd, accepted: Accepted | None, cancelled_at: int | None
) -> Batch:
    return batch.model_copy(
        update={
            "status": end.status,
            f"{end.status}_at": end.at,
            "cancelling_at": cancelled_at if end.status == "cancelled" else None,
            "request_counts": end.counts,
            "usage": end.usage or (BatchUsage.of((0, 0, 0, 0, 0)) if accepted else None),
            "output_file_id": end.output_file_id,
            "error_file_id": end.error_file_id,
            "errors": LineErrors(data=end.errors) if end.errors else None,
        }
    )


def _check_same(request: BatchRequest, first: BatchRequest) -> None:
    """Raise BadInput if an idempotency key was used for a different batch."""
    if any(getattr(request, name) != getattr(first, name) for name in FIELDS):
        raise BadInput(
            "this Idempotency-Key was used for another batch: send the same request again, or "
            "choose another key",
            param="Idempotency-Key",
            code="idempotency_key_reused",
        )


def _request(body: dict[str, Any], batch_id: str, now: int) -> BatchRequest:
    """Parse the body of a client's request. Raises BadInput."""
    for name in body:
        if name not in FIELDS:
            raise BadInput(
                f"unknown field {name[:64]!r}; there are {', '.join(FIELDS)}",
                param=name[:64],
                code="unknown_parameter",
            )
    for name in FIELDS[:3]:
        if not isinstance(body.get(name), str):
            raise BadInput(f"{name} must be given as a string", param=name)
    expires = now + window_seconds(body["completion_window"])
    fixed = {"id": batch_id, "created_at": now, "expires_at": expires}
    try:
        return BatchRequest.model_validate({**body, **fixed})
    except ValidationError as error:
        first = error.errors()[0]
        param = ".".join(str(part) for part in first["loc"])
        raise BadInput(f"{param}: {first['msg']}", param=param) from error
