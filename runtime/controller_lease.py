"""Controller lease: one process of a shared root decides, by a heartbeat and a fencing number.

    platform.json                  who controls: URL, host, key, `term` and `beat`; renewed
    controller/terms/<n>.json      term n is taken, by whom: made exclusively, never deleted
    controller/terms/<n>.ended     who had it gave it back
    controller/standbys/<id>.json  a process that waits to take over, with its heartbeat
    controller/down.json           the term that `cray-agents down` ended: no standby follows it

A term belongs to the one process that created its file. Damage to its content does no harm: the
name alone counts, and content only shortens a wait. Who controls renews platform.json every sixth
of `lease` seconds.

**Timing.** A holder notes its clock before it writes a heartbeat. It decides for two thirds of
`lease` after the last one that got through, and then no more. Another process claims the next term
after it saw no new heartbeat for the whole of `lease`. It counts from the end of the read that
showed the newest heartbeat. So a third of `lease` lies between the last decision of one holder and
the first of the next, and a write that began in time has that long to end. Clocks of hosts are
never compared, nor times of files. The clock used goes on in suspension, and no step changes it.

**Lapse.** A holder that was stopped or had no root for longer claims the next term itself. If it
gets that, nobody else did, and it goes on with the higher number. Else it ends its process at once.

**Caches.** A host may see names and attributes that are 30 s old. An exclusive create is decided by
the file server, and so is who has a term. platform.json is opened anew for each look, by which NFS
asks the server. Should a standby believe a stale look after all, it takes over from a living
holder. That one sees the higher term in platform.json before its next decision, and ends.

**What remains.** A process may be stopped between its last check and the write of the decision, for
longer than a third of `lease`. Numbered files decide then: an event of the registry has the number
after those that its writer has read, so it fails if the new holder wrote one. If the new holder
has written none, the late event is the only one, and is followed like any other.

Called by server/root_claim.py; registry.py, the schedulers and the trainer call `check`.
"""

import json
import logging
import os
import socket
import sys
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from cray_agents.errors import Corrupt, NewerFormat, StoreError, Superseded
from cray_agents.paths import Home
from cray_agents.records import new_id
from cray_agents.runtime.disk import checksums, durable

LEASE = 10.0  # seconds without a heartbeat after which another process takes over
BEATS = 6  # heartbeats in the time of a lease
LOOKS = 24  # looks of a standby in the time of a lease
FORGOTTEN = 10  # times the lease after which the file of a silent standby is removed

CLAIM_FORMAT = 1  # of platform.json and of all files in controller/

_PROCESS = ("host", "boot", "pid_namespace", "pid", "ticks")  # what a claim says of its process

#: Returns the term of a decision, given the highest one in the records that it rests on.
Term = Callable[[int], int]
#: Raises Superseded or StoreError where nothing may be decided: `check` without an argument.
Guard = Callable[[], object]
Claim = dict[str, Any]

log = logging.getLogger(__name__)


def unguarded(seen: int = 0) -> int:
    """Return `seen`: the check of a process that holds no lease, such as a command."""
    return seen


def clock() -> float:
    """Return seconds of a clock that no step changes and that goes on while a host sleeps."""
    if sys.platform == "linux":
        return time.clock_gettime(time.CLOCK_BOOTTIME)
    return time.monotonic()


def newest_term(home: Home) -> int:
    """Return the highest term that was claimed, as this host sees it; 0 without one."""
    folder = home.controller / "terms"
    names = (path.stem for path in folder.glob("*.json")) if folder.is_dir() else ()
    return max((int(name) for name in names if name.isdecimal()), default=0)


def _term_file(home: Home, term: int) -> Path:
    return home.controller / "terms" / f"{term}.json"


def _create_term(home: Home, term: int, claim: Claim) -> bool:
    who = {name: value for name, value in claim.items() if name in _PROCESS}
    return durable.create_file(_term_file(home, term), _record(who | {"time": time.time()}))


