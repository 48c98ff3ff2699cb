"""Which versions somebody may still need the weights of, and why. Called by pruning.py.

Read from what is on the shared root: the names' histories, the records of loops, the specs of jobs
that have not ended. What replicas hold is asked of the platform, by the caller.
"""

from collections.abc import Collection, Iterable, Iterator
from pathlib import Path
from typing import Any

from cray_agents.errors import Corrupt, NotFound
from cray_agents.generation import Generation, onward_of, promoted_by
from cray_agents.paths import Home
from cray_agents.records import ModelVersion
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.fine_tuning.job_records import TuningFolder
from cray_agents.runtime.registry.checkpoints import ADAPTER, read_manifest
from cray_agents.runtime.registry.registry import History, Registry


def versions_of(registry: Registry) -> dict[str, ModelVersion]:
    """Every version of every name, by `name@N`."""
    found = {}
    for name in registry.names():
        try:
            found.update({version.id: version for version in registry.versions(name)})
        except NotFound:  # a folder without a version
            continue
    return found


def needed(registry: Registry, keep: int, held: Collection[str]) -> dict[str, str]:
    """Why versions keep their weights, by `name@N`; what is not among them may lose them.

    `keep`: how many that were promoted before the present one. `held`: what replicas hold.
    Raises Corrupt where a record that decides it cannot be read.
    """
    home, versions = registry.home, versions_of(registry)
    why: dict[str, str] = {}

    def add(ids: Iterable[str], reason: str) -> None:
        for one in ids:
            if one in versions:
                why.setdefault(one, reason)

    for name in sorted({version.name for version in versions.values()}):
        for reason, ids in _of_name(registry, name, keep):
            add(ids, reason)
    add(held, "a replica holds it")
    done = {path.name: _generations(path) for path in _folders(home.loop("x").parent)}
    for loop, generations in done.items():
        add(_of_loop(home, loop, generations), f"loop {loop} goes on from it")
    for one, version in versions.items():
        loop, step = _step_of(home, version)
        if step is not None and step >= len(done.get(loop, ())):
            add([one], f"generation {step} of loop {loop} has not ended")
    by_checkpoint = _grouped((version.checkpoint, one) for one, version in versions.items())
    for checkpoint, reason in _of_jobs(home):
        add(by_checkpoint.get(checkpoint, ()), reason)
    by_weights = _grouped((version.weights_sha256, one) for one, version in versions.items())
    for one in list(why):
        if (base := _base_of(home, versions[one])) is not None:
            add(by_weights.get(base, ()), f"{one} is an adapter over it")
    for one in list(why):
        add(by_checkpoint[versions[one].checkpoint], f"the same checkpoint as {one}")
    return why


def unfinished(home: Home) -> Iterator[tuple[str, dict[str, Any]]]:
    """The name and the spec of each training job that has not ended."""
    for folder in _folders(home.jobs):
        if not has_ended(folder) and (spec := _read(folder / "spec.json")) is not None:
            yield folder.name, spec


def has_ended(job: Path) -> bool:
    """Whether the job of a folder succeeded, failed or was cancelled."""
    return (job / "status.json").exists() or (job / "cancelled").exists()


def _of_name(registry: Registry, name: str, keep: int) -> Iterator[tuple[str, list[str]]]:
    """What the history of a name needs."""
    versions, events = registry.versions(name), registry.history(name)
    history = History({v.number: v for v in versions}, {e.number: e for e in events})
    served = [e.version for e in events if e.kind in ("promoted", "rolled_back")]
    latest = list(dict.fromkeys(reversed(served)))  # each once, the present one first
    yield "promoted", [f"{name}@{number}" for number in history.promoted[-1:]]
    before = {*history.promoted[-1 - keep :], *latest[: 1 + keep]}
    yield "was promoted before", [f"{name}@{number}" for number in sorted(before)]
    yield "the newest", [versions[-1].id]
    if history.canary is not None:
        yield "its canary runs", [f"{name}@{history.canary.version}"]


def _of_loop(home: Home, loop: str, done: list[Generation]) -> set[str]:
    """The versions that a loop trains further, compares with, and may still sample from."""
    if not done:
        return set()
    settings = sorted(
        (home.loop(loop) / "journal").glob("settings-*.json"),
        key=lambda path: int(path.stem.rpartition("-")[2]),
    )
    staleness = int((_read(settings[-1]) or {}).get("staleness", 0)) if settings else 0
    known = [done[: max(1, len(done) - late)] for late in range(staleness + 1)]
    return {promoted_by(done), *(onward_of(some) for some in known)}


def _generations(loop: Path) -> list[Generation]:
    """A loop's finished generations, in their order."""
    paths = [p for p in (loop / "generations").glob("*.json") if p.stem.isdecimal()]
    found = [_read(path) for path in sorted(paths, key=lambda path: int(path.stem))]
    try:
        return [Generation.model_validate(record) for record in found]
    except ValueError as error:
        raise Corrupt(f"a generation of {loop} cannot be read: {error}") from error


def _step_of(home: Home, version: ModelVersion) -> tuple[str, int | None]:
    """The loop and the generation in it whose job made a version; None: of no loop."""
    spec = _read(home.job(version.job) / "spec.json") if version.job else None
    dataset = spec and spec.get("dataset")
    about = _read(home.dataset(dataset) / "manifest.json") if dataset else None
    loop, step = (about or {}).get("loop"), (about or {}).get("step")
    return (loop, step) if loop and step is not None else ("", None)


def _of_jobs(home: Home) -> Iterator[tuple[str, str]]:
    """The checkpoints that jobs start from or compare with, and why they are needed."""
    for name, spec in unfinished(home):
        for what in ("parent", "reference"):
            if spec.get(what):
                yield Path(spec[what]).name, f"the {what} of {name}, which has not ended"
    tuning = TuningFolder(home)
    for name in tuning.unfinished():
        yield tuning.asked(name).parent, f"the parent of {name}, which has not ended"


def _base_of(home: Home, version: ModelVersion) -> str | None:
    """The hash of the weights that a version is an adapter over; None: it is none."""
    directory = home.checkpoint(version.checkpoint)
    return read_manifest(directory).parent_sha256 if (directory / ADAPTER).is_dir() else None


def _grouped(pairs: Iterable[tuple[str, str]]) -> dict[str, list[str]]:
    found: dict[str, list[str]] = {}
    for key, one in pairs:
        found.setdefault(key, []).append(one)
    return found


def _folders(place: Path) -> list[Path]:
    """The folders in a folder that may not be there."""
    return sorted(path for path in place.glob("[!.]*") if path.is_dir())


def _read(path: Path) -> dict[str, Any] | None:
    """What a JSON file holds; None where there is none. Raises Corrupt."""
    try:
        found = checksums.read_json(path)
    except FileNotFoundError:
        return None
    return found if isinstance(found, dict) else None
