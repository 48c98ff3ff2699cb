"""Middleware: headers of every answer, roles of routes, and paths that are no route."""

import asyncio
import re
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from cray_agents.errors import TooManyRequests
from cray_agents.runtime.gateway.http.api_keys import REFRESH_INTERVAL, Role
from cray_agents.runtime.gateway.http.bodies import json_response, read_json
from cray_agents.runtime.gateway.http.routing import GatewayRoute, Router
from cray_agents.runtime.gateway.model_calls.admission import Admission
from cray_agents.server.platform_process import fetch
from tests.support.gateway_with_keys import TOKEN, Site, site_at

HELLO: Any = [{"role": "user", "content": "hello"}]
# what vLLM 0.32 serves beside the APIs, much of it to whoever asks
CONTROL = [
    "/abort_requests", "/classify", "/collective_rpc", "/fault_tolerance/apply",
    "/fault_tolerance/status", "/finish_weight_update", "/generative_scoring", "/get_world_size",
    "/inference/v1/abort_requests", "/inference/v1/generate", "/init_weight_transfer_engine",
    "/invocations", "/is_paused", "/is_scaling_elastic_ep", "/is_sleeping", "/kv_event_sources",
    "/load", "/pause", "/ping", "/pooling", "/release_kv_cache_memory", "/rerank",
    "/reset_encoder_cache", "/reset_mm_cache", "/reset_prefix_cache", "/resume",
    "/scale_elastic_ep", "/score", "/server_info", "/shutdown_weight_transfer_engine", "/sleep",
    "/start_draft_weight_update", "/start_profile", "/start_weight_update", "/stop_profile",
    "/tokenizer_info", "/update_weight_version", "/update_weights", "/v1/load_lora_adapter",
    "/v1/unload_lora_adapter", "/v1/chat/completions/render", "/version", "/wake_up",
    "/weight_checker", "/weight_info", "/docs",
]  # fmt: skip


@pytest.fixture
async def site(tmp_path: Path) -> AsyncIterator[Site]:
    async with site_at(tmp_path) as site:
        yield site


@pytest.mark.slow
async def test_every_route_lets_in_whom_it_declares(tmp_path: Path) -> None:
    async with site_at(tmp_path, api_keys="required") as site:
        secrets = {role: site.keys.create(role.name, role)[1] for role in Role}
        _, revoked = site.keys.create("gone", Role.admin)
        site.keys.revoke("gone")
        routes = [route for route in site.app.routes if isinstance(route, GatewayRoute)]
        assert len(routes) == len(site.app.routes)
        for route in routes:
            path = re.sub(r"\{[^}]*\}", "1", route.path)
            for method in sorted(route.methods or ()):
                need = route.role
                for key in (None, "none", "sk-cray-" + "x" * 43, revoked):
                    status, code = await site.call(method, path, key)
                    if need == "open":
                        # a file that no build has, a body that is none: no want of a key
                        assert status in (200, 503, 400, 404), (method, path)
                    else:
                        assert status == 401, (method, path)
                        assert code == "invalid_api_key" or method == "HEAD"
                for role in Role:
                    status, code = await site.call(method, path, secrets[role])
                    refused = need != "open" and role < need
                    assert (status == 403) is refused, (method, path, role, status)
                    assert status != 401
                    assert not refused or method == "HEAD" or code == "insufficient_permissions"
                assert (await site.call(method, path, TOKEN))[0] not in (401, 403)
        assert len(routes) > 20


def test_a_route_without_a_role_cannot_be_declared() -> None:
    with pytest.raises(TypeError):
        Router("Files").get("/v1/forgotten")  # type: ignore[call-arg]


@pytest.mark.slow
async def test_without_keys_this_host_is_let_in_until_there_was_one(site: Site) -> None:
    assert (await site.call("GET", "/v1/pool"))[0] == 200
    assert (await site.call("GET", "/v1/pool", "none"))[0] == 200
    _, secret = await asyncio.to_thread(site.keys.create, "ann", Role.use)
    await asyncio.sleep(2 * REFRESH_INTERVAL)
    assert (await site.call("GET", "/v1/models"))[0] == 401
    assert (await site.call("GET", "/v1/models", secret))[0] == 200
    assert (await site.call("GET", "/v1/pool", secret))[0] == 403
    assert (await site.call("GET", "/v1/pool", TOKEN))[0] == 200
    site.keys.revoke("ann")
    await asyncio.sleep(2 * REFRESH_INTERVAL)
    assert (await site.call("GET", "/v1/models", secret))[0] == 401
    assert (await site.call("GET", "/v1/models"))[
        0
    ] == 401  # the last key ended, and opened nothing
    assert (await site.call("GET", "/health/live"))[0] == 200


