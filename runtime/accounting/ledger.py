"""Ledger: who held which node and GPUs when, for what, and what came of it.

    ledger/<writer>.jsonl   append-only lines with checksums; each file has one writer

A platform has a file for its replicas, each launcher of a training job or session one of its own.
Lines are facts with their time, so files may be read in any order, also while they are written:

    hold    from now on a holder has a node, in this state; a later line of the holder ends it
    leave   the holder has the node no more
    steps   the steps that an attempt of a job trained so far; the newest line counts
    busy    seconds in which a replica answered requests, since its last such line
    served  tokens that the platform recorded, since its last such line
    preempt a job or session was asked to leave its nodes for a replica, and why (`what`)

The ledger is an account, not a state: nothing is decided by it, and what cannot be written is
left out. Read next: holdings.py, which says what came of the time of each holder.
"""

import asyncio
import logging
import os
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, contextmanager, suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

from cray_agents.records import Record, new_id
from cray_agents.runtime.disk import journal
from cray_agents.runtime.disk.journal import Journal
from cray_agents.runtime.scheduler.nvml import EnergyMeter, Nvml, nvml

HolderKind = Literal["replica", "job", "session", "platform"]
EVERY = 2.0  # seconds between two looks at the replicas
BEAT = 60.0  # seconds after which the platform writes how busy they were

log = logging.getLogger(__name__)


class LedgerLine(Record):
    """A fact of the ledger; `time` in unix seconds.

    `what`: the version that a replica serves, the parent of a job, the name of a session's loop.
    `gpus`: as the node numbers them. `gpu_type`: as Slurm knows it, see `gpu_placement.gpu_type`.
    `cores`: that the holder has; 0 if nobody counted them. `within`, `within_attempt`: the session
    that trains a job. `first`, `last`: steps before an attempt, and after it so far. `seconds`: of
    those steps, or busy ones. `joules`: that the holder's GPUs took on this node since its last
    line with this field, as they measured it themselves, 0 where that begins; None: not measured.
    """

    time: float
    event: Literal["hold", "leave", "steps", "busy", "served", "preempt"]
    kind: HolderKind
    holder: str
    attempt: int = 0
    state: str = ""
    what: str = ""
    node: str = ""
    gpus: tuple[str, ...] = ()
    gpu_type: str = ""
    cores: int = 0
    within: str = ""
    within_attempt: int = 0
    first: int = 0
    last: int = 0
    seconds: float = 0.0
    tokens: int = 0
    joules: float | None = None


@dataclass(frozen=True)
class HeldDevices:
    """Devices of a node that a holder has, in the fields of LedgerLine."""

    gpus: tuple[str, ...] = ()
    gpu_type: str = ""
    cores: int = 0


class LedgerFile:
    """One writer's file of the ledger. The first line makes it."""

    def __init__(self, folder: Path, writer: str) -> None:
        """`writer`: the beginning of the file's name."""
        self._folder = folder
        self._journal = Journal(lambda: folder / f"{new_id(writer)}.jsonl")

    def note(self, **values: Any) -> None:
        """Write a line, with the present time."""
        self.write([LedgerLine(time=time.time(), **values)])

    def write(self, lines: Sequence[LedgerLine]) -> None:
        """Append lines. A failure is logged, and is no error."""
        values = (line.model_dump(mode="json", exclude_defaults=True) for line in lines)
        try:
            self._journal.append([journal.line_of(value) for value in values])
        except OSError as error:
            log.warning("the ledger %s lacks %d lines: %s", self._folder, len(lines), error)

    def close(self) -> None:
        """Close the file."""
        with suppress(OSError):
            self._journal.close()


@contextmanager
def holding(folder: Path, **holder: Any) -> Iterator[LedgerFile]:
    """Write that this node is held while the block runs; yield the file for other lines.

    `holder`: fields of LedgerLine; `kind` and `holder` at least.
    """
    ledger = LedgerFile(folder, str(holder["holder"]))
    place = {"node": os.environ.get("SLURMD_NODENAME") or os.uname().nodename, **holder}
    meter = EnergyMeter(holder.get("gpus", ()))
    with nvml() as driver:  # not for longer: the holder may fork
        joules = meter.begin(driver)
    ledger.note(event="hold", joules=joules, **place)
    try:
        yield ledger
    finally:
        with nvml() as driver:
            joules = meter.take(driver)
        ledger.note(event="leave", joules=joules, **place)
        ledger.close()


def read_ledger(folder: Path) -> Iterator[list[LedgerLine]]:
    """Yield the lines of each file. A damaged line is left out, with a warning."""
    for path in sorted(folder.glob("*.jsonl")):
        try:
            lines = list(journal.read(path, LedgerLine, damaged="skip"))
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
            continue
        if lines:
            yield lines


