"""From a filter and an order to SQL over the table `runs`; see schema.py for what is in it.

Columns that the order does not use are written `+column`: SQLite then scans the index of the order
and compares as it goes, instead of gathering all matches of a column and sorting them.
Used by index.py and statistics.py.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from cray_agents.errors import BadInput
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.store.index.codes import MODELS, TAGS, name_code, sets_with
from cray_agents.runtime.store.index.run_merge import RunFacts

FEW = 500  # sets of models or tags up to which they are listed in the statement
_SORTED = {
    "id": ("id",),
    "newest": ("started", "id"),
    "oldest": ("started", "id"),
    "task": ("task", "generation", "attempt", "id"),
}
_LARGEST = 2**62


class SqlCondition(NamedTuple):
    """A condition and its parameters."""

    sql: str
    values: list[Any]


def ranked(number: int | None) -> int:
    """A generation or attempt as a column: None stands before 0, and nothing is NULL."""
    if number is None:
        return 0
    return max(-_LARGEST, min(_LARGEST, number + (number >= 0)))


def unranked(number: int) -> int | None:
    """The generation or attempt that a column tells."""
    return None if number == 0 else number - (number > 0)


def where(
    connection: sqlite3.Connection, query: RunFilter, order: str | None
) -> SqlCondition | None:
    """The runs that match; None if none can. Without an `order` any index may serve."""
    parts = ["shown = 1"]
    values: list[Any] = []

    def add(part: str, *more: Any) -> None:
        parts.append(part)
        values.extend(more)

    for column in ("loop", "agent", "split", "stop_reason"):
        name = getattr(query, column)
        if name is not None:
            add(f"+{column} = ?", name_code(connection, name))
    if query.error == "*":
        add("+error IS NOT NULL")
    elif query.error is not None:
        add("+error = ?", name_code(connection, query.error))
    if query.generation is not None:
        add("+generation = ?", ranked(query.generation))
    if query.generations is not None:
        add(_one_of("+generation", [ranked(number) for number in query.generations]))
    if query.task is not None:
        if not query.task:
            return None  # no task has this name; the column has it where there is none
        add("task = ?", query.task)
    for bound, column in ((query.min_reward, "+reward >= ?"), (query.max_reward, "+reward <= ?")):
        if bound is not None:
            add(column, bound)
    by_start = order != "id" and query.task is None and order != "task"
    plus = "" if by_start else "+"
    for bound, compare in ((query.since, ">="), (query.until, "<=")):
        if bound is not None:
            add(f"{plus}started {compare} ?", bound)
    wanted = [(MODELS, "models", query.model)] if query.model is not None else []
    for kind, column, name in [*wanted, *((TAGS, "tags", tag) for tag in query.tags)]:
        sets = sets_with(connection, kind, name, FEW + 1)
        if len(sets) > FEW:
            member = "SELECT 1 FROM members WHERE kind = ? AND name = ? AND code"
            add(f"EXISTS ({member} = runs.{column})", kind, name)
        else:
            add(_one_of(f"+{column}", sets))
    if None in values:
        return None  # a name that nothing has
    return SqlCondition(" AND ".join(parts), values)


def ordered(query: RunQuery) -> str:
    """What stands after ORDER BY. The runs of one task are found by it, and then sorted."""
    way = " DESC" if query.order == "newest" else ""
    plus = "" if query.task is None or query.order == "task" else "+"
    return ", ".join(f"{plus}{column}{way}" for column in _SORTED[query.order])


def beyond(order: str, key: Sequence[Any]) -> SqlCondition:
    """The runs that come after the one with this key."""
    columns = _SORTED[order]
    sign = "<" if order == "newest" else ">"
    marks = ", ".join("?" * len(columns))
    return SqlCondition(f"({', '.join(columns)}) {sign} ({marks})", list(key))


def key_of(order: str, facts: RunFacts) -> tuple[Any, ...]:
    """A run's place in an order."""
    if order == "id":
        return (facts.run_id,)
    if order == "task":
        return (
            facts.task or "",
            ranked(facts.generation),
            ranked(facts.attempt),
            facts.run_id,
        )
    return (facts.started, facts.run_id)


def key_columns(order: str) -> str:
    """The columns of that place."""
    return ", ".join(_SORTED[order])


def _one_of(column: str, numbers: Sequence[int]) -> str:
    return f"{column} IN ({', '.join(map(str, numbers))})" if numbers else "0"


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
