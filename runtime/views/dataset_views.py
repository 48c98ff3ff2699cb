"""Dataset views: distributions over a dataset, and its samples as the trainer reads them.

Both come from the dataset's own files, whose hashes are checked. Columns are read in batches, so a
dataset of any size takes the same memory. Called by gateway/routes/datasets.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cray_agents.errors import Corrupt
from cray_agents.exact_json import load_json
from cray_agents.paths import Home
from cray_agents.records import Record, digest
from cray_agents.runtime.datasets import reader
from cray_agents.runtime.store.index.run_queries import bin_edges
from cray_agents.runtime.views.token_text import Vocabulary
from cray_agents.runtime.views.view_records import Histogram

BATCH = 1024  # rows read at a time
SAMPLE_COLUMNS = (
    *("input_ids", "loss_mask", "logprobs", "advantages", "version_index", "versions"),
    *("weight", "run_id", "task_id"),
)


class DatasetValues(NamedTuple):
    """Values of a dataset: rewards of considered runs; of each sample its tokens, and those that
    are trained on; samples by the version that sampled them.
    """

    rewards: list[float | None]
    tokens: list[float | None]
    trained: list[float | None]
    versions: Counter[str]


def dataset_values(home: Home, manifest: dict[str, Any]) -> DatasetValues:
    """Read the values of a dataset. Raises NotFound, Corrupt."""
    import numpy as np
    import pyarrow.compute

    tokens: list[float | None] = []
    trained: list[float | None] = []
    versions: Counter[str] = Counter()
    for batch in _rows(_shards(home, manifest), ["loss_mask", "versions"]):
        masks = batch.column("loss_mask")
        tokens += pyarrow.compute.list_value_length(masks).to_pylist()
        ends = np.concatenate([[0], np.cumsum(masks.flatten().to_numpy(zero_copy_only=False))])
        trained += np.diff(ends[masks.offsets.to_numpy() - masks.offsets[0].as_py()]).tolist()
        for names in batch.column("versions").to_pylist():
            versions.update(set(names))
    rewards = [row["reward"] for row in reader.dataset_runs(home, manifest["id"])]
    return DatasetValues(rewards, tokens, trained, versions)


def dataset_histograms(home: Home, dataset_id: str, bins: int) -> dict[str, Any]:
    """Return DatasetHistograms as JSON. Raises NotFound, Corrupt."""
    manifest = reader.read_dataset(home, dataset_id)
    rewards, tokens, trained, versions = dataset_values(home, manifest)
    return {
        "id": dataset_id,
        "samples": len(tokens),
        "funnel": {
            "considered": manifest.get("considered_runs") or 0,
            "accepted": manifest.get("accepted_runs") or 0,
            "rejected": manifest.get("rejected") or {},
        },
        "reward": histogram_of(rewards, bins),
        "tokens": histogram_of(tokens, bins, whole=True),
        "trained_tokens": histogram_of(trained, bins, whole=True),
        "versions": dict(versions.most_common()),
    }


def histogram_of(
    values: Sequence[float | None], bins: int, *, whole: bool = False
) -> dict[str, Any]:
    """Return a Histogram of equal bins as JSON; whole numbers of a short range get a bin each."""
    known = [float(value) for value in values if value is not None]
    missing = len(values) - len(known)
    if not known:
        return {"edges": [], "counts": [], "missing": missing}
    edges = bin_edges(min(known), max(known), bins, whole=whole)
    counts = bin_counts(known, edges)
    bounds = {"least": min(known), "most": max(known)}
    return {"edges": edges, "counts": counts, "missing": missing, **bounds}


def bin_counts(values: Sequence[float], edges: Sequence[float]) -> list[int]:
    """Count values in equal bins between these edges, all of which hold them."""
    if not edges:
        return []
    width, counts = edges[1] - edges[0], [0] * (len(edges) - 1)
    for value in values:
        counts[min(len(counts) - 1, int((value - edges[0]) / width))] += 1
    return counts


def sample_page(home: Home, dataset_id: str, split: str, at: int, limit: int) -> dict[str, Any]:
    """Return a SamplePage without texts as JSON. Raises NotFound, Corrupt.

    Only the row groups that hold these samples are read. A run without a reward has 0 in them.
    """
    import pyarrow.compute

    manifest = reader.read_dataset(home, dataset_id)
    samples: list[dict[str, Any]] = []
    before = 0
    for path in _shards(home, manifest, (split,)):
        with _opened(path) as file:
            for group in range(file.num_row_groups):
                count = file.metadata.row_group(group).num_rows
                first = max(at + len(samples), before)
                if first < before + count and len(samples) < limit:
                    table = file.read_row_group(group, columns=list(SAMPLE_COLUMNS))
                    rows = table.slice(first - before, limit - len(samples)).to_pylist()
                    samples += [_sample_fields(row, split, first + n) for n, row in enumerate(rows)]
                before += count
    lines = reader.considered_table(home, dataset_id, ["run", "reward"])
    names = pyarrow.array([row["run"] for row in samples], pyarrow.string())
    lines = lines.filter(pyarrow.compute.is_in(lines["run"], names))
    rewards = {line["run"]: line["reward"] for line in lines.to_pylist()}
    samples = [{**sample, "reward": rewards.get(sample["run"])} for sample in samples]
    end = at + len(samples)
    return {
        "id": dataset_id,
        "split": split,
        "total": before,
        "data": samples,
        "next": end if samples and end < before else None,
    }


def add_texts(sample: dict[str, Any], vocabulary: Vocabulary) -> None:
    """Set the texts of a sample's tokens."""
    decoded = vocabulary.texts_of(sample["ids"])
    sample["texts"], sample["bytes"] = decoded.texts, decoded.bytes


