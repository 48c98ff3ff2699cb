"""Passages: cut documents at blank lines, or by size, and keep them in a SQLite file on this host.

    $CRAY_AGENTS_CACHE or /var/tmp
      cray-agents-<uid>/documents/<digest of folder and patterns>-<FORMAT>.sqlite

The file also keeps vectors. A deleted one is made anew. Several processes may use it. Called by
documents.py.
"""

import fnmatch
import hashlib
import io
import os
import sqlite3
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from cray_agents.errors import StoreError, ToolError
from cray_agents.paths import host_cache
from cray_agents.records import digest
from cray_agents.tools import safe_paths
from cray_agents.tools.html_text import html_text

SIZE = 1500  # characters in a passage, about 350 tokens
HTML = (".html", ".htm", ".xhtml")
FORMAT = 1  # of the file; increased when passages are cut in another way
BATCH = 200  # files in a transaction
FRESH = 2.0  # seconds; so new a file may change again without a change of its time
_SCHEMA = """
create table if not exists files(
    path text primary key, stamp text not null, problem text);
create table if not exists passages(
    id integer primary key autoincrement, path text not null, first integer not null,
    last integer not null, text text not null);
create index if not exists passages_of on passages(path);
create table if not exists vectors(
    digest text not null, model text not null, vector blob not null, primary key(digest, model));
"""


class Unreadable(ValueError):
    """A file is not text; the message gives the reason."""


@dataclass(frozen=True)
class Passage:
    """Lines `first` to `last` of a file, from 1. For HTML they are lines of its text."""

    path: str
    first: int
    last: int
    text: str


class PassageStore:
    """The passages of a folder's files that match `include`. No number is used twice."""

    def __init__(self, folder: Path, include: Sequence[str], max_bytes: int) -> None:
        self._folder, self._include, self._max_bytes = folder, tuple(include), max_bytes
        folder_path = host_cache() / "documents"
        name = digest([os.fsdecode(folder), *self._include])
        try:
            folder_path.mkdir(mode=0o700, exist_ok=True)
            self._base = sqlite3.connect(
                folder_path / f"{name}-{FORMAT}.sqlite", timeout=60, check_same_thread=False,
                isolation_level=None,
            )  # fmt: skip
            self._base.execute("pragma journal_mode = wal")
            self._base.execute("pragma synchronous = off")  # lost data is read again
            self._base.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(
                f"cannot keep what was read of {folder} in {folder_path}: {error}"
            ) from error
        self._last_passages: tuple[int, int] | None = None

    def refresh(self) -> bool:
        """Read new and changed files, forget removed ones; return True if any passage changed."""
        current = dict(self._scan())
        known = dict(self._base.execute("select path, stamp from files"))
        gone = [path for path in known if path not in current]
        new = [path for path, stamp in current.items() if known.get(path) != stamp]
        for at in range(0, len(new), BATCH):
            some = new[at : at + BATCH]
            self._replace(some, [(path, current[path], *self._read(path)) for path in some])
        self._replace(gone, [])
        now = self._base.execute("select count(*), coalesce(max(id), 0) from passages").fetchone()
        before, self._last_passages = self._last_passages, now
        return self._last_passages != before

    def all(self) -> Iterator[tuple[int, Passage]]:
        """Yield every passage with its number, in the order of reading."""
        rows = self._base.execute("select id, path, first, last, text from passages order by id")
        for at, *about in rows:
            yield at, Passage(*about)

    def passages(self, ranked: Sequence[tuple[int, float]]) -> Iterator[tuple[Passage, float]]:
        """Yield passages by their numbers, skipping those removed meanwhile."""
        for at, score in ranked:
            row = self._base.execute(
                "select path, first, last, text from passages where id = ?", (at,)
            ).fetchone()
            if row is not None:
                yield Passage(*row), score

    def left_out(self) -> dict[str, str]:
        """Return the files that could not be read, with the reasons."""
        return dict(self._base.execute("select path, problem from files where problem is not null"))

    def vectors(self, model: str) -> dict[str, bytes]:
        """Return the stored vectors of a model, by the digest of their text."""
        return dict(
            self._base.execute("select digest, vector from vectors where model = ?", (model,))
        )

    def keep_vectors(self, model: str, vectors: Mapping[str, bytes]) -> None:
        """Store vectors, by the digest of their text."""
        rows = [(digest, model, vector) for digest, vector in vectors.items()]
        self._base.executemany("insert or replace into vectors values (?, ?, ?)", rows)

    def _scan(self) -> Iterator[tuple[str, str]]:
        """Yield each file with a stamp that changes when the file does."""
        now = time.time()
        for path, _, _, about in safe_paths.walk(self._folder, "."):
            if not path.isprintable() or any(part.startswith(".") for part in path.split("/")):
                continue
            if not any(fnmatch.fnmatchcase(path, pattern) for pattern in self._include):
                continue
            fresh = "" if abs(now - about.st_mtime) > FRESH else f" {time.time_ns()}"
            yield path, f"{about.st_mtime_ns} {about.st_size} {about.st_ino}{fresh}"

    def _read(self, path: str) -> tuple[list[Passage], str | None]:
        try:
            data = safe_paths.read(self._folder, path, self._max_bytes)
            return list(passages_of(path, read_document(path, data))), None
        except (ToolError, Unreadable) as error:
            return [], str(error)

    def _replace(
        self, old: Sequence[str], new: Sequence[tuple[str, str, list[Passage], str | None]]
    ) -> None:
        """Replace files by new ones, (path, stamp, passages, problem)."""
        if not old:
            return
        self._base.execute("begin immediate")
        with self._base:
            for path in old:
                self._base.execute("delete from passages where path = ?", (path,))
                self._base.execute("delete from files where path = ?", (path,))
            for path, stamp, passages, problem in new:
                self._base.execute("insert into files values (?, ?, ?)", (path, stamp, problem))
                self._base.executemany(
                    "insert into passages(path, first, last, text) values (?, ?, ?, ?)",
                    [(one.path, one.first, one.last, one.text) for one in passages],
                )


def digest_of(text: str) -> str:
    """Return a hash of a text, so that equal passages share a vector."""
    return hashlib.sha256(text.encode()).hexdigest()[:32]


def read_document(path: str, data: bytes) -> str:
    """Return a file's text. Raises Unreadable."""
    if path.lower().endswith(HTML):
        return html_text(data)
    if b"\0" in data:
        raise Unreadable("not text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("not UTF-8 text") from error


def passages_of(path: str, text: str) -> Iterator[Passage]:
    """Cut a text into passages of about SIZE characters, none empty. Very long lines are cut."""
    pieces: list[str] = []
    first = 1
    for number, line in enumerate(io.StringIO(text, newline="\n"), 1):
        size = sum(map(len, pieces))
        if pieces and (
            size + len(line) > SIZE or (size > SIZE // 2 and _starts_block(line, pieces[-1]))
        ):
            yield from _make_passages(path, first, number - 1, "".join(pieces))
            pieces, first = [], number
        pieces.append(line)
    if pieces:
        yield from _make_passages(path, first, first + len(pieces) - 1, "".join(pieces))


def _starts_block(line: str, before: str) -> bool:
    """Return True if a paragraph or a section begins with this line."""
    return line.startswith("#") or (not before.strip() and bool(line.strip()))


def _make_passages(path: str, first: int, last: int, text: str) -> Iterator[Passage]:
    for at in range(0, len(text), SIZE):
        if (piece := text[at : at + SIZE].strip("\n")).strip():
            yield Passage(path, first, last, piece)
