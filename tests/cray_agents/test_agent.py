"""The agent's loop: answers, tools, limits, faults, streaming, many runs at once."""

import asyncio
import json
import signal
import subprocess
import sys
import textwrap
import threading
import time
from pathlib import Path
from typing import Any

import pytest
from pydantic import BaseModel

from cray_agents import Agent, Run, Task, tool
from cray_agents.agent import Hooks, user_code
from cray_agents.agent.stream_events import (
    ModelFinished,
    ModelStarted,
    RunEnded,
    TextDelta,
    ToolFinished,
    ToolStarted,
)
from cray_agents.errors import BadInput, EngineError, EngineUnavailable, StoreError, ToolError
from cray_agents.records import canonical
from cray_agents.tools.calculator import calculator
from tests.support.model_scripts import SUM, agent, asks, script


@tool
def boom() -> str:
    raise KeyError("no such row")


@tool
def refuse() -> str:
    raise ToolError("the door is closed")


@tool(timeout=0.05)
def hang() -> str:
    time.sleep(30)
    return "late"


@tool(timeout=0.05)
async def hang_async() -> str:
    await asyncio.sleep(30)
    return "late"


@tool
def leave() -> None:
    sys.exit(3)


def only_call(run: Run) -> Any:
    return run.trajectory.turns[0].tool_calls[0]


# ---- what a run is


async def test_a_tool_call_and_an_answer():
    engine = script(asks(SUM), "432")
    engine.version = "calc@1"
    calc = agent(engine, instructions="Calculate.", tools=[calculator], output_type=int)
    task = Task(input="What is 47 + 385?", target=432)
    run = await calc.run(task, run_id="run_1", loop="l", iteration=2, attempt=3, seed=7)

    assert (run.output, run.stop_reason, run.error) == (432, "completed", None)
    assert (run.id, run.loop, run.iteration, run.attempt) == ("run_1", "l", 2, 3)
    assert run.task == task and run.model == "calc@1"
    assert [m["role"] for m in run.trajectory.messages] == [
        "system", "user", "assistant", "tool", "assistant",
    ]  # fmt: skip
    assert run.trajectory.messages[3] == {
        "role": "tool", "tool_call_id": "call_0", "content": "432",
    }  # fmt: skip
    first, second = run.trajectory.turns
    assert first.tool_calls[0].result == 432 and first.tool_calls[0].error is None
    assert first.call is not None and second.call is not None
    assert first.call_id == first.call.id == "chatcmpl-scripted-1"
    assert second.call.token_ids == list(b"432") and second.call.logprobs == [-0.5] * 3
    assert bytes(second.call.prompt_token_ids) == canonical(second.call.messages)
    assert first.call.run_id == second.call.run_id == "run_1"
    assert len(first.call.messages) == 2 and len(second.call.messages) == 4
    assert first.call.sampling == {"seed": 7} and second.call.sampling == {"seed": 8}
    assert second.call.finish_reason == "stop"
    assert run.usage.calls == 2 and run.usage.completion_tokens == len(first.call.token_ids) + 3
    headers = [request["extra_headers"] for request in engine.requests]
    assert [h["X-Run-Id"] for h in headers] == ["run_1"] * 2
    assert headers[0]["Idempotency-Key"] != headers[1]["Idempotency-Key"]
    again = script(asks(SUM), "432")
    await agent(again, instructions="Calculate.", tools=[calculator], output_type=int).run(
        task, run_id="run_1", seed=7
    )
    assert [r["extra_headers"] for r in again.requests] == headers, "done again, not sampled again"
    assert engine.requests[0]["tools"] == calc.tool_schemas
    assert Run.model_validate_json(run.model_dump_json()) == run


async def test_request_fields():
    engine = script("ok")
    a = agent(engine, temperature=0.0, max_tokens=5, sampling={"top_p": 0.9, "stop": ["x"]})
    await a.run("hi", model="other@2")
    request = engine.requests[0]
    assert {k: v for k, v in request.items() if k not in ("messages", "extra_headers")} == {
        "model": "other@2", "temperature": 0.0, "max_tokens": 5, "top_p": 0.9, "stop": ["x"],
    }  # fmt: skip
    assert request["messages"] == [{"role": "user", "content": "hi"}]


