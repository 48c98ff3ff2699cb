"""OpenAI's files: each line is one that the fine-tuning API reads, as the same conversation."""

import json
from pathlib import Path
from typing import Any

import orjson
import pytest
from hypothesis import given
from hypothesis import strategies as st
from openai.types.chat import ChatCompletionMessageParam
from pydantic import TypeAdapter

from cray_agents.errors import BadInput
from cray_agents.records import Run, Trajectory, Turn
from cray_agents.runtime.exports.export_format import line_of
from cray_agents.runtime.fine_tuning.examples import Example, read_examples
from tests.support.exports.example_runs import (
    HISTORY,
    LINE_FORMATS,
    called,
    chat,
    made,
    stated_losses,
)

OPENAI = LINE_FORMATS["openai"].write_run
PREFERENCE = LINE_FORMATS["openai-preference"].write_pair
MESSAGES: TypeAdapter[Any] = TypeAdapter(list[ChatCompletionMessageParam])

#: The losses of each run beyond conversation_only, or what its error says.
EXPECTED: dict[str, set[str] | str] = {
    "calc": set(),
    "wrong": set(),
    "lazy": set(),
    "parallel": set(),
    "mangled": {"tool_arguments"},
    "refused": set(),
    "endless": {"unanswered_end"},
    "broken": {"unanswered_end"},
    "mute": "has no message of the assistant",
    "stopped": set(),
    "history": set(),
    "thinking": {"reasoning"},
    "empty": set(),
    "again": set(),
    "told": set(),
    "many": {"other_calls"},
    "nothing": "has no message of the assistant",
    "no_messages": set(),
    "no_answer": "has no message of the assistant",
    "completions": {"completions"},
    "token_prompt": r"messages\[0\].content has a part of type 'int'",
    "responses": set(),
    "anthropic": set(),
    "builtin": {"other_tools"},
    "tools_changed": set(),
    "image": r"messages\[0\].content has a part of type 'image_url'",
    "audio": r"messages\[0\].content has a part of type 'input_audio'",
    "parts": set(),
    "wild": {"tool_arguments"},
    "refusal": {"message_fields"},
    "untold": set(),
    "weights": set(),
    "developer": set(),
    "named": set(),
    "orphan": r"messages\[1\] answers the call 'c', which no message asked for",
    "late": set(),
    "strange": r"messages\[0\].role is None",
    "cancelled": set(),
    "lost_call": set(),
    "trimmed": set(),
    "two": {"other_calls"},
    "redacted": {"redacted"},
    "infinite": set(),
    "unicode": set(),
    "imported": set(),
}


def read(path: Path, *lines: bytes) -> list[Example]:
    path.write_bytes(b"\n".join(lines))
    return read_examples(path)


def line(run: Run) -> dict[str, Any]:
    return OPENAI(run).records[0]


@pytest.mark.slow
def test_the_door_reads_every_line_and_losses_are_stated(
    runs: dict[str, Run], tmp_path: Path
) -> None:
    assert set(EXPECTED) == set(runs) - {"surrogate"}
    for run, records in stated_losses(OPENAI, runs, EXPECTED):
        (example,) = read(tmp_path / "x.jsonl", line_of(run, records[0]))
        assert [m["role"] for m in example.messages] == [m["role"] for m in records[0]["messages"]]
        MESSAGES.validate_python(records[0]["messages"], strict=True)


def test_a_recorded_run_is_told_as_it_was(runs: dict[str, Run]) -> None:
    record = line(runs["calc"])
    system, user, call, result, answer = record["messages"]
    assert system == {"role": "system", "content": "Use the tools."}
    assert user == {"role": "user", "content": "What is 47 + 385? |calc"}
    arguments = '{"expression": "47 + 385"}'
    function = {"name": "calculator", "arguments": arguments}
    asked = {"id": "call_0", "type": "function", "function": function}
    assert call == {"role": "assistant", "tool_calls": [asked]}
    assert result == {"role": "tool", "tool_call_id": "call_0", "content": "432"}
    assert answer == {"role": "assistant", "content": "It is 432."}
    names = [tool["function"]["name"] for tool in record["tools"]]
    assert names == ["calculator", "refuse", "table", "forever"]
    assert record["parallel_tool_calls"] is True


def test_text_beside_tool_calls_and_what_tools_told_stay(runs: dict[str, Run]) -> None:
    messages = line(runs["parallel"])["messages"]
    assert messages[2]["content"] == "Both at once."
    assert [m["content"] for m in messages[3:5]] == ['[{"row":0}]', '[{"row":0},{"row":1}]']
    refused = line(runs["refused"])["messages"][3]
    assert refused["content"] == "Error: refused: no"


def test_arguments_are_always_an_object(runs: dict[str, Run]) -> None:
    def arguments(name: str, place: int) -> list[Any]:
        calls = line(runs[name])["messages"][place]["tool_calls"]
        return [json.loads(call["function"]["arguments"]) for call in calls]

    assert arguments("mangled", 2) == [{"unparsed": '{"expression": '}]
    assert arguments("wild", 1) == [{"unparsed": "not json"}, {"unparsed": "[1]"}, {}]


