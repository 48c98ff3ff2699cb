"""`models memorisation`: how often versions repeat their training sets or planted strings."""

import json
from collections.abc import Iterable
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from cray_agents.cli.filter_options import FactOptions
from cray_agents.cli.models import NameOrVersion, models
from cray_agents.cli.option_groups import expand_groups
from cray_agents.cli.screen import HomeOption, JsonOption, console, root, show
from cray_agents.errors import BadInput
from cray_agents.queries import RunQuery
from cray_agents.tasks.record_source import read_whole

if TYPE_CHECKING:
    from cray_agents.runtime.registry.registry import Registry

LEAST_PLANTED = 8  # characters: a shorter string stands in a text by chance
MOST_PLANTED = 10_000


def add_to(app: typer.Typer) -> None:
    """Register the command, in the group `models`."""
    models.command("memorisation")(memorisation)


@expand_groups
def memorisation(
    name: NameOrVersion,
    home: HomeOption = None,
    dataset: Annotated[
        list[str] | None,
        typer.Option(help="Compare with this one; again: and that. Default: its training sets."),
    ] = None,
    planted: Annotated[
        Path | None, typer.Option(help="A file of planted strings, one a line.")
    ] = None,
    length: Annotated[
        int, typer.Option(min=4, max=10_000, help="Tokens in a row that count as repeated.")
    ] = 50,
    *,
    facts: FactOptions,
    as_json: JsonOption = False,
) -> None:
    """Tell how often a model's runs repeat its training set, token by token, or a planted string.

    Each version is compared with the training sets of itself and its ancestors. Runs that a set
    was made of do not count.
    """
    from cray_agents.runtime.registry.registry import Registry
    from cray_agents.runtime.scans.memorisation import Memorisation
    from cray_agents.runtime.store import Store

    root_home = root(home)
    registry = Registry(root_home)
    if "@" in name or not (known := registry.versions(name)):
        known = [registry.resolve(name)]
    versions = [version.id for version in known]
    strings = [] if planted is None else _read_planted(planted)
    sets = {version: dataset or _training_sets(registry, version) for version in versions}
    chosen = facts.run_filter()
    if chosen.model is not None:
        raise BadInput("--model: the argument says which versions", param="model")
    store = Store(root_home)
    query = RunQuery(**chosen.model_dump(), order="id")
    rows = []
    for version in versions:
        comparison = Memorisation(length=length, planted=strings)
        for run in store.stream(query.model_copy(update={"model": version})):
            if {call.model for call in run.calls} == {version}:
                comparison.add(run, version)
        for each in sets[version]:
            comparison.compare(root_home, each)
        rows += [
            counted.to_dict() | {"datasets": sets[version]} for counted in comparison.versions()
        ]
    if as_json:
        print(json.dumps(rows, indent=2))
        return
    _print(rows, strings, name)


def _training_sets(registry: "Registry", version: str) -> list[str]:
    from cray_agents.runtime.registry.lineage import lineage_of

    kin = {row["id"]: row for row in lineage_of(registry, version)}
    sets, one = [], kin.get(version)
    while one is not None:
        if one["dataset"]:
            sets.append(one["dataset"])
        one = kin.get(one["parent"])
    return sorted(set(sets))


def _read_planted(path: Path) -> list[str]:
    try:
        lines = read_whole(path).decode().split("\n")
    except (OSError, ValueError) as error:
        raise BadInput(f"--planted {path}: {error}", param="planted") from error
    strings = sorted({line.strip() for line in lines} - {""})
    short = next((each for each in strings if len(each) < LEAST_PLANTED), None)
    if short is not None:
        raise BadInput(
            f"--planted {path}: {short!r} is shorter than {LEAST_PLANTED} characters, so a text may"
            " have it by chance",
            param="planted",
        )
    if not 0 < len(strings) <= MOST_PLANTED:
        raise BadInput(
            f"--planted {path}: {len(strings)} strings; give 1 to {MOST_PLANTED}", param="planted"
        )
    return strings


def _print(rows: list[dict[str, Any]], strings: list[str], model: str) -> None:
    if not rows:
        console.print(f"no runs of {model} are recorded", markup=False)
        return
    table: Iterable[dict[str, Any]] = (
        row | {"95 %": _interval(row["interval"]), "sets": len(row["datasets"])} for row in rows
    )
    columns = ["model", "sets", "runs", "compared", "repeating", "rate", "95 %"]
    show(list(table), columns + ["with_planted"] * bool(strings), as_json=False)
    for row in rows:
        for run in row["repeating_runs"]:
            console.print(f"  {row['model']} repeats its training set: {run}", markup=False)
        for text, runs in row["planted"].items():
            console.print(f"  {row['model']} says {text!r}: {', '.join(runs)}", markup=False)


def _interval(interval: tuple[float, float] | None) -> str | None:
    return None if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
