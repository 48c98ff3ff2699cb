"""Documents cut into passages, at blank lines where there are any. Called by shelf.py."""

import io
from collections.abc import Iterator
from dataclasses import dataclass

from cray_agents.tools.html_text import html_text

SIZE = 1500  # characters of a passage, about 350 tokens
HTML = (".html", ".htm", ".xhtml")


class Unreadable(ValueError):
    """A file is no text; the message says why."""


@dataclass(frozen=True)
class Passage:
    """Lines `first` to `last`, from 1, of a file. Of HTML the lines are those of its text."""

    path: str
    first: int
    last: int
    text: str


def read_document(path: str, data: bytes) -> str:
    """A file's text. Raises Unreadable."""
    if path.lower().endswith(HTML):
        return html_text(data)
    if b"\0" in data:
        raise Unreadable("not text")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        raise Unreadable("not UTF-8 text") from error


def passages_of(path: str, text: str) -> Iterator[Passage]:
    """The text in passages of about SIZE characters, none empty. A very long line is cut."""
    pieces: list[str] = []
    first = 1
    for number, line in enumerate(io.StringIO(text, newline="\n"), 1):
        size = sum(map(len, pieces))
        if pieces and (size + len(line) > SIZE or (size > SIZE // 2 and _begins(line, pieces[-1]))):
            yield from _cut(path, first, number - 1, "".join(pieces))
            pieces, first = [], number
        pieces.append(line)
    if pieces:
        yield from _cut(path, first, first + len(pieces) - 1, "".join(pieces))


def _begins(line: str, before: str) -> bool:
    """Whether a paragraph or a section begins with this line."""
    return line.startswith("#") or (not before.strip() and bool(line.strip()))


def _cut(path: str, first: int, last: int, text: str) -> Iterator[Passage]:
    for at in range(0, len(text), SIZE):
        if (piece := text[at : at + SIZE].strip("\n")).strip():
            yield Passage(path, first, last, piece)
