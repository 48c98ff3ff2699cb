"""Gives back the disk that versions, resume points and drafts take which nobody needs any more.

Called by cli/pruning.py, beside a running platform or without one. Records stay: a version, its
history, its lineage, its job. A checkpoint goes in three steps, and a kill after any of them is
mended by the next prune:

    <id>.pruned is written      what stays of it (checkpoints.py)
    <id> -> .<id>.aside_<...>   from now on nobody finds it
    deleted, after it was looked once more whether somebody began to need it meanwhile: then it
                                gets its name back

Of a job that has ended the newest resume point stays if its checkpoint does, for the optimizer of a
job that goes on from there. Read next: needed.py, removing.py.
"""

import time
from collections.abc import Callable, Collection
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path

from cray_agents.errors import NotFound
from cray_agents.paths import Home
from cray_agents.records import new_id
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.disk.durable import remove, resume_points, size_of
from cray_agents.runtime.registry.checkpoints import (
    ASIDE,
    Pruned,
    left_over,
    pruned_file,
    read_manifest,
)
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.retention.references import has_ended, needed, unfinished, versions_of

GRACE = 2.0  # seconds between setting aside and deleting: so long a choice may be under way


@dataclass
class Prunable:
    """What goes, with its bytes, and why versions of the name stay (`kept`, by `name@N`).

    `weights` are by version: one that is there under several names counts once, `points` by job,
    `drafts` by folder.
    """

    kept: dict[str, str] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """All that is given back."""
        return sum(sum(part.values()) for part in (self.weights, self.points, self.drafts))


def prune(
    home: Home,
    name: str | None = None,
    *,
    keep: int,
    held: Callable[[], Collection[str]] = tuple,
    dry_run: bool = False,
    grace: float = GRACE,
) -> Prunable:
    """Delete what nobody needs: of one name, or of all. See needed.py for `keep`.

    `held` tells which versions replicas hold; it is asked twice. Raises NotFound when there is no
    such name, and Corrupt.
    """
    registry = Registry(home)
    chosen = {version.id for version in registry.versions(name)} if name is not None else None
    versions = versions_of(registry)
    why = needed(registry, keep, held())
    found = Prunable(
        kept={one: reason for one, reason in why.items() if not chosen or one in chosen}
    )
    there = {v.id: home.checkpoint(v.checkpoint) for v in versions.values()}
    free = [one for one in versions if one not in why and (chosen is None or one in chosen)]
    stay = {there[one] for one in versions if one not in free}
    going: dict[Path, str] = {}
    for one in free:
        if there[one] not in stay and there[one].is_dir():
            going.setdefault(there[one], one)
    if dry_run:
        found.weights = {one: size_of(folder) for folder, one in going.items()}
        found.drafts = {path.name: size_of(path) for path in [*set_aside(home), *left_over(home)]}
    else:
        for folder in going:
            _set_aside(folder)
        names = {folder.name: one for folder, one in going.items()}
        _delete(home, names, found, keep, held, grace)
    jobs = None if chosen is None else {versions[one].job for one in chosen}
    for job, paths in _points(home, {folder.name for folder in going}, jobs).items():
        found.points[job] = sum(size_of(path) if dry_run else remove(path) for path in paths)
    return found


def set_aside(home: Home) -> list[Path]:
    """The checkpoints that this prune set aside, or one that was killed."""
    return sorted(home.checkpoint("x").parent.glob(f".*{ASIDE}*"))


def _set_aside(folder: Path) -> None:
    try:
        manifest = read_manifest(folder).model_copy(update={"probe": []})
        text = checksums.with_crc(Pruned(manifest=manifest).model_dump_json().encode())
        durable.replace_file(pruned_file(folder), text)
        folder.rename(folder.with_name(f".{folder.name}.{new_id('aside')}"))
    except (NotFound, FileNotFoundError):
        if folder.is_dir():
            raise
        return  # another prune was faster
    durable.sync(folder.parent)


def _delete(
    home: Home,
    names: dict[str, str],
    found: Prunable,
    keep: int,
    held: Callable[[], Collection[str]],
    grace: float,
) -> None:
    """Delete what was set aside, but for what somebody began to need meanwhile; and drafts."""
    waiting = set_aside(home)
    if waiting:
        time.sleep(grace)
    registry = Registry(home)  # with nothing remembered
    why, versions = needed(registry, keep, held()), versions_of(registry)
    wanted = {versions[one].checkpoint: one for one in why}
    for path in waiting:
        checkpoint = path.name[1:].partition(ASIDE)[0]
        place = home.checkpoint(checkpoint)
        if checkpoint not in wanted or place.is_dir():
            into = found.weights if checkpoint in names else found.drafts
            into[names.get(checkpoint, path.name)] = remove(path)
        else:
            with suppress(FileNotFoundError):  # another prune was faster
                durable.publish_directory(path, place)
                pruned_file(place).unlink(missing_ok=True)
            found.kept[wanted[checkpoint]] = why[wanted[checkpoint]]
    found.drafts.update({path.name: remove(path) for path in left_over(home)})


def _points(
    home: Home, going: set[str], chosen: Collection[str | None] | None
) -> dict[str, list[Path]]:
    """By job, the resume points that nobody can go on from, and half ones."""
    sources = {spec.get("optimizer_from") for _, spec in unfinished(home)}
    found = {}
    for folder in sorted(home.jobs.glob("*/megatron")):
        job = folder.parent.name
        if not has_ended(folder.parent) or (chosen is not None and job not in chosen):
            continue
        stays = job in sources or (home.checkpoint(job).is_dir() and job not in going)
        paths = [path for path in folder.glob(".*step-*") if path.is_dir()]
        if paths := [*resume_points(folder)[1 if stays else 0 :], *paths]:
            found[job] = paths
    return found
