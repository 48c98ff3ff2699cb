"""`upload` command: send a large file to the platform in parallel parts, and resume.

The sha256 of its content names an upload. The same command therefore resumes it after an
interruption, and ends at once if the platform has the file already. The gateway's side is
runtime/gateway/routes/files.py.
"""

import hashlib
import io
import json
import mimetypes
import os
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor, as_completed
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer
from rich.progress import DownloadColumn, Progress, TransferSpeedColumn

from cray_agents.cli.platform.platform_process import find_platform, key
from cray_agents.cli.screen import HomeOption, UrlOption, progress_bar
from cray_agents.errors import BadInput, SetupError
from cray_agents.platform.transport import typed_error

if TYPE_CHECKING:
    import openai

PIECE = 4 << 20  # bytes read and hashed at a time
PART_BYTES = 64 << 20  # the most that the gateway takes in one part
RETRIES = 8  # about half a minute: enough for a restart of the gateway
COMPLETE_SECONDS = 3600.0  # the gateway reads and copies the whole file

#: Takes the number of bytes done since the last call; negative after a failure.
Advance = Callable[[int], None]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(upload)


def upload(
    file: Annotated[Path, typer.Argument(help="The file to send.")],
    purpose: Annotated[
        str, typer.Option(help="batch, fine-tune, evals, user_data, assistants or vision.")
    ] = "batch",
    parallel: Annotated[int, typer.Option(min=1, max=64, help="Parts sent at once.")] = 4,
    home: HomeOption = None,
    url: UrlOption = None,
    as_json: Annotated[bool, typer.Option("--json", help="Print JSON, not the id alone.")] = False,
    part_bytes: Annotated[int, typer.Option(min=1, max=PART_BYTES, hidden=True)] = PART_BYTES,
) -> None:
    """Send a file and print its id; what the platform has already is not sent again."""
    import openai

    if not file.is_file():
        raise BadInput(f"{file}: no such file", param="file")
    info = find_platform(home, url)
    platform_url = str(info["url"])
    base_url = f"{platform_url.rstrip('/').removesuffix('/v1')}/v1"
    with (
        _typed_errors(platform_url),
        openai.OpenAI(
            base_url=base_url, api_key=key(info) or "none", max_retries=RETRIES
        ) as client,
        progress_bar(DownloadColumn(), TransferSpeedColumn()) as progress,
    ):
        sending = Sending(client, file, part_bytes, parallel)
        done = sending.run(purpose, progress)
    if as_json:
        print(
            json.dumps({**done["file"], "sha256": done["sha256"], "sent": sending.sent}, indent=2)
        )
    else:
        print(done["file"]["id"])


@dataclass
class Sending:
    """An upload of one file. `sent`: bytes of parts that the platform did not have."""

    client: "openai.OpenAI"
    file: Path
    part_bytes: int
    parallel: int
    sent: int = 0

    def run(self, purpose: str, progress: Progress) -> dict[str, Any]:
        """Upload the file; return the completed upload."""
        size = self.file.stat().st_size
        hashing = progress.add_task("hashing", total=size)
        sha256 = self._sha256(0, size, lambda more: progress.advance(hashing, more))
        description = {
            "bytes": size,
            "filename": self.file.name,
            "mime_type": mimetypes.guess_type(self.file.name)[0] or "application/octet-stream",
            "purpose": purpose,
            "sha256": sha256,
        }
        created = self._post("/uploads", description, max_retries=1)
        if created["status"] == "completed":
            return created
        sending = progress.add_task("sending", total=size)
        part_ids = self._send_parts(created, size, lambda more: progress.advance(sending, more))
        return self._post(
            f"/uploads/{created['id']}/complete", {"part_ids": part_ids}, timeout=COMPLETE_SECONDS
        )

    def _send_parts(self, created: dict[str, Any], size: int, advance: Advance) -> list[str]:
        """Send the missing parts; return all ids in order. A failure starts no more parts."""
        known = {part["sha256"]: part["id"] for part in created["parts"]}
        starts = range(0, size, self.part_bytes)
        with ThreadPoolExecutor(self.parallel, "part") as pool:
            sends = [pool.submit(self._send_part, created["id"], s, known, advance) for s in starts]
            try:
                for send in as_completed(sends):
                    send.result()
            except BaseException:
                pool.shutdown(wait=False, cancel_futures=True)
                raise
        self.sent = sum(send.result()[1] for send in sends)
        return [send.result()[0] for send in sends]

    def _send_part(
        self, upload_id: str, start: int, known: dict[str, str], advance: Advance
    ) -> tuple[str, int]:
        """Return the id of a part, and the bytes sent: 0 if the upload has the part already."""
        with self.file.open("rb", buffering=0) as file:
            slice_ = Slice(file, start, self.part_bytes, advance)
            if known:
                part_id = known.get(self._sha256(start, slice_.size))
                if part_id is not None:
                    advance(slice_.size)
                    return part_id, 0
            data: Any = ("part", slice_)
            return self.client.uploads.parts.create(upload_id, data=data).id, slice_.size

    def _sha256(self, start: int, size: int, advance: Advance = lambda more: None) -> str:
        hasher = hashlib.sha256()
        buffer = memoryview(bytearray(min(PIECE, max(size, 1))))
        with self.file.open("rb", buffering=0) as file:
            file.seek(start)
            while size and (count := file.readinto(buffer[: min(size, len(buffer))])):
                hasher.update(buffer[:count])
                advance(count)
                size -= count
        return hasher.hexdigest()

    def _post(self, path: str, body: dict[str, Any], **options: Any) -> dict[str, Any]:
        client = self.client.with_options(**options)
        answer: Any = client.post(path, cast_to=object, body=body)
        return dict(answer)


class Slice(io.RawIOBase):
    """A part of an open file, as a file of its own; a seek back takes its progress back."""

    def __init__(self, file: io.FileIO, start: int, most: int, advance: Advance) -> None:
        self.size = min(most, os.fstat(file.fileno()).st_size - start)
        self._file = file
        self._start = start
        self._at = 0
        self._read = 0
        self._advance = advance

    def seek(self, offset: int, whence: int = os.SEEK_SET) -> int:
        """Move to an offset; take back the progress of bytes to be read again."""
        self._at = offset + {os.SEEK_SET: 0, os.SEEK_CUR: self._at, os.SEEK_END: self.size}[whence]
        if self._at < self._read:
            self._advance(self._at - self._read)
            self._read = self._at
        return self._at

    def tell(self) -> int:
        """Return the current offset."""
        return self._at

    def read(self, size: int = -1) -> bytes:
        """Read from the current offset and advance the progress."""
        left = self.size - self._at
        data = os.pread(self._file.fileno(), left if size < 0 else min(size, left),
                        self._start + self._at)  # fmt: skip
        self._at += len(data)
        self._advance(len(data))
        self._read = self._at
        return data

    def readable(self) -> bool:
        """Return True."""
        return True

    def seekable(self) -> bool:
        """Return True."""
        return True


@contextmanager
def _typed_errors(url: str) -> Iterator[None]:
    """Raise the OpenAI client's errors as this package's."""
    import openai

    try:
        yield
    except openai.APIStatusError as error:
        raise typed_error(error) from error
    except openai.APIConnectionError as error:
        raise SetupError(
            f"no platform answers at {url}: the same command goes on where this one stopped"
        ) from error
