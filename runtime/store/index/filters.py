"""Filters: translate run filters and orders to SQL over the table `runs`; read pages.

Columns that the order does not use are written `+column`. SQLite then scans the index of the order
and compares as it goes, instead of gathering all matches of a column and sorting them.
Used by index.py and statistics.py.
"""

import sqlite3
from collections.abc import Sequence
from typing import Any, NamedTuple

from cray_agents.errors import NotFound
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.store.index.database import any_version, name_code, to_rank
from cray_agents.runtime.store.index.run_merge import MergedRun, RunFacts

_SORTED = {
    "id": ("id",),
    "newest": ("started", "id"),
    "oldest": ("started", "id"),
    "task": ("task", "iteration", "attempt", "id"),
}
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
    if query.iteration is not None:
        add("+iteration = ?", to_rank(query.iteration))
    if query.iterations is not None:
        ranks = ", ".join(str(to_rank(number)) for number in query.iterations)
        add(f"+iteration IN ({ranks})")
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
    wanted = [("tags", tag) for tag in query.tags]
    if query.model is not None:
        name = query.model
        wanted.append(("models", name if "@" in name else any_version(name)))
    for column, name in wanted:
        code = name_code(connection, name)
        add(f"instr({column}, ?) > 0", None if code is None else f"|{code}|")
    for tag in query.without_tags:
        if (code := name_code(connection, tag)) is not None:
            add("instr(tags, ?) = 0", f"|{code}|")
    if None in values:
        return None  # a name without a code: no run has it
    return SqlCondition(" AND ".join(conditions), values)


def key_of(order: str, facts: RunFacts) -> tuple[Any, ...]:
    """Return a run's sort key in an order."""
    if order == "id":
        return (facts.run_id,)
    if order == "task":
        return (
            facts.task or "",
            to_rank(facts.iteration),
            to_rank(facts.attempt),
            facts.run_id,
        )
    return (facts.started, facts.run_id)


def facts_in(row: tuple[str, bytes]) -> RunFacts:
    """Return the facts of a run from its columns `id` and `told`; the run must be shown."""
    run_id, merged = row
    facts = MergedRun(merged).facts(run_id)
    assert facts is not None, run_id  # true of a run that is shown
    return facts


def start_key(connection: sqlite3.Connection, query: RunQuery) -> Sequence[Any] | None:
    """Return the key of the query's run `after` in its order, or None without `after`.

    Raises NotFound for an unknown run, unless the order is that of ids.
    """
    if query.after is None:
        return None
    if query.order == "id":
        return (query.after,)
    sql = f"SELECT {', '.join(_SORTED[query.order])} FROM runs WHERE id = ?"
    row: Sequence[Any] | None = connection.execute(sql, (query.after,)).fetchone()
    if row is None:
        raise NotFound(f"no run {query.after!r} to go on after", param="after")
    return row


def read_page(
    connection: sqlite3.Connection,
    query: RunQuery,
    key: Sequence[Any] | None,
    limit: int | None,
) -> list[RunFacts]:
    """Return at most `limit` runs that match and come after `key`."""
    matching = match_condition(connection, query, query.order)
    if matching is None:
        return []
    where, columns = matching.sql, _SORTED[query.order]
    way, after = (" DESC", "<") if query.order == "newest" else ("", ">")
    if key is not None:
        where += f" AND ({', '.join(columns)}) {after} ({', '.join('?' * len(columns))})"
    # runs of one task are looked up by it, then sorted
    plus = "" if query.task is None or query.order == "task" else "+"
    order = ", ".join(f"{plus}{column}{way}" for column in columns)
    chosen = f"SELECT run FROM runs WHERE {where} ORDER BY {order} LIMIT ?"
    sql = f"SELECT id, told FROM ({chosen}) CROSS JOIN runs USING (run)"
    values = [*matching.values, *(key or ()), -1 if limit is None else limit]
    rows = connection.execute(sql, values).fetchall()
    return [facts_in(row) for row in rows]
