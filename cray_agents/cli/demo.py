"""`demo`: the built-in self-improving loop, end to end on real parts.

calculator_loop.py defines the agent, its tasks, its reward and its loop. This command makes the
seed model, starts a platform for as long as the demo, warms the model up, runs the loop, and prints
the results. Everything is on disk under the home: after a kill, the same command goes on.

With `--model smollm2` a real model learns to call functions, by a short form of recipe 09 of the
cookbook.
"""

import json
import sys
import time
from dataclasses import replace
from pathlib import Path
from typing import Annotated, Any

import typer
from rich.console import Console

from cray_agents.cli import calculator_loop
from cray_agents.cli.iteration_table import LEGEND, LoopScreen, iterations_table
from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import clock, console, errors, note, print_json
from cray_agents.cli.user_files import load
from cray_agents.config import Config, load_config
from cray_agents.errors import BadInput, StoreError
from cray_agents.iteration import Iteration
from cray_agents.loop.loop import Loop
from cray_agents.runtime.disk import checksums
from cray_agents.server.permissions import make_private
from cray_agents.server.platform_process import ask_once, client, serving, shown_path

CONTROLS = ("shuffled-rewards",)
SMOLLM2 = "smollm2"
RECIPE = Path(__file__).parents[2] / "cookbook" / "09_function_calling.py"


commands = Commands()


@commands.command("demo")
def demo(
    seed: Annotated[
        int, typer.Option(min=0, help="The seed of the model, the tasks and the data.")
    ] = 0,
    control: Annotated[
        str | None, typer.Option(help="shuffled-rewards: permute the rewards among the runs.")
    ] = None,
    iterations: Annotated[
        int | None,
        typer.Option(min=1, help="The most iterations \\[default: 12]."),
    ] = None,
    scheduler: Annotated[
        str | None,
        typer.Option(help="What runs training jobs: auto, slurm or local \\[default: auto]."),
    ] = None,
    quick: Annotated[
        bool, typer.Option("--quick", help="Do little of everything, to see that it runs here.")
    ] = False,
    model: Annotated[
        str | None,
        typer.Option(
            help="smollm2: a real model of 135M parameters learns to call functions, in twenty "
            "minutes; it is downloaded, 95 MB with its benchmark."
        ),
    ] = None,
) -> None:
    """Watch an agent train itself. The same command goes on where a killed one stopped.

    Its root is .cray-agents/demo-SEED, unless --home names another. With --json the table is
    printed as JSON.
    """
    if control is not None and control not in CONTROLS:
        raise BadInput(f"control {control!r} is not known; valid: {CONTROLS[0]}", param="control")
    if model not in (None, SMOLLM2):
        raise BadInput(f"model {model!r} is not known; valid: {SMOLLM2}", param="model")
    ends = (model, "quick" if quick else None, control)
    name = "-".join(["demo", str(seed), *(each for each in ends if each)])
    folder = given().home or Path(".cray-agents") / name
    config = load_config({"home": folder, "scheduler": scheduler, "port": 0})
    make_private(config.root.root, config.group)
    settings = {"seed": seed, "control": control, "quick": quick}
    claim(config.root.root / "demo.json", settings | ({"model": model} if model else {}))
    started = time.monotonic()
    begin, loop = (
        real_loop(seed, quick) if model else (None, calculator_loop.make_loop(seed, quick))
    )
    if control:
        loop = replace(loop, control="shuffled-rewards", name=f"{loop.name}-{control}")
    usual = 4 if model else calculator_loop.size_of("rft", quick).iterations
    most = iterations or (1 if model and quick else usual)
    with LoopScreen(f"demo, seed {seed}", most) as screen:
        loop.on_progress = screen.progress
        done, info = run_demo(config, loop, most, seed, quick, screen, begin)
    result = summary(seed, control, info, time.monotonic() - started, done)
    print_results(errors if given().json else console, config, result, done, bool(model))
    if given().json:
        print_json(result)


