"""Operations that write datasets and runs in other people's formats."""

from typing import Any

from cray_agents.runtime.exports.export_process import LINES, PARQUET, TAR
from cray_agents.runtime.exports.exporter import formats
from cray_agents.runtime.gateway.openapi.operation import Operation, Schema, query
from cray_agents.runtime.gateway.openapi.trajectory_operations import WHICH

TEXT: Schema = {"type": "string"}
BYTES: Schema = {"type": "string", "format": "binary"}
FLAG: Schema = {"enum": ["false", "true"]}
ANSWERS: dict[str, Any] = {LINES: TEXT, PARQUET: BYTES, TAR: BYTES}
HOW = (
    query("format", {"enum": list(formats())}, "`jsonl` unless given."),
    query("strict", FLAG, "A loss is an error."),
    query("allow", {"type": "array", "items": TEXT}, "Losses that strict allows."),
    query("skip_missing", FLAG, "Leave out runs that were pruned or are damaged."),
    query("skip_unsupported", FLAG, "Leave out runs that the format cannot carry."),
)
MORE = (
    "Lines of JSON, a Parquet file (tokens, verl), or a tar of a folder (huggingface). "
    "`x-export-losses: code=count, ...` tells what the format leaves out, where that is known "
    "before the first byte: with `strict`, in Parquet, and where it is small. An export that fails "
    "later ends with a broken connection, never with a short answer that looks whole."
)
REFUSED = (
    "400 unknown_format",
    "400 unsupported_export",
    "400 export_loss",
    "429 rate_limit_exceeded",
)
OPERATIONS = (
    Operation(
        "get",
        "/v1/datasets/{dataset_id}/export",
        "exportDataset",
        "Training",
        "A training set's runs, pairs or tokens in another format",
        ANSWERS,
        query=(*HOW, query("split", {"enum": ["train", "validation"]})),
        more=MORE,
        fails=("404 not_found", "400 missing_runs", "400 no_pairs", *REFUSED),
    ),
    Operation(
        "get",
        "/v1/trajectories/export",
        "exportRuns",
        "Training",
        "The runs that match, in another format",
        ANSWERS,
        query=(*HOW, *WHICH),
        more=MORE,
        fails=REFUSED,
    ),
)
