"""Several gateway processes at one port, over scripted replicas that cost next to nothing.

The replicas are processes that send prepared answers. No controller runs: further gateways need
none to answer calls. Everything is recorded. Run as a script it is one replica.
"""

import asyncio
import json
import os
import re
import statistics
import subprocess
import sys
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import cast

import uvloop

from bench.load import ask
from bench.rounds import ROUNDS, row
from cray_agents.paths import Home
from cray_agents.processes import die_with_parent
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.pool.published_replicas import PublishedPool, PublishedReplica
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.vllm_plugins.proof import proof_of
from tests.support.bare_models import bare_model

ROOT = Path(__file__).parents[1]
PROCESSES = (1, 2, 4)
REPLICAS = 2
CONNECTIONS = 64
REQUESTS = 2000
ALIAS, LABEL = "m-abc", "m@1 0"
WORDS = [
    "the",
    "sum",
    "of",
    "the",
    "two",
    "numbers",
    "is",
    "four",
    "hundred",
    "and",
    "thirty",
    "two",
    "as",
    "asked",
    "for",
]


# ---- a replica
def samples_json() -> bytes:
    sample = {
        "prompt_token_ids": list(range(40)), "token_ids": list(range(64)),
        "logprobs": [-0.5] * 64, "finish_reason": "stop", "name": "x", "versions": [[0, LABEL]],
    }  # fmt: skip
    return json.dumps([sample]).encode()


def _whole(name: str) -> bytes:
    message = {"role": "assistant", "content": " ".join(WORDS)}
    content = json.dumps({
        "id": name, "object": "chat.completion", "created": 0, "model": ALIAS,
        "usage": {}, "choices": [{"index": 0, "message": message, "finish_reason": "stop"}],
    }, separators=(",", ":")).encode()  # fmt: skip
    body = content + samples_json()
    head = f"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\nx-cray-body: {len(content)}"
    return f"{head}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


def _streamed(name: str) -> bytes:
    head = {"id": name, "object": "chat.completion.chunk", "created": 0, "model": ALIAS}
    events = b""
    for number, word in enumerate([*WORDS, ""]):
        finish = "stop" if number == len(WORDS) else None
        choice = {"index": 0, "delta": {"content": word}, "finish_reason": finish}
        chunk = json.dumps(head | {"choices": [choice]}, separators=(",", ":"))
        events += b"data: " + chunk.encode() + b"\n\n"
    body = events + b"data: [DONE]\n\nevent: cray.samples\ndata: " + samples_json() + b"\n\n"
    first = f"HTTP/1.1 200 OK\r\ncontent-type: text/event-stream\r\nx-cray-version: {LABEL}"
    return f"{first}\r\ncontent-length: {len(body)}\r\n\r\n".encode() + body


class PreparedAnswers(asyncio.Protocol):
    """A connection to a replica: each request gets the prepared answer under its own id."""

    NAME = "chatcmpl-0123456789abcdef012345678"  # as long as the gateway's own ids

    def __init__(self) -> None:
        self._transport = asyncio.Transport()
        self._received = b""

    def connection_made(self, transport: asyncio.BaseTransport) -> None:
        self._transport = cast(asyncio.Transport, transport)

    def data_received(self, data: bytes) -> None:
        self._received += data
        while (end := self._received.find(b"\r\n\r\n")) >= 0:
            head = self._received[:end].lower()
            length = int(head.partition(b"content-length:")[2].split(b"\r\n")[0] or 0)
            if len(self._received) < end + 4 + length:
                return
            body = self._received[end + 4 : end + 4 + length]
            self._received = self._received[end + 4 + length :]
            if nonce := re.search(rb"/proof\?nonce=(\w+)", head):
                self._prove(nonce[1].decode())
            else:
                self.answer(head, body)

    def _prove(self, nonce: str) -> None:
        """Prove to be the replica of `published_root`."""
        proof = proof_of("s", nonce, *self._transport.get_extra_info("sockname"))
        body = json.dumps({"proof": proof}, separators=(",", ":"))
        head = f"HTTP/1.1 200 OK\r\ncontent-length: {len(body)}\r\n\r\n"
        self._transport.write((head + body).encode())

    def answer(self, head: bytes, body: bytes) -> None:
        """Answer a request: its head in lower case, and its body."""
        answer = STREAMED if b'"stream":true' in body else WHOLE
        self._transport.write(self.named(answer, head))

    def named(self, answer: bytes, head: bytes) -> bytes:
        """Return a prepared answer under the request's own id."""
        name = b"chatcmpl-" + head.partition(b"x-request-id: ")[2].split(b"\r\n")[0]
        return answer.replace(self.NAME.encode(), name)


