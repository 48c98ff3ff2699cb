"""Passages: cut documents at blank lines, or by size, and keep the vectors of their texts on disk.

    $CRAY_AGENTS_CACHE or /var/tmp
      cray-agents-<uid>/documents/<digest of folder and patterns>-<FORMAT>.sqlite

A deleted file is made anew. Several processes may use it. Called by documents.py.
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
FORMAT = 1  # of the file of vectors
FRESH = 2.0  # seconds; so new a file may change again without a change of its time
_SCHEMA = """
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


class FolderPassages:
    """The passages of a folder's files that match `include`, in memory.

    `left_out` has the files that could not be read, with the reasons.
    """

    def __init__(self, folder: Path, include: Sequence[str], max_bytes: int) -> None:
        self._folder, self._include, self._max_bytes = folder, tuple(include), max_bytes
        self._files: dict[str, tuple[str, list[Passage]]] = {}  # stamp and passages by path
        self.left_out: dict[str, str] = {}

    def refresh(self) -> bool:
        """Read new and changed files, forget removed ones; return True if any file changed."""
        current = dict(self._scan())
        gone = self._files.keys() - current.keys()
        new = [path for path, stamp in current.items() if self._files.get(path, [""])[0] != stamp]
        for path in gone:
            del self._files[path]
            self.left_out.pop(path, None)
        for path in new:
            self._files[path] = (current[path], self._read(path))
        return bool(gone or new)

    def all(self) -> list[Passage]:
        """Return every passage, file by file."""
        return [passage for _, passages in self._files.values() for passage in passages]

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

    def _read(self, path: str) -> list[Passage]:
        self.left_out.pop(path, None)
        try:
            data = safe_paths.read(self._folder, path, self._max_bytes)
            return list(passages_of(path, read_document(path, data)))
        except (ToolError, Unreadable) as error:
            self.left_out[path] = str(error)
            return []


class VectorFile:
    """The vectors of texts, by model and digest, for the documents of a folder."""

    def __init__(self, folder: Path, include: Sequence[str]) -> None:
        place = host_cache() / "documents"
        try:
            place.mkdir(mode=0o700, exist_ok=True)
            self._base = sqlite3.connect(
                place / f"{digest([os.fsdecode(folder), *include])}-{FORMAT}.sqlite",
                timeout=60, check_same_thread=False, isolation_level=None,
            )  # fmt: skip
            self._base.execute("pragma journal_mode = wal")
            self._base.execute("pragma synchronous = off")  # lost vectors are made again
            self._base.executescript(_SCHEMA)
        except (OSError, sqlite3.Error) as error:
            raise StoreError(f"cannot keep vectors of {folder} in {place}: {error}") from error

    def read(self, model: str) -> dict[str, bytes]:
        """Return the stored vectors of a model, by the digest of their text."""
        rows = self._base.execute("select digest, vector from vectors where model = ?", (model,))
        return dict(rows)

    def keep(self, model: str, vectors: Mapping[str, bytes]) -> None:
        """Store vectors, by the digest of their text."""
        rows = [(digest, model, vector) for digest, vector in vectors.items()]
        self._base.executemany("insert or replace into vectors values (?, ?, ?)", rows)


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
