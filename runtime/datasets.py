"""Immutable training sets: from recorded runs and demonstrations to a directory named by content.

    <home>/datasets/<id>/samples.parquet    a row per Sample
    <home>/datasets/<id>/manifest.json      last: which runs went in, which were left out, and why

The same recipe over the same runs gives the same id, whatever order they came in. Called by the
gateway, in a thread. Read next: samples.py, how turns become sequences.
"""

import hashlib
import shutil
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import orjson

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import DatasetRecipe, Run, Sample, canonical, digest
from cray_agents.runtime import durable
from cray_agents.runtime.demonstrations import renderer_of
from cray_agents.runtime.run_index import RunQuery
from cray_agents.runtime.samples import merge_turns, turn_of
from cray_agents.runtime.store import Store

MANIFEST = "manifest.json"


@dataclass
class _Candidate:
    """A run or demonstration on its way in; `reason` says why it was left out."""

    run: Run | None
    group: Any
    reward: float | None = None
    reason: str | None = None
    samples: list[Sample] = field(default_factory=list)


def build_dataset(store: Store, home: Home, recipe: DatasetRecipe) -> dict[str, Any]:
    """Build the dataset, or find it; returns its manifest. `recipe.tokenizer` is a directory.

    Raises BadInput, with the code `empty_dataset` if nothing was accepted.
    """
    _check(recipe)
    demonstrations = _demonstrations(recipe)
    runs = _runs(store, recipe)
    everything = [*demonstrations, *runs]
    _drop_duplicates(everything)
    samples = _weighted(everything, recipe.balance_by, recipe.balance_power)
    rejected = Counter(c.reason for c in runs if c.reason)
    if not samples:
        counts = ", ".join(f"{reason} {n}" for reason, n in sorted(rejected.items()))
        raise BadInput(
            f"no run can be trained on: {len(runs)} considered ({counts or 'none match'})",
            code="empty_dataset",
        )
    dataset_id = _name(recipe, samples)
    if (home.dataset(dataset_id) / MANIFEST).is_file():
        return read_dataset(home, dataset_id)
    manifest = {
        "id": dataset_id,
        "samples": len(samples),
        "tokens": sum(len(s.input_ids) for s in samples),
        "trained_tokens": sum(sum(s.loss_mask) for s in samples),
        "accepted_runs": sum(c.reason is None for c in runs),
        "considered_runs": len(runs),
        "demonstrations": sum(c.reason is None for c in demonstrations),
        "rejected": dict(sorted(rejected.items())),
        "recipe": recipe.model_dump(mode="json"),
        "runs": [_line(c) for c in runs],
        "created": time.time(),
    }
    _publish(home.dataset(dataset_id), samples, manifest)
    return read_dataset(home, dataset_id)


def read_dataset(home: Home, dataset_id: str) -> dict[str, Any]:
    """A dataset's manifest. Raises NotFound, Corrupt."""
    path = home.dataset(dataset_id) / MANIFEST
    try:
        manifest: dict[str, Any] = orjson.loads(path.read_bytes())
    except FileNotFoundError as error:
        raise NotFound(f"no dataset {dataset_id!r}", param="dataset") from error
    except ValueError as error:
        raise Corrupt(f"{path} is not a dataset's manifest: {error}") from error
    return manifest


def _check(recipe: DatasetRecipe) -> None:
    if recipe.split != "train":
        raise BadInput(
            f"split {recipe.split!r} never enters a training set: it is kept to judge by",
            param="split",
        )
    if recipe.demonstrations and not recipe.tokenizer:
        raise BadInput("demonstrations need a tokenizer to be rendered with", param="tokenizer")
    count = len(recipe.demonstrations)
    for name in ("demonstrations_metadata", "demonstrations_tools"):
        given = getattr(recipe, name)
        if given and len(given) != count:
            message = f"{len(given)} {name} for {count} demonstrations: give one each"
            raise BadInput(message, param=name)


def _demonstrations(recipe: DatasetRecipe) -> list[_Candidate]:
    if not recipe.demonstrations or recipe.tokenizer is None:
        return []
    renderer = renderer_of(Path(recipe.tokenizer))
    metadata = recipe.demonstrations_metadata or [{} for _ in recipe.demonstrations]
    tools = recipe.demonstrations_tools or [recipe.tools for _ in recipe.demonstrations]
    return [
        _Candidate(
            run=None,
            group=about.get(recipe.balance_by or ""),
            samples=renderer.samples(conversation, its_tools),
        )
        for conversation, about, its_tools in zip(
            recipe.demonstrations, metadata, tools, strict=True
        )
    ]


def _runs(store: Store, recipe: DatasetRecipe) -> list[_Candidate]:
    """Every run the recipe considers, judged, in an order that does not depend on arrival."""
    if recipe.generations == []:
        return []
    found = store.runs(RunQuery(loop=recipe.loop), calls="none")
    wanted = None if recipe.generations is None else set(recipe.generations)
    found = [run for run in found if wanted is None or run.generation in wanted]
    candidates = [_judge(run, recipe) for run in sorted(found, key=_order)]
    accepted = [c.run.id for c in candidates if c.run and c.reason is None]
    whole = {run.id: run for run in store.whole(accepted)}
    taken: Counter[str] = Counter()
    for candidate in candidates:
        if candidate.run is None or candidate.reason is not None:
            continue
        run = whole.get(candidate.run.id, candidate.run)
        task = run.task.id if run.task else ""
        candidate.reason = _token_fault(run)
        if candidate.reason is None and task and recipe.max_per_task is not None:
            taken[task] += 1
            if taken[task] > recipe.max_per_task:
                candidate.reason = "over_max_per_task"
        if candidate.reason is None:
            candidate.samples = _samples(run, candidate.reward or 0.0)
    return candidates