async def test_history_goes_on():
    engine = script("one", "two")
    a = agent(engine, instructions="Be brief.")
    first = await a.run("1")
    second = await a.run("2", history=first.trajectory.messages)
    assert [m["content"] for m in second.trajectory.messages] == [
        "Be brief.",
        "1",
        "one",
        "2",
        "two",
    ]
    assert len(first.trajectory.messages) == 3


async def test_tool_calls_run_at_the_same_time_and_answer_in_order():
    all_at_once = threading.Barrier(3)

    @tool
    def wait(seconds: float) -> str:
        all_at_once.wait(60)
        time.sleep(seconds)
        return f"waited {seconds}"

    calls = [("wait", {"seconds": s}) for s in (0.5, 0.1, 0.3)]
    run = await agent(script(asks(*calls), "done"), tools=[wait]).run("go")
    told = [m["content"] for m in run.trajectory.messages if m["role"] == "tool"]
    assert told == ["waited 0.5", "waited 0.1", "waited 0.3"]
    assert [c.id for c in run.trajectory.turns[0].tool_calls] == ["call_0", "call_1", "call_2"]


# ---- faults of tools are told to the model


@pytest.mark.parametrize(
    ("call", "error"),
    [
        (("boom", {}), "boom failed: KeyError: 'no such row'"),
        (("refuse", {}), "the door is closed"),
        (("hang", {}), "hang did not answer within 0.05 s"),
        (("hang_async", {}), "hang_async did not answer within 0.05 s"),
        (("leave", {}), "leave failed: RuntimeError: SystemExit(3)"),
        (("calculater", {}), "there is no tool 'calculater'; did you mean 'calculator'? The tools"
                             " are: boom, refuse, hang, hang_async, leave, calculator"),
        (("calculator", {"expr": "1"}), "bad arguments for calculator: expression: Field required; "
         "expr: Extra inputs are not permitted. Expected calculator(expression: string)"),
        (("calculator", {"expression": [1]}), "bad arguments for calculator: expression: Input "
         "should be a valid string. Expected calculator(expression: string)"),
        (("calculator", {"expression": "1/0"}), "division by zero"),
    ],
)  # fmt: skip
async def test_a_failing_tool_call_is_told_and_the_run_goes_on(call, error):
    engine = script(asks(call), "sorry")
    tools = [boom, refuse, hang, hang_async, leave, calculator]
    run = await agent(engine, tools=tools).run("go")
    assert (run.stop_reason, run.output, run.error) == ("completed", "sorry", None)
    assert only_call(run).error == error and only_call(run).result is None
    assert engine.requests[1]["messages"][-1]["content"] == f"Error: {error}"
    assert run.seconds < 25


@pytest.mark.parametrize("arguments", ['{"expression": "1', "not json", "[1]", '"1+1"'])
async def test_arguments_that_do_not_parse(arguments):
    engine = script(asks(("calculator", arguments)), "sorry")
    run = await agent(engine, tools=[calculator]).run("go")
    assert run.stop_reason == "completed"
    assert only_call(run).arguments == arguments
    assert "bad arguments for calculator" in only_call(run).error
    # servers refuse a conversation with arguments that are no JSON object
    sent = engine.requests[1]["messages"][-2]["tool_calls"][0]["function"]["arguments"]
    assert json.loads(sent) == {"unparsed": arguments}
    assert run.calls[0].message["tool_calls"][0]["function"]["arguments"] == arguments


async def test_no_arguments_at_all_and_no_tools_at_all():
    run = await agent(script(asks(("boom", "")), "x")).run("go")
    assert only_call(run).error == "there is no tool 'boom', and no other tool"


async def test_odd_tool_calls_of_odd_servers():
    calls = [
        {"function": {"name": "calculator", "arguments": {"expression": "2*3"}}},
        {"id": None, "function": None},
    ]
    message = {"role": "assistant", "tool_calls": calls}
    run = await agent(script(message, "6"), tools=[calculator]).run("go")
    good, bad = run.trajectory.turns[0].tool_calls
    assert (good.id, good.result, good.arguments) == ("call_0", 6, '{"expression": "2*3"}')
    assert "there is no tool ''" in bad.error


