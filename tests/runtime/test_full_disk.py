"""A platform whose disk is full or read-only: refusals that say so, and nothing left over.

The gateway is a process of its own whose shared root is a tmpfs of two MiB, in a mount namespace.
"""

import asyncio
import json
import os
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any
from urllib.error import HTTPError

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.batches.chunks import RequestLine
from cray_agents.runtime.batches.worker import LineSender

ROOT = Path(__file__).parents[2]
SIZE = 2 * 2**20  # bytes of the disk
CHAT = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
GATEWAY = 'tests.support.gateway_process "$2" 0'
MOUNTED = 'mount -t tmpfs -o size=$1 tmpfs "$2" && exec "$0" -m ' + GATEWAY


@contextmanager
def small_gateway(home: Path) -> Iterator[tuple[str, Home]]:
    """Its URL, and its root as it is seen from outside of its mounts."""
    home.mkdir()
    command = ["unshare", "--map-root-user", "--mount", "sh", "-c", MOUNTED]
    process = subprocess.Popen(
        [*command, sys.executable, str(SIZE), str(home)],
        cwd=ROOT,
        stdout=subprocess.PIPE,
        text=True,
        env={**os.environ, "TEST_PARENT": str(os.getpid())},
    )
    try:
        assert process.stdout is not None
        url = process.stdout.readline().strip()
        assert url.startswith("http"), "the gateway did not start"
        yield url, Home(Path(f"/proc/{process.pid}/root{home}"))
    finally:
        process.kill()
        process.wait()


def call(url: str, body: Any = None, **headers: str) -> tuple[int, dict[str, Any]]:
    data = body if isinstance(body, bytes) or body is None else json.dumps(body).encode()
    headers = {"content-type": "application/json", **headers}
    try:
        with urllib.request.urlopen(urllib.request.Request(url, data, headers)) as answer:
            return answer.status, json.loads(answer.read())
    except HTTPError as error:
        return error.code, json.loads(error.read())


def upload(url: str, content: bytes) -> tuple[int, dict[str, Any]]:
    part = b'--b\r\nContent-Disposition: form-data; name="%b"%b\r\n\r\n%b\r\n'
    form = part % (b"purpose", b"", b"batch") + part % (b"file", b'; filename="f"', content)
    return call(f"{url}/v1/files", form + b"--b--\r\n", **{"content-type": form_type()})


def form_type() -> str:
    return "multipart/form-data; boundary=b"


def fill(home: Home) -> Path:
    """Take what room there is, to the last byte."""
    filler = home.root / "filler"
    with filler.open("ab", buffering=0) as file:
        for size in (4096, 1):
            try:
                while True:
                    file.write(bytes(size))
            except OSError:
                continue
    return filler


def everything(home: Home) -> set[str]:
    return {str(path.relative_to(home.root)) for path in home.root.rglob("*")}


