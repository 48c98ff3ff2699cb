"""Uploads: OpenAI's way to send a large file in parts, in any order and in parallel.

    uploads/<id>/upload.json         the announced upload
    uploads/<id>/parts/<part>.json   an acknowledged part; its content is a blob
    uploads/<id>/end.json            the end: completed, with the file's id, or cancelled

Each record is made by exclusive create and never changed. Of a `complete` and a `cancel`, or of two
completes, the first counts, and after a crash either can be repeated. A client that was cut off
asks for the upload, whose parts are those that it need not send again.

A sweep removes contents that no file or upload uses, an hour after their last use: the parts of
completed and abandoned uploads, and deleted and expired files. The gateway sweeps now and then;
several processes may do so at once. Records of ended uploads stay: they are small, and a repeated
`complete` needs them. Called by gateway/routes/files.py; everything in here blocks.
"""

import contextlib
import logging
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cray_agents.errors import BadInput, Corrupt, NewerFormat, NotFound
from cray_agents.records import Record, digest, new_id
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.files.blobs import GRACE_SECONDS, Blob
from cray_agents.runtime.files.files import ID, ClientPurpose, ExpiresAfter, FileObject, Files

IDLE_SECONDS = 86400.0  # without a new part until an upload expires
UPLOAD_FORMAT = 1  # of an upload's folder
SWEEP_INTERVAL = 3600.0  # between two sweeps
PART_BYTES = 64 * 2**20  # of one part, at most

log = logging.getLogger(__name__)

Status = Literal["pending", "completed", "cancelled", "expired"]


class UploadRequest(Record):
    """An announced upload. `bytes` is the whole file's size."""

    bytes: int = Field(ge=0, strict=True)
    filename: str = Field(min_length=1, max_length=512)
    mime_type: str = Field(max_length=255)
    purpose: ClientPurpose
    expires_after: ExpiresAfter | None = None


class Upload(UploadRequest):
    """An upload's record: the announcement, its owner, and its time in unix seconds."""

    id: str
    created_at: float = Field(default_factory=time.time)
    owner: str = ""
    format: int = UPLOAD_FORMAT


class UploadPart(Record):
    """An acknowledged part: OpenAI's fields, `bytes` and `sha256`.

    The same content sent again is the same part.
    """

    id: str
    object: Literal["upload.part"] = "upload.part"
    upload_id: str
    bytes: int
    sha256: str
    created_at: int = Field(default_factory=lambda: int(time.time()))


class UploadEnd(Record):
    """The end of an upload. A completed one is published as `file_id`, if it was not yet."""

    status: Literal["completed", "cancelled"]
    part_ids: list[str] = Field(default_factory=list)
    file_id: str = ""
    sha256: str = ""
    expires_at: float | None = None


