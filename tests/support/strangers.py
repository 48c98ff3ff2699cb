"""Another user of the host: what of a platform he reaches, and what he hears at its ports.

A child of the test's process changes its user. That needs a test that runs as root.
"""

import itertools
import json
import os
import re
import selectors
import signal
import socket
import subprocess
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cray_agents.processes import die_with_parent

NOBODY = 65534
needs_root = pytest.mark.skipif(os.geteuid() != 0, reason="only root can become another user")
_FORGED = json.dumps(
    {"proof": "0" * 64, "serial": 10**6, "starts": 1, "alive": True, "why": "forged", "url": "",
     "alias": "m", "secret": "forged", "pid": 1, "port": 1, "leaving": True, "seconds_left": None,
     "seconds": None, "share": None, "data": []}
).encode()  # fmt: skip
_ANSWER = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: %d\r\n\r\n%s"


@dataclass(frozen=True)
class Listener:
    """A socket at which processes listen. `place`: (host, port), a path, or \\0 and a name."""

    place: Any
    pids: tuple[int, ...]


def tree(pid: int) -> list[int]:
    """A process and all that descend from it."""
    text = subprocess.run(["ps", "-eo", "pid=,ppid="], capture_output=True, text=True).stdout
    rows = [tuple(map(int, row.split())) for row in text.splitlines()]
    found = [pid]
    for one in found:
        found += [child for child, parent in rows if parent == one]
    return found


def listeners(*pids: int) -> list[Listener]:
    """The sockets of any kind at which these processes, and all below them, can be reached."""
    owners: dict[str, list[int]] = {}
    for pid in {each for root in pids for each in tree(root)}:
        with suppress(OSError):
            for handle in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    target = str(handle.readlink())
                    if target.startswith("socket:["):
                        owners.setdefault(target[8:-1], []).append(pid)
    found = []
    for table in ("tcp", "tcp6"):
        for row in _rows(f"/proc/net/{table}"):
            if row[3] == "0A" and row[9] in owners:
                host, port = row[1].split(":")
                found.append(Listener((_address(host), int(port, 16)), tuple(owners[row[9]])))
    for row in _rows("/proc/net/unix"):
        bound = len(row) > 7 and (row[3] == "00010000" or row[4] == "0002" or row[7][0] == "@")
        if bound and row[6] in owners:
            place = "\0" + row[7][1:] if row[7].startswith("@") else row[7]
            found.append(Listener(place, tuple(owners[row[6]])))
    return found


def _rows(path: str) -> list[list[str]]:
    return [line.split() for line in Path(path).read_text().splitlines()[1:]]


def _address(text: str) -> str:
    words = [bytes.fromhex(text[at : at + 8])[::-1] for at in range(0, len(text), 8)]
    family = socket.AF_INET if len(words) == 1 else socket.AF_INET6
    return socket.inet_ntop(family, b"".join(words))


# ---- what he does
#: Nothing but questions for a proof.
ONLY_ASKED = re.compile(
    rb"(GET /v1/gateways/proof\?nonce=[0-9a-f]{64} HTTP/1.1\r\nhost: platform\r\n\r\n)+"
)


def as_stranger(work: Callable[..., Any], *given: Any) -> Any:
    """The result of work that another user does; JSON."""
    reader, writer = os.pipe()
    if (pid := os.fork()) == 0:
        _become_stranger()
        try:
            os.write(writer, json.dumps(work(*given)).encode())
        finally:
            os._exit(0)
    os.close(writer)
    with os.fdopen(reader, "rb") as pipe:
        text = pipe.read()
    os.waitpid(pid, 0)
    assert text, "the other user's work failed"
    return json.loads(text)


def _become_stranger() -> None:
    parent = os.getppid()
    os.setgroups([])
    os.setgid(NOBODY)
    os.setuid(NOBODY)
    die_with_parent(parent)


def say(place: Any, *said: bytes) -> list[str]:
    """What comes back for each of these, each on a connection of its own; "refused"."""
    return _say_all([place], said, 60)  # who answers may be slow


def say_everywhere(places: list[Any], *said: bytes) -> list[str]:
    """The same at several places at once, where the silent ones are listened to for seconds."""
    return _say_all(places, said, 5)


def _say_all(places: list[Any], said: tuple[bytes, ...], seconds: int) -> list[str]:
    with ThreadPoolExecutor(32) as threads:
        pairs = zip(*itertools.product(places, said), strict=True)
        return list(threads.map(_say, *pairs, itertools.repeat(seconds)))


def _say(place: Any, said: bytes, seconds: int) -> str:
    family = socket.AF_UNIX if isinstance(place, str) else socket.AF_INET
    with socket.socket(family) as connection:
        connection.settimeout(seconds)
        try:
            connection.connect(place)
        except OSError:
            return "refused"
        answer = b""
        with suppress(OSError):
            connection.sendall(said)
            while piece := connection.recv(1 << 16):
                answer += piece
        return answer.decode("latin-1")


@dataclass
class Taker:
    """A stranger who takes ports as soon as they are free, and answers whoever comes there."""

    pid: int
    _log: Path
    places: list[tuple[str, int]] = field(default_factory=list)

    def heard(self) -> bytes:
        """All that came to ports that he took."""
        return self._log.read_bytes()

    def taken(self) -> list[int]:
        """The ports that he took."""
        return [int(word) for word in self._log.with_suffix(".taken").read_text().split()]


@contextmanager
def taker(folder: Path, *places: tuple[str, int]) -> Iterator[Taker]:
    """Let a stranger try to take these ports, again and again."""
    log = folder / "heard"
    log.write_bytes(b"")
    log.with_suffix(".taken").write_text("")
    heard, taken = log.open("ab", buffering=0), log.with_suffix(".taken").open("a", buffering=1)
    if (pid := os.fork()) == 0:
        _become_stranger()
        with suppress(BaseException):
            _take(places, heard.write, lambda port: print(port, file=taken))
        os._exit(0)
    heard.close()
    taken.close()
    try:
        yield Taker(pid, log, list(places))
    finally:
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def _take(
    places: tuple[tuple[str, int], ...], hear: Callable[[bytes], Any], tell: Callable[[int], None]
) -> None:
    wanted, mine = list(places), selectors.DefaultSelector()
    while True:
        for place in list(wanted):
            for option in (socket.SO_REUSEADDR, socket.SO_REUSEPORT):
                listener = socket.socket()
                listener.setsockopt(socket.SOL_SOCKET, option, 1)
                try:
                    listener.bind(place)
                    listener.listen(100)
                except OSError:
                    listener.close()
                    continue
                tell(place[1])
                wanted.remove(place)
                mine.register(listener, selectors.EVENT_READ, "listener")
                break
        for key, _ in mine.select(0.002):
            ready: Any = key.fileobj
            if key.data == "listener":
                mine.register(ready.accept()[0], selectors.EVENT_READ)
                continue
            request = b""
            with suppress(OSError):
                request = ready.recv(1 << 16)
                ready.sendall(_ANSWER % (len(_FORGED), _FORGED)) if request else None
            hear(request)
            if not request:
                mine.unregister(ready)
                ready.close()