def holder_of(home: Home, term: int) -> Claim | None:
    """Return the process that claimed a term, as `platform_process.is_gone` takes it.

    None if it gave the term back, or if nobody has claimed one yet.
    """
    path = _term_file(home, term)
    if not term or path.with_suffix(".ended").exists():
        return None
    try:
        return dict(checksums.read_json(path))
    except OSError:  # it may live, on any host
        return {"host": "", "pid": 0}


def _record(content: Claim) -> bytes:
    return checksums.with_crc(json.dumps(content | {checksums.FORMAT: CLAIM_FORMAT}).encode())


def standby_notes(home: Home) -> list[Claim]:
    """Return what the files of standbys say, also of those that were killed."""
    notes = []
    for path in sorted((home.controller / "standbys").glob("standby_*.json")):
        with suppress(OSError):
            notes.append(checksums.read_json(path))
    return notes


def is_followed(home: Home, pid: int) -> bool:
    """Tell whether another process than `pid` of this host controls the platform."""
    try:
        claim = checksums.read_json(home.platform)
    except OSError:
        return False
    return "beat" in claim and (claim["host"], claim["pid"]) != (socket.gethostname(), pid)


def end_process(message: str) -> None:
    """Say why, and end this process as `kill -9` does: nothing is tidied up that others have."""
    print(message, file=sys.stderr, flush=True)
    os._exit(os.EX_UNAVAILABLE)


