"""Idempotency keys: a repeated request gets the same answer, which is sampled once."""

import asyncio
import threading
from pathlib import Path
from typing import Any

import openai
import pytest

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import EngineError
from cray_agents.runtime.gateway.http.api_keys import Keys
from cray_agents.runtime.gateway.model_calls.admission import Admission
from tests.support.scripted_gateway import CHAT, Gateway, Paced, Reply, block, served, until

KEY = {"Idempotency-Key": "order 7"}


def counting(**settings: Any) -> ScriptedEngine:
    """Make an engine that never answers the same twice."""
    count = iter(range(10**6))
    return ScriptedEngine(lambda request: f"answer number {next(count)}", **settings)


def sampled(gateway: Gateway) -> int:
    return len(gateway.engine.requests)


def same(one: Reply, other: Reply) -> bool:
    kind = "content-type"
    return (one.status, one.body, one.run_id, one.headers[kind]) == (
        other.status, other.body, other.run_id, other.headers[kind]
    )  # fmt: skip


@pytest.mark.slow
@pytest.mark.parametrize("samples", [False, True])
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}], ids=["whole", "stream", "n"])
async def test_a_repeat_is_the_same_answer_byte_for_byte(
    tmp_path: Path, fields: dict[str, Any], samples: bool
) -> None:
    fields = fields | {"return_samples": samples}
    async with served(tmp_path, counting()) as gateway:
        first = await gateway.ask("hi", headers=KEY, **fields)
        again = await gateway.ask("hi", headers=KEY, **fields)
        assert first.status == 200 and same(first, again)
        assert "x-idempotent-replayed" not in first.headers
        assert again.headers["x-idempotent-replayed"] == "true"
        assert sampled(gateway) == 1 and len(gateway.store.runs()) == 1
        calls = gateway.calls(first.run_id)
        assert len(calls) == fields.get("n", 1)
        assert (b'"samples":' in first.body) is samples
        if "n" not in fields:  # its tokens are on record once
            assert "prompt_token_ids" not in gateway.store.body(calls[0].id)["reply"]
    async with served(tmp_path, counting()) as gateway:  # the gateway was restarted
        third = await gateway.ask("hi", headers=KEY, **fields)
        assert same(first, third) and sampled(gateway) == 0
        other = await gateway.ask("hi", headers={"Idempotency-Key": "order 8"}, **fields)
        assert sampled(gateway) == 1 and other.run_id != first.run_id


async def test_another_request_under_the_same_key_is_refused(gateway: Gateway) -> None:
    await gateway.ask("hi", headers=KEY, temperature=0.5)
    different: list[tuple[str, Any]]
    different = [("ho", {}), ("hi", {}), ("hi", {"temperature": 0.5, "stream": True})]
    for content, fields in different:
        refused = await gateway.ask(content, headers=KEY, **fields)
        assert (refused.status, refused.code) == (400, "idempotency_key_reused")
    assert (await gateway.ask("hi", headers=KEY, temperature=0.5)).status == 200
    assert sampled(gateway) == 1
    for key in ("", "x" * 256):
        refused = await gateway.ask("hi", headers={"Idempotency-Key": key})
        assert (refused.status, refused.json["error"]["param"]) == (400, "Idempotency-Key")


@pytest.mark.parametrize("stream", [False, True])
async def test_many_at_once_sample_once(tmp_path: Path, stream: bool) -> None:
    async with served(tmp_path, counting(delay=0.1), admission=Admission(1, 1)) as gateway:
        requests = [gateway.ask("hi", headers=KEY, stream=stream) for _ in range(8)]
        replies = await asyncio.gather(*requests)
        assert {reply.status for reply in replies} == {200} and sampled(gateway) == 1
        bodies = {reply.body.replace(b": keep-alive\n\n", b"") for reply in replies}
        assert len(bodies) == 1 and len({reply.run_id for reply in replies}) == 1
        assert sum("x-idempotent-replayed" in reply.headers for reply in replies) == 7


