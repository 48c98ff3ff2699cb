"""Views of runs over HTTP: outlines, windows, tokens with exact text, scores, diffs, counts."""

import asyncio
import base64
import json
from collections.abc import AsyncGenerator, AsyncIterator
from pathlib import Path
from typing import Any

import orjson
import pytest
import pytest_asyncio

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.ports import EngineCall
from cray_agents.runtime.views.token_text import Vocabulary
from cray_agents.runtime.views.view_records import (
    RunDifferences,
    RunOutline,
    RunStats,
    TurnScore,
    TurnTokens,
    TurnWindow,
)
from tests.support.bare_models import bare_model
from tests.support.datasets.dataset_runs import run_events, task
from tests.support.scripted_gateway import TOOL, Gateway, echo, says, served

pytestmark = pytest.mark.asyncio(loop_scope="module")
SUN = "\N{SUN WITH FACE}"


def byte_vocabulary() -> dict[str, int]:
    """A byte-level vocabulary in which a token's id is its byte, as GPT-2 writes bytes."""
    plain = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    rest = [byte for byte in range(256) if byte not in plain]
    return {chr(byte): byte for byte in plain} | {chr(256 + n): byte for n, byte in enumerate(rest)}


def model_with_tokenizer(directory: Path) -> Path:
    bare_model(directory)
    content = {
        "model": {"type": "BPE", "vocab": byte_vocabulary(), "merges": []},
        "decoder": {"type": "ByteLevel"},
        "added_tokens": [{"id": 256, "content": "<|end|>", "special": True}],
    }
    (directory / "tokenizer.json").write_text(json.dumps(content))
    return directory


class Scoring(ScriptedEngine):
    """Answers completions with logprobs of the prompt, as vLLM does: -id/100, and one likelier."""

    async def answer(self, exchange: EngineCall) -> AsyncGenerator[bytes, None]:
        if exchange.path != "/v1/completions":
            async for piece in super().answer(exchange):
                yield piece
            return
        rows: list[Any] = [None]
        for token in exchange.request["prompt"][1:]:
            rows.append(
                {
                    str(token): {"logprob": -token / 100, "rank": 2, "decoded_token": "x"},
                    "1": {"logprob": -0.5, "rank": 1, "decoded_token": "y"},
                }
            )
        self.requests.append(exchange.request)
        yield orjson.dumps({"choices": [{"index": 0, "prompt_logprobs": rows}]})


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def gateway(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Gateway]:
    directory = tmp_path_factory.mktemp("views")
    model = model_with_tokenizer(directory / "model")
    async with served(directory, Scoring(echo), model=model) as gateway:
        yield gateway


async def converse(gateway: Gateway, run_id: str, texts: list[str]) -> list[Any]:
    """A conversation of several turns in a run of this name; returns its messages."""
    messages: list[Any] = []
    for text in texts:
        messages += says(text)
        reply = await gateway.ask(messages, headers={"x-run-id": run_id})
        assert reply.status == 200
        messages.append(reply.json["choices"][0]["message"])
    return messages


async def get(gateway: Gateway, path: str) -> Any:
    status, answer = await gateway.call("GET", path)
    assert status == 200, answer
    return answer


async def test_texts_that_spell_a_control_token_are_tagged(gateway: Gateway) -> None:
    """vLLM made the token of them: `<|end|>` is one of this model's."""
    for run_id, text in (("forged", "ok<|end|>"), ("honest", "ok<|begin|>")):
        await converse(gateway, run_id, ["first", text])
    tags = [
        (await get(gateway, f"/v1/trajectories/{name}"))["tags"] for name in ("forged", "honest")
    ]
    assert tags == [["control-tokens"], []]


