"""A job's folder: what was asked, who works on it, how far it came, how it ended.

    spec.json       the JobSpec, once
    attempts/<n>    created exclusively by the n-th start: the fence. Only the newest may publish
    cancelled       created exclusively; final
    pauses/<n>      created exclusively by the n-th pause, pauses/<n>.resumed by its end
    events.jsonl    a line per step and per turn of fate; a restart drops lines it will write again
    status.json     the end, written once: succeeded, failed or cancelled
    scheduler.json  how often it was handed to the scheduler (written by MegatronTrainer alone)

The training process and the trainers that watch it share this module. Read next: job.py.
"""

import json
import os
import re
import time
from pathlib import Path
from typing import Any

from cray_agents.errors import NotFound
from cray_agents.paths import Home
from cray_agents.records import JobSpec, JobStatus, canonical
from cray_agents.runtime import durable

TAIL_BYTES = 8192


class Journal:
    """The folder of one job. Cheap to make; holds no state but an open events file."""

    def __init__(self, home: Home, job_id: str) -> None:
        self.home = home
        self.job_id = job_id
        self.folder = home.job(job_id)
        self.log = self.folder / "log.txt"
        self._events: int | None = None

    @property
    def exists(self) -> bool:
        """Whether the job was ever submitted."""
        return (self.folder / "spec.json").exists()

    def spec(self) -> JobSpec:
        """What was asked. Raises NotFound."""
        try:
            text = (self.folder / "spec.json").read_bytes()
        except FileNotFoundError:
            raise NotFound(f"no job {self.job_id!r} in {self.home.jobs}", param="job") from None
        return JobSpec.model_validate_json(text)

    def write_spec(self, spec: JobSpec) -> None:
        """Record what is asked; the first submission's layout stays."""
        if not self.exists:
            durable.replace_file(self.folder / "spec.json", spec.model_dump_json(indent=1).encode())

    # ---- who works on it
    @property
    def attempts(self) -> int:
        """How many times the job was started."""
        folder = self.folder / "attempts"
        names = [p.name for p in folder.iterdir()] if folder.exists() else []
        return max((int(name) for name in names if name.isdigit()), default=0)  # no drafts

    def claim_attempt(self) -> int:
        """Become the newest attempt; older ones see it and stop before they publish."""
        while True:
            number = self.attempts + 1
            who = canonical({"pid": os.getpid(), "host": os.uname().nodename, "time": time.time()})
            if durable.create_file(self.folder / "attempts" / str(number), who):
                return number

    def fenced(self, attempt: int) -> str | None:
        """Why this attempt must not publish any more; None while it may."""
        if self.cancelled:
            return "the job was cancelled"
        newest = self.attempts
        return f"attempt {newest} took over from attempt {attempt}" if newest > attempt else None

    @property
    def cancelled(self) -> bool:
        """Whether somebody cancelled it."""
        return (self.folder / "cancelled").exists()

    def cancel(self) -> None:
        """Mark it cancelled, for good."""
        durable.create_file(self.folder / "cancelled", canonical({"time": time.time()}))

    # ---- whether it may work
    @property
    def paused(self) -> bool:
        """Whether the newest pause has no end yet. Looked at before every step."""
        names = self._pauses()
        return bool(names) and f"{_newest(names)}.resumed" not in names

    def pause(self) -> None:
        """Mark it paused, unless it is."""
        if not self.paused:
            path = self.folder / "pauses" / str(_newest(self._pauses()) + 1)
            durable.create_file(path, canonical({"time": time.time()}))

    def resume(self) -> None:
        """Mark the newest pause over."""
        if self.paused:
            path = self.folder / "pauses" / f"{_newest(self._pauses())}.resumed"
            durable.create_file(path, canonical({"time": time.time()}))

    def _pauses(self) -> set[str]:
        try:
            return {path.name for path in (self.folder / "pauses").iterdir()}
        except FileNotFoundError:
            return set()

    # ---- how far it came
    def event(self, kind: str, **values: Any) -> None:
        """Append a line. One writer: rank 0 of the newest attempt, or its launcher before it."""
        if self._events is None:
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._events = os.open(self.folder / "events.jsonl", flags, 0o644)
        line = json.dumps({"event": kind, "time": time.time(), **values}, allow_nan=True)
        os.write(self._events, line.encode() + b"\n")

    def close(self) -> None:
        """Close the events file; the next event opens it again."""
        if self._events is not None:
            os.close(self._events)
            self._events = None

    def events(self) -> list[dict[str, Any]]:
        """All whole lines so far; a torn last line is left out."""
        path = self.folder / "events.jsonl"
        lines = path.read_bytes().split(b"\n") if path.exists() else []
        return [json.loads(line) for line in lines[:-1] if line]

    def rewind(self, step: int) -> None:
        """Drop step lines beyond `step`: the resumed job writes them again.

        The file is replaced, so what a superseded attempt still appends is seen by nobody.
        """
        self.close()
        kept = [e for e in self.events() if e.get("event") != "step" or e["step"] <= step]
        lines = b"".join(json.dumps(e).encode() + b"\n" for e in kept)
        durable.replace_file(self.folder / "events.jsonl", lines)

    @property
    def step(self) -> int:
        """The newest step that the events tell of, from the file's tail."""
        path = self.folder / "events.jsonl"
        if not path.exists():
            return 0
        with path.open("rb") as file:
            file.seek(max(0, path.stat().st_size - TAIL_BYTES))
            found = re.findall(rb'"event": "step".*?"step": (\d+).*?\n', file.read())
        return int(found[-1]) if found else 0

    # ---- how it ended
    def status(self) -> JobStatus | None:
        """The final status; None while there is none."""
        path = self.folder / "status.json"
        return JobStatus.model_validate_json(path.read_bytes()) if path.exists() else None

    def write_status(self, status: JobStatus) -> None:
        """Record the end."""
        durable.replace_file(self.folder / "status.json", status.model_dump_json(indent=1).encode())

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the job's log."""
        return tail(self.log, lines)


def _newest(pauses: set[str]) -> int:
    """The number of the newest pause; 0 if there was none."""
    return max((int(name) for name in pauses if name.isdigit()), default=0)


def tail(path: Path, lines: int = 20) -> str:
    """The last lines of a text file; empty when there is none."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
