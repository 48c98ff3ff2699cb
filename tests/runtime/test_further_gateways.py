"""Further gateways beside the controller's: one run through two, swaps, losses, no controller."""

import asyncio
import json
import re
from collections.abc import AsyncIterator
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import aiohttp
import pytest
import pytest_asyncio

from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.pool.pool import SwapMode
from cray_agents.runtime.registry.canary import Canary
from cray_agents.runtime.vllm_plugins.proof import proof_of
from tests.support.odd_heads import ODD_HEADS, odd_request
from tests.support.scripted_gateway import CHAT, Gateway, Reply, says, until
from tests.support.shared_gateways import TOKEN, FurtherGateway, SharedSite, shared_site

pytestmark = [pytest.mark.asyncio(loop_scope="module"), pytest.mark.slow]


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[SharedSite]:
    async with shared_site(tmp_path_factory.mktemp("shared")) as site:
        yield site


def prefix_of(text: str) -> str:
    """The version that says it."""
    return text.partition(":")[0]


async def test_a_runs_calls_through_several_gateways_are_one_run(site: SharedSite) -> None:
    first, second = site.gateways
    named = {"X-Run-Id": "run-through-all"}
    all_three: list[FurtherGateway | Gateway] = [first, second, site.controller]
    for gateway in all_three:
        reply = await gateway.ask("hello", headers=named)
        assert (reply.status, reply.run_id) == (200, "run-through-all"), reply.body
    assert len(site.controller.calls("run-through-all")) == 3
    said = await first.ask("begin")
    messages = [*says("begin"), said.json["choices"][0]["message"]]
    for gateway in [all_three[1], all_three[2], all_three[0]]:
        messages += says("go on")
        reply = await gateway.ask(messages)
        assert reply.run_id == said.run_id
        messages.append(reply.json["choices"][0]["message"])
    calls = site.controller.calls(said.run_id)
    assert [len(call.messages) for call in calls] == [1, 3, 5, 7]


async def test_a_key_is_answered_once_though_two_gateways_are_asked(site: SharedSite) -> None:
    headers = {"Idempotency-Key": "once", "X-Run-Id": "run-once"}
    asked: list[FurtherGateway | Gateway] = [*site.gateways, site.controller]
    replies = await asyncio.gather(*(g.ask("a slow answer", headers=headers) for g in asked))
    assert {reply.body for reply in replies} == {replies[0].body}
    assert sum("x-idempotent-replayed" in reply.headers for reply in replies) == 2
    assert len(site.controller.calls("run-once")) == 1


async def test_all_that_is_decided_once_is_forwarded(site: SharedSite) -> None:
    gateway = site.gateways[0]
    pool = await gateway.call("GET", "/v1/pool")
    assert [replica["pid"] for replica in pool.json["data"]] == [r.pid for r in site.replicas]
    form = aiohttp.FormData({"purpose": "batch"})
    content = b'{"custom_id": "1"}\n' * 100_000
    form.add_field("file", content, filename="lines.jsonl")
    file = await gateway.call("POST", "/v1/files", data=form)
    assert file.status == 200, file.body
    read = await gateway.call("GET", f"/v1/files/{file.json['id']}/content")
    assert read.body == content
    for method, path in (("GET", "/v1/nothing"), ("GET", "/v1/jobs/none"), ("PUT", "/v1/files")):
        there = await site.controller.call(method, path)
        here = await gateway.call(method, path, headers={"X-Request-Id": "mine"})
        assert (here.status, here.json) == there
        assert here.headers["x-request-id"] == "mine"
    # who may do what, the controller decides by the caller's own key
    who = await gateway.call("GET", "/v1/whoami", headers={"Authorization": "Bearer nobodys"})
    assert who.json["name"] == "anybody"
    forbidden = await gateway.call("GET", "/v1/pool", headers={"Host": "evil.example"})
    assert (forbidden.status, forbidden.code) == (403, "host_not_allowed")


async def test_no_text_of_a_client_decides_where_a_request_goes(site: SharedSite) -> None:
    gateway = site.gateways[0]
    async with false_controller() as inside:
        where = inside.url.removeprefix("http://")
        odd = [*ODD_HEADS, "GET /nothing/@{host}/x HTTP/1.1", "GET /v1/jobs/@{host} HTTP/1.1"]
        for head in odd:
            answer = await gateway.raw(odd_request(head, where))
            status = int(answer.split()[1])
            error = json.loads(answer.partition(b"\r\n\r\n")[2])["error"]
            assert (status, error["code"]) in (
                (400, "invalid_http"), (404, "unknown_url"), (404, "not_found"),
            ), (head, answer)  # fmt: skip
        for query in (b"a=\xff", b"after=%FF"):  # as odd as it is, it is the controller's to read
            request = b"GET /v1/jobs?%b HTTP/1.1\r\nhost: localhost\r\nconnection: close\r\n\r\n"
            assert (await gateway.raw(request % query)).startswith(b"HTTP/1.1 400 ")
        assert inside.received == b""


