"""`loop` and `eval`: run the self-improving loop, or the evaluation, that a Python file defines.

The same command goes on. With --watch the file's loop trains on live traffic, without end; with
--every at those times alone.
"""

import asyncio
import sys
from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from types import ModuleType
from typing import Annotated

import typer
from rich.progress import MofNCompleteColumn

from cray_agents.agent.agent import Agent
from cray_agents.cli.agents import platform_for, split_target
from cray_agents.cli.iteration_table import LEGEND, LoopScreen, disagreement, iterations_table
from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import (
    console,
    note,
    print_json,
    print_table,
    progress_bar,
    say,
    settings,
)
from cray_agents.cli.user_files import find, load
from cray_agents.cli.where import duration
from cray_agents.errors import BadInput
from cray_agents.iteration import Iteration, LoopProgress, promoted_version
from cray_agents.loop.evaluation import Evaluation, EvaluationResult
from cray_agents.loop.live.schedule import Live
from cray_agents.loop.loop import Loop
from cray_agents.platform.client import Platform
from cray_agents.promotion.figures import Estimate
from cray_agents.server.platform_process import running

commands = Commands()


async def next_update(platform: Platform, loop: str) -> int:
    """Return the number of the next update: at least 1, since 0 is the model before training."""
    recorded = await platform.iterations(loop)
    await platform.close()
    return max(1, len(recorded))


@commands.command("loop", takes="json url")
def loop(
    file: Annotated[Path, typer.Argument(help="A Python file that defines `loop`.")],
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
    every: Annotated[
        str | None,
        typer.Option(
            metavar="TIME", help="With --watch: an update each 6h, 30m or 1d, if any run came."
        ),
    ] = None,
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
    for name, value in (("once", once), ("every", every)):
        if value and not watch:
            raise BadInput(f"--{name} has no effect without --watch", param=name)
    if every is not None and chosen.live is not None:
        changes = {"runs": None, "every": duration(every, "every")}
        chosen = replace(chosen, live=Live(**{**dict(chosen.live), **changes}))
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
            say(f"iteration {iteration.iteration}: {remark}")
    if done[-1].stopped:
        say(f"stopped: {done[-1].stopped}")
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
    say(f"\n{loop.agent.model} means {served} now ({now}). Next:")
    width = max(map(len, steps), default=0)
    for purpose, command in steps.items():
        text = f"  {purpose:{width}}  cray-agents {command}"
        say(text)
    say("The same command goes on from here, with --iterations N for more.")


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
        note("interrupted: the same command goes on from here")


# ---- eval
@commands.command("eval", takes="json url")
def evaluate(
    file: Annotated[
        str,
        typer.Argument(help="A Python file that defines `evaluation`; FILE:NAME for another name."),
    ],
) -> None:
    """Measure versions of a model on tasks: mean@k and pass@k with intervals of 95 %, and costs.

    The file's `Evaluation(agent, tasks, rewards, models=["a@1", "a@2"], attempts=8)` says what is
    run. The same command goes on where it stopped, and runs nothing that is on record. The exit
    code is 1 while runs are missing.
    """
    path, name = split_target(file)
    evaluation = find(load(path), name or "evaluation", Evaluation, path)
    names = [model for model in evaluation.models if isinstance(model, str)]
    with (
        platform_for([*names, evaluation.agent.model][0].partition("@")[0]) as platform,
        progress_bar(MofNCompleteColumn()) as bar,
    ):
        task = bar.add_task("")

        def show(now: LoopProgress) -> None:
            bar.update(task, description=now.phase, completed=now.done, total=now.total or None)

        evaluation.platform, evaluation.on_progress = platform, show
        result = evaluation.run_sync()
    if given().json:
        print_json(result)
    else:
        print_result(result, evaluation.by)
    if any(one.missing for one in result.models.values()):
        raise typer.Exit(1)


def print_result(result: EvaluationResult, by: str | None) -> None:
    """Print the versions' figures, what is missing, and how the versions differ."""
    k = result.attempts
    rows = [
        {
            "version": name,
            **({f"by {by}": group} if by else {}),
            f"mean@{k}": _interval(one.mean),
            **{f"pass@{n}": _interval(one.pass_at[n]) for n in (1, k)},
            "tasks": one.mean.tasks,
            "missing": one.missing,
            "seconds": f"{whole.seconds:.3g}" if one is whole and whole.seconds else "",
            "cost": _cost(whole.cost, result.currency) if one is whole else "",
        }
        for name, whole in result.models.items()
        for group, one in [("all", whole), *whole.by.items()]
    ]
    print_table(rows, list(rows[0]))
    for name, one in result.models.items():
        if one.missing:
            why = ", ".join(f"{count} {kind}" for kind, count in one.errors.items())
            say(f"{name}: {one.missing} runs are missing ({why}); the same command tries again")
    if len({one.cost is None for one in result.models.values()}) > 1:
        say("A version's cost needs [prices], and is accounted each minute: ask again for it then")
    for found in result.comparisons:
        say(
            f"{found.candidate} - {found.incumbent}: {_interval(found.difference, '+')}, "
            f"p {found.p:.2g}; better at {found.wins} of {found.tasks} tasks, worse at "
            f"{found.losses}; left out, for a version has no scored run: {found.left_out}"
        )
    look = f": cray-agents runs list --where loop={result.loop}{given().words}"
    say(f"The runs are those of loop={result.loop}{'' if given().url else look}")


def _cost(cost: float | None, currency: str) -> str:
    return "-" if cost is None else f"{cost:.3g} {currency}"


def _interval(estimate: Estimate, sign: str = "") -> str:
    if estimate.value is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{sign}.3f}"
    return f"{estimate.value:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"
