"""Prune: free the disk space of versions, resume points and drafts that nothing refers to.

Called by cli/models.py, beside a running platform or without one. Records stay: a version,
its history, its lineage, its job. A checkpoint is deleted in three steps. The next prune finishes
the work of one that was killed after any of them:

    write <id>.pruned                  the record that stays (registry/checkpoints.py)
    rename <id> to .<id>.aside_<...>   no process finds the checkpoint from now on
    delete it                          after a second look at the references; a checkpoint that
                                       something refers to by then gets its name back

An ended job keeps its newest resume point if its checkpoint stays: a job that goes on from there
needs its optimizer state. A state that a run by commands kept stays as long as the weights that it
published last before, or its parent's if there are none. Read next: references.py.
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
    find_leftovers,
    pruned_file,
    read_manifest,
)
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.retention.references import (
    all_versions,
    has_ended,
    reasons_to_keep,
    unfinished_jobs,
)

GRACE = 2.0  # seconds between setting aside and deleting, for a use that has just begun


@dataclass
class Prunable:
    """Bytes to delete, and `kept`: the reason by `name@N` for each version that stays.

    `weights` are by version, and a checkpoint under several names counts once. `points` (resume
    points) are by job, `drafts` by folder.
    """

    kept: dict[str, str] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The total of bytes to delete."""
        return sum(sum(sizes.values()) for sizes in (self.weights, self.points, self.drafts))


def prune(
    home: Home,
    name: str | None = None,
    *,
    keep: int,
    in_use: Callable[[], Collection[str]] = tuple,
    dry_run: bool = False,
    grace: float = GRACE,
) -> Prunable:
    """Delete checkpoints, resume points and drafts without references, of one name or of all.

    `keep`: see `reasons_to_keep`. `in_use` returns the versions on replicas; it is called twice.
    Raises NotFound for an unknown name, and Corrupt.
    """
    registry = Registry(home)
    chosen = {version.id for version in registry.versions(name)} if name is not None else None
    versions = all_versions(registry)
    why = reasons_to_keep(registry, keep, in_use())
    result = Prunable(
        kept={one: reason for one, reason in why.items() if not chosen or one in chosen}
    )
    folders = {v.id: home.checkpoint(v.checkpoint) for v in versions.values()}
    free = [one for one in versions if one not in why and (chosen is None or one in chosen)]
    stay = {folders[one] for one in versions if one not in free}
    going: dict[Path, str] = {}
    for one in free:
        if folders[one] not in stay and folders[one].is_dir():
            going.setdefault(folders[one], one)
    if dry_run:
        drafts = [*find_set_aside(home), *find_leftovers(home)]
        result.weights = {one: size_of(folder) for folder, one in going.items()}
        result.drafts = {path.name: size_of(path) for path in drafts}
    else:
        for folder in going:
            _set_aside(folder)
        names = {folder.name: one for folder, one in going.items()}
        _delete(home, names, result, keep, in_use, grace)
    jobs = None if chosen is None else {versions[one].job for one in chosen}
    for job, paths in _free_points(home, {folder.name for folder in going}, jobs).items():
        result.points[job] = sum(size_of(path) if dry_run else remove(path) for path in paths)
    return result


def find_set_aside(home: Home) -> list[Path]:
    """List the checkpoints set aside by this prune, or by one that was killed."""
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
    result: Prunable,
    keep: int,
    in_use: Callable[[], Collection[str]],
    grace: float,
) -> None:
    """Delete checkpoints set aside, and drafts; restore checkpoints that are in use by now."""
    waiting = find_set_aside(home)
    if waiting:
        time.sleep(grace)
    registry = Registry(home)  # a fresh one, without cached histories
    why, versions = reasons_to_keep(registry, keep, in_use()), all_versions(registry)
    version_of = {versions[one].checkpoint: one for one in why}
    for path in waiting:
        checkpoint = path.name[1:].partition(ASIDE)[0]
        folder = home.checkpoint(checkpoint)
        if checkpoint not in version_of or folder.is_dir():
            sizes = result.weights if checkpoint in names else result.drafts
            sizes[names.get(checkpoint, path.name)] = remove(path)
        else:
            with suppress(FileNotFoundError):  # another prune was faster
                durable.publish_directory(path, folder)
                pruned_file(folder).unlink(missing_ok=True)
            result.kept[version_of[checkpoint]] = why[version_of[checkpoint]]
    result.drafts.update({path.name: remove(path) for path in find_leftovers(home)})


def _free_points(
    home: Home, going: set[str], chosen: Collection[str | None] | None
) -> dict[str, list[Path]]:
    """Return by job the resume points that no job can go on from, and half-written ones."""
    unfinished = [spec for _, spec in unfinished_jobs(home)]
    sources = {spec.get("optimizer_from") for spec in unfinished}
    states = {spec.get("state_from") for spec in unfinished}
    points = {}
    for folder in sorted(home.jobs.glob("*/megatron")):
        job = folder.parent.name
        if chosen is not None and job not in chosen:
            continue
        kept = {f"{job}/{int(path.name[5:])}": path for path in sorted(folder.glob("kept-*"))}
        paths = [
            path
            for state, path in kept.items()
            if state not in states and not _weights_stay(home, state, going)
        ]
        if has_ended(folder.parent):
            stays = job in sources or (home.checkpoint(job).is_dir() and job not in going)
            paths += resume_points(folder)[1 if stays else 0 :]
            drafts = (*folder.glob(".*step-*"), *folder.glob(".kept-*"))
            paths += [path for path in drafts if path.is_dir()]
        if paths:
            points[job] = paths
    return points


def _weights_stay(home: Home, state: str, going: set[str]) -> bool:
    """Tell whether the weights of a kept state, `job/number`, are there and not `going`."""
    job, _, number = state.partition("/")
    published = home.checkpoint(f"{job}-x").parent.glob(f"{job}-*")  # also records of pruned ones
    numbers = {path.name.removeprefix(f"{job}-").removesuffix(".pruned") for path in published}
    before = [int(one) for one in numbers if one.isdigit() and int(one) <= int(number)]
    if before:
        folder = home.checkpoint(f"{job}-{max(before)}")
    else:
        folder = home.root / checksums.read_json(home.job(job) / "spec.json")["parent"]
    return folder.is_dir() and folder.name not in going
