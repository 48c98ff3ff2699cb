"""Metrics history: a day of samples on this host's own disk, so that pages have curves.

    <host cache>/<root>/metrics-<id>/<time>-<writer>.jsonl   at most an hour of samples each

A line is a sample of all series, with a checksum:

    {"t": Unix seconds, "whole": true, "names": [...], "at": [...], "v": [...]}

`names` are series that this file did not have before, numbered in their order. `at` are numbers of
series, and `v` their values; null: the series is gone. A line has only what changed since the line
before. Every `WHOLE`-th line has everything, and in `all` the names. So a damaged line costs the
samples up to the next whole one, in its own file.

A file has one writer, which begins a new one at its start and every hour. Files older than `KEPT`
seconds are deleted, and the oldest while all have more than `MOST_BYTES`. The gateway's Services
keep it; routes/observability.py reads it.
"""

import asyncio
import bisect
import hashlib
import logging
import time
from collections.abc import Awaitable, Callable, Container, Iterable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson
from prometheus_client import Metric

from cray_agents.errors import Corrupt
from cray_agents.records import new_id
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.disk.group_commit import LineFile

EVERY = 10.0  # seconds between two samples
KEPT = 24 * 3600.0  # seconds
FILE_SECONDS = 3600.0
WHOLE = 60  # lines
MOST_SERIES = 3000  # of a sample; further ones are left out
MOST_BYTES = 128 << 20  # of all files
MOST_POINTS = 5000  # of a series in an answer
_END = ".jsonl"

log = logging.getLogger(__name__)


def series_of(metrics: Iterable[Metric]) -> dict[str, float]:
    """Return the value of each series, by its name as Prometheus writes it."""
    return {
        series_name(sample.name, sample.labels): float(sample.value)
        for metric in metrics
        for sample in metric.samples
        if not sample.name.endswith("_created")
    }


def series_name(name: str, labels: dict[str, str]) -> str:
    """Return `name{label="value",...}`, with the labels in the order of their names."""
    if not labels:
        return name
    inside = orjson.dumps(labels, option=orjson.OPT_SORT_KEYS).decode()
    return f"{name}{inside}"


def parse_series(series: str) -> tuple[str, dict[str, str]]:
    """Return name and labels of a series."""
    name, brace, inside = series.partition("{")
    return name, orjson.loads(brace + inside) if brace else {}


def history_folder(cache: Path, root_id: str) -> Path:
    """Return the folder of a root's history in the host's cache of that root.

    A root that was made anew at the same path has another id, and another history.
    """
    return cache / f"metrics-{hashlib.sha256(root_id.encode()).hexdigest()[:16]}"


