"""`loop`: run the self-improving loop that a Python file defines. The same command goes on.

With --watch the same file's loop trains on live traffic instead, without end.
"""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer

from cray_agents.agent.agent import Agent
from cray_agents.cli.agents import platform_for
from cray_agents.cli.iteration_table import LEGEND, LoopScreen, disagreement, iterations_table
from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import console, errors, print_json, settings
from cray_agents.cli.user_files import find, load
from cray_agents.errors import BadInput
from cray_agents.iteration import Iteration, promoted_version
from cray_agents.loop.live.schedule import Live
from cray_agents.loop.loop import Loop
from cray_agents.platform.client import Platform
from cray_agents.server.platform_process import running


async def next_update(platform: Platform, loop: str) -> int:
    """Return the number of the next update: at least 1, since 0 is the model before training."""
    recorded = await platform.iterations(loop)
    await platform.close()
    return max(1, len(recorded))


LoopFile = Annotated[Path, typer.Argument(help="A Python file that defines `loop`.")]


def add_to(app: Commands) -> None:
    """Register the command."""
    app.command("loop", takes="json url")(loop)


def loop(
    file: LoopFile,
    iterations: Annotated[
        int | None,
        typer.Option(
            min=1, help="The most iterations to run \\[default: 5; with --watch without end]."
        ),
    ] = None,
    model: Annotated[
        Path | None,
        typer.Option(help="What to begin with on a root that has nothing; as of `up`."),
    ] = None,
    accept_changes: Annotated[
        bool,
        typer.Option("--accept-changes", help="Go on with other settings than it began with."),
    ] = False,
    watch: Annotated[
        bool, typer.Option("--watch", help="Train on live runs that people rewarded.")
    ] = False,
    once: Annotated[
        bool, typer.Option("--once", help="With --watch: end after the next update.")
    ] = False,
) -> None:
    """Run a self-improving loop; the same command goes on where it stopped.

    With --watch a loop without `live=Live(...)` gets one, and the name `<name>-live`, so that its
    own iterations stay those of another loop.
    """
    module = load(file)
    chosen = find(module, "loop", Loop, file)
    if watch and chosen.live is None:
        chosen = replace(chosen, live=Live(), name=f"{chosen.name}-live")
    if once and not watch:
        raise BadInput("--once has no effect without --watch", param="once")
    if accept_changes:
        chosen = replace(chosen, changed="accept")
    if iterations is None:
        iterations = sys.maxsize if chosen.live is not None else 5
    done: list[Iteration] = []
    with platform_for(chosen.agent.model, model) as platform:
        chosen.platform = platform
        with LoopScreen(enabled=not given().json) as screen:
            chosen.on_progress = screen.progress
            if once:
                iterations = asyncio.run(next_update(platform, chosen.name))
            for iteration in _until_interrupted(chosen, iterations):
                screen.iteration(iteration)
                done.append(iteration)
    if given().json:
        print_json([g.model_dump(mode="json") for g in done])
        return
    if not done:
        return
    console.print(iterations_table(done))
    console.print(LEGEND, style="dim")
    if text := disagreement(done):
        console.print(text, style="dim", soft_wrap=True)
    for iteration in done:
        for remark in iteration.remarks:
            console.print(f"iteration {iteration.iteration}: {remark}", soft_wrap=True)
    if done[-1].stopped:
        console.print(f"stopped: {done[-1].stopped}")
    print_next_steps(chosen, done, _agent_target(module, chosen, file))


def print_next_steps(loop: Loop, done: list[Iteration], agent: str | None) -> None:
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
    console.print("The same command goes on from here, with --iterations N for more.")


def _agent_target(module: ModuleType, loop: Loop, file: Path) -> str | None:
    """Return the loop's agent as `chat` takes it: FILE, or FILE:NAME where the file has several."""
    agents = {name: value for name, value in vars(module).items() if isinstance(value, Agent)}
    for name, value in agents.items():
        if value.name == loop.agent.name:
            return str(file) if len(agents) == 1 else f"{file}:{name}"
    return None


def _until_interrupted(loop: Loop, iterations: int) -> Iterator[Iteration]:
    """Yield the loop's iterations; Ctrl-C ends a loop that watches without losing anything."""
    try:
        yield from loop.run_sync(iterations)
    except KeyboardInterrupt:
        if loop.live is None:
            raise
        errors.print("interrupted: the same command goes on from here", highlight=False)
