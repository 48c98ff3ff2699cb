"""File objects of OpenAI's API: a name, a purpose, an expiry, and a blob for the content.

A file is `files/<id>.json`, made by exclusive create and never changed. A deleted file leaves
`files/<id>.deleted`, so that it stays deleted and a list can continue after it. Called by
gateway/routes/files.py and by writers of files for clients: a batch writes its output with
`files.blobs.draft()`, then `publish(draft.publish(), ...)`. Everything in here blocks.
"""

import contextlib
import re
import time
from pathlib import Path
from typing import Any, Literal, get_args

from pydantic import Field

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Record, new_id
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.files.blobs import Blob, Blobs

Order = Literal["asc", "desc"]
ClientPurpose = Literal["assistants", "batch", "fine-tune", "vision", "user_data", "evals"]
Purpose = ClientPurpose | Literal["batch_output", "fine-tune-results"]  # the latter two by us only

CLIENT_PURPOSES: tuple[str, ...] = get_args(ClientPurpose)
PURPOSES = (*CLIENT_PURPOSES, "batch_output", "fine-tune-results")
PAGE_LIMIT = 10_000  # files in one page
LIVING, DELETED = ".json", ".deleted"
ID = re.compile(r"[A-Za-z0-9][A-Za-z0-9._:-]{0,199}")
INTERNAL = {"sha256", "owner", "format"}
FILE_FORMAT = 1  # of a file's record


class ExpiresAfter(Record):
    """A file's expiry, `seconds` after its creation."""

    anchor: Literal["created_at"]
    seconds: int = Field(ge=3600, le=2_592_000)


class File(Record):
    """A file as clients see it: OpenAI's fields. Times are whole unix seconds."""

    id: str
    bytes: int
    created_at: int
    filename: str
    object: Literal["file"] = "file"
    purpose: Purpose
    status: Literal["uploaded", "processed", "error"] = "processed"
    expires_at: int | None = None
    status_details: str | None = None


class FileObject(File):
    """A file's record: also its content and its owner."""

    sha256: str
    owner: str = ""
    format: int = FILE_FORMAT

    @property
    def expired(self) -> bool:
        """True after its expiry."""
        return self.expires_at is not None and self.expires_at <= time.time()

    def to_openai(self) -> dict[str, Any]:
        """Return the file as clients see it: OpenAI's fields."""
        return self.model_dump(mode="json", exclude=INTERNAL, exclude_none=True)


