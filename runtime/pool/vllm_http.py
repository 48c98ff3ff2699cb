"""A vLLM server's HTTP: one connection pool, and every failure as one of our errors.

vllm_engine.py says with it what the `Engine` port says; an adapter's engine shares it with the
weights' own.
"""

import asyncio
import re
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from typing import Any

import aiohttp
import orjson

from cray_agents.errors import EngineError, EngineTimeout, EngineUnavailable
from cray_agents.runtime.vllm_plugins.lock import HEADER

_INVALID = re.compile(  # an error among pydantic's, as vLLM writes them
    r"""'loc': '(?:body\.?)?([^']*)', 'msg': (?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")"""
)
_OURS = re.compile(r"[a-z0-9_]+")  # what a client calls its fields; the rest are vLLM's classes
_VALUE_ERROR = "Value error, "
_NOTED = re.compile(r"\s*\(parameter=.*\)$", re.DOTALL)  # what vLLM adds to a message
_BLAMED = re.compile(r"\(parameter=(\w+)|^(\w+) (?:must|cannot) ")
_IDLE = 2.0  # seconds; vLLM closes idle connections after 5, and must not be the first to


class Http:
    """A server at `url`. `timeout`: seconds without a byte from it before EngineTimeout.

    `secret`: what vllm_lock.py asks for.
    """

    def __init__(self, url: str, secret: str, timeout: float) -> None:
        self.url = url.rstrip("/")
        self.timeout = timeout
        self._secret = secret
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Drop the connections."""
        if self._session is not None:
            await self._session.close()
            self._session = None

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float = 0.0,
        once: bool = False,
        headers: dict[str, str] | None = None,
        named: str = "",
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """A response with a good status. Raises EngineError, EngineTimeout, EngineUnavailable.

        `named`: what a refusal calls the model by, in place of the body's.
        `once` closes the connection afterwards: vLLM drops it after a failed control request, and
        the `/resume` that has to follow must not die of that.
        """
        if self._session is None:  # made here because it belongs to the running loop
            connector = aiohttp.TCPConnector(limit=0, keepalive_timeout=_IDLE)
            ours = {HEADER: self._secret}
            self._session = aiohttp.ClientSession(connector=connector, headers=ours)
        limit = aiohttp.ClientTimeout(total=None, sock_read=timeout or self.timeout)
        content = None if body is None else orjson.dumps(body)
        sent = {"Content-Type": "application/json", **(headers or {})}
        if once:
            sent["Connection"] = "close"
        try:
            async with self._session.request(
                method, self.url + path, data=content, headers=sent, timeout=limit
            ) as response:
                if response.status >= 400:
                    alias = str(body["model"]) if named and body is not None else ""
                    raise refusal(response.status, await response.read(), (alias, named))
                yield response
        except TimeoutError as error:  # aiohttp's timeouts are both kinds: ask for this one first
            raise EngineTimeout(
                f"{self.url}{path}: nothing came for {limit.sock_read} s"
            ) from error
        except aiohttp.ClientError as error:
            raise EngineUnavailable(f"{self.url}{path}: {error or type(error).__name__}") from error
        except asyncio.IncompleteReadError as error:
            raise EngineUnavailable(f"{self.url}{path}: the answer broke off") from error


def refusal(
    status: int, body: bytes | dict[str, Any], names: tuple[str, str] = ("", "")
) -> EngineError:
    """vLLM's error, whose `code` is an int and whose shape varies, as one of ours.

    `names`: what vLLM calls the model, and what the client is to read instead.
    """
    if isinstance(body, bytes):
        try:
            content = orjson.loads(body)
        except orjson.JSONDecodeError:
            content = body.decode(errors="replace")[:500]
    else:
        content = body
    error = content.get("error", content.get("detail")) if isinstance(content, dict) else content
    if not isinstance(error, dict):
        error = {"message": str(error or f"status {status}")}
    message, blamed = _readable(str(error.get("message") or f"status {status}"))
    status = status or int(error.get("code") or 500)
    dead = "EngineDead" in str(error.get("type")) + message or "EngineCore" in message
    if dead and status >= 500:  # a refusal may quote such words from the request
        return EngineUnavailable(message, status=status)
    param = blamed or _param(error.get("param"), message)
    message = _NOTED.sub("", message)
    if names[0]:
        message = re.sub(rf"(?<![\w-]){re.escape(names[0])}(?![\w-])", names[1], message)
    return EngineError(message, status=status, param=param, code=_code(status, message))


def _readable(message: str) -> tuple[str, str | None]:
    """A message without pydantic's own text, and the field to blame where that was in it.

    Of the errors about the alternatives that a field has, the field that most are about is told.
    """
    found = [
        (".".join(part for part in where.split(".") if _OURS.fullmatch(part)), one or other)
        for where, one, other in _INVALID.findall(message)
    ]
    if not found or "validation error" not in message.partition("\n")[0]:
        return message, None
    [(field, _)] = Counter(where for where, _ in found).most_common(1)
    why = next(said for where, said in found if where == field).removeprefix(_VALUE_ERROR)
    return f"{field or 'the body'}: {why}", field or None


def _param(given: Any, message: str) -> str | None:
    """The field to blame: some of vLLM's messages alone name it."""
    if given is not None:
        return str(given).removeprefix("body.") or None
    found = _BLAMED.search(message)
    return found and (found[1] or found[2])


def _code(status: int, message: str) -> str | None:
    """OpenAI's word for it, where it has one."""
    if "maximum context length" in message or "max_model_len" in message:
        return "context_length_exceeded"
    if status == 404:
        return "model_not_found"
    return "invalid_value" if 400 <= status < 500 else None
