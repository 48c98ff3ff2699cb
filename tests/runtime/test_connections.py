"""Connections: a time limit for the head of a request, and no compressed bodies."""

import asyncio
import gzip
import json
import socket
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager, suppress
from pathlib import Path

import pytest

from cray_agents.runtime.gateway.http.protocol import protocol
from tests.support.gateway_with_keys import Site, site_at
from tests.support.odd_heads import ODD_HEADS, odd_request
from tests.support.scripted_services import listening

HEAD = b"POST /v1/chat/completions HTTP/1.1\r\nhost: localhost\r\n"


@asynccontextmanager
async def hurried(site: Site, seconds: float) -> AsyncIterator[int]:
    """The same application behind a server that waits so long for a head; its port."""
    options = {"log_level": "critical", "timeout_keep_alive": 60}
    async with listening(site.app, http=protocol(seconds), **options) as url:
        yield int(url.rpartition(":")[2])


async def connected(port: int, sent: bytes) -> tuple[asyncio.StreamReader, asyncio.StreamWriter]:
    """A connection on which this is there before the server takes it, and its time begins."""
    connection = socket.create_connection(("127.0.0.1", port))
    connection.sendall(sent)
    return await asyncio.open_connection(sock=connection)


async def answer_to(port: int, sent: bytes) -> bytes:
    """All that comes back until the server ends the connection."""
    reader, writer = await connected(port, sent)
    async with asyncio.timeout(120):
        answer = await reader.read()
    writer.close()
    return answer


@pytest.mark.slow
@pytest.mark.parametrize("sent", [b"", b"\r\n", b"P", HEAD, HEAD + b"x: " + b"y" * 3000])
async def test_half_a_head_is_not_waited_for(tmp_path: Path, sent: bytes) -> None:
    async with site_at(tmp_path) as site, hurried(site, 0.2) as port:
        answer = await answer_to(port, sent)
        if not sent:
            assert answer == b""
            return
        head, _, body = answer.partition(b"\r\n\r\n")
        assert head.startswith(b"HTTP/1.1 408 ") and b"connection: close" in head
        assert json.loads(body)["error"]["code"] == "request_timeout"


@pytest.mark.slow
async def test_half_a_head_after_a_request(tmp_path: Path) -> None:
    request = b"GET /health HTTP/1.1\r\nhost: localhost\r\n\r\n"
    async with site_at(tmp_path) as site, hurried(site, 0.2) as port:
        reader, writer = await connected(port, request)
        async with asyncio.timeout(120):
            for number in range(3):  # a connection between requests may rest for longer than that
                writer.write(request if number else b"")
                assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
                await reader.readuntil(b"}")
                await asyncio.sleep(0.4)
            writer.write(request[:20])
            assert b" 408 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()