@pytest.mark.parametrize("stream", [False, True])
async def test_what_failed_is_sampled_anew(tmp_path: Path, stream: bool) -> None:
    engine = ScriptedEngine([EngineError("it broke", status=500), "well"])
    async with served(tmp_path, engine) as gateway:
        failed = await gateway.ask("hi", headers=KEY, stream=stream)
        assert failed.status == 502
        good = await gateway.ask("hi", headers=KEY, stream=stream)
        again = await gateway.ask("hi", headers=KEY, stream=stream)
        assert good.status == 200 and same(good, again) and b"well" in good.body
        assert sampled(gateway) == 2


async def test_what_broke_off_is_sampled_anew_and_both_are_recorded(tmp_path: Path) -> None:
    replies = iter(["one two explode, and more", "one two three"])
    engine = Paced(lambda request: next(replies))
    async with served(tmp_path, engine) as gateway:
        failed = await gateway.ask("hi", headers=KEY, stream=True)
        assert b"the engine died" in failed.body
        good = await gateway.ask("hi", headers=KEY, stream=True)
        assert good.body.endswith(b"data: [DONE]\n\n")
        assert same(good, await gateway.ask("hi", headers=KEY, stream=True))
        (broken,), (whole,) = gateway.calls(failed.run_id), gateway.calls(good.run_id)
        assert (broken.finish_reason, whole.finish_reason) == ("error", "stop")
        assert whole.id in good.body.decode() and broken.id != whole.id


@pytest.mark.slow
@pytest.mark.parametrize("stream", [False, True])
async def test_what_was_cancelled_is_sampled_anew(tmp_path: Path, stream: bool) -> None:
    engine = Paced(lambda request: "a long answer that takes its time", pause=0.1, delay=0.1)
    async with served(tmp_path, engine) as gateway:
        asking = asyncio.create_task(gateway.ask("hi", headers=KEY, stream=stream))
        await until(lambda: engine.pieces > 1 if stream else engine.active)
        asking.cancel()
        engine.pause = 0.0  # for the next ones
        # while the first may still be ending
        replies = await asyncio.gather(
            *(gateway.ask("hi", headers=KEY, stream=stream) for _ in range(2))
        )
        assert engine.cancelled == 1 and {reply.status for reply in replies} == {200}
        first, again = sorted(replies, key=lambda reply: "x-idempotent-replayed" in reply.headers)
        assert first.body.replace(b": keep-alive\n\n", b"") == again.body
        assert first.run_id == again.run_id and sampled(gateway) == 2
        finishes = sorted(str(c.finish_reason) for r in gateway.store.runs() for c in r.calls)
        assert finishes == (["cancelled", "stop"] if stream else ["stop"])


@pytest.mark.slow
@pytest.mark.parametrize("fields", [{}, {"stream": True}, {"n": 2}], ids=["whole", "stream", "n"])
async def test_what_was_forgotten_is_sampled_anew_once(
    tmp_path: Path, fields: dict[str, Any]
) -> None:
    async with served(tmp_path, counting()) as gateway:
        first = await gateway.ask("hi", headers=KEY, **fields)
        for count in (2, 3):  # forgotten once, and again
            run = await gateway.call("DELETE", f"/v1/trajectories/{first.run_id}")
            assert run[0] == 200
            replies = await asyncio.gather(
                *[gateway.ask("hi", headers=KEY, **fields) for _ in range(3)]
            )
            first = replies[0]
            assert first.status == 200 and all(same(first, reply) for reply in replies)
            assert sampled(gateway) == count
            assert len(gateway.calls(first.run_id)) == fields.get("n", 1)
    async with served(tmp_path, counting()) as gateway:
        again = await gateway.ask("hi", headers=KEY, **fields)
        assert same(first, again) and sampled(gateway) == 0


