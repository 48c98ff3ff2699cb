"""Files as OpenAI's client and plain HTTP see them, and the blobs below."""

import hashlib
import json
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import openai
import pytest
from openai.types import FileObject as Shown

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.files.blobs import PIECE, Blobs
from cray_agents.runtime.files.files import FileObject, Files
from cray_agents.runtime.files.uploads import Uploads, sweep
from cray_agents.runtime.gateway.http.error_envelope import BodyTooLarge
from cray_agents.runtime.gateway.routes.files import FIELD_BYTES, MAX_PARTS, FormReader

WIRE = {"id", "bytes", "created_at", "filename", "object", "purpose", "status"}
JSONL = b'{"custom_id": "1"}\n'


def age(path: Path, seconds: float = 7200.0) -> None:
    os.utime(path, (time.time() - seconds,) * 2)


def put(client: openai.OpenAI, data: bytes = JSONL, name: str = "a.jsonl") -> Shown:
    return client.files.create(file=(name, data), purpose="batch")


def raw(url: str, request: bytes, *, cut: bool = False) -> bytes:
    """Send bytes, end our side if `cut`, and return all bytes until the server closes."""
    address = urlsplit(url)
    with socket.create_connection((address.hostname, address.port), timeout=120) as connection:
        connection.sendall(request)
        if cut:
            connection.shutdown(socket.SHUT_WR)
        answer = b""
        while more := connection.recv(65536):
            answer += more
        return answer


def error(failure: openai.APIStatusError) -> tuple[int, str | None, str | None]:
    """Return an error envelope's status, param and code; check that all four fields exist."""
    body: Any = failure.response.json()
    assert set(body["error"]) == {"message", "type", "param", "code"}
    return failure.status_code, body["error"]["param"], body["error"]["code"]


# The client's calls


def test_a_file_comes_back_as_it_was(client: openai.OpenAI) -> None:
    data = os.urandom(3 * PIECE + 17)
    file = put(client, data, 'zwölf "x".jsonl')
    fields = json.loads(client.files.with_raw_response.retrieve(file.id).content)
    assert set(fields) == WIRE
    assert (file.bytes, file.filename, file.purpose) == (len(data), 'zwölf "x".jsonl', "batch")
    answer = client.files.content(file.id)
    assert answer.read() == data
    assert answer.response.headers["content-length"] == str(len(data))
    assert "attachment" in answer.response.headers["content-disposition"]
    assert client.files.retrieve(file.id) == file


def test_a_deleted_file_is_gone(client: openai.OpenAI, home: Home) -> None:
    file = put(client)
    assert client.files.delete(file.id).deleted
    calls = (client.files.retrieve, client.files.delete, client.files.content)
    for call in calls:
        with pytest.raises(openai.NotFoundError) as failure:
            call(file.id)
        assert error(failure.value) == (404, "file_id", "not_found")
    assert file.id not in [listed.id for listed in client.files.list()]
    with pytest.raises(NotFound):  # nor does whoever knew its id bring it back
        Files(home).publish(
            hashlib.sha256(JSONL).hexdigest(), filename="a", purpose="batch", file_id=file.id
        )


def test_lists_page_by_themselves(client: openai.OpenAI) -> None:
    made = [client.files.create(file=(f"{n}", b"x"), purpose="evals") for n in range(7)]
    newest = [file.id for file in sorted(made, key=lambda f: (f.created_at, f.id), reverse=True)]
    assert [f.id for f in client.files.list(limit=2, purpose="evals")] == newest
    assert [f.id for f in client.files.list(limit=3, purpose="evals", order="asc")] == newest[::-1]
    first = client.files.list(limit=3, purpose="evals")
    client.files.delete(newest[2])  # the cursor itself goes
    assert [f.id for f in first.get_next_page()] == newest[3:]
    whole = client.files.list(purpose="evals")
    assert whole.has_more is False
    assert put(client).id in [f.id for f in client.files.list()]


