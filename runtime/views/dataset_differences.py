"""Dataset differences: the runs that one training set has and another lacks, and their figures.

A run is the same by its id, a demonstration by its messages. The lines are those of runs.parquet,
which names every run that was considered, so a difference also says why a run is out. Both tables
are joined by pyarrow in columns: a million runs take a second or two. Called by
gateway/routes/datasets.py.
"""

from typing import Any, Literal

from cray_agents.exact_json import load_json
from cray_agents.paths import Home
from cray_agents.records import digest
from cray_agents.runtime.datasets import reader
from cray_agents.runtime.store.index.statistics import bin_edges
from cray_agents.runtime.views.dataset_views import bin_counts, dataset_values

Change = Literal["added", "removed", "kept", "changed", "out"]
TAKEN, ABSENT = "taken", "not considered"
DEMONSTRATION = "demonstration/"
_COLUMNS = ["run", "task", "accepted", "reason", "reward", "samples"]
_FIGURES = ("samples", "tokens", "trained_tokens", "accepted_runs", "considered_runs")


def dataset_differences(home: Home, one: str, other: str, bins: int = 24) -> dict[str, Any]:
    """Return DatasetDifferences as JSON. Raises NotFound, Corrupt."""
    import pyarrow.compute as pc

    manifests = [reader.read_dataset(home, name) for name in (one, other)]
    lines = _joined(home, *manifests)
    changes = {"added": 0, "removed": 0, "kept": 0, "changed": 0, "out": 0}
    counted = lines.group_by("change").aggregate([([], "count_all")]).to_pylist()
    changes |= {row["change"]: row["count_all"] for row in counted}
    moved = lines.filter(pc.not_equal(lines["one_state"], lines["other_state"]))
    moves = moved.group_by(["one_state", "other_state"]).aggregate([([], "count_all")])
    ordered = sorted(
        moves.to_pylist(), key=lambda row: (-row["count_all"], row["one_state"], row["other_state"])
    )
    values = [dataset_values(home, manifest) for manifest in manifests]
    return {
        "one": _side(manifests[0]),
        "other": _side(manifests[1]),
        "runs": changes,
        "moves": [
            {"before": row["one_state"], "after": row["other_state"], "runs": row["count_all"]}
            for row in ordered
        ],
        "recipe": _recipe_differences(*(manifest.get("recipe") or {} for manifest in manifests)),
        "reward": _compared(values[0].rewards, values[1].rewards, bins),
        "tokens": _compared(values[0].tokens, values[1].tokens, bins, whole=True),
        "trained_tokens": _compared(values[0].trained, values[1].trained, bins, whole=True),
        "versions": {
            name: [values[0].versions[name], values[1].versions[name]]
            for name in sorted({*values[0].versions, *values[1].versions})
        },
    }


def changed_runs(
    home: Home, one: str, other: str, change: Change | None, after: str | None, limit: int
) -> reader.RunsPage:
    """Return at most `limit` ChangedRuns of a change, by run, after the run `after`.

    Without a change all that is not the same in both. Raises NotFound, Corrupt.
    """
    import pyarrow.compute as pc

    lines = _joined(home, *(reader.read_dataset(home, name) for name in (one, other)))
    if change is not None:
        lines = lines.filter(pc.equal(lines["change"], change))
    else:
        same = pc.or_(pc.equal(lines["change"], "kept"), pc.equal(lines["change"], "out"))
        lines = lines.filter(pc.invert(same))
    if after is not None:
        lines = lines.filter(pc.greater(lines["run"], after))
    lines = lines.sort_by("run")
    rows = lines.slice(0, limit).to_pylist()
    return reader.RunsPage(
        [
            {
                "run": row["run"],
                "task": row["task"],
                "change": row["change"],
                "before": row["one_state"],
                "after": row["other_state"],
                "rewards": [row["one_reward"], row["other_reward"]],
                "samples": [row["one_samples"] or 0, row["other_samples"] or 0],
            }
            for row in rows
        ],
        lines.num_rows > limit,
    )