def test_a_hanging_tool_does_not_hold_up_the_end_of_the_process():
    program = """
        import asyncio, time
        from cray_agents import Agent, tool
        from cray_agents.agent.tool import as_tool
        from cray_agents.agent import user_code

        @tool(timeout=0.1)
        def hang() -> str:
            time.sleep(600)

        async def main():
            try:
                await as_tool(hang).call("{}")
            except Exception as error:
                print(error)

        asyncio.run(main())
    """
    done = subprocess.run(
        [sys.executable, "-c", textwrap.dedent(program)],
        capture_output=True, text=True, timeout=300, check=True,
    )  # fmt: skip
    assert "did not answer within 0.1 s" in done.stdout


# ---- what the model answers


@pytest.mark.parametrize(
    "message", ["", {"role": "assistant", "content": None}, {"role": "assistant"}]
)
async def test_an_empty_answer(message):
    run = await agent(script(message)).run("go")
    assert (run.output, run.stop_reason, run.error) == ("", "completed", None)
    run = await agent(script(message), output_type=int, output_retries=0).run("go")
    assert (run.output, run.stop_reason) == (None, "error")
    assert run.error is not None and run.error.type == "OutputError"
    assert not run.error.infrastructure and len(run.trajectory.turns) == 1


class Place(BaseModel):
    city: str
    people: int


@pytest.mark.parametrize(
    ("kind", "text", "value"),
    [
        (int, " 432\n", 432),
        (float, "2.5", 2.5),
        (int, "1" + "0" * 30, 10**30),
        (bool, "true", True),
        (str, " as it is ", " as it is "),
        (list[int], "[1, 2]", [1, 2]),
        (Place, '{"city": "Ulm", "people": 3}', Place(city="Ulm", people=3)),
        (Place, '```json\n{"city": "Ulm", "people": 3}\n```', Place(city="Ulm", people=3)),
    ],
)
async def test_output_types(kind, text, value):
    engine = script(text)
    run = await agent(engine, output_type=kind).run("go")
    assert run.output == value and type(run.output) is type(value)
    told = engine.requests[0]["messages"][0]["role"] == "system"
    assert told == (kind not in (int, float, bool, str))  # the schema


async def test_an_infinite_answer_is_no_float():
    run = await agent(script("inf"), output_type=float, output_retries=0).run("go")
    assert run.error is not None and "finite number" in run.error.message


async def test_a_wrong_answer_is_told_once():
    engine = script("about 432", "432")
    run = await agent(engine, output_type=int).run("go")
    assert run.output == 432 and len(run.trajectory.turns) == 2
    assert engine.requests[1]["messages"][-1]["content"].startswith(
        "The answer is not of type int: Input should be a valid integer"
    )
    run = await agent(script("about 432", "about 432"), output_type=int).run("go")
    assert (run.output, run.stop_reason, len(run.trajectory.turns)) == (None, "error", 2)
    assert run.trajectory.messages[-1]["content"] == "about 432"


# ---- limits


async def test_max_turns():
    run = await agent(script(*[asks(SUM)] * 4), tools=[calculator], max_turns=3).run("go")
    assert (run.stop_reason, run.output, run.error) == ("max_turns", None, None)
    assert len(run.trajectory.turns) == 3
    assert run.trajectory.messages[-1] == {
        "role": "tool", "tool_call_id": "call_0", "content": "432",
    }  # fmt: skip


async def test_timeout_in_a_model_call():
    async def never(request: Any) -> str:
        await asyncio.sleep(30)
        return ""

    run = await agent(script(never), timeout=0.05).run("go")
    assert (run.stop_reason, run.output, run.trajectory.turns) == ("timeout", None, [])


async def test_timeout_in_a_tool_keeps_what_was_done():
    @tool
    def slow() -> str:
        time.sleep(100)
        return "late"

    for seconds in (0.3, 3, 30):  # on a busy machine even the first call may take longer
        engine = script(asks(SUM, ("slow", {})))
        run = await agent(engine, tools=[calculator, slow], timeout=seconds).run("go")
        assert run.stop_reason == "timeout"
        if run.trajectory.turns and only_call(run).result:
            break
    finished, cut = run.trajectory.turns[0].tool_calls
    assert finished.result == 432
    assert (cut.name, cut.error) == ("slow", "the run ended before this call did")