class Uploads:
    """The uploads under one home; any number of processes may use them at once."""

    def __init__(self, files: Files) -> None:
        self.home = files.home
        self._files = files
        self._blobs = files.blobs

    def create(self, request: UploadRequest, owner: str = "") -> dict[str, Any]:
        """Begin an upload; return it as `show` does."""
        upload = Upload(**request.model_dump(), id=new_id("upload"), owner=owner)
        folder = self.home.uploads / upload.id
        (folder / "parts").mkdir(parents=True)
        durable.create_file(folder / "upload.json", checksums.record_text(upload))
        durable.sync(self.home.uploads)
        return self.show(upload.id)

    def show(self, upload_id: str) -> dict[str, Any]:
        """Return an upload as clients see it: OpenAI's fields, and `parts`.

        Raises NotFound.
        """
        upload = self._upload(upload_id)
        file = self._file(upload)
        return {
            "id": upload.id,
            "object": "upload",
            "bytes": upload.bytes,
            "created_at": int(upload.created_at),
            "expires_at": int(self._expires_at(upload)),
            "filename": upload.filename,
            "purpose": upload.purpose,
            "status": self.status(upload),
            "file": None if file is None else file.to_openai(),
            "parts": [part.model_dump(mode="json") for part in self._list_parts(upload.id)],
        }

    def owner(self, upload_id: str) -> str:
        """Return the owner of an upload. Raises NotFound."""
        return self._upload(upload_id).owner

    def check_pending(self, upload_id: str) -> Upload:
        """Return an upload that still takes parts. Raises NotFound, BadInput."""
        upload = self._upload(upload_id)
        status = self.status(upload)
        if status != "pending":
            raise BadInput(
                f"upload {upload_id} is {status}: create another",
                param="upload_id",
                code=f"upload_{status}",
            )
        return upload

    def add_part(self, upload_id: str, content: Blob) -> UploadPart:
        """Record a stored content as a part. Raises NotFound, BadInput."""
        upload = self.check_pending(upload_id)
        if content.size > min(upload.bytes, PART_BYTES):
            raise BadInput(
                f"a part of {content.size} bytes: at most {PART_BYTES}, and the whole upload "
                f"was announced with {upload.bytes}",
                param="data",
                code="part_too_large",
            )
        part = UploadPart(
            id=f"part_{digest([upload_id, content.sha256], 24)}",
            upload_id=upload_id,
            bytes=content.size,
            sha256=content.sha256,
        )
        durable.create_file(self._part_file(upload_id, part.id), checksums.record_text(part))
        return _read_part(self._part_file(upload_id, part.id))

    def complete(
        self, upload_id: str, part_ids: Sequence[str], md5: str | None = None
    ) -> dict[str, Any]:
        """Join the parts in this order to a file. A repeat gives the same file.

        `md5` is the whole file's, in hex. Takes about a second per GiB. Raises NotFound, BadInput.
        """
        upload = self._upload(upload_id)
        if self.status(upload) != "completed":
            self.check_pending(upload_id)
            contents = [part.sha256 for part in self._select_parts(upload, part_ids)]
            if md5 is not None:
                _check_md5(md5, self._blobs.md5(contents))
            content = self._blobs.join(contents)
            self._finish(upload, content.sha256, part_ids)
        self._check_completed(upload_id, part_ids)
        return self.show(upload_id)

    def cancel(self, upload_id: str) -> dict[str, Any]:
        """End an upload without a file. A repeat is harmless. Raises NotFound, BadInput."""
        upload = self._upload(upload_id)
        if self.status(upload) != "cancelled":
            self.check_pending(upload_id)
            self._write_end(upload_id, UploadEnd(status="cancelled"))
        if self.status(upload) != "cancelled":
            self.check_pending(upload_id)  # raises: a complete was faster
        return self.show(upload_id)

    def _check_completed(self, upload_id: str, part_ids: Sequence[str]) -> None:
        """Raise BadInput if the upload ended otherwise than completed from these parts."""
        end = self._end(upload_id)
        if end is None or end.status != "completed":
            self.check_pending(upload_id)
        elif end.part_ids != list(part_ids):
            raise BadInput(
                f"upload {upload_id} was completed from other parts",
                param="part_ids",
                code="upload_completed",
            )

    def status(self, upload: Upload) -> Status:
        """Return an upload's status."""
        end = self._end(upload.id)
        if end is not None:
            return end.status
        return "expired" if self._expires_at(upload) <= time.time() else "pending"

    def contents_in_use(self) -> set[str]:
        """Return the contents of pending uploads' parts."""
        used: set[str] = set()
        for folder in self.home.uploads.glob("upload_*"):
            try:
                upload = self._upload(folder.name)
            except NotFound:  # being created
                continue
            if self._end(upload.id) is not None:
                self._file(upload)  # publishes it if a crash prevented that
            elif self._expires_at(upload) + GRACE_SECONDS > time.time():
                used.update(part.sha256 for part in self._list_parts(upload.id))
        return used

    def _select_parts(self, upload: Upload, part_ids: Sequence[str]) -> list[UploadPart]:
        by_id = {part.id: part for part in self._list_parts(upload.id)}
        for part_id in part_ids:
            if part_id not in by_id:
                raise BadInput(
                    f"upload {upload.id} has no part {part_id!r}",
                    param="part_ids",
                    code="part_not_found",
                )
        selected = [by_id[part_id] for part_id in part_ids]
        total = sum(part.bytes for part in selected)
        if total != upload.bytes:
            raise BadInput(
                f"these parts hold {total} bytes; the upload was announced with {upload.bytes}",
                param="part_ids",
                code="bytes_mismatch",
            )
        return selected

    def _finish(self, upload: Upload, sha256: str, part_ids: Sequence[str]) -> None:
        after = upload.expires_after
        self._write_end(
            upload.id,
            UploadEnd(
                status="completed",
                part_ids=list(part_ids),
                file_id=new_id("file").replace("_", "-"),
                sha256=sha256,
                expires_at=None if after is None else time.time() + after.seconds,
            ),
        )

    def _file(self, upload: Upload) -> FileObject | None:
        """Return a completed upload's file, or None if it was deleted.

        Publishes the file if a crash prevented that.
        """
        end = self._end(upload.id)
        if end is None or end.status != "completed":
            return None
        with contextlib.suppress(NotFound):
            return self._files.get(end.file_id)
        with contextlib.suppress(NotFound):
            return self._files.publish(
                end.sha256,
                filename=upload.filename,
                purpose=upload.purpose,
                expires_at=end.expires_at,
                file_id=end.file_id,
                owner=upload.owner,
            )
        return None

    def _expires_at(self, upload: Upload) -> float:
        # the folder's time is that of the last part
        return (self.home.uploads / upload.id / "parts").stat().st_mtime + IDLE_SECONDS

    def _upload(self, upload_id: str) -> Upload:
        if ID.fullmatch(upload_id):
            path = self.home.uploads / upload_id / "upload.json"
            with contextlib.suppress(FileNotFoundError):
                return checksums.read_record(Upload, path, UPLOAD_FORMAT)
        raise NotFound(f"no upload {upload_id!r}", param="upload_id")

    def _end(self, upload_id: str) -> UploadEnd | None:
        return checksums.find_record(UploadEnd, self.home.uploads / upload_id / "end.json")

    def _write_end(self, upload_id: str, end: UploadEnd) -> None:
        path = self.home.uploads / upload_id / "end.json"
        durable.create_file(path, checksums.record_text(end))

    def _part_file(self, upload_id: str, part_id: str) -> Path:
        return self.home.uploads / upload_id / "parts" / f"{part_id}.json"

    def _list_parts(self, upload_id: str) -> list[UploadPart]:
        """Return the acknowledged parts, oldest first."""
        folder = self.home.uploads / upload_id / "parts"
        uploaded = [_read_part(path) for path in folder.glob("part_*.json")]
        return sorted(uploaded, key=lambda part: (part.created_at, part.id))


