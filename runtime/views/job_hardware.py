"""Job hardware: a job on its nodes. Their load, the slowest rank, and why it waits.

The files are those of telemetry/sampler.py, in the folder of the job, or of the session that
trained it. A damaged line, or one that is still written, is left out. Called by
gateway/routes/jobs.py and `jobs show --hardware`.
"""

from collections.abc import Iterable, Sequence
from functools import lru_cache
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.disk import journal
from cray_agents.runtime.scheduler.slurm_reports import SlurmUsage, describe_reason, read_usage
from cray_agents.runtime.telemetry.sampler import PREFIX
from cray_agents.runtime.views.hardware_records import (
    JobHardware,
    JobWait,
    NodeHardware,
    SlowRank,
)
from cray_agents.runtime.views.job_series import Point, job_events, thinned
from cray_agents.training_jobs import JobStatus

NOT_FIGURES = {"event", "time"}
ASKED_AGAIN = 60.0  # seconds after which Slurm is asked anew for the account of a job


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
    within = _times(events) if status.session else (0.0, float("inf"))
    nodes = [_read_node(node, files[node], within) for node in chosen]
    known = list(dict.fromkeys(name for node in nodes for name in node.series))
    if known and (unknown := [name for name in names if name not in known]):
        raise BadInput(f"no node has {unknown[0]!r}: {', '.join(known)}", param="names")
    for node in nodes:
        node.series.update({name: thinned(series, points) for name, series in node.series.items()})
        for name in node.series.keys() - set(names or known):
            del node.series[name]
    return JobHardware(
        id=status.id,
        names=known,
        nodes=nodes,
        has_more=any(node > chosen[-1] for node in files) if chosen else False,
        slowest=_slowest(events),
        waits=_wait(status),
        slurm=_usage(status, now),
    )


def _files(home: Home, status: JobStatus) -> dict[str, list[Path]]:
    """Return the files of each node."""
    folders = [home.job(status.id)]
    if status.session:
        folders.append(home.sessions / status.session)
    files: dict[str, list[Path]] = {}
    for folder in folders:
        for path in folder.glob(f"{PREFIX}*.jsonl"):
            files.setdefault(path.name.removeprefix(PREFIX).removesuffix(".jsonl"), []).append(path)
    return files


def _times(events: Iterable[dict[str, Any]]) -> tuple[float, float]:
    """Return when a job began and ended in its session, as far as its events tell."""
    times = [event["time"] for event in events]
    return (min(times), max(times)) if times else (0.0, 0.0)


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


def _slowest(events: Iterable[dict[str, Any]]) -> SlowRank | None:
    """Return the last straggler that the trainer found."""
    slow = [event for event in events if event["event"] == "straggler"]
    return SlowRank(**{name: slow[-1][name] for name in SlowRank.model_fields}) if slow else None


def _wait(status: JobStatus) -> JobWait | None:
    """Return why a job waits in its queue; None if it does not, or nobody said why."""
    if status.state != "queued" or not status.reason:
        return None
    meaning, step = describe_reason(status.reason)
    return JobWait(reason=status.reason, meaning=meaning, next=step)


def _usage(status: JobStatus, now: float) -> SlurmUsage | None:
    """Return Slurm's account of a job; None for one that Slurm did not run."""
    if status.scheduler != "slurm" or not status.scheduler_job_id.isdecimal():
        return None
    name = status.session or status.id
    return _asked_usage(status.scheduler_job_id, name, int(now // ASKED_AGAIN))


@lru_cache(64)
def _asked_usage(scheduler_job_id: str, name: str, minute: int) -> SlurmUsage:
    return read_usage(scheduler_job_id, name)