class ControllerLease:
    """The lease of the process that controls a platform. Make it with `take`.

    `claim`: the content of platform.json. `lost` is called with a message when another process has
    a higher term; it ends the process.
    """

    def __init__(self, home: Home, claim: Claim, begun: float, lost: Callable[[str], None]) -> None:
        """`begun`: the clock before the term was claimed."""
        self.claim = claim
        self._home, self._lost = home, lost
        self._renewed = begun
        self._lock = threading.RLock()
        self._stopped = threading.Event()
        self._thread: threading.Thread | None = None
        self._given_back = False
        self._seen: dict[str, tuple[Claim, float]] = {}  # standbys, and when each last changed

    @classmethod
    def take(
        cls, home: Home, claim: Claim, seen: int, lost: Callable[[str], None] = end_process
    ) -> "ControllerLease | None":
        """Claim the term after `seen`, the highest one known. Return None if it is taken.

        claim: of platform.json, with `host`, `pid` and `lease` (seconds). The first heartbeat is
        left to `start`. Raises OSError.
        """
        begun = clock()
        if not _create_term(home, seen + 1, claim):
            return None
        return cls(home, claim | {"term": seen + 1, "beat": 0}, begun, lost)

    @property
    def term(self) -> int:
        """The fencing number."""
        return int(self.claim["term"])

    @property
    def token(self) -> str:
        """The platform's own key."""
        return str(self.claim["token"])

    def start(self, **claim: Any) -> None:
        """Write the first heartbeat, with more of the claim, and all others in a thread.

        Raises OSError.
        """
        self.claim |= claim
        self.renew()
        self._thread = threading.Thread(target=self._keep, name="lease", daemon=True)
        self._thread.start()

    def _keep(self) -> None:
        whole = False
        try:
            self._beat_on()
            whole = True
        finally:
            if not whole:  # an error that was not foreseen
                log.error("the heartbeat ended", exc_info=True)
                self._lost(f"{self._home.platform} is renewed no more: this process ends")

    def _beat_on(self) -> None:
        silent = False
        while not self._stopped.wait(self.claim["lease"] / BEATS):
            try:
                self.renew()
                self._look_at_standbys()
                silent = False
            except Superseded:
                return
            except OSError as error:
                if not silent:
                    log.warning("the heartbeat in %s failed: %s", self._home.platform, error)
                silent = True

    def renew(self) -> None:
        """Write a heartbeat. Raises OSError; Superseded if another process has a higher term."""
        with self._lock:
            if self._stopped.is_set():
                return
            begun = clock()
            self._refuse_if_superseded()
            if self._lapsed(begun):
                if not _create_term(self._home, self.term + 1, self.claim):
                    self._lose(self.term + 1)
                log.warning("the lease had lapsed, and nobody else took over: term %d", self.term)
                self.claim["term"] += 1
            self.claim["beat"] += 1
            durable.replace_file(self._home.platform, _record(self.claim), 0o600)
            self._renewed = begun

    def _lapsed(self, now: float) -> bool:
        return bool(now - self._renewed > self.claim["lease"] * 2 / 3)

    def check(self, seen: int = 0) -> int:
        """Return the term, for a decision that is written next.

        seen: the highest term in the records that the decision rests on. Raises Superseded if there
        is a higher term than this one's; `lost` has ended the process by then. Raises StoreError if
        the root takes no heartbeat.
        """
        with self._lock:
            try:
                self._refuse_if_superseded(seen)
                if not self._given_back and self._lapsed(clock()):
                    self.renew()
                if self._given_back or not self._lapsed(clock()):
                    return self.term
                cause = None
            except OSError as error:
                cause = error
            raise StoreError(
                f"{self._home.platform} took no heartbeat for {clock() - self._renewed:.0f} s: "
                "nothing is decided until it does"
            ) from cause

    def _refuse_if_superseded(self, seen: int = 0) -> None:
        # the next heartbeat writes it anew; a newer version's has a higher term, too
        with suppress(FileNotFoundError, Corrupt, NewerFormat):
            claim = checksums.read_json(self._home.platform)
            seen = max(seen, claim.get("term", 0))
        if seen <= self.term and _term_file(self._home, self.term + 1).exists():
            seen = self.term + 1
        if seen > self.term:
            self._lose(seen)

    def _lose(self, term: int) -> None:
        message = (
            f"this process (pid {os.getpid()}) controlled {self._home.root} with term {self.term}; "
            f"another one has term {term}: it ends"
        )
        self._stopped.set()
        self._lost(message)
        raise Superseded(message)

    def standbys(self) -> list[Claim]:
        """Return who waits to take over: `host`, `pid` and `since` (unix seconds) of each."""
        now, lease = clock(), self.claim["lease"]
        return [
            {name: note[name] for name in ("host", "pid", "since")}
            for note, changed in list(self._seen.values())
            if now - changed <= lease
        ]

    def _look_at_standbys(self) -> None:
        """Note which standbys have a new heartbeat; remove the files of those long silent."""
        now, folder = clock(), self._home.controller / "standbys"
        with self._lock:
            paths = sorted(folder.glob("*.json")) if folder.is_dir() else []
            for gone in set(self._seen) - {path.name for path in paths}:
                del self._seen[gone]
            for path in paths:
                # a note of another form is no standby's
                with suppress(OSError, LookupError, TypeError):
                    note = checksums.read_json(path)
                    note = {name: note[name] for name in ("host", "pid", "since", "beat")}
                    old, changed = self._seen.get(path.name, (None, now))
                    if old is None or old["beat"] != note["beat"]:
                        self._seen[path.name] = note, now
                    elif now - changed > FORGOTTEN * self.claim["lease"]:
                        path.unlink()

    def describe(self) -> Claim:
        """Return who controls: `host`, `pid`, `term`, `since` (unix seconds), `standbys`."""
        return {
            "host": self.claim["host"],
            "pid": self.claim["pid"],
            "term": self.term,
            "since": self.claim["started"],
            "lease_seconds": self.claim["lease"],
            "standbys": self.standbys(),
        }

    @property
    def hands_over(self) -> bool:
        """True if a standby waits, and `down` did not end this term for good."""
        self._look_at_standbys()
        return not was_ended_for_good(self._home, self.term) and bool(self.standbys())

    def give_back(self, *, hand_over: bool) -> None:
        """Renew it no more. With `hand_over`, a standby takes over at once; else standbys end.

        Until another process has the next term, `check` goes on to allow what an end needs. Safe to
        call again, which changes nothing.
        """
        with self._lock:
            if self._stopped.is_set():
                return
            self._stopped.set()
            self._given_back = True
            with suppress(OSError):
                ended = _term_file(self._home, self.term).with_suffix(".ended")
                durable.create_file(ended, _record({"time": time.time()}))
                if checksums.read_json(self._home.platform)["term"] != self.term:
                    return
                if hand_over:
                    released = self.claim | {"released": True, "beat": self.claim["beat"] + 1}
                    durable.replace_file(self._home.platform, _record(released), 0o600)
                else:
                    self._home.platform.unlink()


