"""Dataset records: the JSON of the routes that show datasets, their samples and their differences.

Made by dataset_views.py and dataset_differences.py; see view_records.py for the units.
"""

from typing import Any, Literal

from cray_agents.records import Record
from cray_agents.runtime.views.view_records import Histogram


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
