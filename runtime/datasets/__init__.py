"""Immutable training sets, built from recorded runs and demonstrations and named by content.

    <home>/datasets/<id>/train-00000.parquet, ...      token samples (token_shards.py)
                         validation-00000.parquet, ... only if the recipe has a validation split
                         runs.parquet                  each run and demonstration considered, with
                                                       decision and reason:
                                                       considered_runs.py
                         recipe.json                   the whole recipe
                         README.md                     for people, hubs and tools
                         manifest.json                 written last: counts, SHA-256 of every file

The same recipe over the same runs gives the same id on any machine and in any order of recording.
Called by the gateway (in a process of its own, build_process.py), fine_tuning and the command line.
Read next: build.py, which builds a dataset; reader.py, which reads one; selection.py,
which decides on the runs.
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
    """Import build.py on first use: a light install has no numpy but may read datasets."""
    if name not in ("build_dataset", "plan_dataset"):
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    from cray_agents.runtime.datasets import build

    return getattr(build, name)
