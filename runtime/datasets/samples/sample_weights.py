"""Sample weights: balance the groups of a dataset by a key of the tasks' metadata.

A group of n samples has the total weight n**power, and the mean weight of a split is 1. The size of
a group is only known at the end, so the shards are then rewritten with weights. Called by draft.py.
"""

from array import array
from collections import Counter
from pathlib import Path
from typing import Any

import numpy as np
import numpy.typing as npt

from cray_agents.errors import BadInput
from cray_agents.records import canonical
from cray_agents.runtime.datasets.samples.token_shards import OPTIONS
from cray_agents.runtime.disk import durable


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
