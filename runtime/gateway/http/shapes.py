"""Shapes: the JSON of bodies and answers, as declared at the routes for /openapi.json.

A shape is one of our records, a JSON schema that may hold other shapes, or one of these with a name
of its own in the document. Shapes describe; the handlers check. Read next: openapi.py, which makes
schemas of them.
"""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias, Union

from pydantic import BaseModel

from cray_agents.runtime.gateway.http.bodies import ID

Schema: TypeAlias = dict[str, Any]
Shape: TypeAlias = Union[Schema, type[BaseModel], "NamedShape", "EditedRecord"]


@dataclass(frozen=True)
class NamedShape:
    """A shape with a name in the document; other shapes refer to it."""

    name: str
    shape: Schema


@dataclass(frozen=True)
class EditedRecord:
    """A record whose schema for clients differs from that of our class."""

    name: str
    record: type[BaseModel]
    edit: Callable[[Schema], Schema]


class Described(NamedTuple):
    """A query parameter or header with its description."""

    shape: Shape
    description: str


def object_of(
    required: Mapping[str, Shape] | None = None, optional: Mapping[str, Shape] | None = None
) -> Schema:
    """Return the shape of an object with these fields, and perhaps others."""
    required = required or {}
    shape: Schema = {"type": "object", "properties": {**required, **(optional or {})}}
    return {**shape, "required": list(required)} if required else shape


def list_of(items: Shape, least: int = 0) -> Schema:
    """Return the shape of a list with at least so many items."""
    return {"type": "array", "items": items, **({"minItems": least} if least else {})}


def data_of(items: Shape) -> Schema:
    """Return the shape of an object with a list in `data`."""
    return object_of({"data": list_of(items)}, DAMAGED)


def page_of(items: Shape) -> Schema:
    """Return the shape of a page of a list, as OpenAI has it."""
    return object_of(
        {
            "object": {"const": "list"},
            "data": list_of(items),
            "has_more": {"type": "boolean"},
            "first_id": TEXT_OR_NONE,
            "last_id": TEXT_OR_NONE,
        },
        DAMAGED,
    )


def all_of(*shapes: Shape) -> Schema:
    """Return the shape of a value that fits each of these shapes."""
    return {"allOf": list(shapes)}


def or_none(shape: Shape) -> Schema:
    """Return the shape of a value of this shape, or null."""
    return {"anyOf": [shape, {"type": "null"}]}


def count_up_to(most: int) -> Schema:
    """Return the shape of a whole number from 0 to `most`."""
    return {**COUNT, "maximum": most}


ANY: Schema = {"type": "object"}
TEXT: Schema = {"type": "string"}
TEXT_OR_NONE: Schema = {"type": ["string", "null"]}
WHOLE: Schema = {"type": "integer"}
WHOLE_OR_NONE: Schema = {"type": ["integer", "null"]}
COUNT: Schema = {"type": "integer", "minimum": 0}
REAL: Schema = {"type": "number"}
REAL_OR_NONE: Schema = {"type": ["number", "null"]}
BOOL: Schema = {"type": "boolean"}
FLAG: Schema = {"enum": ["false", "true"]}  # of a query
BYTES: Schema = {"type": "string", "contentMediaType": "application/octet-stream"}
AFTER = Described(TEXT, "The last id of the page before.")
BUCKET = Described(TEXT, "Groups by time, too: `30m`, `1h`, `1d`, `1w`.")
DELETED: Schema = {"const": True}
#: The records that a list leaves out, since they cannot be read.
DAMAGED: dict[str, Shape] = {"damaged": list_of(object_of({"id": TEXT, "reason": TEXT}))}

#: Chrome's trace format: `otherData.begin` is the unix time that the events' times count from.
TRACE: Schema = object_of(
    {"traceEvents": list_of(ANY), "displayTimeUnit": {"const": "ms"}, "otherData": ANY}
)

ID_SHAPE = NamedShape("Id", {"type": "string", "pattern": f"^{ID.pattern}$"})
NUMBER_SHAPE = NamedShape("Number", {"type": "integer", "minimum": 0, "maximum": 2**31 - 1})
SHA256_SHAPE = NamedShape("Sha256", {"type": "string", "pattern": "^[0-9a-f]{64}$"})
ERROR_SHAPE = NamedShape(
    "Error",
    object_of(
        {
            "error": {
                **object_of({"message": TEXT, "type": TEXT, "param": TEXT_OR_NONE, "code": TEXT}),
                "additionalProperties": False,
            }
        }
    ),
)