def test_files_expire(client: openai.OpenAI, home: Home) -> None:
    file = client.files.create(
        file=("a", b"x"), purpose="batch", expires_after={"anchor": "created_at", "seconds": 3600}
    )
    assert file.expires_at is not None
    # counted from the request: a slow machine makes the file some seconds after it
    assert 3500 < file.expires_at - file.created_at <= 3601
    sha256 = hashlib.sha256(b"x").hexdigest()
    late = FileObject(
        id="file-late",
        bytes=1,
        created_at=1,
        filename="a",
        purpose="batch",
        sha256=sha256,
        expires_at=int(time.time()) - 1,
    )
    (home.files / "file-late.json").write_text(late.model_dump_json())
    with pytest.raises(openai.NotFoundError):
        client.files.retrieve("file-late")
    assert "file-late" not in [listed.id for listed in client.files.list()]
    assert "file-late" not in {file.id for file in Files(home).list("file-late").rows}
    Files(home).delete_expired()
    assert not (home.files / "file-late.json").exists()


@pytest.mark.parametrize(
    ("header", "status", "expected"),
    [
        ("bytes=2-4", 206, b"234"),
        ("bytes=7-", 206, b"789"),
        ("bytes=-2", 206, b"89"),
        ("bytes=0-99", 206, b"0123456789"),
        ("bytes=10-", 416, None),
        ("bytes=-0", 416, None),
        ("bytes=4-2", 400, None),
        ("bytes=1-2,4-5", 400, None),
        ("lines=1-2", 400, None),
    ],
)
def test_ranges(client: openai.OpenAI, header: str, status: int, expected: bytes | None) -> None:
    file = put(client, b"0123456789")
    if expected is not None:
        answer = client.files.content(file.id, extra_headers={"range": header})
        assert (answer.response.status_code, answer.read()) == (status, expected)
        return
    with pytest.raises(openai.APIStatusError) as failure:
        client.files.content(file.id, extra_headers={"range": header})
    assert error(failure.value)[:2] == (status, "Range")


# Refusals


@pytest.mark.parametrize(
    ("fields", "param", "code"),
    [
        ({"purpose": "batch_output"}, "purpose", "invalid_value"),
        ({"purpose": "nonsense"}, "purpose", "invalid_value"),
        ({}, "purpose", "missing_field"),
        (
            {"purpose": "batch", "expires_after": {"anchor": "now", "seconds": 3600}},
            "expires_after.anchor",
            "invalid_value",
        ),
        (
            {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 3599}},
            "expires_after.seconds",
            "invalid_value",
        ),
        (
            {"purpose": "batch", "expires_after": {"anchor": "created_at", "seconds": 2592001}},
            "expires_after.seconds",
            "invalid_value",
        ),
        (
            {"purpose": "batch", "expires_after": {"seconds": 3600}},
            "expires_after.anchor",
            "invalid_value",
        ),
    ],
)
def test_bad_fields(
    client: openai.OpenAI, home: Home, fields: dict[str, Any], param: str, code: str
) -> None:
    drafts = set(home.drafts.iterdir()) if home.drafts.exists() else set()
    with pytest.raises(openai.BadRequestError) as failure:
        client.post(
            "/files",
            cast_to=object,
            body=fields,
            files={"file": ("a", b"x")},
            options={"headers": {"Content-Type": "multipart/form-data"}},
        )
    assert error(failure.value) == (400, param, code)
    assert (set(home.drafts.iterdir()) if home.drafts.exists() else set()) == drafts


def form(*fields: tuple[str, bytes], end: bytes = b"--B--\r\n") -> bytes:
    """Return a multipart body with the boundary B from pairs of header rests and contents."""
    head = b"--B\r\nContent-Disposition: form-data; "
    return (
        b"".join(head + rest.encode() + b"\r\n\r\n" + body + b"\r\n" for rest, body in fields) + end
    )


FILE = ('name="file"; filename="a"', b"x")
PURPOSE = ('name="purpose"', b"batch")
KIND = "multipart/form-data; boundary=B"