def _order(run: Run) -> tuple[int, str, int, str]:
    return (run.generation or 0, run.task.id if run.task else "", run.attempt or 0, run.id)


def _judge(run: Run, recipe: DatasetRecipe) -> _Candidate:
    """All that can be said of a run without its tokens."""
    group = run.task.metadata.get(recipe.balance_by or "") if run.task else None
    reward = (recipe.rewards or {}).get(run.id, run.reward)
    reason = None
    if run.task is not None and run.task.split != "train":
        reason = "held_out"
    elif run.error is not None and run.error.infrastructure:
        reason = "infrastructure_error"
    elif reward is None:
        reason = "no_reward"
    elif reward < recipe.min_reward:
        reason = "low_reward"
    return _Candidate(run, group, reward, reason)


def _token_fault(run: Run) -> str | None:
    """Why a run's tokens cannot be trained on."""
    turns = run.trajectory.turns
    if any(turn.call is None for turn in turns):
        return "missing_call"
    if not run.calls or not all(c.token_ids and c.prompt_token_ids for c in run.calls):
        return "no_tokens"
    if any(len(call.logprobs) != len(call.token_ids) for call in run.calls):
        return "no_logprobs"
    return None


def _samples(run: Run, reward: float) -> list[Sample]:
    about = {
        "reward": reward,
        "version": run.calls[-1].model,
        "run_id": run.id,
        "task_id": run.task.id if run.task else "",
    }
    return [s.model_copy(update=about) for s in merge_turns(turn_of(c) for c in run.calls)]


def _drop_duplicates(candidates: list[_Candidate]) -> None:
    """The first of equal token sequences stays; demonstrations come before runs."""
    seen: set[bytes] = set()
    for candidate in candidates:
        if candidate.reason is not None:
            continue
        kept = []
        for sample in candidate.samples:
            key = hashlib.sha256(canonical(sample.input_ids)).digest()
            if key not in seen:
                seen.add(key)
                kept.append(sample)
        candidate.samples = kept
        if not kept:
            candidate.reason = "duplicate"


def _weighted(candidates: list[_Candidate], balance_by: str | None, power: float) -> list[Sample]:
    """The samples; with `balance_by` a group of n weighs n**power in all, and the mean is 1."""
    pairs = [(c.group, s) for c in candidates if c.reason is None for s in c.samples]
    if balance_by is None or not pairs:
        return [sample for _, sample in pairs]
    if all(group is None for group, _ in pairs):
        raise BadInput(
            f"no accepted run or demonstration has {balance_by!r} in its metadata",
            param="balance_by",
        )
    keys = [canonical(group) for group, _ in pairs]  # metadata values need not be hashable
    counts = Counter(keys)
    scale = len(pairs) / sum(count**power for count in counts.values())
    return [
        sample.model_copy(update={"weight": scale * counts[key] ** (power - 1)})
        for key, (_, sample) in zip(keys, pairs, strict=True)
    ]


def _name(recipe: DatasetRecipe, samples: list[Sample]) -> str:
    """By content. Where the tokenizer lies does not matter: its work is in the samples."""
    hasher = hashlib.sha256()
    for sample in samples:
        hasher.update(canonical(sample.model_dump()))
    what = recipe.model_dump(mode="json", exclude={"tokenizer"})
    what["generations"] = recipe.generations and sorted(set(recipe.generations))
    return f"ds-{digest([what, hasher.hexdigest()])}"


def _line(candidate: _Candidate) -> dict[str, Any]:
    return {
        "run": candidate.run.id if candidate.run else "",
        "accepted": candidate.reason is None,
        "reason": candidate.reason,
        "reward": candidate.reward,
        "samples": len(candidate.samples) if candidate.reason is None else 0,
    }


def _publish(target: Path, samples: list[Sample], manifest: dict[str, Any]) -> None:
    draft = durable.draft_directory(target)
    try:
        table = draft / "samples.parquet"
        _write_parquet(table, samples)
        files = {table.name: durable.sha256_file(table)}
        durable.write_file(draft / MANIFEST, orjson.dumps({**manifest, "files": files}))
        durable.publish_directory(draft, target)
    finally:
        if draft.exists():
            shutil.rmtree(draft)


def _write_parquet(path: Path, samples: list[Sample]) -> None:
    import pyarrow
    import pyarrow.parquet

    schema = pyarrow.schema(
        [
            ("input_ids", pyarrow.list_(pyarrow.int32())),
            ("loss_mask", pyarrow.list_(pyarrow.int8())),
            ("logprobs", pyarrow.list_(pyarrow.float32())),
            ("weight", pyarrow.float64()),
            ("reward", pyarrow.float64()),
            ("advantage", pyarrow.float64()),
            ("version", pyarrow.string()),
            ("run_id", pyarrow.string()),
            ("task_id", pyarrow.string()),
        ]
    )
    rows = [sample.model_dump() for sample in samples]
    pyarrow.parquet.write_table(pyarrow.Table.from_pylist(rows, schema=schema), path)
    durable.sync(path)
