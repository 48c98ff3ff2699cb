"""Bounds of what a request has an engine sample by: refused before the engine sees it."""

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from cray_agents.errors import BadInput
from cray_agents.runtime.gateway.http.bounds import (
    CHOICES,
    CONSTRAINT_BYTES,
    GRAMMAR,
    LISTS,
    OPTIONAL,
    PROMPTS,
    REPEATS,
    TEXT,
    check_sampling,
)
from tests.support.gateway_with_keys import Site, site_at

WORDS = [f"w{number}" for number in range(CHOICES)]


def properties(count: int, required: int = 0) -> dict[str, Any]:
    fields = {f"p{number}": {"type": "boolean"} for number in range(count)}
    return {"type": "object", "properties": fields, "required": list(fields)[:required]}


def tool(schema: Any, **more: Any) -> dict[str, Any]:
    return {"type": "function", "function": {"name": "f", "parameters": schema, **more}}


AT_THE_BOUND: dict[str, dict[str, Any]] = {
    "choices": {"structured_outputs": {"choice": WORDS}},
    "a pattern": {"structured_outputs": {"regex": f"[a-z]{{1,{REPEATS}}}"}},
    "an id": {"structured_outputs": {"regex": r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}"}},
    "braces": {"structured_outputs": {"regex": r"\{99999\}[{99999}]"}},
    "a grammar": {"structured_outputs": {"grammar": 'root ::= "a"'.ljust(GRAMMAR)}},
    "optional": {"structured_outputs": {"json": properties(OPTIONAL)}},
    "required": {"structured_outputs": {"json": properties(900, 900)}},
    "descriptions": {"structured_outputs": {"json": {"description": "x" * CONSTRAINT_BYTES}}},
    "numbers": {"structured_outputs": {"json": {"items": [{"minimum": 0, "maximum": 100}] * 500}}},
    "tools to choose from": {"tools": [tool(properties(200))] * LISTS["tools"]},
    "prompts": {"prompt": ["a"] * PROMPTS},
    "one prompt": {"prompt": [1] * (PROMPTS + 1)},
}
BEYOND: dict[str, dict[str, Any]] = {
    "choices": {"structured_outputs": {"choice": [*WORDS, "one more"]}},
    "long choices": {"structured_outputs": {"choice": ["x" * GRAMMAR, "y"]}},
    "a pattern": {"structured_outputs": {"regex": f"[a-z]{{1,{REPEATS + 1}}}"}},
    "nested repeats": {"structured_outputs": {"regex": "(([a-z]{1,30}){1,30}){1,30}"}},
    "a long pattern": {"structured_outputs": {"regex": "a" * (GRAMMAR + 1)}},
    "a pattern within": {"response_format": {"json_schema": {"schema": {"pattern": "a{9999}"}}}},
    "a pattern of names": {"structured_outputs": {"json": {"patternProperties": {"a{9999}": {}}}}},
    "a grammar": {"structured_outputs": {"grammar": "a" * (GRAMMAR + 1)}},
    "a schema as text": {"structured_outputs": {"json": json.dumps(properties(OPTIONAL + 1))}},
    "a long text": {"structured_outputs": {"json": '"' + "x" * CONSTRAINT_BYTES + '"'}},
    "a tag": {"structured_outputs": {"structural_tag": json.dumps({"pattern": "a{9999}"})}},
    "optional": {"text": {"format": {"schema": properties(2 * OPTIONAL, OPTIONAL - 9)}}},
    "a schema": {"response_format": {"json_schema": {"schema": properties(5000, 5000)}}},
    "enums": {"output_format": {"schema": {"enum": ["x" * 100] * 1000}}},
    "wide": {"structured_outputs": {"json": {"enum": [1] * 10**6}}},
    "numbers": {"structured_outputs": {"json": {"items": [{"minimum": 0.123456789012}] * 200}}},
    "a tool to call": {"tools": [tool(properties(200))], "tool_choice": "required"},
    "a strict tool": {"tools": [tool(properties(200), strict=True)]},
    "many tools": {"tools": [tool({})] * (LISTS["tools"] + 1)},
    **{name: {name: ["x"] * (most + 1)} for name, most in LISTS.items() if name != "tools"},
    "prompts": {"prompt": ["a"] * (PROMPTS + 1)},
    "texts": {"prompt": ["a" * TEXT, "b"]},
}


@pytest.mark.parametrize("name", AT_THE_BOUND)
def test_what_is_at_the_bound_is_taken(name: str) -> None:
    check_sampling(AT_THE_BOUND[name])


@pytest.mark.parametrize("name", BEYOND)
def test_what_is_beyond_is_refused_by_its_name(name: str) -> None:
    with pytest.raises(BadInput) as refusal:
        check_sampling(BEYOND[name])
    assert refusal.value.param == next(iter(BEYOND[name]))


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with site_at(tmp_path) as site:
        yield site


SAYS = [{"role": "user", "content": "hi"}]
TOOLS = [{"name": "f", "input_schema": {}}] * (LISTS["tools"] + 1)
REGEX = {"structured_outputs": {"regex": "a{9999}"}}
REQUESTS: dict[str, dict[str, Any]] = {
    "/v1/chat/completions": {"messages": SAYS, **REGEX},
    "/v1/completions": {"prompt": "hi", **REGEX},
    "/v1/responses": {"input": "hi", **REGEX},
    "/v1/messages": {"messages": SAYS, "max_tokens": 5, "tools": TOOLS},
    "/v1/messages/count_tokens": {"messages": SAYS, "tools": TOOLS},
    "/v1/embeddings": {"input": ["a"] * (PROMPTS + 1)},
}


@pytest.mark.parametrize("path", REQUESTS)
async def test_each_route_refuses_it(site: Site, path: str) -> None:
    body = {"model": "m", **REQUESTS[path]}
    async with site.http.post(site.url + path, json=body) as response:
        error = (await response.json())["error"]
        assert (response.status, error["param"]) == (400, list(body)[-1])
