"""A client that sends any bytes, and reads the answer as strictly as a proxy would."""

import asyncio
import json
import re
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

LONGEST_WAIT = 300.0  # seconds: more is a hang, also on a busy machine


class Hang(AssertionError):
    """No answer, and the connection stays open."""


@dataclass(frozen=True)
class Reply:
    """A whole answer. `closes`: the server ends the connection after it."""

    status: int
    headers: dict[str, str]
    body: bytes
    closes: bool

    @property
    def error(self) -> dict[str, Any]:
        """The envelope's content. Raises AssertionError where it is none."""
        assert self.headers.get("content-type") == "application/json", self
        value = json.loads(self.body)
        anthropic = {"type": "error"} if "type" in value else {}
        assert value == {**anthropic, "error": value.get("error")}, self
        error: dict[str, Any] = value["error"]
        assert set(error) == {"message", "type", "param", "code"}, self
        for name in ("message", "type", "code"):
            assert isinstance(error[name], str) and error[name], self
        assert error["param"] is None or isinstance(error["param"], str), self
        return error


class Wire:
    """One connection after another to a port of this host."""

    def __init__(self, port: int) -> None:
        self._port = port
        self._reader: asyncio.StreamReader | None = None
        self._writer: asyncio.StreamWriter | None = None

    async def ask(self, request: bytes, *, head: bool = False) -> Reply:
        """Send a whole request, and read its answer. Raises Hang."""
        reply = await self.try_ask(request, head=head)
        if reply is None:  # an idle connection that the server has ended
            reply = await self.try_ask(request, head=head)
        assert reply is not None, "the connection was closed without an answer"
        return reply

    async def try_ask(
        self, request: bytes, *, head: bool = False, ends: bool = False
    ) -> Reply | None:
        """The answer; None if the connection was closed instead. `ends`: nothing more is sent."""
        try:
            async with asyncio.timeout(LONGEST_WAIT):
                return await self._ask(request, head, ends)
        except TimeoutError:
            self.close()
            raise Hang(f"no answer in {LONGEST_WAIT} s to {request[:2000]!r}") from None
        except (ConnectionError, asyncio.IncompleteReadError):
            self.close()
            return None

    async def _ask(self, request: bytes, head: bool, ends: bool) -> Reply | None:
        if self._reader is None or self._writer is None:
            limit = 2**24
            self._reader, self._writer = await asyncio.open_connection(
                "127.0.0.1", self._port, limit=limit
            )
        reader, writer = self._reader, self._writer
        writer.write(request)
        if ends:
            writer.write_eof()
        sending = asyncio.ensure_future(writer.drain())  # the answer may come before all is sent
        try:
            reply = await _read(reader, head)
        finally:
            sending.cancel()
            with suppress(asyncio.CancelledError, ConnectionError):
                await sending
        if reply.closes or ends:
            self.close()
        return reply

    def close(self) -> None:
        """Drop the connection."""
        if self._writer is not None:
            self._writer.close()
        self._reader = self._writer = None


async def _read(reader: asyncio.StreamReader, head: bool) -> Reply:
    while True:
        lines = (await reader.readuntil(b"\r\n\r\n")).decode("latin-1").split("\r\n")
        found = re.fullmatch(r"HTTP/1\.1 (\d{3}) .*", lines[0])
        assert found, lines[0]
        status = int(found[1])
        if status != 100:
            break
    headers = {}
    for line in lines[1:-2]:
        name, _, value = line.partition(":")
        assert name.lower() not in headers or name.lower() == "vary", line
        headers[name.lower()] = value.strip()
    closes = headers.get("connection") == "close"
    if head or status in (204, 304):
        return Reply(status, headers, b"", closes)
    if headers.get("transfer-encoding") == "chunked":
        body = b""
        while size := int((await reader.readuntil(b"\r\n"))[:-2], 16):
            body += (await reader.readexactly(size + 2))[:-2]
        assert await reader.readexactly(2) == b"\r\n"
    elif "content-length" in headers:
        body = await reader.readexactly(int(headers["content-length"]))
    else:
        body, closes = await reader.read(), True
    return Reply(status, headers, body, closes)
