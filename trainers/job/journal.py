"""A job's folder: what was asked, who works on it, how far it came, how it ended.

    spec.json       the JobSpec; it changes only where a failed job is tried again
    attempts/<n>    created exclusively by the n-th start: the fence. Only the newest may publish
    cancelled       created exclusively; final
    pauses/<n>      created exclusively by the n-th pause, pauses/<n>.resumed by its end
    events.jsonl    a line per step and per turn of fate; a restart drops lines it will write again
    status.json     the end, written once: succeeded, failed or cancelled
    status.<n>.json, spec.next.json  the n-th failure, set aside for another try, and the JobSpec
                    of that until it is in its place
    megatron/step-<n>/  resume points (resume.py)
    scheduler.json  how often it was handed to the scheduler (written by MegatronTrainer alone)

The training process and the trainers that watch it share this module. Events are flat objects with
`event` (its kind) and `time` (unix seconds):

    layout      layout, recompute, reasons (sentences): why it is spread so, where the spec left
                that open; the only event from before the first start
    started     attempt, from_step, left_out (samples without anything to learn), layout
    corrupt     message: a resume point that was set aside, or a damaged line that was dropped
    agreement   tokens, max_difference, mean_difference, limit: log-probabilities of the sampled
                tokens, the trainer's against the engine's, nats; run_id, place, ours, theirs: of
                the token that differs most
    step        step (counted from 1), loss (nats), lr, grad_norm, tokens (trained on), seconds,
                tokens_per_second (all that were read), mfu (fraction), memory_gib, and what the
                method measures, by name
    evaluation  step, loss, tokens, and what the method measures: the validation split
    saved       step, seconds: a resume point, told when it is published
    failed      message                          succeeded   checkpoint
    retried     changes (texts): how else a failed job is run from here on

JSON has no word for a number that is not finite: it is null, and `not_finite` says by name what it
was. Read next: job.py.
"""

import math
import os
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Record, canonical
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.disk.durable import resume_points
from cray_agents.training_jobs import JobSpec, JobStatus

TAIL_BYTES = 8192
_NO_MEASURE = {"event", "time", "step", "not_finite"}


