"""`dataset diff`: how two training sets differ, by runs, reasons, recipes and distributions.

It reads the shared root, as all of `dataset` does. Read next: runtime/views/dataset_differences.py.
"""

import json
from typing import Annotated, Any

import typer

from cray_agents.cli.datasets import DatasetId, dataset
from cray_agents.cli.screen import HomeOption, JsonOption, console, root, show

FIGURES = ("samples", "tokens", "trained_tokens", "accepted_runs", "considered_runs")
COLUMNS = ["run", "task", "change", "before", "after", "rewards", "samples"]

RunsOption = Annotated[
    str | None,
    typer.Option(
        "--runs", help="List the runs of a change: added, removed, kept, changed, out or all."
    ),
]


def add_to(app: typer.Typer) -> None:
    """Register the command, in the group `dataset`."""
    dataset.command("diff")(diff)


def diff(
    one: DatasetId,
    other: DatasetId,
    home: HomeOption = None,
    runs: RunsOption = None,
    limit: Annotated[int, typer.Option(min=1, help="At most so many runs.")] = 1000,
    as_json: JsonOption = False,
) -> None:
    """Show how two training sets differ: runs, reasons, recipes, counts and distributions."""
    from cray_agents.runtime.views.dataset_differences import changed_runs, dataset_differences

    if runs is not None:
        change = None if runs == "all" else runs
        listing = changed_runs(root(home), one, other, change, None, limit)
        show(listing.rows, COLUMNS, as_json=as_json)
        return
    answer = dataset_differences(root(home), one, other)
    if as_json:
        print(json.dumps(answer, indent=2))
    else:
        _print(answer)


def _print(answer: dict[str, Any]) -> None:
    one, other = answer["one"], answer["other"]
    rows = [_row(name, one[name], other[name]) for name in FIGURES]
    left = [side["rejected"] for side in (one, other)]
    rows += [
        _row(reason.replace("_", " "), left[0].get(reason, 0), left[1].get(reason, 0))
        for reason in sorted({*left[0], *left[1]})
    ]
    rows += [
        _row(f"mean {name}", *(round(mean, 4) if mean is not None else None for mean in means))
        for name in ("reward", "tokens", "trained_tokens")
        for means in [answer[name]["means"]]
    ]
    show(rows, ["figure", "one", "other", "difference"], as_json=False)
    counts = ", ".join(f"{count:,} {name}" for name, count in answer["runs"].items())
    console.print(f"runs: {counts}", highlight=False, soft_wrap=True)
    if answer["moves"]:
        show(answer["moves"], ["before", "after", "runs"], as_json=False)
    if answer["recipe"]:
        show(answer["recipe"], ["field", "one", "other"], as_json=False)
    else:
        console.print("their recipes are equal", highlight=False)


def _row(name: str, one: float | None, other: float | None) -> dict[str, Any]:
    difference = None if one is None or other is None else round(other - one, 4)
    return {"figure": name, "one": one, "other": other, "difference": difference}
