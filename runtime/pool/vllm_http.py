"""HTTP of a vLLM server or a supervisor: connections to our own processes, and to nobody else's.

An engine of this host listens at a Unix socket in a folder that only its user can enter. Where a
port is needed, who listens there has to prove itself first (runtime/vllm_plugins/proof.py), or
shows a certificate of the replicas' CA (replica_certificates.py). Every failure becomes one of our
errors. vllm_engine.py implements the `Engine` port with this. An adapter's engine shares it with
the engine of the weights. gateway/further_gateway.py uses ProvedConnector for the controller.
"""

import asyncio
import logging
import re
import ssl
from collections import Counter
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager, suppress
from dataclasses import dataclass
from io import BytesIO
from pathlib import Path
from typing import Any

import aiohttp
import orjson
from aiohttp.client_proto import ResponseHandler

from cray_agents.engines.plain_http import Answer, Connection, PlainHttp
from cray_agents.errors import (
    CrayError,
    EngineError,
    EngineTimeout,
    EngineUnavailable,
    SetupError,
    VersionClosed,
)
from cray_agents.exact_json import dump_json
from cray_agents.runtime.disk.turns import INLINE, off_loop
from cray_agents.runtime.vllm_plugins import proof
from cray_agents.runtime.vllm_plugins.wire import CLOSED, HEADER

log = logging.getLogger(__name__)

_INVALID = re.compile(  # one of pydantic's errors, as vLLM prints them
    r"""'loc': '(?:body\.?)?([^']*)', 'msg': (?:'((?:[^'\\]|\\.)*)'|"((?:[^"\\]|\\.)*)")"""
)
_FIELD = re.compile(r"[a-z0-9_]+")  # a request's field; other names in an error are vLLM's classes
_VALUE_ERROR = "Value error, "
_SUFFIX = re.compile(r"\s*\(parameter=.*\)$", re.DOTALL)  # appended to messages by vLLM
_BLAMED = re.compile(r"\(parameter=(\w+)|^(\w+) (?:must|cannot) ")
UNIX = "unix:"  # how the URL of a server begins that listens at a Unix socket
_STATUS = re.compile(r"[1-5][0-9]{2}")
#: Seconds until a connection must stand, by the server's kernel: a node that is gone refuses none.
#: In a handshake of TLS the server's own process takes part, and that may be busy.
CONNECT, HANDSHAKE = 2.0, 15.0
IDLE = 2.0  # seconds; less than the servers' 5, so that this side closes idle connections first
_FULL = 0.05  # seconds until a socket whose queue is full is tried again
CA, CA_KEY, CERTIFICATE, KEY = "ca.pem", "ca-key.pem", "cert.pem", "key.pem"
#: Raised by code that reads an answer which has another form than it takes for granted.
MALFORMED = (ArithmeticError, AttributeError, LookupError, RecursionError, TypeError, ValueError)


