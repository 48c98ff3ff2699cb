"""What a training job tells, as it tells it: its events, and its log's lines. For `jobs logs`.

Only files of the shared root are read, so that it works from any host, platform or not. A restart
replaces events.jsonl (Journal.rewind) and empties the logs of ranks: both are noticed.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from cray_agents.runtime.disk import checksums
from cray_agents.trainers.job.journal import JobJournal

POLL = 0.3  # seconds between two looks


class Growing:
    """The lines of a file that somebody appends to, and may replace or empty."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""  # a line whose end has not come

    def read(self, *, last: bool = False) -> list[bytes]:
        """The whole lines since the last look; the `last` takes one without an end, too."""
        lines = self._more()
        if self._file is not None and self._replaced(self._file):
            self._file.close()
            self._file = None
            lines += self._more()
        if last and self._rest:
            lines.append(self._rest)
        return lines

    def _more(self) -> list[bytes]:
        if self._file is None:
            if not self._path.exists():
                return []
            self._file, self._rest = self._path.open("rb"), b""
        if os.fstat(self._file.fileno()).st_size < self._file.tell():  # emptied
            self._file.seek(0)
            self._rest = b""
        *lines, self._rest = (self._rest + self._file.read()).split(b"\n")
        return lines

    def _replaced(self, file: BinaryIO) -> bool:
        """Whether the path means another file now. While ours is open its number stays taken."""
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False


class NewEvents:
    """A job's events, each once: a restart's file begins with those that were told before."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, Growing(path)
        self._told: set[tuple[Any, ...]] = set()

    def read(self) -> list[dict[str, Any]]:
        """Those since the last look, in order."""
        new = []
        for line in self._file.read():
            event: dict[str, Any] = checksums.parse(line, self._path)
            key = (event["time"], event["event"], event.get("step"))
            if key not in self._told:
                self._told.add(key)
                new.append(event)
        return new


def told(
    journal: JobJournal, log: Path, tail: int, *, events: bool = True, follow: bool = False
) -> Iterator[dict[str, Any] | str]:
    """The last `tail` events of a job and lines of a log; with `follow`, then what comes.

    A dict is an event, a text a line. Following ends when the job has ended.
    """
    new_events, new_lines = NewEvents(journal.events_file), Growing(log)
    first, ended = True, not follow
    while True:
        # the end is recorded before events and log tell of it: hence one more look after it
        over, ended = ended, has_ended(journal)
        found = new_events.read() if events else []
        lines = [line.decode(errors="replace") for line in new_lines.read(last=over)]
        yield from found[-tail:] if first else found
        yield from lines[-tail:] if first else lines
        if over:
            return
        first = False
        time.sleep(POLL)


def has_ended(journal: JobJournal) -> bool:
    """Whether a job succeeded, failed or was cancelled."""
    return journal.cancelled or journal.status() is not None
