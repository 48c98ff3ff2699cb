"""Queries: run filters and orders as SQL over the table `runs`, pages of runs, and statistics.

Columns that the order does not use are written `+column`. SQLite then scans the index of the order
and compares as it goes, instead of gathering all matches of a column and sorting them. SQLite
computes all statistics, so that a thread which asks lets the others run. Used by index.py.
"""

import math
import sqlite3
from abc import ABC, abstractmethod
from collections import Counter
from collections.abc import Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

from cray_agents.errors import BadInput, NotFound
from cray_agents.queries import RunFilter, RunQuery
from cray_agents.runtime.store.index.database import (
    any_version,
    codes_of,
    from_rank,
    name_code,
    to_rank,
)
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


# ---- statistics: figures by group, counts by facet, histograms
_NAMED = ("agent", "model", "loop", "split", "stop_reason", "error", "key")  # hold codes
GROUPS = {
    **{name: name for name in _NAMED},
    "key": "owner",
    "iteration": "iteration",
    "task": "task",
    "day": "date(started, 'unixepoch')",
}
_FIGURES = {
    "runs": "count(*)",
    "rewarded": "count(reward)",
    "success": "avg(reward >= 1)",
    "mean_reward": "avg(reward)",
    "min_reward": "min(reward)",
    "max_reward": "max(reward)",
    "calls": "sum(calls)",
    "prompt_tokens": "sum(prompt)",
    "sampled_tokens": "sum(sampled)",
    "cached_tokens": "sum(cached)",
    "errors": "count(error)",
    "infrastructure": "sum(infrastructure)",
    "mean_seconds": "avg(seconds)",
    "seconds": "sum(seconds)",
    "last": "max(started)",
}
#: Nearest-rank percentiles: the smallest value that 50 or 95 % of runs do not exceed.
_PERCENTILES = {
    "p50_seconds": "min(CASE WHEN place * 100 >= number * 50 THEN seconds END)",
    "p95_seconds": "min(CASE WHEN place * 100 >= number * 95 THEN seconds END)",
}
_USED = "reward, calls, prompt, sampled, cached, error, infrastructure, seconds, started"
#: Facets: columns of the covering SQLite indexes; `model` and `tag` hold several names.
FACETS = {
    **{name: name for name in ("agent", "loop", "iteration", "split", "stop_reason", "error")},
    "model": "models",
    "tag": "tags",
}
_SEVERAL = ("model", "tag")
FEW = 1 / 20  # of all runs: so many of a time are read one by one
_FIGURES_TABLE = "runs INDEXED BY runs_by_id"
HISTOGRAMS = {
    "reward": "reward",
    "seconds": "seconds",
    "turns": "turns",
    "tokens": "prompt + sampled",
}
_WHOLE = ("turns", "tokens")
#: A number that follows from a run's without any pattern (Knuth's multiplicative hash), so that
#: every n-th run is not every time the same kind's.
_SPREAD = "((((run & 268435455) * 2654435761) & 4294967295) >> 12)"


