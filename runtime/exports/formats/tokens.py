"""`tokens`: exact token sequences as Parquet, for trainers that read token ids.

    input_ids       list<int32>   attention_mask  list<int8>    all ones: nothing is padded
    labels          list<int32>   the input id where it is trained on, -100 elsewhere
    logprobs        list<float>   as sampled; 0 for tokens that were not sampled
    advantages      list<float>   of a dataset; null for runs, which have none
    weight_version  string        name@N that sampled the last token; "" if none was sampled
    versions        list<string>  all versions that sampled tokens of the sequence
    version_index   list<int16>   each token's index into versions, -1 if it was not sampled
    weight, reward, advantage     double
    run_id, task_id, group, pair  string       chosen  bool (pair and chosen: of preferences)

A dataset's own shards are rewritten column by column, without the store. The calls of a stored run
are merged as in the dataset builder (datasets/run_samples.py). pyarrow is imported only
when a file is written. Called by export_files.py.
"""

from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

from cray_agents.records import Run
from cray_agents.runtime.datasets.run_samples import (
    TokenSample,
    find_inexact,
    is_exact,
    merge_calls,
)
from cray_agents.runtime.exports.export_files import TableFormat
from cray_agents.runtime.exports.export_format import ExportCounts, Written
from cray_agents.runtime.exports.sources import ExportSource

IGNORED = -100  # label of a token that is not trained on: ignore_index of PyTorch's cross entropy
BATCH_TOKENS = 1 << 20  # tokens that are rewritten at a time, about
KEPT = ("logprobs", "advantages", "versions", "version_index", "weight", "reward", "advantage",
        "run_id", "task_id", "group", "pair", "chosen")  # fmt: skip

MASKS = ("attention_mask", "version_index", "versions")  # few values, so a dictionary pays
OPTIONS: dict[str, Any] = {
    "compression": "zstd",
    "compression_level": 1,
    "use_dictionary": [
        *(f"{name}.list.element" for name in MASKS),
        *("weight_version", "run_id", "task_id", "group", "pair"),
    ],
    "column_encoding": {
        "logprobs.list.element": "BYTE_STREAM_SPLIT",
        "advantages.list.element": "BYTE_STREAM_SPLIT",
    },
}


@cache
def schema() -> Any:
    """Return the columns as a pyarrow schema."""
    import pyarrow as pa

    texts = ("run_id", "task_id", "group", "pair")
    return pa.schema(
        [
            ("input_ids", pa.list_(pa.int32())),
            ("attention_mask", pa.list_(pa.int8())),
            ("labels", pa.list_(pa.int32())),
            ("logprobs", pa.list_(pa.float32())),
            ("advantages", pa.list_(pa.float32())),
            ("weight_version", pa.string()),
            ("versions", pa.list_(pa.string())),
            ("version_index", pa.list_(pa.int16())),
            *((name, pa.float64()) for name in ("weight", "reward", "advantage")),
            *((name, pa.string()) for name in texts),
            ("chosen", pa.bool_()),
        ]
    )


def rows_of(run: Run, first: int) -> Written:
    """Return a run's sequences as rows; a run or cut-off turn that lacks tokens is a loss."""
    calls = run.calls
    if not calls or len(calls) < len(run.trajectory.turns) or find_inexact(calls) is not None:
        return Written([], ("no_tokens",))
    about = {
        "weight": 1.0,
        "reward": run.reward,
        "run_id": run.id,
        "task_id": run.task.id if run.task else "",
        "group": "",
    }
    lost = () if all(map(is_exact, calls)) else ("no_tokens",)
    return Written(
        [{**_columns(sample), **about} for sample in merge_calls(calls)],
        ("no_conversation", "no_advantages", *lost),
    )


def _columns(sample: TokenSample) -> dict[str, Any]:
    import numpy as np

    ids = np.frombuffer(sample.input_ids, np.int32)
    index = np.array(sample.version_index, np.int16)
    return {
        "input_ids": ids,
        "attention_mask": np.ones(len(ids), np.int8),
        "labels": np.where(np.array(sample.loss_mask, bool), ids, np.int32(IGNORED)),
        "logprobs": np.frombuffer(sample.logprobs, np.float32),
        "weight_version": sample.versions[index[index >= 0][-1]],
        "versions": sample.versions,
        "version_index": index,
    }


def rewrite_shards(source: ExportSource, counts: ExportCounts) -> Iterator[Any]:
    """Yield a dataset's shards, rewritten in batches, and count their rows."""
    for shard in source.shards():
        for batch in batches(shard):
            counts.records += batch.num_rows
            counts.runs += batch.num_rows
            counts.add("no_conversation", batch.num_rows)
            yield rewrite_batch(batch)


def batches(shard: Path) -> Iterator[Any]:
    """Yield a shard's rows in batches of about BATCH_TOKENS tokens, the same at every reading."""
    from pyarrow import parquet

    with parquet.ParquetFile(shard) as file:
        rows = file.metadata.num_rows
        groups = range(file.metadata.num_row_groups)
        tokens = sum(file.metadata.row_group(group).column(0).num_values for group in groups)
        size = max(1, min(rows, BATCH_TOKENS * rows // max(tokens, 1)))
        yield from file.iter_batches(size)


def rewrite_batch(batch: Any) -> Any:
    """Rewrite a batch of a dataset's shard in this format. All lists of a row have one length."""
    import numpy as np
    import pyarrow as pa

    ids, mask = batch.column("input_ids"), batch.column("loss_mask")
    offsets = ids.offsets.to_numpy()
    begin, end = offsets[0], offsets[-1]
    offsets = pa.array(offsets - begin)
    tokens = ids.values.slice(begin, end - begin)
    trained = mask.flatten().to_numpy() != 0
    labels = np.where(trained, tokens.to_numpy(), np.int32(IGNORED))
    columns = {
        "input_ids": pa.ListArray.from_arrays(offsets, tokens),
        "attention_mask": pa.ListArray.from_arrays(offsets, np.ones(len(labels), np.int8)),
        "labels": pa.ListArray.from_arrays(offsets, pa.array(labels)),
        "weight_version": _last_versions(batch),
        **{name: batch.column(name) for name in KEPT},
    }
    arrays = [columns[field.name].cast(field.type) for field in schema()]
    return pa.RecordBatch.from_arrays(arrays, schema=schema())


def _last_versions(batch: Any) -> Any:
    """Return the version of each row's last sampled token. versions: [rows][names]."""
    import numpy as np
    import pyarrow as pa

    index = batch.column("version_index")
    offsets = index.offsets.to_numpy() - index.offsets[0].as_py()
    tokens = index.flatten().to_numpy()
    # a row's last token with a version is the running maximum of such indices, at the row's end
    last = np.maximum.accumulate(np.where(tokens >= 0, np.arange(len(tokens)), -1))
    starts, ends = offsets[:-1], offsets[1:]
    at = np.where(ends > starts, last[np.maximum(ends - 1, 0)] if len(last) else -1, -1)
    known = at >= starts
    versions = batch.column("versions")
    names = versions.offsets.to_numpy()[:-1] - versions.offsets[0].as_py()
    chosen = names + (tokens[np.maximum(at, 0)] if len(tokens) else 0)
    taken = versions.flatten().take(pa.array(np.where(known, chosen, 0), mask=~known))
    return taken.fill_null("")


TOKENS = TableFormat(
    name="tokens",
    title="Token Parquet",
    about="exact token ids, labels, logprobs, advantages and versions, a row per sequence",
    schema=schema,
    write_run=rows_of,
    write_dataset=rewrite_shards,
    options=OPTIONS,
)
