"""Loop summaries: every loop with its last generation and its curve of held-out success.

A generation's record never changes once it is written, so each is read once. Called by
gateway/routes/loops.py; runtime/accounting/ reads the records, too.
"""

from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from cray_agents.errors import BadInput
from cray_agents.generation import Generation
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.views.view_records import HoldoutPoint, LoopSummary

POINTS = 200  # of a curve
CACHED = 20_000  # records


def loops_page(home: Home, after: str | None, limit: int) -> checksums.Listing[dict[str, Any]]:
    """Return LoopSummaries as JSON, newest change first; `damaged` names generations.

    Raises BadInput for an unknown `after`.
    """
    folders = [path for path in home.loops.glob("*") if path.is_dir()]
    newest = sorted(((_changed(path), path.name) for path in folders), reverse=True)
    if after is not None:
        names = [name for _, name in newest]
        if after not in names:
            raise BadInput(f"after: no loop {after[:200]!r} is listed here", param="after")
        newest = newest[names.index(after) + 1 :]
    damaged: list[dict[str, str]] = []
    rows = [_summary(home.loop(name), when, damaged) for when, name in newest[:limit]]
    return checksums.Listing(rows, damaged, len(newest) > limit)


def _changed(folder: Path) -> float:
    """Return when a loop last wrote a generation, or else an entry of its journal."""
    for name in ("generations", "journal", "."):
        try:
            return (folder / name).stat().st_mtime
        except FileNotFoundError:
            continue
    return 0.0


def _summary(folder: Path, updated: float, damaged: list[dict[str, str]]) -> dict[str, Any]:
    records = generation_records(folder, damaged)
    known = [record for record in records if record is not None]
    step = -(-len(known) // POINTS) or 1
    points = [*known[::-step][::-1]] if known else []  # the last one is always among them
    return LoopSummary(
        id=folder.name,
        generations=len(records),
        updated=updated,
        last=records[-1] if records else None,
        holdout=[
            HoldoutPoint(
                generation=each.generation,
                success=each.holdout_success,
                tasks=each.holdout_tasks,
                version=each.version,
                promoted=each.promoted,
            )
            for each in points
        ],
    ).model_dump(mode="json")


def generation_records(folder: Path, damaged: list[dict[str, str]]) -> list[Generation | None]:
    """Return a loop's finished generations in order; None for one that a client of its own wrote.

    None for a damaged one, too, which is noted in `damaged`.
    """

    def read(name: str) -> Generation | None:
        path = folder / "generations" / f"{name}.json"
        return _record(path, path.stat().st_mtime_ns)

    records: list[Generation | None] = []
    for name in generation_names(folder):
        listing = checksums.list_whole([name], read)
        records += listing.rows or [None]
        damaged += [{**each, "id": f"{folder.name}/{name}"} for each in listing.damaged]
    return records


def generation_names(folder: Path) -> list[str]:
    """Return the numbers of a loop's finished generations, in order."""
    paths = (folder / "generations").glob("*.json")
    return sorted((path.stem for path in paths if path.stem.isdecimal()), key=int)


@lru_cache(CACHED)
def _record(path: Path, changed: int) -> Generation | None:
    """Return a generation's record; None where a client of its own wrote other fields."""
    content = checksums.read_json(path)
    try:
        return Generation.model_validate(content)
    except ValidationError:
        return None
