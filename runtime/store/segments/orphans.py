"""Seals what dead writers left open, and finishes what was cut short. Any process may, at any time.

An open segment that nobody has appended to for an hour, by the file system's own clock, is first
renamed: should its writer live after all, it finds its path gone and writes elsewhere (writer.py).
Called by store.py, for upkeep.py and the command line.
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
STALE = 86400.0  # seconds after which a draft is nobody's

log = logging.getLogger(__name__)


def seal_orphans(
    directory: Path, held: Callable[[str], bool], older_than: float = ORPHANED
) -> list[Path]:
    """Seal what dead writers left; the paths that were sealed. Blocks: call it in a thread.

    `held`: whether a segment (its stem) is this process's own: `writer.holds`.
    Also finishes what was cut short: seals, and compactions, whose replaced segments it removes;
    drafts go when they are older than a day. What cannot be sealed is logged and left for the next
    time. Raises StoreError if the directory cannot be read or written.
    """
    try:
        names = sorted(os.listdir(directory))  # noqa: PTH208  names are all that is needed
        now = clock(directory) if names else 0.0
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
            elif (left := _left(path, held, now - older_than)) is not None:
                sealed.append(seal(left))
                log.info("sealed %s, which its writer had left", left)
        except FileNotFoundError:  # another does the same
            continue
        except OSError as error:
            log.warning("%s stays as it is: %s", path, error)
    remove_replaced(directory)
    return sealed


def remove_replaced(directory: Path) -> list[str]:
    """Remove the segments whose place others have taken, as a compaction does at its end.

    The others are read whole before. Returns the stems that are gone. Raises StoreError.
    """
    segments, replaced = Segments(directory), set[str]()
    for path in directory.glob(f"{COMPACTED}*{SEALED}"):
        replaces = segments.replaced(path.name.removesuffix(SEALED))
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


def clock(directory: Path) -> float:
    """What time it is for the file system, which may not be what it is here. Raises OSError."""
    probe = draft_of(directory / "clock")
    probe.touch()
    try:
        return probe.stat().st_mtime
    finally:
        probe.unlink(missing_ok=True)


def _left(path: Path, held: Callable[[str], bool], before: float) -> Path | None:
    """The path of a segment to be sealed; None if it is not one."""
    named = name_of(path.name)
    if named is None or named.form == SEALED or held(named.stem):
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
