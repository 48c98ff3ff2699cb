"""Token shards: write samples to Parquet files, with the same bytes for the same rows.

A row is a sample. Columns of [tokens], all parallel:

    input_ids
    loss_mask       1: trained on
    logprobs        0 off the mask
    advantages      0 off the mask
    version_index   into `versions`, the versions that sampled; -1: not sampled

Columns with one value for the sample:

    weight, reward, advantage, run_id, task_id
    group           grpo and dpo: the name of the comparison group
    pair            dpo: the name of the pair; else null
    chosen          dpo: true on the better row of a pair, which is first; kto: true if desirable;
                    else null
    temperature     of sampling; null: not sampled, or at several temperatures
    shaped          true if other options reshaped the distribution (run_samples.py)
    routes          of recipes with `router_replay`: the experts of each token, as the bytes of
                    [tokens, layers, experts of a token] in 16 bits; null: unknown

The rows of a group are consecutive. `Balance` balances groups by a key of the tasks' metadata: a
group of n samples has the total weight n**power, and the mean weight of a split is 1. The size of a
group is only known at the end, so the shards are then rewritten with weights. Called by build.py.
"""

from array import array
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cray_agents.errors import BadInput
from cray_agents.records import canonical
from cray_agents.runtime.datasets.run_samples import TokenSample
from cray_agents.runtime.disk import durable

SHARD_ROWS = 10_000
BATCH_ROWS = 1_000  # in a row group, which is kept in memory
MASKS = ("loss_mask", "advantages", "version_index")  # columns of few values, dictionary-encoded
NAMES = ("run_id", "task_id", "group", "pair")
OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": [*(f"{name}.list.element" for name in (*MASKS, "versions")), *NAMES],
    "column_encoding": {"logprobs.list.element": "BYTE_STREAM_SPLIT"},
}


class SampleRow(NamedTuple):
    """A sample with its other columns. `balance` is its group in Balance.

    `advantages` has one number for each span of the sample, and `advantage` is their mean over the
    trained tokens. If `advantages` is (), every span has `advantage`.
    """

    sample: TokenSample
    run_id: str
    task_id: str
    reward: float
    advantage: float = 0.0
    group: str = ""
    pair: str | None = None
    chosen: bool | None = None
    balance: int = 0
    advantages: tuple[float, ...] = ()


class ShardWriter:
    """A writer of the shards of a split, `<split>-00000.parquet` and so on."""

    def __init__(
        self,
        directory: Path,
        split: str,
        shard_rows: int = SHARD_ROWS,
        batch_rows: int = BATCH_ROWS,
        *,
        routes: bool = False,
    ) -> None:
        self._directory, self._split, self._routes = directory, split, routes
        self._shard_rows, self._batch_rows = shard_rows, batch_rows
        self._rows: list[SampleRow] = []
        self._writer: Any = None
        self._written = 0  # rows in the open shard
        self.files: dict[str, int] = {}  # name -> rows

    def add(self, rows: Sequence[SampleRow]) -> None:
        """Add the rows of a group. They go into one shard, unless they exceed a shard's size."""
        pending = self._written + len(self._rows)
        if pending and pending + len(rows) > self._shard_rows:
            self._close()
        for row in rows:
            self._rows.append(row)
            if self._written + len(self._rows) == self._shard_rows:
                self._close()
            elif len(self._rows) == self._batch_rows:
                self._flush()

    def finish(self) -> dict[str, int]:
        """Write the remaining rows. Return the number of rows of each file."""
        self._close()
        return self.files

    def _flush(self) -> None:
        import pyarrow.parquet

        if not self._rows:
            return
        table = table_of(self._rows)
        if self._routes:
            known = pyarrow.array([row.sample.routes for row in self._rows], pyarrow.large_binary())
            table = table.append_column("routes", known)
        if self._writer is None:
            path = self._directory / f"{self._split}-{len(self.files):05d}.parquet"
            self._writer = pyarrow.parquet.ParquetWriter(path, table.schema, **OPTIONS)
        self._writer.write_table(table)
        self._written += len(self._rows)
        self._rows = []

    def _close(self) -> None:
        self._flush()
        if self._writer is None:
            return
        self._writer.close()
        name = f"{self._split}-{len(self.files):05d}.parquet"
        durable.sync(self._directory / name)
        self.files[name] = self._written
        self._writer, self._written = None, 0


