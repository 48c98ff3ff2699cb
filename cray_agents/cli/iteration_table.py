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

from cray_agents.cli.screen import clock, errors
from cray_agents.iteration import Iteration, LoopProgress

#: The columns of an iteration, each with its meaning; the report shows all of them.
COLUMNS = {
    "iter": "The iteration; 0 is the model before this training.",
    "method": "How it was trained.",
    "held-out": "Mean reward on held-out tasks, which no training sees. It decides promotion.",
    "test": "Mean reward on test tasks, which decide nothing.",
    "runs": "Training runs sampled.",
    "good": "The share of these runs with the reward of a good one: min_reward, else 1.",
    "set": "Samples in the training set, and how often the job saw each. Some runs are left out, "
    "such as duplicates; demonstrations and runs of earlier iterations may be in it.",
    "tokens": "Tokens trained on, each counted as often as it was.",
    "loss": "Of the first and the last step, in nats per token. Falling, it says that the job fits "
    "its data; it does not say that the agent became better.",
    "probe": "The largest difference between the log-probabilities that vLLM and the trainer give "
    "to the same tokens after the weights were swapped. Rounding stays far below 0.001: the "
    "weights that serve are the weights that were trained.",
    "seconds": "From the end of the iteration before.",
    "idle": "The share of that time in which vLLM had no request.",
    "version": "The candidate.",
    "job": "The training job, as the scheduler numbers it.",
    "outcome": "What became of the candidate.",
}
#: The columns on a terminal, which need no knowledge of training.
TERMINAL_COLUMNS = (
    "iter", "method", "held-out", "test", "runs", "good", "set", "seconds", "version", "outcome",
)  # fmt: skip
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
                note = f" {now.note}" if now.note else ""
                errors.print(
                    f"{clock(self.elapsed)} iteration {now.iteration}: {now.phase}{total}{note}",
                    highlight=False,
                    soft_wrap=True,
                )

    def iteration(self, iteration: Iteration) -> None:
        """Show an iteration that ended."""
        self._done.append(iteration)
        if self._enabled and not self._in_place:
            cells = row(iteration)
            columns = [name for name in TERMINAL_COLUMNS[:-1] if cells[name] != "-"]
            text = "  ".join([*(f"{name} {cells[name]}" for name in columns), cells["outcome"]])
            errors.print(f"{clock(self.elapsed)} {text}", highlight=False, soft_wrap=True)

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
    for heading in TERMINAL_COLUMNS:
        table.add_column(heading, justify="left" if heading in ("version", "outcome") else "right")
    for iteration in iterations:
        cells = row(iteration)
        style = None if iteration.promoted else "dim"
        table.add_row(*(cells[name] for name in TERMINAL_COLUMNS), style=style)
    return table


def row(g: Iteration) -> dict[str, str]:
    """Return an iteration as a cell for each of COLUMNS."""
    loss = (
        f"{g.loss_first:.3f}→{g.loss_last:.3f}" if g.loss_last is not None and g.loss_first else "-"
    )
    return {
        "iter": str(g.iteration),
        "method": g.method if g.iteration else "-",
        "held-out": f"{g.holdout_success:.3f}" if g.holdout_tasks else "-",
        "test": "-" if g.test_success is None else f"{g.test_success:.3f}",
        "runs": str(g.runs) if g.runs else "-",
        "good": f"{g.accepted_runs / g.runs:.{0 if g.accepted_runs * 20 > g.runs else 1}%}"
        if g.runs
        else "-",
        "set": f"{g.samples:,} ×{g.epochs:.3g}" if g.samples else "-",
        "tokens": f"{g.trained_tokens:,}" if g.trained_tokens else "-",
        "loss": loss,
        "probe": "-" if g.probe_max_logprob_diff is None else f"{g.probe_max_logprob_diff:.0e}",
        "seconds": f"{g.wall or sum(g.seconds.values()):.0f}",  # asynchronous phases overlap
        "idle": "-" if g.idle_share is None else f"{g.idle_share:.0%}",
        "version": g.version,
        "job": g.job_id or "-",
        "outcome": outcome(g),
    }


def outcome(g: Iteration) -> str:
    """Describe the outcome of an iteration in a few words."""
    text = "promoted" if g.promoted else "not promoted"
    if not g.iteration:
        text = "the start"
    elif not g.promoted and not g.holdout_tasks:
        text = g.note.partition(":")[0] or "passed on"  # not proven, no update
    if g.zero_variance_groups:
        text += f", {g.zero_variance_groups} groups without variance"
    if g.carried:
        text += f", {g.carried} runs of the one before"
    return text
