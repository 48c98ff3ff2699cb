"""Uploads: OpenAI's client, our additions, and `kill -9`."""

import hashlib
import os
import subprocess
import threading
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import openai
import pytest

from cray_agents.paths import Home
from cray_agents.runtime.files.blobs import Blobs
from cray_agents.runtime.files.files import Files
from cray_agents.runtime.files.uploads import PART_BYTES, UploadEnd, UploadRequest, Uploads, sweep
from tests.support.campaign import free_port
from tests.support.gateway_process import gateway

ABC = [b"aaaa", b"bb", b"cccccc"]
WHOLE = b"".join(ABC)


def begin(client: openai.OpenAI, size: int = len(WHOLE), **more: Any) -> dict[str, Any]:
    body = {"bytes": size, "filename": "w.bin", "mime_type": "text/plain", "purpose": "batch"}
    answer: Any = client.post("/uploads", cast_to=object, body={**body, **more})
    return dict(answer)


def look(client: openai.OpenAI, upload_id: str) -> dict[str, Any]:
    answer: Any = client.get(f"/uploads/{upload_id}", cast_to=object)
    return dict(answer)


def send(client: openai.OpenAI, upload_id: str, data: bytes) -> str:
    return client.uploads.parts.create(upload_id, data=data).id


def sha256(data: bytes) -> str:
    return hashlib.sha256(data).hexdigest()


def error(failure: openai.APIStatusError) -> tuple[int, str | None, str | None]:
    body: Any = failure.response.json()
    return failure.status_code, body["error"]["param"], body["error"]["code"]


# OpenAI's


def test_the_clients_own_chunking(client: openai.OpenAI, tmp_path: Path) -> None:
    data = os.urandom(1_000_003)
    path = tmp_path / "big.bin"
    path.write_bytes(data)
    upload = client.uploads.upload_file_chunked(
        file=path,
        mime_type="application/octet-stream",
        purpose="batch",
        part_size=300_000,
        md5=hashlib.md5(data).hexdigest(),
    )
    assert (upload.status, upload.bytes, upload.object) == ("completed", len(data), "upload")
    assert upload.file is not None
    assert (upload.file.filename, upload.file.bytes) == ("big.bin", len(data))
    assert client.files.content(upload.file.id).read() == data


def test_the_same_chunk_may_come_twice_in_a_file(client: openai.OpenAI) -> None:
    upload = begin(client, 8)
    one, other = send(client, upload["id"], b"zero"), send(client, upload["id"], b"zero")
    assert one == other  # sent again after a lost answer it is no second part
    done = client.uploads.complete(upload["id"], part_ids=[one, other])
    assert done.file is not None
    assert client.files.content(done.file.id).read() == b"zerozero"


def test_an_empty_upload(client: openai.OpenAI) -> None:
    done = client.uploads.complete(begin(client, 0)["id"], part_ids=[])
    assert done.file is not None
    assert client.files.content(done.file.id).read() == b""


def test_complete_again_is_the_same(client: openai.OpenAI) -> None:
    upload = begin(client)
    ids = [send(client, upload["id"], part) for part in ABC]
    with ThreadPoolExecutor(4) as pool:
        done = [pool.submit(client.uploads.complete, upload["id"], part_ids=ids) for _ in range(4)]
    files = {one.result().file.id for one in done}  # type: ignore[union-attr]
    assert len(files) == 1
    with pytest.raises(openai.BadRequestError) as failure:
        client.uploads.complete(upload["id"], part_ids=ids[::-1])
    assert error(failure.value) == (400, "part_ids", "upload_completed")
    client.files.delete(files.pop())
    assert client.uploads.complete(upload["id"], part_ids=ids).file is None


@pytest.mark.parametrize(
    ("part_ids", "md5", "param", "code"),
    [
        ([0, 1], None, "part_ids", "bytes_mismatch"),
        ([0, 1, 2, 0], None, "part_ids", "bytes_mismatch"),
        ([0, 1, "part_no"], None, "part_ids", "part_not_found"),
        ([0, 2, 1], hashlib.md5(WHOLE).hexdigest(), "md5", "md5_mismatch"),
        ([0, 1, 2], "nonsense", "md5", "md5_mismatch"),
    ],
)
def test_what_does_not_complete(
    client: openai.OpenAI, part_ids: list[Any], md5: Any, param: str, code: str
) -> None:
    upload = begin(client)
    ids = [send(client, upload["id"], part) for part in ABC]
    wanted = [ids[part] if isinstance(part, int) else part for part in part_ids]
    with pytest.raises(openai.BadRequestError) as failure:
        client.uploads.complete(upload["id"], part_ids=wanted, md5=md5 or openai.omit)
    assert error(failure.value) == (400, param, code)
    assert look(client, upload["id"])["status"] == "pending"
    assert client.uploads.complete(upload["id"], part_ids=ids).status == "completed"


