"""Root claim: one platform per shared root, which it controls by a lease.

`up` claims the root before it starts anything, and `up --standby` when its turn has come. Both give
it back when they end (compose.py). Commands read the claim, with URL, host and key, on this host
and others: platform_process.py. Read next: runtime/controller_lease.py, which says why there are
never two.
"""

import os
import secrets
import signal
import socket
import sys
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NoReturn

from cray_agents.config import Config
from cray_agents.errors import SetupError
from cray_agents.paths import Home
from cray_agents.processes import Process
from cray_agents.runtime.controller_lease import (
    BEATS,
    LEASE,
    ClaimWatch,
    ControllerLease,
    StandbyNote,
    holder_of,
    was_ended_for_good,
)
from cray_agents.runtime.fine_tuning.job_records import TuningFolder
from cray_agents.runtime.gateway.http.api_keys import PLATFORM_PREFIX
from cray_agents.server.gateway_ports import Ports, address, address_elsewhere, open_ports
from cray_agents.server.platform_process import is_gone, is_visible, owner, refuse_second, submitter
from cray_agents.trainers.job.job_state import unfinished_jobs

KILLED_SECONDS = 5.0  # that a silent predecessor may take to be gone
PORT_SECONDS = 2.0  # for which its threads may keep its port after that
SAY_AGAIN = 600.0  # seconds between two lines of a standby that waits


@dataclass(frozen=True)
class ControlledRoot:
    """State of a root that this process controls: its gateway's sockets, and its lease.

    `before`: the claim of the platform that a standby took over.
    """

    ports: Ports
    lease: ControllerLease
    before: dict[str, Any] | None = None


def start_anew(config: Config, name: str, replicas: str) -> ControlledRoot:
    """Listen, and claim the root. Raises SetupError if the root has a platform."""
    ports = open_ports(config)
    try:
        lease = claim(config.root, ports, name, replicas, config.lease_seconds)
    except BaseException:
        ports.close()
        raise
    return ControlledRoot(ports, lease)


def claim(
    home: Home, ports: Ports, name: str, replicas: str = "1", seconds: float = LEASE
) -> ControllerLease:
    """Claim the root for a platform that is started. Raises SetupError if the root has a platform.

    A platform of another host that gave nothing back is followed once its heartbeat has stood still
    for the time of its lease. The claim has the platform's own key. Only its user can read the
    file, so the commands of this user need no other key.
    """
    if (pid := submitter(home)) is not None:
        raise SetupError(
            f"`jobs submit` (pid {pid}) trains on {home.root}: wait for its end, or choose another"
            " root with --home"
        )
    watch = ClaimWatch(home, seconds)
    watch.look()
    if not _is_free(home, watch):
        old = watch.claim
        lives = old is not None and is_visible(old) and not is_gone(old)
        if old is not None and (lives or "beat" not in old):
            refuse_second(home, owner(home) or old)
        _wait_for_silence(home, watch)
    lease = ControllerLease.take(home, _who(name, replicas, seconds), watch.term)
    if lease is None:
        raise SetupError(f"another platform was just started on {home.root}: use it")
    _start(lease, ports)
    return lease


def _is_free(home: Home, watch: ClaimWatch) -> bool:
    """Tell whether nobody controls the root: it was given back, or who had it ended or is silent.

    A platform of an older version renews nothing, so its silence says nothing.
    """
    if watch.claim is not None and "beat" not in watch.claim and not watch.missing:
        return is_gone(watch.claim)
    if watch.lapsed:
        return True
    holder = watch.claim if watch.is_newest else holder_of(home, watch.term)
    return is_gone(holder) if holder is not None else watch.missing


def _wait_for_silence(home: Home, watch: ClaimWatch) -> None:
    """Return when a claim has stood still for its lease. Raises SetupError at a sign of life."""
    first = watch.claim
    whose = f"of host {first['host']}" if first else "that cannot be read"
    say(f"{home.platform} has a claim {whose}: a sign of life is waited for, {watch.lease:g} s")
    while not _is_free(home, watch):
        time.sleep(watch.seconds)
        watch.look()
        if watch.claim is not first and watch.claim is not None and not watch.lapsed:
            refuse_second(home, watch.claim | {"pid": None})


def _who(name: str, replicas: str, seconds: float) -> dict[str, Any]:
    this = Process.of()
    return {
        "host": this.host,
        "boot": this.boot,
        "pid_namespace": this.space,
        "pid": this.pid,
        "ticks": this.start,
        "name": name,
        "replicas": replicas,
        "started": time.time(),
        "lease": seconds,
    }


