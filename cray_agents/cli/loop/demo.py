"""`demo`: the built-in self-improving loop, end to end on real parts, with a report at the end.

The agent, its tasks and its reward are cookbook/02_calculator_loop.py; this command makes the seed
model, starts a platform that lives as long as the demo, warms the model up, runs the loop, and
tells what happened. Everything is on disk under the home: killed at any moment, the same command
goes on.
"""

import asyncio
import json
import shutil
import time
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated, Any

import typer
from rich.markup import escape

from cray_agents.cli.agent.agents import load
from cray_agents.cli.loop.generation_table import LEGEND, LoopScreen, generations_table
from cray_agents.cli.loop.report import write_report
from cray_agents.cli.platform.platform_process import client, serving
from cray_agents.cli.screen import clock, console
from cray_agents.config import Config, load_config
from cray_agents.errors import BadInput, SetupError, StoreError
from cray_agents.generation import Generation
from cray_agents.loop.loop import Loop
from cray_agents.permissions import make_private
from cray_agents.platform.client import Platform
from cray_agents.records import Run
from cray_agents.runtime.disk import checksums

ROOT = Path(__file__).resolve().parents[3]
BOOK = ROOT / "cookbook" / "02_calculator_loop.py"
CONTROLS = ("shuffled-rewards",)


def add_to(app: typer.Typer) -> None:
    """Register the command."""
    app.command()(demo)


def demo(
    seed: Annotated[int, typer.Option(min=0, help="Of the model, the tasks and the data.")] = 0,
    home: Annotated[
        Path | None, typer.Option(help="Where it all goes \\[default: .cray-agents/demo-<seed>].")
    ] = None,
    json_file: Annotated[
        Path | None, typer.Option("--json", help="Also write what the table shows to this file.")
    ] = None,
    control: Annotated[
        str | None, typer.Option(help="shuffled-rewards: permute the rewards among the runs.")
    ] = None,
    generations: Annotated[
        int | None, typer.Option(min=1, help="At most so many \\[default: the cookbook's].")
    ] = None,
    scheduler: Annotated[
        str | None, typer.Option(help="auto, slurm or local \\[default: auto].")
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Everything, but little of it: does it run here?")
    ] = False,
) -> None:
    """Watch an agent train itself. The same command goes on where a killed one stopped."""
    if control is not None and control not in CONTROLS:
        raise BadInput(f"control {control!r} is not known; valid: {CONTROLS[0]}", param="control")
    if not BOOK.exists():
        raise SetupError(f"the demo runs from a checkout: {BOOK} is not there")
    name = f"demo-{seed}" + ("-quick" if quick else "") + (f"-{control}" if control else "")
    where = home or Path(".cray-agents") / name
    config = load_config({"home": where, "scheduler": scheduler, "port": 0})
    make_private(config.root.root, config.group)
    claim(config.root.root / "demo.json", {"seed": seed, "control": control, "quick": quick})
    begun = time.monotonic()
    book = load(BOOK)
    loop: Loop = book.make_loop(seed, quick)
    if control:
        loop = replace(loop, control="shuffled-rewards", name=f"{loop.name}-{control}")
    most = generations or (book.QUICK if quick else book.FULL).generations
    with LoopScreen(f"demo, seed {seed}", most) as screen:
        loop.on_progress = screen.progress
        done, info, examples = run_demo(config, book, loop, most, seed, quick, screen)
    result = summary(seed, control, info, time.monotonic() - begun, done)
    if json_file:
        json_file.write_text(json.dumps(result, indent=2) + "\n")
    tell(config, loop, result, done, examples)


def claim(path: Path, what: dict[str, Any]) -> None:
    """Keep demos apart that would share a home. Raises BadInput."""
    if path.exists() and (found := checksums.read_json(path)) != what:
        raise BadInput(f"{path.parent} holds another demo ({found}): choose another --home")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(checksums.with_crc(json.dumps(what).encode()))
    except OSError as error:
        raise StoreError(
            f"{path.parent} cannot be written ({error.strerror}): choose another --home"
        ) from error


