"""histogram.html: a self-contained page of figures about a dataset.

`Histograms` counts runs and samples one by one and keeps only the counts. Each figure is a few bars
of inline SVG, with its numbers in a table below: the same bytes on every machine. Called by
counts.py and draft.py.
"""

import math
from collections import Counter
from collections.abc import Mapping
from html import escape
from pathlib import Path
from typing import NamedTuple

from cray_agents.runtime.disk import durable

PAGE = "histogram.html"
TOP = 20  # versions shown
EXACT = 2_000  # different values counted exactly
BARS = 24  # bars of a figure, at most
FINEST = 2.0**-20  # the first step of values that are not counted exactly
WIDTH, HEIGHT, GAP = 640, 160, 2  # of a figure's bars, in SVG units

STYLE = """
:root { color-scheme: light dark; --bar: #2f6fb0; --line: #c8ccd2; --soft: #5a6270; }
@media (prefers-color-scheme: dark) {
  :root { --bar: #7db4ea; --line: #444b55; --soft: #a8b0bc; }
}
body { font: 16px/1.5 system-ui, sans-serif; max-width: 44rem; margin: 2rem auto; padding: 0 1rem; }
figure { margin: 0 0 1rem; }
svg { width: 100%; height: auto; display: block; border-bottom: 1px solid var(--line); }
rect { fill: var(--bar); }
p, summary, figcaption { color: var(--soft); }
figcaption { display: flex; justify-content: space-between; font-size: 0.85rem; }
table { border-collapse: collapse; font-variant-numeric: tabular-nums; }
th, td { text-align: right; padding: 0.1rem 1rem 0.1rem 0; border-bottom: 1px solid var(--line); }
"""


class ValueCounts:
    """Counts of numbers in constant memory: exact for few different ones, else in steps.

    Steps are powers of two and double when necessary, so the order of the numbers does not matter.
    """

    def __init__(self) -> None:
        self._counts: Counter[float] = Counter()
        self._step = 0.0  # 0: values are exact
        self.count = 0
        self.total = 0.0
        self.least, self.most = math.inf, -math.inf

    def add(self, value: float, times: int = 1) -> None:
        """Count a finite value."""
        self.count += times
        self.total += value * times
        self.least, self.most = min(self.least, value), max(self.most, value)
        self._counts[self._round_down(value)] += times
        while len(self._counts) > EXACT:
            self._step = self._step * 2 or FINEST
            counts, self._counts = self._counts, Counter()
            for old, n in counts.items():
                self._counts[self._round_down(old)] += n

    def _round_down(self, value: float) -> float:
        return math.floor(value / self._step) * self._step if self._step else value

    def rows(self) -> list[tuple[str, int]]:
        """Return (label, count) for each of few values, or for ranges (`2 – 4` excludes 4)."""
        if len(self._counts) <= BARS // 2 and not self._step:
            return [(_format_number(value), self._counts[value]) for value in sorted(self._counts)]
        step = _round_step(max(self.most - self.least, self._step) / BARS, whole=self._all_whole())
        counts: Counter[int] = Counter()
        for value, n in self._counts.items():
            counts[math.floor(value / step)] += n
        first, last = min(counts), max(counts)
        return [(_range_label(index, step), counts[index]) for index in range(first, last + 1)]

    def about(self) -> str:
        """Return a line with the count, the range and the mean of the values."""
        if not self.count:
            return "none"
        numbers = (self.least, self.most, self.total / self.count)
        least, most, mean = map(_format_number, numbers)
        return f"{self.count:,} values, {least} to {most}, mean {mean}"

    def _all_whole(self) -> bool:
        return all(value == int(value) for value in self._counts)


def _format_number(value: float) -> str:
    """Format a number for people."""
    return f"{value:,.0f}" if value == int(value) else f"{value:,.4g}"


def _round_step(step: float, *, whole: bool) -> float:
    """Round a step up to 1, 2 or 5 times a power of ten, and to at least 1 for whole numbers."""
    if whole:
        step = max(step, 1.0)
    power = 10.0 ** math.floor(math.log10(step))
    return next(factor * power for factor in (1, 2, 5, 10) if factor * power >= step * (1 - 1e-9))


def _range_label(index: int, step: float) -> str:
    if step == 1:
        return _format_number(index)
    first, last = (_format_number(round(n * step, 12)) for n in (index, index + 1))
    return f"{first} – {last}"


class Figure(NamedTuple):
    """A figure: its title, a line about it, and its bars as (label, count)."""

    title: str
    about: str
    rows: list[tuple[str, int]]


