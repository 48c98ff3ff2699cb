"""Rank monitor: the launcher learns which ranks ended, how, and which no longer respond or move.

Each rank holds the write end of a pipe. Through it come regular signs: that its interpreter runs,
and whether it got on meanwhile (progress.py). Perhaps there comes a refusal as JSON
(no restart would mend it). The pipe ends with the process. A rank that is stopped falls silent. One
that hangs, in a collective or in its own code, sends signs and does not move; the others then only
wait for it. So the launcher looks which rank is the cause (hang_report.py), ends all, and leaves a
report for the trainer. With several nodes, a node whose ranks all wait asks whether others' move,
and the first bad end is written to the job's folder: every node reports the cause and not its
consequences. Called by launch.py.
"""

import json
import os
import select
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path

from cray_agents.records import Record
from cray_agents.runtime.disk import checksums, durable
from cray_agents.trainers.job.failures.gpu_errors import recent_xids
from cray_agents.trainers.job.failures.hang_report import culprit, report_hang, write_collectives
from cray_agents.trainers.job.journal import tail
from cray_agents.trainers.progress import CLOCK

SILENCE = 120.0  # seconds; less than the collectives' limit, which would blame the waiting ranks
SILENCE_VARIABLE = "RANK_SILENCE_SECONDS"
LOOKS = 5  # in a row without a sign; a single one may mean that our own process was stopped
SPARE_LOOKS = 2  # of the limit: the first begins in between, one more asks the other nodes
# times the limit before the first step: without progress, as a compiler works or the network has
# its first contact; and without a sign, as a library keeps the interpreter
SLOW_START, SILENT_START = 5, 2.5
XID_SECONDS = 300.0  # before a bad end, in which an error of a GPU may have caused it
PATIENCE = 3.0  # seconds in which another node can report an earlier end
GOOD_ENDS = (0, 75)
HANGS = "hangs"
LOST = "another node of the job was lost"
LOST_INTERVAL = 1.0  # seconds between two questions for lost nodes
#: Signs in the pipe: the interpreter runs; it has got on, too; and its first step is done.
ALIVE, MOVED, READY = b"\n", b"\x01", b"\x02"
END = "end.json"  # beside the logs' folder: how the newest start ended badly


@dataclass
class RankProcess:
    """A rank, seen from its launcher."""

    rank: int
    pid: int
    pipe: int
    output: bytes = b""
    heard: bool = True  # since the last look
    misses: int = 0
    moved: bool = False  # since the last look
    ready: bool = False
    code: int | None = None  # negative: the signal that ended it

    @property
    def refusal(self) -> str | None:
        """The rank's reason for not doing the job, if it ended with one."""
        return str(json.loads(self.output)) if self.output and self.code is not None else None

    def listen(self) -> None:
        """Read from the pipe; at its end, take the exit code."""
        sent = os.read(self.pipe, 65536)
        self.heard = True
        self.moved |= MOVED in sent or READY in sent
        self.ready |= READY in sent
        self.output += sent.translate(None, ALIVE + MOVED + READY)
        if not sent:
            self.code = os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])


class BadEnd(Record):
    """The first bad end of a rank; -1: of the launcher. `where`, `node`: its place, in words and
    as Slurm names it. `node_is_suspect`: the process itself was stopped. `followed`: an end on
    another node may have caused it.
    """

    rank: int
    node: str = ""
    node_is_suspect: bool = False
    where: str = ""
    how: str
    followed: bool = False
    refusal: str | None = None
    log_tail: str = ""

    def __str__(self) -> str:
        if self.rank < 0:
            return f"{self.how}{self.where}"
        return f"rank {self.rank}{self.where} {self.how}; the others were ended"


def node_name() -> str:
    """Return this node's name as Slurm knows it."""
    return os.environ.get("SLURMD_NODENAME") or os.uname().nodename