async def test_nothing_is_forwarded_without_the_routes_role(tmp_path: Path) -> None:
    """Neither without a key, nor for a key of a lower role, nor what is no route."""
    async with shared_site(tmp_path, gateways=1, replicas=1) as site:
        gateway, keys = site.gateways[0], Keys(site.home)
        secrets = {role: keys.create(role.name, role)[1] for role in (Role.use, Role.admin)}
        await until_status(gateway, "/v1/pool", 401)
        rows = [
            ("GET", "/v1/pool", None, 401),
            ("GET", "/v1/pool", "wrong", 401),
            ("GET", "/v1/pool", secrets[Role.use], 403),
            ("POST", "/v1/models/calc/promote", secrets[Role.use], 403),
            ("GET", "/v1/pool", secrets[Role.admin], 200),
            ("GET", "/v1/nothing", secrets[Role.admin], 404),
            ("PUT", "/v1/pool", secrets[Role.admin], 405),
        ]
        async with false_controller(TOKEN) as false:
            site.claim(false.url)
            await until(lambda: b"/v1/gateways " in false.received)
            for method, path, secret, status in rows:
                headers = {"Authorization": f"Bearer {secret}"} if secret else {}
                answer = await gateway.call(method, path, headers=headers)
                assert answer.status == (503 if status == 200 else status), (method, path, secret)
                sent = f"{method} {path} ".encode() in false.received
                assert sent is (status == 200), (method, path, secret)


async def test_who_has_a_dead_controllers_port_gets_no_secret_and_ends_no_gateway(
    site: SharedSite,
) -> None:
    """Nor one that passes on to the controller; nor does an answer of another form do harm."""
    gateway, key = site.gateways[0], {"Authorization": "Bearer sk-cray-of-a-client"}
    port = int(site.controller.url.rpartition(":")[2])
    for knows, passes_on in (("", 0), ("sk-platform-before", 0), ("", port), (TOKEN, 0)):
        async with false_controller(knows, passes_on) as false:
            site.claim(false.url)
            await until(lambda: false.asked >= 3)  # it goes on to ask
            await until_status(gateway, "/v1/jobs", 503)  # and not the other one alone
            refused = await gateway.call("POST", "/v1/models/calc/promote", headers=key, json={})
            assert (refused.status, refused.code) == (503, "no_controller")
            assert (await gateway.ask("hello")).status == 200
        proved = knows == TOKEN
        assert (TOKEN.encode() in false.received) is proved, false.received
        assert (b"sk-cray-of-a-client" in false.received) is proved
        site.claim(site.controller.url)
        for each in site.gateways:
            await until_status(each, "/v1/jobs", 200)


@dataclass
class FalseController:
    """A process of another user at the port that a claim names. It answers with JSON of its own."""

    url: str = ""
    received: bytes = b""
    asked: int = 0