@dataclass(frozen=True)
class TlsFiles:
    """The files of one replica's servers: whom they trust, what they show, and its key."""

    ca: Path
    certificate: Path
    key: Path

    @property
    def arguments(self) -> tuple[str, ...]:
        """vLLM's flags."""
        return ("--ssl-certfile", str(self.certificate), "--ssl-keyfile", str(self.key))

    def server_context(self) -> ssl.SSLContext:
        """Return the context of a server. Raises SetupError."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        try:
            context.load_cert_chain(self.certificate, self.key)
        except OSError as error:
            raise SetupError(f"{self.certificate} and {self.key} cannot be used: {error}") from None
        return context


def client_context(ca: Path) -> ssl.SSLContext:
    """Return the context of a client that trusts one CA and no other. Raises SetupError."""
    try:
        return ssl.create_default_context(cafile=ca)
    except OSError as error:
        raise SetupError(
            f"{ca} cannot be used ({error}): replica_tls names a folder with {CA}, and either "
            f"{CA_KEY} or {CERTIFICATE} and {KEY}"
        ) from error


class ProvedConnector(aiohttp.BaseConnector):
    """Connections to ports whose owner has proved to know a key, which `key` returns, or by `tls`.

    A connection may take `timeout.sock_connect` of the request; without it, 2 s. Its proof may take
    `timeout.sock_read`; without it, 5 s. A handshake of TLS may take 15 s.
    """

    def __init__(self, key: Callable[[], str], tls: ssl.SSLContext | None = None) -> None:
        super().__init__(limit=0, keepalive_timeout=IDLE)
        self._key, self._tls = key, tls

    def close(self, *, abort_ssl: bool = True) -> Awaitable[None]:
        """Drop all connections; TLS's goodbye is not waited for, which no dead host says."""
        return super().close(abort_ssl=abort_ssl)

    async def _create_connection(
        self, req: aiohttp.ClientRequest, traces: Any, timeout: aiohttp.ClientTimeout
    ) -> ResponseHandler:
        host, port = req.url.raw_host or "", req.url.port or 80
        protocol, transport = self._factory(), None
        try:
            async with _in_time(timeout.sock_connect):
                plain, reader = await self._loop.create_connection(_ProofReader, host, port)
            if self._tls is None:
                async with asyncio.timeout(timeout.sock_read or proof.SECONDS):
                    await _require_proof(plain, reader, self._key())
                plain.set_protocol(protocol)
                transport = plain
            else:
                async with _in_time(HANDSHAKE):
                    transport = await self._loop.start_tls(
                        plain, protocol, self._tls, server_hostname=host
                    )
        except aiohttp.ConnectionTimeoutError:
            raise
        except OSError as error:  # TimeoutError as well: the proof did not come
            raise aiohttp.ClientConnectorError(req.connection_key, error) from error
        if transport is None:
            raise aiohttp.ServerDisconnectedError()  # in its handshake
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
        async with _in_time(timeout.sock_connect):
            while True:
                try:
                    return await super()._create_connection(req, traces, timeout)
                except aiohttp.ClientConnectorError as error:
                    if not isinstance(error.os_error, BlockingIOError):
                        raise
                await asyncio.sleep(_FULL)


@asynccontextmanager
async def _in_time(seconds: float | None) -> AsyncIterator[None]:
    """Raise ConnectionTimeoutError if a connection takes longer than so many seconds, or 2 s."""
    seconds = seconds or proof.CONNECT
    try:
        async with asyncio.timeout(seconds):
            yield
    except TimeoutError as error:
        raise aiohttp.ConnectionTimeoutError(f"no connection within {seconds:g} s") from error


@contextmanager
def well_formed(place: str) -> Iterator[None]:
    """Raise EngineError if the block cannot read an answer from this place, such as a URL."""
    try:
        yield
    except CrayError:
        raise
    except MALFORMED as error:
        why = f"it has no {error}" if isinstance(error, LookupError) else str(error)
        raise EngineError(
            f"{place}: the answer has an unknown form: {(why or type(error).__name__)[:200]}",
            status=502,
        ) from error