# ---- engines that fail


@pytest.mark.parametrize(
    ("error", "infrastructure"),
    [
        (EngineUnavailable("gone", status=503), True),
        (EngineError("context too long", status=400), False),
        (EngineError("no such model", status=404), True),
        (EngineError("cut off"), True),
    ],
)
async def test_engine_errors_end_the_run_with_its_record(error, infrastructure):
    run = await agent(script(asks(SUM), error), tools=[calculator]).run("go")
    assert (run.stop_reason, run.output) == ("error", None)
    assert run.error is not None and run.error.message == str(error)
    assert (run.error.type, run.error.infrastructure) == (type(error).__name__, infrastructure)
    assert only_call(run).result == 432


async def test_a_fault_of_an_engine_is_recorded_and_raised():
    kept: list[Run] = []

    async def keep(run: Run) -> None:
        kept.append(run)

    with pytest.raises(ZeroDivisionError):
        await agent(script(ZeroDivisionError("bug")), recorder=keep).run("go")
    assert kept[0].error is not None and kept[0].error.infrastructure


@pytest.mark.parametrize("failure", [ConnectionError("down"), TimeoutError()])
async def test_a_connection_that_an_engine_lost_ends_the_run(failure: Exception):
    run = await agent(script(failure), timeout=10).run("go")  # its own, not the run's limit
    assert run.stop_reason == "error" and run.error is not None and run.error.infrastructure
    assert run.error.type == "EngineUnavailable" and type(failure).__name__ in run.error.message


async def test_an_answer_without_a_message():
    class Empty:
        async def chat(self, request):
            return {"id": "x", "choices": []}

    run = await agent(Empty()).run("go")
    assert run.error is not None and "no message" in run.error.message


@pytest.mark.parametrize(
    "odd",
    [{"token_ids": ["a"]}, {"logprobs": {"content": [{}]}}, {"logprobs": 1}, {"token_ids": 5}],
)
async def test_an_answer_of_an_unknown_shape(odd):
    class Odd:
        async def chat(self, request):
            message = {"role": "assistant", "content": "x"}
            return {"id": "x", "choices": [{"message": message, **odd}]}

    run = await agent(Odd()).run("go")
    assert run.error is not None and "no known shape" in run.error.message
    assert run.error.type == "EngineError" and run.error.infrastructure


async def test_a_record_that_cannot_be_kept_is_an_error():
    async def full(run: Run) -> None:
        raise StoreError("disk full")

    def full_too(run: Run) -> None:
        raise StoreError("disk full")

    for recorder in (full, full_too):
        with pytest.raises(StoreError, match="disk full"):
            await agent(script("ok"), recorder=recorder).run("go")


# ---- streaming


async def test_stream():
    number = "432" + "0" * 8  # two chunks
    engine = script(asks(SUM), number)
    a = agent(engine, tools=[calculator], output_type=int)
    events = [event async for event in a.stream("go", run_id="s")]
    assert [type(event) for event in events] == [
        ModelStarted, ModelFinished, ToolStarted, ToolFinished,
        ModelStarted, TextDelta, TextDelta, ModelFinished, RunEnded,
    ]  # fmt: skip
    assert events[0] == ModelStarted(0, "a", "calc") and events[4] == ModelStarted(1, "a", "calc")
    assert events[2] == ToolStarted("call_0", "calculator", '{"expression": "47 + 385"}')
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == number
    streamed = events[-1].run
    assert [e.call for e in events if isinstance(e, ModelFinished)] == streamed.calls
    whole = await agent(script(asks(SUM), number), tools=[calculator], output_type=int).run("go")
    assert streamed.output == int(number) and streamed.id == "s"
    assert streamed.trajectory.messages == whole.trajectory.messages
    for ours, theirs in zip(streamed.calls, whole.calls, strict=True):
        parts = {"message", "token_ids", "logprobs", "prompt_token_ids", "finish_reason", "model"}
        assert ours.model_dump(include=parts) == theirs.model_dump(include=parts)


