"""`loop`: run the self-improving loop that a Python file defines. The same command goes on.

With --watch the same file's loop trains on live traffic instead, without end.
"""

import asyncio
import json
import sys
from collections.abc import Iterator
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from pydantic import ValidationError

from cray_agents.agent.agent import Agent
from cray_agents.cli.agents import find, load, platform_at
from cray_agents.cli.filter_options import AGE, SECONDS
from cray_agents.cli.generation_table import LEGEND, LoopScreen, generations_table
from cray_agents.cli.option_groups import expand_groups, options_under
from cray_agents.cli.screen import HomeOption, JsonOption, UrlOption, console, errors
from cray_agents.config import load_config
from cray_agents.errors import BadInput
from cray_agents.generation import Generation, promoted_version
from cray_agents.loop.live.schedule import Watch
from cray_agents.loop.loop import Loop
from cray_agents.platform.client import Platform
from cray_agents.server.platform_process import running

_option = options_under("Live traffic")


@dataclass(frozen=True)
class WatchOptions:
    """The options of live traffic, as they were given."""

    watch: Annotated[bool, _option("Train on live runs that people rewarded.", "--watch")] = False
    runs: Annotated[int | None, _option("Update after so many new runs.", min=1)] = None
    every: Annotated[
        str | None, _option("Update every 6h, 30m, …; with --runs whichever is first.")
    ] = None
    quiet: Annotated[str | None, _option("Hours in which no update begins: 22:00-06:00.")] = None
    updates_per_day: Annotated[int | None, _option("At most so many updates a day.", min=1)] = None
    giver: Annotated[
        list[str] | None, _option("An API key whose rewards count, by name; repeatable.")
    ] = None
    once: Annotated[bool, _option("End after the next update.", "--once")] = False


def with_watch(loop: Loop, given: WatchOptions) -> Loop:
    """Return the loop with its Watch changed by the options; without --watch, the loop itself.

    A loop that had no Watch is renamed to `<name>-live`, so that its offline generations stay those
    of another loop. Raises BadInput.
    """
    if not given.watch:
        names = [name for name, value in asdict(given).items() if value]
        if names:
            option = names[0].replace("_", "-")
            raise BadInput(f"--{option} has no effect without --watch", param=option)
        return loop
    known = loop.watch.model_dump() if loop.watch is not None else {}
    name = loop.name if loop.watch is not None else f"{loop.name}-live"
    try:
        watch = Watch(**{**known, **_watch_changes(given, known)})
    except ValidationError as error:
        message = str(error.errors()[0]["msg"]).removeprefix("Value error, ")
        raise BadInput(f"--watch: {message}", param="watch") from error
    return replace(loop, watch=watch, name=name)


async def next_update(platform: Platform, loop: str) -> int:
    """Return the number of the next update: at least 1, since 0 is the model before training."""
    recorded = await platform.generations(loop)
    await platform.close()
    return max(1, len(recorded))


def _watch_changes(given: WatchOptions, known: dict[str, Any]) -> dict[str, Any]:
    """Return the fields of a Watch that the options change."""
    changes: dict[str, Any] = {}
    if given.every is not None:
        changes |= {"every": parse_seconds(given.every, "every"), "runs": None}
    if given.runs is not None:
        changes["runs"] = given.runs
    if given.quiet is not None:
        changes["quiet"] = given.quiet
    if given.giver:
        changes["givers"] = given.giver
    if given.updates_per_day is not None:
        changes["per_day"] = {**known.get("per_day", {}), "updates": given.updates_per_day}
    return changes


def parse_seconds(given: str, option: str) -> float:
    """Parse a time such as 6h, 30m or 45s. Raises BadInput."""
    match = AGE.fullmatch(given.strip().lower())
    if match is None or float(match[1]) == 0:
        raise BadInput(f"--{option} must be a time such as 6h, 30m or 45s; not {given!r}",
                       param=option)  # fmt: skip
    return float(match[1]) * SECONDS[match[2]]


LoopFile = Annotated[Path, typer.Argument(help="A Python file that defines `loop`.")]


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(loop)


@expand_groups
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
    *,
    options: WatchOptions,
    home: HomeOption = None,
    url: UrlOption = None,
    as_json: JsonOption = False,
) -> None:
    """Run a self-improving loop; the same command goes on where it stopped."""
    module = load(file)
    chosen = with_watch(find(module, "loop", Loop, file), options)
    if accept_changes:
        chosen = replace(chosen, changed="accept")
    if generations is None:
        generations = sys.maxsize if chosen.watch is not None else 5
    done: list[Generation] = []
    with platform_at(home, url, chosen.agent.model, model) as platform:
        chosen.platform = platform
        with LoopScreen(enabled=not as_json) as screen:
            chosen.on_progress = screen.progress
            if options.once:
                generations = asyncio.run(next_update(platform, chosen.name))
            for generation in _until_interrupted(chosen, generations):
                screen.generation(generation)
                done.append(generation)
    if as_json:
        print(json.dumps([g.model_dump(mode="json") for g in done], indent=2))
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
    print_next_steps(chosen, done, _agent_target(module, chosen, file), home, url)


def print_next_steps(
    loop: Loop, done: list[Generation], agent: str | None, home: Path | None, url: str | None
) -> None:
    """Print the version that the model's name means now, and commands to try next.

    agent: the agent's file, as `chat` takes it; None: the agent is in no file.
    """
    served, last = promoted_version(done), done[-1]
    root_option = f" --url {url}" if url else f" --home {home}" if home else ""
    steps = {"talk with it": f"chat {agent}{root_option}"} if agent else {}
    if url is None:
        root = load_config({"home": home}).root
        if running(root) is None:
            steps["serve it"] = f"up --name {loop.agent.model}{root_option}"
        steps["read its runs"] = f"runs list --loop {loop.name}{root_option}"
        steps["take them elsewhere"] = f"export --loop {loop.name}{root_option} --output runs.jsonl"
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
        yield from loop.run(generations)
    except KeyboardInterrupt:
        if loop.watch is None:
            raise
        errors.print("interrupted: the same command goes on from here", highlight=False)