def _start(lease: ControllerLease, ports: Ports) -> None:
    """Begin to control, with a new key: who has the port of a dead process may know that one's."""
    lease.start(
        url=address(ports.listener),
        elsewhere=address_elsewhere(ports.listener),
        control=address(ports.control) if ports.control else None,
        token=f"{PLATFORM_PREFIX}{secrets.token_urlsafe(32)}",
    )


def stand_by(config: Config, name: str, replicas: str) -> ControlledRoot | None:
    """Wait until this process controls the root. Return None when `down` ended the platform.

    It does so at once if nobody does, or if who did has ended on this host or said so; else when
    the heartbeat has stood still for the time of the lease. It then keeps name and replicas of the
    platform that it follows, and the port where that is free.
    """
    home = config.root
    watch, note = ClaimWatch(home, config.lease_seconds), StandbyNote(home, socket.gethostname())
    previous = signal.signal(signal.SIGTERM, _exit_cleanly)
    said_of, next_line, led = 0, 0.0, False
    try:
        while True:
            with suppress(OSError):  # the root is away: so it is for the others
                note.beat(watch.lease / BEATS)
                watch.look()
                free = _is_free(home, watch)
                led = led or (watch.claim is not None and not free)
                if led and free and (watch.missing or was_ended_for_good(home, watch.term)):
                    say("the platform was ended: this standby ends, too")
                    return None
                if free and submitter(home) is None:
                    who = {"name": name, "replicas": replicas} | (watch.claim or {})
                    mine = _who(who["name"], who["replicas"], config.lease_seconds)
                    lease = ControllerLease.take(home, mine, watch.term)
                    if lease is not None:
                        return _follow(config, lease, watch.claim)
                    watch.note_claimed()
            if watch.claim is not None and (watch.term != said_of or time.monotonic() > next_line):
                said_of, next_line = watch.term, time.monotonic() + SAY_AGAIN
                say(_waits_for(watch.claim))
            time.sleep(watch.seconds)
    finally:
        note.close()
        signal.signal(signal.SIGTERM, previous)


def _follow(
    config: Config, lease: ControllerLease, before: dict[str, Any] | None
) -> ControlledRoot:
    """Listen, as the controller that follows another one.

    A process of this host that lives and is silent would keep port, GPUs and a private Slurm. Its
    term is over, so it is ended.
    """
    if before is not None and is_visible(before) and not is_gone(before) and "ticks" in before:
        with suppress(ProcessLookupError):
            os.kill(before["pid"], signal.SIGKILL)
        deadline = time.monotonic() + KILLED_SECONDS
        while not is_gone(before) and time.monotonic() < deadline:
            time.sleep(0.02)
    try:
        ports = _listen_after(config, PORT_SECONDS if before is not None else 0.0)
    except SetupError as error:
        if before is None:
            lease.give_back(hand_over=False)
            raise
        say(f"{error}; a free port is taken meanwhile")
        ports = open_ports(config.model_copy(update={"port": 0}))
    try:
        _start(lease, ports)
    except OSError:
        ports.close()
        raise
    return ControlledRoot(ports, lease, before)


def _listen_after(config: Config, seconds: float) -> Ports:
    """Listen; a process that was killed may keep its port for a moment. Raises SetupError."""
    deadline = time.monotonic() + seconds
    while True:
        try:
            return open_ports(config)
        except SetupError:
            if time.monotonic() > deadline:
                raise
        time.sleep(0.05)


def describe_inheritance(home: Home, control: ControlledRoot) -> str:
    """Say what a controller takes over from the one before."""
    assert control.before is not None
    jobs, tuning = len(unfinished_jobs(home, set())), len(TuningFolder(home).unfinished_ids())
    return (
        f"took over from {control.before['host']} (pid {control.before['pid']}), term"
        f" {control.lease.term}: replicas {control.lease.claim['replicas']}, {jobs} unfinished"
        f" jobs, {tuning} fine-tuning jobs, and the batches"
    )


def _exit_cleanly(signum: int, frame: object) -> NoReturn:
    sys.exit(128 + signum)


def _waits_for(claim: dict[str, Any]) -> str:
    return (
        f"standby: {claim['host']} (pid {claim['pid']}, {claim['url']}) controls the platform, term"
        f" {claim.get('term', 0)}"
    )


def say(text: str) -> None:
    """Print a line into the platform's log."""
    print(text, file=sys.stderr, flush=True)