def _sample_fields(row: dict[str, Any], split: str, at: int) -> dict[str, Any]:
    mask, sampled = row["loss_mask"], row["version_index"]
    return {
        "at": at,
        "split": split,
        "run": row["run_id"] or None,
        "task": row["task_id"] or None,
        "versions": row["versions"],
        "ids": row["input_ids"],
        "texts": None,
        "bytes": {},
        "trained": [bool(value) for value in mask],
        "logprobs": [
            value if version >= 0 and trained else None
            for value, version, trained in zip(row["logprobs"], sampled, mask, strict=True)
        ],
        "advantages": [
            value if trained else None
            for value, trained in zip(row["advantages"], mask, strict=True)
        ],
        "weight": row["weight"],
    }


def _shards(
    home: Home, manifest: dict[str, Any], splits: Sequence[str] = ("train", "validation")
) -> list[Path]:
    directory = home.dataset(manifest["id"])
    return [
        path
        for split in splits
        for path in reader.shards_in(directory, manifest, split)  # type: ignore[arg-type]
    ]


def _rows(paths: Sequence[Path], columns: list[str]) -> Iterator[Any]:
    for path in paths:
        with _opened(path) as file:
            yield from file.iter_batches(BATCH, columns=columns)


def _opened(path: Path) -> Any:
    import pyarrow
    import pyarrow.parquet

    try:
        return pyarrow.parquet.ParquetFile(path)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise Corrupt(f"cannot read {path}: {error}") from error


class Funnel(Record):
    """Counts of the runs that a dataset considered, took, and left out by reason."""

    considered: int
    accepted: int
    rejected: dict[str, int]


class DatasetHistograms(Record):
    """Distributions over a dataset: rewards of considered runs, the rest of its samples.

    `versions`: samples by the version that sampled them.
    """

    id: str
    samples: int
    funnel: Funnel
    reward: Histogram
    tokens: Histogram
    trained_tokens: Histogram
    versions: dict[str, int]


