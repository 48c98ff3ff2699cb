"""Readers: read rows of JSON, CSV and Parquet files, and make tasks of them.

Called by task_set.py and huggingface_folder.py.
"""

import csv
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import Any, TypedDict

from pydantic import ValidationError

from cray_agents.errors import BadInput, SetupError
from cray_agents.exact_json import memory_of
from cray_agents.records import Input, Task
from cray_agents.tasks.record_source import RecordSource, TooLong, lines_of

Row = tuple[str, dict[str, Any]]  # location (`tasks.jsonl:17`), fields
BATCH = 1024  # rows of a Parquet file read at a time, of short rows
SMALL = 128 * 2**20  # characters that the rows of small files may hold
RATIO = 128  # times their files' bytes that rows may hold; honest files reach twenty
ROW = 512  # characters that a row counts more than it holds: its objects


def rows_of_file(path: Path) -> Iterator[Row]:
    """Yield the rows of a file, read by the suffix of its name. Raises BadInput."""
    readers: dict[str, Callable[[Path], Iterator[Row]]] = {
        ".jsonl": rows_of_json,
        ".json": rows_of_json,
        ".csv": rows_of_csv,
        ".tsv": partial(rows_of_csv, delimiter="\t"),
        ".parquet": rows_of_parquet,
    }
    if path.suffix not in readers:
        raise BadInput(
            f"{path}: tasks are read from files ending in {', '.join(readers)}", param="path"
        )
    return readers[path.suffix](path)


class RowBound:
    """Bounds the rows of files to SMALL characters, or RATIO times what the files take on disk.

    A set holds all its tasks, and a file of kilobytes may tell gigabytes.
    """

    def __init__(self, files: Sequence[Path]) -> None:
        sizes = [file.stat().st_size for file in files if file.exists()]
        self._left = self._most = max(SMALL, RATIO * sum(sizes))

    def checked(self, rows: Iterable[Row]) -> Iterator[Row]:
        """Yield the rows of one of the files. Raises BadInput."""
        for location, row in rows:
            self._left -= ROW + sum(map(_memory, row.values()))
            if self._left < 0:
                raise BadInput(
                    f"{location}: the rows up to here hold more than {self._most >> 20} MiB, far "
                    "more than files of this size do: they are damaged, or many rows are equal",
                    param="path",
                )
            yield location, row


def _memory(value: Any) -> int:
    if isinstance(value, str):
        return len(value)
    text = str(value).encode(errors="replace")
    return len(text) + memory_of(text)