def run_demo(
    config: Config,
    book: ModuleType,
    loop: Loop,
    most: int,
    seed: int,
    quick: bool,
    screen: LoopScreen,
) -> tuple[list[Generation], dict[str, Any], list[tuple[str, Run]]]:
    """Seed model, platform, warm-up, loop: what is done already is not done again."""
    model = config.root.root / "seed-model"
    if not model.exists():
        screen.say("making the seed model")
        draft = model.with_name("seed-model.draft")
        shutil.rmtree(draft, ignore_errors=True)
        book.make_model(draft, seed)
        draft.rename(model)
    screen.say("starting the platform (the vLLM server takes about half a minute)")
    with serving(config, model=model, name=loop.agent.model, ready=False) as where:
        loop.platform = client(where)
        book.warm_up(loop, quick)
        done = []
        for generation in loop.run(most):
            screen.generation(generation)
            done.append(generation)
        info, examples = asyncio.run(told_at_the_end(client(where), loop, done))
    return done, info, examples


async def told_at_the_end(
    platform: Platform, loop: Loop, done: list[Generation]
) -> tuple[dict[str, Any], list[tuple[str, Run]]]:
    """What the platform is made of, and examples of what changed."""
    try:
        return await platform.info(), await before_and_after(platform, loop, done)
    finally:
        await platform.close()


async def before_and_after(
    platform: Platform, loop: Loop, done: list[Generation], count: int = 4
) -> list[tuple[str, Run]]:
    """The same test questions under the first and the last version, those that changed first."""
    ends = []
    for version in (done[0].test_version, done[-1].test_version):
        runs = [run async for run in platform.runs(loop=loop.name, split="test", model=version)]
        ends.append({run.task.id: run for run in runs if run.task})
    first, last = ends
    changed = sorted(
        first.keys() & last.keys(),
        key=lambda task: ((first[task].reward or 0) - (last[task].reward or 0), task),
    )
    return [
        (f"{caption}: {runs[task].input}", runs[task])
        for task in changed[:count]
        for caption, runs in (("before", first), ("after", last))
    ]


def summary(
    seed: int,
    control: str | None,
    info: dict[str, Any],
    seconds: float,
    done: list[Generation],
) -> dict[str, Any]:
    """What the table shows, as `--json` writes it. `seconds` are of this invocation."""
    return {
        "seed": seed,
        "control": control,
        "engine": info["engine"],
        "trainer": info["trainer"],
        "scheduler": info["scheduler"],
        "seconds": round(seconds, 1),
        "generations": [generation.model_dump(mode="json") for generation in done],
    }


def tell(
    config: Config,
    loop: Loop,
    result: dict[str, Any],
    done: list[Generation],
    examples: list[tuple[str, Run]],
) -> None:
    """The table, the report's path, and what to try next."""
    title = f"An agent trains itself: seed {result['seed']}"
    title += f", control {result['control']}" if result["control"] else ""
    facts = {
        "engine": f"{result['engine']['name']} {result['engine']['version']}",
        "trainer": f"{result['trainer']['name']} {result['trainer']['version']}",
        "scheduler": f"{result['scheduler']['name']}: jobs "
        + ", ".join(g.job_id for g in done if g.job_id),
        "time": f"{clock(result['seconds'])} (this invocation)",
        "loop": loop.name,
        "home": str(config.root.root),
    }
    png, page = write_report(config.root.root / "report", title, done, facts, examples)
    home = config.home
    console.print(generations_table(done))
    console.print(LEGEND, style="dim")
    first, last = done[0], done[-1]
    console.print(
        f"\ntest success {first.test_success:.1%} → [bold]{last.test_success:.1%}[/] on "
        f"{last.test_tasks} tasks that nothing was decided on, in {clock(result['seconds'])}"
    )
    console.print(f"report: {escape(str(page))}\nplot:   {escape(str(png))}", soft_wrap=True)
    console.print("\nChat with the trained agent (ask: What is 472 * 385?), export its runs:")
    command = ".venv/bin/cray-agents"
    book = BOOK.relative_to(ROOT)
    console.print(f"  {command} chat {book} --forget --home {escape(str(home))}", soft_wrap=True)
    console.print(
        f"  {command} export --home {escape(str(home))} --output trajectories.jsonl", soft_wrap=True
    )
