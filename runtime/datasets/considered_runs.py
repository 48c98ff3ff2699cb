"""runs.parquet: one line for each run and demonstration considered, with decision and reason.

    run         the id; `demonstration/<n>`, from 0, for demonstrations of the recipe (in the shards
                of dpo, `demonstration/<n>/rejected` is the rejected answer)
    task, generation, attempt, reward      null if missing
    accepted    true if the run is in the dataset; `samples` counts its rows in the shards
    reason      the reason for leaving the run out:
                held_out, infrastructure_error, reward_error (one of its rewards failed), no_reward,
                no_such_turn (grpo: a reward names a missing turn), used_up (max_uses)
                imported (has no tokens and is not rendered), not_renderable
                empty (nothing was sampled), missing_call, no_tokens, no_logprobs, redacted, corrupt
                ambiguous_choices (one request has several answers, and the next turn is unknown)
                low_reward, not_best, alone, zero_variance, no_pair, broken_prefix (dpo: a template
                breaks it into several samples), over_max_per_task
                contaminated, too_long, duplicate, near_duplicate
    detail      details of the reason: the repeated run, the held-out task, similarity, length

Written by draft.py, a few thousand lines at a time.
"""

from pathlib import Path
from typing import Any, NamedTuple

from cray_agents.runtime.datasets.reader import BATCH, RUNS
from cray_agents.runtime.disk import durable


class ConsideredRun(NamedTuple):
    """A line of runs.parquet."""

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
    """A writer of runs.parquet in a draft directory."""

    def __init__(self, directory: Path) -> None:
        import pyarrow
        import pyarrow.parquet

        self._path = directory / RUNS
        text, integer, boolean = pyarrow.string(), pyarrow.int64(), pyarrow.bool_()
        types = (text, text, integer, integer, pyarrow.float64(), boolean, text, text, integer)
        self._schema = pyarrow.schema(list(zip(ConsideredRun._fields, types, strict=True)))
        self._writer: Any = pyarrow.parquet.ParquetWriter(
            self._path, self._schema, compression="zstd", use_dictionary=["task", "reason"]
        )
        self._lines: list[ConsideredRun] = []
        self.count = 0

    def add(self, line: ConsideredRun) -> None:
        """Add a line. Lines are written in batches."""
        self._lines.append(line)
        self.count += 1
        if len(self._lines) == BATCH:
            self._flush()

    def finish(self) -> dict[str, int]:
        """Write the remaining lines. Return the number of rows by file name."""
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
