"""`loop`: run the self-improving loop that a Python file defines. The same command goes on."""

import json
from pathlib import Path
from typing import Annotated

import typer

from cray_agents.cli.agents import UrlOption, find, load, platform_at
from cray_agents.cli.progress import LoopScreen, generations_table
from cray_agents.cli.screen import HomeOption, JsonOption, console
from cray_agents.generation import Generation
from cray_agents.loop import Loop

LoopFile = Annotated[Path, typer.Argument(help="A Python file that defines `loop`.")]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(loop)


def loop(
    file: LoopFile,
    generations: Annotated[int, typer.Option(min=1, help="How many generations at most.")] = 5,
    model: Annotated[
        Path | None, typer.Option(help="A checkpoint to begin with, on a root that has none.")
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on with other settings than it began with."),
    ] = False,
    home: HomeOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a self-improving loop; the same command goes on where it stopped."""
    found = find(load(file), "loop", Loop, file)
    if accept_changes:
        found.changed = "accept"
    done: list[Generation] = []
    with platform_at(home, url, found.agent.model, model) as platform:
        found.platform = platform
        with LoopScreen(enabled=not as_json) as screen:
            found.on_progress = screen.progress
            for generation in found.run(generations):
                screen.generation(generation)
                done.append(generation)
    if as_json:
        print(json.dumps([g.model_dump(mode="json") for g in done], indent=2))
        return
    console.print(generations_table(done))
    if done[-1].stopped:
        console.print(f"stopped: {done[-1].stopped}")
