"""Immutable training sets: from recorded runs and demonstrations to a directory named by content.

    <home>/datasets/<id>/train-00000.parquet, ...      token samples, as token_shards.py has it
                         validation-00000.parquet, ... where the recipe asks for such a split
                         runs.parquet                  each run and demonstration considered, with
                                                       in or out, and why: considered.py
                         recipe.json                   the whole recipe
                         README.md, croissant.json, histogram.html    for people, hubs and tools
                         manifest.json                 last: counts, and every file's SHA-256

The same recipe over the same runs gives the same id, whatever order they came in, on any machine.
Called by the gateway (process.py: in a process of its own), fine_tuning and the command line. Read
next: building.py, the conductor; reading.py, for those who use a dataset.
"""

from typing import TYPE_CHECKING, Any

from cray_agents.runtime.datasets.reader import dataset_runs, list_datasets, read_dataset, shards

if TYPE_CHECKING:
    from cray_agents.runtime.datasets.build import build_dataset, plan_dataset

__all__ = [
    "build_dataset",
    "dataset_runs",
    "list_datasets",
    "plan_dataset",
    "read_dataset",
    "shards",
]


def __getattr__(name: str) -> Any:
    """Building is imported when first asked for: a light install has no numpy, and may look."""
    if name not in ("build_dataset", "plan_dataset"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cray_agents.runtime.datasets import build

    return getattr(build, name)
