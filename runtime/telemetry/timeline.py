"""Timeline: an iteration or a training job as Chrome trace JSON, which Perfetto opens.

    iteration_timeline   phases of an iteration, the steps of its job, its runs with their calls
    job_timeline          attempts, steps and saves of a job, with its loss and speed as counters

Both are pure functions of records. Times (`ts`, `dur`) are microseconds since `otherData.begin`, a
Unix time in seconds. The format is "Trace Event Format" (docs.google.com/document/d/
1CvAClvFfyA5R-PhYUmn5OOQtYMH4h6I0nSsKchNAySU): X is a span, i an instant, C a counter, M a name.
"""

import heapq
from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from cray_agents.records import Run

Json = dict[str, Any]

PHASES, JOB, RUNS = 1, 2, 3  # Perfetto's processes: groups of tracks
MOST_RUNS = 2000  # of an iteration; a larger file is slow to open

_COUNTERS = ("loss", "grad_norm", "tokens_per_second", "mfu", "memory_gib")
_SPANS = {"step": "step", "saved": "save", "taken_up": "take up"}  # events with `seconds`
_ARGUMENTS = 40  # fields of an event that are shown


def job_timeline(job_id: str, events: Sequence[Mapping[str, Any]]) -> Json:
    """Return the timeline of a job from its events (trainers/job/journal.py), in their order.

    An event's `time` is its end; `seconds`, if it has them, its length.
    """
    trace = _Trace()
    trace.name(JOB, 0, f"job {job_id}")
    _add_job(trace, events)
    return trace.json({"job": job_id})


def iteration_timeline(
    loop: str,
    iteration: Mapping[str, Any],
    ended: float,
    *,
    job_events: Sequence[Mapping[str, Any]] = (),
    runs: Iterable[Run] = (),
) -> Json:
    """Return the timeline of an iteration.

    Args:
        loop: its name.
        iteration: the loop's record (cray_agents/iteration.py) as JSON.
        ended: when the record was written, in Unix seconds.
        job_events: of the iteration's job; none where it trained nothing.
        runs: of the iteration; the first `MOST_RUNS` are drawn.

    A record has the seconds of its phases and not their starts. `train` begins with its job and
    `rollouts` with the first run; other phases follow each other, which `args.start` says.
    """
    trace = _Trace()
    number = iteration.get("iteration", 0)
    trace.name(PHASES, 0, f"{loop} iteration {number}")
    drawn = sorted((run for run in runs if run.started), key=lambda run: run.started)
    left_out = max(0, len(drawn) - MOST_RUNS)
    _add_phases(trace, iteration, ended, job_events, drawn)
    if job_events:
        trace.name(JOB, 0, f"job {iteration.get('job_id') or ''}".strip())
        _add_job(trace, job_events)
    if drawn:
        trace.name(RUNS, 0, "runs")
        _add_runs(trace, drawn[:MOST_RUNS])
    about = {"loop": loop, "iteration": number, "version": iteration.get("version")}
    return trace.json({**about, "runs_left_out": left_out})


class _Trace:
    """Events with absolute times, until `json` makes them relative."""

    def __init__(self) -> None:
        self._names: list[Json] = []
        self._events: list[tuple[float, Json]] = []

    def name(self, process: int, track: int, name: str) -> None:
        """Name a track; track 0 is the process."""
        kind = "thread_name" if track else "process_name"
        about = {"ph": "M", "name": kind, "pid": process, "tid": track}
        self._names.append({**about, "args": {"name": name}})

    def span(
        self, name: str, place: tuple[int, int], begin: float, seconds: float, args: Json
    ) -> None:
        length = round(max(0.0, seconds) * 1e6)
        self._add(begin, place, {"ph": "X", "name": name, "dur": length, "args": args})

    def instant(self, name: str, place: tuple[int, int], time: float, args: Json) -> None:
        self._add(time, place, {"ph": "i", "s": "t", "name": name, "args": args})

    def count(self, name: str, place: tuple[int, int], time: float, value: float) -> None:
        self._add(time, place, {"ph": "C", "name": name, "args": {name: value}})

    def _add(self, time: float, place: tuple[int, int], event: Json) -> None:
        self._events.append((time, {**event, "pid": place[0], "tid": place[1]}))

    def json(self, about: Json) -> Json:
        begin = min((time for time, _ in self._events), default=0.0)
        ordered = sorted(self._events, key=lambda one: one[0])
        events = [{**event, "ts": round((time - begin) * 1e6)} for time, event in ordered]
        return {
            "traceEvents": [*self._names, *events],
            "displayTimeUnit": "ms",
            "otherData": {"begin": begin, **about},
        }