# ---- in a rank
def pulse(pipe: int, log: Path) -> None:
    """Send the launcher a sign at intervals, as long as this rank's interpreter runs.

    A rank that does not move writes its last collectives beside its log, before the launcher asks.
    """
    every = look_interval() / 2
    CLOCK.moved()  # what was before the fork does not count

    def beat() -> None:
        still = 0
        while True:
            moved = CLOCK.moved()
            still = 0 if moved else still + 1
            if still == 2 * (LOOKS - 1):
                with suppress(OSError):  # on a full disk the signs go on
                    write_collectives(log)
                CLOCK.moved()  # to write them was no progress
            os.write(pipe, (READY if CLOCK.ready else MOVED) if moved else ALIVE)
            time.sleep(every)

    threading.Thread(target=beat, name="pulse", daemon=True).start()


def refuse(pipe: int, reason: str) -> None:
    """Send the launcher the reason why no restart would help. Pulses in between do no harm."""
    os.write(pipe, json.dumps(reason).encode())


def silence_limit() -> float:
    """Return the seconds without a sign, or without progress, after which ranks are ended."""
    return float(os.environ.get(SILENCE_VARIABLE, SILENCE))


def look_interval() -> float:
    """Return the seconds between two looks: a hang is found within the limit."""
    return silence_limit() / (LOOKS + SPARE_LOOKS)


# ---- in the launcher
class NodeClocks:
    """The movement of the ranks of all nodes, by a file a node in the job's folder.

    A node writes its file while its ranks move, and reads the others' only when they do not.
    """

    def __init__(self, logs: Path, start: str, node: int, nodes: int) -> None:
        self._files = [logs / f"clock-{start}-{one}" for one in range(nodes)] if nodes > 1 else []
        self._node, self._count = node, 0
        self._seen: dict[Path, str | None] = {}

    def write(self) -> None:
        """Say that a rank of this node has moved."""
        if self._files:
            self._count += 1
            mine = self._files[self._node]
            draft = mine.with_name(f"{mine.name}.draft")
            with suppress(OSError):  # the shared root may be away for a moment
                draft.write_text(str(self._count))
                draft.replace(mine)

    def others_move(self) -> bool:
        """Return True if another node's file has changed since the last call."""
        changed = False
        for number, path in enumerate(self._files):
            if number != self._node:
                text = self._seen.get(path)
                with suppress(OSError):
                    text = path.read_text() if path.exists() else ""
                changed |= self._seen.get(path) != text
                self._seen[path] = text
        return changed


def watch(
    ranks: Sequence[RankProcess],
    clocks: NodeClocks | None = None,
    lost: Callable[[], bool] | None = None,
) -> tuple[RankProcess, str] | None:
    """Wait until all ranks have ended well (None), or return the first that has not, and why.

    The word HANGS says that a rank was silent, or that none moved: `find_culprit` finds out why.
    LOST: they run, and `lost` says that another node does not.
    """
    poller = select.poll()
    by_pipe = {process.pipe: process for process in ranks}
    for pipe in by_pipe:
        poller.register(pipe, select.POLLIN)
    interval, still = look_interval(), 0
    look = time.monotonic() + interval
    ask = float("inf") if lost is None else 0.0
    while any(process.code is None for process in ranks):
        for pipe, _ in poller.poll(1000 * max(0.0, min(look, ask) - time.monotonic())):
            by_pipe[pipe].listen()
            if by_pipe[pipe].code is not None:
                poller.unregister(pipe)
        if (bad := _worst(ranks)) is not None:
            return bad
        if lost is not None and time.monotonic() >= ask:
            ask = time.monotonic() + LOST_INTERVAL
            living = [process for process in ranks if process.code is None]
            if living and lost():
                return living[0], LOST
        if time.monotonic() >= look:
            look = time.monotonic() + interval
            for process in ranks:
                process.misses = 0 if process.heard or process.code == 0 else process.misses + 1
            moved = any(process.moved for process in ranks)
            if clocks is not None and moved:
                clocks.write()
            still = 0 if moved or (clocks is not None and clocks.others_move()) else still + 1
            for process in ranks:
                process.heard = process.moved = False
            if still >= LOOKS * start_patience(ranks, SLOW_START):
                return next(process for process in ranks if process.code is None), HANGS
    return None


def start_patience(ranks: Sequence[RankProcess], slow: float) -> float:
    """Return how many times the limit to wait: `slow` while one of the ranks has done no step."""
    return 1 if all(process.ready for process in ranks if process.code is None) else slow