@pytest.mark.slow
async def test_a_body_may_take_longer_than_a_head(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    async with site_at(tmp_path) as site, hurried(site, 0.2) as port:
        half = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body[:5]
        reader, writer = await connected(port, half)
        await asyncio.sleep(0.5)
        writer.write(body[5:])
        async with asyncio.timeout(120):
            assert b" 200 " in await reader.readuntil(b"\r\n\r\n")
        writer.close()


@pytest.mark.slow
@pytest.mark.parametrize("encoding", ["gzip", "deflate, GZIP", "x-unheard-of"])
@pytest.mark.parametrize(
    "path", ["/v1/chat/completions", "/v1/files", "/v1/trajectories/events", "/v1/messages"]
)
async def test_a_compressed_body_is_refused(tmp_path: Path, path: str, encoding: str) -> None:
    body = gzip.compress(b'{"model": "m", "messages": [{"role": "user", "content": "hi"}]}')
    async with site_at(tmp_path) as site:
        reply = site.http.post(site.url + path, data=body, headers={"content-encoding": encoding})
        async with reply as response:
            error = (await response.json())["error"]
            assert response.status == 415
            assert encoding in error["message"]
            if path != "/v1/messages":
                assert error["code"] == "unsupported_content_encoding"
                assert error["param"] == "Content-Encoding"
        plain = {"content-encoding": "identity", "content-type": "application/json"}
        async with site.http.post(site.url + path, data=b"{}", headers=plain) as response:
            assert response.status == 400


@pytest.mark.parametrize("head", ODD_HEADS)
async def test_a_head_that_others_may_read_otherwise_is_refused(tmp_path: Path, head: str) -> None:
    async with site_at(tmp_path) as site, hurried(site, 120) as port:
        answer = await answer_to(port, odd_request(head, "localhost"))
        refused, _, body = answer.partition(b"\r\n\r\n")
        assert refused.startswith(b"HTTP/1.1 400 "), refused
        assert json.loads(body)["error"]["code"] == "invalid_http"


LONG = b"x" * 100_000
MANY = b"".join(b"x-%d: 1\r\n" % number for number in range(1000))
CHUNKED = b"POST /v1/batches HTTP/1.1\r\nhost: localhost\r\ntransfer-encoding: chunked\r\n\r\n"
LARGE_HEADS = {
    "a long target": b"GET /" + LONG,
    "a long value": HEAD + b"x: " + LONG + b"\r\n\r\n",
    "a long name": HEAD + LONG,
    "many": HEAD + MANY + b"\r\n",
    "empty lines": b"\r\n" * 400_000,
    "an extension": CHUNKED + b"1;" + LONG,
    "a long trailer": CHUNKED + b"0\r\nx: " + LONG,
    "many trailers": CHUNKED + b"0\r\n" + MANY,
}


@pytest.mark.parametrize("name", LARGE_HEADS)
async def test_a_large_head_is_refused(tmp_path: Path, name: str) -> None:
    """What goes on without end is not read to its end, either."""
    async with site_at(tmp_path) as site, hurried(site, 120) as port:
        reader, writer = await asyncio.open_connection("127.0.0.1", port)
        answer = asyncio.create_task(reader.readuntil(b"}}"))
        async with asyncio.timeout(120):
            for at in range(0, len(LARGE_HEADS[name]), 30_000):
                if writer.is_closing():
                    break
                writer.write(LARGE_HEADS[name][at : at + 30_000])
                await asyncio.sleep(0.01)
            head, _, body = (await answer).partition(b"\r\n\r\n")
            with suppress(ConnectionError):  # of what was sent after the server's end
                assert await reader.read() == b""
        writer.close()
        assert head.startswith(b"HTTP/1.1 431 ") and b"connection: close" in head
        assert json.loads(body)["error"]["code"] == "headers_too_large"


async def test_a_head_below_the_bounds_is_served(tmp_path: Path) -> None:
    head = b"GET /health HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n"
    few = b"".join(b"x-%d: %b\r\n" % (number, b"y" * 250) for number in range(200))
    async with site_at(tmp_path) as site, hurried(site, 120) as port:
        assert (await answer_to(port, head + few + b"\r\n")).startswith(b"HTTP/1.1 200 ")


async def test_the_answers_to_earlier_requests_come_before_a_refusal(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    call = HEAD + b"content-length: %d\r\n\r\n" % len(body) + body
    async with site_at(tmp_path) as site, hurried(site, 120) as port:
        for sent, status in ((HEAD + MANY, b"431"), (b"NONSENSE\r\n\r\n", b"400")):
            answer = await answer_to(port, call + call + sent)
            assert [part[:3] for part in answer.split(b"HTTP/1.1 ")[1:]] == [b"200", b"200", status]


async def test_trailers_do_not_become_headers(tmp_path: Path) -> None:
    body = json.dumps({"model": "m", "messages": [{"role": "user", "content": "hi"}]}).encode()
    head = HEAD + b"transfer-encoding: chunked\r\nconnection: close\r\n\r\n"
    chunks = b"%x\r\n%b\r\n0\r\nx-run-id: of-the-trailer\r\n\r\n" % (len(body), body)
    async with site_at(tmp_path) as site, hurried(site, 120) as port:
        answer = await answer_to(port, head + chunks)
        assert answer.startswith(b"HTTP/1.1 200 ") and b"of-the-trailer" not in answer
