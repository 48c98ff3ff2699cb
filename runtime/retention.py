"""Prune: free the disk space of versions, resume points and drafts that nothing refers to.

Called by cli/maintenance.py, beside a running platform or without one. Records stay: a version,
its history, its lineage, its job. A checkpoint is deleted in three steps. The next prune finishes
the work of one that was killed after any of them:

    write <id>.pruned                  the record that stays (registry/checkpoints.py)
    rename <id> to .<id>.aside_<...>   no process finds the checkpoint from now on
    delete it                          after a second look at the references; a checkpoint that
                                       something refers to by then gets its name back

An ended job keeps its newest resume point if its checkpoint stays: a job that goes on from there
needs its optimizer state. A state that a run by commands kept stays as long as the weights that it
published last before, or its parent's if there are none.
"""

import time
from collections.abc import Callable, Collection, Iterable, Iterator
from contextlib import suppress
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cray_agents.errors import NotFound
from cray_agents.iteration import SETTINGS_VERSION, Iteration, base_version, promoted_version
from cray_agents.paths import Home
from cray_agents.records import ModelVersion, new_id
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.disk.durable import LOCAL, remove, resume_points, size_of
from cray_agents.runtime.fine_tuning.job_records import TuningFolder
from cray_agents.runtime.registry.checkpoints import (
    ADAPTER,
    ASIDE,
    MANIFEST,
    Pruned,
    find_leftovers,
    is_whole,
    pruned_file,
    read_manifest,
    read_pruned,
)
from cray_agents.runtime.registry.registry import History, Registry
from cray_agents.runtime.store.loop_records import LoopRecords

GRACE = 2.0  # seconds between setting aside and deleting, for a use that has just begun


@dataclass
class Prunable:
    """Bytes to delete, and `kept`: the reason by `name@N` for each version that stays.

    `weights` are by version, and a checkpoint under several names counts once. `points` (resume
    points) are by job, `drafts` by folder, `blocks` (of the KV tier) by checkpoint.
    """

    kept: dict[str, str] = field(default_factory=dict)
    weights: dict[str, int] = field(default_factory=dict)
    points: dict[str, int] = field(default_factory=dict)
    drafts: dict[str, int] = field(default_factory=dict)
    blocks: dict[str, int] = field(default_factory=dict)

    @property
    def bytes(self) -> int:
        """The total of bytes to delete."""
        kinds = (self.weights, self.points, self.drafts, self.blocks)
        return sum(sum(sizes.values()) for sizes in kinds)


def prune(
    home: Home,
    name: str | None = None,
    *,
    keep: int,
    in_use: Callable[[], Collection[str]] = tuple,
    dry_run: bool = False,
    grace: float = GRACE,
    kv_tier: Path | None = None,
) -> Prunable:
    """Delete checkpoints, resume points and drafts without references, of one name or of all.

    `keep`: see `reasons_to_keep`. `in_use` returns the versions on replicas; it is called twice.
    `kv_tier`: the folder that has the KV of such versions, too.
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
    stay |= {home.checkpoint(name) for one in versions if one not in free
             for name in _needed_below(home, versions[one])}  # fmt: skip
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
    if kv_tier is not None and not dry_run:
        left = [one for one in versions.values() if home.checkpoint(one.checkpoint).is_dir()]
        kept = {"", *(version.weights_sha256 for version in left)}
        for file in sorted(home.checkpoint("x").parent.glob("*.pruned")):
            pruned = read_pruned(home.checkpoint(file.name.removesuffix(".pruned")))
            name = pruned.manifest.weights_sha256 if pruned is not None else ""
            if name not in kept and (kv_tier / name).is_dir():
                result.blocks[file.name.removesuffix(".pruned")] = remove(kv_tier / name)
    return result


def find_set_aside(home: Home) -> list[Path]:
    """List the checkpoints set aside by this prune, or by one that was killed."""
    return sorted(home.checkpoint("x").parent.glob(f".*{ASIDE}*"))


def _set_aside(folder: Path) -> None:
    try:
        manifest = read_manifest(folder).model_copy(update={"probe": []})
        durable.replace_file(pruned_file(folder), checksums.record_text(Pruned(manifest=manifest)))
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
            drafts = (*folder.glob(".*step-*"), *folder.glob(".kept-*"), *folder.glob(f"*{LOCAL}*"))
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


def all_versions(registry: Registry) -> dict[str, ModelVersion]:
    """Return every version of every name, by `name@N`."""
    versions: dict[str, ModelVersion] = {}
    for name in registry.names():
        try:
            versions.update({version.id: version for version in registry.versions(name)})
        except NotFound:  # a folder without a version
            continue
    return versions


def reasons_to_keep(registry: Registry, keep: int, in_use: Collection[str]) -> dict[str, str]:
    """Return by `name@N` the reason to keep a version's weights; others may be deleted.

    `keep`: number of earlier promoted versions to keep per name. `in_use`: versions on replicas.
    Raises Corrupt where a record that decides cannot be read.
    """
    home, versions = registry.home, all_versions(registry)
    why: dict[str, str] = {}

    def add(ids: Iterable[str], reason: str) -> None:
        for one in ids:
            if one in versions:
                why.setdefault(one, reason)

    for name in sorted({version.name for version in versions.values()}):
        for reason, ids in _of_name(registry, name, keep):
            add(ids, reason)
    add(in_use, "a replica holds it")
    done = {path.name: LoopRecords(home, path.name).finished() for path in _folders(home.loops)}
    for loop, iterations in done.items():
        add(_of_loop(home, loop, iterations), f"loop {loop} goes on from it")
    for one, version in versions.items():
        loop, step = _step_of(home, version)
        if step is not None and step >= len(done.get(loop, ())):
            add([one], f"iteration {step} of loop {loop} has not ended")
    by_checkpoint = _group((version.checkpoint, one) for one, version in versions.items())
    for checkpoint, reason in _of_jobs(home):
        add(by_checkpoint.get(checkpoint, ()), reason)
    by_weights = _group((version.weights_sha256, one) for one, version in versions.items())
    for one in list(why):
        if (base := _base_of(home, versions[one])) is not None:
            add(by_weights.get(base, ()), f"{one} is an adapter over it")
    for one in list(why):
        for parent in _needed_below(home, versions[one]):
            add(by_checkpoint.get(parent, ()), f"{one} is stored as what changed in it")
    for one in list(why):
        add(by_checkpoint[versions[one].checkpoint], f"the same checkpoint as {one}")
    return why


def unfinished_jobs(home: Home) -> Iterator[tuple[str, dict[str, Any]]]:
    """Yield the name and the spec of each training job that has not ended."""
    for folder in _folders(home.jobs):
        if not has_ended(folder) and (spec := _read(folder / "spec.json")) is not None:
            yield folder.name, spec


def has_ended(job: Path) -> bool:
    """Tell whether a job succeeded, failed or was cancelled, by its folder."""
    return (job / "status.json").exists() or (job / "cancelled").exists()


def _of_name(registry: Registry, name: str, keep: int) -> Iterator[tuple[str, list[str]]]:
    """Yield reasons of a name's history, each with its versions."""
    versions, events = registry.versions(name), registry.history(name)
    history = History({v.number: v for v in versions}, {e.number: e for e in events})
    served = [e.version for e in events if e.kind in ("promoted", "rolled_back")]
    latest = list(dict.fromkeys(reversed(served)))  # without repetitions, the present one first
    yield "promoted", [f"{name}@{number}" for number in history.promoted[-1:]]
    before = {*history.promoted[-1 - keep :], *latest[: 1 + keep]}
    yield "was promoted before", [f"{name}@{number}" for number in sorted(before)]
    yield "the newest", [versions[-1].id]
    if history.canary is not None:
        yield "its canary runs", [f"{name}@{history.canary.version}"]


