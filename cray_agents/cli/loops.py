"""`loop`: run the self-improving loop that a Python file defines. The same command goes on.

With --watch the same file's loop trains on live traffic instead, without end.
"""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from cray_agents.agent.agent import Agent
from cray_agents.cli.agents import platform_for
from cray_agents.cli.generation_table import LEGEND, LoopScreen, generations_table
from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import console, errors, print_json, settings
from cray_agents.cli.user_files import find, load
from cray_agents.cli.where import duration
from cray_agents.errors import BadInput
from cray_agents.generation import Generation, promoted_version
from cray_agents.loop.live.schedule import Live
from cray_agents.loop.loop import Loop
from cray_agents.platform.client import Platform
from cray_agents.server.platform_process import running


@dataclass(frozen=True)
class WatchOptions:
    """The options of live traffic, as they were given."""

    watch: bool = False
    runs: int | None = None
    every: str | None = None
    quiet: str | None = None
    updates_per_day: int | None = None
    giver: list[str] | None = None
    once: bool = False


def with_watch(loop: Loop, options: WatchOptions) -> Loop:
    """Return the loop with its Live changed by the options; without --watch, the loop itself.

    A loop that had no Live is renamed to `<name>-live`, so that its offline generations stay those
    of another loop. Raises BadInput.
    """
    if not options.watch:
        names = [name for name, value in asdict(options).items() if value]
        if names:
            option = names[0].replace("_", "-")
            raise BadInput(f"--{option} has no effect without --watch", param=option)
        return loop
    known = loop.live.model_dump() if loop.live is not None else {}
    name = loop.name if loop.live is not None else f"{loop.name}-live"
    try:
        live = Live(**{**known, **_watch_changes(options, known)})
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise BadInput(f"--watch: {message}", param="watch") from error
    return replace(loop, live=live, name=name)


async def next_update(platform: Platform, loop: str) -> int:
    """Return the number of the next update: at least 1, since 0 is the model before training."""
    recorded = await platform.generations(loop)
    await platform.close()
    return max(1, len(recorded))


def _watch_changes(options: WatchOptions, known: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Live that the options change."""
    changes: dict[str, Any] = {}
    if options.every is not None:
        changes |= {"every": duration(options.every, "every"), "runs": None}
    if options.runs is not None:
        changes["runs"] = options.runs
    if options.quiet is not None:
        changes["quiet"] = options.quiet
    if options.giver:
        changes["givers"] = options.giver
    if options.updates_per_day is not None:
        changes["per_day"] = {**known.get("per_day", {}), "updates": options.updates_per_day}
    return changes


LoopFile = Annotated[Path, typer.Argument(help="A Python file that defines `loop`.")]


def add_to(app: Commands) -> None:
    """Register the command."""
    app.command("loop", takes="json url")(loop)


def _live(text: str, *names: str, **limits: Any) -> Any:
    return typer.Option(*names, help=text, rich_help_panel="Live traffic", **limits)


def loop(
    file: LoopFile,
    generations: Annotated[
        int | None,
        typer.Option(
            min=1, help="The most generations to run \\[default: 5; with --watch without end]."
        ),
    ] = None,
    model: Annotated[
        Path | None, typer.Option(help="The checkpoint to begin with, on a root that has none.")
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on with other settings than it began with."),
    ] = False,
    watch: Annotated[bool, _live("Train on live runs that people rewarded.", "--watch")] = False,
    runs: Annotated[int | None, _live("Update after so many new runs.", min=1)] = None,
    every: Annotated[
        str | None, _live("Update every 6h, 30m, …; with --runs whichever is first.")
    ] = None,
    quiet: Annotated[
        str | None, _live("The hours in which no update begins, as 22:00-06:00.")
    ] = None,
    updates_per_day: Annotated[int | None, _live("The most updates in a day.", min=1)] = None,
    giver: Annotated[
        list[str] | None, _live("The name of an API key whose rewards count; repeatable.")
    ] = None,
    once: Annotated[bool, _live("End after the next update.", "--once")] = False,
) -> None:
    """Run a self-improving loop; the same command goes on where it stopped."""
    options = WatchOptions(watch, runs, every, quiet, updates_per_day, giver, once)
    module = load(file)
    chosen = with_watch(find(module, "loop", Loop, file), options)
    if accept_changes:
        chosen = replace(chosen, changed="accept")
    if generations is None:
        generations = sys.maxsize if chosen.live is not None else 5
    done: list[Generation] = []
    with platform_for(chosen.agent.model, model) as platform:
        chosen.platform = platform
        with LoopScreen(enabled=not given().json) as screen:
            chosen.on_progress = screen.progress
            if options.once:
                generations = asyncio.run(next_update(platform, chosen.name))
            for generation in _until_interrupted(chosen, generations):
                screen.generation(generation)
                done.append(generation)
    if given().json:
        print_json([g.model_dump(mode="json") for g in done])
        return
    if not done:
        return
    console.print(generations_table(done))
    console.print(LEGEND, style="dim")
    for generation in done:
        for remark in generation.remarks:
            console.print(f"generation {generation.generation}: {remark}", soft_wrap=True)
    if done[-1].stopped:
        console.print(f"stopped: {done[-1].stopped}")
    print_next_steps(chosen, done, _agent_target(module, chosen, file))


def print_next_steps(loop: Loop, done: list[Generation], agent: str | None) -> None:
    """Print the version that the model's name means now, and commands to try next.

    agent: the agent's file, as `chat` takes it; None: the agent is in no file.
    """
    served, last = promoted_version(done), done[-1]
    root_option = given().words
    steps = {"talk with it": f"chat {agent}{root_option}"} if agent else {}
    if given().url is None:
        root = settings().root
        if running(root) is None:
            steps["serve it"] = f"up --name {loop.agent.model}{root_option}"
        steps["read its runs"] = f"runs list --where loop={loop.name}{root_option}"
        steps["take them elsewhere"] = (
            f"export --where loop={loop.name}{root_option} --output runs.jsonl"
        )
        if last.version != served:
            steps["promote it all the same"] = f"models promote {last.version}{root_option}"
    before = done[0].version
    now = "as before" if served == before else f"{before} before"
    console.print(f"\n{loop.agent.model} means {served} now ({now}). Next:", highlight=False)
    width = max(map(len, steps), default=0)
    for purpose, command in steps.items():
        text = f"  {purpose:{width}}  cray-agents {command}"
        console.print(text, highlight=False, markup=False, soft_wrap=True)
    console.print("The same command goes on from here, with --generations N for more.")


def _agent_target(module: ModuleType, loop: Loop, file: Path) -> str | None:
    """Return the loop's agent as `chat` takes it: FILE, or FILE:NAME where the file has several."""
    agents = {name: value for name, value in vars(module).items() if isinstance(value, Agent)}
    for name, value in agents.items():
        if value.name == loop.agent.name:
            return str(file) if len(agents) == 1 else f"{file}:{name}"
    return None


def _until_interrupted(loop: Loop, generations: int) -> Iterator[Generation]:
    """Yield the loop's generations; Ctrl-C ends a loop that watches without losing anything."""
    try:
        yield from loop.run_sync(generations)
    except KeyboardInterrupt:
        if loop.live is None:
            raise
        errors.print("interrupted: the same command goes on from here", highlight=False)
