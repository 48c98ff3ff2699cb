"""GET /openapi.json tells of what is there, all of it, and is a valid document."""

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import schemathesis
from starlette.routing import Route

from cray_agents.runtime.gateway.app import create_app, declarations
from cray_agents.runtime.gateway.http.bodies import ID
from cray_agents.runtime.gateway.http.openapi import TAGS, document
from cray_agents.training_jobs import JobSpec
from tests.support.scripted_gateway import served


@pytest.fixture(scope="module")
def told() -> Any:
    return orjson.loads(orjson.dumps(document(declarations())))


def _operations(told: Any) -> dict[tuple[str, str], Any]:
    return {
        (method.upper(), path): operation
        for path, methods in told["paths"].items()
        for method, operation in methods.items()
    }


async def test_it_tells_of_every_route_and_of_nothing_else(tmp_path: Path, told: Any) -> None:
    async with served(tmp_path) as gateway:
        status, answered = await gateway.call("GET", "/openapi.json")
        routes = create_app(gateway.services).routes
    there = set()
    for route in routes:
        assert isinstance(route, Route)
        # a HEAD comes with each GET, as HTTP wants it: not worth an entry of its own
        there |= {(method, route.path_format) for method in (route.methods or {"GET"}) - {"HEAD"}}
    assert set(_operations(told)) == there
    assert (status, answered) == (200, told)


def test_it_is_valid_and_every_reference_leads_somewhere(told: Any) -> None:
    schemathesis.openapi.from_dict(told).validate()
    text = orjson.dumps(told).decode()
    for found in set(re.findall(r'"\$ref":"#/([^"]+)"', text)):
        place = told
        for name in found.split("/"):
            place = place[name]
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert set(told["components"]["schemas"]) == named  # and none is there in vain


def test_operations_are_named_once_and_described(told: Any) -> None:
    operations = _operations(told)
    names = [operation["operationId"] for operation in operations.values()]
    roles = {(str(d.method), path): d.role for d in declarations() for path in d.paths}
    assert len(set(names)) == len(names)
    for (method, path), operation in operations.items():
        assert operation["summary"] and set(operation["tags"]) <= set(TAGS), path
        in_path = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert in_path == set(re.findall(r"\{(\w+)\}", path)), path
        assert (operation.get("security") == []) == (roles[method, path] == "open"), path


def test_what_it_says_of_records_and_ids_is_so(told: Any) -> None:
    schemas = told["components"]["schemas"]
    assert schemas["Id"]["pattern"] == f"^{ID.pattern}$"
    assert set(schemas["JobSpec"]["properties"]) == set(JobSpec.model_fields)
    assert "owner" not in schemas["File"]["properties"]