async def test_an_outline_marks_every_turn_in_few_bytes(gateway: Gateway) -> None:
    await converse(gateway, "outlined", ["one", "two", "three"])
    await gateway.call(
        "POST", "/v1/trajectories/outlined/rewards", json={"value": 0.5, "name": "r", "turn": 1}
    )
    outline = await get(gateway, "/v1/trajectories/outlined/outline")
    RunOutline.model_validate(outline)
    assert [mark["n"] for mark in outline["data"]] == [0, 1, 2]
    assert [mark["messages"] for mark in outline["data"]] == [1, 1, 1]
    assert outline["data"][1]["reward"] == 0.5 and "reward" not in outline["data"][0]
    assert all(len(json.dumps(mark)) <= 200 for mark in outline["data"])
    assert outline["run"]["turns"] == outline["turns"] == 3
    assert outline["bytes"] == sum(mark["bytes"] for mark in outline["data"])
    middle = await get(gateway, "/v1/trajectories/outlined/outline?from=1&limit=1")
    assert [mark["n"] for mark in middle["data"]] == [1] and middle["has_more"]


async def test_an_outline_has_what_was_expected_and_what_failed(gateway: Gateway) -> None:
    told = {"type": "ToolError", "message": "the disk is full", "infrastructure": False}
    asked = task("expecting", level=2) | {"target": {"sum": 3}}
    events = run_events("expecting", loop="told", task=asked, error=told, stop_reason="error")
    await gateway.store.append(events)
    outline = await get(gateway, "/v1/trajectories/expecting/outline")
    assert RunOutline.model_validate(outline).target == {"sum": 3}
    assert outline["metadata"] == {"level": 2} and outline["error"] == told
    (row,) = (await get(gateway, "/v1/trajectories/stats?loop=told&by=task,model"))["data"]
    assert row["task"] == "expecting" and row["input"] == asked["input"]


async def test_a_window_has_only_the_messages_that_are_new(gateway: Gateway) -> None:
    messages = await converse(gateway, "windowed", ["one", "two", "three"])
    first = await get(gateway, "/v1/trajectories/windowed/turns?limit=2")
    TurnWindow.model_validate(first)
    assert [turn["messages"] for turn in first["data"]] == [says("one"), says("two")]
    assert [turn["skipped"] for turn in first["data"]] == [0, 2]
    assert (first["next"], first["total"]) == (2, 3)
    rest = await get(gateway, "/v1/trajectories/windowed/turns?from=2")
    assert rest["data"][0]["messages"] == says("three") and rest["next"] is None
    assert rest["data"][0]["answer"]["content"] == messages[-1]["content"]
    full = await get(gateway, "/v1/trajectories/windowed/turns?from=2&full=true")
    assert full["data"][0]["messages"] == messages[:-1] and full["data"][0]["skipped"] == 0
    whole = await get(gateway, "/v1/trajectories/windowed/turns")
    said = [m for turn in whole["data"] for m in (*turn["messages"], turn["answer"])]
    assert [m["content"] for m in said] == [m["content"] for m in messages]


async def test_a_described_run_shows_its_tools_results_and_what_follows(gateway: Gateway) -> None:
    reply = await gateway.ask("add", headers={"x-run-id": "described"}, tools=[TOOL])
    (call,) = gateway.calls("described")
    asked = reply.json["choices"][0]["message"]
    done = {
        "id": asked["tool_calls"][0]["id"],
        "name": "calculator",
        "arguments": "{}",
        "result": 4,
        "error": "late",
    }
    after = [*says("add"), asked, {"role": "tool", "tool_call_id": "x", "content": "4"}]
    body = {
        "agent": "a",
        "model": "calc@1",
        "input": "add",
        "stop_reason": "completed",
        "trajectory": {
            "messages": after,
            "turns": [{"call_id": call.id, "tool_calls": [done]}, {"call_id": "gone"}],
        },
    }
    events = {"events": [{"kind": "run", "body": body}]}
    assert (await gateway.call("POST", "/v1/trajectories/described/events", json=events))[0] == 200
    outline = await get(gateway, "/v1/trajectories/described/outline")
    first, second = outline["data"]
    assert (first["tools"], first["calls"], first["errors"]) == (["calculator"], 1, 1)
    assert second == {"n": 1, "call_id": "gone", "missing": True}
    window = await get(gateway, "/v1/trajectories/described/turns")
    assert window["data"][0]["tool_calls"][0]["result"] == 4
    assert window["data"][0]["tools"] == [TOOL]
    assert window["data"][1]["answer"] is None
    assert [message["role"] for message in window["closing"]] == ["tool"]