class ComparedDataset(Record):
    """A dataset that is compared. `rejected`: the runs left out by reason."""

    id: str
    method: str
    created: float | None
    samples: int
    tokens: int
    trained_tokens: int
    accepted_runs: int
    considered_runs: int
    rejected: dict[str, int]


class RunChanges(Record):
    """Counts of the runs that either of two datasets considered.

    `added` are in the other alone, `removed` in the one alone, `kept` in both. `changed` are in
    both too, with another reward or number of samples. `out` are in neither.
    """

    added: int
    removed: int
    kept: int
    changed: int
    out: int


class DatasetMove(Record):
    """Runs that fared otherwise: `before` in the one dataset, `after` in the other.

    Each is `taken`, `not considered`, or the reason for leaving them out.
    """

    before: str
    after: str
    runs: int


class RecipeDifference(Record):
    """A field of the recipes that differs, with both values."""

    field: str
    one: Any
    other: Any


class ComparedHistogram(Record):
    """Counts of the values of two datasets in the same bins: see Histogram.

    `missing` and `means` are of the one and the other; a mean of no values is null.
    """

    edges: list[float]
    one: list[int]
    other: list[int]
    missing: list[int]
    means: list[float | None]


class DatasetDifferences(Record):
    """Differences of two datasets. Runs are the same by id, demonstrations by their messages.

    `moves`: most runs first. `versions`: samples of the one and the other by the version that
    sampled them.
    """

    one: ComparedDataset
    other: ComparedDataset
    runs: RunChanges
    moves: list[DatasetMove]
    recipe: list[RecipeDifference]
    reward: ComparedHistogram
    tokens: ComparedHistogram
    trained_tokens: ComparedHistogram
    versions: dict[str, list[int]]


class ChangedRun(Record):
    """A run that either of two datasets considered; see RunChanges and DatasetMove.

    `rewards` and `samples` are of the one and the other.
    """

    run: str
    task: str | None
    change: Literal["added", "removed", "kept", "changed", "out"]
    before: str
    after: str
    rewards: list[float | None]
    samples: list[int]


class ShownSample(Record):
    """A sample of a dataset as the trainer sees it; the lists are of its tokens.

    `trained`: has a loss. `logprobs`: of the version that sampled it, null for other tokens.
    `bytes`: see TurnTokens.
    """

    at: int
    split: str
    run: str | None
    task: str | None
    reward: float | None
    versions: list[str]
    ids: list[int]
    texts: list[str] | None
    bytes: dict[str, str]
    trained: list[bool]
    logprobs: list[float | None]
    advantages: list[float | None]
    weight: float | None


class SamplePage(Record):
    """Samples of a split from index `at` on. `next`: the index to go on at, null at the end."""

    id: str
    split: str
    total: int
    data: list[ShownSample]
    next: int | None


class DatasetSummary(Record):
    """A training set. Figures that older versions did not write are null."""

    id: str
    method: str
    samples: int
    trained_tokens: int
    accepted_runs: int
    considered_runs: int
    split_runs: int | None
    losses: dict[str, Any] | None  # what was left out of samples, with their number
    rejected: dict[str, Any] | None
    demonstrations: int | None
    rejected_demonstrations: dict[str, Any] | None


class ListedDataset(DatasetSummary):
    """A training set in a list."""

    created: float


class ConsideredRow(Record):
    """A run that a training set considered, and why it is out."""

    run: str
    task: str | None
    iteration: int | None
    attempt: int | None
    reward: float | None
    accepted: bool
    reason: str | None
    detail: str | None
    samples: int


# ---- Dataset differences: the runs that one training set has and another lacks, and their figures
Change = Literal["added", "removed", "kept", "changed", "out"]
TAKEN, ABSENT = "taken", "not considered"
DEMONSTRATION = "demonstration/"
_COLUMNS = ["run", "task", "accepted", "reason", "reward", "samples"]
_FIGURES = ("samples", "tokens", "trained_tokens", "accepted_runs", "considered_runs")


