"""`models drift`: which habits of a model differ between two of its versions."""

import json
from typing import Annotated

import typer

from cray_agents.cli.filter_options import FactOptions
from cray_agents.cli.models import models
from cray_agents.cli.option_groups import expand_groups
from cray_agents.cli.screen import HomeOption, JsonOption, console, root, show
from cray_agents.errors import BadInput
from cray_agents.queries import RunQuery

Earlier = Annotated[str, typer.Argument(help="name@N")]
Later = Annotated[str, typer.Argument(help="name@M")]


def add_to(app: typer.Typer) -> None:
    """Register the command, in the group `models`."""
    models.command("drift")(drift)


@expand_groups
def drift(
    earlier: Earlier,
    later: Later,
    home: HomeOption = None,
    alpha: Annotated[
        float, typer.Option(help="Greatest probability of reporting a drift where there is none.")
    ] = 0.05,
    *,
    facts: FactOptions,
    as_json: JsonOption = False,
) -> None:
    """Compare the habits of two versions: length, tool calls, refusals, repetition and others.

    Runs of both are paired in the order in which they began. A sequential test decides, and may be
    looked at while runs come in. The exit status is 1 if a habit has drifted.
    """
    from cray_agents.runtime.registry.registry import Registry
    from cray_agents.runtime.scans.drift import compare_habits
    from cray_agents.runtime.store import Store

    if not 0 < alpha < 1:
        raise BadInput(f"--alpha {alpha:g}: give a probability above 0, below 1", param="alpha")
    root_home = root(home)
    registry = Registry(root_home)
    versions = [registry.resolve(name).id for name in (earlier, later)]
    if versions[0] == versions[1]:
        raise BadInput(f"{earlier} and {later} are the same version", param="later")
    chosen = facts.run_filter()
    if chosen.model is not None:
        raise BadInput("--model: the two versions say which runs", param="model")
    store = Store(root_home)
    streams = [
        store.stream(RunQuery(**chosen.model_dump() | {"model": version}, order="oldest"))
        for version in versions
    ]
    habits = compare_habits(zip(*streams, strict=False), alpha)
    drifted = [row["habit"] for row in habits if row["drifted"]]
    if as_json:
        print(json.dumps({"versions": versions, "alpha": alpha, "habits": habits}, indent=2))
    else:
        show(
            habits,
            ["habit", "pairs", "earlier", "later", "evidence", "limit", "drifted", "about"],
            as_json=False,
        )
        if not habits[0]["pairs"]:
            console.print(f"no runs of both {versions[0]} and {versions[1]}", markup=False)
    if drifted:
        raise typer.Exit(1)