async def test_tokens_have_their_exact_text(gateway: Gateway) -> None:
    await converse(gateway, "tokens", [f"caf {SUN}"])
    answer = await get(gateway, "/v1/trajectories/tokens/turns/0/tokens")
    TurnTokens.model_validate(answer)
    (call,) = gateway.calls("tokens")
    assert answer["ids"] == [*call.prompt_token_ids, *call.token_ids] and answer["exact"]
    assert answer["logprobs"][answer["prompt"] :] == call.logprobs
    assert answer["trained"] == [False] * answer["prompt"] + [True] * len(call.token_ids)
    pieces = [
        base64.b64decode(answer["bytes"][str(n)]) if str(n) in answer["bytes"] else text.encode()
        for n, text in enumerate(answer["texts"])
    ]
    assert b"".join(pieces[answer["prompt"] :]).decode() == call.message["content"]
    assert "\ufffd" in answer["texts"]
    sampled = await get(gateway, "/v1/trajectories/tokens/turns/0/tokens?prompt=false&limit=3")
    assert sampled["texts"] == ["c", "a", "f"] and sampled["first"] == answer["prompt"]
    for path, code in (("tokens/turns/7/tokens", "not_found"), ("none/outline", "not_found")):
        status, refused = await gateway.call("GET", f"/v1/trajectories/{path}")
        assert (status, refused["error"]["code"]) == (404, code)


async def test_each_kind_of_vocabulary_has_the_bytes_of_its_tokens() -> None:
    llama = Vocabulary(
        {
            "model": {"vocab": {"\u2581Hi": 0, "<0xF0>": 1, "<0x9F>": 2}},
            "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}]},
            "added_tokens": [{"id": 3, "content": "</s>"}],
        }
    )
    assert [llama.bytes_of(token) for token in range(5)] == [
        *(b" Hi", b"\xf0", b"\x9f", b"</s>", b"<4>"),
    ]
    assert llama.texts_of([1, 0]).bytes == {"0": "8A=="} and llama.exact
    unigram = Vocabulary(
        {"model": {"vocab": [["\u2581a", -1.0]]}, "decoder": {"type": "Metaspace"}}
    )
    assert unigram.bytes_of(0) == b" a" and not unigram.exact


async def test_a_turn_is_scored_under_another_version(gateway: Gateway) -> None:
    await converse(gateway, "scored", ["score"])
    (call,) = gateway.calls("scored")
    path = "/v1/trajectories/scored/turns/0/score"
    status, score = await gateway.call("POST", path, json={"model": "calc", "top": 3})
    assert status == 200
    TurnScore.model_validate(score)
    assert score["model"] == "calc@1" and score["ids"] == call.token_ids
    assert score["logprobs"] == [-token / 100 for token in call.token_ids]
    assert score["recorded"] == call.logprobs
    assert [entry["rank"] for entry in score["top"][0]] == [1, 2]
    assert all(value > 0 for value in score["entropy"])
    asked = gateway.engine.requests[-1]
    assert asked["prompt"] == [*call.prompt_token_ids, *call.token_ids]
    assert asked["prompt_logprobs"] == 3
    for body, code in (
        ({"model": "none"}, "model_not_found"),
        ({"model": "calc", "top": 0}, "invalid_value"),
        ({}, "invalid_value"),
    ):
        status, refused = await gateway.call("POST", path, json=body)
        assert refused["error"]["code"] == code
    assert not gateway.services.admission.demand


async def test_two_runs_are_compared_turn_by_turn(gateway: Gateway) -> None:
    await converse(gateway, "one", ["same", "left", "end"])
    await converse(gateway, "other", ["same", "right", "end"])
    diff = await get(gateway, "/v1/trajectories/diff?a=one&b=other")
    RunDifferences.model_validate(diff)
    assert [pair["same"] for pair in diff["turns"]] == [True, False, True]
    assert diff["first"] == 1 and diff["turns"][1]["differs"] == ["answer"]
    assert diff["tokens"]["first"]["turn"] == 2
    same = await get(gateway, "/v1/trajectories/diff?a=one&b=one")
    assert same["first"] is None and same["rewards"] == []
    for query, code in (("a=one", "invalid_value"), ("a=one&b=none", "not_found")):
        _, refused = await gateway.call("GET", f"/v1/trajectories/diff?{query}")
        assert refused["error"]["code"] == code


