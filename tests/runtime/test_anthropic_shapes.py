"""Anthropic's own client finds its own shapes: errors, also in mid-stream, and models.

It is imported by the tests that use it: each test process collects this file, and one runs it.
"""

from __future__ import annotations

import json
from collections.abc import AsyncIterator
from pathlib import Path
from typing import TYPE_CHECKING, Any

import pytest
import pytest_asyncio

from tests.support.gateway_with_keys import Site, site_at
from tests.support.scripted_gateway import Paced, served

if TYPE_CHECKING:
    import anthropic

ASK: Any = {"max_tokens": 5, "messages": [{"role": "user", "content": "hi"}]}


@pytest_asyncio.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with site_at(tmp_path) as site:
        yield site


def client(site: Site, key: str = "none") -> anthropic.AsyncAnthropic:
    import anthropic

    return anthropic.AsyncAnthropic(base_url=site.url, api_key=key, max_retries=0, timeout=120)


async def refused(kind: type[anthropic.APIStatusError], asked: Any) -> anthropic.APIStatusError:
    try:
        await asked
    except kind as error:
        assert type(error) is kind
        body: Any = error.body
        assert set(body) == {"type", "error"} and body["type"] == "error"
        assert (
            set(body["error"]) == {"type", "message", "param", "code"} and body["error"]["message"]
        )
        return error
    raise AssertionError("it was not refused")


def kind_of(error: anthropic.APIStatusError) -> str:
    body: Any = error.body
    return str(body["error"]["type"])


@pytest.mark.slow
async def test_errors(site: Site) -> None:
    import anthropic

    async with client(site) as http:
        error = await refused(anthropic.NotFoundError, http.messages.create(model="none", **ASK))
        assert kind_of(error) == "not_found_error"
        error = await refused(
            anthropic.BadRequestError, http.messages.create(model="m", max_tokens=5, messages=[])
        )
        assert kind_of(error) == "invalid_request_error"
        error = await refused(anthropic.NotFoundError, http.post("/v1/nothing", cast_to=object))
        assert kind_of(error) == "not_found_error"


async def test_a_wrong_key(tmp_path: Path) -> None:
    import anthropic

    async with site_at(tmp_path, api_keys="required") as site, client(site, "sk-wrong") as http:
        error = await refused(anthropic.AuthenticationError, http.messages.create(model="m", **ASK))
        assert kind_of(error) == "authentication_error"


async def test_without_the_client_the_path_tells(site: Site) -> None:
    for path in ("/v1/messages", "/runs/r/v1/messages", "/v1/messages/count_tokens"):
        async with site.http.post(site.url + path, data=b"{") as response:
            assert (response.status, (await response.json())["type"]) == (400, "error")
        async with site.http.get(site.url + path) as response:
            assert (response.status, (await response.json())["type"]) == (405, "error")
    async with site.http.post(site.url + "/v1/chat/completions", data=b"{") as response:
        assert set(await response.json()) == {"error"}


async def test_models(site: Site) -> None:
    import anthropic

    async with client(site) as http:
        found = [model async for model in http.models.list(limit=1)]  # a page each
        assert [model.id for model in found] == ["m", "m@1"]
        assert {model.type for model in found} == {"model"}
        assert found[0].created_at.year >= 2026 and found[0].display_name == "m"
        page = await http.models.list(limit=1)
        assert page.has_more and (page.first_id, page.last_id) == ("m", "m")
        before = await http.models.list(limit=1, before_id="m@1")
        assert [model.id for model in before.data] == ["m"]
        assert (await http.models.retrieve("m@1")).id == "m@1"
        await refused(anthropic.NotFoundError, http.models.retrieve("none"))
        await refused(anthropic.BadRequestError, http.models.list(after_id="none"))
    async with site.http.get(site.url + "/v1/models") as response:  # OpenAI's clients see theirs
        assert (await response.json())["object"] == "list"


class Broken(Paced):
    """Speaks a path that the scripted engine does not know, and breaks off."""

    async def answer(self, exchange: Any) -> Any:
        async for piece in super().answer(type(exchange)(CHAT, exchange.request, exchange.id)):
            yield piece


CHAT = "/v1/chat/completions"


async def test_a_stream_that_breaks(tmp_path: Path) -> None:
    async with served(tmp_path, Broken(lambda request: "says... explode"), keep_alive=9) as g:
        body = {"model": "calc", "stream": True, **ASK}
        async with g.http.post(g.url + "/v1/messages", json=body) as response:
            events = (await response.read()).decode().split("\n\n")
        name, _, data = events[-2].partition("\n")
        assert name == "event: error"
        assert json.loads(data.removeprefix("data: "))["error"]["type"] == "api_error"
