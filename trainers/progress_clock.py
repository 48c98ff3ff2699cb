"""Progress clock: a rank's own count of what it has got done, by which a hang is told from work.

The rank's loops tick it: a micro-batch begins, a tensor of a checkpoint is read (which maps files,
and no system call tells of that), or the rank asks whether it should stop. What else reads or
writes files, and on CPUs what computes, moves without ticks. One clock a process, as there is one
rank in it. job/failures/rank_monitor.py tells the launcher whether it moved.
"""

import sys
import time
from pathlib import Path

BYTES = 4096  # of reading and writing that are more than logs and this clock's own
BUSY = 0.3  # share of a core that counts as computing; ranks that wait for each other use none


class ProgressClock:
    """The clock of this process. `ready` from the first step on: before it much may take long."""

    def __init__(self) -> None:
        self.ticks = 0
        self.ready = False
        self._ticks, self._bytes, self._busy, self._time = 0, 0, 0.0, time.monotonic()

    def tick(self) -> None:
        """Count that the rank has got on."""
        self.ticks += 1

    def moved(self) -> bool:
        """Return True if the process has got on since the last call.

        A GPU's host thread turns while it waits, so computing counts on CPUs alone.
        """
        before = self._ticks, self._bytes, self._busy, self._time
        self._ticks, self._bytes = self.ticks, _bytes_of_files()
        self._busy, self._time = time.process_time(), time.monotonic()
        busy = self._busy - before[2] > BUSY * (self._time - before[3])
        files = self._bytes - before[1] > BYTES
        return self._ticks != before[0] or files or (busy and not _has_cuda())


#: The clock of the rank that is this process.
CLOCK = ProgressClock()


def _bytes_of_files() -> int:
    """Return the bytes that this process has read and written so far, by system calls."""
    try:
        lines = Path("/proc/self/io").read_text().splitlines()
    except OSError:  # a kernel without this file: ticks alone
        return 0
    rows = dict(line.split(": ") for line in lines)
    return int(rows["rchar"]) + int(rows["wchar"])


def _has_cuda() -> bool:
    cuda = getattr(sys.modules.get("torch"), "cuda", None)
    is_initialized = getattr(cuda, "is_initialized", None)  # None: it is being imported just now
    return is_initialized is not None and bool(is_initialized())
