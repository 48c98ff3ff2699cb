"""Claims of workers on chunks: leases by hard links, with one heartbeat a worker.

A worker has one small file that identifies it. A claim is a hard link to that file, under a name
that only one worker can create. So touching the file renews every claim of the worker. Ages compare
two times set by the file server, so clock differences between hosts do not matter.

A claim is taken over under the next fence number. This happens at once if the process ran on this
machine and is gone; otherwise after the lease. A slow worker may still go on after its claim was
taken over: only the first link into done/ counts.

Used by worker.py.
"""

import logging
import os
import re
import time
from pathlib import Path

import orjson

from cray_agents.errors import Corrupt
from cray_agents.processes import Process, start_time
from cray_agents.records import new_id
from cray_agents.runtime.disk import checksums, durable

LEASE = 60.0  # seconds without a heartbeat after which a worker counts as dead
HEARTBEAT_INTERVAL = 5.0  # seconds between heartbeats
FORGET = 86400.0  # seconds after which a dead worker's file is removed
log = logging.getLogger(__name__)

_CLAIM = re.compile(r"([a-z0-9]+)\.([0-9]+)")


class Holder:
    """This process as a holder of claims. `lease` is in seconds."""

    def __init__(self, directory: Path, lease: float = LEASE) -> None:
        self.id = new_id("worker")
        self.lease = lease
        self.path = directory / f"{self.id}.json"
        self._process = Process.of()
        record = {
            "machine": _machine(self._process),
            "pid": self._process.pid,
            "since": self._process.start,
        }
        durable.create_file(self.path, checksums.with_crc(orjson.dumps(record)))

    def beat(self) -> None:
        """Renew every claim."""
        os.utime(self.path)

    def leave(self) -> None:
        """Give up every claim; other workers may take them over at once."""
        os.utime(self.path, (0, 0))
        self.path.unlink()

    def take(self, claims: Path, name: str, newest: int) -> int | None:
        """Claim a name whose newest fence number is `newest` (0: never claimed).

        Returns the new fence number, or None if another worker holds the claim.
        """
        if newest and not self._is_abandoned(claims / f"{name}.{newest}"):
            return None
        try:
            os.link(self.path, claims / f"{name}.{newest + 1}")
        except (FileExistsError, FileNotFoundError):  # claimed by another; the batch has ended
            return None
        return newest + 1

    def _is_abandoned(self, claim: Path) -> bool:
        """Tell whether the holder of a claim is dead, or its lease is over."""
        try:
            with claim.open("rb") as file:  # opening makes NFS fetch the time anew
                renewed = os.fstat(file.fileno()).st_mtime
                holder = checksums.parse(file.read(), claim)
        except FileNotFoundError:
            return False
        except Corrupt as error:  # the holder is unknown, but the time is valid
            log.error("%s; its lease decides", error)
            return self.path.stat().st_mtime - renewed > self.lease
        is_local = holder["machine"] == _machine(self._process)
        if is_local and start_time(holder["pid"]) != holder["since"]:
            return True
        return self.path.stat().st_mtime - renewed > self.lease


def fences(claims: Path) -> dict[str, int]:
    """Return the newest fence number of every claimed name."""
    newest: dict[str, int] = {}
    for match in filter(None, map(_CLAIM.fullmatch, durable.names_in(claims))):
        newest[match[1]] = max(newest.get(match[1], 0), int(match[2]))
    return newest


def release(claims: Path, name: str, fence: int) -> None:
    """Remove all claims on a finished chunk, up to fence number `fence`."""
    for number in range(1, fence + 1):
        (claims / f"{name}.{number}").unlink(missing_ok=True)


def forget_dead(directory: Path) -> None:
    """Remove the files of workers without a heartbeat for FORGET seconds."""
    now = time.time()
    for path in directory.glob("worker_*.json"):
        try:
            if now - path.stat().st_mtime > FORGET:
                path.unlink()
        except FileNotFoundError:
            continue


def _machine(process: Process) -> str:
    """Identify the scope of a pid: host, boot and container."""
    return " ".join([process.host, process.boot or "", process.space or ""])