class RunStatistics(ABC):
    """Statistics of runs; the index and the store have them."""

    @abstractmethod
    def _counting(self, query: RunFilter) -> AbstractContextManager[sqlite3.Connection]:
        """Return a connection for a query. Raises BadInput for one that it cannot answer."""

    def stats(
        self,
        query: RunFilter,
        by: Sequence[str] = (),
        *,
        bucket: float | None = None,
        percentiles: bool = True,
        owner: str | None = None,
        limit: int | None = None,
        inputs: bool = False,
    ) -> list[dict[str, Any]]:
        """Return counts and means of the matching runs, one row a group, largest group first.

        `by` may name agent, model, loop, iteration, split, stop_reason, error, task, key (the id
        of the API key that began the run) and day (of UTC, `2026-01-31`). A row has these and runs,
        rewarded, success (share of rewarded runs with a reward of 1 or more), mean_reward,
        min_reward, max_reward, calls, prompt_tokens, sampled_tokens, cached_tokens (of the prompts,
        not computed anew), errors, infrastructure, mean_seconds, seconds, last (start),
        p50_seconds, p95_seconds. `bucket` groups by `time`, the beginning of so many seconds, too;
        `percentiles` False leaves these two out, which takes a fraction of the time; `owner`: runs
        of this key only; `limit`: groups; `inputs`: each task's first row has one. Raises BadInput
        for another `by`, or a query with a text.
        """
        check_names("by", "group runs", by, GROUPS)
        wanted = {name: GROUPS[name] for name in by}
        if bucket is not None:
            wanted["time"] = f"CAST(started / {bucket!r} AS INTEGER) * {bucket!r}"
        keys = [f"g{i}" for i in range(len(wanted))]
        groups = [f"{sql} AS {key}" for sql, key in zip(wanted.values(), keys, strict=True)]
        figures = dict(_FIGURES)
        grouped = f"GROUP BY {', '.join(keys)}" if keys else "HAVING count(*) > 0"
        with self._counting(query) as connection:
            matching = _matching(connection, query, owner)
            if matching is None:
                return []
            rows_of = f"SELECT {', '.join([*groups, _USED])} {_scan(connection, query, matching)}"
            if percentiles:
                figures |= _PERCENTILES
                parted = f"PARTITION BY {', '.join(keys)}" if keys else ""
                rows_of = (
                    f"SELECT *, row_number() OVER ({parted} ORDER BY seconds) AS place,"
                    f" count(*) OVER ({parted}) AS number FROM ({rows_of})"
                )
            rows = connection.execute(
                f"SELECT {', '.join([*keys, *figures.values()])} FROM ({rows_of}) {grouped}"
                f" ORDER BY {', '.join(['count(*) DESC', *keys])} LIMIT ?",
                [*matching.values, -1 if limit is None else limit],
            ).fetchall()
            names = _names(connection)
            result = [
                {
                    name: _render_key(name, key, names)
                    for name, key in zip(wanted, row, strict=False)
                }
                | dict(zip(figures, row[len(wanted) :], strict=True))
                for row in rows
            ]
            if inputs:
                _add_inputs(connection, result)
        return result

    def facets(self, query: RunFilter, by: Sequence[str]) -> dict[str, list[dict[str, Any]]]:
        """Return the values of fields and how many matching runs have each, most runs first.

        One scan of one SQLite index counts all of them. A run counts for each of its models and
        tags. Raises BadInput.
        """
        check_names("facets", "count runs by", by, FACETS)
        counts: dict[str, Counter[Any]] = {name: Counter() for name in by}
        with self._counting(query) as connection:
            matching = match_condition(connection, query, None)
            if matching is None or not by:
                return {name: [] for name in by}
            columns = ", ".join(FACETS[name] for name in by)
            rows = _scan(connection, query, matching)
            sql = f"SELECT {columns}, count(*) {rows} GROUP BY {columns}"
            for *values, runs in connection.execute(sql, matching.values).fetchall():
                for name, value in zip(by, values, strict=True):
                    counts[name][value] += runs
            names = _names(connection)
        result = {}
        for name, counter in counts.items():
            runs_by_value: Counter[Any] = Counter()
            for value, runs in counter.items():
                if name in _SEVERAL:
                    keys = [names[code] for code in codes_of(value)]
                    keys = [key for key in keys if name == "tag" or not key.endswith("@")]
                else:
                    keys = [_render_key(name, value, names)]
                runs_by_value.update(dict.fromkeys(keys, runs))
            ordered = sorted(runs_by_value.items(), key=lambda item: (-item[1], str(item[0])))
            result[name] = [{"value": value, "runs": runs} for value, runs in ordered]
        return result

    def histograms(
        self, query: RunFilter, of: Sequence[str], bins: int, sample: int | None = None
    ) -> dict[str, dict[str, Any]]:
        """Return a Histogram (views/view_records.py) of each of reward, seconds, turns, tokens.

        Bins are equal; whole numbers over a short range get a bin each. Two scans count all of
        them; of about every n-th run only, where more than `sample` match. Raises BadInput.
        """
        check_names("histograms", "make a histogram of", of, HISTOGRAMS)
        with self._counting(query) as connection:
            matching = match_condition(connection, query, None)
            if matching is None or not of:
                return {name: {"edges": [], "counts": [], "missing": 0} for name in of}
            return _histograms(connection, query, matching, of, bins, sample)


def _add_inputs(connection: sqlite3.Connection, rows: list[dict[str, Any]]) -> None:
    statement = "SELECT id, told FROM runs WHERE shown = 1 AND task = ? LIMIT 1"
    for task, first in {row["task"]: row for row in reversed(rows)}.items():
        for run in connection.execute(statement, [task]):
            first["input"] = facts_in(run).input