async def test_a_stream_that_breaks_is_no_answer():
    class Broken:
        async def stream(self, request):
            yield {"id": "x", "choices": [{"index": 0, "delta": {"content": "4"}}]}

    events = [event async for event in agent(Broken()).stream("go")]
    assert events[1] == TextDelta("4")
    run = events[-1].run
    assert run.stop_reason == "error" and run.error.infrastructure and not run.trajectory.turns


@pytest.mark.parametrize("odd", [{"choices": [1]}, {"choices": [{"delta": {"tool_calls": 5}}]}])
async def test_a_chunk_of_an_unknown_shape(odd):
    class Odd:
        async def stream(self, request):
            yield odd

    run = [event async for event in agent(Odd()).stream("go")][-1].run
    assert "no known shape" in run.error.message


async def test_a_stream_left_early_is_cancelled_and_recorded():
    kept: list[Run] = []

    async def keep(run: Run) -> None:
        kept.append(run)

    stream = agent(script(asks(("hang", {})), "x"), tools=[hang], recorder=keep).stream("go")
    async for event in stream:
        if isinstance(event, ToolStarted):
            break
    await stream.aclose()
    assert kept[0].stop_reason == "cancelled"


# ---- many, and from sync code


def test_run_sync_without_and_with_a_loop():
    a = agent(script(lambda request: "ok"))
    assert a.run_sync("go").output == "ok"
    assert a.run_sync(Task(input="go")).output == "ok"

    async def inside() -> Any:
        return a.run_sync("go").output

    assert asyncio.run(inside()) == "ok"


async def test_stream_sync_also_beside_a_loop():
    a = agent(script("It is four.", "It is five."), recorder=None)
    events = list(a.stream_sync("go"))
    assert "".join(e.text for e in events if isinstance(e, TextDelta)) == "It is four."
    assert isinstance(events[-1], RunEnded) and events[-1].run.output == "It is four."
    with pytest.raises(BadInput, match="input: it is of type int: give a text or a list"):
        next(a.stream_sync(7))  # type: ignore[arg-type]


def test_a_sync_stream_left_early_is_cancelled_and_recorded():
    kept: list[Run] = []

    async def never(request: Any) -> str:
        await asyncio.Event().wait()
        return ""

    async def keep(run: Run) -> None:
        kept.append(run)

    events = agent(script(never), recorder=keep).stream_sync("go")
    assert isinstance(next(events), ModelStarted)
    events.close()
    assert [run.stop_reason for run in kept] == ["cancelled"]


def test_stream_sync_where_it_would_wait_for_itself():
    inner = agent(script("4"))

    @tool
    async def ask() -> int:
        return len(list(inner.stream_sync("?")))

    run = agent(script(asks(("ask", {})), "ok"), tools=[ask]).run_sync("go")
    assert "use `async for`" in run.trajectory.turns[0].tool_calls[0].error


def test_run_sync_in_a_tool_of_run_sync():
    inner = agent(script(lambda request: "deep"))

    @tool
    def ask() -> str:
        return inner.run_sync("x").output

    @tool
    async def ask_async() -> str:
        return inner.run_sync("x").output  # blocks the loop, but must not deadlock

    outer = agent(script(asks(("ask", {}), ("ask_async", {})), "done"), tools=[ask, ask_async])
    run = outer.run_sync("go")
    assert [call.result for call in run.trajectory.turns[0].tool_calls] == ["deep", "deep"]


def test_ctrl_c_in_run_sync_records_the_run():
    program = """
        import asyncio, signal
        from cray_agents import Agent
        from cray_agents.testing import ScriptedEngine

        # a shell that starts tests in the background has it ignored
        signal.signal(signal.SIGINT, signal.default_int_handler)

        async def never(request):
            print("asked", flush=True)
            await asyncio.sleep(60)

        async def keep(run):
            await asyncio.sleep(0.1)
            print(run.stop_reason, flush=True)

        Agent(name="a", engine=ScriptedEngine(never), recorder=keep).run_sync("hi")
    """
    command = [sys.executable, "-c", textwrap.dedent(program)]
    pipe = subprocess.PIPE
    with subprocess.Popen(command, stdout=pipe, stderr=pipe, text=True) as process:
        assert process.stdout is not None and process.stdout.readline() == "asked\n"
        process.send_signal(signal.SIGINT)
        out, error = process.communicate(timeout=120)
    assert out == "cancelled\n" and "KeyboardInterrupt" in error


