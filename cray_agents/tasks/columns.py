"""From a row of a file to a Task: the row's own fields, or columns of other names. For tasks.py."""

from collections.abc import Callable, Mapping, Sequence
from typing import Any, TypedDict

from pydantic import ValidationError

from cray_agents.errors import BadInput
from cray_agents.records import Task

Given = Task | Mapping[str, Any] | str
Column = str | Callable[[Mapping[str, Any]], Any]


class Columns(TypedDict, total=False):
    """Which columns of a row make a task: names, or functions of the row.

    Without any, a row has the fields of a Task and no others. With some, all columns that are not
    named are left out; `input` and `target` are then called so unless said otherwise, and there
    may be no `target`. Without `id`, a task's is a hash of its input and target. `metadata` holds
    the columns of the names it lists.
    """

    input: Column
    target: Column
    id: Column
    split: Column
    metadata: Sequence[str] | Callable[[Mapping[str, Any]], Any]


def task_of(value: Given, where: str, columns: Columns | None = None) -> Task:
    """A task from what it was given as. Raises BadInput, naming the place."""
    if isinstance(value, Task):
        return value
    row: Any = {"input": value} if isinstance(value, str) else dict(value)
    if columns:
        row = _mapped(row, columns, where)
    try:
        return Task.model_validate(row)
    except ValidationError as error:
        problem = error.errors(include_url=False)[0]
        place = ".".join(map(str, problem["loc"])) or "task"
        hint = "" if columns else '; other columns are named as in input="question"'
        raise BadInput(
            f"{where}: {place}: {problem['msg']} (fields: {', '.join(Task.model_fields)}{hint})",
            param=place,
        ) from error
    except TypeError as error:  # from canonical JSON, of which the id is a hash
        raise BadInput(
            f"{where}: target: {error}: a task is kept as JSON; give a function such as "
            'target=lambda row: str(row["answer"])',
            param="target",
        ) from error


def _mapped(row: Mapping[str, Any], columns: Columns, where: str) -> dict[str, Any]:
    found: dict[str, Any] = {"input": _value(row, columns.get("input", "input"), "input", where)}
    if "target" in columns or "target" in row:
        found["target"] = _value(row, columns.get("target", "target"), "target", where)
    if "id" in columns:
        found["id"] = str(_value(row, columns["id"], "id", where))
    if "split" in columns:
        found["split"] = _value(row, columns["split"], "split", where)
    if "metadata" in columns:
        wanted = columns["metadata"]
        found["metadata"] = (
            _value(row, wanted, "metadata", where)
            if callable(wanted)
            else {name: _value(row, name, "metadata", where) for name in wanted}
        )
    return found


def _value(row: Mapping[str, Any], column: Column, field: str, where: str) -> Any:
    if isinstance(column, str):
        if column not in row:
            there = ", ".join(map(str, row)) or "none"
            raise BadInput(f"{where}: no column {column!r}; there are {there}", param=field)
        return row[column]
    try:
        return column(row)
    except (LookupError, TypeError, ValueError, AttributeError) as error:
        message = f"{where}: the function for {field} failed: {type(error).__name__}: {error}"
        raise BadInput(message, param=field) from error
