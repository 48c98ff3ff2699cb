"""Event stream of a training job: its new events and log lines, for `jobs logs`.

Only files of the shared root are read, so any host can follow a job, with or without a platform.
A restart replaces events.jsonl (JobJournal.rewind) and empties the logs of ranks. The readers
notice both.
"""

import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, BinaryIO

from cray_agents.runtime.disk import checksums
from cray_agents.trainers.job.journal import JobJournal

POLL = 0.3  # seconds between two reads


class GrowingFile:
    """A reader of new lines in a file that may grow, be replaced or be emptied."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._file: BinaryIO | None = None
        self._rest = b""  # the start of an unfinished line

    def read(self, *, last: bool = False) -> list[bytes]:
        """Return the whole lines since the last read; with `last`, an unfinished one too."""
        lines = self._read_new_lines()
        if self._file is not None and self._replaced(self._file):
            self._file.close()
            self._file = None
            lines += self._read_new_lines()
        if last and self._rest:
            lines.append(self._rest)
        return lines

    def _read_new_lines(self) -> list[bytes]:
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
        """Tell whether the path names another file now; an open file keeps its inode number."""
        try:
            return not os.path.samestat(os.fstat(file.fileno()), self._path.stat())
        except FileNotFoundError:
            return False


class NewEvents:
    """A reader of a job's events, each once, although a restart writes the old ones again."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, GrowingFile(path)
        self._seen: set[tuple[Any, ...]] = set()

    def read(self) -> list[dict[str, Any]]:
        """Return the events since the last read, in order."""
        new = []
        for line in self._file.read():
            event: dict[str, Any] = checksums.parse(line, self._path)
            key = (event["time"], event["event"], event.get("step"))
            if key not in self._seen:
                self._seen.add(key)
                new.append(event)
        return new


def stream_job(
    journal: JobJournal, log: Path, tail: int, *, events: bool = True, follow: bool = False
) -> Iterator[dict[str, Any] | str]:
    """Yield the last `tail` events of a job and lines of a log; with `follow`, all later ones.

    A dict is an event, a string is a log line. Following ends when the job has ended.
    """
    new_events, new_lines = NewEvents(journal.events_file), GrowingFile(log)
    first, ended = True, not follow
    while True:
        # a job records its end before its last events and log lines: read once more after it
        over, ended = ended, has_ended(journal)
        fresh = new_events.read() if events else []
        lines = [line.decode(errors="replace") for line in new_lines.read(last=over)]
        yield from fresh[-tail:] if first else fresh
        yield from lines[-tail:] if first else lines
        if over:
            return
        first = False
        time.sleep(POLL)


def has_ended(journal: JobJournal) -> bool:
    """Tell whether a job succeeded, failed or was cancelled."""
    return journal.cancelled or journal.status() is not None