@pytest.mark.parametrize(
    ("kind", "body", "param", "code"),
    [
        ("application/json", b"{}", "content-type", "invalid_content_type"),
        ("multipart/form-data", b"", "content-type", "invalid_content_type"),
        ("multipart/form-data; boundary=" + "B" * 500, b"", "file", "invalid_multipart"),
        (KIND, b"", "file", "invalid_multipart"),
        (KIND, b"nonsense", "file", "invalid_multipart"),
        (KIND, form(FILE, PURPOSE, end=b""), "file", "invalid_multipart"),
        (KIND, b"--B\r\n\r\nx\r\n--B--", "file", "invalid_multipart"),
        (KIND, form(PURPOSE), "file", "missing_file"),
        (KIND, form(('name="file"', b"x"), PURPOSE), "file", "missing_file"),
        (KIND, form(FILE, FILE, PURPOSE), "file", "invalid_multipart"),
        (KIND, form(FILE, PURPOSE, PURPOSE), "purpose", "invalid_multipart"),
        (KIND, form(FILE, ('name="purpose"', b"\xff")), "purpose", "invalid_value"),
        (KIND, form(('name="file"; filename=""', b"x"), PURPOSE), "filename", "invalid_value"),
        (KIND, form(('name="file"; filename="\t"', b"x"), PURPOSE), "filename", "invalid_value"),
        (
            KIND,
            form(('name="purpose"', b"x" * (FIELD_BYTES + 1)), FILE),
            "purpose",
            "field_too_large",
        ),
        (
            KIND,
            form(*((f'name="{n}"', b"") for n in range(MAX_PARTS + 1))),
            "file",
            "invalid_multipart",
        ),
        (
            KIND,
            form((f"{FILE[0]}\r\nContent-Transfer-Encoding: base64", b"eA=="), PURPOSE),
            "file",
            "invalid_multipart",
        ),
    ],
)
def test_bad_forms(url: str, home: Home, kind: str, body: bytes, param: str, code: str) -> None:
    with openai.OpenAI(base_url=f"{url}/v1", api_key="none", max_retries=0) as client:
        before = client.files.list().data
        head = f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {kind}\r\n"
        head += f"Content-Length: {len(body)}\r\nConnection: close\r\n\r\n"
        answer = raw(url, head.encode() + body)
        assert answer.startswith(b"HTTP/1.1 400 "), answer
        envelope = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
        assert (envelope["param"], envelope["code"]) == (param, code)
        assert client.files.list().data == before
    assert list(home.drafts.iterdir()) == []


def test_a_body_that_is_cut_off_leaves_nothing(url: str, home: Home) -> None:
    body = form(('name="file"; filename="a"', os.urandom(2 * PIECE)), PURPOSE)
    head = f"POST /v1/files HTTP/1.1\r\nHost: 127.0.0.1\r\nContent-Type: {KIND}\r\n"
    head += f"Content-Length: {len(body) + 1}\r\n\r\n"
    contents = sorted(home.blobs.glob("??/*"))
    assert raw(url, head.encode() + body, cut=True) == b""
    deadline = time.monotonic() + 100
    while list(home.drafts.iterdir()) and time.monotonic() < deadline:
        time.sleep(0.01)
    assert list(home.drafts.iterdir()) == []
    assert sorted(home.blobs.glob("??/*")) == contents


@pytest.mark.parametrize("query", ["limit=-1", "limit=10001", "order=up", "purpose=x", "after=x"])
def test_bad_queries(client: openai.OpenAI, query: str) -> None:
    name, _, value = query.partition("=")
    with pytest.raises(openai.BadRequestError) as failure:
        client.get("/files", cast_to=object, options={"params": {name: value}})
    assert error(failure.value)[1] == name


def reader(home: Home, limit: int) -> FormReader:
    return FormReader(KIND, "file", Blobs(home).draft, limit)


def test_a_form_in_any_pieces(tmp_path: Path) -> None:
    data = b"\r\n--B\r\r\n--" + os.urandom(50) + b"\r\n-"  # looks like a boundary and is none
    whole = form(('name="file"; filename="a"', data.replace(b"--B\r", b"--C\r")), PURPOSE)
    for size in (1, 2, 3, 7, len(whole)):
        taken = reader(Home(tmp_path), 1000)
        for start in range(0, len(whole), size):
            taken.write(whole[start : start + size])
        come = taken.form()
        assert come.file is not None
        assert (come.fields, come.filename) == ({"purpose": "batch"}, "a")
        path = Blobs(Home(tmp_path)).path(come.file.publish().sha256)
        assert path.read_bytes() == data.replace(b"--B\r", b"--C\r")


