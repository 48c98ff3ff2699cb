"""OpenAPI document: made of the declarations of the routes.

Called by app.py, for GET /openapi.json. Nothing here checks a request: tests/runtime/test_fuzz.py
compares the document with what the gateway answers.
"""

import inspect
import re
from collections.abc import Iterable
from typing import Any

from pydantic import BaseModel
from pydantic.json_schema import models_json_schema

from cray_agents.runtime.gateway.http.routing import IN_RUN, Declaration
from cray_agents.runtime.gateway.http.shapes import (
    ERROR_SHAPE,
    ID_SHAPE,
    NUMBER_SHAPE,
    TEXT,
    Described,
    EditedRecord,
    NamedShape,
    Schema,
)

JSON, FORM = "application/json", "multipart/form-data"
REF = "#/components/schemas/{model}"
TAGS = {
    "Models": "Ask a model. Every answer is recorded with the tokens that were sampled.",
    "Files": "Files, uploads in parts, and batches of requests.",
    "Training": "Runs and rewards, datasets, training jobs, loops.",
    "Tinker": "The wire API of Tinker's client, whose scripts train by commands.",
    "Versions": "The versions of a model: staging, promotion, canaries.",
    "Platform": "Health, the replicas, metrics, this document.",
}
ABOUT = (
    "OpenAI's endpoint over a platform that trains its own models. A model is `name`, its promoted "
    "version, or `name@N`. Every answer carries `x-request-id`; every failure is an `Error`. "
    "Where keys are required, a request without a good one is refused with 401 invalid_api_key, "
    "one whose key has too small a role with 403 insufficient_permissions, and one that would "
    "change what another key made with 403 not_the_owner."
)


def document(declarations: Iterable[Declaration]) -> Schema:
    """Return the OpenAPI 3.1 document of these routes."""
    schemas = Schemas()
    paths: dict[str, Schema] = {}
    for declaration in declarations:
        for path in declaration.paths:
            operation = _operation(declaration, path, schemas)
            paths.setdefault(path, {})[declaration.method.lower()] = operation
    return {
        "openapi": "3.1.0",
        "info": {"title": "cray-agents", "version": "1", "description": ABOUT},
        "tags": [{"name": name, "description": text} for name, text in TAGS.items()],
        "security": [{"bearer": []}, {"key": []}, {}],
        "paths": paths,
        "components": {
            "headers": {
                "RequestId": {"schema": TEXT, "description": "Names the request in the log."}
            },
            "responses": {
                "Refused": _failure("The request cannot be served; `code` tells why.", schemas),
                "Failed": _failure("The request may be good, and could not be served.", schemas),
            },
            "securitySchemes": {
                "bearer": {"type": "http", "scheme": "bearer"},
                "key": {"type": "apiKey", "in": "header", "name": "x-api-key"},
            },
            "schemas": schemas.components(),
        },
    }


class Schemas:
    """JSON schemas of shapes, and the components that they refer to."""

    def __init__(self) -> None:
        self._named: dict[str, Schema] = {}
        self._records: dict[str, type[BaseModel]] = {}
        self._edited: dict[str, EditedRecord] = {}

    def schema(self, shape: Any) -> Any:
        """Return the schema of a shape; what has a name becomes a reference to a component."""
        if isinstance(shape, NamedShape):
            if shape.name not in self._named:
                self._named[shape.name] = {}  # before its own fields: they may refer to it
                self._named[shape.name] = self.schema(shape.shape)
            return _ref(shape.name)
        if isinstance(shape, EditedRecord):
            self._edited[shape.name] = shape
            self._records[shape.record.__name__] = shape.record
            return _ref(shape.name)
        if isinstance(shape, type):
            self._records[shape.__name__] = shape
            return _ref(shape.__name__)
        if isinstance(shape, dict):
            return {name: self.schema(value) for name, value in shape.items()}
        if isinstance(shape, list):
            return [self.schema(value) for value in shape]
        return shape

    def components(self) -> Schema:
        """Return the schemas of all components that were referred to so far."""
        edits = {edited.record.__name__: edited for edited in self._edited.values()}
        records = [(record, "validation") for record in self._records.values()]
        _, schemas = models_json_schema(records, ref_template=REF)  # type: ignore[arg-type]
        components: Schema = {}
        for name, schema in schemas["$defs"].items():
            if edited := edits.get(name):
                components[edited.name] = edited.edit(schema)
            else:
                components[name] = schema
        return {**components, **self._named}


def _operation(declaration: Declaration, path: str, schemas: Schemas) -> Schema:
    summary, description = _texts(declaration)
    operation: Schema = {
        "operationId": _name(declaration, path),
        "tags": [declaration.tag],
        "summary": summary,
        "responses": {
            "200": _answer(declaration, schemas),
            "4XX": {"$ref": "#/components/responses/Refused"},
            "5XX": {"$ref": "#/components/responses/Failed"},
        },
    }
    if description:
        operation["description"] = description
    if parameters := _parameters(declaration, path, schemas):
        operation["parameters"] = parameters
    for media_type, body in ((JSON, declaration.body), (FORM, declaration.form)):
        if body is not None:
            operation["requestBody"] = {
                "required": not declaration.body_optional,
                "content": {media_type: {"schema": schemas.schema(body)}},
            }
    if declaration.role == "open":
        operation["security"] = []
    return operation


def _name(declaration: Declaration, path: str) -> str:
    """Return the handler's name in camel case."""
    first, *words = declaration.handler.__name__.split("_")
    in_run = "InRun" if path.startswith(IN_RUN) else ""
    return first + "".join(word.capitalize() for word in words) + in_run


def _texts(declaration: Declaration) -> tuple[str, str]:
    """Return the summary and the description: the handler's docstring, and the refusals."""
    summary, _, rest = (inspect.getdoc(declaration.handler) or "").partition("\n")
    refusals = f"Refuses with {declaration.fails}." if declaration.fails else ""
    return summary.rstrip("."), " ".join([*rest.split(), refusals]).strip()


def _answer(declaration: Declaration, schemas: Schemas) -> Schema:
    shapes = dict(declaration.media or {})
    if declaration.answer is not None:
        shapes = {JSON: declaration.answer, **shapes}
    content = {kind: {"schema": schemas.schema(shape)} for kind, shape in shapes.items()}
    return {
        "description": "Done.",
        "headers": {"x-request-id": {"$ref": "#/components/headers/RequestId"}},
        "content": content,
    }


def _parameters(declaration: Declaration, path: str, schemas: Schemas) -> list[Schema]:
    parameters: list[Schema] = []
    for name in re.findall(r"\{(\w+)\}", path):
        schema = schemas.schema(NUMBER_SHAPE if name == "number" else ID_SHAPE)
        parameters.append({"name": name, "in": "path", "required": True, "schema": schema})
    for place, declared in (("query", declaration.query), ("header", declaration.headers)):
        for name, value in (declared or {}).items():
            shape, text = value if isinstance(value, Described) else (value, "")
            parameter = {"name": name, "in": place, "schema": schemas.schema(shape)}
            parameters.append({**parameter, "description": text} if text else parameter)
    return parameters


def _failure(description: str, schemas: Schemas) -> Schema:
    return {
        "description": description,
        "headers": {"x-request-id": {"$ref": "#/components/headers/RequestId"}},
        "content": {JSON: {"schema": schemas.schema(ERROR_SHAPE)}},
    }


def _ref(name: str) -> Schema:
    return {"$ref": REF.format(model=name)}
