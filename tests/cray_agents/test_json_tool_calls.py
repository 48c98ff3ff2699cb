"""Tool calls as JSON under a schema: what the server is asked, and what its answer becomes."""

import json
import time
from typing import Any, Literal

import jsonschema
import pytest
from pydantic import BaseModel

from cray_agents import Agent, tool
from cray_agents.agent import ConstrainedEngine
from cray_agents.agent.stream_events import RunEnded, TextDelta
from cray_agents.agent.tool import as_tool
from cray_agents.engines.chat_completions import Assembly, tidy
from cray_agents.engines.tool_calls import (
    constrain_request,
    describe_tools,
    parse_reply,
    reply_schema,
)
from cray_agents.errors import EngineError
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.calculator import calculator

ASK: dict[str, Any] = {
    "model": "m",
    "messages": [{"role": "user", "content": "What is 47 + 385?"}],
    "tools": [as_tool(calculator).schema],
}
CALL = '{ "tool":"calculator", "arguments": {"expression": "47 + 385"}}'


class Node(BaseModel):
    value: int
    next: "Node | None" = None


@tool
def insert(node: Node, where: Literal["left", "right"] = "left") -> str:
    """Insert a node."""
    return f"{node.value} {where}"


# ---- the request


def fits(schema: dict[str, Any], value: Any) -> bool:
    return jsonschema.Draft202012Validator(schema).is_valid(value)


def test_the_schema_takes_a_call_of_a_tool_or_an_answer_and_no_more():
    schema = reply_schema(ASK | {"tools": [as_tool(t).schema for t in (calculator, insert)]})
    jsonschema.Draft202012Validator.check_schema(schema)
    nested = {"node": {"value": 1, "next": {"value": 2}}, "where": "right"}
    assert fits(schema, json.loads(CALL)) and fits(schema, {"answer": "432"})
    assert fits(schema, {"tool": "insert", "arguments": nested})
    for wrong in [
        {"tool": "delete", "arguments": {}},
        {"tool": "calculator", "arguments": {}},
        {"tool": "calculator", "arguments": {"expression": 1}},
        {"tool": "insert", "arguments": {"node": {"value": 1, "next": {"value": "x"}}}},
        {"tool": "insert", "arguments": {"node": {"value": 1}, "where": "up"}},
        {"answer": 432},
        {"answer": "432", "tool": "calculator"},
        "432",
    ]:
        assert not fits(schema, wrong), wrong


@pytest.mark.parametrize(
    ("choice", "call", "answer"),
    [
        ("auto", True, True),
        ("none", False, True),
        ("required", True, False),
        ({"type": "function", "function": {"name": "calculator"}}, True, False),
        ({"type": "function", "function": {"name": "insert"}}, False, False),
    ],
)
def test_tool_choice(choice, call, answer):
    both = [as_tool(t).schema for t in (calculator, insert)]
    schema = reply_schema(ASK | {"tools": both, "tool_choice": choice})
    assert (fits(schema, json.loads(CALL)), fits(schema, {"answer": "1"})) == (call, answer)


def test_an_answer_has_the_form_that_was_asked_for():
    form = {"type": "json_schema", "json_schema": {"name": "n", "schema": Node.model_json_schema()}}
    schema = reply_schema(ASK | {"response_format": form})
    assert fits(schema, {"answer": {"value": 1, "next": {"value": 2}}})
    assert not fits(schema, {"answer": {"value": 1, "next": {"value": "x"}}})
    assert not fits(schema, {"answer": "432"})
    anything = reply_schema(ASK | {"response_format": {"type": "json_object"}})
    assert fits(anything, {"answer": {}}) and not fits(anything, {"answer": "432"})