@pytest.mark.slow
def test_uploads_leave_room_for_records(tmp_path: Path) -> None:
    with small_gateway(tmp_path / "home") as (url, home):
        status, answered = upload(url, bytes(SIZE * 96 // 100))
        assert (status, answered["error"]["code"]) == (507, "disk_full")
        assert "kept for the records of calls" in answered["error"]["message"]
        size = SIZE // 10
        statuses = [upload(url, bytes([number]) * size)[0] for number in range(10)]
        assert statuses[0] == 200 and statuses[-1] == 507
        for _ in range(5):
            assert call(f"{url}/v1/chat/completions", CHAT)[0] == 200
        assert not list(home.drafts.iterdir())


@pytest.mark.slow
async def test_a_batchs_line_waits_for_room(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    with small_gateway(tmp_path / "home") as (url, home):
        line = RequestLine(1, json.dumps({"custom_id": "a", "body": CHAT}).encode())
        sender, filler = LineSender(url), fill(home)
        try:
            sending = asyncio.create_task(sender.send("batch_1", "/v1/chat/completions", line))
            async with asyncio.timeout(100):
                while ": 507 " not in caplog.text:  # noqa: ASYNC110
                    await asyncio.sleep(0.1)
                assert not sending.done()
                filler.unlink()
                assert (await sending).status == 200
        finally:
            await sender.close()


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
def test_calls(tmp_path: Path, stream: bool) -> None:
    with small_gateway(tmp_path / "home") as (url, home):
        assert call(f"{url}/health/ready")[0] == 200
        assert call(f"{url}/v1/chat/completions", CHAT)[0] == 200
        filler = fill(home)
        for _ in range(20):  # the last block of a file may have room for some
            if call(f"{url}/v1/chat/completions", CHAT)[0] != 200:
                break
        before = everything(home)
        for _ in range(5):
            if stream:
                asked = urllib.request.Request(
                    f"{url}/v1/chat/completions", json.dumps({**CHAT, "stream": True}).encode()
                )
                with urllib.request.urlopen(asked) as answer:
                    answered = answer.read()
                assert b'"disk_full"' in answered and b"[DONE]" not in answered
            else:
                status, answered = call(f"{url}/v1/chat/completions", CHAT)
                assert (status, answered["error"]["code"]) == (507, "disk_full")
        assert everything(home) <= before
        status, answered = call(f"{url}/health/ready")
        assert (status, answered["error"]["code"]) == (503, "not_ready")
        assert "No space left" in answered["error"]["message"]
        assert call(f"{url}/health/live")[0] == 200
        filler.unlink()
        assert call(f"{url}/v1/chat/completions", CHAT)[0] == 200
        assert call(f"{url}/health/ready")[0] == 200


@pytest.mark.slow
def test_uploads_and_what_else_writes(tmp_path: Path) -> None:
    with small_gateway(tmp_path / "home") as (url, home):
        status, answered = upload(url, bytes(SIZE))  # it fits nobody's disk: the draft is removed
        assert (status, answered["error"]["code"]) == (507, "disk_full")
        assert upload(url, b"some lines")[0] == 200
        (home.root / "filler").write_bytes(b"")
        fill(home)
        before = everything(home)
        asked: list[tuple[str, Any]] = [
            ("/v1/uploads", {"filename": "f", "purpose": "batch", "bytes": 9, "mime_type": "a/b"}),
            ("/v1/trajectories/events", {"events": [reward("r")]}),
        ]
        for _ in range(3):
            status, answered = upload(url, b"other lines, which are not there yet")
            assert (status, answered["error"]["code"]) == (507, "disk_full")
            for path, body in asked:
                status, answered = call(url + path, body)
                assert (path, status, answered["error"]["code"]) == (path, 507, "disk_full")
        left = everything(home) - before
        assert not {name for name in left if (home.root / name).is_file()}


def test_a_root_that_is_read_only_for_a_time(tmp_path: Path) -> None:
    with small_gateway(tmp_path / "home") as (url, home):
        process, place = home.root.parts[2], str(tmp_path / "home")

        def inside(*argv: str) -> None:
            names = ("--user", "--mount", "--preserve-credentials")
            subprocess.run(["nsenter", "--target", process, *names, *argv], check=True)

        inside("mount", "--bind", place, place)
        inside("mount", "-o", "remount,bind,ro", place)
        uploaded = {"filename": "f", "purpose": "batch", "bytes": 9, "mime_type": "a/b"}
        for status, answered in (
            upload(url, b"some lines"),
            call(f"{url}/v1/uploads", uploaded),
            call(f"{url}/v1/trajectories/events", {"events": [reward("r")]}),
        ):
            error = answered["error"]
            assert (status, error["code"]) == (503, "store_error"), answered
            assert "Read-only file system" in error["message"]
        inside("umount", "--lazy", place)
        assert upload(url, b"some lines")[0] == 200


def reward(run_id: str) -> dict[str, Any]:
    value = {"name": "n", "value": 1.0, "time": 1.0}
    return {"id": f"{run_id}.1", "run_id": run_id, "kind": "reward", "body": value}
