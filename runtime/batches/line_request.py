"""Line requests: send one line of a batch to the gateway until it has an answer.

Failures unrelated to the line are retried: the gateway is unreachable, full, or has no replica.
Every attempt carries the same idempotency key, so the gateway repeats an answer it gave before.
Called by worker.py, which cancels the request when the batch stops.
"""

import asyncio
import logging
import os
import random
from collections.abc import Mapping
from typing import NamedTuple

import aiohttp

from cray_agents.exact_json import dump_json, load_json
from cray_agents.runtime.batches.chunks import RequestLine

TEMPORARY = {408, 425, 429, 503, 504, 507}  # not caused by the line; 507: until there is room
UNAUTHORIZED = {401, 403}  # caused by this worker's key, not by the line
SERVER_ERRORS = {500, 502}  # temporary or caused by the line: tried SERVER_ERROR_ATTEMPTS times
SERVER_ERROR_ATTEMPTS = 8  # attempts, in about 20 seconds
FIRST_PAUSE = 0.1  # seconds; doubles with every attempt
LONGEST_PAUSE = 20.0  # seconds
LONGEST_UNREACHABLE_PAUSE = 2.0  # seconds between attempts to reach an unreachable gateway
TIMEOUT = aiohttp.ClientTimeout(total=6 * 3600, sock_connect=10)

log = logging.getLogger(__name__)


class LineAnswer(NamedTuple):
    """The final answer to a line."""

    custom_id: str
    status: int
    request_id: str
    body: bytes


class LineSender:
    """The worker's connection to the gateway at `url`. Call close() at the end."""

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

    async def send(
        self, batch_id: str, endpoint: str, line: RequestLine, owner: str = ""
    ) -> LineAnswer:
        """Send a line until it has an answer. `owner` becomes the owner of its run."""
        request = load_json(line.raw)
        body = dump_json(request["body"])
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
                pause = _pause(attempt, LONGEST_UNREACHABLE_PAUSE)
                _log_attempt(attempt, batch_id, line, f"{type(error).__name__}: {error}")
            else:
                is_permanent = answer.headers.get("x-should-retry") == "false"
                if _is_final(answer.status, attempt) or (
                    is_permanent and answer.status in SERVER_ERRORS
                ):
                    request_id = answer.headers.get("x-request-id", "")
                    return LineAnswer(request["custom_id"], answer.status, request_id, content)
                pause = _requested_pause(answer.headers) or _pause(attempt, LONGEST_PAUSE)
                _log_attempt(attempt, batch_id, line, f"{answer.status} {content[:200]!r}")
            await asyncio.sleep(pause)


def api_key() -> str | None:
    """Return the API key from the environment."""
    return os.environ.get("CRAY_AGENTS_API_KEY") or None


def _is_final(status: int, attempt: int) -> bool:
    if status in TEMPORARY or status in UNAUTHORIZED:
        return False
    return status not in SERVER_ERRORS or attempt >= SERVER_ERROR_ATTEMPTS


def _pause(attempt: int, longest: float) -> float:
    """Return seconds to wait, with jitter, so that many lines do not retry at once."""
    return float(min(longest, FIRST_PAUSE * 2 ** min(attempt, 20)) * random.uniform(0.5, 1.0))


def _requested_pause(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the gateway asks to wait, with a little jitter."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value and value.isascii() and value.isdecimal():
            return float(min(int(value) * unit, LONGEST_PAUSE) * random.uniform(1.0, 1.25))
    return None


def _log_attempt(attempt: int, batch_id: str, line: RequestLine, reason: str) -> None:
    """Log a failed attempt, but only the 1st, 8th, 64th and so on."""
    if attempt & (attempt - 1) == 0 and attempt.bit_length() % 3 == 1:
        log.warning("%s line %d, attempt %d: %s", batch_id, line.number, attempt, reason)
