"""`scan drift` and `scan memorisation`: scans of whole versions, by all their runs. For scan.py."""

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import typer

from cray_agents.cli.options import given
from cray_agents.cli.screen import print_json, root, say, show
from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.registry.registry import Registry
from cray_agents.tasks.record_source import read_whole

LEAST_PLANTED = 8  # characters: a shorter string stands in a text by chance
MOST_PLANTED = 10_000


def drift(earlier: str, later: str, chosen: RunFilter, alpha: float) -> None:
    """Compare the habits of two versions: length, tool calls, refusals, repetition and others.

    Runs of both are paired in the order in which they began. A sequential test decides, and may be
    looked at while runs come in. `alpha`: the greatest probability of reporting a drift where there
    is none. Raises typer.Exit with 1 if a habit has drifted.
    """
    from cray_agents.runtime.scans.drift import compare_habits
    from cray_agents.runtime.store import Store

    if not 0 < alpha < 1:
        raise BadInput(f"--alpha {alpha:g}: give a probability above 0, below 1", param="alpha")
    home = root()
    registry = Registry(home)
    versions = [registry.resolve(name).id for name in (earlier, later)]
    if versions[0] == versions[1]:
        raise BadInput(f"{earlier} and {later} are the same version", param="later")
    store = Store(home)
    streams = [
        store.stream(RunQuery(**chosen.model_dump() | {"model": version}, order="oldest"))
        for version in versions
    ]
    habits = compare_habits(zip(*streams, strict=False), alpha)
    drifted = [row["habit"] for row in habits if row["drifted"]]
    if given().json:
        print_json({"versions": versions, "alpha": alpha, "habits": habits})
    else:
        show(
            habits,
            ["habit", "pairs", "earlier", "later", "evidence", "limit", "drifted", "about"],
        )
        if not habits[0]["pairs"]:
            say(f"no runs of both {versions[0]} and {versions[1]}")
    if drifted:
        raise typer.Exit(1)


def memorisation(
    name: str,
    chosen: RunFilter,
    datasets: list[str] | None,
    planted: Path | None,
    length: int,
) -> None:
    """Show how often a model's runs repeat its training sets, token by token, or planted strings.

    Each version is compared with the training sets of itself and its ancestors, or with `datasets`.
    Runs that a set was made of do not count. `planted`: a file of strings, one a line. `length`:
    tokens in a row that count as repeated.
    """
    from cray_agents.runtime.scans.memorisation import Memorisation
    from cray_agents.runtime.store import Store

    home = root()
    registry = Registry(home)
    if "@" in name or not (known := registry.versions(name)):
        known = [registry.resolve(name)]
    versions = [version.id for version in known]
    strings = [] if planted is None else _read_planted(planted)
    sets = {version: datasets or _training_sets(registry, version) for version in versions}
    store = Store(home)
    query = RunQuery(**chosen.model_dump(), order="id")
    rows = []
    for version in versions:
        comparison = Memorisation(length=length, planted=strings)
        for run in store.stream(query.model_copy(update={"model": version})):
            if {call.model for call in run.calls} == {version}:
                comparison.add(run, version)
        for each in sets[version]:
            comparison.compare(home, each)
        rows += [
            counted.to_dict() | {"datasets": sets[version]} for counted in comparison.versions()
        ]
    if given().json:
        print_json(rows)
        return
    _print_memorised(rows, strings, name)
    if rows and not any(row["compared"] for row in rows):
        say(f"nothing was compared: no run sampled --length ({length}) tokens in a row")


def _training_sets(registry: Registry, version: str) -> list[str]:
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


def _print_memorised(rows: list[dict[str, Any]], strings: list[str], model: str) -> None:
    if not rows:
        say(f"no runs of {model} are recorded")
        return
    table: Iterable[dict[str, Any]] = (
        row | {"95 %": _interval(row["interval"]), "sets": len(row["datasets"])} for row in rows
    )
    columns = ["model", "sets", "runs", "compared", "repeating", "rate", "95 %"]
    show(list(table), columns + ["with_planted"] * bool(strings))
    for row in rows:
        for run in row["repeating_runs"]:
            say(f"  {row['model']} repeats its training set: {run}")
        for text, runs in row["planted"].items():
            say(f"  {row['model']} says {text!r}: {', '.join(runs)}")


def _interval(interval: tuple[float, float] | None) -> str | None:
    return None if interval is None else f"{interval[0]:.3f} to {interval[1]:.3f}"
