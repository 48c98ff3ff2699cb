"""Resume journal: record an export's progress in a small file beside its target.

    <target>                   absent, or the result of an earlier export
    .<target>.part             the data written so far: a file of lines, or a directory of shards
    .<target>.packed           what a format makes of the part's lines, where it makes another file
    .<target>.export.json      the journal: the export's identity, and the valid end of the part

The journal is replaced atomically. Data in the part beyond it is cut off or written again, so a
killed export ends with the same bytes as an undisturbed one. Used by exporter.py, jsonl_files.py
and parquet_files.py.
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
from cray_agents.runtime.exports.writers.counts import ExportCounts


@dataclass(frozen=True)
class ResumeJournal:
    """Progress of an export. `cursor` is the last written item's, `bytes` the size up to it.

    `digest` identifies the export, `says` describes it for people. `state` is the source's.
    `shards` holds the number of rows of each shard. `whole` means that the part is complete and
    lacks only its name. `writer` is the process that writes it.
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
        """Return the counts so far, for counting on."""
        return ExportCounts(self.records, self.runs, Counter(self.losses))

    def advance(self, cursor: str, size: int, tally: ExportCounts) -> "ResumeJournal":
        """Return the journal with a later cursor."""
        return replace(self, cursor=cursor, bytes=size, **tally.as_json())


class ExportDraft:
    """The hidden part of a target and its journal."""

    def __init__(self, target: Path) -> None:
        self.target = target
        self.part = target.with_name(f".{target.name}.part")
        self.packed = target.with_name(f".{target.name}.packed")  # made of a part of lines
        self._path = target.with_name(f".{target.name}.export.json")

    def begin(self, fresh: ResumeJournal, *, restart: bool) -> tuple[ResumeJournal, bool]:
        """Return the journal to go on from, and True if it holds any progress.

        Raises BadInput if the target has an export in progress, or half of another one.
        """
        self.target.parent.mkdir(parents=True, exist_ok=True)
        journal = self._read()
        if journal is not None:
            self._check_idle(journal)
            if restart:
                self.remove()
                journal = None
            elif journal.digest != fresh.digest:
                raise BadInput(
                    f"beside {self.target} lies half of another export ({journal.says}, "
                    f"{journal.records:,} records): finish it by its own command, or begin anew "
                    "with --restart, which removes it",
                    param="output",
                    code="other_export",
                )
        if journal is not None and not (
            self.part.exists() or (journal.whole and self.target.exists())
        ):
            self.remove()  # the part was removed by hand
            journal = None
        if journal is None:
            self._remove_part()
            own = replace(fresh, writer=_writer())
            if not durable.create_file(self._path, _encode(own)):
                raise _busy(self.target, "another process")
            return own, False
        own = replace(journal, writer=_writer())
        self.save(own)
        return own, own.runs > 0 or own.whole

    def save(self, journal: ResumeJournal) -> None:
        """Save the journal: an export killed after this resumes from it."""
        durable.replace_file(self._path, _encode(journal))

    def state(self, digest: str) -> dict[str, Any] | None:
        """Return the source's state from the journal of this export, None without one."""
        journal = self._read()
        return journal.state if journal is not None and journal.digest == digest else None

    def whole(self, digest: str) -> bool:
        """Tell whether the export is fully written, so that only publish() is left."""
        journal = self._read()
        return journal is not None and journal.digest == digest and journal.whole

    def publish(self, journal: ResumeJournal, complete: Path) -> None:
        """Rename the complete part to the target; repeatable after a kill."""
        self.save(replace(journal, whole=True))
        if complete.exists():
            self._rename(complete)
            durable.sync(self.target.parent)
        self.remove()

    def remove(self) -> None:
        """Remove the part, drafts of journals that kills left, and last the journal."""
        self._remove_part()
        for left in self.target.parent.glob(f".{escape(self._path.name)}.draft_*"):
            left.unlink(missing_ok=True)
        self._path.unlink(missing_ok=True)

    def _rename(self, complete: Path) -> None:
        try:
            complete.replace(self.target)
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
        self.packed.unlink(missing_ok=True)

    def _read(self) -> ResumeJournal | None:
        try:
            return ResumeJournal(**checksums.read_json(self._path))
        except FileNotFoundError:
            return None
        except (Corrupt, TypeError) as error:
            raise Corrupt(f"{self._path} is no export's journal: remove it ({error})") from error

    def _check_idle(self, journal: ResumeJournal) -> None:
        writer = _writer(journal.writer.get("pid", 0))
        if writer["started"] and journal.writer == writer and writer["pid"] != os.getpid():
            raise _busy(self.target, f"process {writer['pid']}")


def _encode(journal: ResumeJournal) -> bytes:
    return checksums.with_crc(orjson.dumps(asdict(journal)))


def _busy(target: Path, who: str) -> BadInput:
    return BadInput(f"{target} is being exported by {who}", param="output", code="export_running")


def _writer(pid: int | None = None) -> dict[str, Any]:
    """Identify a process; its start time tells it from a later process with the same pid."""
    pid = os.getpid() if pid is None else pid
    try:
        text = Path(f"/proc/{pid}/stat").read_text()
        started = text.rpartition(")")[2].split()[19]
    except (OSError, IndexError):
        started = ""
    return {"host": socket.gethostname(), "pid": pid, "started": started}