def test_answers_of_the_history_are_not_trained_on(runs: dict[str, Run]) -> None:
    messages = line(runs["history"])["messages"]
    assert messages[1:3] == [HISTORY[0], {**HISTORY[1], "weight": 0}]
    assert messages[-1] == {"role": "assistant", "content": "Later."}
    assert [m.get("weight") for m in line(runs["weights"])["messages"]] == [None, 0, None, None]


def test_where_a_call_is_lost_all_answers_count_as_the_run_s() -> None:
    messages = chat("x", "y", "z", "a")
    call = called(messages[:3], messages[3])
    turns = [Turn(call_id="gone"), Turn(call_id="c", call=call)]
    run = made(trajectory=Trajectory(messages=messages, turns=turns))
    assert line(run)["messages"] == messages


def test_nothing_to_train_on_is_an_error() -> None:
    messages = chat("x", "y")
    messages[1]["weight"] = 0
    with pytest.raises(BadInput, match="hold no answer of this run to train on"):
        OPENAI(made(messages=messages))


def test_tools_of_other_apis_get_openai_s_shape(runs: dict[str, Run]) -> None:
    assert line(runs["responses"])["tools"] == [
        {
            "type": "function",
            "function": {"name": "f", "parameters": {"type": "object", "properties": {}}},
        }
    ]
    assert line(runs["anthropic"])["tools"] == [
        {
            "type": "function",
            "function": {"name": "g", "description": "d", "parameters": {"type": "object"}},
        }
    ]
    assert "tools" not in line(runs["builtin"])
    before, after = OPENAI(runs["tools_changed"]).records
    assert [t["function"]["name"] for t in before["tools"]] == ["f"] and "tools" not in after
    assert [m.get("weight") for m in after["messages"]] == [None, 0, None, None]


def test_a_preference_is_the_first_answers_that_differ(runs: dict[str, Run]) -> None:
    (record,), losses = PREFERENCE(runs["calc"], runs["wrong"])
    told = [message["role"] for message in record["input"]["messages"]]
    assert told == ["system", "user", "assistant", "tool"]  # ids of calls do not count
    assert record["preferred_output"] == [{"role": "assistant", "content": "It is 432."}]
    assert record["non_preferred_output"] == [{"role": "assistant", "content": "It is 431."}]
    assert record["input"]["parallel_tool_calls"] is True
    assert len(record["input"]["tools"]) == 4
    assert losses == ("conversation_only",)


def test_what_follows_a_difference_is_a_stated_loss(runs: dict[str, Run]) -> None:
    (record,), losses = PREFERENCE(runs["calc"], runs["lazy"])
    assert [m["role"] for m in record["input"]["messages"]] == ["system", "user"]
    assert record["preferred_output"][0]["tool_calls"]
    assert record["non_preferred_output"] == [{"role": "assistant", "content": "Some number."}]
    assert losses == ("after_the_difference", "conversation_only")


@pytest.mark.parametrize(
    ("better", "worse", "problem"),
    [
        (chat("x", "y"), chat("x", "y"), "say the same, as far as both go"),
        (chat("x", "y", "z", "a"), chat("x", "y"), "say the same, as far as both go"),
        (chat("x", "y"), chat("z", "y"), r"first differ in a message that is no answer \(user"),
        (chat("", "y")[1:], chat("", "z")[1:], "begin with an answer"),
        (chat("x", "y"), chat("x"), "has no message of the assistant"),
    ],
)
def test_runs_that_no_answer_parts_are_no_pair(better: Any, worse: Any, problem: str) -> None:
    with pytest.raises(BadInput, match=problem) as caught:
        PREFERENCE(made(messages=better), made("run-worse", messages=worse))
    assert caught.value.code == "unsupported_export"


def test_runs_with_other_tools_are_no_pair(runs: dict[str, Run]) -> None:
    with pytest.raises(BadInput, match="were given different tools"):
        PREFERENCE(runs["responses"], runs["anthropic"])


TEXTS = st.text(st.characters(codec="utf-8"), max_size=20)
CALLS = st.lists(
    st.builds(
        lambda call_id, name, arguments: {
            "id": call_id,
            "type": "function",
            "function": {"name": name, "arguments": arguments},
        },
        st.sampled_from(["a", "b", ""]),
        TEXTS,
        TEXTS | st.sampled_from(["{}", '{"a": 1}', "[]", "null", '{"a": NaN}', None]),
    ),
    max_size=3,
)
ANSWERS = st.builds(
    lambda content, calls: {"role": "assistant", "content": content, "tool_calls": calls},
    TEXTS | st.none(),
    CALLS,
)
OTHERS = st.builds(
    lambda role, content: {"role": role, "content": content},
    st.sampled_from(["system", "developer", "user"]),
    TEXTS | st.lists(st.builds(lambda text: {"type": "text", "text": text}, TEXTS), min_size=1),
)


@given(st.lists(ANSWERS | OTHERS, max_size=6), ANSWERS)
def test_whatever_was_said_the_door_reads_it(
    tmp_path_factory: pytest.TempPathFactory, messages: list[Any], last: Any
) -> None:
    run = made(messages=[*messages, last])
    path = tmp_path_factory.getbasetemp() / "any.jsonl"
    (example,) = read(path, line_of(run, line(run)))
    assert [m.get("content") or "" for m in example.messages] == [
        m["content"] or "" for m in run.trajectory.messages
    ]
    assert orjson.loads(path.read_bytes())["messages"] == example.messages