async def test_a_client_that_waits_for_the_first_may_leave(tmp_path: Path) -> None:
    async with served(tmp_path, counting(delay=0.3)) as gateway:
        first = asyncio.create_task(gateway.ask("hi", headers=KEY))
        await until(lambda: sampled(gateway))
        second = asyncio.create_task(gateway.ask("hi", headers=KEY))
        await asyncio.sleep(0.1)
        second.cancel()
        assert (await first).status == 200 and sampled(gateway) == 1
        assert same(await first, await gateway.ask("hi", headers=KEY))


async def test_a_client_may_leave_while_its_answer_is_recorded(tmp_path: Path) -> None:
    async with served(tmp_path, counting()) as gateway:
        commits, go = gateway.store._writer._commits, threading.Event()
        write, commits._write = commits._write, lambda group: write(group) if go.wait() else []
        leaves = asyncio.create_task(gateway.ask("hi", headers=KEY, stream=True))
        await until(lambda: commits._busy)
        leaves.cancel()
        again = asyncio.create_task(gateway.ask("hi", headers=KEY, stream=True))
        for _ in range(3):
            await gateway.call("GET", "/health")  # it has seen that the first one left
        go.set()
        assert "x-idempotent-replayed" in (await again).headers and sampled(gateway) == 1


async def test_what_could_not_be_recorded_is_not_repeated(gateway: Gateway) -> None:
    segments = gateway.services.home.segments
    block(gateway.services.home)
    assert (await gateway.ask("hi", headers=KEY)).status == 503
    segments.unlink()
    assert (await gateway.ask("hi", headers=KEY)).status == 200
    assert sampled(gateway) == 2


async def test_keys_of_different_callers_and_apis_do_not_meet(tmp_path: Path) -> None:
    async with served(tmp_path, counting(), api_keys="required") as gateway:
        keys = Keys(gateway.services.home)
        replies = []
        for secret in [keys.create(name)[1] for name in ("ann", "bob")]:
            headers = {**KEY, "Authorization": f"Bearer {secret}"}
            replies += [await gateway.ask("hi", headers=headers) for _ in range(2)]
        assert [reply.status for reply in replies] == [200] * 4
        assert same(replies[0], replies[1]) and same(replies[2], replies[3])
        assert replies[0].body != replies[2].body and sampled(gateway) == 2
        other = await gateway.ask("hi", headers=headers, path="/v1/messages")
        assert other.code != "idempotency_key_reused"


async def test_without_a_key_the_same_request_is_sampled_each_time(tmp_path: Path) -> None:
    async with served(tmp_path, counting()) as gateway:
        replies = [await gateway.ask("hi") for _ in range(3)]
        assert len({reply.text for reply in replies}) == 3 == sampled(gateway)
        assert len({reply.run_id for reply in replies}) == 3


async def test_the_official_client_repeats_by_itself(tmp_path: Path) -> None:
    """The official client retries a 5xx under the same key."""
    engine = ScriptedEngine([EngineError("it broke", status=500), "well"])
    async with served(tmp_path, engine) as gateway:
        client = openai.AsyncOpenAI(base_url=f"{gateway.url}/v1", api_key="none", max_retries=2)
        answer = await client.chat.completions.create(
            model="calc", messages=[{"role": "user", "content": "hi"}], extra_headers=KEY
        )
        assert answer.choices[0].message.content == "well" and sampled(gateway) == 2


async def test_a_repeat_joins_the_conversation_of_the_first(tmp_path: Path) -> None:
    async with served(tmp_path, counting()) as gateway:
        for _ in range(2):
            first = await gateway.ask("hi", headers=KEY)
        answer = {"role": "assistant", "content": first.text}
        turns = [{"role": "user", "content": "hi"}, answer, {"role": "user", "content": "and?"}]
        assert (await gateway.ask(turns, path=CHAT)).run_id == first.run_id
