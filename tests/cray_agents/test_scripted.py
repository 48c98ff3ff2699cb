"""ScriptedEngine answers in the shapes the real one answers in."""

import json
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletion, ChatCompletionChunk

from cray_agents.engines.scripted import ScriptedEngine, tool_call
from cray_agents.errors import EngineError, EngineTimeout, SwapError
from cray_agents.ports import EngineCall, PromptScore

CHAT = "/v1/chat/completions"
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "2 + 2?"}]}


async def test_a_text_has_tokens_logprobs_and_usage() -> None:
    engine = ScriptedEngine(["four"])
    answer = await engine.chat(ASK)
    choice = ChatCompletion.model_validate(answer).choices[0]
    assert (choice.message.content, choice.finish_reason) == ("four", "stop")
    raw = answer["choices"][0]
    assert bytes(raw["token_ids"]) == b"four" and len(raw["logprobs"]["content"]) == 4
    assert answer["usage"]["completion_tokens"] == 4
    assert answer["usage"]["prompt_tokens"] == len(answer["prompt_token_ids"])
    assert engine.requests == [ASK]


async def test_tool_calls_one_or_several() -> None:
    calls = [tool_call("add", a=1, b=2), {"name": "raw", "arguments": '{"x": '}]
    engine = ScriptedEngine([calls[0], calls])
    one = ChatCompletion.model_validate(await engine.chat(ASK)).choices[0]
    assert one.finish_reason == "tool_calls" and one.message.tool_calls is not None
    two = (await engine.chat(ASK))["choices"][0]["message"]["tool_calls"]
    assert json.loads(two[0]["function"]["arguments"]) == {"a": 1, "b": 2}
    assert two[1]["function"]["arguments"] == '{"x": '
    assert len({call["id"] for call in two} | {one.message.tool_calls[0].id}) == 3


@pytest.mark.parametrize("reply", ["a longer text, in pieces", "", tool_call("add", a=1, b=2)])
async def test_a_stream_adds_up_to_the_answer(reply: Any) -> None:
    whole = (await ScriptedEngine([reply]).chat(ASK))["choices"][0]
    chunks = [chunk async for chunk in ScriptedEngine([reply]).stream(ASK)]
    for chunk in chunks:
        ChatCompletionChunk.model_validate(chunk)
    assert chunks[-1]["usage"]["completion_tokens"] == len(whole["token_ids"])
    parts = [chunk["choices"][0] for chunk in chunks if chunk["choices"]]
    assert [t for part in parts for t in part.get("token_ids", [])] == whole["token_ids"]
    content = "".join(part["delta"].get("content") or "" for part in parts)
    assert content == (whole["message"]["content"] or "")
    said = [c for part in parts for c in part["delta"].get("tool_calls", [])]
    arguments = "".join(call["function"]["arguments"] for call in said)
    expected = whole["message"].get("tool_calls", [])
    assert arguments == "".join(call["function"]["arguments"] for call in expected)
    assert [call["id"] for call in said if "id" in call] == [call["id"] for call in expected]
    assert parts[-1]["finish_reason"] == whole["finish_reason"]


@pytest.mark.parametrize("reply", ["a longer text, in pieces", "", tool_call("add", a=1, b=2)])
@pytest.mark.parametrize("n", [1, 2])
@pytest.mark.parametrize("told", [False, True])
async def test_a_gateways_exchange_learns_what_was_sampled(reply: Any, n: int, told: bool) -> None:
    asked = ASK | ({"n": n} if n > 1 else {})
    asked |= {"return_token_ids": True, "logprobs": True} if told else {}
    whole = EngineCall(CHAT, asked, "x1", "m@2")
    (body,) = [piece async for piece in ScriptedEngine([reply]).answer(whole)]
    answer = ChatCompletion.model_validate_json(body)
    assert (answer.id, answer.model) == ("chatcmpl-x1", "m@2")
    assert len(answer.choices) == len(whole.samples) == n
    stream = EngineCall(CHAT, asked | {"stream": True}, "x1", "m@2")
    events = [event async for event in ScriptedEngine([reply]).answer(stream)]
    assert events[-1] == b"data: [DONE]\n\n"
    chunks = [ChatCompletionChunk.model_validate_json(event[6:]) for event in events[:-1]]
    assert {(chunk.id, chunk.model) for chunk in chunks} == {("chatcmpl-x1", "m@2")}
    assert stream.samples == whole.samples
    for choice, sample in zip(answer.choices, whole.samples, strict=True):
        said = [c.delta.content or "" for k in chunks for c in k.choices if c.index == choice.index]
        assert "".join(said) == (choice.message.content or "")
        assert sample.finish_reason == choice.finish_reason and sample.prompt_token_ids
        assert len(sample.logprobs) == len(sample.token_ids)
        shown = choice.model_dump().get("token_ids")
        assert shown == (sample.token_ids if told else None)
        assert (choice.logprobs is not None) is told


async def test_it_speaks_chat_completions_alone() -> None:
    with pytest.raises(EngineError, match="not /v1/responses") as caught:
        [
            piece
            async for piece in ScriptedEngine(["a"]).answer(EngineCall("/v1/responses", ASK, "x"))
        ]
    assert caught.value.status == 400


async def test_callables_exceptions_and_the_end_of_the_script() -> None:
    async def later(request: dict[str, Any]) -> str:
        return f"{len(request['messages'])} message"

    engine = ScriptedEngine([later, EngineTimeout("slow")])
    assert (await engine.chat(ASK))["choices"][0]["message"]["content"] == "1 message"
    with pytest.raises(EngineTimeout, match="slow"):
        await engine.chat(ASK)
    with pytest.raises(EngineError, match="holds 2 replies, and request 3 came"):
        await engine.chat(ASK)
    with pytest.raises(EngineError, match="reply 1 of the script is 3"):
        await ScriptedEngine(lambda request: 3).chat(ASK)  # type: ignore[arg-type, return-value]


async def test_it_takes_checkpoints_and_scores_their_probe(tmp_path: Path) -> None:
    probe = [
        {"token_ids": [1, 2, 3], "logprobs": [-0.5, -0.25], "top": [2, 9]},
        {"token_ids": [4, 5], "logprobs": [-1.0]},
    ]
    (tmp_path / "manifest.json").write_text(json.dumps({"probe": probe}))
    engine = ScriptedEngine(lambda request, version: f"I am {version}")
    await engine.load(tmp_path, "m@2")
    assert await engine.score([[1, 2, 3]]) == [PromptScore([-0.5, -0.25], [2, 9])]
    engine.drift = 1.0
    assert await engine.score([[1, 2, 3]]) == [PromptScore([0.5, 0.75], [2, 9])]
    assert await engine.score([[4, 5]]) == [PromptScore([0.0])]
    answer = await engine.chat(ASK)
    assert (answer["model"], answer["choices"][0]["message"]["content"]) == ("m@2", "I am m@2")
    with pytest.raises(EngineError, match="no probe"):
        await engine.score([[9]])
    with pytest.raises(SwapError):
        await engine.load(tmp_path / "nowhere", "m@3")


def test_a_tool_may_have_an_argument_called_name() -> None:
    assert tool_call("price", name="tea") == {"name": "price", "arguments": {"name": "tea"}}
