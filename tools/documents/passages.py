"""Passages: cut documents at blank lines, or by size. Called by passage_store.py."""

import io
from collections.abc import Iterator
from dataclasses import dataclass

from cray_agents.tools.html_text import html_text

SIZE = 1500  # characters in a passage, about 350 tokens
HTML = (".html", ".htm", ".xhtml")


class Unreadable(ValueError):
    """A file is not text; the message gives the reason."""


@dataclass(frozen=True)
class Passage:
    """Lines `first` to `last` of a file, from 1. For HTML they are lines of its text."""

    path: str
    first: int
    last: int
    text: str


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
