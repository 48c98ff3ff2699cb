"""Event stream of a training job: its new events and log lines, for `jobs logs`.

Only files of the shared root are read, so any host can follow a job, with or without a platform.
A restart replaces events.jsonl (JobJournal.rewind) and empties the logs of ranks. The readers
notice both.
"""

import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from cray_agents.runtime.disk.journal import Tail, parse_line
from cray_agents.trainers.job.journal import JobJournal

POLL = 0.3  # seconds between two reads


class NewEvents:
    """A reader of a job's events, each once, although a restart writes the old ones again."""

    def __init__(self, path: Path) -> None:
        self._path, self._file = path, Tail(path)
        self._seen: set[tuple[Any, ...]] = set()

    def read(self) -> list[dict[str, Any]]:
        """Return the events since the last read, in order."""
        new = []
        for line in self._file.read():
            event: dict[str, Any] = parse_line(line, self._path)
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
    new_events, new_lines = NewEvents(journal.events_file), Tail(log)
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
