"""Who works on what: leases over the shared root, by hard links and one heartbeat a worker.

A worker has one small file that says who it is; a claim is a hard link to it, under a name that
only one can make. So one touch of that file renews every claim of the worker, and ages are told by
the file server's clock, for both times are its own. A claim is taken over under the next fence
number: at once if its process is gone from this very machine, else when the lease is over. A worker
that was only slow may then go on: what it links into done/ comes too late, or first; either is one.

Used by worker.py.
"""

import logging
import os
import re
import socket
import time
from pathlib import Path

import orjson

from cray_agents.errors import Corrupt
from cray_agents.processes import alive
from cray_agents.records import new_id
from cray_agents.runtime.disk import checksums, durable

LEASE = 60.0  # seconds without a heartbeat after which a worker counts as dead
BEAT = 5.0  # seconds between heartbeats
FORGET = 86400.0  # seconds after which a dead worker's file is removed
log = logging.getLogger(__name__)

_CLAIM = re.compile(r"([a-z0-9]+)\.([0-9]+)")


class Holder:
    """This process as holder of claims. `lease`: seconds."""

    def __init__(self, directory: Path, lease: float = LEASE) -> None:
        self.id = new_id("worker")
        self.lease = lease
        self.path = directory / f"{self.id}.json"
        self._machine = _machine()
        pid = os.getpid()
        me = {"machine": self._machine, "pid": pid, "since": _started(pid)}
        durable.create_file(self.path, checksums.with_crc(orjson.dumps(me)))

    def beat(self) -> None:
        """Renew every claim."""
        os.utime(self.path)

    def leave(self) -> None:
        """Give up every claim: they are taken over at once."""
        os.utime(self.path, (0, 0))
        self.path.unlink()

    def take(self, claims: Path, name: str, newest: int) -> int | None:
        """Claim something whose newest fence number was seen to be `newest` (0: none yet).

        Returns the fence number, or None if it is somebody's.
        """
        if newest and not self._free(claims / f"{name}.{newest}"):
            return None
        try:
            os.link(self.path, claims / f"{name}.{newest + 1}")
        except (FileExistsError, FileNotFoundError):  # somebody was first; the batch has ended
            return None
        return newest + 1

    def _free(self, claim: Path) -> bool:
        """Whether the holder of a claim is dead, as far as one can tell."""
        try:
            with claim.open("rb") as file:  # opened, so that NFS asks the server for the time
                theirs = os.fstat(file.fileno()).st_mtime
                holder = checksums.parse(file.read(), claim)
        except FileNotFoundError:
            return False
        except Corrupt as error:  # who holds it is not known any more; that it lives, by its time
            log.error("%s; its lease decides", error)
            return self.path.stat().st_mtime - theirs > self.lease
        pid = holder["pid"]
        here = holder["machine"] == self._machine
        if here and (not alive(pid) or _started(pid) != holder["since"]):
            return True
        return self.path.stat().st_mtime - theirs > self.lease


def fences(claims: Path) -> dict[str, int]:
    """The newest fence number of everything that is claimed."""
    newest: dict[str, int] = {}
    try:
        names = os.listdir(claims)  # noqa: PTH208  names are all that is needed
    except FileNotFoundError:
        return {}
    for match in filter(None, map(_CLAIM.fullmatch, names)):
        newest[match[1]] = max(newest.get(match[1], 0), int(match[2]))
    return newest


def release(claims: Path, name: str, fence: int) -> None:
    """Remove the claims on something that is finished."""
    for number in range(1, fence + 1):
        (claims / f"{name}.{number}").unlink(missing_ok=True)


def forget_dead(directory: Path) -> None:
    """Remove the files of workers that have long been gone; called when one starts."""
    now = time.time()
    for path in directory.glob("worker_*.json"):
        try:
            if now - path.stat().st_mtime > FORGET:
                path.unlink()
        except FileNotFoundError:
            continue


def _machine() -> str:
    """Names what a pid is meaningful in: this boot of this host, this container."""
    parts = [socket.gethostname()]
    try:
        parts.append(Path("/proc/sys/kernel/random/boot_id").read_text().strip())
        parts.append(os.readlink("/proc/self/ns/pid"))  # noqa: PTH115  it is no path
    except OSError:
        pass
    return " ".join(parts)


def _started(pid: int) -> int:
    """When a process began, in its kernel's ticks: tells it from a later one with its pid."""
    try:
        stat = Path(f"/proc/{pid}/stat").read_text()
    except OSError:
        return 0
    return int(stat.rpartition(")")[2].split()[19])
