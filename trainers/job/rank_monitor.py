"""Rank monitor: the launcher learns which ranks ended, how, and which no longer respond.

Each rank holds the write end of a pipe. Through it come regular line breaks (its interpreter runs),
perhaps a refusal as JSON (no restart would mend it), and the end of the pipe with the end of the
process. A rank that is stopped or hangs outside Python falls silent, and is reported as the cause:
the other ranks only wait for it. A rank that hangs inside Python runs into the collectives' time
limit. With several nodes, the first bad end is written to the job's folder, so that every node
reports the cause and not its consequences. Called by launch.py.
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

SILENCE = 300.0  # seconds; less than the collectives' limit, which would blame the waiting ranks
SILENCE_VARIABLE = "RANK_SILENCE_SECONDS"
LOOKS = 5  # silent looks in a row; a single one may mean that our own process was stopped
PATIENCE = 3.0  # seconds in which another node can report an earlier end
GOOD_ENDS = (0, 75)


@dataclass
class RankProcess:
    """A forked rank, seen from its launcher."""

    rank: int
    pid: int
    pipe: int
    output: bytes = b""
    heard: bool = True  # since the last look
    misses: int = 0
    code: int | None = None  # negative: the signal that ended it

    @property
    def refusal(self) -> str | None:
        """The rank's reason for not doing the job, if it ended with one."""
        return str(json.loads(self.output)) if self.output and self.code is not None else None

    def listen(self) -> None:
        """Read from the pipe; at its end, take the exit code."""
        sent = os.read(self.pipe, 65536)
        self.heard = True
        self.output += sent.replace(b"\n", b"")
        if not sent:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class BadEnd(Record):
    """The first bad end of a rank. `followed`: an end on another node may have caused it."""

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
    """Send the launcher a line break at intervals, as long as this rank's interpreter runs."""
    every = silence_limit() / LOOKS / 2

    def beat() -> None:
        while True:
            os.write(pipe, b"\n")
            time.sleep(every)

    threading.Thread(target=beat, name="pulse", daemon=True).start()


def refuse(pipe: int, reason: str) -> None:
    """Send the launcher the reason why no restart would help. Pulses in between do no harm."""
    os.write(pipe, json.dumps(reason).encode())


def silence_limit() -> float:
    """Return the seconds of silence_limit after which a rank counts as gone."""
    return float(os.environ.get(SILENCE_VARIABLE, SILENCE))


# ---- in the launcher
def watch(ranks: Sequence[RankProcess]) -> tuple[RankProcess, str] | None:
    """Wait until all ranks have ended well (None), or return the first that has not, and why."""
    poller = select.poll()
    by_pipe = {process.pipe: process for process in ranks}
    for pipe in by_pipe:
        poller.register(pipe, select.POLLIN)
    interval = silence_limit() / LOOKS
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
    """Return the likeliest cause of a bad end: a refusal, a signal, an error, then silence."""
    bad = [p for p in ranks if p.code is not None and p.code not in GOOD_ENDS]
    if bad:
        first = min(bad, key=lambda p: (p.refusal is None, p.code is None or p.code >= 0))
        code = first.code or 0
        return first, f"died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
    for process in ranks:
        if process.misses >= LOOKS and process.code is None:
            return process, f"no longer responds, for {silence_limit():g} s ({_state(process.pid)})"
    return None


def _state(pid: int) -> str:
    """Return a process's state in words, as the kernel reports it."""
    line = Path(f"/proc/{pid}/stat").read_text()
    letter = line[line.rfind(")") + 2]
    names = {"T": "it is stopped", "D": "it waits for a disk or a device"}
    return names.get(letter, f"its state is {letter}")


def first_end(note: Path | None, ours: BadEnd) -> BadEnd:
    """Return the first bad end on any node, shared through the file `note`; ours if it is None.

    A rank that lost its connection to a dead one ends too. Its node waits a moment for the cause.
    """
    if note is None:
        return ours
    deadline = time.monotonic() + PATIENCE
    while ours.followed and not note.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    if durable.create_file(note, checksums.with_crc(ours.model_dump_json().encode())):
        return ours
    return checksums.read_record(BadEnd, note)


def describe(process: RankProcess, how: str, node_phrase: str, log: Path) -> BadEnd:
    """Build the report of a bad end, with the tail of the rank's log."""
    return BadEnd(
        rank=process.rank,
        where=node_phrase,
        how=how,
        followed=process.refusal is None and process.code is not None and process.code > 0,
        refusal=process.refusal,
        log_tail=tail(log),
    )
