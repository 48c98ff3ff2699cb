"""Dataset reader: read the manifest, shards and considered runs of published datasets.

Called by the gateway, the trainers, exports and the command line. It never writes.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any, Literal, NamedTuple

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums, paging

MANIFEST, RUNS, RECIPE, CARD = "manifest.json", "runs.parquet", "recipe.json", "README.md"
DATASET_FORMAT = 1  # of manifest.json and the files that it names
#: What fields of recipes and the column of runs were called in datasets of earlier versions.
EARLIER_NAMES = {"iteration": "generation", "iterations": "generations"}
BATCH = 4096  # rows of runs.parquet read at a time

SplitName = Literal["train", "validation"]


def read_dataset(home: Home, dataset_id: str) -> dict[str, Any]:
    """Read the manifest of a dataset. Raises NotFound, Corrupt."""
    try:
        return read_manifest(home.dataset(dataset_id))
    except (FileNotFoundError, NotADirectoryError) as error:
        raise NotFound(f"no dataset {dataset_id!r}", param="dataset") from error


def read_manifest(directory: Path) -> dict[str, Any]:
    """Read the manifest in a dataset's directory.

    Raises FileNotFoundError, Corrupt, NewerFormat.
    """
    path = directory / MANIFEST
    manifest = checksums.read_json(path, DATASET_FORMAT)
    if not isinstance(manifest, dict):
        raise Corrupt(f"{path} is damaged: it is not a dataset's manifest")
    recipe = manifest.get("recipe") or {}
    for fields in (recipe, recipe.get("where") or {}):
        fields |= {now: fields.pop(old) for now, old in EARLIER_NAMES.items() if old in fields}
    return manifest


def verify(directory: Path) -> None:
    """Check the hash of every file in the manifest. Raises Corrupt, naming the file."""
    for name in read_manifest(directory).get("files", {}):
        file_in(directory, name)


def file_in(directory: Path, name: str) -> Path:
    """Return the path of a file after checking its hash, once a process. Raises Corrupt."""
    entry = read_manifest(directory).get("files", {}).get(name)
    if entry is None:
        raise Corrupt(f"{directory / MANIFEST} does not name {name}")
    return checksums.prove(directory / name, entry["sha256"])


def shards(home: Home, dataset_id: str, split: SplitName = "train") -> list[Path]:
    """Return the token shards of a split in order, hashes checked. Raises NotFound, Corrupt."""
    return shards_in(home.dataset(dataset_id), read_dataset(home, dataset_id), split)


def shards_in(directory: Path, manifest: dict[str, Any], split: SplitName = "train") -> list[Path]:
    """Return the token shards of a split, given a directory and its manifest. Raises Corrupt."""
    files = manifest.get("files", {})
    names = sorted(name for name in files if name.startswith(f"{split}-"))
    return [checksums.prove(directory / name, files[name]["sha256"]) for name in names]


def mean_length(manifest: dict[str, Any]) -> float:
    """Return the mean tokens of a sample to train on, or of a context of documents; 0: no samples.

    A manifest counts in `samples` the pieces that documents are cut into.
    """
    split = manifest.get("splits", {}).get("train", {})
    if not split.get("samples"):
        return 0.0
    if manifest.get("documents"):
        return float(min(manifest["recipe"]["max_tokens"], split["trained_tokens"]))
    return float(split["tokens"] / split["samples"])


def dataset_runs(home: Home, dataset_id: str) -> Iterator[dict[str, Any]]:
    """Yield the rows of runs.parquet (considered_runs.py), in order. Raises NotFound, Corrupt."""
    read_dataset(home, dataset_id)
    for batch in _batches(home.dataset(dataset_id)):
        yield from batch.to_pylist()


def accepted_runs(home: Home, dataset_id: str) -> Iterator[str]:
    """Yield the ids of the accepted runs and demonstrations of a dataset. Raises Corrupt."""
    for batch in _batches(home.dataset(dataset_id), ["run", "accepted"]):
        yield from batch.filter(batch.column("accepted")).column("run").to_pylist()


def considered_table(home: Home, dataset_id: str, columns: list[str]) -> Any:
    """Return columns of runs.parquet as a pyarrow table. Raises NotFound, Corrupt."""
    import pyarrow

    read_dataset(home, dataset_id)
    batches = list(_batches(home.dataset(dataset_id), columns))
    if not batches:
        return pyarrow.table({name: [] for name in columns})
    return pyarrow.Table.from_batches(batches).select(columns)


class RunsPage(NamedTuple):
    """A page of rows of runs.parquet. `has_more` tells whether more rows follow."""

    rows: list[dict[str, Any]]
    has_more: bool


def runs_page(
    home: Home,
    dataset_id: str,
    *,
    accepted: bool | None = None,
    reason: str | None = None,
    after: str | None = None,
    limit: int = 100,
) -> RunsPage:
    """Return at most `limit` rows after the run `after`. Raises NotFound, Corrupt, BadInput."""
    read_dataset(home, dataset_id)
    rows: list[dict[str, Any]] = []
    waiting = after is not None
    for batch in _batches(home.dataset(dataset_id)):
        if waiting:
            names = batch.column("run").to_pylist()
            if after not in names:
                continue
            waiting, batch = False, batch.slice(names.index(after) + 1)
        for row in batch.to_pylist():
            if accepted in (None, row["accepted"]) and reason in (None, row["reason"]):
                if len(rows) == limit:
                    return RunsPage(rows, True)
                rows.append(row)
    if waiting:
        message = f"after: {str(after)[:200]!r} is no run that {dataset_id} considered"
        raise BadInput(message, param="after")
    return RunsPage(rows, False)


def list_datasets(
    home: Home, *, after: str | None = None, limit: int = 20
) -> checksums.Listing[dict[str, Any]]:
    """Return manifests, newest first, after the dataset `after`. Raises BadInput."""
    dated = []
    for directory in home.datasets.iterdir() if home.datasets.exists() else ():
        manifest = directory / MANIFEST
        if not directory.name.startswith(".") and manifest.is_file():
            dated.append((-manifest.stat().st_mtime_ns, directory.name))
    names = paging.behind([name for _, name in sorted(dated)], str, after, "dataset")
    return checksums.list_whole(names, lambda name: read_dataset(home, name), limit)


def _batches(directory: Path, columns: list[str] | None = None) -> Iterator[Any]:
    """Yield the rows of runs.parquet in record batches. Raises Corrupt."""
    import pyarrow
    import pyarrow.parquet

    try:
        path = file_in(directory, RUNS)
    except FileNotFoundError as error:
        raise Corrupt(f"{directory} has no {MANIFEST}") from error
    try:
        with pyarrow.parquet.ParquetFile(path) as file:
            for batch in file.iter_batches(BATCH, columns=columns):
                names = [
                    "iteration" if name == "generation" else name for name in batch.schema.names
                ]
                yield batch.rename_columns(names)
    except (pyarrow.ArrowInvalid, OSError) as error:
        raise Corrupt(f"cannot read {path}: {error}") from error