class Files:
    """The files under one home; any number of processes may use them at once."""

    def __init__(self, home: Home) -> None:
        self.home = home
        self.blobs = Blobs(home)
        self._known: dict[str, FileObject] = {}  # records never change: each is read once

    def publish(
        self,
        content: Blob | str,
        *,
        filename: str,
        purpose: str,
        expires_at: float | None = None,
        file_id: str | None = None,
        owner: str = "",
    ) -> FileObject:
        """Make a file of a stored content (a blob or its sha256). It is durable on return.

        With a `file_id`, which no client may choose, this is idempotent: an existing file stays
        unchanged, and a deleted one stays deleted. Raises NotFound, BadInput.
        """
        sha256 = content if isinstance(content, str) else content.sha256
        if purpose not in PURPOSES:
            raise BadInput(f"no purpose {purpose!r}: {', '.join(PURPOSES)}", param="purpose")
        if file_id is not None and self._tombstone(file_id).exists():
            raise NotFound(f"file {file_id!r} was deleted", param="file_id")
        size = self.blobs.keep(sha256)
        if size is None:
            raise NotFound(f"no content {sha256!r}", param="sha256", code="content_unknown")
        file = FileObject(
            id=file_id or new_id("file").replace("_", "-"),
            bytes=size,
            created_at=int(time.time()),
            filename=filename,
            purpose=purpose,
            expires_at=None if expires_at is None else int(expires_at),
            sha256=sha256,
            owner=owner,
        )
        durable.create_file(self._path(file.id), checksums.record_text(file))
        return self.get(file.id)

    def get(self, file_id: str) -> FileObject:
        """Return a file by id. Raises NotFound, also for an expired or deleted one."""
        if ID.fullmatch(file_id) and not self._tombstone(file_id).exists():
            with contextlib.suppress(FileNotFoundError):
                file = _read(self._path(file_id))
                if not file.expired:
                    return file
        raise NotFound(
            f"no file {file_id!r}: it was deleted, has expired, or never was", param="file_id"
        )

    def path(self, file_id: str) -> Path:
        """Return the path of a file's content, verified, for reading. Raises NotFound, Corrupt."""
        return self.blobs.verified_path(self.get(file_id).sha256)

    def list(
        self,
        after: str | None = None,
        limit: int = PAGE_LIMIT,
        order: Order = "desc",
        purpose: str | None = None,
    ) -> checksums.Listing[FileObject]:
        """Return a page of files by creation time, after the file `after`. Raises BadInput."""
        listing = self._all()
        files = [file for file in listing.rows if not file.expired]
        if purpose is not None:
            files = [file for file in files if file.purpose == purpose]
        if after is not None:
            last = _sort_key(self._find_even_deleted(after))
            if order == "desc":
                files = [file for file in files if _sort_key(file) < last]
            else:
                files = [file for file in files if _sort_key(file) > last]
        files.sort(key=_sort_key, reverse=order == "desc")
        return checksums.Listing(files[:limit], listing.damaged, len(files) > limit)

    def delete(self, file_id: str) -> None:
        """Delete a file for good. Its content stays until a sweep. Raises NotFound."""
        self._delete(self.get(file_id))

    def delete_expired(self) -> set[str]:
        """Delete expired files; return the contents of the others.

        Raises Corrupt for a damaged record, which may be of any content.
        """
        listing = self._all()
        if listing.damaged:
            raise Corrupt(listing.damaged[0]["reason"])
        files = listing.rows
        for file in files:
            if file.expired:
                self._delete(file)
        return {file.sha256 for file in files if not file.expired}

    def _delete(self, file: FileObject) -> None:
        durable.create_file(self._tombstone(file.id), checksums.record_text(file))
        self._path(file.id).unlink(missing_ok=True)
        self._known.pop(file.id, None)

    def _all(self) -> checksums.Listing[FileObject]:
        """Return every file that was not deleted, expired ones too, in no order."""
        names = durable.names_in(self.home.files)
        ids = [name.removesuffix(LIVING) for name in names if name.endswith(LIVING)]
        ids = [name for name in ids if name[0] != "." and name + DELETED not in names]
        listing = checksums.list_whole(ids, self._read_once)
        files = [file for file in listing.rows if file is not None]
        return checksums.Listing(files, listing.damaged)

    def _read_once(self, file_id: str) -> FileObject | None:
        """Return a file; None if it was deleted just now."""
        file = self._known.get(file_id)
        if file is None:
            with contextlib.suppress(FileNotFoundError):
                file = self._known[file_id] = _read(self._path(file_id))
        return file

    def _find_even_deleted(self, file_id: str) -> FileObject:
        if ID.fullmatch(file_id):
            for path in (self._path(file_id), self._tombstone(file_id)):
                with contextlib.suppress(FileNotFoundError):
                    return _read(path)
        raise BadInput(f"no file {file_id!r} to list on from", param="after", code="not_found")

    def _path(self, file_id: str) -> Path:
        return self.home.files / f"{file_id}{LIVING}"

    def _tombstone(self, file_id: str) -> Path:
        return self.home.files / f"{file_id}{DELETED}"


def _read(path: Path) -> FileObject:
    return checksums.read_record(FileObject, path, FILE_FORMAT)


def _sort_key(file: FileObject) -> tuple[int, str]:
    # ids made later in the same second sort later
    return file.created_at, file.id
