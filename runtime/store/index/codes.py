"""Codes: store names, and sets of models or tags, as numbers, so that queries compare numbers.

Most runs share their agent, loop, models and tags, so codes are few. The table `members` lists the
sets that have a name. New codes are given by run_rows.py; filters.py looks them up.
"""

import sqlite3
from collections.abc import Iterable

import orjson

MODELS, TAGS = 0, 1  # kinds of sets
MAX_CACHED = 20_000  # names and sets remembered, each


class Codes:
    """A cache of codes for one connection's transactions; void once one is rolled back."""

    def __init__(self) -> None:
        self.names: dict[str | None, int | None] = {None: None}  # codes already given
        self._sets: dict[tuple[int, tuple[str, ...]], int] = {}

    def name(self, connection: sqlite3.Connection, name: str | None) -> int | None:
        """Return the code of a name, a new one if needed; None has no code."""
        if name not in self.names:
            if len(self.names) >= MAX_CACHED:
                self.names = {None: None}
            connection.execute("INSERT OR IGNORE INTO names (name) VALUES (?)", (name,))
            self.names[name] = name_code(connection, name or "")
        return self.names[name]

    def set(self, connection: sqlite3.Connection, kind: int, members: tuple[str, ...]) -> int:
        """Return the code of a sorted set; 0 if it is empty. Models are also found by bare name."""
        if not members:
            return 0
        code = self._sets.get((kind, members))
        if code is None:
            if len(self._sets) >= MAX_CACHED:
                self._sets.clear()
            code = self._sets[kind, members] = _set_code(connection, kind, members)
        return code


def name_code(connection: sqlite3.Connection, name: str) -> int | None:
    """Return the code of a name, if it has one."""
    row = connection.execute("SELECT code FROM names WHERE name = ?", (name,)).fetchone()
    return None if row is None else int(row[0])


def sets_with(connection: sqlite3.Connection, kind: int, name: str, most: int) -> list[int]:
    """Return the codes of at most `most` sets that hold this name."""
    rows = connection.execute(
        "SELECT code FROM members WHERE kind = ? AND name = ? LIMIT ?", (kind, name, most)
    )
    return [code for (code,) in rows]


def _set_code(connection: sqlite3.Connection, kind: int, members: Iterable[str]) -> int:
    key = orjson.dumps(members).decode()
    sql = "SELECT code FROM sets WHERE kind = ? AND members = ?"
    row = connection.execute(sql, (kind, key)).fetchone()
    if row is None:
        into = "INSERT INTO sets (kind, members) VALUES (?, ?)"
        code = connection.execute(into, (kind, key)).lastrowid
        names = set(members)
        if kind == MODELS:
            names |= {name.partition("@")[0] for name in members}
        rows = [(kind, name, code) for name in names]
        connection.executemany("INSERT INTO members VALUES (?, ?, ?)", rows)
        row = (code,)
    return int(row[0])
