"""Bytes that are not HTTP, or whose headers contradict the body."""

import json
from random import Random

from tests.support.fuzz.bodies import SAYS

HOST = b"host: 127.0.0.1\r\n"
HEAD = b"POST /v1/chat/completions HTTP/1.1\r\n" + HOST + b"content-type: application/json\r\n"
FORM = b"POST /v1/files HTTP/1.1\r\n" + HOST + b"content-type: multipart/form-data; boundary=x\r\n"
GET = b"GET /health HTTP/1.1\r\n" + HOST
BODY = json.dumps({"model": "m", "messages": SAYS}).encode()
CHUNKED = b"transfer-encoding: chunked\r\n\r\n"
LENGTH = b"content-length: "
SOCKET = b"connection: upgrade\r\nupgrade: websocket\r\nsec-websocket-version: 13\r\n"
#: The bytes, and whether nothing more is sent then: else the connection stays open.
SHAPES: dict[str, tuple[bytes, bool]] = {
    "longer": (HEAD + LENGTH + b"9999\r\n\r\n" + BODY, False),
    "longer, ends": (HEAD + LENGTH + b"9999\r\n\r\n" + BODY, True),
    "longer form": (FORM + LENGTH + b"9999\r\n\r\n--x\r\n", False),
    "shorter": (HEAD + LENGTH + b"10\r\n\r\n" + BODY, False),
    "negative": (HEAD + LENGTH + b"-5\r\n\r\n" + BODY, False),
    "no number": (HEAD + LENGTH + b"abc\r\n\r\n" + BODY, False),
    "plus": (HEAD + LENGTH + b"+5\r\n\r\n" + BODY, False),
    "beyond all": (HEAD + LENGTH + b"9" * 30 + b"\r\n\r\n" + BODY, False),
    "very long": (HEAD + LENGTH + b"99999999999\r\n\r\n" + BODY, False),
    "very long form": (FORM + LENGTH + b"99999999999999\r\n\r\n--x", False),
    "missing": (HEAD + b"\r\n" + BODY, True),
    "two lengths": (HEAD + LENGTH + b"5\r\n" + LENGTH + b"50\r\n\r\n" + BODY, False),
    "length and chunks": (HEAD + LENGTH + b"5\r\n" + CHUNKED + b"0\r\n\r\n", False),
    "chunks and length": (
        HEAD + b"transfer-encoding: chunked\r\n" + LENGTH + b"4\r\n\r\n5c\r\nGET /x\r\n0\r\n\r\n",
        False,
    ),
    "chunks of garbage": (HEAD + CHUNKED + b"zzz\r\n" + BODY + b"\r\n0\r\n\r\n", False),
    "a chunk too long": (HEAD + CHUNKED + b"fffffffffffffffff\r\n" + BODY, False),
    "a negative chunk": (HEAD + CHUNKED + b"-1\r\n" + BODY, False),
    "a chunk that lies": (HEAD + CHUNKED + b"5\r\n" + BODY + b"\r\n0\r\n\r\n", False),
    "chunks without an end": (HEAD + CHUNKED + b"2\r\n{}\r\n", False),
    "chunks cut off": (HEAD + CHUNKED + b"2\r\n{}\r\n", True),
    "an unknown coding": (HEAD + b"transfer-encoding: gzip\r\n\r\n" + BODY, True),
    "smuggled coding": (HEAD + b"transfer-encoding : chunked\r\n\r\n0\r\n\r\n", True),
    "smuggled twice": (HEAD + b"transfer-encoding: x\r\n" + CHUNKED + b"0\r\n\r\n", True),
    "no version": (b"GET /health\r\n\r\n", True),
    "another version": (b"GET /health HTTP/9.9\r\n" + HOST + b"\r\n", True),
    "http/2": (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", True),
    "tls": (b"\x16\x03\x01\x02\x00\x01\x00\x01\xfc\x03\x03" + b"\0" * 50, True),
    "nothing": (b"", True),
    "line ends": (b"\r\n" * 100, True),
    "garbage": (Random(1).randbytes(4000), True),
    "a head without an end": (GET + b"x: ", True),
    "a header without a name": (GET + b": x\r\n\r\n", True),
    "a header with a zero": (GET + b"x: \0\r\n\r\n", True),
    "a folded header": (GET + b"x: a\r\n b\r\n\r\n", True),
    "a long header": (GET + b"x: " + b"x" * 200_000 + b"\r\n\r\n", True),
    "many headers": (GET + b"x: y\r\n" * 20_000 + b"\r\n", True),
    "a long path": (b"GET /" + b"x" * 200_000 + b" HTTP/1.1\r\n" + HOST + b"\r\n", True),
    "no path": (b"GET  HTTP/1.1\r\n" + HOST + b"\r\n", True),
    "a whole url": (b"GET http://evil.example/health HTTP/1.1\r\n" + HOST + b"\r\n", True),
    "a star": (b"OPTIONS * HTTP/1.1\r\n" + HOST + b"\r\n", True),
    "connect": (b"CONNECT evil.example:443 HTTP/1.1\r\n" + HOST + b"\r\n", True),
    "a web socket": (GET + SOCKET + b"sec-websocket-key: dGhlIHNhbXBsZSBub25jZQ==\r\n\r\n", False),
    "bytes in the path": (b"GET /v1/models/\xff\xfe HTTP/1.1\r\n" + HOST + b"\r\n", True),
    "expected, not sent": (
        HEAD + b"expect: 100-continue\r\n" + LENGTH + b"50\r\n\r\n",
        False,
    ),
    "another behind it": (HEAD + LENGTH + b"2\r\n\r\n{}" + GET + b"\r\n", True),
}
