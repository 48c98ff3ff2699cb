"""Job journal: a job's folder with its spec, attempts, pauses, commands, events and end.

    spec.json       the JobSpec; it changes only where a failed job is tried again
    attempts/<n>    created exclusively by the n-th start: the fence. Only the newest may publish
    cancelled       created exclusively; final
    pauses/<n>      created exclusively by the n-th pause, pauses/<n>.resumed by its end
    events.jsonl    a line per event; a restart drops the lines that it will write again
    status.json     the end, written once: succeeded, failed or cancelled
    status.<n>.json the n-th failure, set aside for a retry
    spec.next.json  the JobSpec of a retry, until it replaces spec.json
    megatron/step-<n>/  resume points (checkpointing/resume.py); kept-<n>/: states for other jobs
                        local-<n>.<attempt>/: what describes one on the nodes' own disks
    microbatch.json tokens of a micro-batch, of a job whose own were too many for the memory
    waits.json      why the job waits, as its scheduler said last; missing while it runs
    end.json        the launcher's report of a bad end (rank_monitor.py), until the next start
    hardware.<node>.jsonl  load of the node's GPUs and network ports (runtime/scheduler/sampler.py)
    hangs/          the stacks of all ranks of a start that did not move any more
    scheduler.json  the last handover to the scheduler (written by MegatronTrainer alone)
    commands/<n>    a client's command, created exclusively: two clients cannot both write one
    results/<n>     its result, created exclusively by rank 0 of the newest attempt

A command is done when it has a result. After a death the commands since the last resume point are
done again, in memory alone.

`format` in spec.json and spec.next.json is the number of the whole folder's format, JOB_FORMAT; 1
without one. A newer one is refused.

The training process and the trainers that watch it share this module. Events are flat objects with
`event` (the kind) and `time` (unix seconds):

    layout      layout, recompute, reasons (sentences): the choice for a spec that names no layout;
                the only event from before the first start
    started     attempt, from_step, left_out (samples without anything to learn), layout, layers
                (the backend, the layers and kernels, and why)
    packing     how, difference, split, rejected: how the transformers backend packs sequences
    taken_up    attempt, source ("memory", "parked" or "files"), seconds until a session had weights
                and optimizer in place, parked_bytes (all that its ranks have parked then)
    warning     message: a loss that the job goes on with
    moved       checkpoint, changed_share, update_ratio: see JobStatus
    corrupt     message: a resume point that was set aside, or a damaged line that was dropped
    agreement   tokens, max_difference, mean_difference, p99_difference (99th percentile):
                log-probabilities of the sampled tokens, the trainer's against the engine's, nats;
                equal_argmax: the share of greedy tokens that the trainer finds most likely too
                (null below a hundred of them); kl, tokens_above, sequences_above: see
                LogprobDistance (null if all tokens are greedy); limit (of the maximum in float32,
                of the 99th percentile in bfloat16), mean_limit and argmax_limit (null in float32),
                agrees; run_id, place, ours, theirs: of the worst token; largest: of the 20 worst
    step        step (counted from 1), loss (nats), lr, grad_norm, tokens (trained on), seconds,
                tokens_per_second (all tokens read), mfu (fraction; of GPUs whose peak is known),
                communication (of several ranks: the fraction of the step in which the first one
                waited for the sum of gradients), memory_gib, and the method's measures, by name
    evaluation  step, loss, tokens, and the method's measures, on the validation split
    saved       step, seconds: a resume point, at its publication
    version     version, checkpoint, step, loss, validation_loss, seconds: see JobVersion
    failed      message                          succeeded   checkpoint
    verdict     attempt, cause, node, message, done: why an attempt ended, and what followed
                (failure.py)
    straggler   rank, node, seconds, median (of a step's own work), steps: a rank that is slow
    retried     changes (texts): the new settings of a failed job from here on

JSON cannot write a number that is not finite. Such a number is null, and `not_finite` gives its
text by name. Read next: job.py.
"""

import json
import math
import os
import time
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Any, TypeVar

from pydantic import ValidationError

from cray_agents.errors import FULL, BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import LogprobDistance, Record, canonical
from cray_agents.runtime.disk import checksums, durable, journal
from cray_agents.runtime.disk.durable import resume_points
from cray_agents.training_commands import COMMAND, CommandResult, End, TrainingCommand
from cray_agents.training_jobs import JobSpec, JobStatus, JobVersion, TakenUp, versions_in

