"""The launcher's eye on its ranks: which ended, how, and which no longer respond.

Each rank holds the write end of a pipe. Through it come a line break now and then (its interpreter
runs), perhaps a refusal as JSON (no restart would mend it), and at last the pipe's end, with the
process's. A rank that is stopped, or hangs outside Python, falls silent and is named; the others
only wait for it. One that hangs inside Python is left to the collectives' own time limit. With
several nodes the first bad end is written down in the job's folder, so that every node tells of the
cause and not of what it led to. Called by launch.py.
"""

import json
import os
import select
import threading
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.trainers.job.journal import tail

SILENCE = 300.0  # seconds; less than collectives wait, which would blame those that only wait
SILENCE_VARIABLE = "RANK_SILENCE_SECONDS"
LOOKS = 5  # in a row that find a rank silent; our own process may have been stopped as well
PATIENCE = 3.0  # seconds in which another node can tell of an earlier end
GOOD_ENDS = (0, 75)


@dataclass
class RankProcess:
    """A forked rank, seen from its launcher."""

    rank: int
    pid: int
    pipe: int
    said: bytes = b""
    heard: bool = True  # since the last look
    misses: int = 0
    code: int | None = None  # negative: the signal that ended it

    @property
    def refusal(self) -> str | None:
        """Why it would not do the job, if it said so."""
        return str(json.loads(self.said)) if self.said and self.code is not None else None

    def listen(self) -> None:
        """Read what it has to say; at the pipe's end, take its exit code."""
        sent = os.read(self.pipe, 65536)
        self.heard = True
        self.said += sent.replace(b"\n", b"")
        if not sent:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class BadEnd(Record):
    """How the first rank ended badly. `followed`: it may be because another node's rank did."""

    rank: int
    where: str = ""
    how: str
    followed: bool = False
    refusal: str | None = None
    log_tail: str = ""

    def __str__(self) -> str:
        return f"rank {self.rank}{self.where} {self.how}; the others were ended"


# ---- in a rank
def pulse(pipe: int) -> None:
    """Let the launcher hear from this rank as long as its interpreter runs."""
    every = silence() / LOOKS / 2

    def beat() -> None:
        while True:
            os.write(pipe, b"\n")
            time.sleep(every)

    threading.Thread(target=beat, name="pulse", daemon=True).start()


def refuse(pipe: int, reason: str) -> None:
    """Tell the launcher why no restart would mend this. Pulses in between do no harm."""
    os.write(pipe, json.dumps(reason).encode())


def silence() -> float:
    """After how many seconds a rank counts as gone."""
    return float(os.environ.get(SILENCE_VARIABLE, SILENCE))


# ---- in the launcher
def watch(ranks: Sequence[RankProcess]) -> tuple[RankProcess, str] | None:
    """Wait until all ranks have ended well (None), or for the first that has not, and how."""
    poller = select.poll()
    by_pipe = {process.pipe: process for process in ranks}
    for pipe in by_pipe:
        poller.register(pipe, select.POLLIN)
    interval = silence() / LOOKS
    look = time.monotonic() + interval
    while any(process.code is None for process in ranks):
        for pipe, _ in poller.poll(1000 * max(0.0, look - time.monotonic())):
            by_pipe[pipe].listen()
            if by_pipe[pipe].code is not None:
                poller.unregister(pipe)
        if (bad := _worst(ranks)) is not None:
            return bad
        if time.monotonic() >= look:
            look = time.monotonic() + interval
            for process in ranks:
                process.misses = 0 if process.heard or process.code == 0 else process.misses + 1
                process.heard = False
    return None


def _worst(ranks: Sequence[RankProcess]) -> tuple[RankProcess, str] | None:
    """Of those that ended badly the likeliest cause: a refusal, a signal, an error; or silence."""
    bad = [p for p in ranks if p.code is not None and p.code not in GOOD_ENDS]
    if bad:
        first = min(bad, key=lambda p: (p.refusal is None, p.code is None or p.code >= 0))
        code = first.code or 0
        return first, f"died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
    for process in ranks:
        if process.misses >= LOOKS and process.code is None:
            return process, f"no longer responds, for {silence():g} s ({_state(process.pid)})"
    return None


def _state(pid: int) -> str:
    """What the kernel says a process does."""
    line = Path(f"/proc/{pid}/stat").read_text()
    letter = line[line.rfind(")") + 2]
    known = {"T": "it is stopped", "D": "it waits for a disk or a device"}
    return known.get(letter, f"its state is {letter}")


def first_end(note: Path | None, ours: BadEnd) -> BadEnd:
    """The end that came first on any node, as the file `note` tells; ours if we are alone.

    A rank that lost its connection to a dead one ends too: its node waits for word of the cause.
    """
    if note is None:
        return ours
    deadline = time.monotonic() + PATIENCE
    while ours.followed and not note.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if durable.create_file(note, checksums.with_crc(ours.model_dump_json().encode())):
        return ours
    return checksums.read_record(BadEnd, note)


def describe(process: RankProcess, how: str, where: str, log: Path) -> BadEnd:
    """A bad end with all that helps to understand it."""
    return BadEnd(
        rank=process.rank,
        where=where,
        how=how,
        followed=process.refusal is None and process.code is not None and process.code > 0,
        refusal=process.refusal,
        log_tail=tail(log),
    )
