"""Token samples as Parquet shards: written a thousand rows at a time, the same bytes every time.

A row is a sample. Parallel, [tokens]: input_ids; loss_mask (1: trained on); logprobs, advantages
(0 off the mask); version_index (into versions, those that sampled; -1: not sampled). Of the sample:
weight, reward, advantage; run_id, task_id; group (grpo and dpo: what is compared with each other);
pair (dpo; else null) and chosen (dpo: true on the better row of a pair, which comes first; kto:
whether it is desirable; else null); temperature (at which it was sampled; null: it was not, or at
several) and shaped (whether more decided what was sampled: sampling.py). Rows that belong together
stand side by side. Called by making.py; weights.py writes the weights once they are known.
"""

from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import numpy.typing as npt

from cray_agents.runtime.datasets.run_samples import TokenSample
from cray_agents.runtime.disk import durable

SHARD_ROWS = 10_000
BATCH_ROWS = 1_000  # a row group; held in memory
MASKS = ("loss_mask", "advantages", "version_index")  # of few values: worth a dictionary
NAMES = ("run_id", "task_id", "group", "pair")
OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": [*(f"{name}.list.element" for name in (*MASKS, "versions")), *NAMES],
    "column_encoding": {"logprobs.list.element": "BYTE_STREAM_SPLIT"},
}


class SampleRow(NamedTuple):
    """A sample and what is said of it. `balance` is the place of its group in weights.py.

    `advantages`: one for each of the sample's spans; () where all are `advantage`, which is else
    their mean over the trained tokens.
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
    """Writes the rows of a split into a draft directory, as `<split>-00000.parquet` and on."""

    def __init__(
        self,
        directory: Path,
        split: str,
        shard_rows: int = SHARD_ROWS,
        batch_rows: int = BATCH_ROWS,
    ) -> None:
        self._directory, self._split = directory, split
        self._shard_rows, self._batch_rows = shard_rows, batch_rows
        self._rows: list[SampleRow] = []
        self._writer: Any = None
        self._written = 0  # rows in the open shard
        self.files: dict[str, int] = {}  # name -> rows

    def add(self, rows: Sequence[SampleRow]) -> None:
        """Rows that belong together: they go into one shard, unless it cannot hold them."""
        held = self._written + len(self._rows)
        if held and held + len(rows) > self._shard_rows:
            self._close()
        for row in rows:
            self._rows.append(row)
            if self._written + len(self._rows) == self._shard_rows:
                self._close()
            elif len(self._rows) == self._batch_rows:
                self._flush()

    def finish(self) -> dict[str, int]:
        """Write what is left; returns the rows of each file."""
        self._close()
        return self.files

    def _flush(self) -> None:
        import pyarrow.parquet

        if not self._rows:
            return
        table = table_of(self._rows)
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
    """Rows as an Arrow table, made from flat arrays: no number becomes a Python object again."""
    import pyarrow

    samples = [row.sample for row in rows]
    sizes = [len(sample.input_ids) for sample in samples]
    spans = np.array([span for sample in samples for span in sample.spans], np.int64)
    lengths, trained, versions = spans[:, 0], spans[:, 1], spans[:, 2]
    each = [
        value for row in rows for value in row.advantages or [row.advantage] * len(row.sample.spans)
    ]
    advantages = np.where(trained, each, 0.0).astype(np.float32)

    def tokens(values: npt.NDArray[Any]) -> Any:
        return _lists(sizes, values)

    names = [name for sample in samples for name in sample.versions]
    return pyarrow.table(
        {
            "input_ids": tokens(_joined((s.input_ids for s in samples), np.int32)),
            "loss_mask": tokens(np.repeat(trained.astype(np.int8), lengths)),
            "logprobs": tokens(_joined((s.logprobs for s in samples), np.float32)),
            "advantages": tokens(np.repeat(advantages, lengths)),
            "version_index": tokens(np.repeat(versions.astype(np.int16), lengths)),
            "versions": _lists([len(s.versions) for s in samples], names),
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


def _joined(arrays: Iterable[Any], dtype: type[np.generic]) -> npt.NDArray[Any]:
    return np.frombuffer(b"".join(each.tobytes() for each in arrays), dtype)


def _lists(sizes: Sequence[int], values: Any) -> Any:
    """A list column: so many of the values for each row."""
    import pyarrow

    offsets = _flat(np.concatenate([[0], np.cumsum(sizes)]).astype(np.int32))
    flat = pyarrow.array(values, pyarrow.string()) if isinstance(values, list) else _flat(values)
    return pyarrow.ListArray.from_arrays(offsets, flat)


def _flat(values: npt.NDArray[Any]) -> Any:
    """An array as a column, without a copy."""
    import pyarrow

    kind = pyarrow.from_numpy_dtype(values.dtype)
    return pyarrow.Array.from_buffers(kind, len(values), [None, pyarrow.py_buffer(values)])
