"""runs.parquet: a line for each run and demonstration that was considered, with in or out and why.

    run         its id; `demonstration/<n>`, from 0, for those of the recipe (in the shards of dpo,
                `demonstration/<n>/rejected` is the answer that it is preferred to)
    task, generation, attempt, reward      null where there is none
    accepted    whether it is in; then `samples` says in how many rows of the shards
    reason      why it is not:
                held_out, infrastructure_error, reward_error (one of its rewards failed), no_reward,
                no_such_turn (grpo: that a reward is for), used_up (max_uses)
                imported (has no tokens, and is not rendered), not_renderable
                empty (nothing was sampled), missing_call, no_tokens, no_logprobs, redacted, corrupt
                ambiguous_choices (of one request, and nothing tells which was gone on with)
                low_reward, not_best, alone, zero_variance, no_pair, broken_prefix (dpo: a template
                breaks it into several samples), over_max_per_task
                contaminated, too_long, duplicate, near_duplicate
    detail      with what: the run it repeats, the held-out task it equals, how similar, how long

Written by making.py as it decides, a few thousand lines at a time.
"""

from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.runtime.datasets.reader import BATCH, RUNS
from cray_agents.runtime.disk import durable


class ConsideredRun(NamedTuple):
    """What became of a run or demonstration."""

    run: str
    task: str | None = None
    generation: int | None = None
    attempt: int | None = None
    reward: float | None = None
    accepted: bool = False
    reason: str | None = None
    detail: str | None = None
    samples: int = 0


class LineWriter:
    """Writes lines into runs.parquet of a draft directory."""

    def __init__(self, directory: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = directory / RUNS
        text, whole = pyarrow.string(), pyarrow.int64()
        kinds = (text, text, whole, whole, pyarrow.float64(), pyarrow.bool_(), text, text, whole)
        self._schema = pyarrow.schema(list(zip(ConsideredRun._fields, kinds, strict=True)))
        self._writer: Any = pyarrow.parquet.ParquetWriter(
            self._path, self._schema, compression="zstd", use_dictionary=["task", "reason"]
        )
        self._lines: list[ConsideredRun] = []
        self.count = 0

    def add(self, line: ConsideredRun) -> None:
        """Write a line, soon."""
        self._lines.append(line)
        self.count += 1
        if len(self._lines) == BATCH:
            self._flush()

    def finish(self) -> dict[str, int]:
        """Write what is left; returns the rows of the file."""
        self._flush()
        self._writer.close()
        durable.sync(self._path)
        return {RUNS: self.count}

    def _flush(self) -> None:
        import pyarrow

        columns = list(zip(*self._lines, strict=True)) or [()] * len(ConsideredRun._fields)
        arrays = [
            pyarrow.array(column, field.type)
            for column, field in zip(columns, self._schema, strict=True)
        ]
        self._writer.write_table(pyarrow.Table.from_arrays(arrays, schema=self._schema))
        self._lines = []
