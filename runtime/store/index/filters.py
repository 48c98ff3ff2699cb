"""Filters: translate run filters, orders and groups to SQL over the table `runs` of schema.py.

Columns that the order does not use are written `+column`. SQLite then scans the index of the order
and compares as it goes, instead of gathering all matches of a column and sorting them.
Used by index.py and pages.py.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.store.index.codes import MODELS, TAGS, name_code, sets_with
from cray_agents.runtime.store.index.run_merge import RunFacts

MAX_LISTED = 500  # sets of models or tags that are listed in a statement, at most
_SORTED = {
    "id": ("id",),
    "newest": ("started", "id"),
    "oldest": ("started", "id"),
    "task": ("task", "generation", "attempt", "id"),
}
_LARGEST = 2**62
#: Columns with a range in a filter, by the name of its bounds.
BOUNDED = {
    "reward": "+reward",
    "seconds": "+seconds",
    "turns": "+turns",
    "tokens": "(prompt + sampled)",
}


class SqlCondition(NamedTuple):
    """A condition and its parameters."""

    sql: str
    values: list[Any]


def to_rank(number: int | None) -> int:
    """Return a generation or attempt as its column value: never NULL, and None sorts before 0."""
    if number is None:
        return 0
    return max(-_LARGEST, min(_LARGEST, number + (number >= 0)))


def from_rank(number: int) -> int | None:
    """Return the generation or attempt of a column value."""
    return None if number == 0 else number - (number > 0)


def match_condition(
    connection: sqlite3.Connection, query: RunFilter, order: str | None
) -> SqlCondition | None:
    """Return the condition of a filter; None if no run can match.

    Without an `order` SQLite may use any index.
    """
    conditions = ["shown = 1"]
    values: list[Any] = []

    def add(condition: str, *more: Any) -> None:
        conditions.append(condition)
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
        add("+generation = ?", to_rank(query.generation))
    if query.generations is not None:
        add(_one_of("+generation", [to_rank(number) for number in query.generations]))
    if query.task is not None:
        if not query.task:
            return None  # no task is named "": in the column it means no task
        add("task = ?", query.task)
    for name, column in BOUNDED.items():
        for side, compare in (("min", ">="), ("max", "<=")):
            if (value := getattr(query, f"{side}_{name}")) is not None:
                add(f"{column} {compare} ?", value)
    by_start = order != "id" and query.task is None and order != "task"
    plus = "" if by_start else "+"
    for bound, compare in ((query.since, ">="), (query.until, "<=")):
        if bound is not None:
            add(f"{plus}started {compare} ?", bound)
    wanted = [(MODELS, "models", query.model)] if query.model is not None else []
    for kind, column, name in [*wanted, *((TAGS, "tags", tag) for tag in query.tags)]:
        sets = sets_with(connection, kind, name, MAX_LISTED + 1)
        if len(sets) > MAX_LISTED:
            member = "SELECT 1 FROM members WHERE kind = ? AND name = ? AND code"
            add(f"EXISTS ({member} = runs.{column})", kind, name)
        else:
            add(_one_of(f"+{column}", sets))
    for tag in query.without_tags:
        member = "SELECT 1 FROM members WHERE kind = ? AND name = ? AND code"
        add(f"NOT EXISTS ({member} = runs.tags)", TAGS, tag)
    if None in values:
        return None  # a name without a code: no run has it
    return SqlCondition(" AND ".join(conditions), values)


def order_by(query: RunQuery) -> str:
    """Return the terms of ORDER BY. Runs of one task are looked up by task, then sorted."""
    way = " DESC" if query.order == "newest" else ""
    plus = "" if query.task is None or query.order == "task" else "+"
    return ", ".join(f"{plus}{column}{way}" for column in _SORTED[query.order])


def after_condition(order: str, key: Sequence[Any]) -> SqlCondition:
    """Return the condition for runs that come after the run with this key."""
    columns = _SORTED[order]
    sign = "<" if order == "newest" else ">"
    marks = ", ".join("?" * len(columns))
    return SqlCondition(f"({', '.join(columns)}) {sign} ({marks})", list(key))


def key_of(order: str, facts: RunFacts) -> tuple[Any, ...]:
    """Return a run's sort key in an order."""
    if order == "id":
        return (facts.run_id,)
    if order == "task":
        return (
            facts.task or "",
            to_rank(facts.generation),
            to_rank(facts.attempt),
            facts.run_id,
        )
    return (facts.started, facts.run_id)


def key_columns(order: str) -> str:
    """Return the columns of the sort key of an order."""
    return ", ".join(_SORTED[order])


def _one_of(column: str, numbers: Sequence[int]) -> str:
    return f"{column} IN ({', '.join(map(str, numbers))})" if numbers else "0"
