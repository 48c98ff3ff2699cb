"""GPU errors: the XIDs of NVIDIA's driver in the kernel's log, and whom each of them blames.

The driver writes a line for each error, such as `NVRM: Xid (PCI:0000:3b:00): 79, pid=..., GPU has
fallen off the bus.` What a number means is from NVIDIA's "Xid Errors" (GPU Deployment and
Management documentation) and its Xid catalog. Many sites let root alone read the kernel's log;
without it nothing is found. health_gate.py and rank_monitor.py ask here, failure.py takes the
tables. All of it was run on recorded texts alone.
"""

import errno
import os
import re
import subprocess
import time
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from pathlib import Path

KERNEL_LOG = Path("/dev/kmsg")
DRIVER = Path("/proc/driver/nvidia")
SMI_SECONDS = 30.0  # for nvidia-smi's answer
_RECORD = 8192  # bytes of one of the kernel's records, at most

#: XIDs after which a GPU is of no use until it is reset, or its node repaired.
LOST = {
    48: "double-bit ECC error",
    62: "the GPU's micro-controller halted",
    64: "a damaged row of its memory could not be remapped",
    74: "NVLink error",
    79: "the GPU has fallen off the bus",
    95: "uncontained ECC error",
    119: "the GPU's system processor (GSP) does not answer",
    120: "error of the GPU's system processor (GSP)",
    140: "unrecovered ECC error",
}
#: XIDs of a damage that may have ended a program, and with which the GPU works on.
DAMAGED = {
    63: "a damaged row of its memory is to be remapped",
    92: "many single-bit ECC errors",
    94: "contained ECC error",
}
#: XIDs of what a program itself did.
PROGRAM = {
    13: "a kernel of the program failed, as by an index out of range",
    31: "the program read or wrote memory that is not its own",
    43: "the program was stopped for an error of its own",
    69: "a kernel of the program failed",
}
#: 45 follows any other end of a program, also a kill, and says nothing by itself.
CONSEQUENCE = 45

_PLACE = r"(?: \([^)\n]*\):)?"
_NO_GPU = "|".join(str(number) for number in (*PROGRAM, CONSEQUENCE))
#: Of a text in which a GPU is blamed, also by a number that no table has, or the program.
GPU_SIGN = rf"\bXid\b(?!{_PLACE} (?:{_NO_GPU})\b)"
PROGRAM_SIGN = rf"\bXid{_PLACE} (?:{'|'.join(map(str, PROGRAM))})\b"
_BUS_ID = re.compile(r"[0-9A-Fa-f]*([0-9A-Fa-f]{4}:[0-9A-Fa-f]{2}:[0-9A-Fa-f]{2})\.[0-9A-Fa-f]")
_LINE = re.compile(r"NVRM: Xid \((?:PCI:)?([^)]*)\): (\d+),?(?: pid='?(\d+))?.*")


@dataclass(frozen=True)
class Xid:
    """An error of the driver: its number, the GPU's PCI address, a process, and its line."""

    number: int
    gpu: str
    pid: int | None
    line: str

    @property
    def lost(self) -> bool:
        """True if the GPU is of no use any more."""
        return self.number in LOST

    def blames(self, pid: int) -> bool:
        """Return True if it explains the end of a process of this node."""
        return self.lost or self.number in DAMAGED or (self.number in PROGRAM and self.pid == pid)

    def __str__(self) -> str:
        words = {**LOST, **DAMAGED, **PROGRAM}.get(self.number, "")
        return f"{self.line} [{words}]" if words else self.line


def recent_xids(seconds: float) -> list[Xid]:
    """Return the XIDs of the last seconds on this job's GPUs; none where no log can be read.

    Where the job's GPUs are not known, those of all of the node's count.
    """
    xids = find_xids(line for age, line in _recent_lines() if age <= seconds)
    ours = own_gpus() if DRIVER.exists() else frozenset[str]()
    return [xid for xid in xids if not ours or xid.gpu.lower() in ours]


@cache
def own_gpus() -> frozenset[str]:
    """Return the PCI addresses of this job's GPUs, as XIDs name them; none if unknown.

    Asked once, when the job begins: a GPU that is lost later is not listed any more.
    """
    argv = ["nvidia-smi", "--query-gpu=pci.bus_id", "--format=csv,noheader"]
    if devices := os.environ.get("CUDA_VISIBLE_DEVICES"):
        argv += ["-i", devices]
    try:
        done = subprocess.run(
            argv, capture_output=True, text=True, timeout=SMI_SECONDS, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return frozenset()
    rows = [_BUS_ID.fullmatch(row.strip()) for row in done.stdout.splitlines()]
    if done.returncode or not all(rows):
        return frozenset()
    return frozenset(row[1].lower() for row in rows if row)


def find_xids(lines: Iterator[str]) -> list[Xid]:
    """Return the XIDs in lines of a kernel's log."""
    matches = (_LINE.search(line) for line in lines)
    return [
        Xid(int(match[2]), match[1], int(match[3]) if match[3] else None, match[0].strip())
        for match in matches
        if match
    ]


def _recent_lines() -> Iterator[tuple[float, str]]:
    """Yield the lines of the kernel's log, with their ages in seconds."""
    if not DRIVER.exists():
        return
    try:
        records = _kernel_records()
    except OSError:
        return
    for record in records:
        head, _, line = record.partition(";")
        yield time.monotonic() - int(head.split(",")[2]) / 1e6, line.partition("\n")[0]


def _kernel_records() -> list[str]:
    """Return the kernel's records, each `level,number,microseconds,flags;text`. Raises OSError."""
    records: list[str] = []
    handle = os.open(KERNEL_LOG, os.O_RDONLY | os.O_NONBLOCK)
    try:
        while True:
            try:
                record = os.read(handle, _RECORD)
            except BlockingIOError:
                return records
            except OSError as error:
                if error.errno != errno.EPIPE:  # the oldest records were overwritten meanwhile
                    raise
                continue
            if not record:
                return records
            records.append(record.decode(errors="replace"))
    finally:
        os.close(handle)
