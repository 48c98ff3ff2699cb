"""Large folders are renamed, then deleted: whatever is killed meanwhile, nobody reads half of one.

What is being deleted is called `.<name>.old_<id>`. Called by trainers/, for resume points, and by
checkpoints.py and pruning.py.
"""

import logging
import shutil
from pathlib import Path

from cray_agents.records import new_id

OLD = ".old_"  # in the name of what is being deleted

log = logging.getLogger(__name__)


def remove(folder: Path) -> int:
    """Delete a folder; returns the bytes that this gave back. 0 if somebody else was first."""
    aside = folder
    if OLD not in folder.name:
        aside = folder.with_name(f".{folder.name.removeprefix('.')}.{new_id('old')}")
        try:
            folder.rename(aside)
        except FileNotFoundError:
            return 0
    before = size_of(aside)
    try:
        shutil.rmtree(aside)
    except FileNotFoundError:  # somebody else deletes it, too
        return 0
    except OSError as error:
        log.warning("%s is not deleted whole: %s; `models prune` tries again", aside, error)
    return before - size_of(aside)


def resume_points(megatron: Path) -> list[Path]:
    """The published resume points in a job's megatron/ folder, newest first."""
    return sorted(megatron.glob("step-*"), reverse=True)


def keep_newest(megatron: Path, count: int) -> None:
    """Delete all resume points of a job but the newest `count`."""
    for point in resume_points(megatron)[count:]:
        remove(point)


def size_of(folder: Path) -> int:
    """The bytes of the files in a folder and below; of what vanishes meanwhile none."""
    total = 0
    for path in folder.rglob("*"):
        try:
            total += path.lstat().st_size if not path.is_dir() else 0
        except FileNotFoundError:
            continue
    return total
