"""Job series: a job's measures by step, thinned for a chart.

LTTB ("largest triangle three buckets", Steinarsson 2013, https://hdl.handle.net/1946/15343) keeps
of each bucket the point that spans the largest triangle with its neighbours, so peaks survive.
Called by gateway/routes/jobs.py and loops.py.
"""

from collections.abc import Iterable, Sequence
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.disk import journal

MEASURED = {"step": "", "evaluation": "evaluation_"}  # events, and the prefix of their measures
NOT_MEASURES = {"event", "time", "step", "not_finite"}

Point = tuple[float, float]  # step, value


def job_events(home: Home, job_id: str) -> list[Any]:
    """Return the events of a job, without a last line that is still being written; none of ""."""
    return list(journal.read(home.job(job_id) / "events.jsonl")) if job_id else []


def series_of(events: Iterable[dict[str, Any]]) -> dict[str, list[Point]]:
    """Return all finite measures of a job's events by name; of a step done twice the last."""
    series: dict[str, dict[float, float]] = {}
    for event in events:
        prefix = MEASURED.get(str(event.get("event")))
        if prefix is None:
            continue
        for name, value in event.items():
            if name not in NOT_MEASURES and isinstance(value, int | float):
                series.setdefault(prefix + name, {})[event["step"]] = float(value)
    return {name: sorted(points.items()) for name, points in series.items()}


def job_series(
    job_id: str, events: Iterable[dict[str, Any]], names: Sequence[str], points: int
) -> dict[str, Any]:
    """Return a JobSeries of these measures (all if there are no names) as JSON.

    Raises BadInput for a measure that the job has not.
    """
    known = series_of(events)
    if known and (unknown := [name for name in names if name not in known]):
        raise BadInput(f"the job has no {unknown[0]!r}: {', '.join(known)}", param="names")
    chosen = {name: known[name] for name in names or known if name in known}
    return {
        "id": job_id,
        "names": list(known),
        "points": points,
        "counts": {name: len(series) for name, series in chosen.items()},
        "series": {name: thinned(series, points) for name, series in chosen.items()},
    }


def thinned(points: Sequence[Point], most: int) -> list[Point]:
    """Return at most `most` (3 or more) of the points, with the first and the last, by LTTB."""
    count = len(points)
    if count <= most:
        return list(points)
    kept = [points[0]]
    width = (count - 2) / (most - 2)
    for number in range(most - 2):
        start, end = int(number * width) + 1, int((number + 1) * width) + 1
        after = points[end : min(count, int((number + 2) * width) + 1)] or points[-1:]
        x = sum(point[0] for point in after) / len(after)
        y = sum(point[1] for point in after) / len(after)
        (left, height) = kept[-1]
        kept.append(
            max(
                points[start:end],
                key=lambda p: abs((left - x) * (p[1] - height) - (left - p[0]) * (y - height)),
            )
        )
    return [*kept, points[-1]]