def real_loop(seed: int, quick: bool) -> tuple[Path, Loop]:
    """Return the model's file and a short loop of recipe 09; both are fetched if need be.

    Raises BadInput where the cookbook is missing or a download fails.
    """
    if not RECIPE.exists():
        raise BadInput(f"--model {SMOLLM2} needs {RECIPE.name} of a checkout's cookbook/")
    recipe = load(RECIPE)
    note(
        f"Needs {' and '.join(f'{name} {version}' for name, version, _ in recipe.PACKAGES)} of the "
        f"package index, without their dependencies: 95 MB in {recipe.HOME}, unless it is there."
    )
    try:
        benchmark, model = (recipe.fetch(*package) for package in recipe.PACKAGES)
        calling = recipe.FunctionCalling.load(benchmark)
    except SystemExit as error:
        raise BadInput(str(error)) from None
    of_category = (8, 2, 2) if quick else (250, 40, 24)
    tasks = calling.tasks(dict(zip(("train", "holdout", "test"), of_category, strict=True)))
    loop = replace(calling.loop(seed=seed, quick=quick), tasks=tasks)
    return next(model.rglob("*.gguf")), loop


def claim(path: Path, settings: dict[str, Any]) -> None:
    """Write this demo's settings to its home.

    Raises BadInput for the home of another demo, StoreError if the home cannot be written.
    """
    if path.exists() and (known := checksums.read_json(path)) != settings:
        raise BadInput(f"{path.parent} holds another demo ({known}): choose another --home")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_bytes(checksums.with_crc(json.dumps(settings).encode()))
    except OSError as error:
        raise StoreError(
            f"{path.parent} cannot be written ({error.strerror}): choose another --home"
        ) from error


def run_demo(
    config: Config,
    loop: Loop,
    most: int,
    seed: int,
    quick: bool,
    screen: LoopScreen,
    begin: Path | None,
) -> tuple[list[Iteration], dict[str, Any]]:
    """Run seed model, platform, warm-up and loop; steps that are done are not repeated.

    A real model, `begin`, is not warmed up.
    """
    model = begin or config.root.root / "seed-model"
    if not model.exists():
        screen.say("making the seed model")
        calculator_loop.make_model(model, seed)
    screen.say("starting the platform (the vLLM server takes about half a minute)")
    with serving(config, model=model, name=loop.agent.model, ready=False) as process:
        loop.platform = client(process)
        if begin is None:
            calculator_loop.warm_up(loop, quick)
        done = []
        for iteration in loop.run_sync(most):
            screen.iteration(iteration)
            done.append(iteration)
        info = ask_once(client(process), lambda platform: platform.info())
    return done, info


def summary(
    seed: int,
    control: str | None,
    info: dict[str, Any],
    seconds: float,
    done: list[Iteration],
) -> dict[str, Any]:
    """Return the table's data as `--json` prints it. `seconds` are of this invocation."""
    return {
        "seed": seed,
        "control": control,
        "engine": info["engine"],
        "trainer": info["trainer"],
        "scheduler": info["scheduler"],
        "seconds": round(seconds, 1),
        "iterations": [iteration.model_dump(mode="json") for iteration in done],
    }


def print_results(
    screen: Console, config: Config, result: dict[str, Any], done: list[Iteration], real: bool
) -> None:
    """Print the table, the success before and after, and commands to try next."""
    screen.print(iterations_table(done))
    screen.print(LEGEND, style="dim")
    first, last = done[0], done[-1]
    screen.print(
        f"\ntest success {first.test_success:.1%} → [bold]{last.test_success:.1%}[/] on "
        f"{last.test_tasks} tasks used neither to train nor decide, in {clock(result['seconds'])}"
    )
    command = shown_path(Path(sys.executable).with_name("cray-agents"))
    recipe = shown_path(Path(calculator_loop.__file__).resolve())
    root = shown_path(config.root.root)
    lines = [
        "See every run and decision in a browser, chat with the trained agent (ask: What is "
        "472 * 385?), export its runs:",
        f"  {command} dashboard --home {root}",
        f"  {command} chat {recipe} --forget --home {root}",
        f"  {command} export --home {root} --output trajectories.jsonl",
    ]
    if real:  # it is asked with functions
        lines[:3] = ["See every run and decision in a browser, export the runs:", lines[1]]
    screen.print("\n".join(lines), markup=False, soft_wrap=True)
