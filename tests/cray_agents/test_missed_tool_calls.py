"""Tool calls that a server did not parse: found, counted, told; and servers that take no tools."""

import json
import logging
from typing import Any

import pytest
from starlette.responses import JSONResponse

from cray_agents import Agent
from cray_agents.agent import ConstrainedEngine, OpenAIEngine
from cray_agents.agent.stream_events import RunEnded
from cray_agents.agent.tool import as_tool
from cray_agents.engines.scripted import tool_call
from cray_agents.engines.tool_calls import AutoEngine, unparsed_tool_call, with_tool_calls
from cray_agents.errors import EngineError
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.calculator import calculator

TOOLS = [as_tool(calculator).schema]
HERMES = '<tool_call>\n{"name": "calculator", "arguments": {"expression": "1"}}\n</tool_call>'
REFUSED = '"auto" tool choice requires --enable-auto-tool-choice and --tool-call-parser to be set'
# what vLLM 0.32 says


def said(text: str | None) -> dict[str, Any]:
    return {"role": "assistant", "content": text}


@pytest.mark.parametrize(
    "text",
    [
        HERMES,
        f"Let me see. {HERMES}",
        "<function=calculator>{}</function>",
        '<|python_tag|>{"name": "calculator", "parameters": {}}',
        '[TOOL_CALLS][{"name": "calculator", "arguments": {}}]',
        '[TOOL_CALLS]calculator{"expression": "1"}',
        "<tool_call>\n<function=calculator>\n<parameter=expression>\n1\n</parameter>",
        '{"name": "calculator", "parameters": {"expression": "1"}}',
        '[{"name": "calculator", "arguments": {}}]',
        'I use it:\n```json\n{"name": "calculator", "arguments": {}}\n```',
        '{"type": "function", "function": {"name": "calculator", "arguments": "{}"}}',
        '{"tool": "calculator", "args": {"expression": "1"}}',
        '[calculator(expression="1 + (2)")]',
        'calculator(expression="1")',
    ],
)
def test_what_was_meant_as_a_call(text):
    assert unparsed_tool_call(said(text), TOOLS)
    assert unparsed_tool_call(said(text), []) is None


@pytest.mark.parametrize(
    "text",
    [
        None,
        "",
        "432",
        "The calculator says 432.",
        "I would call calculator(expression='1'), but need not.",
        '{"name": "Ada", "arguments": {}}',
        '{"answer": 432}',
        '```json\n{"name": "calculator"}\n```',
        "[1, 2]",
        "sum(1, 2)",
    ],
)
def test_what_was_not(text):
    assert unparsed_tool_call(said(text), TOOLS) is None


@pytest.mark.parametrize(
    "text",
    [
        '<tool_call>\n{"name": "calculator", "arguments": {"e": "6 - {"e": 0}}\n</tool_call>',
        '<tool_call>{"name": "calculator", "arguments": {"expr',
        '[TOOL_CALLS][{"name": "calculator", }]',
        "[TOOL_CALLS]calculator{expression: 1}",
        "<function=calculator>{'expression': 1}</function>",
    ],
)
def test_a_models_broken_json_is_not_blamed_on_the_parser(text):
    assert unparsed_tool_call(said(text), TOOLS) is None


@pytest.mark.parametrize("arguments", ['{"expression": "1"}', "", '{"expression": ', "[1]"])
def test_what_the_parser_understood_is_not_blamed_on_it(arguments):
    function = {"name": "calculator", "arguments": arguments}
    message = {**said(None), "tool_calls": [{"id": "1", "function": function}]}
    assert unparsed_tool_call(message, TOOLS) is None


async def ask(agent: Agent, stream: bool) -> Any:
    if not stream:
        return await agent.run("go")
    *_, last = [event async for event in agent.stream("go")]
    assert isinstance(last, RunEnded)
    return last.run


def warnings(caplog: pytest.LogCaptureFixture) -> list[logging.LogRecord]:
    """What was told: beside it stands what asyncio says of tasks that other tests have left."""
    return [record for record in caplog.records if record.name == "cray_agents.engines.tool_calls"]


@pytest.mark.parametrize("stream", [False, True])
async def test_failures_are_counted_and_many_are_told_once(stream, caplog):
    script: list[Any] = [tool_call("calculator", expression="1"), "1", *[HERMES] * 4]
    agent = Agent("a", tools=[calculator], engine=ScriptedEngine(script))
    with caplog.at_level(logging.WARNING, "cray_agents.engines.tool_calls"):
        runs = [await ask(agent, stream) for _ in range(3)]
        assert not warnings(caplog)
        runs += [await ask(agent, stream) for _ in range(2)]
    assert agent.parser is not None
    assert (agent.parser.calls, agent.parser.failures, agent.parser.failed) == (1, 4, 0.8)
    (record,) = warnings(caplog)
    text = record.getMessage()
    assert "3 of 4 tool calls" in text and "--tool-call-parser" in text
    assert 'tool_calls="constrained"' in text and "<tool_call>" in text


async def test_copies_of_an_agent_share_what_was_found_out(caplog):
    engine = ScriptedEngine([HERMES] * 5)
    agent = Agent("a", model="m", tools=[calculator], engine=engine)
    with caplog.at_level(logging.WARNING, "cray_agents.engines.tool_calls"):
        for number in range(4):
            await agent.override(model=f"m@{number}", recorder=None).run("go")
    assert agent.parser is not None and agent.parser.failures == 4
    assert len(warnings(caplog)) == 1
    through = agent.through(engine)
    assert through.parser is agent.parser
    other = ScriptedEngine([HERMES])
    for anew in (
        agent.override(engine=other),
        agent.through(other),
        agent.override(base_url="http://127.0.0.1:1"),
        agent.override(model="another"),
    ):
        assert anew.parser is not None and anew.parser.failures == 0
    await agent.override(engine=other).run("go")
    assert agent.parser.failures == 4


