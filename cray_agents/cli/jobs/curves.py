"""Curves of training jobs, from their events: a panel per measure, a curve per job.

The loss has that of the validation split in the same panel. For `jobs plot`. Read next:
job_plots.py, which draws them.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from cray_agents.cli.jobs.event_text import USUAL
from cray_agents.errors import BadInput
from cray_agents.trainers.job.journal import measures

Events = Sequence[dict[str, Any]]
Point = tuple[int, float]  # step, value

EVALUATION = "evaluation_"  # before the names of what is measured on the validation split


@dataclass(frozen=True)
class Curve:
    """Finite values by step, in order."""

    label: str
    points: list[Point]


@dataclass(frozen=True)
class Panel:
    """What was measured, and a curve for each job that did."""

    name: str
    curves: list[Curve]


def panels(jobs: Mapping[str, Events], wanted: Sequence[str], *, join: bool) -> list[Panel]:
    """What to draw of some jobs' events; all that their methods measure if nothing is `wanted`.

    With `join` each job goes on where the one before it ended: a loop's generations are one curve.
    Raises BadInput for what none of them measured.
    """
    known = {label: _series(events) for label, events in jobs.items()}
    names = list(dict.fromkeys(name for series in known.values() for name in series))
    if not names:
        raise BadInput(f"nothing to plot: no step is done yet in {', '.join(jobs)}", param="job_id")
    if unknown := [name for name in wanted if name not in names]:
        raise BadInput(f"no {', '.join(unknown)}; there are {', '.join(names)}", param="what")
    chosen = wanted or [n for n in names if n == "loss" or _of_method(n)]
    if join:
        known = {f"{len(jobs)} jobs": _joined(list(known.values()))}
    return [Panel(name, list(_curves(known, name))) for name in chosen]


def _series(events: Events) -> dict[str, list[Point]]:
    """All that a job measured, by name; what was not finite is left out."""
    found: dict[str, list[Point]] = {}
    for event in events:
        if event["event"] not in ("step", "evaluation"):
            continue
        before = EVALUATION if event["event"] == "evaluation" else ""
        for name, value in measures(event).items():
            if isinstance(value, int | float):
                found.setdefault(before + name, []).append((event["step"], value))
    return found


def _of_method(name: str) -> bool:
    return name not in USUAL and not name.startswith(EVALUATION)


def _joined(jobs: list[dict[str, list[Point]]]) -> dict[str, list[Point]]:
    """One after the other, by the steps of all."""
    whole: dict[str, list[Point]] = {}
    before = 0
    for series in jobs:
        for name, points in series.items():
            whole.setdefault(name, []).extend((step + before, value) for step, value in points)
        before += max((points[-1][0] for points in series.values()), default=0)
    return whole


def _curves(known: Mapping[str, dict[str, list[Point]]], name: str) -> Iterator[Curve]:
    for label, series in known.items():
        if name in series:
            yield Curve(label, series[name])
        if name == "loss" and EVALUATION + name in series:
            yield Curve(f"{label}, validation", series[EVALUATION + name])