class JobJournal:
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
            return checksums.read_record(JobSpec, self.folder / "spec.json")
        except FileNotFoundError:
            raise NotFound(f"no job {self.job_id!r} in {self.home.jobs}", param="job") from None

    def write_spec(self, spec: JobSpec) -> None:
        """Record what is asked; the first submission's layout stays."""
        if not self.exists:
            durable.replace_file(self.folder / "spec.json", _text(spec))

    # ---- another try
    def set_end_aside(self, spec: JobSpec) -> None:
        """Let a job that has ended be tried again as this spec has it: `adopt` goes on from here.

        Whoever is killed meanwhile leaves a job that has ended, or one that `adopt` is still to be
        called for.
        """
        durable.replace_file(self._next_spec, _text(spec))
        self.resume()
        before = [path.name.split(".")[1] for path in self.folder.glob("status.*.json")]
        number = max(map(int, before), default=0) + 1
        (self.folder / "status.json").rename(self.folder / f"status.{number}.json")
        durable.sync(self.folder)

    def adopt(self) -> JobSpec:
        """The spec of a job that has not ended; that of another try from now on, if there is one.

        Called before it is handed over.
        """
        if self._next_spec.exists():
            spec = checksums.read_record(JobSpec, self._next_spec)
            why = changes(self.spec(), spec) or ["its weights were pruned"]
            self.event("retried", changes=why)
            self.close()
            self._next_spec.replace(self.folder / "spec.json")
            durable.sync(self.folder)
        return self.spec()

    @property
    def _next_spec(self) -> Path:
        return self.folder / "spec.next.json"

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
            mine = {"pid": os.getpid(), "host": os.uname().nodename, "time": time.time()}
            if durable.create_file(self.folder / "attempts" / str(number), _said(mine)):
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
        durable.create_file(self.folder / "cancelled", _said({"time": time.time()}))

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
            durable.create_file(path, _said({"time": time.time()}))

    def resume(self) -> None:
        """Mark the newest pause over."""
        if self.paused:
            path = self.folder / "pauses" / f"{_newest(self._pauses())}.resumed"
            durable.create_file(path, _said({"time": time.time()}))

    def _pauses(self) -> set[str]:
        try:
            return {path.name for path in (self.folder / "pauses").iterdir()}
        except FileNotFoundError:
            return set()

    # ---- how far it came
    @property
    def events_file(self) -> Path:
        """Where the events are; there is none before the first."""
        return self.folder / "events.jsonl"

    def event(self, kind: str, **values: Any) -> None:
        """Append a line. One writer: who submits it, then each attempt's launcher and rank 0."""
        if self._events is None:
            self._drop_torn_line()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._events = os.open(self.events_file, flags, 0o644)
        os.write(self._events, _line({"event": kind, "time": time.time(), **values}))

    def close(self) -> None:
        """Close the events file; the next event opens it again."""
        if self._events is not None:
            os.close(self._events)
            self._events = None

    def events(self) -> list[dict[str, Any]]:
        """All whole lines so far; a torn last line is left out. Raises Corrupt."""
        return list(checksums.read_lines(self.events_file)) if self.events_file.exists() else []

    def rewind(self, step: int) -> None:
        """Drop what is told of steps beyond `step`: the resumed job tells it again. -1: of all.

        The file is replaced, so what a superseded attempt still appends is seen by nobody.
        """
        self.close()
        kept, damaged = [], []
        for number, line in enumerate(self._whole_lines(), 1):
            try:
                event = checksums.parse(line, f"{self.events_file}: line {number}")
            except Corrupt as problem:  # a log's line must not keep a job from going on
                damaged.append({"event": "corrupt", "time": time.time(), "message": str(problem)})
            else:
                kept.append(event)
        told = [event for event in kept if event.get("step", -1) <= step]
        durable.replace_file(self.events_file, b"".join(map(_line, [*told, *damaged])))

    def _whole_lines(self) -> list[bytes]:
        whole = self.events_file.read_bytes() if self.events_file.exists() else b""
        return [line for line in whole.split(b"\n")[:-1] if line]

    def _drop_torn_line(self) -> None:
        """What a killed process left half-written must not become the start of our line."""
        if not self.events_file.exists():
            return
        whole = self.events_file.read_bytes()
        if not whole.endswith(b"\n") and whole:
            durable.replace_file(self.events_file, whole[: whole.rfind(b"\n") + 1])

    @property
    def last_step(self) -> dict[str, Any] | None:
        """The newest step's event, read from the file's end."""
        for line in _lines_from_the_end(self.events_file):
            event: dict[str, Any] = checksums.parse(line, self.events_file)
            if event.get("event") == "step":
                return event
        return None

    @property
    def step(self) -> int:
        """The newest step that the events tell of."""
        return int((self.last_step or {"step": 0})["step"])

    @property
    def resume_points(self) -> list[Path]:
        """Where it could go on from, newest first."""
        return resume_points(self.folder / "megatron")

    # ---- how it ended
    @property
    def ended(self) -> bool:
        """Whether it succeeded, failed or was cancelled; nothing is read for it."""
        return (self.folder / "status.json").exists() or self.cancelled

    def status(self) -> JobStatus | None:
        """The final status; None while there is none."""
        path = self.folder / "status.json"
        return checksums.read_record(JobStatus, path) if path.exists() else None

    def write_status(self, status: JobStatus) -> None:
        """Record the end."""
        durable.replace_file(self.folder / "status.json", _text(status))

    def log_tail(self, lines: int = 20) -> str:
        """The last lines of the job's log."""
        return tail(self.log, lines)


def changes(before: JobSpec, asked: JobSpec) -> list[str]:
    """How else the same job is to be run, field by field; what the trainer may choose need not."""
    chosen = {"layout", "recompute"} - asked.model_fields_set
    pairs = {
        name: (getattr(before, name), getattr(asked, name))
        for name in JobSpec.model_fields
        if name not in chosen
    }
    return [f"{name}: {now}, was {old}" for name, (old, now) in pairs.items() if now != old]


def measures(step: dict[str, Any]) -> dict[str, Any]:
    """The numbers of a step's event, by name; None is one that was not finite."""
    return {name: value for name, value in step.items() if name not in _NO_MEASURE}


def _text(record: Record) -> bytes:
    return checksums.with_crc(record.model_dump_json(indent=1).encode())


def _said(value: dict[str, Any]) -> bytes:
    return checksums.with_crc(canonical(value))


def _line(event: dict[str, Any]) -> bytes:
    """An event as it is written; orjson makes null of what is not finite."""
    wrong = {n: str(v) for n, v in event.items() if isinstance(v, float) and not math.isfinite(v)}
    told = {**event, "not_finite": wrong} if wrong else event
    return checksums.with_crc(orjson.dumps(told, option=orjson.OPT_SERIALIZE_NUMPY)) + b"\n"


def _lines_from_the_end(path: Path) -> Iterator[bytes]:
    """The whole lines of a file, the last one first; a torn one is left out."""
    if not path.exists():
        return
    with path.open("rb") as file:
        start, rest = file.seek(0, os.SEEK_END), b""  # of `rest` it is not known where it begins
        torn = True
        while start > 0:
            size = min(TAIL_BYTES, start)
            start = file.seek(start - size)
            rest, *lines = (file.read(size) + rest).split(b"\n")
            if torn and lines:
                lines, torn = lines[:-1], False
            yield from reversed(lines)
        if rest and not torn:
            yield rest


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
