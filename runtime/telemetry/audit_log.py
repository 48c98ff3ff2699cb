"""Audit log: who changed what, in lines that are chained by their hashes.

    audit/<writer>.jsonl   append-only lines with checksums; each file has one writer

Beside its fields a line has `prev`, the SHA-256 of the line before it with its checksum. The first
line has `heads` instead: of each file that there was, the hash of its newest line. So the chain
breaks where a line was changed or taken out, a file removed, or the end of an older file cut off.
Only at the end of the newest file nothing follows that could tell: note the heads that
`cray-agents doctor` prints elsewhere, to prove that end, too.

The gateway writes a line for every request to a management route that changes something, before its
answer begins (http/middleware.py); `cray-agents keys` writes its own.
"""

import logging
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from pydantic import Field

from cray_agents.errors import Corrupt, NewerFormat
from cray_agents.records import Record, new_id
from cray_agents.runtime.disk import durable, journal
from cray_agents.runtime.disk.journal import Journal

log = logging.getLogger(__name__)


class AuditLine(Record):
    """A change, and the caller who asked for it.

    `who`, `key`, `role`: of the API key; `who` is the user of this host for a command. `action`:
    the route or the command. `status`: of the answer; 0 for a command. `request`: its x-request-id.
    `reason`: that the caller gave, in the header X-Reason or as `--reason`.
    """

    time: float
    who: str
    key: str = ""
    role: str = ""
    action: str
    path: str = ""
    status: int = 0
    request: str = ""
    reason: str = ""
    prev: str = ""
    heads: dict[str, str] = Field(default_factory=dict)


class AuditLog:
    """The audit log of a root, and this process's file in it, which the first line makes."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._journal = Journal(lambda: folder / f"{int(time.time()):011d}-{new_id('audit')}.jsonl")
        self._last = ""
        self._lock = threading.Lock()

    def note(self, **values: Any) -> None:
        """Append a line, durable when this returns. Blocks. A failure is logged, and no error."""
        with self._lock:
            try:
                self._append(values)
            except OSError as error:
                log.error("the audit log lacks %s: %s", values, error)

    def close(self) -> None:
        """Close the file."""
        with self._lock:
            self._journal.close()

    def _append(self, values: dict[str, Any]) -> None:
        begins = self._journal.begins
        chain = {"heads": heads(self._folder)} if begins else {"prev": self._last}
        line = AuditLine(time=time.time(), **values, **chain)
        text = journal.line_of(line.model_dump(mode="json"))
        self._journal.append([text])
        self._last = durable.sha256(text)


def heads(folder: Path) -> dict[str, str]:
    """Return the hash of the last whole line of each file, by the file's name."""
    return {path.name: durable.sha256(lines[-1]) for path, lines in _files(folder) if lines}


def verify_audit(folder: Path) -> list[str]:
    """Return what is wrong, a sentence each; nothing if every chain is whole."""
    problems: list[str] = []
    hashes: dict[str, set[str]] = {}
    mentioned: list[tuple[str, str, str]] = []  # file, hash, and the file that has them as heads
    for path, texts in _files(folder):
        before = ""
        known = hashes[path.name] = set()
        for number, text in enumerate(texts, 1):
            place = f"{path}: line {number}"
            try:
                line = journal.parse_line(text, place, AuditLine)
            except (Corrupt, NewerFormat) as error:
                problems.append(str(error))
            else:
                if line.prev != before:
                    problems.append(f"{place} does not follow the line before it: one was changed"
                                    " or is missing")  # fmt: skip
                if number == 1:
                    mentioned += [(name, at, path.name) for name, at in line.heads.items()]
            before = durable.sha256(text)
            known.add(before)
        if path.read_bytes()[-1:] not in (b"", b"\n"):
            problems.append(f"{path} ends in half a line")
    for name, at, witness in mentioned:
        if name not in hashes:
            problems.append(f"{folder / name} is missing: {witness} followed it")
        elif at not in hashes[name]:
            problems.append(
                f"{folder / name} lacks the line {at[:12]} that {witness} followed: lines were "
                "changed or cut off"
            )
    return problems


def _files(folder: Path) -> Iterator[tuple[Path, list[bytes]]]:
    """Yield each file with its whole lines, in the order of their beginnings."""
    for path in sorted(folder.glob("*.jsonl")):
        yield path, journal.split_lines(path.read_bytes())
