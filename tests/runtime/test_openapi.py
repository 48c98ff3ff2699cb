"""GET /openapi.json tells of what is there, all of it, and is a valid document."""

import re
from pathlib import Path
from typing import Any

import orjson
import pytest
import schemathesis
from starlette.routing import Route

from cray_agents.runtime.gateway.app import create_app, routes
from cray_agents.runtime.gateway.http.fields import ID
from cray_agents.runtime.gateway.http.routing import TAGS, document
from cray_agents.training_jobs import JobSpec
from tests.support.scripted_gateway import served


@pytest.fixture(scope="module")
def openapi_document() -> Any:
    return orjson.loads(orjson.dumps(document(routes())))


def _operations(openapi_document: Any) -> dict[tuple[str, str], Any]:
    return {
        (method.upper(), path): operation
        for path, methods in openapi_document["paths"].items()
        for method, operation in methods.items()
    }


async def test_it_tells_of_every_route_and_of_nothing_else(
    tmp_path: Path, openapi_document: Any
) -> None:
    async with served(tmp_path) as gateway:
        status, answered = await gateway.call("GET", "/openapi.json")
        app = create_app(gateway.services)
    served_routes = set()
    for route in app.routes:
        assert isinstance(route, Route)
        # a HEAD comes with each GET, as HTTP wants it: not worth an entry of its own
        served_routes |= {
            (method, route.path_format) for method in (route.methods or {"GET"}) - {"HEAD"}
        }
    assert set(_operations(openapi_document)) == served_routes
    assert (status, answered) == (200, openapi_document)


@pytest.mark.slow
def test_it_is_valid_and_every_reference_leads_somewhere(openapi_document: Any) -> None:
    schemathesis.openapi.from_dict(openapi_document).validate()
    text = orjson.dumps(openapi_document).decode()
    for found in set(re.findall(r'"\$ref":"#/([^"]+)"', text)):
        place = openapi_document
        for name in found.split("/"):
            place = place[name]
    named = set(re.findall(r'"#/components/schemas/([^"]+)"', text))
    assert set(openapi_document["components"]["schemas"]) == named  # and none is there in vain


def test_operations_are_named_once_and_described(openapi_document: Any) -> None:
    operations = _operations(openapi_document)
    names = [operation["operationId"] for operation in operations.values()]
    roles = {(route.method, route.path): route.role for route in routes()}
    assert len(set(names)) == len(names)
    for (method, path), operation in operations.items():
        assert operation["summary"] and set(operation["tags"]) <= set(TAGS), path
        in_path = {p["name"] for p in operation.get("parameters", ()) if p["in"] == "path"}
        assert in_path == set(re.findall(r"\{(\w+)\}", path)), path
        assert (operation.get("security") == []) == (roles[method, path] == "open"), path


def test_what_it_says_of_records_and_ids_is_so(openapi_document: Any) -> None:
    schemas = openapi_document["components"]["schemas"]
    parameters = openapi_document["paths"]["/v1/jobs/{job_id}"]["get"]["parameters"]
    assert parameters[0]["schema"]["pattern"] == f"^{ID.pattern}$"
    body = openapi_document["paths"]["/v1/jobs"]["post"]["requestBody"]
    spec = body["content"]["application/json"]["schema"]
    assert set(spec["properties"]) == set(JobSpec.model_fields)
    assert spec["required"] == ["hyperparameters", "parent"]
    assert "owner" not in schemas["File"]["properties"]