def test_a_file_has_a_limit(tmp_path: Path) -> None:
    taken = reader(Home(tmp_path), 10)
    taken.write(form(('name="file"; filename="a"', b"x" * 10), PURPOSE))
    taken.discard()
    with pytest.raises(BodyTooLarge, match="10 bytes"):
        reader(Home(tmp_path), 10).write(form(('name="file"; filename="a"', b"x" * 11), PURPOSE))


# Below


def test_a_content_is_stored_once(client: openai.OpenAI, home: Home) -> None:
    data = os.urandom(PIECE)
    first, second = put(client, data), put(client, data, "other")
    assert first.id != second.id
    files = Files(home)
    assert files.path(first.id) == files.path(second.id)
    client.files.delete(first.id)
    assert client.files.content(second.id).read() == data


def test_a_file_of_a_given_id_is_made_once(tmp_path: Path) -> None:
    files = Files(Home(tmp_path))
    with files.blobs.draft() as draft:
        draft.write(b"one")
        blob = draft.publish()
    first = files.publish(blob, filename="a", purpose="batch_output", file_id="file-1")
    again = files.publish(blob.sha256, filename="b", purpose="batch", file_id="file-1")
    assert first == again
    assert files.path("file-1").read_bytes() == b"one"
    with pytest.raises(BadInput):
        files.publish(blob, filename="a", purpose="nonsense")
    with pytest.raises(NotFound):
        files.publish("0" * 64, filename="a", purpose="batch")


def test_what_nobody_holds_is_swept(tmp_path: Path) -> None:
    files = Files(Home(tmp_path))
    blobs, uploads = files.blobs, Uploads(files)

    def store(text: bytes) -> str:
        with blobs.draft() as draft:
            draft.write(text)
            return draft.publish().sha256

    published, deleted, orphan, fresh = (
        store(t) for t in (b"held", b"deleted", b"orphan", b"fresh")
    )
    files.publish(published, filename="a", purpose="batch")
    files.delete(files.publish(deleted, filename="a", purpose="batch").id)
    for sha256 in (published, deleted, orphan):
        age(blobs.path(sha256))
    assert sweep(files, uploads) == 2
    assert [blobs.size(s) for s in (published, deleted, orphan, fresh)] == [4, None, None, 5]


def test_a_sweep_leaves_what_is_asked_for_meanwhile(tmp_path: Path) -> None:
    blobs = Blobs(Home(tmp_path))
    with blobs.draft() as draft:
        draft.write(b"wanted")
        blob = draft.publish()
    age(blobs.path(blob.sha256))

    def used() -> set[str]:  # nobody yet, but just now somebody comes who will
        assert blobs.keep(blob.sha256) == 6
        return set()

    assert blobs.sweep(used) == 0
    assert blobs.size(blob.sha256) == 6
    path = blobs.path(blob.sha256)
    path.rename(path.with_name(f".{path.name}.aside"))  # a sweep was killed here
    assert blobs.sweep(set) == 0
    assert blobs.size(blob.sha256) == 6


def test_sweeps_and_publishers_at_once(tmp_path: Path) -> None:
    """A published content survives any number of concurrent sweeps."""
    blobs = Blobs(Home(tmp_path))

    def publish(number: int) -> None:
        with blobs.draft() as draft:
            draft.write(b"same content")
            sha256 = draft.publish().sha256
        if number % 2:
            with suppress(FileNotFoundError):  # another aged it, a sweep took it
                age(blobs.path(sha256))
        else:
            assert blobs.keep(sha256) in (12, None)  # None: another aged it, a sweep took it

    with ThreadPoolExecutor(4) as pool:
        sweeps = [pool.submit(blobs.sweep, set) for _ in range(60)]
        for done in [pool.submit(publish, n) for n in range(60)] + sweeps:
            done.result()
    with blobs.draft() as draft:
        draft.write(b"same content")
        sha256 = draft.publish().sha256
    assert blobs.sweep(set) == 0
    assert blobs.path(sha256).read_bytes() == b"same content"


def test_drafts_of_the_killed_are_removed(tmp_path: Path) -> None:
    draft = Blobs(Home(tmp_path)).draft()
    Blobs(Home(tmp_path))
    assert draft.path.exists()
    age(draft.path, 90000)
    Blobs(Home(tmp_path))
    assert not draft.path.exists()