def find_culprit(
    ranks: Sequence[RankProcess], logs: Mapping[int, Path], report: Path
) -> tuple[RankProcess, str, bool]:
    """Return the rank that keeps the others of this node waiting, and how, in words.

    The third value is True if it waits for ranks of other nodes, as all others here do.
    """
    living = {process.rank: process for process in ranks if process.code is None}
    states = {rank: _stopped(process.pid) for rank, process in living.items()}
    pids = {rank: process.pid for rank, process in living.items()}
    stacks = report_hang(states, pids, {rank: logs[rank] for rank in living}, report)
    first, words = culprit(stacks)
    print(f"rank {first.rank} hangs: {words}; all stacks are in {report}", flush=True)
    limit = f"for {silence_limit():g} s"
    if first.state:
        how = f"no longer responds, {limit} ({first.state})"
    else:
        how = f"has not moved {limit}: {words}"
    return living[first.rank], how, first.waits


def _worst(ranks: Sequence[RankProcess]) -> tuple[RankProcess, str] | None:
    """Return the likeliest cause of a bad end: a refusal, a signal, an error, then silence."""
    bad = [p for p in ranks if p.code is not None and p.code not in GOOD_ENDS]
    if bad:
        first = min(bad, key=lambda p: (p.refusal is None, p.code is None or p.code >= 0))
        code = first.code or 0
        return first, f"died ({f'signal {-code}' if code < 0 else f'exit code {code}'})"
    for process in ranks:
        patience = start_patience([process], SILENT_START)
        if process.misses >= LOOKS * patience and process.code is None:
            return process, HANGS
    return None


def _stopped(pid: int) -> str:
    """Return in words why a process does not run, as the kernel reports it; "" if it could."""
    line = Path(f"/proc/{pid}/stat").read_text()
    letter = line[line.rfind(")") + 2]
    names = {"T": "it is stopped", "D": "it waits for a disk or a device"}
    return names.get(letter, "")


def first_end(note: Path | None, ours: BadEnd, patience: float = PATIENCE) -> BadEnd:
    """Return the first bad end on any node, shared through the file `note`; ours if it is None.

    A rank that lost its connection to a dead one ends too. Its node waits a moment for the cause,
    whose report takes the place of a consequence's where it comes later still.
    """
    if note is None:
        return ours
    deadline = time.monotonic() + patience
    while ours.followed and not note.exists() and time.monotonic() < deadline:
        time.sleep(0.05)
    content = checksums.record_text(ours)
    if durable.create_file(note, content):
        return ours
    first = checksums.read_record(BadEnd, note)
    if ours.followed or not first.followed:
        return first
    durable.replace_file(note, content)
    return ours


def describe(
    process: RankProcess, how: str, node_phrase: str, log: Path, *, waits: bool = False
) -> BadEnd:
    """Build the report of a bad end, with the tail of the rank's log. `waits`: for other nodes.

    Errors of GPUs are in the kernel's log, and follow that tail.
    """
    xids = [str(xid) for xid in recent_xids(XID_SECONDS) if xid.blames(process.pid)]
    died = process.refusal is None and process.code is not None and process.code > 0
    return BadEnd(
        rank=process.rank,
        node=node_name(),
        node_is_suspect=process.code is None and "it is stopped" in how,
        where=node_phrase,
        how=how,
        followed=waits or died,
        refusal=process.refusal,
        log_tail="\n".join([tail(log), *xids]),
    )


# ---- for the trainer
def note_end(folder: Path, end: BadEnd) -> None:
    """Leave the report of a bad end in the folder of the job or session.

    One that another end may have caused replaces no report.
    """
    leave = durable.create_file if end.followed else durable.replace_file
    leave(folder / END, checksums.record_text(end))


def read_end(folder: Path) -> BadEnd | None:
    """Return the report of the newest start's bad end; None if it left none."""
    listed = END in durable.names_in(folder)  # another host wrote it
    return checksums.read_record(BadEnd, folder / END) if listed else None


def forget_end(folder: Path) -> None:
    """Remove the report before another start."""
    (folder / END).unlink(missing_ok=True)