async def test_off_is_off(tmp_path: Path) -> None:
    async with site_at(tmp_path, api_keys="off") as site:
        site.keys.create("ann")
        assert (await site.call("GET", "/v1/pool"))[0] == 200


async def test_the_official_client_sees_its_own_errors(tmp_path: Path) -> None:
    async with site_at(tmp_path, api_keys="required") as site:
        _, secret = site.keys.create("ann", Role.use)
        with pytest.raises(openai.AuthenticationError) as caught:
            await site.client("sk-cray-wrong-" + "x" * 30).models.list()
        assert caught.value.code == "invalid_api_key"
        assert caught.value.type == "invalid_request_error"
        assert "sk-cray-...xxxx" in caught.value.message
        assert caught.value.response.headers["www-authenticate"] == "Bearer"
        with pytest.raises(openai.PermissionDeniedError) as denied:
            await site.client(secret).get("/pool", cast_to=object)
        assert denied.value.code == "insufficient_permissions"
        assert [model.id async for model in site.client(secret).models.list()] == ["m", "m@1"]
        assert (await site.call("GET", "/v1/models", x_api_key=secret))[0] == 200  # Anthropic's
        assert (await site.call("GET", "/v1/models", x_api_key=secret[:-1]))[0] == 401
        both = {"authorization": "Basic YTpi", "x-api-key": secret}
        async with site.http.get(f"{site.url}/v1/models", headers=both) as response:
            assert response.status == 200


async def test_commands_of_the_same_user_need_no_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delenv("CRAY_AGENTS_API_KEY", raising=False)
    async with site_at(tmp_path, api_keys="required") as site:
        info = {"url": site.url, "token": TOKEN}
        assert await asyncio.to_thread(fetch, info, "/v1/platform") == {"version": "test"}
        monkeypatch.setenv("CRAY_AGENTS_API_KEY", "sk-cray-wrong")
        with pytest.raises(OSError, match="401"):
            await asyncio.to_thread(fetch, info, "/v1/platform")


@pytest.mark.slow
@pytest.mark.parametrize(
    ("headers", "code"),
    [
        ({"origin": "https://evil.example"}, "origin_not_allowed"),
        ({"origin": "null"}, "origin_not_allowed"),
        ({"origin": "http://127.0.0.1.evil.example"}, "origin_not_allowed"),
        ({"origin": "http://localhost@evil.example"}, "origin_not_allowed"),
        ({"host": "evil.example:8000"}, "host_not_allowed"),
        ({"host": "0.0.0.0:8000"}, "host_not_allowed"),
        ({"host": "[::1"}, "host_not_allowed"),
        ({"host": "localhost:8000"}, None),
        ({"host": "[::1]:8000"}, None),
        ({"origin": "http://localhost:3000"}, None),
        ({"sec-fetch-site": "cross-site"}, "origin_not_allowed"),  # an image, a script, a link
        ({"sec-fetch-site": "Cross-Site", "sec-fetch-mode": "no-cors"}, "origin_not_allowed"),
        ({"sec-fetch-site": "cross-site", "origin": "http://localhost:3000"}, None),
        ({"sec-fetch-site": "same-origin"}, None),
        ({"sec-fetch-site": "same-site"}, None),
        ({"sec-fetch-site": "none"}, None),  # its address was typed
    ],
)
async def test_no_web_page_uses_a_gateway_without_keys(
    site: Site, headers: dict[str, str], code: str | None
) -> None:
    status, found = await site.call("GET", "/v1/models", **headers)
    assert (status, found) == ((403, code) if code else (200, None))
    assert (await site.call("GET", "/v1/models", TOKEN, **headers))[0] == 200  # no page has a key


@pytest.mark.slow
@pytest.mark.parametrize("key", ["none", TOKEN])
async def test_the_engines_control_routes_are_no_routes(site: Site, key: str) -> None:
    for path in CONTROL:
        for prefix in ("", "/v1", "/runs/r"):
            for method in ("GET", "POST"):
                status, code = await site.call(method, prefix + path, key)
                assert (status, code) in ((404, "unknown_url"), (405, "method_not_allowed")), path
                assert status == 404 or is_listed(site, prefix + path), path


def is_listed(site: Site, path: str) -> bool:
    return any(isinstance(r, Route) and r.path_regex.match(path) for r in site.app.routes)


@pytest.mark.slow
@pytest.mark.parametrize(
    "path",
    [
        "/v1/chat/completions/../../../pause", "/v1/models/../../pause", "/v1/models/%2e%2e/pause",
        "/v1/models/..%2f..%2fpause", "//pause", "/v1//pause", "/%70ause", "/pause/", "/PAUSE",
        "/pause;x=1", "/v1/chat/completions%00/pause", "/v1/../sleep?level=2", "/./sleep",
        "http://127.0.0.1:8000/pause", "/runs/..%2f..%2fpause", "/runs/%2e%2e/pause",
    ],
)  # fmt: skip
async def test_no_spelling_reaches_one(site: Site, path: str) -> None:
    request = f"POST {path} HTTP/1.1\r\nHost: localhost\r\nContent-Length: 0\r\n\r\n"
    assert (await site.raw(request.encode())).split()[1] in (b"404", b"405", b"400")


