"""Loop records: the reader of what a loop's finished iterations left.

    loops/<name>/generations/<n>.json    an Iteration, or what a client of its own wrote

The folder has the name that iterations had in earlier versions, so that a loop goes on in it. In
their records the key `iteration` was `generation`; `content` translates it. A record never changes.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import Corrupt, NewerFormat, NotFound
from cray_agents.iteration import Iteration
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums

CACHED = 20_000  # records


class LoopRecords:
    """The records of one loop's finished iterations, by their numbers."""

    def __init__(self, home: Home, loop: str) -> None:
        self.loop, self.folder = loop, home.iterations(loop)

    def path(self, number: int) -> Path:
        """Return the path of a record."""
        return self.folder / f"{number}.json"

    def numbers(self) -> list[int]:
        """Return the numbers of the iterations, in order."""
        return sorted(int(p.stem) for p in self.folder.glob("*.json") if p.stem.isdecimal())

    def content(self, number: int) -> dict[str, Any]:
        """Return a record as JSON, whoever wrote it. Raises NotFound, Corrupt."""
        try:
            return _content(self.path(number))
        except FileNotFoundError:
            message = f"loop {self.loop!r} has no iteration {number}"
            raise NotFound(message, param="number") from None

    def ended(self, number: int) -> float:
        """Return when a record was written."""
        return self.path(number).stat().st_mtime

    def listing(self) -> checksums.Listing[dict[str, Any]]:
        """Return all records as JSON, in order."""
        return checksums.list_whole(map(str, self.numbers()), lambda name: self.content(int(name)))

    def known(self, damaged: list[dict[str, str]]) -> list[Iteration | None]:
        """Return all records in order; None for one that a client of its own wrote.

        None for one that is damaged or of a newer format, too, which is noted in `damaged`.
        """
        records: list[Iteration | None] = []
        for number in self.numbers():
            try:
                records.append(self._record(number))
            except (Corrupt, NewerFormat, PermissionError) as error:
                records.append(None)
                damaged.append({"id": f"{self.loop}/{number}", "reason": str(error)})
        return records

    def finished(self) -> list[Iteration]:
        """Return all records in order. Raises Corrupt where one cannot be read."""
        records = []
        for number in self.numbers():
            record = self._record(number)
            if record is None:
                raise Corrupt(f"{self.path(number)} cannot be read: it has other fields")
            records.append(record)
        return records

    def _record(self, number: int) -> Iteration | None:
        return _read(self.path(number), self.path(number).stat().st_mtime_ns)


def _content(path: Path) -> dict[str, Any]:
    """Read a record in the names of today. Raises FileNotFoundError, Corrupt."""
    content = checksums.read_json(path)
    if not isinstance(content, dict):
        raise Corrupt(f"{path} is damaged: it holds no object")
    if "generation" in content:
        content.setdefault("iteration", content.pop("generation"))
    return content


@lru_cache(CACHED)
def _read(path: Path, changed: int) -> Iteration | None:
    """Read a record, once while its file has not `changed`; None where it has other fields."""
    try:
        return Iteration.model_validate(_content(path))
    except ValidationError:
        return None