def test_ctrl_c_at_the_moment_of_submission_cancels_what_was_submitted():
    began, ended = threading.Event(), threading.Event()

    async def work():
        began.set()
        try:
            await asyncio.sleep(60)
        finally:
            ended.set()

    def interrupt(frame, event, _):
        if (event, frame.f_code.co_name) == ("return", "call_soon_threadsafe"):
            sys.setprofile(None)
            began.wait()
            raise KeyboardInterrupt

    sys.setprofile(interrupt)
    with pytest.raises(KeyboardInterrupt):
        user_code.wait_for(work())
    assert ended.is_set()


# ---- arguments of Agent


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"name": 7}, "name=7: Input should be a valid string"),
        ({"name": " "}, "name=' ': String should have at least 1 character"),
        ({"model": None}, "model=None"),
        ({"instructions": 3}, "instructions=3: .*string or Input should be callable"),
        ({"instructions": "\ud800"}, "instructions is not valid Unicode"),
        ({"tools": print}, "tools=<built-in function print>: Input should be an instance of Seq"),
        ({"tools": ["calculator"]}, "tools=.*an instance of Tool or Input should be callable"),
        ({"tools": [calculator, calculator]}, "two tools of one name"),
        ({"handoffs": [Agent(name="b"), Agent(name="b")]}, "two tools of one name: transfer_to_b"),
        ({"handoffs": ["x"]}, "handoffs=.*an instance of Agent"),
        ({"output_type": asyncio.Event}, "output_type=.*Unable to generate pydantic-core schema"),
        ({"environment": dict}, "dict is not an Environment"),
        ({"environment": 3}, "3 is not an Environment"),
        ({"engine": "http://x"}, "engine='http://x': give an engine"),
        ({"max_turns": 0}, "max_turns=0: Input should be greater than 0"),
        ({"max_turns": True}, "max_turns=True: Input should be a valid integer"),
        ({"timeout": "1m"}, "timeout='1m': Input should be a valid number"),
        ({"retries": -1}, "retries=-1"),
        ({"temperature": float("nan")}, "temperature=nan"),
        ({"sampling": {"model": "x"}}, "sampling cannot hold 'model'"),
        ({"on_limit": "guess"}, "on_limit='guess': Input should be 'stop' or 'answer'"),
        ({"hooks": Hooks()}, "hooks=.*an instance of Sequence"),
        ({"hooks": [print]}, "hooks=.*an instance of Hooks"),
        ({"recorder": 3}, "recorder=3: Input should be callable or Input should be 'auto'"),
    ],
)
def test_bad_agents(options, message):
    with pytest.raises(BadInput, match=message) as told:
        Agent(**{"name": "a", **options})
    assert told.value.param in {*options, "tools"}


@pytest.mark.parametrize(
    ("given", "run_id"), [("\ud800", None), (7, None), ("x", "a b"), ("x", "x" * 201), ("x", "a/b")]
)
async def test_bad_inputs(given, run_id):
    with pytest.raises(BadInput):
        await agent(script("ok")).run(given, run_id=run_id)


async def test_tags_and_sessions_in_the_wrong_form():
    wrong: tuple[Any, ...] = ("night", [1])
    for tags in wrong:
        with pytest.raises(BadInput, match=r"tags=.*give a list of texts"):
            await agent(script("ok")).run("x", tags=tags)
    with pytest.raises(BadInput, match="session=3: give a session"):
        await agent(script("ok")).run("x", session=3)  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", [str, Path])
async def test_a_session_may_be_the_path_of_a_file(tmp_path, kind):
    path = kind(tmp_path / "ada.jsonl")
    await agent(script("Hello Ada.")).run("I am Ada.", session=path)
    run = await agent(script("Ada.")).run("Who am I?", session=path)
    said = [message["content"] for message in run.trajectory.messages if message["role"] == "user"]
    assert said == ["I am Ada.", "Who am I?"] and run.tags == ["session:ada"]