def test_an_ended_upload_takes_nothing(client: openai.OpenAI, home: Home) -> None:
    cancelled, expired, completed = begin(client, 0), begin(client), begin(client, 0)
    assert client.uploads.cancel(cancelled["id"]).status == "cancelled"
    assert client.uploads.cancel(cancelled["id"]).status == "cancelled"
    client.uploads.complete(completed["id"], part_ids=[])
    os.utime(home.uploads / expired["id"] / "parts", (time.time() - 86401,) * 2)
    for upload, status in ((cancelled, "cancelled"), (expired, "expired")):
        assert look(client, upload["id"])["status"] == status
        with pytest.raises(openai.BadRequestError) as failure:
            client.uploads.complete(upload["id"], part_ids=[])
        assert error(failure.value) == (400, "upload_id", f"upload_{status}")
    for upload in (cancelled, expired, completed):
        with pytest.raises(openai.BadRequestError) as failure:
            send(client, upload["id"], b"x")
        assert error(failure.value)[:2] == (400, "upload_id")
    for upload in (expired, completed):
        with pytest.raises(openai.BadRequestError):
            client.uploads.cancel(upload["id"])


@pytest.mark.parametrize(
    ("field", "value"),
    [
        ("bytes", -1),
        ("bytes", True),
        ("bytes", "9"),
        ("filename", ""),
        ("filename", "a\nb"),
        ("mime_type", 7),
        ("purpose", "batch_output"),
        ("expires_after", {"anchor": "created_at", "seconds": 1}),
    ],
)
def test_bad_announcements(client: openai.OpenAI, field: str, value: Any) -> None:
    with pytest.raises(openai.BadRequestError) as failure:
        begin(client, **{field: value})
    assert str(error(failure.value)[1]).startswith(field)


def test_bad_calls(client: openai.OpenAI) -> None:
    with pytest.raises(openai.APIStatusError) as failure:
        begin(client, 2**40 + 1)
    assert error(failure.value) == (413, "bytes", "body_too_large")
    for call in (look, lambda c, i: send(c, i, b"x"), lambda c, i: c.uploads.cancel(i)):
        with pytest.raises(openai.NotFoundError) as missing:
            call(client, "upload_no")
        assert error(missing.value)[1] == "upload_id"
    upload = begin(client)
    with pytest.raises(openai.BadRequestError) as large:
        send(client, upload["id"], b"x" * (len(WHOLE) + 1))
    assert error(large.value) == (400, "data", "part_too_large")
    with pytest.raises(openai.APIStatusError) as failure:
        send(client, begin(client, 2 * PART_BYTES)["id"], b"x" * (PART_BYTES + 1))
    assert error(failure.value) == (413, "data", "body_too_large")
    for body in ({}, {"part_ids": "x"}, {"part_ids": [1]}):
        with pytest.raises(openai.BadRequestError) as bad:
            client.post(f"/uploads/{upload['id']}/complete", cast_to=object, body=body)
        assert str(error(bad.value)[1]).startswith("part_ids")


def test_the_file_expires_from_its_completion(client: openai.OpenAI) -> None:
    upload = begin(client, 0, expires_after={"anchor": "created_at", "seconds": 7200})
    before = int(time.time())
    file = client.uploads.complete(upload["id"], part_ids=[]).file
    assert file is not None and file.expires_at is not None
    assert before <= file.expires_at - 7200 <= time.time()


# Beyond OpenAI's


def test_an_upload_is_gone_on_with(client: openai.OpenAI) -> None:
    chunks = [os.urandom(1000) for _ in range(3)]
    upload = begin(client, 3000)["id"]
    first = send(client, upload, chunks[2])
    [part] = look(client, upload)["parts"]
    assert (part["id"], part["bytes"], part["sha256"]) == (first, 1000, sha256(chunks[2]))
    for chunk in chunks[:2]:
        send(client, upload, chunk)
    known = {p["sha256"]: p["id"] for p in look(client, upload)["parts"]}
    done = client.uploads.complete(upload, part_ids=[known[sha256(chunk)] for chunk in chunks])
    assert done.file is not None
    assert client.files.content(done.file.id).read() == b"".join(chunks)


