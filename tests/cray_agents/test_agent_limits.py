"""Limits, retries of model calls, the output's schema, instructions that are functions."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from cray_agents import RunContext
from cray_agents.agent import StopReason
from cray_agents.agent.stream_events import LimitReached, RunEnded, TextDelta
from cray_agents.errors import EngineError, EngineUnavailable
from cray_agents.tools.calculator import calculator
from tests.support.model_scripts import SUM, agent, asks, script


class Place(BaseModel):
    city: str


# ---- limits


async def test_at_its_turns_end_the_model_is_asked_for_its_answer():
    engine = script(asks(SUM), asks(SUM), "432")
    a = agent(engine, tools=[calculator], max_turns=2, on_limit="answer", output_type=int)
    events = [event async for event in a.stream("go")]
    run = events[-1].run
    assert (run.output, run.stop_reason, run.error) == (432, "max_turns", None)
    assert [r.get("tool_choice") for r in engine.requests] == [None, None, "none"]
    assert engine.requests[2]["tools"] == a.tool_schemas
    assert len(run.trajectory.turns) == 3 and run.trajectory.messages[-1]["content"] == "432"
    assert [e for e in events if isinstance(e, LimitReached)] == [
        LimitReached(StopReason.max_turns)
    ]


@pytest.mark.parametrize("kind", [int, str])
async def test_a_last_answer_that_is_none(kind):
    engine = script(asks(SUM), asks(SUM))
    a = agent(engine, tools=[calculator], max_turns=1, on_limit="answer", output_type=kind)
    run = await a.run("go")
    assert (run.output, run.stop_reason) == (None, "max_turns")
    assert run.error is not None and run.error.type == "OutputError"
    assert run.trajectory.turns[1].tool_calls[0].error == "the run ended before this call did"


@pytest.mark.parametrize("stream", [False, True])
async def test_total_tokens(stream):
    engine = script(lambda request: asks(SUM))
    a = agent(engine, tools=[calculator], max_total_tokens=1200, max_turns=50)
    if stream:
        run = [event async for event in a.stream("go")][-1].run
        assert all(r["stream_options"] == {"include_usage": True} for r in engine.requests)
    else:
        run = await a.run("go")
        assert "stream_options" not in engine.requests[0]
    used = [len(call.prompt_token_ids) + len(call.token_ids) for call in run.calls]
    assert (run.stop_reason, run.output) == ("max_tokens", None)
    assert sum(used) >= 1200 > sum(used[:-1]) and len(used) > 2
    assert run.trajectory.turns[-1].tool_calls[0].result == 432  # what was asked for is done


async def test_a_limit_of_tokens_that_cannot_be_counted_is_an_error():
    class Silent:
        async def chat(self, request):
            return {"id": "x", "choices": [{"message": {"role": "assistant", "tool_calls": [
                {"function": {"name": "calculator", "arguments": "{}"}}]}}]}  # fmt: skip

    run = await agent(Silent(), tools=[calculator], max_total_tokens=100).run("go")
    assert run.stop_reason == "error" and len(run.trajectory.turns) == 1
    assert "does not say how many tokens" in run.error.message


# ---- model calls that fail


@pytest.mark.slow
async def test_a_failed_model_call_is_done_again():
    engine = script(EngineUnavailable("gone", status=503), EngineError("half an answer"), "ok")
    run = await agent(engine, retries=2).run("go")
    assert (run.output, len(run.trajectory.turns), len(engine.requests)) == ("ok", 1, 3)
    assert engine.requests[0] == engine.requests[2]  # its key too: no gateway samples it twice


@pytest.mark.parametrize(
    "error", [EngineError("too long", status=400), EngineError("", status=404)]
)
async def test_a_refused_model_call_is_not_done_again(error):
    engine = script(error, "ok")
    run = await agent(engine, retries=2).run("go")
    assert run.stop_reason == "error" and len(engine.requests) == 1


async def test_what_was_streamed_already_is_not_streamed_again():
    class Breaks:
        asked = 0

        async def stream(self, request):
            self.asked += 1
            if self.asked == 2:
                yield {"id": "x", "choices": [{"index": 0, "delta": {"content": "4"}}]}
            raise EngineUnavailable("broke off")

    engine = Breaks()
    events = [event async for event in agent(engine, retries=3).stream("go")]
    assert engine.asked == 2 and events[-1].run.error.type == "EngineUnavailable"
    assert [e.text for e in events if isinstance(e, TextDelta)] == ["4"]


# ---- the output's schema


async def test_the_schema_is_asked_for_where_no_tool_may_be_called():
    engine = script('{"city": "Ulm"}')
    assert (await agent(engine, output_type=Place).run("go")).output == Place(city="Ulm")
    asked = engine.requests[0]["response_format"]
    assert asked["type"] == "json_schema" and asked["json_schema"]["name"] == "Place"
    assert asked["json_schema"]["schema"]["required"] == ["city"]

    engine = script(asks(SUM), "Ulm!", '{"city": "Ulm"}')
    run = await agent(engine, output_type=Place, tools=[calculator]).run("go")
    assert run.output == Place(city="Ulm")
    # a server would hold the tool calls to the schema too
    assert ["response_format" in r for r in engine.requests] == [False, False, True]
    assert [r.get("tool_choice") for r in engine.requests] == [None, None, "none"]


@pytest.mark.parametrize("options", [{"output_type": int}, {}, {"json_schema": False}])
async def test_no_schema_is_asked_for(options):
    engine = script("4")
    await agent(engine, **{"output_type": list[int], **options} if "json_schema" in options
                else options).run("go")  # fmt: skip
    assert "response_format" not in engine.requests[0]


async def test_a_server_that_refuses_schemas_is_remembered():
    def old(request: Any) -> Any:
        if "response_format" in request:
            return EngineError("unknown field response_format", status=400)
        return "[1, 2]"

    engine = script(old)
    a = agent(engine, output_type=list[int])
    first, second = await a.run("go"), await a.run("go")
    assert first.output == second.output == [1, 2]
    assert ["response_format" in r for r in engine.requests] == [True, False, False]
    assert "response_format" not in first.calls[0].sampling  # the record is of what was answered


async def test_a_request_that_is_refused_for_another_reason_says_so():
    engine = script(lambda request: EngineError("context too long", status=400))
    a = agent(engine, output_type=list[int])
    run = await a.run("go")
    assert run.error is not None and run.error.message == "context too long"
    await a.run("go")
    assert "response_format" in engine.requests[2]


# ---- instructions


async def test_instructions_that_are_functions():
    def plain() -> str:
        return "Be brief."

    async def of_the_run(context: RunContext) -> str:
        return f"You help {context.deps['user']} with {context.input}."

    engine = script("a", "b")
    await agent(engine, instructions=plain).run("go")
    run = await agent(engine, instructions=of_the_run).run("maths", deps={"user": "Ada"})
    told = [request["messages"][0] for request in engine.requests]
    assert told[0] == {"role": "system", "content": "Be brief."}
    assert told[1]["content"] == "You help Ada with maths."
    assert run.trajectory.messages[0] == told[1]


@pytest.mark.parametrize(
    ("function", "message"),
    [
        (lambda: 1 / 0, "the instructions function of a failed: ZeroDivisionError"),
        (lambda: 7, "the instructions function of a returned 7: give a str"),
        (lambda: "\ud800", "instructions is not valid Unicode text"),
    ],
)
async def test_instructions_that_fail(function, message):
    run = await agent(script("ok"), instructions=function).run("go", run_id="r")
    assert (run.stop_reason, run.id, run.input) == ("error", "r", "go")
    assert run.error is not None and message in run.error.message and run.error.infrastructure


# ---- tool calls one by one


@pytest.mark.parametrize("parallel", [True, False])
async def test_parallel_tool_calls(parallel):
    running, most = 0, 0

    async def work() -> str:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1
        return "done"

    engine = script(asks(("work", {}), ("work", {}), ("work", {})), "ok")
    run = await agent(engine, tools=[work], parallel_tool_calls=parallel).run("go")
    assert most == (3 if parallel else 1) and len(run.trajectory.turns[0].tool_calls) == 3
    assert engine.requests[0].get("parallel_tool_calls") is (None if parallel else False)
    engine = script("ok")
    await agent(engine, parallel_tool_calls=parallel).run("go")
    assert "parallel_tool_calls" not in engine.requests[0]  # without tools servers refuse it


async def test_an_unknown_option_is_an_error():
    with pytest.raises(TypeError, match="unexpected keyword argument 'runid'"):
        await agent(script("ok")).run("go", runid="x")  # type: ignore[call-arg]
    ended = [event async for event in agent(script("ok")).stream("go", tags=["x"])][-1]
    assert isinstance(ended, RunEnded) and ended.run.tags == ["x"]
