"""Pages of runs: read the matches of a query from a start key on. Called by index.py."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from cray_agents.errors import NotFound
from cray_agents.queries import RunQuery
from cray_agents.runtime.store.index import filters
from cray_agents.runtime.store.index.run_merge import MergedRun, RunFacts


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
    sql = f"SELECT {filters.key_columns(query.order)} FROM runs WHERE id = ?"
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
    matching = filters.match_condition(connection, query, query.order)
    if matching is None:
        return []
    conditions, values = [matching.sql], list(matching.values)
    if key is not None:
        later = filters.after_condition(query.order, key)
        conditions.append(later.sql)
        values += later.values
    chosen = (
        f"SELECT run FROM runs WHERE {' AND '.join(conditions)}"
        f" ORDER BY {filters.order_by(query)} LIMIT ?"
    )
    sql = f"SELECT id, told FROM ({chosen}) CROSS JOIN runs USING (run)"
    rows = connection.execute(sql, [*values, -1 if limit is None else limit]).fetchall()
    return [facts_in(row) for row in rows]