def test_a_crash_between_the_end_and_the_file(tmp_path: Path) -> None:
    """The end is written first. The next look makes the file, with the same id."""
    uploads = Uploads(Files(Home(tmp_path)))
    blobs = Blobs(Home(tmp_path))
    with blobs.draft() as draft:
        draft.write(WHOLE)
        content = draft.publish()
    request = UploadRequest(bytes=len(WHOLE), filename="a", mime_type="text/plain", purpose="batch")
    upload = uploads.create(request)
    end = UploadEnd(status="completed", file_id="file-1", sha256=content.sha256)
    (tmp_path / "uploads" / upload["id"] / "end.json").write_text(end.model_dump_json())
    os.utime(blobs.path(content.sha256), (0, 0))
    assert sweep(Files(Home(tmp_path)), uploads) == 0
    assert uploads.show(upload["id"])["file"]["id"] == "file-1"
    assert Files(Home(tmp_path)).path("file-1").read_bytes() == WHOLE


def test_a_sweep_keeps_the_parts_of_pending_uploads(tmp_path: Path) -> None:
    files = Files(Home(tmp_path))
    uploads = Uploads(files)

    def start_upload(text: bytes) -> tuple[str, str]:
        request = UploadRequest(bytes=9, filename="a", mime_type="text/plain", purpose="batch")
        upload_id = uploads.create(request)["id"]
        with files.blobs.draft() as draft:
            draft.write(text)
            part = uploads.add_part(upload_id, draft.publish())
        os.utime(files.blobs.path(part.sha256), (0, 0))
        return upload_id, part.sha256

    (_, kept), (expired, gone) = start_upload(b"kept"), start_upload(b"gone")
    os.utime(tmp_path / "uploads" / expired / "parts", (time.time() - 86400 - 3601,) * 2)
    assert sweep(files, uploads) == 1
    assert (files.blobs.size(kept), files.blobs.size(gone)) == (4, None)


# kill -9


class Sender:
    """A client that sends chunks from several threads to a gateway that is killed and restarted.

    It kills the first one itself: a thread beside it may be late, when no chunk is left.
    """

    def __init__(
        self, url: str, upload_id: str, chunks: list[bytes], first: "subprocess.Popen[str]"
    ) -> None:
        self._url, self._first = url, first
        self._upload_id = upload_id
        self._left = list(range(len(chunks)))
        self._chunks = chunks
        self._lock = threading.Lock()
        self.acknowledged: dict[int, str] = {}
        self.failures = 0

    def run(self) -> None:
        with openai.OpenAI(base_url=f"{self._url}/v1", api_key="none", max_retries=0) as client:
            while True:
                with self._lock:
                    if not self._left:
                        return
                    number = self._left.pop()
                try:
                    self.acknowledged[number] = send(client, self._upload_id, self._chunks[number])
                    if len(self.acknowledged) >= 15:
                        self._first.kill()
                except openai.APIConnectionError:
                    self.failures += 1
                    time.sleep(0.05)
                    with self._lock:
                        self._left.append(number)


@pytest.mark.slow
def test_no_acknowledged_part_is_lost(tmp_path: Path) -> None:
    chunks = [os.urandom(200_000) for _ in range(60)]
    whole = b"".join(chunks)
    port = free_port()
    with gateway(tmp_path / "home", port) as (url, process):
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            upload = begin(client, len(whole))
        sender = Sender(url, upload["id"], chunks, process)
        threads = [threading.Thread(target=sender.run) for _ in range(4)]
        for thread in threads:
            thread.start()
        process.wait()
    with gateway(tmp_path / "home", port) as (url, process):
        while len(sender.acknowledged) < 35:
            time.sleep(0.001)
        process.kill()
        process.wait()
    with gateway(tmp_path / "home", port) as (url, process):
        for thread in threads:
            thread.join()
        assert sender.failures > 0
        with openai.OpenAI(base_url=f"{url}/v1", api_key="none") as client:
            uploaded = look(client, upload["id"])["parts"]
            ids = [part["id"] for part in uploaded]
            assert len(ids) == len(set(ids)) == len(chunks)
            assert set(sender.acknowledged.values()) == set(ids)
            assert {p["sha256"] for p in uploaded} == {sha256(chunk) for chunk in chunks}
            ordered = [sender.acknowledged[number] for number in range(len(chunks))]
            done = client.uploads.complete(upload["id"], part_ids=ordered)
            assert done.file is not None
            assert sha256(client.files.content(done.file.id).read()) == sha256(whole)
            assert client.uploads.complete(upload["id"], part_ids=ordered) == done