TAIL_BYTES = 8192
JOB_FORMAT = 1  # of a job's folder
GIVEN_UP = "given up"  # a verdict's `done` after which the job failed
AnyRecord = TypeVar("AnyRecord", bound=Record)
_NOT_MEASURES = {"event", "time", "step", "not_finite"}
_NOT_METHOD = _NOT_MEASURES | {"loss", "lr", "grad_norm", "tokens", "tokens_per_second", "seconds",
                               "mfu", "communication", "memory_gib"}  # fmt: skip


class JobJournal:
    """The folder of one job. Cheap to make; its only state is an open events file."""

    def __init__(self, home: Home, job_id: str) -> None:
        self.home = home
        self.job_id = job_id
        self.folder = home.job(job_id)
        self.log = self.folder / "log.txt"
        self._events: int | None = None
        self._unwritten = b""  # events that wait for room on the disk

    @property
    def exists(self) -> bool:
        """True once the job was submitted."""
        return (self.folder / "spec.json").exists()

    def spec(self) -> JobSpec:
        """Return the job's spec. Raises NotFound, Corrupt, NewerFormat."""
        try:
            return checksums.read_record(JobSpec, self.folder / "spec.json", JOB_FORMAT)
        except FileNotFoundError:
            raise NotFound(f"no job {self.job_id!r} in {self.home.jobs}", param="job") from None

    def write_spec(self, spec: JobSpec) -> None:
        """Record the spec, unless there is one: the first submission's layout stays."""
        if not self.exists:
            durable.replace_file(self.folder / "spec.json", numbered(spec, JOB_FORMAT))

    # ---- retries
    def prepare_retry(self, spec: JobSpec) -> None:
        """Let a job that has ended be tried again under `spec`, which `adopt_next_spec` takes over.

        A kill in between leaves either an ended job or one with a spec still to be adopted.
        """
        durable.replace_file(self._next_spec, numbered(spec, JOB_FORMAT))
        self.resume()
        before = [path.name.split(".")[1] for path in self.folder.glob("status.*.json")]
        number = max(map(int, before), default=0) + 1
        (self.folder / "status.json").rename(self.folder / f"status.{number}.json")
        durable.sync(self.folder)

    def adopt_next_spec(self) -> JobSpec:
        """Put the spec of a retry in place, if there is one; return the job's spec.

        Called before the job is handed to the scheduler.
        """
        if self._next_spec.exists():
            spec = checksums.read_record(JobSpec, self._next_spec, JOB_FORMAT)
            again = "its weights were pruned" if spec.commands is None else "it was opened again"
            if spec.commands is None and self.failed_for == "storage":
                again = "the disk may have room again"
            reasons = changes(self.spec(), spec) or [again]
            self.event("retried", changes=reasons)
            self.close()
            self._next_spec.replace(self.folder / "spec.json")
            durable.sync(self.folder)
        return self.spec()

    @property
    def _next_spec(self) -> Path:
        return self.folder / "spec.next.json"

    # ---- attempts
    @property
    def attempts(self) -> int:
        """The number of starts so far."""
        return count_attempts(self.folder)

    def claim_attempt(self) -> int:
        """Become the newest attempt; older ones see this and stop before they publish."""
        return claim_attempt(self.folder)

    def fenced(self, attempt: int) -> str | None:
        """Return the reason why this attempt must not publish any more; None while it may."""
        if self.cancelled:
            return "the job was cancelled"
        newest = self.attempts
        return f"attempt {newest} took over from attempt {attempt}" if newest > attempt else None

    @property
    def cancelled(self) -> bool:
        """True once the job was cancelled."""
        return (self.folder / "cancelled").exists()

    def cancel(self) -> None:
        """Mark the job cancelled, for good."""
        durable.create_file(self.folder / "cancelled", _record_bytes({"time": time.time()}))

    # ---- pauses
    @property
    def paused(self) -> bool:
        """True while the newest pause has no end. Read before every step."""
        names = self._pauses()
        return bool(names) and f"{_newest(names)}.resumed" not in names

    def pause(self) -> None:
        """Mark the job paused, unless it is."""
        if not self.paused:
            path = self.folder / "pauses" / str(_newest(self._pauses()) + 1)
            durable.create_file(path, _record_bytes({"time": time.time()}))

    def resume(self) -> None:
        """Mark the newest pause over."""
        if self.paused:
            path = self.folder / "pauses" / f"{_newest(self._pauses())}.resumed"
            durable.create_file(path, _record_bytes({"time": time.time()}))

    def _pauses(self) -> set[str]:
        return durable.names_in(self.folder / "pauses")

    # ---- what a failure or the scheduler left
    @property
    def microbatch(self) -> int | None:
        """The tokens of a micro-batch that a failure left; None: those of the spec."""
        path = self.folder / "microbatch.json"
        return int(checksums.read_json(path)["tokens"]) if path.exists() else None

    def note_microbatch(self, tokens: int) -> None:
        """Let later starts take smaller micro-batches; the job's id and result stay."""
        durable.replace_file(self.folder / "microbatch.json", _record_bytes({"tokens": tokens}))

    @property
    def wait_reason(self) -> str | None:
        """Why the job waits, as noted last; None if it has started since."""
        path = self.folder / "waits.json"
        try:
            noted, since = checksums.read_json(path), path.stat().st_mtime
        except FileNotFoundError:  # also of a job that starts just now
            return None
        newest = self.folder / "attempts" / str(self.attempts)
        runs = newest.exists() and newest.stat().st_mtime > since
        return None if runs else str(noted["reason"])

    def note_wait(self, reason: str | None) -> None:
        """Record why the job waits, if that is new; None: it does not."""
        path = self.folder / "waits.json"
        if reason is None:
            if path.exists():  # on a read-only root also the unlink of a missing file fails
                path.unlink(missing_ok=True)
        elif self.wait_reason != reason:
            durable.replace_file(path, _record_bytes({"reason": reason}))

    # ---- progress
    @property
    def events_file(self) -> Path:
        """The file of events; missing before the first event."""
        return self.folder / "events.jsonl"

    def event(self, kind: str, **values: Any) -> None:
        """Append an event. One writer at a time: the submitter, then each launcher and rank 0.

        On a full disk it waits in memory for the next one.
        """
        if self._events is None:
            self._drop_torn_line()
            flags = os.O_WRONLY | os.O_APPEND | os.O_CREAT
            self._events = os.open(self.events_file, flags, 0o644)
        self._unwritten += _line({"event": kind, "time": time.time(), **values})
        self._flush()

    def _flush(self) -> None:
        while self._events is not None and self._unwritten:
            try:
                written = os.write(self._events, self._unwritten)
            except OSError as error:
                if error.errno not in FULL:
                    raise
                return
            self._unwritten = self._unwritten[written:]

    def close(self) -> None:
        """Close the events file; the next event opens it again.

        Events that there is no room for are lost: a job that goes on writes its steps' again.
        """
        self._flush()
        self._unwritten = b""
        if self._events is not None:
            os.close(self._events)
            self._events = None

    def events(self) -> list[dict[str, Any]]:
        """Return all whole lines so far, without a torn last line. Raises Corrupt."""
        return list(journal.read(self.events_file))

    def rewind(self, step: int) -> None:
        """Drop events of steps beyond `step` (-1: of all steps); the resumed job writes them again.

        The file is replaced, so nobody reads events that a superseded attempt still appends.
        """
        self.close()
        kept, damaged = [], []
        for number, line in enumerate(self._whole_lines(), 1):
            try:
                event = journal.parse_line(line, f"{self.events_file}: line {number}")
            except Corrupt as problem:  # a damaged line must not stop the job
                damaged.append({"event": "corrupt", "time": time.time(), "message": str(problem)})
            else:
                kept.append(event)
        past = [event for event in kept if event.get("step", -1) <= step]
        durable.replace_file(self.events_file, b"".join(map(_line, [*past, *damaged])))

    def _whole_lines(self) -> list[bytes]:
        whole = self.events_file.read_bytes() if self.events_file.exists() else b""
        return [line for line in whole.split(b"\n")[:-1] if line]

    def _drop_torn_line(self) -> None:
        """Drop the half-written line of a killed process, so that ours does not continue it."""
        if not self.events_file.exists():
            return
        whole = self.events_file.read_bytes()
        if not whole.endswith(b"\n") and whole:
            durable.replace_file(self.events_file, whole[: whole.rfind(b"\n") + 1])

    @property
    def failed_for(self) -> str | None:
        """The cause by which the trainer gave the job up (failure.py's kinds); else None."""
        for line in _lines_from_the_end(self.events_file):
            event = journal.parse_line(line, self.events_file)
            if event.get("event") in ("verdict", "failed", "succeeded", "retried", "started"):
                given_up = event["event"] == "verdict" and event["done"] == GIVEN_UP
                return str(event["cause"]) if given_up else None
        return None

    @property
    def last_step(self) -> dict[str, Any] | None:
        """The newest step's event, read from the file's end."""
        for line in _lines_from_the_end(self.events_file):
            event: dict[str, Any] = journal.parse_line(line, self.events_file)
            if event.get("event") == "step":
                return event
        return None

    @property
    def taken_up(self) -> TakenUp | None:
        """The last start of the job by a session; None if there was none."""
        events = [event for event in self.events() if event["event"] == "taken_up"]
        return TakenUp(**{n: events[-1][n] for n in TakenUp.model_fields}) if events else None

    @property
    def warnings(self) -> list[str]:
        """The losses so far, each sentence once."""
        messages = (e["message"] for e in self.events() if e["event"] == "warning")
        return list(dict.fromkeys(messages))

    @property
    def versions(self) -> list[JobVersion]:
        """The versions that the job published while it trained, the oldest first."""
        return versions_in(self.events())

    @property
    def layers(self) -> str:
        """The layers and kernels of the newest start, and how they compute several sequences."""
        texts = {"started": "", "packing": ""}
        for event in self.events():
            if event["event"] == "started":
                texts = {"started": event.get("layers", ""), "packing": ""}
            elif event["event"] == "packing":
                texts["packing"] = event["how"]
        return "; ".join(filter(None, texts.values()))

    @property
    def step(self) -> int:
        """The newest step with an event; 0 if there is none."""
        return int((self.last_step or {"step": 0})["step"])

    @property
    def resume_points(self) -> list[Path]:
        """The job's resume points, newest first."""
        return resume_points(self.folder / "megatron")

    # ---- end
    @property
    def ended(self) -> bool:
        """True once the job succeeded, failed or was cancelled. Reads no file."""
        return (self.folder / "status.json").exists() or self.cancelled

    def status(self) -> JobStatus | None:
        """Return the final status; None while there is none."""
        return checksums.find_record(JobStatus, self.folder / "status.json")

    def write_status(self, status: JobStatus) -> None:
        """Record the final status."""
        text = checksums.with_crc(status.model_dump_json(indent=1).encode())
        durable.replace_file(self.folder / "status.json", text)

    def log_tail(self, lines: int = 20, log: Path | None = None) -> str:
        """Return the last lines of the job's log, or of another one."""
        return tail(log or self.log, lines)


