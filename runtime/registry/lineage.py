"""Lineage: derive a version's parent, children, job and dataset from the records on disk.

A job's spec names the checkpoint that it started from, and a checkpoint's manifest names the
parent's weights by hash. No second copy exists that could be wrong. Called by
runtime/gateway/routes/models.py and cli/models.py.
"""

import logging
from pathlib import Path
from typing import Any

from pydantic import Field

from cray_agents.errors import Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Manifest, ModelVersion, Record, digest
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.registry import ModelEvent, Registry

log = logging.getLogger(__name__)

OF_DATASET = ("method", "samples", "accepted_runs", "loop", "step", "versions")


class Ancestry(Record):
    """A version with its parent and children. `parent` is None for weights not trained here.

    The parent of a prompt is the first version of the same weights. `prompts`: the hashes of the
    version's prompts, by agent.

    `about_dataset`: method, samples, accepted_runs, loop and step of the training set, and the
    versions that sampled it. `base`: the checkpoint that the version is an adapter
    over. `events`: the version's history, oldest first.
    """

    id: str
    checkpoint: str
    weights_sha256: str
    base: str | None = None
    created: float
    promoted: bool
    prompts: dict[str, str] = Field(default_factory=dict)
    parent: str | None
    children: list[str]
    job: str | None
    method: str | None
    dataset: str | None
    about_dataset: dict[str, Any]
    metrics: dict[str, Any]
    events: list[ModelEvent]


def lineage_of(registry: Registry, reference: str) -> list[dict[str, Any]]:
    """Return the kin of `name` (its versions and their ancestors) or of `name@N` (both ways).

    Parents precede their children. Raises NotFound, Corrupt.
    """
    name, at, _ = reference.partition("@")
    roots = [registry.resolve(reference)] if at else registry.versions(name)
    known = _all_versions(registry, name)
    parents = _parents(registry.home, known)
    children = _children(parents)
    kin = {version.id for version in roots}
    for one in list(kin):
        kin |= _ancestors(one, parents) | (_descendants(one, children) if at else set())
    return _ordered(registry, kin, known, parents, children)


def lineage_of_all(registry: Registry) -> list[dict[str, Any]]:
    """Return every version of every name, parents before their children. Raises Corrupt."""
    known = _all_versions(registry, "")
    parents = _parents(registry.home, known)
    return _ordered(registry, set(known), known, parents, _children(parents))


def _children(parents: dict[str, str | None]) -> dict[str, list[str]]:
    children: dict[str, list[str]] = {one: [] for one in parents}
    for one, parent in parents.items():
        if parent is not None:
            children[parent].append(one)
    return children


def _ordered(
    registry: Registry,
    kin: set[str],
    known: dict[str, tuple[ModelVersion, Manifest]],
    parents: dict[str, str | None],
    children: dict[str, list[str]],
) -> list[dict[str, Any]]:
    """Describe these versions, parents first."""

    def order(one: str) -> tuple[int, float, str]:
        return len(_ancestors(one, parents)), known[one][0].created, one

    return [
        _describe(registry, *known[one], parents[one], children[one])
        for one in sorted(kin, key=order)
    ]


def _all_versions(registry: Registry, first: str) -> dict[str, tuple[ModelVersion, Manifest]]:
    """Return every version of every name by `name@N`, those of the name `first` first."""
    known = {}
    for name in sorted(registry.names(), key=lambda name: name != first):
        try:
            versions = registry.versions(name)
        except NotFound:  # a folder without a version
            continue
        except Corrupt as error:  # GET /v1/models names it
            log.error("%s is left out of the lineage: %s", name, error)
            continue
        for version in versions:
            known[version.id] = (version, _manifest(registry.home, version))
    return known


def _manifest(home: Home, version: ModelVersion) -> Manifest:
    """Return a version's manifest; where it is gone, one with the version's own fields."""
    try:
        return checkpoints.manifest_of(home.checkpoint(version.checkpoint))
    except (NotFound, Corrupt) as error:
        if isinstance(error, Corrupt):
            log.error("the lineage of %s lacks its manifest: %s", version.id, error)
        return Manifest(files={}, weights_sha256=version.weights_sha256, job=version.job)


def _parents(home: Home, known: dict[str, tuple[ModelVersion, Manifest]]) -> dict[str, str | None]:
    """Return each version's parent: by the job's start checkpoint, else by the weights' hash.

    Of the versions with these weights, it is one with the same prompts, else the first.
    """
    by_checkpoint: dict[tuple[str, str | None], str] = {}
    by_weights: dict[str | None, str] = {}
    for one, (version, _) in known.items():
        by_checkpoint.setdefault((version.checkpoint, None), one)
        by_checkpoint.setdefault((version.checkpoint, _prompts(version)), one)
        by_weights.setdefault(version.weights_sha256, one)
    parents: dict[str, str | None] = {}
    for one, (version, manifest) in known.items():
        start = Path(_spec(home, manifest).get("parent", "")).name
        first = by_checkpoint[version.checkpoint, None]
        parent = (
            (first if first != one and version.prompts else None)
            or by_checkpoint.get((start, _prompts(version)))
            or by_checkpoint.get((start, None))
            or by_weights.get(manifest.parent_sha256)
        )
        parents[one] = None if parent == one else parent
    return parents


def _prompts(version: ModelVersion) -> str:
    return digest({agent: prompt.id for agent, prompt in version.prompts.items()})


def _spec(home: Home, manifest: Manifest) -> dict[str, Any]:
    return _read_object(home.job(manifest.job) / "spec.json") if manifest.job else {}


def _ancestors(one: str, parents: dict[str, str | None]) -> set[str]:
    ancestors: set[str] = set()
    parent = parents[one]
    while parent is not None and parent not in ancestors:
        ancestors.add(parent)
        parent = parents[parent]
    return ancestors


def _descendants(one: str, children: dict[str, list[str]]) -> set[str]:
    descendants: set[str] = set()
    waiting = [one]
    while waiting:
        new = [child for child in children[waiting.pop()] if child not in descendants]
        descendants.update(new)
        waiting += new
    return descendants


def _describe(
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
    about = _read_object(home.dataset(dataset) / "manifest.json") if dataset else {}
    return Ancestry(
        id=version.id,
        checkpoint=version.checkpoint,
        weights_sha256=version.weights_sha256,
        base=manifest.base,
        created=version.created,
        promoted=promoted == version,
        prompts={agent: prompt.id for agent, prompt in version.prompts.items()},
        parent=parent,
        children=children,
        job=manifest.job,
        method=spec.get("method"),
        dataset=dataset,
        about_dataset={key: about[key] for key in OF_DATASET if about.get(key) is not None},
        metrics=manifest.metrics,
        events=events,
    ).model_dump(mode="json")


def _read_object(path: Path) -> dict[str, Any]:
    """Read a JSON object; empty where its job or dataset was removed, or is damaged."""
    try:
        content = checksums.read_json(path)
    except FileNotFoundError:
        return {}
    except Corrupt as error:  # the list of jobs, or datasets, names it
        log.error("the lineage lacks a record: %s", error)
        return {}
    return content if isinstance(content, dict) else {}
