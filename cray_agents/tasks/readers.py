"""Readers: read rows of JSON, CSV and Parquet files, and make tasks of them.

Called by task_set.py and huggingface_folder.py.
"""

import csv
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, TypedDict

from pydantic import ValidationError
from pydantic_core import from_json

from cray_agents.errors import BadInput, SetupError
from cray_agents.records import Task

Row = tuple[str, dict[str, Any]]  # location (`tasks.jsonl:17`), fields
BATCH = 1024  # rows of a Parquet file read at a time
BOM = b"\xef\xbb\xbf"


def rows_of_file(path: Path) -> Iterator[Row]:
    """Yield the rows of a file, read by the suffix of its name. Raises BadInput."""
    readers = {
        ".jsonl": rows_of_jsonl,
        ".json": rows_of_json,
        ".csv": rows_of_csv,
        ".tsv": rows_of_tsv,
        ".parquet": rows_of_parquet,
    }
    if path.suffix not in readers:
        raise BadInput(
            f"{path}: tasks are read from files ending in {', '.join(readers)}", param="path"
        )
    return readers[path.suffix](path)


def rows_of_jsonl(path: Path) -> Iterator[Row]:
    """Yield the JSON objects of a file with one per line, skipping empty lines."""
    for number, line in enumerate(_read(path).split(b"\n"), 1):
        if line.strip():
            yield _row(_parse_json(line, f"{path}:{number}"), f"{path}:{number}")


def rows_of_json(path: Path) -> Iterator[Row]:
    """Yield the objects of a JSON array, or of JSON lines as rows_of_jsonl."""
    content = _read(path)
    if content.lstrip()[:1] != b"[":
        yield from rows_of_jsonl(path)
        return
    for number, value in enumerate(_parse_json(content, str(path))):
        yield _row(value, f"{path}: item {number}")


def rows_of_tsv(path: Path) -> Iterator[Row]:
    """Yield the rows of a table whose columns are separated by tabs."""
    return rows_of_csv(path, "\t")


def rows_of_csv(path: Path, delimiter: str = ",") -> Iterator[Row]:
    """Yield the rows of a table with the columns' names in its first line; values are texts."""
    try:
        with path.open(encoding="utf-8-sig", newline="") as file:
            lines = csv.DictReader(file, delimiter=delimiter, strict=True)
            names = lines.fieldnames or []
            for name in names:
                if names.count(name) > 1:
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
    except OSError as error:
        raise _unreadable(path, error) from error
    except (csv.Error, UnicodeDecodeError) as error:
        raise BadInput(f"{path}: not a CSV file in UTF-8: {error}", param="path") from error


def rows_of_parquet(path: Path) -> Iterator[Row]:
    """Yield the rows of a Parquet file, or of all in a folder, in the order of their names."""
    try:
        import pyarrow
        import pyarrow.parquet
    except ImportError as error:
        raise SetupError(
            "Parquet files are read with pyarrow: pip install 'cray-agents[export]'"
        ) from error
    files = sorted(path.rglob("*.parquet")) if path.is_dir() else [path]
    for each in files:
        try:
            with pyarrow.parquet.ParquetFile(each) as file:
                number = 0
                for batch in file.iter_batches(BATCH):
                    for row in batch.to_pylist():
                        yield f"{each}: row {number}", row
                        number += 1
        except OSError as error:
            raise _unreadable(each, error) from error
        except pyarrow.ArrowException as error:
            raise BadInput(f"{each}: not a Parquet file: {error}", param="path") from error


def _read(path: Path) -> bytes:
    try:
        return path.read_bytes().removeprefix(BOM)
    except OSError as error:
        raise _unreadable(path, error) from error


def _unreadable(path: Path, error: OSError) -> BadInput:
    return BadInput(f"cannot read tasks from {path}: {error.strerror or error}", param="path")


def _parse_json(content: bytes, location: str) -> Any:
    try:
        return from_json(content, allow_inf_nan=False)
    except ValueError as error:
        raise BadInput(f"{location}: not JSON: {error}", param="path") from error


def _row(value: Any, location: str) -> Row:
    if not isinstance(value, dict):
        raise BadInput(f'{location}: not a JSON object such as {{"input": "..."}}', param="path")
    return location, value


TaskLike = Task | Mapping[str, Any] | str
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
    row: Any = {"input": value} if isinstance(value, str) else dict(value)
    if columns:
        row = _map_columns(row, columns, location)
    try:
        return Task.model_validate(row)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "task"
        hint = "" if columns else '; other columns are named as in input="question"'
        raise BadInput(
            f"{location}: {place}: {problem['msg']} (fields: {', '.join(Task.model_fields)}{hint})",
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