class CommandJournal:
    """The commands and results in a job's folder. Cheap to make, and without state of its own."""

    def __init__(self, folder: Path) -> None:
        self._commands, self._results = folder / "commands", folder / "results"

    def prepare(self) -> None:
        """Make both folders, before a host that looks into them could believe in their absence."""
        for folder in (self._commands, self._results):
            folder.mkdir(parents=True, exist_ok=True)

    def append(self, sequence: int, command: TrainingCommand) -> None:
        """Add the next command; adding the same one again changes nothing. Raises BadInput."""
        last = self.last
        path = self._commands / str(sequence)
        if sequence > last + 1 or sequence < 1:
            raise BadInput(
                f"command {sequence} is out of order: the next one is {last + 1}", param="sequence"
            )
        if last and sequence > last and isinstance(self.command(last), End):
            result = self.result(last)
            if result is None or result.error is None:
                raise BadInput(f"command {last} has ended this training run", param="sequence")
        content = checksums.with_crc(COMMAND.dump_json(command))
        if not durable.create_file(path, content) and path.read_bytes() != content:
            raise BadInput(
                f"command {sequence} is another one already: two clients write to this training"
                " run; let each have a run of its own",
                param="sequence",
            )

    @property
    def last(self) -> int:
        """The number of the newest command; 0 without one."""
        return _newest(durable.names_in(self._commands))

    def exists(self, sequence: int) -> bool:
        """Return True if a command was added."""
        return str(sequence) in durable.names_in(self._commands)

    @property
    def done(self) -> int:
        """The number of the newest command that has a result; 0 without one."""
        return _newest(durable.names_in(self._results))

    @property
    def idle(self) -> bool:
        """True if every command has a result."""
        return self.last == self.done

    def command(self, sequence: int) -> TrainingCommand | None:
        """Return a command; None if there is none yet. Raises Corrupt."""
        path = self._commands / str(sequence)
        try:
            text = path.read_bytes()
        except FileNotFoundError:
            return None
        try:
            return COMMAND.validate_json(checksums.verify_crc(text, path))
        except ValidationError as error:
            first = error.errors(include_url=False)[0]
            raise Corrupt(f"{path} cannot be read: {first['msg']}") from error

    def result(self, sequence: int) -> CommandResult | None:
        """Return a command's result; None if it has none yet. Raises Corrupt."""
        path = self._results / str(sequence)
        listed = path.name in durable.names_in(self._results)
        return checksums.read_record(CommandResult, path) if listed else None

    def write_result(self, result: CommandResult) -> None:
        """Record a result, unless the command has one."""
        durable.create_file(self._results / str(result.sequence), checksums.record_text(result))


