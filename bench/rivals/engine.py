"""A scripted engine for gateways: the same sixteen pieces, whole, or one every PACE seconds.

    python -m bench.rivals.engine PARENT_PID PACE

Says its port. To our gateway, which asks for the samples, it gives them as our replicas do; to the
others it answers as a plain vLLM does, and they ask it for its health and its models first.
"""

import asyncio
import sys

import uvloop

from bench.gateways import STREAMED, WHOLE, PreparedAnswers
from cray_agents.processes import die_with_parent

CAPTURE, MODELS = b"\r\nx-cray-capture:", b"/v1/models"
_END = b"\n\n"
_SAMPLES = b"event: cray.samples\n"
_LIST = b'{"object":"list","data":[{"id":"m","object":"model","owned_by":"vllm"}]}'


def _plain(whole: bytes) -> bytes:
    """The same answer without the samples behind it."""
    head, _, body = whole.partition(b"\r\n\r\n")
    size = int(head.partition(b"x-cray-body: ")[2].split(b"\r\n")[0])
    return _answer(body[:size])


def _answer(body: bytes, kind: bytes = b"application/json") -> bytes:
    head = b"HTTP/1.1 200 OK\r\ncontent-type: %s\r\ncontent-length: %d\r\n\r\n"
    return head % (kind, len(body)) + body


PLAIN, LIST, HEALTHY = _plain(WHOLE), _answer(_LIST), _answer(b"{}")
_EVENTS = STREAMED.partition(b"\r\n\r\n")[2].partition(_SAMPLES)[0]
PLAIN_STREAMED = _answer(_EVENTS, b"text/event-stream")


class Engine(PreparedAnswers):
    """A connection to the engine."""

    pace = 0.0

    def answer(self, head: bytes, body: bytes) -> None:
        """Answer a request, of our gateway or of another."""
        if not head.startswith(b"post"):
            self._transport.write(LIST if MODELS in head.split(b"\r\n")[0] else HEALTHY)
            return
        captured = CAPTURE in head
        streams = b'"stream":true' in body or b'"stream": true' in body
        if captured:
            answer = self.named(STREAMED if streams else WHOLE, head)
        else:
            answer = PLAIN_STREAMED if streams else PLAIN
        if self.pace and streams:
            asyncio.get_running_loop().create_task(self._stream(answer))
        else:
            self._transport.write(answer)

    async def _stream(self, answer: bytes) -> None:
        """Send whole events, as vLLM does: whoever reads events sees each when it was sent."""
        *events, last = answer.split(_END + b"data: {")
        for number, event in enumerate(events):
            self._transport.write((b"data: {" if number else b"") + event + _END)
            await asyncio.sleep(self.pace)
        self._transport.write(b"data: {" + last)


async def _serve() -> None:
    server = await asyncio.get_running_loop().create_server(Engine, "127.0.0.1", 0, backlog=1024)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    Engine.pace = float(sys.argv[2])
    uvloop.run(_serve())
