"""Where versions come from and what came of them: version, job, dataset, parent, and children.

Told by the jobs' specs, which name the checkpoint they started from, and by the checkpoints'
manifests, which name its weights by hash: nobody keeps it in a second place, where it could be
wrong. Called by gateway/routes/models.py and cli/models.py.
"""

from pathlib import Path
from typing import Any

from cray_agents.errors import NotFound
from cray_agents.paths import Home
from cray_agents.records import Manifest, ModelVersion, Record
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.registry import ModelEvent, Registry

OF_DATASET = ("method", "samples", "accepted_runs", "loop", "step", "versions")


class Ancestry(Record):
    """A version among its kin. `parent` is None where its weights were not trained here.

    `about_dataset`: method, samples, accepted_runs, loop and step of the training set, and the
    versions that sampled it. `events`: what happened to the version, oldest first.
    """

    id: str
    checkpoint: str
    weights_sha256: str
    created: float
    promoted: bool
    parent: str | None
    children: list[str]
    job: str | None
    method: str | None
    dataset: str | None
    about_dataset: dict[str, Any]
    metrics: dict[str, Any]
    events: list[ModelEvent]


def lineage_of(registry: Registry, reference: str) -> list[dict[str, Any]]:
    """The kin of `name` (all its versions, and their ancestors) or of `name@N` (both ways).

    Parents stand before their children. Raises NotFound, Corrupt.
    """
    name, at, _ = reference.partition("@")
    wanted = [registry.resolve(reference)] if at else registry.versions(name)
    known = _everything(registry, name)
    parents = _parents(registry.home, known)
    children: dict[str, list[str]] = {one: [] for one in known}
    for one, parent in parents.items():
        if parent is not None:
            children[parent].append(one)
    kin = {version.id for version in wanted}
    for one in list(kin):
        kin |= _up(one, parents) | (_down(one, children) if at else set())
    ordered = sorted(kin, key=lambda one: (len(_up(one, parents)), known[one][0].created, one))
    return [_told(registry, *known[one], parents[one], children[one]) for one in ordered]


def _everything(registry: Registry, first: str) -> dict[str, tuple[ModelVersion, Manifest]]:
    """Every version of every name, this name's first."""
    found = {}
    for name in sorted(registry.names(), key=lambda name: name != first):
        try:
            versions = registry.versions(name)
        except NotFound:  # a folder without a version
            continue
        for version in versions:
            found[version.id] = (version, _manifest(registry.home, version))
    return found


def _manifest(home: Home, version: ModelVersion) -> Manifest:
    """A version's manifest; of weights that were removed, what the version itself tells."""
    try:
        return checkpoints.record_of(home.checkpoint(version.checkpoint))
    except NotFound:
        return Manifest(files={}, weights_sha256=version.weights_sha256, job=version.job)


def _parents(home: Home, known: dict[str, tuple[ModelVersion, Manifest]]) -> dict[str, str | None]:
    """For each version the one that its job started from: by checkpoint, else by weights."""
    by_checkpoint: dict[str, str] = {}
    by_weights: dict[str | None, str] = {}
    for one, (version, _) in known.items():
        by_checkpoint.setdefault(version.checkpoint, one)
        by_weights.setdefault(version.weights_sha256, one)
    found: dict[str, str | None] = {}
    for one, (_, manifest) in known.items():
        began = Path(_spec(home, manifest).get("parent", "")).name
        parent = by_checkpoint.get(began) or by_weights.get(manifest.parent_sha256)
        found[one] = None if parent == one else parent
    return found


def _spec(home: Home, manifest: Manifest) -> dict[str, Any]:
    return _json(home.job(manifest.job) / "spec.json") if manifest.job else {}


def _up(one: str, parents: dict[str, str | None]) -> set[str]:
    found: set[str] = set()
    at = parents[one]
    while at is not None and at not in found:
        found.add(at)
        at = parents[at]
    return found


def _down(one: str, children: dict[str, list[str]]) -> set[str]:
    found: set[str] = set()
    waiting = [one]
    while waiting:
        new = [child for child in children[waiting.pop()] if child not in found]
        found.update(new)
        waiting += new
    return found


def _told(
    registry: Registry,
    version: ModelVersion,
    manifest: Manifest,
    parent: str | None,
    children: list[str],
) -> dict[str, Any]:
    home, promoted = registry.home, registry.promoted(version.name)
    events = [e for e in registry.history(version.name) if e.version == version.number]
    spec = _spec(home, manifest)
    dataset = manifest.dataset or spec.get("dataset")
    about = _json(home.dataset(dataset) / "manifest.json") if dataset else {}
    return Ancestry(
        id=version.id,
        checkpoint=version.checkpoint,
        weights_sha256=version.weights_sha256,
        created=version.created,
        promoted=promoted == version,
        parent=parent,
        children=children,
        job=manifest.job,
        method=spec.get("method"),
        dataset=dataset,
        about_dataset={key: about[key] for key in OF_DATASET if about.get(key) is not None},
        metrics=manifest.metrics,
        events=events,
    ).model_dump(mode="json")


def _json(path: Path) -> dict[str, Any]:
    """What a JSON file holds; nothing where a job or a dataset was removed."""
    try:
        found = checksums.read_json(path)
    except FileNotFoundError:
        return {}
    return found if isinstance(found, dict) else {}
