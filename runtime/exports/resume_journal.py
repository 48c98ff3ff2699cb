"""How far an interrupted export came: a small file beside its target, replaced atomically.

    <target>                   absent, or what an earlier export published
    .<target>.part             what is written so far: a file of lines, or a directory of shards
    .<target>.export.json      the journal: which export this is, and up to where the part is good

What the part holds beyond the journal is cut off or written again, so that a killed export goes on
and ends with the same bytes as an undisturbed one. Used by lines.py and tables.py.
"""

import os
import shutil
import socket
from collections import Counter
from dataclasses import asdict, dataclass, field, replace
from glob import escape
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import BadInput, Corrupt, StoreError
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.exports.counts import ExportCounts


@dataclass(frozen=True)
class ResumeJournal:
    """Where an export stands. `cursor`: of the last item that is written, `bytes` with it.

    `digest` names the export, `says` it in words. `state` is its source's. `shards` are the rows of
    each. `whole`: the part is all there and only wants its name.
    """

    digest: str
    says: str
    state: dict[str, Any]
    cursor: str = ""
    bytes: int = 0
    records: int = 0
    runs: int = 0
    losses: dict[str, int] = field(default_factory=dict)
    shards: list[int] = field(default_factory=list)
    files: int = 0
    whole: bool = False
    writer: dict[str, Any] = field(default_factory=dict)

    def tally(self) -> ExportCounts:
        """Its counts, to go on counting."""
        return ExportCounts(self.records, self.runs, Counter(self.losses))

    def moved(self, cursor: str, size: int, tally: ExportCounts) -> "ResumeJournal":
        """It, further on."""
        return replace(self, cursor=cursor, bytes=size, **tally.plain())


class ExportDraft:
    """The hidden part of a target and its journal; `begin` finds them, or makes the journal.

    Raises BadInput where another export is under way, or lies there half done.
    """

    def __init__(self, target: Path) -> None:
        self.target = target
        self.part = target.with_name(f".{target.name}.part")
        self._path = target.with_name(f".{target.name}.export.json")

    def begin(self, fresh: ResumeJournal, *, restart: bool) -> tuple[ResumeJournal, bool]:
        """The journal to go on from, and whether anything is there to go on from."""
        self.target.parent.mkdir(parents=True, exist_ok=True)
        found = self._read()
        if found is not None:
            self._check_idle(found)
            if restart:
                self.remove()
                found = None
            elif found.digest != fresh.digest:
                raise BadInput(
                    f"beside {self.target} lies half of another export ({found.says}, "
                    f"{found.records:,} records): finish it by its own command, or begin anew "
                    "with --restart, which removes it",
                    param="output",
                    code="other_export",
                )
        if found is not None and not (self.part.exists() or (found.whole and self.target.exists())):
            self.remove()  # somebody took the part away
            found = None
        if found is None:
            self._remove_part()
            mine = replace(fresh, writer=_writer())
            if not durable.create_file(self._path, _text(mine)):
                raise _busy(self.target, "another process")
            return mine, False
        mine = replace(found, writer=_writer())
        self.save(mine)
        return mine, mine.runs > 0 or mine.whole

    def save(self, journal: ResumeJournal) -> None:
        """Let an export that is killed after this go on from here."""
        durable.replace_file(self._path, _text(journal))

    def state(self, digest: str) -> dict[str, Any] | None:
        """The source's state in the journal of this export, if it lies here."""
        found = self._read()
        return found.state if found is not None and found.digest == digest else None

    def whole(self, digest: str) -> bool:
        """Whether this export is written and only wants its name, or its journal's removal."""
        found = self._read()
        return found is not None and found.digest == digest and found.whole

    def publish(self, journal: ResumeJournal, made: Path) -> None:
        """Give the whole part its name. Again, after a kill: whatever of it was left to do."""
        self.save(replace(journal, whole=True))
        if made.exists():
            self._rename(made)
            durable.sync(self.target.parent)
        self.remove()

    def remove(self) -> None:
        """Part and journal, and what kills left of journals; the journal itself last."""
        self._remove_part()
        for left in self.target.parent.glob(f".{escape(self._path.name)}.draft_*"):
            left.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    def _rename(self, made: Path) -> None:
        try:
            made.replace(self.target)
        except OSError as error:
            raise StoreError(
                f"{self.target} cannot be published: {error.strerror}; once it can be, the same "
                "command ends the export"
            ) from error

    def _remove_part(self) -> None:
        if self.part.is_dir():
            shutil.rmtree(self.part)
        else:
            self.part.unlink(missing_ok=True)

    def _read(self) -> ResumeJournal | None:
        try:
            return ResumeJournal(**checksums.read_json(self._path))
        except FileNotFoundError:
            return None
        except (Corrupt, TypeError) as error:
            raise Corrupt(f"{self._path} is no export's journal: remove it ({error})") from error

    def _check_idle(self, found: ResumeJournal) -> None:
        mine = _writer(found.writer.get("pid", 0))
        if mine["started"] and found.writer == mine and mine["pid"] != os.getpid():
            raise _busy(self.target, f"process {mine['pid']}")


def _text(journal: ResumeJournal) -> bytes:
    return checksums.with_crc(orjson.dumps(asdict(journal)))


def _busy(target: Path, who: str) -> BadInput:
    return BadInput(f"{target} is being exported by {who}", param="output", code="export_running")


def _writer(pid: int | None = None) -> dict[str, Any]:
    """Which process writes; its start tells it from a later one of the same number."""
    pid = os.getpid() if pid is None else pid
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        started = text.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return {"host": socket.gethostname(), "pid": pid, "started": started}