def table_of(rows: Sequence[SampleRow]) -> Any:
    """Make an Arrow table of rows from flat arrays, without a Python object per number."""
    import pyarrow

    samples = [row.sample for row in rows]
    sizes = [len(sample.input_ids) for sample in samples]
    spans = np.array([span for sample in samples for span in sample.spans], np.int64)
    lengths, trained, versions = spans[:, 0], spans[:, 1], spans[:, 2]
    span_advantages = [
        value for row in rows for value in row.advantages or [row.advantage] * len(row.sample.spans)
    ]
    advantages = np.where(trained, span_advantages, 0.0).astype(np.float32)

    def tokens(values: npt.NDArray[Any]) -> Any:
        return _list_column(sizes, values)

    names = [name for sample in samples for name in sample.versions]
    return pyarrow.table(
        {
            "input_ids": tokens(_concatenate((s.input_ids for s in samples), np.int32)),
            "loss_mask": tokens(np.repeat(trained.astype(np.int8), lengths)),
            "logprobs": tokens(_concatenate((s.logprobs for s in samples), np.float32)),
            "advantages": tokens(np.repeat(advantages, lengths)),
            "version_index": tokens(np.repeat(versions.astype(np.int16), lengths)),
            "versions": _list_column([len(s.versions) for s in samples], names),
            "weight": pyarrow.array([1.0] * len(rows), pyarrow.float64()),
            "reward": pyarrow.array([row.reward for row in rows], pyarrow.float64()),
            "advantage": pyarrow.array([row.advantage for row in rows], pyarrow.float64()),
            "run_id": [row.run_id for row in rows],
            "task_id": [row.task_id for row in rows],
            "group": [row.group for row in rows],
            "pair": pyarrow.array([row.pair for row in rows], pyarrow.string()),
            "chosen": pyarrow.array([row.chosen for row in rows], pyarrow.bool_()),
            "temperature": pyarrow.array([s.temperature for s in samples], pyarrow.float64()),
            "shaped": [sample.shaped for sample in samples],
        }
    )


def _concatenate(arrays: Iterable[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.frombuffer(b"".join(array.tobytes() for array in arrays), dtype)


def _list_column(sizes: Sequence[int], values: Any) -> Any:
    """Make a list column with `sizes[i]` of the values in row i."""
    import pyarrow

    offsets = _flat_column(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
    flat = (
        pyarrow.array(values, pyarrow.string())
        if isinstance(values, list)
        else _flat_column(values)
    )
    return pyarrow.ListArray.from_arrays(offsets, flat)


def _flat_column(values: npt.NDArray[Any]) -> Any:
    """Make a column of an array, without a copy."""
    import pyarrow

    data_type = pyarrow.from_numpy_dtype(values.dtype)
    return pyarrow.Array.from_buffers(data_type, len(values), [None, pyarrow.py_buffer(values)])


class Balance:
    """The groups of a dataset and the group of each row, in 4 bytes a row."""

    def __init__(self, key: str | None, power: float) -> None:
        self.key, self._power = key, power
        self._groups: dict[bytes, int] = {}
        self._rows: dict[str, array[int]] = {}
        self._any_value = False

    def group_of(self, metadata: dict[str, Any]) -> int:
        """Return the group of a task by its metadata. Tasks without the key form one group."""
        if self.key is None:
            return 0
        value = metadata.get(self.key)
        self._any_value = self._any_value or value is not None
        # values need not be hashable
        return self._groups.setdefault(canonical(value), len(self._groups))

    def add(self, split: str, group: int) -> None:
        """Record the group of a row."""
        if self.key is not None:
            self._rows.setdefault(split, array("I")).append(group)

    def apply(self, directory: Path, split: str, files: dict[str, int]) -> None:
        """Write the weights of a split into its shards. Raises BadInput if no task has the key."""
        if self.key is None:
            return
        weights = self.weights(split)
        start = 0
        for name, rows in files.items():
            _rewrite(directory / name, weights[start : start + rows])
            start += rows

    def weights(self, split: str) -> npt.NDArray[np.float64]:
        """Return the weight of each row of a split: [rows]. Raises BadInput."""
        if not self._any_value:
            message = f"no accepted run or demonstration has {self.key!r} in its metadata"
            raise BadInput(message, param="balance_by")
        groups = np.frombuffer(self._rows[split], np.uint32)
        counts = Counter(groups.tolist())
        scale = len(groups) / sum(count**self._power for count in counts.values())
        by_group = np.zeros(len(self._groups), np.float64)
        for group, count in counts.items():
            by_group[group] = scale * count ** (self._power - 1)
        return by_group[groups]


def _rewrite(path: Path, weights: npt.NDArray[np.float64]) -> None:
    import pyarrow
    import pyarrow.parquet

    draft = path.with_suffix(".weighing")
    with pyarrow.parquet.ParquetFile(path) as old:
        schema = old.schema_arrow
        column, start = schema.get_field_index("weight"), 0
        with pyarrow.parquet.ParquetWriter(draft, schema, **OPTIONS) as new:
            for number in range(old.num_row_groups):
                table = old.read_row_group(number)
                row_weights = weights[start : start + table.num_rows]
                new.write_table(table.set_column(column, "weight", pyarrow.array(row_weights)))
                start += table.num_rows
    durable.sync(draft)
    draft.replace(path)