class HistoryWriter:
    """The writer of samples; its first sample begins a new file. Raises OSError."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._file: LineFile | None = None
        self._begun = 0.0
        self._lines = 0
        self._numbers: dict[str, int] = {}
        self._last: dict[str, float] = {}

    def write(self, now: float, values: dict[str, float]) -> None:
        """Append a sample; `now` in Unix seconds."""
        if self._file is None or not 0 <= now - self._begun < FILE_SECONDS:
            self._begin(now)
        assert self._file is not None
        values = dict(sorted(values.items())[:MOST_SERIES])
        gone = {series: float("nan") for series in self._last.keys() - values.keys()}
        whole = self._lines % WHOLE == 0
        changed = {
            series: value
            for series, value in (values | gone).items()
            if whole or self._last.get(series) != value
        }
        names = [series for series in changed if series not in self._numbers]
        numbers = self._numbers | {
            series: number for number, series in enumerate(names, len(self._numbers))
        }
        line = {
            "t": now,
            "whole": whole,
            "names": names,
            "at": [numbers[series] for series in changed],
            "v": list(changed.values()),  # NaN becomes null: the series is gone
        }
        if whole:
            line |= {"all": list(numbers)}
        self._file.append([checksums.with_crc(orjson.dumps(line))])
        self._numbers, self._last = numbers, values
        self._lines += 1

    def close(self) -> None:
        """Close the file."""
        if self._file is not None:
            self._file.close()
            self._file = None

    def _begin(self, now: float) -> None:
        self.close()
        delete_old(self._folder, now)
        self._file = LineFile(self._folder / f"{int(now):011d}-{new_id('metrics')}{_END}")
        self._begun, self._lines, self._numbers, self._last = now, 0, {}, {}


def delete_old(folder: Path, now: float) -> None:
    """Delete files of samples older than a day, and the oldest while all are too large."""
    sizes = {path: path.stat().st_size for path in folder.glob(f"*{_END}")}
    for path in sorted(sizes):
        begun = _begin_of(path)
        if begun < now - KEPT - FILE_SECONDS or sum(sizes.values()) > MOST_BYTES:
            path.unlink(missing_ok=True)
            del sizes[path]


def read_samples(
    folder: Path, begin: float, end: float, wanted: Container[str] | None = None
) -> Iterator[tuple[float, dict[str, float]]]:
    """Yield the time and the values of each sample from `begin` to `end`, in order of the files.

    `wanted`: only the series of these names; None: all.
    """
    for path in sorted(folder.glob(f"*{_END}")):
        if _begin_of(path) > end or _begin_of(path) + FILE_SECONDS + EVERY < begin:
            continue
        try:
            lines = path.read_bytes().split(b"\n")[:-1]
        except OSError as error:
            log.warning("%s cannot be read: %s", path, error)
            continue
        for at, values in _replay(path, lines, wanted):
            if begin <= at <= end:
                yield at, values


def _replay(
    path: Path, lines: Sequence[bytes], wanted: Container[str] | None
) -> Iterator[tuple[float, dict[str, float]]]:
    names: list[str | None] = []  # None: not wanted
    values: dict[str, float] | None = None  # None: unknown until the next whole line

    def chosen(listed: Iterable[str]) -> list[str | None]:
        return [n if wanted is None or n.partition("{")[0] in wanted else None for n in listed]

    for number, line in enumerate(lines, 1):
        try:
            sample = checksums.parse(line, f"{path}: line {number}")
            if sample["whole"]:
                names, values = chosen(sample["all"]), {}
            elif values is not None:
                names += chosen(sample["names"])
            if values is None:
                continue
            changed = zip([names[at] for at in sample["at"]], sample["v"], strict=True)
            news = {name: value for name, value in changed if name is not None}
        except (Corrupt, KeyError, IndexError, TypeError, ValueError) as error:
            log.warning("samples are left out: %s", error)
            values = None
            continue
        values = {name: v for name, v in (values | news).items() if v is not None}
        yield float(sample["t"]), values


def _begin_of(path: Path) -> float:
    begun = path.name.partition("-")[0]
    return float(begun) if begun.isdecimal() else 0.0


@dataclass
class MetricCurve:
    """A series: its name, labels, and points of (Unix seconds, value) in the order of time."""

    name: str
    labels: dict[str, str]
    points: list[tuple[float, float]] = field(default_factory=list)


def read_curves(
    folder: Path, names: Sequence[str], begin: float, end: float, points: int
) -> list[MetricCurve]:
    """Return the series of these metrics, each with the last value of every interval.

    An interval has (end - begin) / points seconds. A name is that of a sample
    (`cray_requests_total`) or of a family (`cray_requests`).
    """
    wanted = {f"{name}{suffix}" for name in names for suffix in ("", *_SUFFIXES)}
    edges = [begin + (end - begin) * number / points for number in range(1, points)]
    curves: dict[str, dict[int, tuple[float, float]]] = {}
    for at, values in read_samples(folder, begin, end, wanted):
        interval = bisect.bisect_left(edges, at)
        for series, value in values.items():
            curves.setdefault(series, {})[interval] = (at, value)
    return [
        MetricCurve(*parse_series(series), [by_interval[n] for n in sorted(by_interval)])
        for series, by_interval in sorted(curves.items())
    ]


_SUFFIXES = ("_total", "_sum", "_count", "_bucket")


def known_names(folder: Path, now: float) -> list[str]:
    """Return the names of the samples of the last hour."""
    names = {
        series.partition("{")[0]
        for _, values in read_samples(folder, now - FILE_SECONDS, now)
        for series in values
    }
    return sorted(names)


async def keep_history(
    folder: Path,
    sample: Callable[[], Awaitable[dict[str, float]]],
    *,
    every: float = EVERY,
) -> None:
    """Write a sample every `every` seconds, until cancelled. What fails is logged and left out."""
    writer = HistoryWriter(folder)
    try:
        while True:
            try:
                values = await sample()
                await asyncio.to_thread(writer.write, time.time(), values)
            except OSError as error:
                log.warning("a sample of the metrics is left out: %s", error)
                writer.close()
            await asyncio.sleep(every)
    finally:
        writer.close()


def curve_json(curve: MetricCurve) -> dict[str, Any]:
    """Return a curve as the gateway answers it."""
    return {"name": curve.name, "labels": curve.labels, "points": curve.points}