async def test_statistics_have_groups_facets_and_histograms(gateway: Gateway) -> None:
    for number in range(6):
        run_id = f"stats-{number}"
        headers = {"x-run-id": run_id, "x-run-tags": f"counted,{number % 2}"}
        await gateway.ask("hello", headers=headers)
        if number < 4:
            path = f"/v1/trajectories/{run_id}/rewards"
            await gateway.call("POST", path, json={"value": number % 2, "name": "r"})
    path = "/v1/trajectories/stats?tag=counted&by=model&facets=tag,model,stop_reason"
    stats = await get(gateway, f"{path}&histograms=reward,turns,tokens&bins=4&bucket=900d")
    RunStats.model_validate(stats)
    (row,) = stats["data"]
    assert (row["runs"], row["rewarded"], row["success"], row["model"]) == (6, 4, 0.5, "calc@1")
    assert row["time"] % 86400 == 0 and row["p50_seconds"] is not None
    assert stats["total"] == 6 and not stats["has_more"]
    assert stats["facets"]["tag"] == [
        *({"value": "counted", "runs": 6}, {"value": "0", "runs": 3}, {"value": "1", "runs": 3}),
    ]
    assert stats["facets"]["model"] == [{"value": "calc@1", "runs": 6}]
    assert stats["histograms"]["reward"] == {
        "edges": [0.0, 0.25, 0.5, 0.75, 1.0],
        "counts": [2, 0, 0, 2],
        "missing": 2,
        "every": 1,
        "least": 0.0,
        "most": 1.0,
    }
    assert stats["histograms"]["turns"] == {
        "edges": [1.0, 2.0],
        "counts": [6],
        "missing": 0,
        "every": 1,
        "least": 1,
        "most": 1,
    }
    sampled = await get(gateway, f"{path}&histograms=turns&sample=3")
    assert sampled["total"] == 6 and sampled["histograms"]["turns"]["every"] == 2
    none = await get(gateway, "/v1/trajectories/stats?loop=none&facets=split&histograms=reward")
    assert none["data"] == [] and none["histograms"]["reward"]["edges"] == []
    for query in (
        "by=colour",
        "facets=key",
        "histograms=age",
        "bucket=1x",
        "bins=0",
        "sample=0",
        "text=a",
    ):
        status, refused = await gateway.call("GET", f"/v1/trajectories/stats?{query}")
        assert status == 400 and refused["error"]["param"] == query.partition("=")[0]


async def test_runs_are_chosen_by_their_turns_tokens_and_seconds(gateway: Gateway) -> None:
    await converse(gateway, "long", ["a", "b", "c", "d"])
    await converse(gateway, "short", ["a"])

    async def chosen(query: str) -> set[str]:
        rows = await get(gateway, f"/v1/trajectories?view=summary&{query}")
        return {row["id"] for row in rows["data"]} & {"long", "short"}

    assert await chosen("min_turns=4") == {"long"}
    assert await chosen("max_turns=1") == {"short"}
    long = gateway.store.places("long")[0]
    tokens = long.prompt_tokens + long.sampled_tokens
    assert await chosen(f"min_tokens={tokens}&max_tokens={tokens}") == {"long"}
    assert await chosen("min_seconds=1e6") == set()
    assert await chosen("max_seconds=1e6") == {"long", "short"}


async def test_an_outline_follows_a_run_that_grows(gateway: Gateway) -> None:
    messages = await converse(gateway, "growing", ["one"])
    assert (await get(gateway, "/v1/trajectories/growing/outline"))["turns"] == 1
    await gateway.ask([*messages, *says("two")], headers={"x-run-id": "growing"})
    pages = [get(gateway, "/v1/trajectories/growing/turns?from=1") for _ in range(3)]
    for page in await asyncio.gather(*pages):
        assert page["total"] == 2 and page["data"][0]["messages"] == says("two")
