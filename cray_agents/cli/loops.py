"""`loop`: run the self-improving loop that a Python file defines. The same command goes on.

With --watch the same file's loop trains on live traffic instead, without end: watching.py.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Annotated

import typer

from cray_agents.cli.agents import UrlOption, find, load, platform_at
from cray_agents.cli.progress import LoopScreen, generations_table
from cray_agents.cli.screen import HomeOption, JsonOption, console, errors
from cray_agents.cli.watching import Watching, next_update, watching
from cray_agents.generation import Generation
from cray_agents.loop import Loop

LoopFile = Annotated[Path, typer.Argument(help="A Python file that defines `loop`.")]
LIVE = "Live traffic"  # a panel of --help


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(loop)


def loop(
    file: LoopFile,
    generations: Annotated[
        int | None,
        typer.Option(min=1, help="How many at most \\[default: 5; with --watch without end]."),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint to begin with, on a root that has none.")
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on with other settings than it began with."),
    ] = False,
    watch: Annotated[
        bool,
        typer.Option(
            "--watch", rich_help_panel=LIVE, help="Train on live runs that people rewarded."
        ),
    ] = False,
    runs: Annotated[
        int | None,
        typer.Option(min=1, rich_help_panel=LIVE, help="So many new ones make an update."),
    ] = None,
    every: Annotated[
        str | None,
        typer.Option(
            rich_help_panel=LIVE, help="One each 6h, 30m, …; with --runs whichever is first."
        ),
    ] = None,
    quiet: Annotated[
        str | None,
        typer.Option(rich_help_panel=LIVE, help="Hours in which none begins: 22:00-06:00."),
    ] = None,
    updates_per_day: Annotated[
        int | None, typer.Option(min=1, rich_help_panel=LIVE, help="How many at most.")
    ] = None,
    once: Annotated[
        bool, typer.Option("--once", rich_help_panel=LIVE, help="End after the next update.")
    ] = False,
    home: HomeOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a self-improving loop; the same command goes on where it stopped."""
    found = find(load(file), "loop", Loop, file)
    found = watching(found, Watching(watch, runs, every, quiet, updates_per_day, once))
    if accept_changes:
        found.changed = "accept"
    if generations is None:
        generations = sys.maxsize if found.watch is not None else 5
    done: list[Generation] = []
    with platform_at(home, url, found.agent.model, model) as platform:
        found.platform = platform
        with LoopScreen(enabled=not as_json) as screen:
            found.on_progress = screen.progress
            if once:
                generations = asyncio.run(next_update(platform, found.name))
            for generation in _until_interrupted(found, generations):
                screen.generation(generation)
                done.append(generation)
    if as_json:
        print(json.dumps([g.model_dump(mode="json") for g in done], indent=2))
        return
    console.print(generations_table(done))
    if done and done[-1].stopped:
        console.print(f"stopped: {done[-1].stopped}")


def _until_interrupted(found: Loop, generations: int) -> Iterator[Generation]:
    """The loop's generations; Ctrl-C is the end of one that watches, and loses nothing."""
    try:
        yield from found.run(generations)
    except KeyboardInterrupt:
        if found.watch is None:
            raise
        errors.print("interrupted: the same command goes on from here", highlight=False)