def rows_of_json(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON array, or of a file with one per line; see RecordSource."""
    source = RecordSource(path, "path")
    for record in source.records():
        place = f"{path}:{record.number}"
        place = place if source.word == "line" else f"{path}: item {record.number}"
        problem = record.problem or (source.replaced and "it holds half a character (a surrogate)")
        if problem or not isinstance(record.value, dict):
            problem = problem or 'not a JSON object such as {"input": "..."}'
            raise BadInput(f"{place}: {problem}", param="path")
        yield place, record.value


def rows_of_csv(path: Path, delimiter: str = ",") -> Iterator[Row]:
    """Yield the rows of a table with the columns' names in its first line; values are texts."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            texts = (line for _, line in lines_of(file))
            lines = csv.DictReader(texts, delimiter=delimiter, strict=True)
            names = lines.fieldnames or []
            for name, count in Counter(names).items():
                if count > 1:
                    raise BadInput(f"{path}: two columns are called {name!r}", param="path")
            for row in lines:
                location = f"{path}:{lines.line_num}"
                if None in row or None in row.values():
                    raise BadInput(
                        f"{location}: not as many values as there are columns ({len(names)}); a "
                        f"value that holds {delimiter!r} is quoted",
                        param="path",
                    )
                yield location, row
    except TooLong as error:
        raise BadInput(f"{path}: after line {lines.line_num}: {error}", param="path") from error
    except OSError as error:
        raise _unreadable(path, error) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not a CSV file in UTF-8: {error}", param="path") from error


def rows_of_parquet(path: Path, text: str | None = None) -> Iterator[Row]:
    """Yield the rows of a Parquet file, or of all in a folder, in the order of their names.

    With `text` only the column of this name is read, which must be one of texts. Raises BadInput.
    """
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SetupError(
            "Parquet files are read with pyarrow: pip install 'cray-agents[export]'"
        ) from error
    for each in files_at(path):
        try:
            with pyarrow.parquet.ParquetFile(each) as file:
                number = 0
                if text is not None:
                    _check_texts(file.schema_arrow, text, each)
                size = _batch_size(each, file.metadata)
                for batch in file.iter_batches(size, columns=None if text is None else [text]):
                    for row in batch.to_pylist():
                        yield f"{each}: row {number}", row
                        number += 1
        except OSError as error:
            raise _unreadable(each, error) from error
        except pyarrow.ArrowException as error:
            raise BadInput(f"{each}: not a Parquet file: {error}", param="path") from error


def _check_texts(schema: Any, name: str, path: Path) -> None:
    from pyarrow import types

    kind = schema.field(name).type if schema.names.count(name) == 1 else None
    if kind is None or not (types.is_string(kind) or types.is_large_string(kind)):
        columns = ", ".join(f"{field.name} ({field.type})" for field in schema)
        raise BadInput(
            f"{path} has no column {name!r} of texts: it has {columns[:500] or 'none'}; rename the"
            f" one that holds the texts to {name!r}",
            param="path",
        )


def files_at(path: Path) -> list[Path]:
    """Return the file itself, or the Parquet files in a folder. Raises BadInput."""
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    return [inside(path, file) for file in files] if path.is_dir() else files


def inside(folder: Path, path: Path) -> Path:
    """Return a path that is in a folder. Raises BadInput for one that leads out of it.

    A link in a snapshot of a Hugging Face cache may lead to that cache's blobs.
    """
    root, target = folder.resolve(), path.resolve()
    caches = [each.parent / "blobs" for each in root.parents if each.name == "snapshots"]
    if not any(target.is_relative_to(each) for each in (root, *caches)):
        raise BadInput(f"{path} leads out of the folder {folder}: copy it there", param="path")
    return path


def _batch_size(path: Path, about: Any) -> int:
    """Return how many rows of a Parquet file are read at once. Raises BadInput.

    A page, and with a dictionary each row, may hold as much as all of its column's chunk.
    """
    largest = 1
    for group in map(about.row_group, range(about.num_row_groups)):
        chunks = [group.column(n) for n in range(group.num_columns)]
        size = sum(c.total_uncompressed_size + 8 * c.num_values for c in chunks)
        if size > max(SMALL, RATIO * sum(c.total_compressed_size for c in chunks)):
            problem = f"a row group of {size >> 20} MiB, {RATIO} times what it takes on disk"
            raise BadInput(f"{path} has {problem}: it is damaged, or many rows are equal")
        largest = max(largest, size)
    return min(BATCH, max(2, SMALL // largest))


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(f"cannot read {path}: {error.strerror or error}", param="path")


TaskLike = Task | Mapping[str, Any] | Input
Column = str | Callable[[Mapping[str, Any]], Any]


class Columns(TypedDict, total=False):
    """Columns of a row that make a task: names, or functions of the row.

    Without any, a row has the fields of a Task and no others. With some, all columns that are not
    named are left out. `input` and `target` then default to columns of these names, and `target`
    may be missing. Without `id`, a task's id is a hash of its input and target. `metadata` lists
    the columns of the task's metadata.
    """

    input: Column
    target: Column
    id: Column
    split: Column
    metadata: Sequence[str] | Callable[[Mapping[str, Any]], Any]


def make_task(value: TaskLike, location: str, columns: Columns | None = None) -> Task:
    """Make a task of a Task, its fields or its input. Raises BadInput, naming the location."""
    if isinstance(value, Task):
        return value
    row: Any = dict(value) if isinstance(value, Mapping) else {"input": value}
    if columns:
        row = _map_columns(row, columns, location)
    try:
        return Task.model_validate(row)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "task"
        message = problem["msg"].removeprefix("Value error, ")
        hint = "" if columns else '; other columns are named as in input="question"'
        raise BadInput(
            f"{location}: {place}: {message} (fields: {', '.join(Task.model_fields)}{hint})",
            param=place,
        ) from error


def _map_columns(row: Mapping[str, Any], columns: Columns, location: str) -> dict[str, Any]:
    fields: dict[str, Any] = {
        "input": _value(row, columns.get("input", "input"), "input", location)
    }
    if "target" in columns or "target" in row:
        fields["target"] = _value(row, columns.get("target", "target"), "target", location)
    if "id" in columns:
        fields["id"] = str(_value(row, columns["id"], "id", location))
    if "split" in columns:
        fields["split"] = _value(row, columns["split"], "split", location)
    if "metadata" in columns:
        wanted = columns["metadata"]
        fields["metadata"] = (
            _value(row, wanted, "metadata", location)
            if callable(wanted)
            else {name: _value(row, name, "metadata", location) for name in wanted}
        )
    return fields


def _value(row: Mapping[str, Any], column: Column, field: str, location: str) -> Any:
    if isinstance(column, str):
        if column not in row:
            names = ", ".join(map(str, row)) or "none"
            raise BadInput(f"{location}: no column {column!r}; there are {names}", param=field)
        return row[column]
    try:
        return column(row)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"{location}: the function for {field} failed: {type(error).__name__}: {error}"
        raise BadInput(message, param=field) from error