async def test_headers_of_every_answer(site: Site) -> None:
    raw = await site.client().models.with_raw_response.list(extra_headers={"x-request-id": "mine"})
    assert raw.request_id == "mine"
    assert int(raw.headers["openai-processing-ms"]) >= 0
    assert "x-ratelimit-limit-requests" not in raw.headers
    for path in ("/nothing", "/v1/models/none"):
        assert (await site.call("GET", path))[0] == 404  # `call` looks at both headers
    assert (await site.call("PUT", "/v1/models"))[0] == 405


async def test_model_calls_say_how_much_room_there_is(tmp_path: Path) -> None:
    async with site_at(tmp_path, admission=Admission(4, 6)) as site:
        held = [site.services.admission.enter() for _ in range(4)]
        with pytest.raises(openai.NotFoundError) as caught:
            await site.client().chat.completions.create(model="none", messages=HELLO)
        headers = caught.value.response.headers
        assert headers["x-ratelimit-limit-requests"] == "10"
        assert headers["x-ratelimit-remaining-requests"] == "6"
        assert re.fullmatch(r"[\d.]+(ms|s)|\d+m\d+s", headers["x-ratelimit-reset-requests"])
        for ticket in held:
            ticket.release()
        raw = await site.client().chat.completions.with_raw_response.create(
            model="m", messages=HELLO
        )
        assert raw.headers["x-ratelimit-limit-requests"] == "10"
        assert raw.headers["x-request-id"] and raw.headers["openai-processing-ms"]


async def test_too_many_requests_as_the_client_takes_it(tmp_path: Path) -> None:
    """It waits as long as it is told, not its own half second, and comes again."""
    refusals = 2
    seen = 0

    async def busy(request: Request) -> Response:
        nonlocal seen
        seen += 1
        if seen <= refusals:
            raise TooManyRequests("full", retry_after=0.0301)
        return json_response({"fine": True})

    async with site_at(tmp_path, Route("/v1/busy", busy)) as site:
        with pytest.raises(openai.RateLimitError) as caught:
            await site.client().get("/busy", cast_to=object)
        assert caught.value.code == "rate_limit_exceeded" and caught.value.type == "requests"
        headers = caught.value.response.headers
        assert (headers["retry-after-ms"], headers["retry-after"]) == ("31", "1")
        patient = site.client(max_retries=1)
        assert await patient.get("/busy", cast_to=object) == {"fine": True}
        assert seen == 3


async def test_a_failure_of_ours_is_an_envelope_too(tmp_path: Path) -> None:
    async def broken(request: Request) -> Response:
        raise ZeroDivisionError("secret")

    async with site_at(tmp_path, Route("/v1/broken", broken)) as site:
        assert await site.call("GET", "/v1/broken") == (500, "internal_error")
        async with site.http.get(f"{site.url}/v1/broken") as response:
            text = await response.text()
            assert "ZeroDivisionError" in text and "secret" not in text


async def test_a_body_that_stands_still_is_told(tmp_path: Path) -> None:
    async def read(request: Request) -> Response:
        return json_response(await read_json(request, 1000))

    route = Route("/v1/read", read, methods=["POST"])
    async with site_at(tmp_path, route, body_timeout=0.2) as site:
        head = b"POST /v1/read HTTP/1.1\r\nHost: localhost\r\nContent-Length: 100\r\n\r\n"
        assert b" 408 " in await site.raw(head)
        assert b" 408 " in await site.raw(head + b'{"a":')


@pytest.mark.parametrize("stream", [False, True])
async def test_a_full_gateway_refuses_before_it_answers(tmp_path: Path, stream: bool) -> None:
    """With the status, also of a stream; who had a place is served when its turn comes."""
    admission = Admission(1, 1)
    async with site_at(tmp_path, admission=admission) as site:
        create: Any = site.client().chat.completions.create
        held = admission.enter()
        waits = asyncio.create_task(create(model="m", messages=HELLO))
        async with asyncio.timeout(120):
            while not admission.waiting():  # noqa: ASYNC110 - the request is on its way
                await asyncio.sleep(0.01)
        with pytest.raises(openai.RateLimitError) as caught:
            await create(model="m", messages=HELLO, stream=stream)
        headers = caught.value.response.headers
        assert headers["x-ratelimit-remaining-requests"] == "0"
        assert int(headers["retry-after-ms"]) >= 50
        held.release()
        assert (await waits).choices[0].message.content == "hi"
        assert admission.inside() + admission.waiting() == 0