def _read_part(path: Path) -> UploadPart:
    return checksums.read_record(UploadPart, path)


def _check_md5(announced: str, actual: str) -> None:
    if announced.lower() != actual:
        raise BadInput(
            f"the parts, in this order, have md5 {actual}, not {announced}",
            param="md5",
            code="md5_mismatch",
        )


def sweep(files: Files, uploads: Uploads, grace: float = GRACE_SECONDS) -> int:
    """Remove contents not in use for `grace` seconds; return their number."""

    def in_use() -> set[str]:
        pending = uploads.contents_in_use()  # first: this publishes files that a crash left out
        return pending | files.delete_expired()

    return files.blobs.sweep(in_use, grace)


class Sweeper:
    """A sweep at most every SWEEP_INTERVAL, and one at a time. It blocks."""

    def __init__(self, files: Files, uploads: Uploads) -> None:
        self._files = files
        self._uploads = uploads
        self._lock = threading.Lock()
        self._last = -SWEEP_INTERVAL

    def sweep_if_due(self) -> None:
        """Sweep if the last time was SWEEP_INTERVAL ago."""
        if time.monotonic() - self._last < SWEEP_INTERVAL or not self._lock.acquire(blocking=False):
            return
        try:
            self._last = time.monotonic()
            sweep(self._files, self._uploads)
        except (Corrupt, NewerFormat) as error:  # a record that cannot be read may use any content
            log.error("unused contents are kept: %s", error)
        finally:
            self._lock.release()