class Http:
    """A server at `url`. `timeout`: seconds without a byte from it before EngineTimeout.

    `secret`: the value that vllm_plugins/lock.py requires in a header. Nobody gets it who does not
    prove to be the server: by `tls`, or without it by knowing the secret, unless `url` is that of a
    Unix socket (`UNIX` and its path). Raises EngineUnavailable if `url` would go around `tls`.
    """

    def __init__(
        self, url: str, secret: str, timeout: float, tls: ssl.SSLContext | None = None
    ) -> None:
        if tls is not None and not url.startswith("https://"):
            raise EngineUnavailable(f"{url} is without TLS, which replica_tls asks for")
        self.url = url.rstrip("/")
        self._base = "http://engine" if url.startswith(UNIX) else self.url
        self.timeout = timeout
        self.active = 0  # requests under way
        self.secret, self._tls = secret, tls
        self._session: aiohttp.ClientSession | None = None
        self._plain = PlainHttp("engine", self._connect) if url.startswith(UNIX) else None

    async def close(self) -> None:
        """Drop the connections."""
        if self._plain is not None:
            self._plain.close()
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

        The block is to read the answer, and may take its form for granted: see `well_formed`.
        `public_name`: the model's name in an error, in place of the body's. `size`: about the
        bytes of the body, which a thread writes as JSON if it is large.
        `once` closes the connection afterwards. vLLM drops it after a failed control request, and
        the `/resume` that has to follow must not fail because of that.
        """
        if self._session is None:  # made late because it belongs to the running loop
            always = {HEADER: self.secret}
            self._session = aiohttp.ClientSession(connector=self._connector(), headers=always)
        limit = aiohttp.ClientTimeout(
            total=None, sock_connect=CONNECT, sock_read=timeout or self.timeout
        )
        content: bytes | BytesIO | None = None
        if body is not None:
            content = await off_loop(size, dump_json, body)
            if len(content) > INLINE:  # sent in pieces, as the server takes them
                content = BytesIO(content)
        headers = {"Content-Type": "application/json", **(headers or {})}
        if once:
            headers["Connection"] = "close"
        with self._failures(path, public_name, limit.sock_read):
            async with self._session.request(
                method,
                self._base + path,
                data=content,
                headers=headers,
                timeout=limit,
                allow_redirects=False,
            ) as response:
                if response.status >= 300:
                    alias = str(body["model"]) if public_name and body is not None else ""
                    names = (alias, public_name)
                    raise to_engine_error(response.status, await response.read(), names)
                with well_formed(self._place(path, public_name)):
                    yield response

    @contextmanager
    def _failures(self, path: str, public_name: str, seconds: float | None) -> Iterator[None]:
        """Count the request that the block makes, and raise our errors where it fails."""
        self.active += 1
        try:
            yield
        except CrayError:  # some are OSErrors as well
            raise
        except aiohttp.ConnectionTimeoutError as error:
            why = str(error.__cause__ or error)  # see _in_time
            raise EngineUnavailable(self._message(path, why, why, public_name)) from error
        except TimeoutError as error:  # first: aiohttp's timeouts are ClientErrors as well
            why = f"nothing came for {seconds:g} s"
            raise EngineTimeout(self._message(path, why, why, public_name)) from error
        except (aiohttp.ClientError, asyncio.IncompleteReadError, OSError) as error:
            why = str(error) or type(error).__name__
            message = self._message(path, why, "the connection to it broke off", public_name)
            # its proof did not come
            late = isinstance(getattr(error, "os_error", None), TimeoutError)
            raise (EngineTimeout if late else EngineUnavailable)(message) from error
        finally:
            self.active -= 1

    async def post(
        self, path: str, body: dict[str, Any], headers: dict[str, str], public_name: str, size: int
    ) -> Answer:
        """Return the answer to a POST in one piece. Its arguments and errors are those of `answer`.

        At a Unix socket it takes a third of aiohttp's processor time.
        """
        if self._plain is None or size > INLINE:
            options: Any = {"headers": headers, "public_name": public_name, "size": size}
            async with self.answer("POST", path, body, **options) as response:
                told = {name.lower(): value for name, value in response.headers.items()}
                return Answer(response.status, told, await response.read())
        with self._failures(path, public_name, self.timeout):
            named = {HEADER: self.secret, **headers}
            with well_formed(self._place(path, public_name)):
                answer = await self._plain.post(path, dump_json(body), named, self.timeout)
        if answer.status >= 300:
            raise to_engine_error(answer.status, answer.body, (str(body["model"]), public_name))
        return answer

    async def _connect(self) -> tuple[asyncio.Transport, Connection]:
        """Open a connection to the Unix socket; where many come at once, wait for its turn."""
        loop, path = asyncio.get_running_loop(), self.url.removeprefix(UNIX)
        while True:
            with suppress(BlockingIOError):
                return await loop.create_unix_connection(Connection, path)
            await asyncio.sleep(_FULL)

    def _connector(self) -> aiohttp.BaseConnector:
        if self.url.startswith(UNIX):
            return SocketConnector(self.url.removeprefix(UNIX))
        return ProvedConnector(lambda: self.secret, self._tls)

    def _message(self, path: str, why: str, public: str, public_name: str) -> str:
        """Return the message of a failure. A model's client reads no address; the log has it."""
        if public_name:
            log.warning("%s%s: %s", self.url, path, why)
        return f"{self._place(path, public_name)}: {public if public_name else why}"

    def _place(self, path: str, public_name: str) -> str:
        return f"the replica of {public_name}" if public_name else f"{self.url}{path}"


def to_engine_error(status: int, body: bytes, names: tuple[str, str] = ("", "")) -> EngineError:
    """Turn vLLM's error, whose `code` is an int and whose shape varies, into one of ours.

    `names`: vLLM's name of the model, and the name that the client reads instead.
    """
    try:
        content = orjson.loads(body)
    except orjson.JSONDecodeError:
        content = body.decode(errors="replace")[:500]
    error = content.get("error", content.get("detail")) if isinstance(content, dict) else content
    if not isinstance(error, dict):
        error = {"message": str(error or f"status {status}")}
    if status == 409 and error.get("type") == CLOSED:
        return VersionClosed(str(error.get("message")))
    message, blamed = _simplify(str(error.get("message") or f"status {status}"))
    code = str(error.get("code"))
    status = status or (int(code) if _STATUS.fullmatch(code) else 500)
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
