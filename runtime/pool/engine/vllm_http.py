"""HTTP of a vLLM server: one connection pool, and one of our errors for every failure.

vllm_engine.py implements the `Engine` port with it. An adapter's engine shares it with the engine
of the weights.
"""

import asyncio
import logging
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from io import BytesIO
from typing import Any

import aiohttp
import orjson

from cray_agents.errors import EngineError, EngineTimeout, EngineUnavailable, VersionClosed
from cray_agents.exact_json import dump_json
from cray_agents.runtime.disk.turns import INLINE, off_loop
from cray_agents.runtime.vllm_plugins.lock import CLOSED, HEADER

log = logging.getLogger(__name__)

_INVALID = re.compile(  # one of pydantic's errors, as vLLM prints them
    r"""'loc': '(?:body\.?)?([^']*)', 'msg': (?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")"""
)
_FIELD = re.compile(r"[a-z0-9_]+")  # a request's field; other names in an error are vLLM's classes
_VALUE_ERROR = "Value error, "
_SUFFIX = re.compile(r"\s*\(parameter=.*\)$", re.DOTALL)  # appended to messages by vLLM
_BLAMED = re.compile(r"\(parameter=(\w+)|^(\w+) (?:must|cannot) ")
_IDLE = 2.0  # seconds; less than vLLM's 5, so that this side closes idle connections first


class Http:
    """A server at `url`. `timeout`: seconds without a byte from it before EngineTimeout.

    `secret`: the value that vllm_plugins/lock.py requires in a header. `tls`: the server must prove
    itself by it; None: no TLS. Raises EngineUnavailable if `url` would go around it.
    """

    def __init__(
        self, url: str, secret: str, timeout: float, tls: ssl.SSLContext | None = None
    ) -> None:
        if tls is not None and not url.startswith("https://"):
            raise EngineUnavailable(f"{url} is without TLS, which replica_tls asks for")
        self.url = url.rstrip("/")
        self.timeout = timeout
        self.active = 0  # requests under way
        self.secret, self._tls = secret, tls
        self._session: aiohttp.ClientSession | None = None

    async def close(self) -> None:
        """Drop the connections."""
        session, self._session = self._session, None  # first: what comes meanwhile gets another
        if session is not None:
            await session.close()

    @asynccontextmanager
    async def answer(
        self,
        method: str,
        path: str,
        body: dict[str, Any] | None = None,
        timeout: float = 0.0,
        once: bool = False,
        headers: dict[str, str] | None = None,
        public_name: str = "",
        size: int = 0,
    ) -> AsyncIterator[aiohttp.ClientResponse]:
        """Yield a response with a good status. Raises EngineError and its kinds.

        `public_name`: the model's name in an error, in place of the body's. `size`: about the
        bytes of the body, which a thread writes as JSON if it is large.
        `once` closes the connection afterwards. vLLM drops it after a failed control request, and
        the `/resume` that has to follow must not fail because of that.
        """
        if self._session is None:  # made late because it belongs to the running loop
            connector = aiohttp.TCPConnector(
                limit=0, keepalive_timeout=_IDLE, ssl=True if self._tls is None else self._tls
            )
            always = {HEADER: self.secret}
            self._session = aiohttp.ClientSession(connector=connector, headers=always)
        limit = aiohttp.ClientTimeout(total=None, sock_read=timeout or self.timeout)
        content: bytes | BytesIO | None = None
        if body is not None:
            content = await off_loop(size, dump_json, body)
            if len(content) > INLINE:  # sent in pieces, as the server takes them
                content = BytesIO(content)
        headers = {"Content-Type": "application/json", **(headers or {})}
        if once:
            headers["Connection"] = "close"
        self.active += 1
        try:
            async with self._session.request(
                method, self.url + path, data=content, headers=headers, timeout=limit
            ) as response:
                if response.status >= 400:
                    alias = str(body["model"]) if public_name and body is not None else ""
                    names = (alias, public_name)
                    raise to_engine_error(response.status, await response.read(), names)
                yield response
        except TimeoutError as error:  # first: aiohttp's timeouts are ClientErrors as well
            why = f"nothing came for {limit.sock_read} s"
            raise EngineTimeout(self._message(path, why, why, public_name)) from error
        except (aiohttp.ClientError, asyncio.IncompleteReadError) as error:
            why = str(error) or type(error).__name__
            message = self._message(path, why, "the connection to it broke off", public_name)
            raise EngineUnavailable(message) from error
        finally:
            self.active -= 1

    def _message(self, path: str, why: str, public: str, public_name: str) -> str:
        """Return the message of a failure. A model's client reads no address; the log has it."""
        if not public_name:
            return f"{self.url}{path}: {why}"
        log.warning("%s%s: %s", self.url, path, why)
        return f"the replica of {public_name}: {public}"


def to_engine_error(
    status: int, body: bytes | dict[str, Any], names: tuple[str, str] = ("", "")
) -> EngineError:
    """Turn vLLM's error, whose `code` is an int and whose shape varies, into one of ours.

    `names`: vLLM's name of the model, and the name that the client reads instead.
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
    if status == 409 and error.get("type") == CLOSED:
        return VersionClosed(str(error["message"]))
    message, blamed = _simplify(str(error.get("message") or f"status {status}"))
    status = status or int(error.get("code") or 500)
    dead = "EngineDead" in str(error.get("type")) + message or "EngineCore" in message
    if dead and status >= 500:  # a refusal may quote such words from the request
        return EngineUnavailable(message, status=status)
    param = blamed or _blamed_field(error.get("param"), message)
    message = _SUFFIX.sub("", message)
    if names[0]:
        message = re.sub(rf"(?<![\w-]){re.escape(names[0])}(?![\w-])", names[1], message)
    return EngineError(message, status=status, param=param, code=_error_code(status, message))


def _simplify(message: str) -> tuple[str, str | None]:
    """Reduce pydantic's error text to one message, and return the field that it blames.

    A field with alternatives yields an error for each; the field with most errors is blamed.
    """
    errors = [
        (".".join(name for name in path.split(".") if _FIELD.fullmatch(name)), one or other)
        for path, one, other in _INVALID.findall(message)
    ]
    if not errors or "validation error" not in message.partition("\n")[0]:
        return message, None
    [(blamed, _)] = Counter(field for field, _ in errors).most_common(1)
    why = next(text for field, text in errors if field == blamed).removeprefix(_VALUE_ERROR)
    return f"{blamed or 'the body'}: {why}", blamed or None


def _blamed_field(param: Any, message: str) -> str | None:
    """Return the blamed field; some of vLLM's errors name it in the message alone."""
    if param is not None:
        return str(param).removeprefix("body.") or None
    match = _BLAMED.search(message)
    return match and (match[1] or match[2])


def _error_code(status: int, message: str) -> str | None:
    """Return OpenAI's error code; None where it has none."""
    if "maximum context length" in message or "max_model_len" in message:
        return "context_length_exceeded"
    if status == 404:
        return "model_not_found"
    return "invalid_value" if 400 <= status < 500 else None
