"""One operation of the OpenAPI document, written down briefly and rendered in full."""

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

Schema = dict[str, Any]
JSON, FORM, EVENTS = "application/json", "multipart/form-data", "text/event-stream"


@dataclass(frozen=True)
class Operation:
    """What a method does at a path.

    `answers` is a schema of JSON, or a media type with its schema each. `fails` tells the refusals
    that are worth knowing, as "status code". `runs`: it is also there under a run's base URL.
    """

    method: Literal["get", "post", "delete"]
    path: str
    id: str
    tag: str
    summary: str
    answers: Schema
    takes: Schema | None = None
    form: Schema | None = None
    empty: bool = False  # whether the body may be left out
    query: tuple[Schema, ...] = ()
    headers: tuple[Schema, ...] = ()
    more: str = ""
    fails: tuple[str, ...] = ()
    runs: bool = False
    open: bool = False


def ref(name: str) -> Schema:
    """A component's schema."""
    return {"$ref": f"#/components/schemas/{name}"}


def query(name: str, schema: Schema, description: str = "") -> Schema:
    """A query parameter, which may be left out."""
    return _parameter("query", name, schema, description)


def header(name: str, schema: Schema, description: str) -> Schema:
    """A request's header, which may be left out."""
    return _parameter("header", name, schema, description)


def rendered(operation: Operation) -> Iterator[tuple[str, Schema]]:
    """The operation as OpenAPI has it, with its path; twice if it is there under a run too."""
    yield operation.path, _content(operation, operation.path, operation.id)
    if operation.runs:
        path = "/runs/{run_id}" + operation.path
        yield path, _content(operation, path, f"{operation.id}InRun")


def _content(operation: Operation, path: str, name: str) -> Schema:
    content: Schema = {
        "operationId": name,
        "tags": [operation.tag],
        "summary": operation.summary,
        "responses": {
            "200": _answers(operation.answers),
            "4XX": {"$ref": "#/components/responses/Refused"},
            "5XX": {"$ref": "#/components/responses/Failed"},
        },
    }
    refusals = f"Refuses with {', '.join(operation.fails)}." if operation.fails else ""
    if description := " ".join(text for text in (operation.more, refusals) if text):
        content["description"] = description
    parameters = [*_path(path), *operation.query, *operation.headers]
    if parameters:
        content["parameters"] = parameters
    body = operation.takes or operation.form
    if body is not None:
        media_type = JSON if operation.takes is not None else FORM
        content["requestBody"] = {
            "required": not operation.empty,
            "content": {media_type: {"schema": body}},
        }
    if operation.open:
        content["security"] = []
    return content


def _answers(answers: Schema) -> Schema:
    """The good answer; a schema alone is JSON."""
    by_type = answers if all("/" in key for key in answers) else {JSON: answers}
    return {
        "description": "Done.",
        "headers": {"x-request-id": {"$ref": "#/components/headers/RequestId"}},
        "content": {media_type: {"schema": schema} for media_type, schema in by_type.items()},
    }


def _path(path: str) -> list[Schema]:
    """The parameters within a path; what cannot be an id is not found."""
    return [
        {"name": name, "in": "path", "required": True, "schema": ref(_KINDS.get(name, "Id"))}
        for name in re.findall(r"\{(\w+)\}", path)
    ]


_KINDS = {"number": "Number"}


def _parameter(where: str, name: str, schema: Schema, description: str) -> Schema:
    found = {"name": name, "in": where, "schema": schema}
    return {**found, "description": description} if description else found
