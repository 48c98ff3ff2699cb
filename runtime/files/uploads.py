"""OpenAI's uploads: a large file in parts, sent in any order and in parallel, put together once.

    uploads/<id>/upload.json         what was announced
    uploads/<id>/parts/<part>.json   a part that was acknowledged; its content is a blob
    uploads/<id>/end.json            how it ended: completed, as which file, or cancelled

Each is made by exclusive create and never changed, so that of a `complete` and a `cancel`, or of
two completes, the first counts, and whoever dies in between can do it again. An upload that names
its content's sha256 is named by it: asking again finds it, with the parts that it has, and content
that is there already is not sent. Called by routes/uploads.py; everything here blocks.
"""

import contextlib
import os
import time
from collections.abc import Iterator, Sequence
from itertools import count
from pathlib import Path
from typing import Any, Literal

from pydantic import Field

from cray_agents.errors import BadInput, NotFound
from cray_agents.records import Record, digest, new_id
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.files.blobs import GRACE_SECONDS, Blob
from cray_agents.runtime.files.files import ID, ClientPurpose, ExpiresAfter, FileObject, Files

IDLE_SECONDS = 86400.0  # without a new part an upload expires after this
PART_BYTES = 64 * 2**20  # at most, in one part

Status = Literal["pending", "completed", "cancelled", "expired"]


class UploadRequest(Record):
    """What a client announces. `bytes`: of the whole file; `sha256` is ours: see the module."""

    bytes: int = Field(ge=0, strict=True)
    filename: str = Field(min_length=1, max_length=512)
    mime_type: str = Field(max_length=255)
    purpose: ClientPurpose
    expires_after: ExpiresAfter | None = None
    sha256: str | None = Field(None, pattern="^[0-9a-f]{64}$")


class Upload(UploadRequest):
    """What was announced, by whom and when (unix seconds)."""

    id: str
    created_at: float = Field(default_factory=time.time)
    owner: str = ""


class UploadPart(Record):
    """A part that was acknowledged: the same content sent again is the same part."""

    id: str
    upload_id: str
    bytes: int
    sha256: str
    created_at: int = Field(default_factory=lambda: int(time.time()))

    def shown(self) -> dict[str, Any]:
        """What a client sees: OpenAI's fields, `bytes` and `sha256`."""
        return {"object": "upload.part", **self.model_dump(mode="json")}


