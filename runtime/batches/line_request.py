"""One line of a batch as an ordinary request to the gateway, asked until it has an answer.

What says nothing of the line itself (the gateway is away, full, or has no replica) is waited out.
Every attempt carries the same idempotency key, so that a gateway which had answered answers the
same. Called by worker.py, which cancels it when the batch stops.
"""

import asyncio
import logging
import os
import random
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp
import orjson

from cray_agents.runtime.batches.chunks import RequestLine

AWAY = {408, 425, 429, 503, 504}  # of the moment, not of the line
OURS = {401, 403}  # of this worker's key, not of the line
BROKEN = {500, 502}  # of the moment, or of this line: asked some times more
BROKEN_TIMES = 8  # in about 20 seconds
FIRST_PAUSE = 0.1  # seconds; doubles with every attempt
LONGEST_PAUSE = 20.0
LONGEST_AWAY = 2.0  # seconds between attempts to reach a gateway that is not there
TIMEOUT = aiohttp.ClientTimeout(total=6 * 3600, sock_connect=10)

log = logging.getLogger(__name__)


class LineAnswer(NamedTuple):
    """An answer that is the line's result."""

    custom_id: str
    status: int
    request_id: str
    body: bytes


class Asker:
    """The worker's connection to the gateway at `url`. Close it."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json", "X-Priority": "batch"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=headers,
            timeout=TIMEOUT,
            auto_decompress=True,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def ask(
        self, batch_id: str, endpoint: str, line: RequestLine, owner: str = ""
    ) -> LineAnswer:
        """The line's answer, however long it takes. `owner`: whose its run is to be."""
        request = orjson.loads(line.raw)
        body = orjson.dumps(request["body"])
        headers = {
            "Idempotency-Key": f"{batch_id}:{line.number}",
            "X-Run-Id": f"{batch_id}-{line.number}",
            "X-On-Behalf-Of": owner,
        }
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._session.post(
                    self._url + endpoint, data=body, headers=headers
                ) as answer:
                    content = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                pause = _pause(attempt, LONGEST_AWAY)
                _tell(attempt, batch_id, line, f"{type(error).__name__}: {error}")
            else:
                no_more = answer.headers.get("x-should-retry") == "false"
                if _final(answer.status, attempt) or (no_more and answer.status in BROKEN):
                    request_id = answer.headers.get("x-request-id", "")
                    return LineAnswer(request["custom_id"], answer.status, request_id, content)
                pause = _asked_pause(answer.headers) or _pause(attempt, LONGEST_PAUSE)
                _tell(attempt, batch_id, line, f"{answer.status} {content[:200]!r}")
            await asyncio.sleep(pause)


def api_key() -> str | None:
    """The key that workers are started with."""
    return os.environ.get("CRAY_AGENTS_API_KEY") or None


def _final(status: int, attempt: int) -> bool:
    if status in AWAY or status in OURS:
        return False
    return status not in BROKEN or attempt >= BROKEN_TIMES


def _pause(attempt: int, longest: float) -> float:
    """Seconds, with jitter, so that many lines do not come back at once."""
    return float(min(longest, FIRST_PAUSE * 2 ** min(attempt, 20)) * random.uniform(0.5, 1.0))


def _asked_pause(headers: Mapping[str, str]) -> float | None:
    """Seconds the gateway asks to wait, with a little jitter."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value and value.isascii() and value.isdecimal():
            return float(min(int(value) * unit, LONGEST_PAUSE) * random.uniform(1.0, 1.25))
    return None


def _tell(attempt: int, batch_id: str, line: RequestLine, why: str) -> None:
    """In the log at the 1st, 8th, 64th ... attempt."""
    if attempt & (attempt - 1) == 0 and attempt.bit_length() % 3 == 1:
        log.warning("%s line %d, attempt %d: %s", batch_id, line.number, attempt, why)