def _histograms(
    connection: sqlite3.Connection,
    query: RunFilter,
    matching: SqlCondition,
    of: Sequence[str],
    bins: int,
    sample: int | None,
) -> dict[str, dict[str, Any]]:
    rows = _scan(connection, query, matching)
    values = matching.values
    every = 1
    if sample is not None:
        (matches,) = connection.execute(f"SELECT count(*) {rows}", values).fetchone()
        every = max(1, -(-matches // sample))
    if every > 1:
        rows += f" AND {_SPREAD} % {every} = 0"
    bounds = ", ".join(f"min({c}), max({c})" for c in (HISTOGRAMS[name] for name in of))
    flat = connection.execute(f"SELECT {bounds} {rows}", values).fetchone()
    edges = [
        bin_edges(low, high, bins, whole=name in _WHOLE) if low is not None else []
        for name, low, high in zip(of, flat[::2], flat[1::2], strict=True)
    ]
    numbers, places = list[str](), list[float]()
    for name, edge in zip(of, edges, strict=True):
        numbers.append(f"CAST(({HISTOGRAMS[name]} - ?) / ? AS INTEGER)" if edge else "NULL")
        places += [edge[0], edge[1] - edge[0]] if edge else []
    keys = ", ".join(map(str, range(1, len(of) + 1)))
    sql = f"SELECT {', '.join(numbers)}, count(*) {rows} GROUP BY {keys}"
    counts = [[0] * max(0, len(edge) - 1) for edge in edges]
    missing = [0] * len(of)
    for *numbered, runs in connection.execute(sql, [*places, *values]).fetchall():
        for at, number in enumerate(numbered):
            if number is None:
                missing[at] += runs
            else:  # the last edge belongs to the last bin, and rounding may miss by one
                counts[at][max(0, min(len(counts[at]) - 1, number))] += runs
    return {
        name: {"edges": edges[at], "counts": counts[at], "missing": missing[at], "every": every}
        | {"least": flat[2 * at], "most": flat[2 * at + 1]}
        for at, name in enumerate(of)
    }


def bin_edges(low: float, high: float, bins: int, *, whole: bool = False) -> list[float]:
    """Return the edges of equal bins from low to high; a single value gets one bin of width 1."""
    if whole and high - low < bins:
        return [float(edge) for edge in range(int(low), int(high) + 2)]
    width = (high - low) / bins
    if not width > 0:
        return [low, low + 1.0]
    return [low + width * number for number in range(bins)] + [high]


def _scan(connection: sqlite3.Connection, query: RunFilter, matching: SqlCondition) -> str:
    """Return FROM and WHERE of the matching runs, with the SQLite index to scan.

    A few runs of a time are found by their start and read one by one. Else all runs' figures are
    scanned, which lie together.
    """
    return f"FROM {_table(connection, query)} WHERE {matching.sql}"


def _table(connection: sqlite3.Connection, query: RunFilter) -> str:
    if query.task is not None:
        return "runs"
    if query.since is None and query.until is None:
        return _FIGURES_TABLE
    since = -math.inf if query.since is None else query.since
    until = math.inf if query.until is None else query.until
    inside = "SELECT 1 FROM runs WHERE shown = 1 AND started BETWEEN ? AND ? LIMIT ?"
    (last,) = connection.execute("SELECT max(run) FROM runs").fetchone()
    most = int((last or 0) * FEW)
    (matches,) = connection.execute(
        f"SELECT count(*) FROM ({inside})", (since, until, most + 1)
    ).fetchone()
    return _FIGURES_TABLE if matches > most else "runs INDEXED BY runs_by_start"


def check_names(param: str, act: str, names: Sequence[str], known: Sequence[str] | Any) -> None:
    """Raise BadInput for a name that is not among the known ones."""
    for name in names:
        if name not in known:
            message = f"cannot {act} by {name!r}" if param == "by" else f"cannot {act} {name!r}"
            raise BadInput(f"{message}: {', '.join(known)}", param=param)


def _matching(
    connection: sqlite3.Connection, query: RunFilter, owner: str | None
) -> SqlCondition | None:
    matching = match_condition(connection, query, None)
    if matching is None or owner is None:
        return matching
    code = name_code(connection, owner)
    if code is None:
        return None
    return SqlCondition(f"{matching.sql} AND owner = ?", [*matching.values, code])


def _names(connection: sqlite3.Connection) -> dict[Any, Any]:
    return {None: None, **dict(connection.execute("SELECT code, name FROM names").fetchall())}


def _render_key(name: str, value: Any, names: dict[Any, Any]) -> Any:
    """Return the key of a group as readers know it."""
    if name in _NAMED:
        return names[value]
    if name == "iteration":
        return from_rank(value)
    if name == "time":
        return value
    return value or None  # "" is the column value of no task
