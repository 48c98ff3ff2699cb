"""Notebook: a loop watched from a cell; its curve and table grow as iterations end.

Runs, iterations and training sets show themselves: a cell whose last line is one needs no more.
"""

import time
from html import escape
from typing import TYPE_CHECKING, Any

from cray_agents.iteration import Iterations, LoopProgress

if TYPE_CHECKING:
    from cray_agents.loop.loop import Loop

__all__ = ["watch"]

REDRAW_SECONDS = 0.5  # at least, between two looks at a phase's progress


def watch(loop: "Loop", iterations: int = 5) -> Iterations:
    """Run a loop as `Loop.run_sync` does, and show its progress under the cell.

    Returns its iterations, which are shown like that again. Raises what `Loop.run` raises.
    """
    from IPython import display

    show: Any = display.display
    html: Any = display.HTML
    done, drawn = Iterations(), 0.0
    handle = show(html(""), display_id=True)

    def draw(now: str) -> None:
        nonlocal drawn
        drawn = time.monotonic()
        handle.update(html(f"{done._repr_html_()}<p>{escape(now)}</p>"))

    def progress(at: LoopProgress) -> None:
        if time.monotonic() - drawn > REDRAW_SECONDS:
            counted = f" {at.done} of {at.total}" if at.total else ""
            draw(f"iteration {at.iteration}: {at.phase}{counted} {at.note}")

    before, loop.on_progress = loop.on_progress, progress
    try:
        for iteration in loop.run_sync(iterations):
            done.append(iteration)
            draw(iteration.stopped or "")
    finally:
        loop.on_progress = before
    return done
