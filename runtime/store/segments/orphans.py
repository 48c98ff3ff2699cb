"""Orphans: seal open segments of dead writers and finish interrupted work, from any process.

An open segment without appends for an hour, by the file system's own clock, is first renamed. If
its writer still lives, it finds its path gone and writes to a new file (writer.py). Called by
store.py, which compaction.py and the command line call, and by salvage.py.
"""

import logging
import os
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path

from cray_agents.errors import StoreError
from cray_agents.runtime.store.segments.drafts import verify
from cray_agents.runtime.store.segments.line_format import (
    COMPACTED,
    LEFT,
    SEALED,
    draft_of,
    is_draft,
    name_of,
)
from cray_agents.runtime.store.segments.reader import Segments
from cray_agents.runtime.store.segments.sealed import seal

ORPHANED = 3600.0  # seconds
STALE = 86400.0  # seconds after which a draft counts as abandoned

log = logging.getLogger(__name__)


def seal_orphans(
    directory: Path, is_own: Callable[[str], bool], older_than: float = ORPHANED
) -> list[Path]:
    """Seal the segments of dead writers. Return their sealed paths. Blocks: call it in a thread.

    `is_own` tells whether a stem belongs to this process, such as `SegmentWriter.holds`. This also
    finishes interrupted seals and compactions, removes replaced segments, and deletes drafts older
    than a day. Segments that cannot be sealed are logged and left for the next call. Raises
    StoreError if the directory cannot be read or written.
    """
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208  only names are used
        now = file_system_time(directory) if names else 0.0
    except FileNotFoundError:
        return []
    except OSError as error:
        raise StoreError(f"cannot look after {directory}: {error.strerror or error}") from error
    sealed = []
    for name in names:
        path = directory / name
        try:
            if is_draft(name):
                _drop_stale(path, now)
            elif (left := _take_over(path, is_own, now - older_than)) is not None:
                sealed.append(seal(left))
                log.info("sealed %s, which its writer had left", left)
        except FileNotFoundError:  # another process does the same
            continue
        except OSError as error:
            log.warning("%s stays as it is: %s", path, error)
    remove_replaced(directory)
    return sealed


def remove_replaced(directory: Path) -> list[str]:
    """Remove the segments that others replace, as a compaction does at its end.

    The replacing segments are first read whole. Return the removed stems. Raises StoreError.
    """
    segments, replaced = Segments(directory), set[str]()
    for path in directory.glob(f"{COMPACTED}*{SEALED}"):
        replaces = segments.replaced_stems(path.name.removesuffix(SEALED))
        if any((directory / f"{stem}{SEALED}").exists() for stem in replaces):
            try:
                replaced.update(verify(path).replaces)
            except FileNotFoundError:
                continue
            except OSError as error:
                log.warning("what %s replaces stays, too: %s", path, error)
    segments.close()
    gone = []
    for stem in sorted(replaced, key=lambda stem: stem.startswith(COMPACTED)):  # the oldest first
        path = directory / f"{stem}{SEALED}"
        with suppress(FileNotFoundError):
            path.unlink()
            gone.append(stem)
            log.info("removed %s, whose place another segment has taken", path)
    return gone


def file_system_time(directory: Path) -> float:
    """Return the file system's time, which may differ from this host's. Raises OSError."""
    probe = draft_of(directory / "clock")
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _take_over(path: Path, is_own: Callable[[str], bool], before: float) -> Path | None:
    """Rename a dead writer's segment. Return the path to seal; None if there is nothing to seal."""
    named = name_of(path.name)
    if named is None or named.form == SEALED or is_own(named.stem):
        return None
    if named.form == LEFT or path.with_name(named.stem + SEALED).exists():
        return path
    if path.stat().st_mtime > before:
        return None
    left = path.with_name(named.stem + LEFT)
    path.rename(left)
    return left


def _drop_stale(path: Path, now: float) -> None:
    if now - path.stat().st_mtime > STALE:
        with suppress(FileNotFoundError):
            path.unlink()
            log.info("removed %s, which was never finished", path)