def dataset_differences(home: Home, one: str, other: str, bins: int = 24) -> dict[str, Any]:
    """Return DatasetDifferences as JSON. Raises NotFound, Corrupt."""
    import pyarrow.compute as pc

    manifests = [reader.read_dataset(home, name) for name in (one, other)]
    lines = _joined(home, *manifests)
    changes = {"added": 0, "removed": 0, "kept": 0, "changed": 0, "out": 0}
    counted = lines.group_by("change").aggregate([([], "count_all")]).to_pylist()
    changes |= {row["change"]: row["count_all"] for row in counted}
    moved = lines.filter(pc.not_equal(lines["one_state"], lines["other_state"]))
    moves = moved.group_by(["one_state", "other_state"]).aggregate([([], "count_all")])
    ordered = sorted(
        moves.to_pylist(), key=lambda row: (-row["count_all"], row["one_state"], row["other_state"])
    )
    values = [dataset_values(home, manifest) for manifest in manifests]
    return {
        "one": _side(manifests[0]),
        "other": _side(manifests[1]),
        "runs": changes,
        "moves": [
            {"before": row["one_state"], "after": row["other_state"], "runs": row["count_all"]}
            for row in ordered
        ],
        "recipe": _recipe_differences(*(manifest.get("recipe") or {} for manifest in manifests)),
        "reward": _compared(values[0].rewards, values[1].rewards, bins),
        "tokens": _compared(values[0].tokens, values[1].tokens, bins, whole=True),
        "trained_tokens": _compared(values[0].trained, values[1].trained, bins, whole=True),
        "versions": {
            name: [values[0].versions[name], values[1].versions[name]]
            for name in sorted({*values[0].versions, *values[1].versions})
        },
    }


def changed_runs(
    home: Home, one: str, other: str, change: Change | None, after: str | None, limit: int
) -> reader.RunsPage:
    """Return at most `limit` ChangedRuns of a change, by run, after the run `after`.

    Without a change all that is not the same in both. Raises NotFound, Corrupt.
    """
    import pyarrow.compute as pc

    lines = _joined(home, *(reader.read_dataset(home, name) for name in (one, other)))
    if change is not None:
        lines = lines.filter(pc.equal(lines["change"], change))
    else:
        same = pc.or_(pc.equal(lines["change"], "kept"), pc.equal(lines["change"], "out"))
        lines = lines.filter(pc.invert(same))
    if after is not None:
        lines = lines.filter(pc.greater(lines["run"], after))
    lines = lines.sort_by("run")
    rows = lines.slice(0, limit).to_pylist()
    return reader.RunsPage(
        [
            {
                "run": row["run"],
                "task": row["task"],
                "change": row["change"],
                "before": row["one_state"],
                "after": row["other_state"],
                "rewards": [row["one_reward"], row["other_reward"]],
                "samples": [row["one_samples"] or 0, row["other_samples"] or 0],
            }
            for row in rows
        ],
        lines.num_rows > limit,
    )


def _joined(home: Home, one: dict[str, Any], other: dict[str, Any]) -> Any:
    """Return a table with a line for each run that either set considered.

    `change` is added, removed, kept (in both, the same), changed (in both, with another reward or
    number of samples) or out (of both).
    """
    import pyarrow.compute as pc

    tables = []
    for name, manifest in (("one", one), ("other", other)):
        table = _lines(home, manifest)
        columns = ["run", *(f"{name}_{column}" for column in table.column_names[1:])]
        tables.append(table.rename_columns(columns))
    lines = tables[0].join(tables[1], keys="run", join_type="full outer")
    inside = {}
    for name in ("one", "other"):
        accepted = lines[f"{name}_accepted"]
        inside[name] = pc.fill_null(accepted, False)
        state = pc.if_else(inside[name], TAKEN, pc.fill_null(lines[f"{name}_reason"], "left out"))
        state = pc.if_else(pc.is_null(accepted), ABSENT, state)
        lines = lines.append_column(f"{name}_state", state)
    equal = pc.and_(
        _equal(lines["one_reward"], lines["other_reward"]),
        _equal(lines["one_samples"], lines["other_samples"]),
    )
    both = pc.and_(inside["one"], inside["other"])
    either = pc.or_(inside["one"], inside["other"])
    kinds = pc.if_else(
        both,
        pc.if_else(equal, "kept", "changed"),
        pc.if_else(either, pc.if_else(inside["other"], "added", "removed"), "out"),
    )
    lines = lines.append_column("change", kinds)
    return lines.append_column("task", pc.coalesce(lines["one_task"], lines["other_task"]))