def count_attempts(folder: Path) -> int:
    """Return the number of starts of the job or session with this folder."""
    return _newest(durable.names_in(folder / "attempts"))


def claim_attempt(folder: Path) -> int:
    """Become the newest start of a job or session; return its number."""
    while True:
        number = count_attempts(folder) + 1
        mine = {"pid": os.getpid(), "host": os.uname().nodename, "time": time.time()}
        if durable.create_file(folder / "attempts" / str(number), _record_bytes(mine)):
            return number


def changes(before: JobSpec, after: JobSpec) -> list[str]:
    """Return the differences between two specs of a job, field by field.

    A layout or recompute that `after` leaves to the trainer is no difference, nor is the session.
    """
    chosen = {"session"} | ({"layout", "recompute"} - after.model_fields_set)
    pairs = {
        name: (getattr(before, name), getattr(after, name))
        for name in JobSpec.model_fields
        if name not in chosen
    }
    return [f"{name}: {now}, was {old}" for name, (old, now) in pairs.items() if now != old]


def measures(step: dict[str, Any]) -> dict[str, Any]:
    """Return the numbers of a step's event, by name; None stands for one that was not finite."""
    return {name: value for name, value in step.items() if name not in _NOT_MEASURES}


def mean_measures(events: Iterable[dict[str, Any]]) -> dict[str, float]:
    """Return the method's measures as means over the steps, each step by its tokens."""
    sums: dict[str, tuple[float, int]] = {}
    for step in events:
        for name, value in step.items() if step["event"] == "step" else ():
            if isinstance(value, int | float) and name not in _NOT_METHOD:
                total, tokens = sums.get(name, (0.0, 0))
                sums[name] = total + value * step["tokens"], tokens + step["tokens"]
    return {name: total / tokens for name, (total, tokens) in sums.items() if tokens}