def _joined(home: Home, one: dict[str, Any], other: dict[str, Any]) -> Any:
    """Return a table with a line for each run that either set considered.

    `change` is added, removed, kept (in both, the same), changed (in both, with another reward or
    number of samples) or out (of both).
    """
    import pyarrow.compute as pc

    tables = []
    for name, manifest in (("one", one), ("other", other)):
        table = _lines(home, manifest)
        columns = ["run", *(f"{name}_{column}" for column in table.column_names[1:])]
        tables.append(table.rename_columns(columns))
    lines = tables[0].join(tables[1], keys="run", join_type="full outer")
    inside = {}
    for name in ("one", "other"):
        accepted = lines[f"{name}_accepted"]
        inside[name] = pc.fill_null(accepted, False)
        state = pc.if_else(inside[name], TAKEN, pc.fill_null(lines[f"{name}_reason"], "left out"))
        state = pc.if_else(pc.is_null(accepted), ABSENT, state)
        lines = lines.append_column(f"{name}_state", state)
    equal = pc.and_(
        _equal(lines["one_reward"], lines["other_reward"]),
        _equal(lines["one_samples"], lines["other_samples"]),
    )
    both = pc.and_(inside["one"], inside["other"])
    either = pc.or_(inside["one"], inside["other"])
    kinds = pc.if_else(
        both,
        pc.if_else(equal, "kept", "changed"),
        pc.if_else(either, pc.if_else(inside["other"], "added", "removed"), "out"),
    )
    lines = lines.append_column("change", kinds)
    return lines.append_column("task", pc.coalesce(lines["one_task"], lines["other_task"]))


def _lines(home: Home, manifest: dict[str, Any]) -> Any:
    """Return the columns of runs.parquet; demonstrations are named by what they say."""
    import pyarrow

    schema = pyarrow.schema(
        [
            *((name, pyarrow.string()) for name in ("run", "task")),
            ("accepted", pyarrow.bool_()),
            ("reason", pyarrow.string()),
            ("reward", pyarrow.float64()),
            ("samples", pyarrow.int64()),
        ]
    )
    table = reader.considered_table(home, manifest["id"], _COLUMNS).cast(schema)
    if not manifest.get("demonstrations"):
        return table
    names = _demonstrations(home, manifest["id"])
    runs = [names.get(run, run) for run in table["run"].to_pylist()]
    return table.set_column(0, "run", pyarrow.array(runs, pyarrow.string()))


def _demonstrations(home: Home, dataset_id: str) -> dict[str, str]:
    """Return names of demonstrations that are equal where their contents are, by their names."""
    path = reader.file_in(home.dataset(dataset_id), reader.RECIPE)
    recipe = load_json(path.read_bytes())
    rejected = recipe.get("demonstrations_rejected") or ()
    tools = recipe.get("demonstrations_tools") or ()
    names: dict[str, str] = {}
    times: dict[str, int] = {}
    for number, messages in enumerate(recipe["demonstrations"]):
        content = [
            messages,
            tools[number] if tools else recipe.get("tools"),
            rejected[number] if rejected else None,
        ]
        name = f"{DEMONSTRATION}{digest(content)}"
        times[name] = times.get(name, 0) + 1
        again = f"/{times[name]}" if times[name] > 1 else ""
        names[f"{DEMONSTRATION}{number}"] = name + again
    return names


def _equal(one: Any, other: Any) -> Any:
    """Compare two columns; null equals null."""
    import pyarrow.compute as pc

    known = pc.fill_null(pc.equal(one, other), False)
    return pc.or_(known, pc.and_(pc.is_null(one), pc.is_null(other)))


def _side(manifest: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": manifest["id"],
        "method": manifest["method"],
        "created": manifest.get("created"),
        **{name: manifest.get(name) or 0 for name in _FIGURES},
        "rejected": manifest.get("rejected") or {},
    }


def _recipe_differences(one: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    names = [*one, *(name for name in other if name not in one)]
    return [
        {"field": name, "one": one.get(name), "other": other.get(name)}
        for name in names
        if one.get(name) != other.get(name)
    ]


def _compared(
    one: list[float | None], other: list[float | None], bins: int, *, whole: bool = False
) -> dict[str, Any]:
    """Return a ComparedHistogram of two lists of values as JSON."""
    known = [[float(value) for value in values if value is not None] for values in (one, other)]
    every = [*known[0], *known[1]]
    edges = bin_edges(min(every), max(every), bins, whole=whole) if every else []
    return {
        "edges": edges,
        "one": bin_counts(known[0], edges),
        "other": bin_counts(known[1], edges),
        "missing": [len(one) - len(known[0]), len(other) - len(known[1])],
        "means": [sum(values) / len(values) if values else None for values in known],
    }