def _lines(home: Home, manifest: dict[str, Any]) -> Any:
    """Return the columns of runs.parquet; demonstrations are named by what they say."""
    import pyarrow

    schema = pyarrow.schema(
        [
            *((name, pyarrow.string()) for name in ("run", "task")),
            ("accepted", pyarrow.bool_()),
            ("reason", pyarrow.string()),
            ("reward", pyarrow.float64()),
            ("samples", pyarrow.int64()),
        ]
    )
    table = reader.considered_table(home, manifest["id"], _COLUMNS).cast(schema)
    if not manifest.get("demonstrations"):
        return table
    names = _demonstrations(home, manifest["id"])
    runs = [names.get(run, run) for run in table["run"].to_pylist()]
    return table.set_column(0, "run", pyarrow.array(runs, pyarrow.string()))


def _demonstrations(home: Home, dataset_id: str) -> dict[str, str]:
    """Return names of demonstrations that are equal where their contents are, by their names."""
    path = reader.file_in(home.dataset(dataset_id), reader.RECIPE)
    recipe = load_json(path.read_bytes())
    rejected = recipe.get("demonstrations_rejected") or ()
    tools = recipe.get("demonstrations_tools") or ()
    names: dict[str, str] = {}
    times: dict[str, int] = {}
    for number, messages in enumerate(recipe["demonstrations"]):
        content = [
            messages,
            tools[number] if tools else recipe.get("tools"),
            rejected[number] if rejected else None,
        ]
        name = f"{DEMONSTRATION}{digest(content)}"
        times[name] = times.get(name, 0) + 1
        again = f"/{times[name]}" if times[name] > 1 else ""
        names[f"{DEMONSTRATION}{number}"] = name + again
    return names


def _equal(one: Any, other: Any) -> Any:
    """Compare two columns; null equals null."""
    import pyarrow.compute as pc

    known = pc.fill_null(pc.equal(one, other), False)
    return pc.or_(known, pc.and_(pc.is_null(one), pc.is_null(other)))


def _side(manifest: dict[str, Any]) -> dict[str, Any]:
    return {
        "id": manifest["id"],
        "method": manifest["method"],
        "created": manifest.get("created"),
        **{name: manifest.get(name) or 0 for name in _FIGURES},
        "rejected": manifest.get("rejected") or {},
    }


def _recipe_differences(one: dict[str, Any], other: dict[str, Any]) -> list[dict[str, Any]]:
    names = [*one, *(name for name in other if name not in one)]
    return [
        {"field": name, "one": one.get(name), "other": other.get(name)}
        for name in names
        if one.get(name) != other.get(name)
    ]


def _compared(
    one: list[float | None], other: list[float | None], bins: int, *, whole: bool = False
) -> dict[str, Any]:
    """Return a ComparedHistogram of two lists of values as JSON."""
    known = [[float(value) for value in values if value is not None] for values in (one, other)]
    every = [*known[0], *known[1]]
    edges = bin_edges(min(every), max(every), bins, whole=whole) if every else []
    return {
        "edges": edges,
        "one": bin_counts(known[0], edges),
        "other": bin_counts(known[1], edges),
        "missing": [len(one) - len(known[0]), len(other) - len(known[1])],
        "means": [sum(values) / len(values) if values else None for values in known],
    }