def distance_in(event: dict[str, Any]) -> LogprobDistance | None:
    """Return the distance of an `agreement` event; None if it was not finite, or is from old code.

    What such events did not have yet is None.
    """
    names = {"tokens", "mean_difference", "p99_difference", "max_difference"}
    if any(event.get(name) is None for name in names):
        return None
    given = {name.removesuffix("_difference"): event[name] for name in names}
    more = ("equal_argmax", "kl", "tokens_above", "sequences_above")
    given |= {name: event.get(name) for name in more}
    worst = [event.get(name) for name in ("run_id", "place", "ours", "theirs")]
    return LogprobDistance.model_validate(given | {"worst": None if None in worst else worst})


def numbered(record: Record, version: int) -> bytes:
    """Return a record's text with its checksum and the number of its format."""
    content = record.model_dump(mode="json") | {checksums.FORMAT: version}
    return checksums.with_crc(json.dumps(content, indent=1).encode())


def _record_bytes(value: dict[str, Any]) -> bytes:
    return checksums.with_crc(canonical(value))


def _line(event: dict[str, Any]) -> bytes:
    """Return an event's line; orjson writes null for numbers that are not finite."""
    wrong = {n: str(v) for n, v in event.items() if isinstance(v, float) and not math.isfinite(v)}
    content = {**event, "not_finite": wrong} if wrong else event
    return journal.line_of(content) + b"\n"


def _lines_from_the_end(path: Path) -> Iterator[bytes]:
    """Yield the whole lines of a file, the last one first, without a torn one."""
    if not path.exists():
        return
    with path.open("rb") as file:
        start, rest = file.seek(0, os.SEEK_END), b""  # `rest`: a line whose start is not read yet
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


def _newest(names: Iterable[str]) -> int:
    """Return the largest number among names; 0 if there is none."""
    return max((int(name) for name in names if name.isdigit()), default=0)


def size_of_log(path: Path) -> int:
    """Return a log's size in bytes; 0 if there is none."""
    return path.stat().st_size if path.name in durable.names_in(path.parent) else 0


def tail_from(path: Path, start: int) -> str:
    """Return the end of a log, without what was in it at a size of `start` bytes."""
    if path.name not in durable.names_in(path.parent):
        return ""
    with path.open("rb") as file:
        size = file.seek(0, os.SEEK_END)
        file.seek(max(start if start <= size else 0, size - TAIL_BYTES))
        return file.read().decode(errors="replace")


def tail(path: Path, lines: int = 20) -> str:
    """Return the last lines of a text file; an empty text if there is no file."""
    if not path.exists():
        return ""
    with path.open("rb") as file:
        file.seek(max(0, path.stat().st_size - TAIL_BYTES))
        text = file.read().decode(errors="replace")
    return "\n".join(text.splitlines()[-lines:])