@asynccontextmanager
async def false_controller(knows: str = "", passes_on: int = 0) -> AsyncIterator[FalseController]:
    """`knows`: the key by which it proves itself. `passes_on`: the port it sends all bytes to."""
    false = FalseController()

    async def serve(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        there = await asyncio.open_connection("127.0.0.1", passes_on) if passes_on else None
        host, port = writer.get_extra_info("sockname")
        with suppress(ConnectionError):
            while request := await reader.read(65536):
                false.received += request
                false.asked += 1
                nonce = re.search(b"nonce=([0-9a-f]+)", request)
                proof = proof_of(knows, nonce[1].decode(), host, port) if nonce else "forged"
                body = json.dumps({"proof": proof}, separators=(",", ":")).encode()
                answer = b"HTTP/1.1 200 OK\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
                if there is not None:
                    there[1].write(request)
                    answer = await there[0].read(65536)
                writer.write(answer if nonce or b"/v1/gateways" in request else b"no HTTP\r\n\r\n")
        writer.close()

    async with await asyncio.start_server(serve, "127.0.0.1", 0) as server:
        false.url = f"http://127.0.0.1:{server.sockets[0].getsockname()[1]}"
        yield false


async def test_rewards_and_reads_of_runs(site: SharedSite) -> None:
    first, second = site.gateways
    run_id = (await first.ask("hello")).run_id
    path = f"/v1/trajectories/{run_id}"
    given = await second.call("POST", f"{path}/rewards", json={"name": "good", "value": 1.0})
    assert given.status == 200, given.body
    assert (await first.call("GET", path)).json["reward"] == 1.0
    assert (await second.call("DELETE", path)).json["deleted"] is True
    assert (await first.call("GET", path)).status == 404


async def stream(gateway: FurtherGateway, messages: Any, model: str = "calc") -> tuple[str, str]:
    """The text of a streamed answer, and the version on it; it came to its end."""
    body = {"model": model, "messages": messages, "stream": True}
    async with gateway.http.post(gateway.url + CHAT, json=body) as response:
        text = (await response.read()).decode()
        assert response.status == 200, text
    lines = [line[6:] for line in text.split("\n") if line.startswith("data: ")]
    assert lines.pop() == "[DONE]", text
    chunks = [json.loads(line) for line in lines]
    (model,) = {chunk["model"] for chunk in chunks}
    return "".join(chunk["choices"][0]["delta"].get("content", "") for chunk in chunks), model


@pytest.mark.parametrize("mode", ["drain", "keep"])
async def test_a_roll_under_streams_of_two_gateways(site: SharedSite, mode: SwapMode) -> None:
    """No answer is lost, none stamped wrong, and drained replicas change in no answer's middle."""
    pool, versions = site.controller.pool, site.controller.services.versions
    pool.swap_mode = mode
    before, new = pool.incumbent, site.version(mode.encode())
    ended, words = asyncio.Event(), says(f"a slow answer to {mode}")
    answers: list[tuple[str, str]] = []

    async def ask(gateway: FurtherGateway) -> None:
        while not ended.is_set():
            answers.append(await stream(gateway, words))

    tasks = [asyncio.create_task(ask(gateway)) for gateway in site.gateways for _ in range(4)]
    await until(lambda: len(answers) >= 8)
    await versions.promote(new, who="test", reason="")
    await until(lambda: {version for _, version in answers[-8:]} == {new.id})
    ended.set()
    await asyncio.gather(*tasks)
    assert {version for _, version in answers} == {before, new.id}
    assert all(prefix_of(text) == version for text, version in answers)
    calls = [call for run in site.controller.store.runs() for call in run.calls]
    mine = [call for call in calls if call.messages == words]
    assert len(mine) == len(answers)
    assert {seam.model for call in mine for seam in call.seams} == (
        set() if mode == "drain" else {new.id}
    )
    pool.swap_mode = "drain"


async def test_a_gateway_that_has_not_heard_of_a_change_asks_another_replica(
    site: SharedSite,
) -> None:
    services, pool = site.controller.services, site.controller.pool
    await services.tasks.close()  # from now on nobody hears of changes
    before, new = pool.incumbent, site.version(b"unheard-of")
    directory = site.home.checkpoint(new.checkpoint)
    await pool.swap(directory, new.id, [], replicas=[0])
    replies = [await site.gateways[0].ask("hello", model=before) for _ in range(3)]
    assert [(r.status, prefix_of(r.text), r.json["model"]) for r in replies] == [
        (200, before, before)
    ] * 3
    services.several_gateways = False
    services.note_other_gateways()
    reply = await ask_until_known(site.gateways[0], new.id)  # it hears of it again
    assert (reply.status, prefix_of(reply.text)) == (200, new.id)
    old = services.registry.resolve(before)
    await pool.swap(site.home.checkpoint(old.checkpoint), before, [], replicas=[0])


async def test_a_version_that_no_replica_holds_is_asked_of_the_controller(site: SharedSite) -> None:
    new = site.version(b"unloaded")
    reply = await ask_until_known(site.gateways[0], new.id)
    assert (reply.status, reply.code) == (503, "model_not_loaded"), reply.body
    assert (await site.gateways[0].ask("hello", model="calc@999")).status == 404


async def ask_until_known(gateway: FurtherGateway, model: str) -> Reply:
    """The registry's files are read again when the last read is a second old."""
    async with asyncio.timeout(100):
        while (  # noqa: ASYNC110
            reply := await gateway.ask("hello", model=model)
        ).status == 404:
            await asyncio.sleep(0.1)
        return reply


async def test_sessions_of_a_canary_are_drawn_alike_and_counted_together(site: SharedSite) -> None:
    services = site.controller.services
    new = site.version(b"canary")
    await site.controller.call(
        "POST", "/v1/models/calc/canary", json={"version": new.number, "share": 0.5}
    )
    sessions = [f"session-{number}" for number in range(12)]
    wanted = {session: services.versions.live.resolve("calc", session).id for session in sessions}
    assert len(set(wanted.values())) == 2
    gateway = site.gateways[1]
    assert (await ask_until_known(gateway, new.id)).status == 200  # it knows of the canary, too
    counted = canary_of(site).failures.count
    for session in sessions:
        reply = await gateway.ask("hello", headers={"X-Session-Id": session})
        assert prefix_of(reply.text) == wanted[session]
    await until(lambda: sum(counted.values()) == 12)
    await site.controller.call("DELETE", "/v1/models/calc/canary")


def canary_of(site: SharedSite) -> Canary:
    canary = site.controller.services.versions.live.canary("calc")
    assert canary is not None
    return canary


async def test_without_a_controller_models_are_asked_on_and_nothing_is_decided(
    site: SharedSite,
) -> None:
    gateway = site.gateways[0]
    site.claim("http://127.0.0.1:9")
    try:
        await until_status(gateway, "/v1/jobs", 503)
        refused = await gateway.call("GET", "/v1/jobs")
        assert (refused.code, refused.headers["retry-after"]) == ("no_controller", "1")
        promoted = await gateway.call("POST", "/v1/models/calc/promote", json={"version": 1})
        assert (promoted.status, promoted.code) == (503, "no_controller")
        reply = await gateway.ask("hello", headers={"X-Run-Id": "alone"})
        assert reply.status == 200
        assert (await gateway.call("GET", "/v1/trajectories/alone")).status == 200
        assert (await gateway.call("GET", "/health/ready")).status == 200
    finally:
        site.claim(site.controller.url)
    await until_status(gateway, "/v1/jobs", 200)


async def until_status(gateway: FurtherGateway, path: str, status: int) -> None:
    async with asyncio.timeout(100):
        while (await gateway.call("GET", path)).status != status:  # noqa: ASYNC110
            await asyncio.sleep(0.05)


async def test_gateways_share_a_port_and_one_that_is_killed_takes_only_its_own_requests(
    site: SharedSite,
) -> None:
    first = site.gateways[0]
    async with AsyncExitStack() as stack:
        second = await site.further(stack, int(first.url.rpartition(":")[2]))
        site.gateways.remove(second)
        assert second.url == first.url
        names: dict[str, aiohttp.ClientSession] = {}
        async with asyncio.timeout(100):
            while len(names) < 2:  # the kernel chooses for each connection
                http = await stack.enter_async_context(aiohttp.ClientSession())
                names[await name_of(http, first.url)] = http
        mine = {pid: http for name, http in names.items() for pid in [int(name.split(":")[-1])]}
        body = {"model": "calc", "stream": True}
        kept, lost = [
            await stack.enter_async_context(
                mine[gateway.process.pid].post(first.url + CHAT, json=body | {"messages": what})
            )
            for gateway, what in ((first, says("a slow answer")), (second, says("very slow")))
        ]
        await lost.content.readany()
        await second.kill()
        with pytest.raises(aiohttp.ClientError):
            await lost.read()
        assert b"[DONE]" in await kept.read()
        run_id = kept.headers["x-run-id"]
        assert len(site.controller.calls(run_id)) == 1
        reply = await first.ask("hello", headers={"X-Run-Id": lost.headers["x-run-id"]})
        assert reply.status == 200


async def test_a_gateway_without_its_starter_ends_when_another_platform_has_taken_over(
    site: SharedSite,
) -> None:
    starter = await asyncio.create_subprocess_exec("true")
    await starter.wait()
    async with AsyncExitStack() as stack:
        orphan = await site.further(stack, of=starter.pid)
        site.gateways.remove(orphan)
        assert (await orphan.ask("hello")).status == 200  # no other one has come yet
        slow = asyncio.create_task(orphan.ask("a slow answer"))
        came = re.compile(rb"cray_requests_in_flight\S* [2-9]")  # beside the question itself
        while not (slow.done() or came.search((await orphan.call("GET", "/metrics")).body)):
            pass
        site.claim(site.controller.url, term=2)
        assert await orphan.process.wait() == 0
        assert (await slow).status == 200  # its requests ended first
    site.claim(site.controller.url)


async def name_of(http: aiohttp.ClientSession, url: str) -> str:
    """The label of the gateway that a session is connected to."""
    async with http.get(f"{url}/metrics") as response:
        text = await response.text()
    return text.partition('gateway="')[2].partition('"')[0]
