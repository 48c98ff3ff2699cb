"""Dataset views: distributions over a dataset, and its samples as the trainer reads them.

Both come from the dataset's own files, whose hashes are checked. Columns are read in batches, so a
dataset of any size takes the same memory. Called by gateway/routes/datasets.py.
"""

from collections import Counter
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cray_agents.errors import Corrupt
from cray_agents.paths import Home
from cray_agents.records import Record
from cray_agents.runtime.datasets import reader
from cray_agents.runtime.store.index.statistics import bin_edges
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
