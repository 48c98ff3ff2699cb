"""`eval`: measure versions of a model on tasks, as a Python file says. The same command goes on."""

from collections.abc import Iterator
from typing import Annotated, Any

import typer
from rich.progress import MofNCompleteColumn

from cray_agents.cli.agents import platform_for, split_target
from cray_agents.cli.options import Commands, given
from cray_agents.cli.screen import console, print_json, print_table, progress_bar
from cray_agents.cli.user_files import find, load
from cray_agents.iteration import LoopProgress
from cray_agents.loop.evaluation import Evaluation, EvaluationResult, VersionResult
from cray_agents.promotion.figures import Comparison, Estimate, Figures


def add_to(app: Commands) -> None:
    """Register the command."""
    app.command("eval", takes="json url")(evaluate_file)


def evaluate_file(
    file: Annotated[
        str,
        typer.Argument(help="A Python file that defines `evaluation`; FILE:NAME for another name."),
    ],
) -> None:
    """Measure versions of a model on tasks: mean@k and pass@k with intervals of 95 %.

    The file's `Evaluation(agent, tasks, rewards, models=["a@1", "a@2"], attempts=8)` says what is
    run. The same command goes on where it stopped, and runs nothing that is on record.
    """
    path, name = split_target(file)
    evaluation = find(load(path), name or "evaluation", Evaluation, path)
    with (
        platform_for(evaluation.models[0].partition("@")[0]) as platform,
        progress_bar(MofNCompleteColumn()) as bar,
    ):
        task = bar.add_task("")

        def show(now: LoopProgress) -> None:
            bar.update(task, description=now.phase, completed=now.done, total=now.total or None)

        evaluation.platform, evaluation.on_progress = platform, show
        result = evaluation.run_sync()
    if given().json:
        print_json(result)
        return
    _print(result, evaluation.by)


def _print(result: EvaluationResult, by: str | None) -> None:
    k = result.attempts
    columns = [
        "version",
        *([by] if by else []),
        f"mean@{k}",
        *(f"pass@{n}" for n in dict.fromkeys((1, k))),
    ]
    rows = [row for name, one in result.models.items() for row in _rows(name, one, by, k)]
    print_table(rows, [*columns, "tasks", "missing"])
    for name, one in result.models.items():
        if one.missing:
            why = ", ".join(f"{count} {kind}" for kind, count in one.errors.items())
            _say(
                f"{name}: {one.missing} runs are missing ({why}); the same command tries them again"
            )
    for comparison in result.comparisons:
        _say(_difference(comparison))
    look = (
        "" if given().url else f": cray-agents runs list --where loop={result.loop}{given().words}"
    )
    _say(f"The runs are those of loop={result.loop}{look}")


def _rows(name: str, result: VersionResult, by: str | None, k: int) -> Iterator[dict[str, Any]]:
    groups: dict[str, Figures] = {"all": result, **result.by}
    for group, one in groups.items():
        yield {
            "version": name,
            **{f"pass@{n}": _interval(one.pass_at[n]) for n in (1, k)},
            f"mean@{k}": _interval(one.mean),
            "tasks": one.mean.tasks,
            "missing": one.missing,
            **({by: group} if by else {}),
        }


def _difference(found: Comparison) -> str:
    left_out = f"; tasks left out, for a version has no scored run of them: {found.left_out}"
    return (
        f"{found.candidate} - {found.incumbent}: {_interval(found.difference, '+')}, "
        f"p {found.p:.2g}; better at {found.wins} of {found.tasks} tasks, worse at {found.losses}"
        + (left_out if found.left_out else "")
    )


def _interval(estimate: Estimate, sign: str = "") -> str:
    if estimate.value is None:
        return "-"
    if estimate.low is None or estimate.high is None:
        return f"{estimate.value:{sign}.3f}"
    return f"{estimate.value:{sign}.3f} [{estimate.low:{sign}.3f}, {estimate.high:{sign}.3f}]"


def _say(text: str) -> None:
    console.print(text, highlight=False, markup=False, soft_wrap=True)