class Histograms:
    """Distributions of the runs and samples of a dataset."""

    def __init__(self) -> None:
        self._rewards, self._turns, self._calls = ValueCounts(), ValueCounts(), ValueCounts()
        self._tokens, self._trained, self._advantages = ValueCounts(), ValueCounts(), ValueCounts()
        self._per_task = ValueCounts()
        self.versions: Counter[str] = Counter()  # trained tokens by `name@N`
        self._task: str | None = None
        self._task_runs = 0  # accepted runs of that task

    def add_run(
        self,
        *,
        reward: float | None,
        turns: int,
        calls: int,
        task: str | None,
        accepted: bool,
    ) -> None:
        """Count a considered run. Runs of one task must be consecutive."""
        if task != self._task:
            self._end_task()
            self._task = task
        if not accepted:
            return
        self._task_runs += 1
        self._turns.add(turns)
        self._calls.add(calls)
        if reward is not None:
            self._rewards.add(reward)

    def add_sample(
        self,
        *,
        tokens: int,
        trained: int,
        advantage: float | None = None,
        versions: Mapping[str, int] | None = None,
    ) -> None:
        """Count a sample of the dataset. `versions`: its trained tokens by `name@N`."""
        self._tokens.add(tokens)
        self._trained.add(trained)
        if advantage is not None:
            self._advantages.add(advantage)
        if versions:
            self.versions.update(versions)

    def rewards(self) -> list[tuple[str, int]]:
        """Return the rewards of the accepted runs as (label, count)."""
        return self._rewards.rows() if self._rewards.count else []

    def figures(self) -> list[Figure]:
        """Return every figure with at least one value."""
        self._end_task()
        tallies = [
            ("Reward of a run", self._rewards),
            ("Tokens in a sample", self._tokens),
            ("Trained tokens in a sample", self._trained),
            ("Advantage of a sample", self._advantages),
            ("Turns of a run", self._turns),
            ("Model calls of a run", self._calls),
            ("Accepted runs of a task", self._per_task),
        ]
        figures = [
            Figure(title, tally.about(), tally.rows()) for title, tally in tallies if tally.count
        ]
        if self.versions:
            about = f"{len(self.versions):,} versions sampled what is trained on"
            top = sorted(self.versions.items(), key=lambda item: (-item[1], item[0]))[:TOP]
            figures.append(Figure("Trained tokens by version", about, top))
        return figures

    def write(self, path: Path, *, title: str) -> None:
        """Write the page. `title` is the id of the dataset."""
        body = "\n".join(_html(n, figure) for n, figure in enumerate(self.figures()))
        durable.write_file(path, HTML.format(title=escape(title), style=STYLE, body=body).encode())

    def _end_task(self) -> None:
        if self._task is not None:
            self._per_task.add(self._task_runs)
        self._task, self._task_runs = None, 0


HTML = """<!doctype html>
<html lang="en">
<head>
<meta charset="utf-8"/>
<meta name="viewport" content="width=device-width, initial-scale=1"/>
<title>{title}</title>
<style>{style}</style>
</head>
<body>
<h1>{title}</h1>
<p>What this training set is made of. Its card is README.md, and manifest.json has the counts.</p>
{body}
</body>
</html>
"""


def _html(number: int, figure: Figure) -> str:
    rows = "\n".join(
        f'<tr><th scope="row">{escape(label)}</th><td>{count:,}</td></tr>'
        for label, count in figure.rows
    )
    first, last = escape(figure.rows[0][0]), escape(figure.rows[-1][0])
    return f"""<section>
<h2>{escape(figure.title)}</h2>
<p>{escape(figure.about)}</p>
<figure>
{_bars(number, figure)}
<figcaption><span>{first}</span><span>{last if len(figure.rows) > 1 else ""}</span></figcaption>
</figure>
<details open="open">
<summary>The numbers</summary>
<table>
<thead><tr><th scope="col">{escape(figure.title)}</th><th scope="col">Count</th></tr></thead>
<tbody>
{rows}
</tbody>
</table>
</details>
</section>"""


def _bars(number: int, figure: Figure) -> str:
    most = max(count for _, count in figure.rows)
    step = WIDTH / len(figure.rows)
    bars = []
    for index, (label, count) in enumerate(figure.rows):
        height = HEIGHT * count / most if most else 0.0
        bars.append(
            f'<rect x="{index * step:.1f}" y="{HEIGHT - height:.1f}" width="{step - GAP:.1f}" '
            f'height="{height:.1f}"><title>{escape(label)}: {count:,}</title></rect>'
        )
    highest = max(figure.rows, key=lambda row: row[1])
    about = f"{figure.about}; most often {highest[0]} ({highest[1]:,})"
    names = f"title-{number} about-{number}"
    return (
        f'<svg viewBox="0 0 {WIDTH} {HEIGHT}" role="img" aria-labelledby="{names}">\n'
        f'<title id="title-{number}">{escape(figure.title)}</title>\n'
        f'<desc id="about-{number}">{escape(about)}</desc>\n' + "\n".join(bars) + "\n</svg>"
    )
