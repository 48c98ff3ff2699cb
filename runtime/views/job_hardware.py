"""Job views: a job on its nodes, the slowest rank, why it waits, and its measures by step.

The files of nodes are those of scheduler/sampler.py, in the folder of the job, or of the session
that trained it; a replica's are in a folder that is named as its log. A damaged line, or one that
is still written, is left out. Called by gateway/routes/jobs.py, `jobs show --hardware` and
`status --hardware`.
"""

import fnmatch
import os
from collections.abc import Iterable, Sequence
from contextlib import suppress
from functools import lru_cache
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.paths import HARDWARE, Home
from cray_agents.records import Record
from cray_agents.runtime.disk import journal
from cray_agents.runtime.scheduler.slurm_reports import SlurmUsage, describe_reason, read_usage
from cray_agents.training_jobs import JobStatus

NOT_FIGURES = {"event", "time"}
ASKED_AGAIN = 60.0  # seconds after which Slurm is asked anew for the account of a job


class NodeHardware(Record):
    """The load of a node that trains a job or holds a replica, and its GPUs.

    `series[name]` are [time, value], thinned as in JobSeries. `newest`: the figures of the last
    sample at `time`, with texts. What a device does not measure is missing, never 0.
    """

    node: str
    time: float | None
    gpus: list[dict[str, Any]]
    newest: dict[str, float | str]
    series: dict[str, list[tuple[float, float]]]


class SlowRank(Record):
    """The last rank whose own work of a step took much longer than the median rank's (seconds)."""

    rank: int
    node: str
    seconds: float
    median: float
    steps: int
    after_step: int


class JobWait(Record):
    """Why a job waits: Slurm's word, what it means, and the next step."""

    reason: str
    meaning: str
    next: str


class JobHardware(Record):
    """A job on its nodes. `names`: all series of the nodes here. `slurm`: Slurm's own account."""

    id: str
    names: list[str]
    nodes: list[NodeHardware]
    has_more: bool
    slowest: SlowRank | None
    waits: JobWait | None
    slurm: SlurmUsage | None


def job_hardware(
    home: Home,
    status: JobStatus,
    names: Sequence[str] = (),
    points: int = 600,
    *,
    limit: int = 8,
    after: str = "",
    now: float = 0.0,
) -> JobHardware:
    """Return a job's nodes in the order of their names, `limit` of them behind `after`.

    `names`: of series; all unless given. `now`: for the account of Slurm, which is asked once a
    minute. Raises BadInput for a series that no node of this page has.
    """
    events = job_events(home, status.id)
    files = _files(home, status)
    chosen = [node for node in sorted(files) if node > after][:limit]
    within = (0.0, float("inf"))
    if status.session:  # whose files have more than this job
        times = [event["time"] for event in events] or [0.0]
        within = (min(times), max(times))
    nodes = [_read_node(node, files[node], within) for node in chosen]
    known = list(dict.fromkeys(name for node in nodes for name in node.series))
    if known and (unknown := [name for name in names if name not in known]):
        raise BadInput(f"no node has {unknown[0]!r}: {', '.join(known)}", param="names")
    for node in nodes:
        node.series.update({name: thinned(series, points) for name, series in node.series.items()})
        for name in node.series.keys() - set(names or known):
            del node.series[name]
    slowest = waits = usage = None
    if slow := [event for event in events if event["event"] == "straggler"]:
        slowest = SlowRank(**{name: slow[-1][name] for name in SlowRank.model_fields})
    if status.state == "queued" and status.reason:
        meaning, step = describe_reason(status.reason)
        waits = JobWait(reason=status.reason, meaning=meaning, next=step)
    if status.scheduler == "slurm" and status.scheduler_job_id.isdecimal():
        name = status.session or status.id
        usage = _asked_usage(status.scheduler_job_id, name, int(now // ASKED_AGAIN))
    return JobHardware(
        id=status.id,
        names=known,
        nodes=nodes,
        has_more=any(node > chosen[-1] for node in files) if chosen else False,
        slowest=slowest,
        waits=waits,
        slurm=usage,
    )


def pool_hardware(home: Home, points: int = 600) -> list[NodeHardware]:
    """Return the nodes of all replicas, each under the replica's name and its own."""
    files: dict[str, list[Path]] = {}
    for folder in (home.logs, home.replicas):
        found = []
        for place, _, names in os.walk(folder):
            for path in (Path(place, name) for name in fnmatch.filter(names, f"{HARDWARE}*.jsonl")):
                with suppress(FileNotFoundError):  # an older attempt is removed meanwhile
                    found.append((path.stat().st_mtime, path))
        for _, path in sorted(found):
            node = path.name.removeprefix(HARDWARE).removesuffix(".jsonl")
            name = f"{path.relative_to(folder).parts[0].partition('.')[0]} on {node}"
            files.setdefault(name, []).append(path)
    nodes = [_read_node(name, paths, (0.0, float("inf"))) for name, paths in sorted(files.items())]
    for one in nodes:
        one.series.update({name: thinned(series, points) for name, series in one.series.items()})
    return nodes


def _files(home: Home, status: JobStatus) -> dict[str, list[Path]]:
    """Return the files of each node."""
    folders = [home.job(status.id)]
    if status.session:
        folders.append(home.sessions / status.session)
    files: dict[str, list[Path]] = {}
    for folder in folders:
        for path in folder.glob(f"{HARDWARE}*.jsonl"):
            node = path.name.removeprefix(HARDWARE).removesuffix(".jsonl")
            files.setdefault(node, []).append(path)
    return files


def _read_node(node: str, files: Iterable[Path], within: tuple[float, float]) -> NodeHardware:
    gpus: list[dict[str, Any]] = []
    newest: dict[str, Any] = {}
    series: dict[str, list[Point]] = {}
    time = None
    for path in files:
        for values in journal.read(path, damaged="skip"):
            if values.get("event") == "node":
                gpus = values.get("gpus", [])
            elif within[0] <= values["time"] <= within[1]:
                time = values["time"]
                newest = {name: v for name, v in values.items() if name not in NOT_FIGURES}
                for name, value in newest.items():
                    if isinstance(value, int | float):
                        series.setdefault(name, []).append((time, float(value)))
    return NodeHardware(node=node, time=time, newest=newest, series=series, gpus=gpus)


@lru_cache(64)
def _asked_usage(scheduler_job_id: str, name: str, minute: int) -> SlurmUsage:
    return read_usage(scheduler_job_id, name)


# ---- measures by step
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