def _add_phases(
    trace: _Trace,
    iteration: Mapping[str, Any],
    ended: float,
    job_events: Sequence[Mapping[str, Any]],
    runs: Sequence[Run],
) -> None:
    seconds: Mapping[str, float] = iteration.get("seconds") or {}
    wall = float(iteration.get("wall") or sum(seconds.values()))
    starts = {}
    if job_events:
        first = job_events[0]
        starts["train"] = float(first.get("time") or 0.0) - float(first.get("seconds") or 0.0)
    if runs:
        starts["rollouts"] = runs[0].started
    outcome = "promoted" if iteration.get("promoted") else "not promoted"
    about = {name: iteration.get(name) for name in ("version", "method", "holdout_success")}
    trace.span(outcome, (PHASES, 1), ended - wall, wall, about)
    trace.name(PHASES, 1, "iteration")
    at = ended - wall
    for track, (name, length) in enumerate(seconds.items(), 2):
        begin = starts.get(name, at)
        how = "recorded" if name in starts else "after the phase before"
        trace.name(PHASES, track, name)
        trace.span(name, (PHASES, track), begin, length, {"seconds": length, "start": how})
        at = begin + length


def _add_job(trace: _Trace, events: Sequence[Mapping[str, Any]]) -> None:
    track = 1
    trace.name(JOB, track, "before its first start")
    started: float | None = None
    for event in events:
        kind, time = str(event.get("event")), float(event.get("time") or 0.0)
        if kind == "started":
            track, started = track + 1, time
            trace.name(JOB, track, f"attempt {event.get('attempt')}")
        if (label := _SPANS.get(kind)) is None:
            trace.instant(kind, (JOB, track), time, _arguments(event))
            continue
        length = float(event.get("seconds") or 0.0)
        if started is not None and time - length > started:
            trace.span("start", (JOB, track), started, time - length - started, {})
        started = None
        trace.span(label, (JOB, track), time - length, length, _arguments(event))
        for name in _COUNTERS:
            if isinstance(event.get(name), int | float):
                trace.count(name, (JOB, 0), time, event[name])


def _add_runs(trace: _Trace, runs: Sequence[Run]) -> None:
    """Draw runs on as few tracks as they need: each takes the first one that is free."""
    free: list[tuple[float, int]] = []  # the end of each track's last run
    for run in runs:
        end = run.started + run.seconds
        track = heapq.heappop(free)[1] if free and free[0][0] <= run.started else len(free) + 1
        heapq.heappush(free, (end, track))
        place = (RUNS, track)
        about = {"stop_reason": str(run.stop_reason), "reward": run.reward, "attempt": run.attempt}
        trace.span(run.id, place, run.started, run.seconds, about)
        for turn in run.trajectory.turns:
            at = run.started
            if (call := turn.call) is not None:
                tokens = {"prompt": len(call.prompt_token_ids), "sampled": len(call.token_ids)}
                trace.span(f"chat {call.model}", place, call.started, call.seconds, tokens)
                at = call.started + call.seconds
            for tool in turn.tool_calls:
                failed = {"error": tool.error} if tool.error else {}
                trace.span(f"tool {tool.name}", place, at, tool.seconds, failed)


def _arguments(event: Mapping[str, Any]) -> Json:
    fields = [(name, event[name]) for name in event if name not in ("event", "time")]
    return dict(fields[:_ARGUMENTS])
