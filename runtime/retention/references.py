"""References: find the versions whose weights must be kept, and the reason for each.

Reads records on the root: the names' histories, the loops' generations, the specs of unfinished
jobs. The caller asks the platform for the versions on its replicas. Called by prune.py.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from cray_agents.errors import Corrupt, NotFound
from cray_agents.generation import Generation, base_version, promoted_version
from cray_agents.paths import Home
from cray_agents.records import ModelVersion
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.fine_tuning.job_records import TuningFolder
from cray_agents.runtime.registry.checkpoints import ADAPTER, MANIFEST, is_whole, read_manifest
from cray_agents.runtime.registry.registry import History, Registry


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
    done = {path.name: _generations(path) for path in _folders(home.loop("x").parent)}
    for loop, generations in done.items():
        add(_of_loop(home, loop, generations), f"loop {loop} goes on from it")
    for one, version in versions.items():
        loop, step = _step_of(home, version)
        if step is not None and step >= len(done.get(loop, ())):
            add([one], f"generation {step} of loop {loop} has not ended")
    by_checkpoint = _group((version.checkpoint, one) for one, version in versions.items())
    for checkpoint, reason in _of_jobs(home):
        add(by_checkpoint.get(checkpoint, ()), reason)
    by_weights = _group((version.weights_sha256, one) for one, version in versions.items())
    for one in list(why):
        if (base := _base_of(home, versions[one])) is not None:
            add(by_weights.get(base, ()), f"{one} is an adapter over it")
    for one in list(why):
        for parent in _needed_to_rebuild(home, versions[one]):
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


def _of_loop(home: Home, loop: str, done: list[Generation]) -> set[str]:
    """Return the versions that a loop trains further, compares with, learns or samples from."""
    paths = sorted(
        (home.loop(loop) / "journal").glob("settings-*.json"),
        key=lambda path: int(path.stem.rpartition("-")[2]),
    )
    settings = (_read(paths[-1]) or {}) if paths else {}
    methods = settings.get("method", settings.get("stages", {})).values()  # the latter: version 1
    versions = {method["teacher"] for method in methods if method.get("teacher")}
    if not done:
        return versions
    sampling = settings.get("sampling", {})
    staleness = sampling.get("max_staleness", settings.get("staleness", 0))
    known = [done[: max(1, len(done) - late)] for late in range(staleness + 1)]
    return versions | {promoted_version(done), *(base_version(some) for some in known)}


def _generations(loop: Path) -> list[Generation]:
    """Read a loop's finished generations, in order."""
    paths = [p for p in (loop / "generations").glob("*.json") if p.stem.isdecimal()]
    records = [_read(path) for path in sorted(paths, key=lambda path: int(path.stem))]
    try:
        return [Generation.model_validate(record) for record in records]
    except ValueError as error:
        raise Corrupt(f"a generation of {loop} cannot be read: {error}") from error


def _step_of(home: Home, version: ModelVersion) -> tuple[str, int | None]:
    """Return the loop and the number of the generation that made a version; None: no loop."""
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


def _needed_to_rebuild(home: Home, version: ModelVersion) -> Iterator[str]:
    """Yield the checkpoints, nearest first, that a delta checkpoint is made whole from."""
    directory = home.checkpoint(version.checkpoint)
    while (directory / MANIFEST).is_file():
        manifest = read_manifest(directory)
        if manifest.delta is None or is_whole(directory, manifest):
            return
        yield manifest.delta.parent
        directory = home.checkpoint(manifest.delta.parent)


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