def _of_loop(home: Home, loop: str, done: list[Iteration]) -> set[str]:
    """Return the versions that a loop trains further, compares with, learns or samples from."""
    paths = sorted(
        (home.loop(loop) / "journal").glob("settings-*.json"),
        key=lambda path: int(path.stem.rpartition("-")[2]),
    )
    settings = (_read(paths[-1]) or {}) if paths else {}
    checksums.check_version(settings.get("version"), SETTINGS_VERSION, f"the settings of {loop}")
    methods = settings.get("method", settings.get("stages", {})).values()  # the latter: version 1
    named = {method.get(role) or "" for method in methods for role in ("teacher", "reflector")}
    versions = {name for name in named if "@" in name and "://" not in name}
    if not done:
        return versions
    sampling = settings.get("sampling", {})
    staleness = sampling.get("max_staleness", settings.get("staleness", 0))
    known = [done[: max(1, len(done) - late)] for late in range(staleness + 1)]
    return versions | {promoted_version(done), *(base_version(some) for some in known)}


def _step_of(home: Home, version: ModelVersion) -> tuple[str, int | None]:
    """Return the loop and the number of the iteration that made a version; None: no loop."""
    spec = _read(home.job(version.job) / "spec.json") if version.job else None
    dataset = spec and spec.get("dataset")
    about = _read(home.dataset(dataset) / "manifest.json") if dataset else None
    loop, step = (about or {}).get("loop"), (about or {}).get("step")
    return (loop, step) if loop and step is not None else ("", None)


def _of_jobs(home: Home) -> Iterator[tuple[str, str]]:
    """Yield the checkpoints that unfinished jobs read, and the reasons."""
    for name, spec in unfinished_jobs(home):
        for role in ("parent", "reference", "teacher"):
            if spec.get(role):
                yield Path(spec[role]).name, f"the {role} of {name}, which has not ended"
    tuning = TuningFolder(home)
    for name in tuning.unfinished_ids():
        yield tuning.read_request(name).parent, f"the parent of {name}, which has not ended"


def _base_of(home: Home, version: ModelVersion) -> str | None:
    """Return the hash of the weights under an adapter; None: the version has no adapter."""
    directory = home.checkpoint(version.checkpoint)
    if not (directory / ADAPTER).is_dir():
        return None
    manifest = read_manifest(directory)
    return manifest.base_sha256 or manifest.parent_sha256


def _needed_below(home: Home, version: ModelVersion) -> Iterator[str]:
    """Yield the checkpoints, nearest first, that an adapter or a delta checkpoint is over."""
    directory = home.checkpoint(version.checkpoint)
    while (directory / MANIFEST).is_file():
        manifest = read_manifest(directory)
        below = manifest.base
        if below is None and manifest.delta is not None and not is_whole(directory, manifest):
            below = manifest.delta.parent
        if below is None:
            return
        yield below
        directory = home.checkpoint(below)


def _group(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    groups: dict[str, list[str]] = {}
    for key, one in pairs:
        groups.setdefault(key, []).append(one)
    return groups


def _folders(parent: Path) -> list[Path]:
    """List the folders in a folder; empty if the folder does not exist."""
    return sorted(path for path in parent.glob("[!.]*") if path.is_dir())


def _read(path: Path) -> dict[str, Any] | None:
    """Read a JSON object; None without a file or an object. Raises Corrupt."""
    try:
        content = checksums.read_json(path)
    except FileNotFoundError:
        return None
    return content if isinstance(content, dict) else None
