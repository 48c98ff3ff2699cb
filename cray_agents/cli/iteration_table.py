"""Loop screen: a table of iterations, and a line about the current phase.

On a terminal the table is drawn in place; in a log each phase and each iteration gets a line.
"""

import time
from collections.abc import Sequence
from types import TracebackType

from rich.console import Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from cray_agents.cli.screen import clock, errors, note
from cray_agents.iteration import COLUMNS, Iteration, LoopProgress, row

LEGEND = (
    "held-out: mean reward on tasks that no training sees, which decides promotion; "
    "good: the share of runs with the reward of a good one; "
    "set: samples trained on, and how often each"
)


class LoopScreen:
    """A live view of LoopProgress and Iterations. A context manager."""

    def __init__(self, title: str = "", iterations: int = 0, *, enabled: bool = True) -> None:
        self.title = title
        self.iterations = iterations
        self._enabled = enabled
        self._done: list[Iteration] = []
        self._now = LoopProgress(0, "starting")
        self._started = self._phase_started = time.monotonic()
        self._live = Live(
            get_renderable=self.draw, console=errors, refresh_per_second=4, transient=True
        )
        self._in_place = enabled and errors.is_terminal

    def __enter__(self) -> "LoopScreen":
        if self._in_place:
            self._live.start()
        return self

    def __exit__(
        self,
        kind: type[BaseException] | None,
        error: BaseException | None,
        traceback: TracebackType | None,
    ) -> None:
        if self._in_place:
            self._live.stop()

    @property
    def elapsed(self) -> float:
        """Seconds since this screen was made."""
        return time.monotonic() - self._started

    def say(self, phase: str) -> None:
        """Show a phase outside the loop."""
        self.progress(LoopProgress(0, phase))

    def progress(self, now: LoopProgress) -> None:
        """Show the loop's progress."""
        before, self._now = self._now, now
        if (before.phase, before.iteration) != (now.phase, now.iteration):
            self._phase_started = time.monotonic()
            if self._enabled and not self._in_place:
                total = f" ({now.total})" if now.total else ""
                why = f" {now.note}" if now.note else ""
                note(f"{clock(self.elapsed)} iteration {now.iteration}: {now.phase}{total}{why}")

    def iteration(self, iteration: Iteration) -> None:
        """Show an iteration that ended."""
        self._done.append(iteration)
        if self._enabled and not self._in_place:
            cells = row(iteration)
            columns = [name for name in COLUMNS[:-1] if cells[name] != "-"]
            text = "  ".join([*(f"{name} {cells[name]}" for name in columns), cells["outcome"]])
            note(f"{clock(self.elapsed)} {text}")

    def draw(self) -> RenderableType:
        """Return the table with the line about the current phase."""
        now, spent = self._now, time.monotonic() - self._phase_started
        line = Table.grid(padding=(0, 1))
        cells: list[RenderableType] = [
            Text(f"iteration {now.iteration}", style="bold"),
            Text(now.phase, style="cyan"),
        ]
        if now.total:
            cells.append(ProgressBar(total=now.total, completed=now.done, width=30))
            left = spent / now.done * (now.total - now.done) if now.done else None
            rest = f", {clock(left)} left" if left is not None else ""
            cells.append(Text(f"{now.done}/{now.total}, for {clock(spent)}{rest}"))
        else:
            cells.append(Text(f"for {clock(spent)}"))
        cells.append(Text(now.note, style="dim"))
        line.add_row(*cells)
        most = f", at most {self.iterations} iterations" if self.iterations else ""
        head = Text(f"{self.title}  {clock(self.elapsed)} elapsed{most}", style="dim")
        table = [iterations_table(self._done)] if self._done else []
        return Group(*table, line, head)


def iterations_table(iterations: Sequence[Iteration]) -> Table:
    """Return iterations as a table: a row each, with its results and its outcome."""
    table = Table(box=None, header_style="bold", pad_edge=False)
    for heading in COLUMNS:
        table.add_column(heading, justify="left" if heading in ("version", "outcome") else "right")
    for iteration in iterations:
        cells = row(iteration)
        style = None if iteration.promoted else "dim"
        table.add_row(*(cells[name] for name in COLUMNS), style=style)
    return table


def disagreement(iterations: Sequence[Iteration]) -> str:
    """Say what trainer and sampler disagreed by over a loop's jobs; "" without figures."""
    found = [g for g in iterations if g.agreement is not None]
    if not found:
        return ""
    distances = [g.agreement for g in found if g.agreement is not None]
    parts = [
        f"{_span([d.mean for d in distances])} nats on average",
        f"{max(d.max for d in distances):.2g} at most",
    ]
    if kl := [d.kl for d in distances if d.kl is not None]:
        parts.append(f"KL {_span(kl)}")
    shares = {"engine_clip_fraction": "by importance_cap", "clip_fraction": "by the policy's clip"}
    for name, by in shares.items():
        if clipped := [g.mean_metrics[name] for g in found if name in g.mean_metrics]:
            parts.append(f"tokens clipped {by} {min(clipped):.2%} to {max(clipped):.2%}")
    return f"logprobs of trainer and sampler differ by {', '.join(parts)}"


def _span(numbers: Sequence[float]) -> str:
    least, most = (f"{number:.2g}" for number in (min(numbers), max(numbers)))
    return least if least == most else f"{least} to {most}"