class UploadEnd(Record):
    """How an upload ended. `file`: what it completed as, to be published unless it is."""

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
        """Begin an upload, or go on with one; completed at once if its content is there.

        Only one that names its sha256 can be gone on with: that of the same owner, content,
        filename and purpose. Returns what `show` does.
        """
        for name in _names(request, owner):
            upload = Upload(**request.model_dump(), id=name, owner=owner)
            self._create(upload)
            upload = self._upload(name)
            if self.status(upload) == "pending":
                self._touch(upload)
                self._complete_known(upload)
            if self.status(upload) == "pending" or self._file(upload) is not None:
                return self.show(upload.id)
        raise AssertionError("the names of an upload do not end")

    def show(self, upload_id: str) -> dict[str, Any]:
        """An upload as clients see it: OpenAI's fields, `sha256` and `parts`. Raises NotFound."""
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
            "file": None if file is None else file.shown(),
            "sha256": upload.sha256,
            "parts": [part.shown() for part in self._parts(upload.id)],
        }

    def owner(self, upload_id: str) -> str:
        """Who began an upload. Raises NotFound."""
        return self._upload(upload_id).owner

    def check_pending(self, upload_id: str) -> Upload:
        """An upload that still takes parts. Raises NotFound, BadInput."""
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
        """Acknowledge a stored content as a part. Raises NotFound, BadInput."""
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
        text = checksums.with_crc(part.model_dump_json().encode())
        durable.create_file(self._part(upload_id, part.id), text)
        return _read_part(self._part(upload_id, part.id))

    def known(self, sha256: str) -> Blob:
        """A content that need not be sent. Raises NotFound, code `content_unknown`."""
        size = self._blobs.keep(sha256) if len(sha256) == 64 and sha256.isalnum() else None
        if size is None:
            raise NotFound(
                f"no content {sha256!r} here: send it as `data`",
                param="sha256",
                code="content_unknown",
            )
        return Blob(sha256, size)

    def complete(
        self, upload_id: str, part_ids: Sequence[str], md5: str | None = None
    ) -> dict[str, Any]:
        """Put the parts together, in this order, as a file; the same again gives the same file.

        md5: of the whole, in hex. Raises NotFound, BadInput. Takes about a second per GiB.
        """
        upload = self._upload(upload_id)
        if self.status(upload) != "completed":
            self.check_pending(upload_id)
            parts = [part.sha256 for part in self._chosen(upload, part_ids)]
            if md5 is not None:
                _same("md5", md5, self._blobs.md5(parts))
            content = self._blobs.join(parts)
            if upload.sha256 is not None:
                _same("sha256", upload.sha256, content.sha256)
            self._finish(upload, content.sha256, part_ids)
        self._check_completed(upload_id, part_ids)
        return self.show(upload_id)

    def cancel(self, upload_id: str) -> dict[str, Any]:
        """End an upload without a file; again is harmless. Raises NotFound, BadInput."""
        upload = self._upload(upload_id)
        if self.status(upload) != "cancelled":
            self.check_pending(upload_id)
            self._write_end(upload_id, UploadEnd(status="cancelled"))
        if self.status(upload) != "cancelled":
            self.check_pending(upload_id)  # a complete was faster
        return self.show(upload_id)

    def _check_completed(self, upload_id: str, part_ids: Sequence[str]) -> None:
        """Whoever ended the upload first, was it as this caller wants it? Raises BadInput."""
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
        """Where an upload stands."""
        end = self._end(upload.id)
        if end is not None:
            return end.status
        return "expired" if self._expires_at(upload) <= time.time() else "pending"

    def used(self) -> set[str]:
        """The contents that uploads hold which are not files yet."""
        used: set[str] = set()
        for folder in self.home.uploads.glob("upload_*"):
            try:
                upload = self._upload(folder.name)
            except NotFound:  # being created
                continue
            if self._end(upload.id) is not None:
                self._file(upload)  # a process that died may have had no time to publish it
            elif self._expires_at(upload) + GRACE_SECONDS > time.time():
                used.update(part.sha256 for part in self._parts(upload.id))
        return used

    def _chosen(self, upload: Upload, part_ids: Sequence[str]) -> list[UploadPart]:
        known = {part.id: part for part in self._parts(upload.id)}
        for part_id in part_ids:
            if part_id not in known:
                raise BadInput(
                    f"upload {upload.id} has no part {part_id!r}",
                    param="part_ids",
                    code="part_not_found",
                )
        parts = [known[part_id] for part_id in part_ids]
        total = sum(part.bytes for part in parts)
        if total != upload.bytes:
            raise BadInput(
                f"these parts hold {total} bytes; the upload was announced with {upload.bytes}",
                param="part_ids",
                code="bytes_mismatch",
            )
        return parts

    def _complete_known(self, upload: Upload) -> None:
        """If the content is there, the upload is done. Raises BadInput."""
        size = None if upload.sha256 is None else self._blobs.keep(upload.sha256)
        if upload.sha256 is None or size is None:
            return
        if size != upload.bytes:
            raise BadInput(
                f"content {upload.sha256} has {size} bytes, not {upload.bytes}",
                param="bytes",
                code="bytes_mismatch",
            )
        self._finish(upload, upload.sha256, [])

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
        """The file of a completed upload, published now if a crash came before; None if deleted."""
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

    def _create(self, upload: Upload) -> None:
        folder = self.home.uploads / upload.id
        (folder / "parts").mkdir(parents=True, exist_ok=True)
        text = checksums.with_crc(upload.model_dump_json().encode())
        durable.create_file(folder / "upload.json", text)
        durable.sync(self.home.uploads)

    def _touch(self, upload: Upload) -> None:
        """Something was done: it expires later."""
        os.utime(self.home.uploads / upload.id / "parts")

    def _expires_at(self, upload: Upload) -> float:
        """The last part, or the last touch, is when the folder of parts changed."""
        return (self.home.uploads / upload.id / "parts").stat().st_mtime + IDLE_SECONDS

    def _upload(self, upload_id: str) -> Upload:
        if ID.fullmatch(upload_id):
            path = self.home.uploads / upload_id / "upload.json"
            with contextlib.suppress(FileNotFoundError):
                return checksums.read_record(Upload, path)
        raise NotFound(f"no upload {upload_id!r}", param="upload_id")

    def _end(self, upload_id: str) -> UploadEnd | None:
        try:
            return checksums.read_record(UploadEnd, self.home.uploads / upload_id / "end.json")
        except FileNotFoundError:
            return None

    def _write_end(self, upload_id: str, end: UploadEnd) -> None:
        path = self.home.uploads / upload_id / "end.json"
        durable.create_file(path, checksums.with_crc(end.model_dump_json().encode()))

    def _part(self, upload_id: str, part_id: str) -> Path:
        return self.home.uploads / upload_id / "parts" / f"{part_id}.json"

    def _parts(self, upload_id: str) -> list[UploadPart]:
        """The parts that were acknowledged, oldest first."""
        folder = self.home.uploads / upload_id / "parts"
        parts = [_read_part(path) for path in folder.glob("part_*.json")]
        return sorted(parts, key=lambda part: (part.created_at, part.id))


def _names(request: UploadRequest, owner: str) -> Iterator[str]:
    """The names an upload may have: of its content, if that is told; a later one once it ended."""
    if request.sha256 is None:
        yield new_id("upload")
        return
    content = [owner, request.sha256, request.bytes, request.filename, request.purpose]
    for number in count(1):
        yield f"upload_{digest(content, 32)}" + (f"-{number}" if number > 1 else "")


def _read_part(path: Path) -> UploadPart:
    return checksums.read_record(UploadPart, path)


def _same(what: str, announced: str, actual: str) -> None:
    if announced.lower() != actual:
        raise BadInput(
            f"the parts, in this order, have {what} {actual}, not {announced}",
            param=what,
            code=f"{what}_mismatch",
        )
