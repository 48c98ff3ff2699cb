"""Connectors: connections that lead to the platform's own processes, and to nobody else's.

An engine of this host listens at a Unix socket in a folder that only its user can enter. Where a
port is needed, who listens there has to prove itself first: runtime/vllm_plugins/proof.py. Used by
vllm_http.py for engines and supervisors, and by gateway/controller_link.py for the controller.
"""

import asyncio
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
from aiohttp.client_proto import ResponseHandler

from cray_agents.runtime.vllm_plugins import proof

IDLE = 2.0  # seconds; less than the servers' 5, so that this side closes idle connections first
_FULL = 0.05  # seconds until a socket whose queue is full is tried again


class ProvedConnector(aiohttp.BaseConnector):
    """Connections to ports whose owner has proved to know a key, which `key` returns.

    A connection may take `timeout.sock_connect` of the request; without it, 2 s. Its proof may take
    `timeout.sock_read`; without it, 5 s.
    """

    def __init__(self, key: Callable[[], str]) -> None:
        super().__init__(limit=0, keepalive_timeout=IDLE)
        self._key = key

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        host, port = req.url.raw_host or "", req.url.port or 80
        try:
            async with _in_time(timeout):
                transport, reader = await self._loop.create_connection(_ProofReader, host, port)
            async with asyncio.timeout(timeout.sock_read or proof.SECONDS):
                await _require_proof(transport, reader, self._key())
        except aiohttp.ConnectionTimeoutError:
            raise
        except OSError as error:  # TimeoutError as well: the proof did not come
            raise aiohttp.ClientConnectorError(req.connection_key, error) from error
        protocol = self._factory()
        transport.set_protocol(protocol)
        protocol.connection_made(transport)
        return protocol


async def _require_proof(transport: asyncio.Transport, answer: "_ProofReader", key: str) -> None:
    try:
        challenge = proof.Challenge(key, transport.get_extra_info("peername"))
        transport.write(challenge.request)
        challenge.check(await answer.read())
    except BaseException:
        transport.abort()
        raise


class _ProofReader(asyncio.Protocol):
    """Reads what comes until it looks like a whole answer to a challenge, or no more comes."""

    def __init__(self) -> None:
        self._text = b""
        self._came = asyncio.Event()

    async def read(self) -> bytes:
        await self._came.wait()
        return self._text

    def data_received(self, data: bytes) -> None:
        self._text += data
        if self._text.endswith(b"}") or len(self._text) > proof.LONGEST:
            self._came.set()

    def connection_lost(self, exc: Exception | None) -> None:
        self._came.set()


class SocketConnector(aiohttp.UnixConnector):
    """Connections to a Unix socket. Where many come at once, they wait for their turn as TCP's."""

    def __init__(self, path: str) -> None:
        super().__init__(path, limit=0, keepalive_timeout=IDLE)

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        async with _in_time(timeout):
            while True:
                try:
                    return await super()._create_connection(req, traces, timeout)
                except aiohttp.ClientConnectorError as error:
                    if not isinstance(error.os_error, BlockingIOError):
                        raise
                await asyncio.sleep(_FULL)


@asynccontextmanager
async def _in_time(timeout: aiohttp.ClientTimeout) -> AsyncIterator[None]:
    """Raise ConnectionTimeoutError if a connection takes longer than `timeout` says, or 2 s."""
    seconds = timeout.sock_connect or proof.CONNECT
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise aiohttp.ConnectionTimeoutError(f"no connection within {seconds:g} s") from error
