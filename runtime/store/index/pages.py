"""Pages of runs: a query's matches, from its place in its order on. Called by index.py."""

import sqlite3
from collections.abc import Sequence
from typing import Any

from cray_agents.errors import NotFound
from cray_agents.queries import RunQuery
from cray_agents.runtime.store.index import filters
from cray_agents.runtime.store.index.run_merge import MergedRun, RunFacts


def facts_in(row: tuple[str, bytes]) -> RunFacts:
    """A run from its id and what was told of it; it must be shown."""
    run_id, told = row
    facts = MergedRun(told).facts(run_id)
    assert facts is not None, run_id  # it is shown
    return facts


def start_of(connection: sqlite3.Connection, query: RunQuery) -> Sequence[Any] | None:
    """The place of the query's run `after` in its order; None where it has none.

    Raises NotFound for a run that no event is known of, where the order is not that of ids.
    """
    if query.after is None:
        return None
    if query.order == "id":
        return (query.after,)
    ask = f"SELECT {filters.key_columns(query.order)} FROM runs WHERE id = ?"
    row: Sequence[Any] | None = connection.execute(ask, (query.after,)).fetchone()
    if row is None:
        raise NotFound(f"no run {query.after!r} to go on after", param="after")
    return row


def page(
    connection: sqlite3.Connection,
    query: RunQuery,
    key: Sequence[Any] | None,
    limit: int | None,
) -> list[RunFacts]:
    """At most `limit` runs that match and come after `key`."""
    found = filters.where(connection, query, query.order)
    if found is None:
        return []
    parts, values = [found.sql], list(found.values)
    if key is not None:
        later = filters.beyond(query.order, key)
        parts.append(later.sql)
        values += later.values
    chosen = (
        f"SELECT run FROM runs WHERE {' AND '.join(parts)}"
        f" ORDER BY {filters.ordered(query)} LIMIT ?"
    )
    ask = f"SELECT id, told FROM ({chosen}) CROSS JOIN runs USING (run)"
    rows = connection.execute(ask, [*values, -1 if limit is None else limit]).fetchall()
    return [facts_in(row) for row in rows]