def test_the_server_is_asked_for_no_tools_but_told_of_them():
    given = ASK | {"tool_choice": "auto", "parallel_tool_calls": False, "temperature": 0.5}
    asked = constrain_request(given)
    assert {"tools", "tool_choice", "parallel_tool_calls"} & asked.keys() == set()
    assert (asked["model"], asked["temperature"]) == ("m", 0.5)
    assert asked["response_format"]["type"] == "json_schema"
    note, question = asked["messages"]
    assert note == {"role": "system", "content": describe_tools(ASK["tools"])}
    assert "- calculator: " in note["content"] and '"expression"' in note["content"]
    assert question == ASK["messages"][0]
    system = {"role": "system", "content": "Be brief."}
    first, *rest = constrain_request(given | {"messages": [system, question]})["messages"]
    assert first["content"] == f"Be brief.\n\n{note['content']}" and rest == [question]


def test_calls_of_other_servers_are_rendered_as_the_model_would_write_them_here():
    calls = [
        {"id": str(n), "function": {"name": "calculator", "arguments": f'{{"expression": "{n}"}}'}}
        for n in (1, 2)
    ]
    messages = [
        {"role": "user", "content": "1 and 2?"},
        {"role": "assistant", "content": None, "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "tool", "tool_call_id": "2", "content": "two"},
        {"role": "assistant", "content": 'It is "so".'},
    ]
    assert constrain_request(ASK | {"messages": messages})["messages"][2:] == [
        {
            "role": "assistant",
            "content": '{"tool": "calculator", "arguments": {"expression": "1"}}\n'
            '{"tool": "calculator", "arguments": {"expression": "2"}}',
        },
        {"role": "user", "content": "Result of calculator: one\nResult of calculator: two"},
        {"role": "assistant", "content": '{"answer": "It is \\"so\\"."}'},
    ]


# ---- the answer


@pytest.mark.parametrize(
    ("text", "calls", "content"),
    [
        (CALL, [("calculator", {"expression": "47 + 385"})], None),
        ('{"answer": "It is \\"432\\" \\ud83d\\ude00."}', [], 'It is "432" 😀.'),
        ('{"answer": {"value": 1}}', [], '{"value": 1}'),
        ('{"answer": 432}', [], "432"),
        ('{"answer": ""}', [], ""),
        ('```json\n{"answer": "fenced"}\n```', [], "fenced"),
        ('{"answer": "first"} and then it went on', [], "first"),
        ('{"answer": "cut off in the mid', [], "cut off in the mid"),
    ],
)
async def test_what_was_written_becomes_a_call_or_text(text, calls, content):
    engine = ConstrainedEngine(ScriptedEngine(lambda request: text))
    whole = (await engine.chat(ASK))["choices"][0]
    message = tidy(whole["message"])
    said = [
        (call["function"]["name"], json.loads(call["function"]["arguments"]))
        for call in message.get("tool_calls", ())
    ]
    assert (said, message["content"], message["written"]) == (calls, content, text)
    assert whole["finish_reason"] == ("tool_calls" if calls else "stop")
    assert bytes(whole["token_ids"]).decode() == text
    assembly, deltas = Assembly(), []
    async for chunk in engine.stream(ASK):
        deltas.append(assembly.add(chunk))
    streamed = assembly.completion()["choices"][0]
    assert tidy(streamed["message"]) == message
    assert streamed["finish_reason"] == whole["finish_reason"]
    assert streamed["token_ids"] == whole["token_ids"]
    assert "".join(deltas) == (content or "")


@pytest.mark.parametrize("text", ["432", "", '{"tool": "calculator", "argum', "[1]", "{}"])
async def test_what_is_neither_stays_text(text):
    engine = ConstrainedEngine(ScriptedEngine([text, text]))
    message = (await engine.chat(ASK))["choices"][0]["message"]
    assert (message["content"], "written" in message) == (text, False)
    assembly = Assembly()
    async for chunk in engine.stream(ASK):
        assembly.add(chunk)
    assert (assembly.completion()["choices"][0]["message"]["content"] or "") == text


def test_calls_are_told_apart_by_their_place():
    one = parse_reply(CALL, ASK)["tool_calls"][0]["id"]
    later = parse_reply(CALL, ASK | {"messages": ASK["messages"] * 2})["tool_calls"][0]["id"]
    assert one != later and one == parse_reply(CALL, ASK)["tool_calls"][0]["id"]


async def test_an_answers_text_streams_as_it_is_written():
    engine = ConstrainedEngine(ScriptedEngine(['{"answer": "a text of more than one piece"}']))
    agent = Agent("a", tools=[calculator], engine=engine)
    events = [event async for event in agent.stream("go")]
    deltas = [event.text for event in events if isinstance(event, TextDelta)]
    assert len(deltas) > 2 and "".join(deltas) == "a text of more than one piece"
    assert isinstance(events[-1], RunEnded)
    assert events[-1].run.output == "a text of more than one piece"


async def test_a_run_reads_its_own_words_again():
    inner = ScriptedEngine([CALL, '{"tool": "nothing", "arguments": {}}', '{"answer": 432}'])
    engine = ConstrainedEngine(inner)
    run = await Agent("a", tools=[calculator], output_type=int, engine=engine).run("47 + 385?")
    assert (run.output, run.error) == (432, None)
    (right,), (wrong,) = (turn.tool_calls for turn in run.trajectory.turns[:2])
    assert right.result == 432 and "no tool 'nothing'" in (wrong.error or "")
    last = inner.requests[2]["messages"]
    assert [message["role"] for message in last[1:]] == [
        "user", "assistant", "user", "assistant", "user"
    ]  # fmt: skip
    assert last[2] == {"role": "assistant", "content": CALL}  # its very words, blanks and all
    assert last[3]["content"] == "Result of calculator: 432"
    assert last[5]["content"].startswith("Result of nothing: Error: there is no tool")
    assert all("written" not in message for message in last)
    assert bytes(run.calls[0].token_ids).decode() == CALL


async def test_without_tools_nothing_changes():
    inner = ScriptedEngine(["plain", "plain"])
    engine = ConstrainedEngine(inner)
    asked = {key: value for key, value in ASK.items() if key != "tools"}
    assert (await engine.chat(asked))["choices"][0]["message"]["content"] == "plain"
    assert len([chunk async for chunk in engine.stream(asked)]) > 1
    assert inner.requests == [asked, asked]


@pytest.mark.parametrize("stream", [False, True])
async def test_an_odd_answer_is_an_error_of_the_engine(stream):
    class Odd(ScriptedEngine):
        async def chat(self, request: dict[str, Any]) -> dict[str, Any]:
            return {"choices": [{"message": {"content": [1]}}]}

        async def stream(self, request: dict[str, Any]) -> Any:
            yield {"choices": [{"index": 0, "delta": {"content": [1]}}]}

    engine = ConstrainedEngine(Odd())
    with pytest.raises(EngineError, match="no known shape"):
        await engine.chat(ASK) if not stream else [chunk async for chunk in engine.stream(ASK)]


async def test_a_stream_that_breaks_off_is_no_answer():
    class Short(ScriptedEngine):
        async def stream(self, request: dict[str, Any]) -> Any:
            yield {"choices": [{"index": 0, "delta": {"content": '{"answer": "x'}}]}

    with pytest.raises(EngineError, match="in the middle"):
        [chunk async for chunk in ConstrainedEngine(Short()).stream(ASK)]


def test_blanks_without_end_are_read_at_once() -> None:
    """A regular expression took 7 s for 2,000 of them."""
    begun = time.process_time()
    for text in ("```" + "\n" * 50_000, "```json" + " \n" * 50_000 + "```", "`" * 50_000):
        assert parse_reply(text, {"messages": []}) == {"content": text}
    assert time.process_time() - begun < 2


@pytest.mark.parametrize("text", ['```json\n{"answer": "2"}\n```', '```\n{"answer": "2"}```\n '])
def test_an_answer_in_a_code_block(text: str) -> None:
    assert parse_reply(text, {"messages": []})["content"] == "2"