WHOLE, STREAMED = _whole(PreparedAnswers.NAME), _streamed(PreparedAnswers.NAME)


async def _replica() -> None:
    loop = asyncio.get_running_loop()
    server = await loop.create_server(PreparedAnswers, "127.0.0.1", 0)
    print(server.sockets[0].getsockname()[1], flush=True)
    await server.serve_forever()


# ---- the processes
@contextmanager
def started(*argv: str, says: str = "", cwd: Path = ROOT) -> Iterator[tuple[str, int]]:
    """Yield the last word of its first line with `says` in it, and its pid."""
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    process = subprocess.Popen(
        [sys.executable, "-m", *argv], cwd=cwd, env=environment, text=True,
        stdout=subprocess.PIPE, stderr=subprocess.STDOUT,
    )  # fmt: skip
    try:
        assert process.stdout is not None
        line = next(line for line in process.stdout if says in line)
        yield line.split()[-1], process.pid
    finally:
        process.kill()
        process.wait()


def _cpu_seconds(pids: list[int]) -> float:
    fields = (Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split() for pid in pids)
    return sum(int(f[11]) + int(f[12]) for f in fields) / os.sysconf("SC_CLK_TCK")


def published_root(folder: Path, replicas: list[str]) -> Home:
    """A root with a version, and the word of a controller that is gone."""
    home = Home(folder)
    registry = Registry(home)
    registry.register("m", *registry.import_checkpoint(bare_model(folder / "first")))
    registry.promote("m", 1, who="bench")
    info = {"url": "http://127.0.0.1:9", "elsewhere": None, "host": os.uname().nodename,
            "token": "sk-none"}  # fmt: skip
    durable.replace_file(home.platform, checksums.with_crc(json.dumps(info).encode()))
    told = PublishedPool(incumbent="m@1", replicas=[
        PublishedReplica(url=f"http://127.0.0.1:{port}", secret="s", names={"m@1": ALIAS},
                         expected=["m@1"], state="serving")
        for port in replicas
    ])  # fmt: skip
    home.replicas.mkdir()
    durable.replace_file(home.serving, checksums.record_text(told))
    return home


async def at_one_port(home: Path) -> None:
    """Throughput and CPU time of 1, 2 and 4 gateway processes, in turn."""
    figures: dict[tuple[int, bool], list[tuple[float, float]]] = {}
    with ExitStack() as stack:
        replicas = [
            stack.enter_context(started("bench.gateways", str(os.getpid())))[0]
            for _ in range(REPLICAS)
        ]
        sites: dict[int, tuple[int, list[int]]] = {}
        for count in PROCESSES:
            root = published_root(home / f"gateways-{count}", replicas)
            port, pids = 0, []
            for _ in range(count):
                argv = [
                    "cray_agents",
                    "up",
                    "--gateway-only",
                    "--home",
                    str(root.root),
                    "--port",
                    str(port),
                ]
                url, pid = stack.enter_context(
                    started(*argv, says="further gateway", cwd=root.root)
                )
                port = int(url.removesuffix("/v1").rpartition(":")[2])
                pids.append(pid)
            sites[count] = port, pids
        for number in range(ROUNDS + 1):
            for count, (port, pids) in sites.items():
                for stream in (False, True):
                    said = [{"role": "user", "content": "What is 47 + 385?"}]
                    body = {"model": "m", "messages": said, "stream": stream}
                    before = _cpu_seconds(pids)
                    rate = (await ask(port, json.dumps(body).encode(), CONNECTIONS, REQUESTS)).rate
                    cpu = 1000 * (_cpu_seconds(pids) - before) / REQUESTS
                    if number:  # the first round warms
                        figures.setdefault((count, stream), []).append((rate, cpu))
    for (count, stream), found in sorted(figures.items(), key=lambda item: item[0][::-1]):
        ratio = statistics.median(
            mine[0] / one[0] for mine, one in zip(found, figures[1, stream], strict=True)
        )
        rate, cpu = (statistics.median(column) for column in zip(*found, strict=True))
        what = f"{CONNECTIONS} connections{', streaming' if stream else ''}"
        of = f"{count} gateway process{'es' if count > 1 else ''}"
        row(what, of, f"{rate:,.0f} requests/s, {cpu:.2f} ms of CPU a request, {ratio:.2f} times 1")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[1]))
    uvloop.run(_replica())
