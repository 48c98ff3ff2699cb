"""ShareGPT: the turns of its readers, and every loss is stated."""

import json
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.records import Run
from tests.support.exports.example_runs import LINE_FORMATS, chat, made, stated_losses

SHAREGPT = LINE_FORMATS["sharegpt"].write_run

#: The losses of each run beyond conversation_only, or what its error says.
EXPECTED: dict[str, set[str] | str] = {
    "calc": {"tool_call_ids"},
    "wrong": {"tool_call_ids"},
    "lazy": set(),
    "parallel": {"tool_call_ids", "split_turns", "call_text"},
    "mangled": {"tool_call_ids", "tool_arguments"},
    "refused": {"tool_call_ids"},
    "endless": {"tool_call_ids", "unanswered_end"},
    "broken": {"tool_call_ids", "unanswered_end"},
    "mute": "has no message of the assistant",
    "stopped": {"tool_call_ids"},
    "history": {"weights"},
    "thinking": {"reasoning"},
    "empty": set(),
    "again": set(),
    "told": {"tool_call_ids"},
    "many": {"other_calls"},
    "completions": {"completions"},
    "token_prompt": "content has a part of type 'int'",
    "builtin": {"other_tools"},
    "tools_changed": {"weights"},
    "image": "content has a part of type 'image_url'",
    "parts": {"text_parts"},
    "wild": {"tool_call_ids", "tool_arguments", "split_turns"},
    "refusal": {"message_fields"},
    "weights": {"weights"},
    "developer": {"developer_role"},
    "named": {"message_fields"},
    "late": {"tool_call_ids", "not_alternating"},
    "cancelled": {"tool_call_ids"},
    "two": {"other_calls"},
    "redacted": {"redacted"},
    "unicode": set(),
}


def turns(run: Run) -> list[tuple[str, str]]:
    (record,) = SHAREGPT(run).records
    return [(turn["from"], turn["value"]) for turn in record["conversations"]]


def test_losses_are_stated_and_errors_name_the_run(runs: dict[str, Run]) -> None:
    assert list(stated_losses(SHAREGPT, runs, EXPECTED))


def test_a_recorded_run_alternates_as_readers_want_it(runs: dict[str, Run]) -> None:
    said = turns(runs["calc"])
    assert said == [
        ("system", "Use the tools."),
        ("human", "What is 47 + 385? |calc"),
        ("function_call", '{"name":"calculator","arguments":{"expression": "47 + 385"}}'),
        ("observation", "432"),
        ("gpt", "It is 432."),
    ]
    record = SHAREGPT(runs["calc"]).records[0]
    assert record["id"] == "run-calc"
    assert [tool["name"] for tool in json.loads(record["tools"])][:2] == ["calculator", "refuse"]
    assert "tools" not in SHAREGPT(made(messages=chat("x", "y"))).records[0]


def test_calls_made_at_once_are_each_told_with_their_result(runs: dict[str, Run]) -> None:
    said = turns(runs["parallel"])[2:]
    assert said == [
        ("function_call", '{"name":"table","arguments":{"rows": 1}}'),
        ("observation", '[{"row":0}]'),
        ("function_call", '{"name":"table","arguments":{"rows": 2}}'),
        ("observation", '[{"row":0},{"row":1}]'),
        ("gpt", "Done: ä ✓ 𝔘."),
    ]
    results = [value for kind, value in turns(runs["wild"]) if kind == "observation"]
    assert results == ["a", "b", "c"]  # by the calls, not as they came


def test_a_record_ends_where_turns_do_not_alternate(runs: dict[str, Run]) -> None:
    """The model went on before its call was answered: the format cannot tell that."""
    assert [kind for kind, _ in turns(runs["late"])] == ["human", "function_call"]
    greeted: Any = [{"role": "assistant", "content": "Hello!"}, *chat("x", "y")]
    run = made(messages=greeted)
    assert [value for _, value in turns(run)] == ["x", "y"]
    assert "not_alternating" in SHAREGPT(run).losses
    with pytest.raises(BadInput, match="no question with an answer"):
        SHAREGPT(made(messages=greeted[:1]))


def test_every_record_is_one_that_llama_factory_keeps(runs: dict[str, Run]) -> None:
    """The rule of SharegptDatasetConverter in llamafactory 0.9.5, data/converter.py: without the
    system's turn, each other turn is human or observation, those between are gpt or function_call,
    the number is even; a call's value is JSON. Else the record is dropped, with a warning."""
    asked: Any = {"type": "function", "function": {"name": "f", "arguments": "{}"}}
    calls: Any = [{**asked, "id": "1"}, {**asked, "id": "2"}]
    odd: list[Any] = [
        {"role": "user", "content": "a"},
        {"role": "user", "content": "b"},
        {"role": "assistant", "content": "Let me see.", "tool_calls": calls},
        {"role": "tool", "tool_call_id": "1", "content": "one"},
        {"role": "assistant", "content": "c"},
        {"role": "assistant", "content": "d"},
    ]
    some = {**runs, "odd": made(messages=odd), "twice": made(messages=[*odd[:2], *odd[4:]])}
    kept = 0
    for name, run in some.items():
        try:
            records = SHAREGPT(run).records
        except BadInput:  # told above
            continue
        kept += len(records)
        for record in records:
            kinds = [turn["from"] for turn in record["conversations"]]
            kinds = kinds[kinds[0] == "system" :]
            assert kinds and len(kinds) % 2 == 0, name
            assert set(kinds[::2]) <= {"human", "observation"}, name
            assert set(kinds[1::2]) <= {"gpt", "function_call"}, name
            for turn in record["conversations"]:
                if turn["from"] == "function_call":
                    told = json.loads(turn["value"])
                    for call in told if isinstance(told, list) else [told]:
                        assert call.keys() == {"name", "arguments"}, name
    assert kept > 30
    assert turns(some["twice"]) == [("human", "a\n\nb"), ("gpt", "c\n\nd")]


def test_calls_of_the_same_id_get_their_own_results() -> None:
    call = {"id": "call_0", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    asks: Any = {"role": "assistant", "content": None, "tool_calls": [call, call]}
    results = [{"role": "tool", "tool_call_id": "call_0", "content": text} for text in "ab"]
    said = turns(made(messages=[*chat("x"), asks, *results, *chat("x", "y")[1:]]))
    assert [value for kind, value in said if kind == "observation"] == ["a", "b"]


def test_trl_knows_it_for_sharegpt(runs: dict[str, Run], tmp_path: Path) -> None:
    from trl.data_utils import is_conversational_from_value, maybe_convert_to_chatml

    (record,) = SHAREGPT(runs["calc"]).records
    assert is_conversational_from_value(record)
    messages = maybe_convert_to_chatml(record)["messages"]
    assert messages[-1] == {"role": "gpt", "content": "It is 432."}