def end_for_good(home: Home, term: int) -> None:
    """Note that no standby shall follow a term. Raises OSError."""
    durable.replace_file(home.controller / "down.json", _record({"term": term}))


def was_ended_for_good(home: Home, term: int) -> bool:
    """Tell whether `down` ended the platform of this term."""
    try:
        return bool(checksums.read_json(home.controller / "down.json")["term"] == term)
    except OSError:
        return False


class ClaimWatch:
    """A view of a platform's claim from another process, and for how long the claim stands still.

    `claim`: the newest one seen; None before the first. `term`: the highest one known; its process
    may not have written a claim yet. `silent`: seconds without a change. `missing`: there is no
    file. The time in which the watching process was itself stopped does not count: the gap between
    two looks counts as two of the usual ones at most.
    """

    def __init__(self, home: Home, lease: float) -> None:
        self.claim: Claim | None = None
        self.term = newest_term(home)
        self.silent, self.missing = 0.0, False
        self._home, self._lease = home, lease
        self._known = 0  # terms below are another holder's: a heartbeat of one is no sign of life
        self._mark: tuple[int, int] | None = None
        self._looked = clock()

    @property
    def lease(self) -> float:
        """The seconds that the holder's lease lasts, by its own word."""
        return float(self.claim.get("lease", self._lease)) if self.claim else self._lease

    @property
    def seconds(self) -> float:
        """The time between two looks."""
        return self.lease / LOOKS

    @property
    def lapsed(self) -> bool:
        """True if the next term may be claimed: the holder has said so, or was silent too long."""
        released = self.is_newest and (self.claim or {}).get("released", False)
        return bool(released) or self.silent > self.lease

    @property
    def is_newest(self) -> bool:
        """True if the claim is there, and nobody has claimed a later term."""
        return (
            self.claim is not None and not self.missing and self.claim.get("term", 0) >= self.term
        )

    def look(self) -> None:
        """Look once. Raises OSError if the root cannot be read."""
        now = clock()
        claim: Claim | None = None
        try:
            claim = checksums.read_json(self._home.platform)
            self.missing = False
        except FileNotFoundError:
            self.missing = True
        except Corrupt:  # its holder writes it anew
            self.missing = False
        mark = (claim.get("term", 0), claim.get("beat", 0)) if claim else self._mark
        if claim is None or mark == self._mark or claim.get("term", 0) < self._known:
            self.silent += min(now - self._looked, 2 * self.seconds)
            self._looked = now
            return
        self.claim, self._mark, self._known = claim, mark, claim.get("term", 0)
        self.term = max(self.term, self._known)
        self.silent, self._looked = 0.0, clock()

    def note_claimed(self) -> None:
        """Note that another process has just claimed the next term, and may not beat yet."""
        self.term += 1
        self._known = self.term
        self.silent, self._looked = 0.0, clock()


class StandbyNote:
    """The file of a standby, with its heartbeat. Close it when it waits no more."""

    def __init__(self, home: Home, host: str) -> None:
        self._path = home.controller / "standbys" / f"{new_id('standby')}.json"
        self._note: Claim = {"host": host, "pid": os.getpid(), "since": time.time(), "beat": 0}
        self._next = 0.0

    def beat(self, seconds: float) -> None:
        """Write a heartbeat if the last one is `seconds` old. Raises OSError."""
        if clock() >= self._next:
            self._next = clock() + seconds
            self._note["beat"] += 1
            durable.replace_file(self._path, _record(self._note))

    def close(self) -> None:
        """Remove the file."""
        self._path.unlink(missing_ok=True)
