"""Counts, means and percentiles of runs, by group: what `runs stats` shows. Called by index.py."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter
from cray_agents.runtime.store.index.filters import unranked, where

_NAMED = ("agent", "model", "loop", "split", "stop_reason", "error")  # columns that hold codes
_GROUPS = {
    **{name: name for name in _NAMED},
    "generation": "generation",
    "task": "task",
    "day": "date(started, 'unixepoch')",
}
_FIGURES = {
    "runs": "count(*)",
    "rewarded": "count(reward)",
    "mean_reward": "avg(reward)",
    "min_reward": "min(reward)",
    "max_reward": "max(reward)",
    "calls": "sum(calls)",
    "prompt_tokens": "sum(prompt)",
    "sampled_tokens": "sum(sampled)",
    "errors": "count(error)",
    "infrastructure": "sum(infrastructure)",
    "mean_seconds": "avg(seconds)",
    # the nearest rank: the smallest value that so many percent do not exceed
    "p50_seconds": "min(CASE WHEN place * 100 >= number * 50 THEN seconds END)",
    "p95_seconds": "min(CASE WHEN place * 100 >= number * 95 THEN seconds END)",
}
_USED = "reward, calls, prompt, sampled, error, infrastructure, seconds"


def statistics(
    connection: sqlite3.Connection, query: RunFilter, by: Sequence[str]
) -> list[dict[str, Any]]:
    """See Index.stats."""
    for name in by:
        if name not in _GROUPS:
            known = ", ".join(_GROUPS)
            raise BadInput(f"cannot group runs by {name!r}: {known}", param="by")
    found = where(connection, query, None)
    if found is None:
        return []
    keys = [f"g{i}" for i in range(len(by))]
    groups = [f"{_GROUPS[name]} AS {key}" for name, key in zip(by, keys, strict=True)]
    parted = f"PARTITION BY {', '.join(keys)}" if keys else ""
    chosen = f"SELECT {', '.join([*groups, _USED])} FROM runs WHERE {found.sql}"
    placed = (
        f"SELECT *, row_number() OVER ({parted} ORDER BY seconds) AS place,"
        f" count(*) OVER ({parted}) AS number FROM ({chosen})"
    )
    grouped = f"GROUP BY {', '.join(keys)}" if keys else "HAVING count(*) > 0"
    rows = connection.execute(
        f"SELECT {', '.join([*keys, *_FIGURES.values()])} FROM ({placed}) {grouped}"
        f" ORDER BY {', '.join(['count(*) DESC', *keys])}",
        found.values,
    ).fetchall()
    names = {None: None, **dict(connection.execute("SELECT code, name FROM names").fetchall())}
    return [
        {
            **{name: _shown(name, value, names) for name, value in zip(by, row, strict=False)},
            **dict(zip(_FIGURES, row[len(by) :], strict=True)),
        }
        for row in rows
    ]


def _shown(name: str, value: Any, names: dict[Any, Any]) -> Any:
    """A group as people know it."""
    if name in _NAMED:
        return names[value]
    if name == "generation":
        return unranked(value)
    return value or None  # a task there is none of is stored as ""