async def keep_ledger(
    ledger: LedgerFile,
    replicas: Callable[[], Sequence[dict[str, Any]]],
    sampled: Callable[[], int],
    devices: Sequence[HeldDevices] = (),
    *,
    every: float = EVERY,
    beat: float = BEAT,
) -> None:
    """Write what the replicas of a platform hold and do, until cancelled.

    Args:
        replicas: returns what `Pool.status` does.
        sampled: returns the tokens that all replicas sampled so far.
        devices: of each replica.
    """
    with ExitStack() as opened:
        driver = await asyncio.to_thread(opened.enter_context, nvml())
        account = _ReplicaAccount(devices, sampled(), driver)
        thread = opened.enter_context(ThreadPoolExecutor(1, "ledger"))  # so that the end comes last
        run = asyncio.get_running_loop().run_in_executor
        try:
            while True:
                begun = time.monotonic()
                while time.monotonic() - begun < beat:
                    if lines := account.changes(replicas()):
                        await run(thread, ledger.write, lines)
                    await asyncio.sleep(every)
                await run(thread, ledger.write, account.work(replicas(), sampled()))
        finally:
            thread.submit(ledger.write, [*account.work(replicas(), sampled()), *account.leave()])
            thread.submit(ledger.close).result()


class _ReplicaAccount:
    """State of a platform's replicas as it was written, and the lines that follow from news."""

    def __init__(
        self, devices: Sequence[HeldDevices], tokens: int, driver: Nvml | None = None
    ) -> None:
        self._devices, self._tokens, self._driver = devices, tokens, driver
        self._places: dict[int, dict[str, Any]] = {}  # fields of the line of each replica
        self._meters: dict[int, EnergyMeter] = {}  # of replicas on GPUs of this host
        self._spent: dict[int, float] = {}  # joules of each replica in a job, as written
        self._busy: dict[int, float] = {}

    def changes(self, replicas: Sequence[dict[str, Any]]) -> list[LedgerLine]:
        """Return the changes of states, versions and places since the last call."""
        lines, now = [], time.time()
        for number, status in enumerate(replicas):
            known = number < len(self._devices)
            place = {
                "kind": "replica",
                "holder": f"replica-{number}",
                "state": "asleep" if status.get("asleep") else status["state"],
                "what": status["version"] or "",
                "node": status["host"],
                **asdict(self._devices[number] if known else HeldDevices()),
            }
            before = self._places.get(number, place | {"node": ""})
            if before == place:
                continue
            self._places[number] = place
            if before["node"] not in ("", place["node"]):
                joules = self._joules(number)
                lines.append(LedgerLine(time=now, event="leave", joules=joules, **before))
                self._meters.pop(number, None)
                self._spent.pop(number, None)
            if place["node"]:  # one that waits for its place holds nothing
                joules = self._joules(number, status)
                if number not in self._meters and status.get("job") is None:
                    meter = self._meters[number] = EnergyMeter(place["gpus"])
                    joules = meter.begin(self._driver)
                lines.append(LedgerLine(time=now, event="hold", joules=joules, **place))
        return lines

    def _joules(self, number: int, status: dict[str, Any] | None = None) -> float | None:
        """Return the energy of a replica's GPUs since its last line; None: not measured.

        That of a job is in its `status`, whose first word only begins the count.
        """
        if status is not None and (total := status.get("joules")) is not None:
            before, self._spent[number] = self._spent.get(number, total), total
            return float(total - before if total >= before else total)
        meter = self._meters.get(number)
        return None if meter is None else meter.take(self._driver)

    def work(self, replicas: Sequence[dict[str, Any]], tokens: int) -> list[LedgerLine]:
        """Return how busy the replicas were since the last call, and what they sampled.

        One that was not busy has a line where its energy was measured: it belongs to this time.
        """
        lines, now = [], time.time()
        for number, status in enumerate(replicas):
            seconds = status["busy_seconds"] - self._busy.get(number, 0.0)
            self._busy[number] = status["busy_seconds"]
            joules = self._joules(number, status)
            if (place := self._places.get(number)) and (seconds or joules is not None):
                lines.append(
                    LedgerLine(time=now, event="busy", seconds=seconds, joules=joules, **place)
                )
        sampled, self._tokens = tokens - self._tokens, tokens
        served = LedgerLine(
            time=now, event="served", kind="platform", holder="platform", tokens=sampled
        )
        return [*lines, served]

    def leave(self) -> list[LedgerLine]:
        """Return that all places are left."""
        return [
            LedgerLine(time=time.time(), event="leave", joules=self._joules(number), **place)
            for number, place in self._places.items()
            if place["node"]
        ]
