"""Curves of training jobs, from their events: a panel per measure, a curve per job.

The panel of the loss also has the loss of the validation split. For `jobs plot`.
"""

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import groupby, pairwise
from operator import itemgetter
from pathlib import Path
from typing import Any

from rich.text import Text

from cray_agents.cli.job_page import USUAL
from cray_agents.errors import BadInput
from cray_agents.trainers.job.journal import measures

Events = Sequence[dict[str, Any]]
Point = tuple[int, float]  # step, value

EVALUATION = "evaluation_"  # prefix of measures on the validation split


@dataclass(frozen=True)
class Curve:
    """Finite values of one measure by step, in order."""

    label: str
    points: list[Point]


@dataclass(frozen=True)
class Panel:
    """A measure, with a curve for each job that recorded it."""

    name: str
    curves: list[Curve]


def make_panels(jobs: Mapping[str, Events], wanted: Sequence[str], *, join: bool) -> list[Panel]:
    """Return a panel for each wanted measure of some jobs' events.

    Without `wanted`: the loss and all that their methods measure. With `join` each job goes on
    where the one before it ended, so that a loop's generations are one curve. Raises BadInput for
    a measure that no job recorded.
    """
    known = {label: _series(events) for label, events in jobs.items()}
    names = list(dict.fromkeys(name for series in known.values() for name in series))
    if not names:
        raise BadInput(f"nothing to plot: no step is done yet in {', '.join(jobs)}", param="job_id")
    if unknown := [name for name in wanted if name not in names]:
        raise BadInput(f"no {', '.join(unknown)}; there are {', '.join(names)}", param="what")
    chosen = wanted or [n for n in names if n == "loss" or _of_method(n)]
    if join:
        known = {f"{len(jobs)} jobs": _join(list(known.values()))}
    return [Panel(name, list(_curves(known, name))) for name in chosen]


def _series(events: Events) -> dict[str, list[Point]]:
    """Return all that a job measured, by name, without values that were not finite."""
    series: dict[str, list[Point]] = {}
    for event in events:
        if event["event"] not in ("step", "evaluation"):
            continue
        before = EVALUATION if event["event"] == "evaluation" else ""
        for name, value in measures(event).items():
            if isinstance(value, int | float):
                series.setdefault(before + name, []).append((event["step"], value))
    return series


def _of_method(name: str) -> bool:
    return name not in USUAL and not name.startswith(EVALUATION)


def _join(jobs: list[dict[str, list[Point]]]) -> dict[str, list[Point]]:
    """Put jobs one after the other, with steps counted through."""
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


COLORS = ("cyan", "magenta", "yellow", "green", "red", "blue")
HEIGHT = 10  # characters
LABEL = 10  # columns for the numbers on the left
WIDE, HIGH, DPI = 9.0, 3.0, 100  # inches of a panel in a PNG, and its resolution
FEW = 40  # points of a curve that are each marked in a PNG
_DOTS = ((0x01, 0x08), (0x02, 0x10), (0x04, 0x20), (0x40, 0x80))  # [row][column] of a character


def draw_panel(panel: Panel, width: int) -> Text:
    """Draw a panel for the terminal: curves between the axes, then a line of text per curve."""
    wide = max(10, width - LABEL - 2)
    low, high = _range([value for curve in panel.curves for _, value in curve.points])
    first, last = _range([step for curve in panel.curves for step, _ in curve.points])
    cells: dict[tuple[int, int], tuple[int, int]] = {}  # (row, column) -> (dots, curve)
    for number, curve in enumerate(panel.curves):
        across = [_place(step, first, last, 2 * wide) for step, _ in curve.points]
        down = [_place(-value, -high, -low, 4 * HEIGHT) for _, value in curve.points]
        for x, y in _line(across, down):
            dots = cells.get((y // 4, x // 2), (0, 0))[0]
            cells[y // 4, x // 2] = (dots | _DOTS[y % 4][x % 2], number)
    margin, numbers = " " * LABEL, {0: high, HEIGHT // 2: (low + high) / 2, HEIGHT - 1: low}
    picture = Text(overflow="fold")
    picture.append(f"{panel.name}\n", style="bold")
    for row in range(HEIGHT):
        picture.append(f"{_format_number(numbers.get(row)):>{LABEL}} │")
        line = [cells.get((row, column), (0, -1)) for column in range(wide)]
        for number, same in groupby(line, key=itemgetter(1)):
            text = "".join(chr(0x2800 + dots) if dots else " " for dots, _ in same)
            picture.append(text, style=_color(number) if number >= 0 else "")
        picture.append("\n")
    picture.append(f"{margin} └{'─' * wide}\n{margin}  {first:<{wide - len(str(last))}}{last}\n")
    for number, curve in enumerate(panel.curves):
        picture.append(f"{margin}  {_legend(curve)}\n", style=_color(number))
    return picture


def _range(numbers: list[Any]) -> tuple[Any, Any]:
    return min(numbers), max(numbers)


def _place(value: float, low: float, high: float, dots: int) -> int:
    """Return the index of a value's dot, of so many dots from low to high."""
    return round((value - low) / (high - low) * (dots - 1)) if high > low else dots // 2


def _line(across: list[int], down: list[int]) -> Iterator[tuple[int, int]]:
    """Yield the dots of the line from each point to the next."""
    places = list(zip(across, down, strict=True))
    yield places[0]
    for (x, y), (to_x, to_y) in pairwise(places):
        far = max(abs(to_x - x), abs(to_y - y))
        for part in range(1, far + 1):
            yield x + round((to_x - x) * part / far), y + round((to_y - y) * part / far)


def _legend(curve: Curve) -> str:
    step, lowest = min(curve.points, key=lambda point: point[1])
    first, last = _format_number(curve.points[0][1]), _format_number(curve.points[-1][1])
    return f"{curve.label}: {first} → {last}, lowest {_format_number(lowest)} at step {step}"


def _format_number(value: float | None) -> str:
    return "" if value is None else f"{value:.4g}"


def _color(number: int) -> str:
    return COLORS[number % len(COLORS)]


def write_png(panels: Sequence[Panel], path: Path) -> None:
    """Write the panels below each other. Raises BadInput."""
    from matplotlib.figure import Figure

    if not path.parent.is_dir():
        raise BadInput(f"there is no directory {path.parent} to write {path.name} to", param="png")
    picture = Figure(figsize=(WIDE, HIGH * len(panels)), layout="constrained")
    for axes, panel in zip(picture.subplots(len(panels), squeeze=False)[:, 0], panels, strict=True):
        for curve in panel.curves:
            few = len(curve.points) <= FEW
            axes.plot(*zip(*curve.points, strict=True), "o-" if few else "-", label=curve.label)
        axes.set(title=panel.name.replace("_", " "), xlabel="step")
        axes.grid(alpha=0.3)
        axes.legend(fontsize=8)
    picture.savefig(path, dpi=DPI, format="png")