async def test_what_a_server_refuses_is_not_asked_of_it_again_by_a_copy():
    def says(request: dict[str, Any]) -> Any:
        if request.get("tools"):
            return EngineError("it takes no tools", status=400)
        return '{"answer": "42"}'

    engine = ScriptedEngine(says)
    agent = Agent("a", tools=[calculator], engine=engine)
    runs = [await agent.override(temperature=heat).run("go") for heat in (0.1, 0.2)]
    assert [run.output for run in runs] == ["42", "42"]
    assert [bool(request.get("tools")) for request in engine.requests] == [True, False, False]

    def lists(request: dict[str, Any]) -> Any:
        refused = EngineError("no response_format here", status=400)
        return refused if "response_format" in request else "[42]"

    engine = ScriptedEngine(lists)
    agent = Agent("a", output_type=list[int], engine=engine)
    runs = [await agent.override(temperature=heat).run("go") for heat in (0.1, 0.2)]
    assert [run.output for run in runs] == [[42], [42]]
    asked = ["response_format" in request for request in engine.requests]
    assert asked == [True, False, False]


async def test_few_among_many_are_no_cause_for_alarm(caplog):
    script: list[Any] = [tool_call("calculator", expression="1"), "1"] * 40 + [HERMES] * 4
    agent = Agent("a", tools=[calculator], engine=ScriptedEngine(script))
    with caplog.at_level(logging.WARNING, "cray_agents.engines.tool_calls"):
        for _ in range(44):
            await agent.run("go")
    assert agent.parser is not None and agent.parser.failures == 4 and not warnings(caplog)


@pytest.mark.parametrize("stream", [False, True])
async def test_a_server_that_takes_no_tools_is_asked_under_a_schema(server, stream, caplog):
    replies = iter(['{"tool": "calculator", "arguments": {"expression": "6 * 7"}}',
                    '{"answer": "42"}'] * 2)  # fmt: skip
    server.gateway = False

    def answer(body: dict[str, Any]) -> Any:
        if body.get("tools"):
            return JSONResponse({"error": {"message": REFUSED, "type": "BadRequestError"}}, 400)
        whole = ScriptedEngine([next(replies)])
        return streamed(whole, body) if body.get("stream") else whole.chat(body)

    server.answer = answer
    agent = Agent("a", tools=[calculator], engine=OpenAIEngine(server.url))
    runs = [await ask(agent, stream) for _ in range(2)]
    assert [(run.output, run.error) for run in runs] == [("42", None)] * 2
    assert [run.trajectory.turns[0].tool_calls[0].result for run in runs] == [42, 42]
    assert sum(bool(body.get("tools")) for body in server.requests) <= 2  # with exact tokens or not
    (record,) = warnings(caplog)
    assert "takes no tools" in record.getMessage() and REFUSED in record.getMessage()


async def streamed(engine: ScriptedEngine, body: dict[str, Any]) -> Any:
    from starlette.responses import StreamingResponse

    async def lines() -> Any:
        async for chunk in engine.stream(body):
            yield f"data: {json.dumps(chunk)}\n\n"
        yield "data: [DONE]\n\n"

    return StreamingResponse(lines(), media_type="text/event-stream")


@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize(
    "error", [EngineError("no tools now", status=503), EngineError("too long", status=400)]
)
async def test_other_errors_stay_what_they_are(error, stream):
    engine = AutoEngine(ScriptedEngine([error, "x"]))
    run = await ask(Agent("a", tools=[calculator], engine=engine), stream)
    assert run.error is not None and run.error.message == str(error)
    assert engine.server.tools


def test_the_modes():
    engine = ScriptedEngine()
    assert with_tool_calls(engine, "native") is engine
    assert isinstance(with_tool_calls(engine, "constrained"), ConstrainedEngine)
    assert isinstance(with_tool_calls(engine, "auto"), AutoEngine)


DEEP = ("[" * 3000, "[" * 3000 + "]" * 3000, "<tool_call>" + '{"a":' * 3000, "```\n" + "[" * 1200)


@pytest.mark.parametrize("text", DEEP, ids=range(len(DEEP)))
@pytest.mark.parametrize("tool_calls", ["auto", "constrained"])
async def test_text_of_a_thousand_brackets_is_text(text: str, tool_calls: Any) -> None:
    agent = Agent(
        "a", engine=ScriptedEngine(lambda *_: text), tools=[calculator], tool_calls=tool_calls
    )
    run = await agent.run("hi")
    assert (run.stop_reason, run.output) == ("completed", text)
    ended = [event async for event in agent.stream("hi")][-1]
    assert ended.run.output == text


@pytest.mark.parametrize("depth", [100, 600, 3000])
async def test_arguments_of_a_thousand_brackets_are_the_models_mistake(depth: int) -> None:
    arguments = '{"expression":' * depth + "1" + "}" * depth
    function = {"name": "calculator", "arguments": arguments}
    call = {"id": "c", "type": "function", "function": function}
    deep = {"role": "assistant", "content": None, "tool_calls": [call]}
    agent = Agent("a", engine=ScriptedEngine([deep, "done"]), tools=[calculator])
    run = await agent.run("hi")
    assert (run.stop_reason, run.output) == ("completed", "done")
