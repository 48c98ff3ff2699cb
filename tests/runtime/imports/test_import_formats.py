"""Import formats: records of each become runs, and bad records are named."""

import copy
import json
import random
from pathlib import Path
from typing import Any

import pytest
from openai.types.chat import ChatCompletionMessage

from cray_agents.errors import BadInput
from cray_agents.records import ModelCall, Run
from cray_agents.runtime.imports import FORMATS, Importing
from cray_agents.runtime.imports.import_file import BadRecords, read_file
from cray_agents.runtime.store.assembly import assemble
from cray_agents.runtime.store.segments.line_format import event_in, line_of
from cray_agents.tasks.record_source import HEAD, RecordSource

TOOL = {
    "type": "function",
    "function": {"name": "add", "parameters": {"type": "object", "properties": {}}},
}
CHAT: dict[str, Any] = {
    "messages": [
        {"role": "system", "content": "Add."},
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "3", "weight": 0},
        {"role": "user", "content": "no"},
        {
            "role": "assistant",
            "tool_calls": [
                {"id": "c1", "type": "function", "function": {"name": "add", "arguments": "{}"}}
            ],
        },
        {"role": "tool", "tool_call_id": "c1", "content": "2"},
        {"role": "assistant", "content": "2"},
    ],
    "tools": [TOOL],
    "parallel_tool_calls": False,
    "source": "book",
}
PREFERENCE: dict[str, Any] = {
    "input": {"messages": [{"role": "user", "content": "Tea?"}], "tools": []},
    "preferred_output": [{"role": "assistant", "content": "Yes, please."}],
    "non_preferred_output": [{"role": "assistant", "content": "No."}],
}
SHAREGPT: dict[str, Any] = {
    "id": "x1",
    "system": "Add.",
    "conversations": [
        {"from": "human", "value": "1+1?"},
        {"from": "gpt", "value": "Let me see."},
        {"from": "function_call", "value": '{"name": "add", "arguments": {"a": 1}}'},
        {"from": "observation", "value": "2"},
        {"from": "gpt", "value": "2"},
        {"from": "human", "value": "thanks"},
    ],
    "tools": json.dumps([TOOL["function"]]),
}
ATIF: dict[str, Any] = {
    "schema_version": "ATIF-v1.4",
    "session_id": "s",
    "agent": {"name": "terminus", "version": "2", "model_name": "m", "tool_definitions": [TOOL]},
    "steps": [
        {"step_id": 1, "source": "user", "message": "1+1?", "timestamp": "2025-10-16T14:30:00Z"},
        {
            "step_id": 2,
            "source": "agent",
            "message": "",
            "timestamp": "2025-10-16T14:30:01Z",
            "reasoning_content": "hm",
            "tool_calls": [{"tool_call_id": "t", "function_name": "add", "arguments": {"a": 1}}],
            "observation": {"results": [{"source_call_id": "t", "content": "2"}]},
            "metrics": {
                "prompt_tokens": 2,
                "prompt_token_ids": [1, 2],
                "completion_token_ids": [3],
                "logprobs": [-0.5],
            },
        },
        {"step_id": 3, "source": "agent", "message": "2", "is_copied_context": True},
    ],
}


def made(value: Any, form: str, importing: Importing | None = None) -> list[Run]:
    """The runs of a record, as the store would tell them."""
    runs = []
    for events in FORMATS[form](value, importing or Importing()):
        described = [event.body for event in events if event.kind == "run"]
        calls = [event.body for event in events if event.kind == "call"]
        assert all(event.run_id == events[0].run_id for event in events)
        runs.append(assemble(events[0].run_id, described[0], calls, []))
    return runs


def test_an_openai_chat() -> None:
    (run,) = made(CHAT, "openai")
    assert (run.input, run.output, run.stop_reason) == ("1+1?", "2", "completed")
    assert run.trajectory.messages == CHAT["messages"]  # weights too
    assert run.trajectory.tools == [TOOL]
    assert (run.imported, run.agent, run.model) == ("openai", "imported", "imported")
    assert run.task is not None
    assert (run.task.input, run.task.split) == ("1+1?", "train")
    assert run.task.metadata == {"source": "book"}
    assert run.calls == [] and run.rewards == []


def test_a_preference_is_two_runs_of_one_task() -> None:
    better, worse = made(PREFERENCE, "openai")
    assert better.task == worse.task and better.id != worse.id
    assert [(r.name, r.value, r.source) for r in better.rewards] == [("preferred", 1.0, "import")]
    assert worse.reward == 0.0
    assert (better.output, worse.output) == ("Yes, please.", "No.")
    longer = copy.deepcopy(PREFERENCE)
    longer["input"]["messages"] += [
        {"role": "assistant", "content": "Hm?"},
        {"role": "user", "content": "Now?"},
    ]
    (other, _) = made(longer, "openai")
    assert other.task is not None and better.task is not None
    assert other.task.id != better.task.id  # another prompt makes other pairs
    assert other.task.input == better.task.input
    assert [m.get("weight") for m in other.trajectory.messages] == [None, 0, None, None]


def test_what_is_said_of_all() -> None:
    given = Importing(("a", "b"), loop="l", split="holdout", agent="clerk", reward=0.5)
    (run,) = made(CHAT, "openai", given)
    (plain,) = made(CHAT, "openai")
    assert run.task is not None and run.task.split == "holdout"
    assert (run.tags, run.loop, run.agent, run.reward) == (["a", "b"], "l", "clerk", 0.5)
    assert run.id == plain.id
    names = [[e.id for e in next(FORMATS["openai"](CHAT, g))] for g in (given, given, Importing())]
    assert names[0] == names[1] != names[2]


def test_what_the_openai_clients_types_write_is_taken_in() -> None:
    """Its answers have annotations, refusal, audio and function_call, with nothing in them."""
    answer = {"role": "assistant", "content": "2", "annotations": [], "refusal": None}
    asked = {"role": "user", "content": "1+1?"}
    message = ChatCompletionMessage.model_validate(answer).model_dump()
    assert message["annotations"] == [] and message["refusal"] is None
    (run,) = made({"messages": [asked, message]}, "openai")
    (plain,) = made({"messages": [asked, {"role": "assistant", "content": "2"}]}, "openai")
    assert run.id == plain.id
    cited = {**answer, "annotations": [{"type": "url_citation"}]}
    with pytest.raises(BadInput, match="annotations"):
        made({"messages": [asked, cited]}, "openai")
    preference = {"input": {"messages": [asked]}, "preferred_output": [message],
                  "non_preferred_output": [{**message, "content": "3"}]}  # fmt: skip
    assert len(made(preference, "openai")) == 2


def test_arguments_may_be_objects_as_our_trl_export_writes_them() -> None:
    def calling(arguments: Any) -> dict[str, Any]:
        function = {"name": "add", "arguments": arguments}
        return {
            "messages": [
                {"role": "user", "content": "1+1?"},
                {"role": "assistant", "content": None, "tool_calls": [
                    {"id": "c", "type": "function", "function": function}]},
                {"role": "tool", "tool_call_id": "c", "content": "2"},
                {"role": "assistant", "content": "2"},
            ]
        }  # fmt: skip

    (run,) = made(calling({"a": "ä", "b": 1}), "openai")
    call = run.trajectory.messages[1]["tool_calls"][0]
    assert json.loads(call["function"]["arguments"]) == {"a": "ä", "b": 1}
    (same,) = made(calling('{"a": "ä", "b": 1}'), "openai")
    assert same.id == run.id
    with pytest.raises(BadInput, match="arguments must be a JSON object"):
        made(calling([1]), "openai")


def test_nulls_are_as_if_absent() -> None:
    record = copy.deepcopy(CHAT) | {"parallel_tool_calls": None}
    record["messages"][4]["tool_calls"][0]["type"] = None
    record["tools"][0]["function"]["parameters"] = None
    (run,) = made(record, "openai")
    assert "type" not in run.trajectory.messages[4]["tool_calls"][0]


def test_sharegpt() -> None:
    (run,) = made(SHAREGPT, "sharegpt")
    assert [m["role"] for m in run.trajectory.messages] == [
        "system", "user", "assistant", "tool", "assistant", "user",
    ]  # fmt: skip
    asked = run.trajectory.messages[2]
    assert asked["content"] == "Let me see."
    assert json.loads(asked["tool_calls"][0]["function"]["arguments"]) == {"a": 1}
    assert run.trajectory.messages[3]["tool_call_id"] == asked["tool_calls"][0]["id"]
    assert run.trajectory.tools == [TOOL]
    assert (run.input, run.output) == ("1+1?", "2")
    assert run.task is not None and run.task.metadata == {"id": "x1"}


def test_sharegpts_relatives_are_the_same_run() -> None:
    turns = [
        {"role": "user", "content": "1+1?"},
        {"role": "assistant", "content": "Let me see."},
        {"role": "function_call", "content": '[{"name": "add", "arguments": "{\\"a\\": 1}"}]'},
        {"role": "tool", "content": "2"},
        {"role": "assistant", "content": "2"},
        {"role": "user", "content": "thanks"},
    ]
    system = {"role": "system", "content": "Add."}
    others: list[dict[str, Any]] = [
        {"messages": [system, *turns], "tools": [TOOL]},
        {"conversation": turns, "system": "Add.", "tools": [TOOL["function"]]},
        {
            "conversations": [{"from": t["role"], "value": t["content"]} for t in [system, *turns]],
            "tools": json.dumps([TOOL]),
        },
    ]
    ids = {made(other, "sharegpt")[0].id for other in [SHAREGPT, *others]}
    assert len(ids) == 1


ASK = {"from": "human", "value": "q"}
CALL = {"from": "function_call", "value": '{"name": "f", "arguments": {}}'}
TOOL_CALLS = {"from": "gpt", "tool_calls": [{"id": "c", "function": {"name": "f"}}]}


@pytest.mark.parametrize("turn", [{"from": "gpt", "value": "a"}, CALL, TOOL_CALLS])
@pytest.mark.parametrize(
    ("flags", "weight"),
    [
        ({"weight": 0}, 0), ({"train": False}, 0), ({"loss": 0}, 0), ({"mask": True}, 0),
        ({"weight": 1}, 1), ({"train": True, "mask": False}, 1), ({"loss": None}, None),
        ({"loss": 0.5}, r"conversations\[1\]\.loss must be 0 or 1"),
        ({"train": True, "mask": True}, "to be trained on and not to be"),
        ({"reasoning_content": "hm"}, r"conversations\[1\] has a field 'reasoning_content'"),
        ({"images": ["x.png"]}, "'images'"), ({"images": []}, None),
    ],
)  # fmt: skip
def test_what_sharegpt_says_of_a_turn_is_honoured_or_refused(
    turn: dict[str, Any], flags: dict[str, Any], weight: int | str | None
) -> None:
    result = ASK if turn.get("value") == "a" else {"from": "tool", "value": "r"}
    record = {"conversations": [ASK, turn | flags, result, {"from": "gpt", "value": "end"}]}
    if isinstance(weight, str):
        with pytest.raises(BadInput, match=weight):
            made(record, "sharegpt")
        return
    (run,) = made(record, "sharegpt")
    assert run.trajectory.messages[1].get("weight") == weight


def test_sharegpts_other_turns_are_never_trained_on_and_images_are_refused() -> None:
    end = {"from": "gpt", "value": "a"}
    (run,) = made({"conversations": [{**ASK, "mask": True, "name": "Bo"}, end]}, "sharegpt")
    assert run.trajectory.messages[0] == {"role": "user", "content": "q", "name": "Bo"}
    for record, words in (
        ({"conversations": [{**ASK, "train": True}, end]}, "only the assistant's turns"),
        ({"conversations": [ASK, end], "images": ["a.png"]}, "images cannot be imported"),
        ({"conversations": [ASK, end, {**CALL, "weight": 0}, end]}, "joins the turn before it"),
    ):
        with pytest.raises(BadInput, match=words):
            made(record, "sharegpt")


BIG = 123456789012345678901234567890


@pytest.mark.parametrize("array", [False, True], ids=["lines", "array"])
@pytest.mark.parametrize("form", ["openai", "sharegpt", "atif", "jsonl"])
def test_numbers_keep_their_digits(form: str, array: bool, tmp_path: Path) -> None:
    records: dict[str, Any] = {
        "openai": copy.deepcopy(CHAT) | {"n": BIG},
        "sharegpt": {"conversations": [ASK, TOOL_CALLS, {"from": "tool", "value": "r"},
                                       {"from": "gpt", "value": "a"}], "n": BIG},
        "atif": copy.deepcopy(ATIF),
        "jsonl": made(SHAREGPT | {"n": BIG}, "sharegpt")[0].model_dump(mode="json"),
    }  # fmt: skip
    records["openai"]["messages"][4]["tool_calls"][0]["function"]["arguments"] = {"n": BIG}
    records["sharegpt"]["conversations"][1] = copy.deepcopy(TOOL_CALLS)
    records["sharegpt"]["conversations"][1]["tool_calls"][0]["function"]["arguments"] = {"n": BIG}
    records["atif"]["steps"][1]["tool_calls"][0]["arguments"] = {"n": BIG}
    path = tmp_path / "f.jsonl"
    path.write_text(json.dumps([records[form]]) if array else lines(records[form]))
    ((*_, event),) = read_file(path, form)
    text = line_of(event).decode()
    assert text.count(str(BIG)) == (1 if form == "jsonl" else 2)
    assert event_in(line_of(event))["body"] == event.body


def test_an_atif_document_with_tokens() -> None:
    (run,) = made(ATIF, "atif")
    assert (run.agent, run.model, run.imported) == ("terminus", "m", "atif")
    assert (run.input, run.output) == ("1+1?", "2")
    assert run.started == 1760625000.0 and run.seconds == 1.0
    assert [m["role"] for m in run.trajectory.messages] == [
        "user",
        "assistant",
        "tool",
        "assistant",
    ]
    assert run.trajectory.messages[3]["weight"] == 0  # copied context
    (turn,) = run.trajectory.turns
    assert turn.call is not None
    assert turn.call.messages == run.trajectory.messages[:1]
    assert turn.call.message["reasoning"] == "hm"
    assert (turn.call.prompt_token_ids, turn.call.token_ids) == ([1, 2], [3])
    assert turn.call.logprobs == [-0.5] and turn.call.model == "m"
    assert turn.call.tools == [TOOL]
    assert [(c.name, c.result) for c in turn.tool_calls] == [("add", "2")]
    assert run.task is not None and run.task.metadata["session_id"] == "s"


def test_copied_context_is_no_turn_of_an_atif_document() -> None:
    document = copy.deepcopy(ATIF)
    document["steps"][1]["is_copied_context"] = True
    document["steps"][2] |= {
        "is_copied_context": False,
        "metrics": {"prompt_token_ids": [1, 2, 3], "completion_token_ids": [4], "logprobs": [-1.0]},
    }
    (run,) = made(document, "atif")
    assert [m.get("weight") for m in run.trajectory.messages] == [None, 0, None, None]
    assert [call.token_ids for call in run.calls] == [[4]]
    assert run.calls[0].messages == run.trajectory.messages[:3]


def test_atif_subagents_and_agents_without_tools() -> None:
    document = copy.deepcopy(ATIF)
    document["steps"] = [
        {"step_id": 1, "source": "user", "message": [{"type": "text", "text": "hi"}]},
        {
            "step_id": 2,
            "source": "agent",
            "message": "ls",
            "observation": {"results": [{"content": "a.txt"}]},
            "metrics": {"completion_token_ids": [1], "prompt_token_ids": [2]},
            "llm_call_count": 2,
        },
    ]
    subagent = copy.deepcopy(ATIF) | {"trajectory_id": "sub"}
    del subagent["schema_version"]
    document["subagent_trajectories"] = [subagent]
    run, sub = made(document, "atif")
    assert run.trajectory.messages[-1] == {"role": "user", "content": "a.txt"}
    assert run.trajectory.turns == []  # tokens of two calls are not one call's
    assert run.input == "hi" and sub.calls[0].token_ids == [3]


def test_the_same_words_with_other_tokens_are_another_run() -> None:
    other = copy.deepcopy(ATIF)
    other["steps"][1]["metrics"]["completion_token_ids"] = [4]
    ids = [made(document, "atif")[0].id for document in (ATIF, copy.deepcopy(ATIF), other)]
    assert ids[0] == ids[1] != ids[2]


@pytest.mark.parametrize(
    ("form", "value", "words"),
    [
        ("openai", [1], "not a JSON object"),
        ("openai", {}, "messages must be a list"),
        ("openai", {**CHAT, "messages": [{"role": []}]}, "role must be one of"),
        ("openai", {**CHAT, "messages": CHAT["messages"][:2]}, "last message must be"),
        ("openai", {**PREFERENCE, "non_preferred_output": []}, "non_preferred_output"),
        ("openai", {**PREFERENCE, "input": {"messages": []}}, r"input\.messages"),
        ("openai", {**PREFERENCE, "non_preferred_output": PREFERENCE["preferred_output"]}, "same"),
        ("sharegpt", {}, "no list of turns"),
        ("sharegpt", {"conversations": [{"from": "narrator", "value": ""}]}, "narrator"),
        ("sharegpt", {"conversations": [{"from": "gpt", "value": 1}]}, "must be a text"),
        ("sharegpt", {"conversations": [{"from": "human", "value": "x"}]}, "no turn of the assis"),
        ("sharegpt", {"conversations": [{"from": "tool", "value": "x"}]}, "answers no call"),
        ("sharegpt", {"conversations": [{"from": "function_call", "value": "x"}]}, "is no JSON"),
        ("sharegpt", {**SHAREGPT, "tools": "{"}, "tools: '{' is no JSON"),
        ("atif", {}, "schema_version is None"),
        ("atif", {**ATIF, "schema_version": "ATIF-v2.0"}, "v2.0"),
        ("atif", {**ATIF, "steps": []}, "steps"),
        ("atif", {**ATIF, "agent": None}, "agent is not"),
        ("atif", {**ATIF, "steps": [{"source": "robot"}]}, r"steps\[0\]\.source"),
        (
            "atif",
            {**ATIF, "steps": [{"source": "user", "message": [{"type": "audio"}]}]},
            "'audio'",
        ),
        ("atif", {**ATIF, "steps": [{"source": "user", "timestamp": "noon"}]}, "noon"),
        (
            "atif",
            {
                **ATIF,
                "steps": [
                    {
                        "source": "agent",
                        "message": "x",
                        "metrics": {"completion_token_ids": [1], "logprobs": [0.0, 1.0]},
                    }
                ],
            },
            "2 logprobs of 1 tokens",
        ),
        ("jsonl", {"id": "r"}, "agent: Field required"),
    ],
)
def test_what_is_wrong_is_named(form: str, value: Any, words: str) -> None:
    with pytest.raises(BadInput, match=words):
        list(FORMATS[form](value, Importing()))


def odd(value: Any, picked: random.Random) -> Any:
    """A value with something in it replaced, removed or doubled."""
    places: list[tuple[Any, Any]] = []

    def walk(at: Any) -> None:
        for key in list(at) if isinstance(at, dict) else range(len(at)):
            places.append((at, key))
            if isinstance(at[key], dict | list):
                walk(at[key])

    value = copy.deepcopy(value)
    walk(value)
    for _ in range(picked.randint(1, 2)):
        holder, key = picked.choice(places)
        new = [None, [], {}, "", "x", 0, -1.5, True, [None], [{}], {"": 1}, "\u2028", [[1]], 10**30]
        if isinstance(holder, dict) and key in holder and picked.random() < 0.2:
            del holder[key]
        elif isinstance(holder, dict) or key < len(holder):
            holder[key] = picked.choice(new)
    return value


@pytest.mark.slow
@pytest.mark.parametrize("form", ["openai", "sharegpt", "atif", "jsonl"])
def test_whatever_is_in_a_record_it_is_a_run_or_bad_input(form: str) -> None:
    picked = random.Random(form)
    (run,) = made(ATIF, "atif")
    good: dict[str, list[Any]] = {
        "openai": [CHAT, PREFERENCE],
        "sharegpt": [SHAREGPT],
        "atif": [ATIF],
        "jsonl": [run.model_dump(mode="json")],
    }
    outcomes = {"run": 0, "bad": 0}
    for _ in range(1500):
        value = odd(picked.choice(good[form]), picked)
        try:
            for each in made(value, form):
                Run.model_validate_json(each.model_dump_json())
            outcomes["run"] += 1
        except BadInput as error:
            assert str(error)
            outcomes["bad"] += 1
    assert min(outcomes.values()) > 50, outcomes  # both kinds came up


def lines(*values: Any) -> str:
    return "".join(json.dumps(value) + "\n" for value in values)


def read(path: Path, form: str = "openai") -> list[str]:
    return [events[-1].run_id for events in read_file(path, form)]


@pytest.mark.parametrize("suffix", ["", ".zst", ".gz"])
@pytest.mark.parametrize("kind", ["lines", "array", "pretty array", "marked", "spaced"])
def test_lines_and_arrays_are_read_alike(tmp_path: Path, kind: str, suffix: str) -> None:
    import gzip

    import zstandard

    two = [CHAT, PREFERENCE]
    text = {
        "lines": lines(*two),
        "array": json.dumps(two),
        "pretty array": json.dumps(two, indent=2),
        "marked": "\ufeff" + lines(*two),
        "spaced": "\n\n  " + lines(two[0]) + "\n\n" + json.dumps(two[1]),
    }[kind]
    data = text.encode()
    data = zstandard.compress(data) if suffix == ".zst" else data
    data = gzip.compress(data) if suffix == ".gz" else data
    path = tmp_path / f"file.jsonl{suffix}"
    path.write_bytes(data)
    plain = [made(each, "openai") for each in two]
    assert read(path) == [run.id for runs in plain for run in runs]


def test_one_document_over_many_lines(tmp_path: Path) -> None:
    path = tmp_path / "trajectory.json"
    for text in (json.dumps(ATIF, indent=2), json.dumps(ATIF), json.dumps([ATIF])):
        path.write_text(text)
        assert read(path, "atif") == [made(ATIF, "atif")[0].id]


def test_bad_lines_are_told_and_the_others_read(tmp_path: Path) -> None:
    path = tmp_path / "f.jsonl"
    path.write_text(lines(CHAT, {}) + "{]\n\n" + lines(PREFERENCE, 3))
    found: list[Any] = []
    with pytest.raises(BadRecords) as raised:
        for events in read_file(path, "openai"):
            found.append(events)
    assert len(found) == 3
    told = str(raised.value).split("\n")
    assert [line.split(": ")[:2] for line in told] == [[str(path), f"line {n}"] for n in (2, 3, 6)]
    path.write_text(lines(*[{} for _ in range(50)]))
    with pytest.raises(BadRecords) as raised:
        read(path)
    assert len(str(raised.value).split("\n")) == 21


def test_bad_arrays_and_files(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(json.dumps([CHAT, {}])[:-1])
    with pytest.raises(BadRecords, match=r"(?s)item 2: .*item 3: not valid JSON"):
        read(path)
    for text, words in {"": "no records", "\n \n": "no records", "{\n": "several lines"}.items():
        path.write_text(text)
        with pytest.raises(BadInput, match=words):
            read(path)
    with pytest.raises(BadInput, match=r"missing\.json: No such file"):
        read(tmp_path / "missing.json")
    (tmp_path / "f.zst").write_bytes(b"not zstd at all")
    with pytest.raises(BadInput, match=r"cannot read .*f\.zst"):
        read(tmp_path / "f.zst")
    with pytest.raises(BadInput, match="'csv' is not known; valid: openai"):
        read(path, "csv")


def test_what_cannot_be_stored_is_bad_input(tmp_path: Path) -> None:
    path = tmp_path / "f.json"
    path.write_text(
        f'[{{"messages": {json.dumps(CHAT["messages"])}, "x": {"[" * 300}{"]" * 300}}}]'
    )
    with pytest.raises(BadRecords, match=r"item 1: not valid JSON: .* nested more than 200"):
        read(path)


@pytest.mark.parametrize(
    ("text", "count", "words"),
    [
        ("[]", 0, ""),
        ("[1] \n\n", 1, ""),
        ('["a,]\\\\", {"b": [",", "\\"]"]}]', 2, ""),
        ("[1, 2,]", 3, "item 3: not valid JSON"),
        ("[,]", 1, "item 1: not valid JSON"),
        ("[1 2]", 1, "item 1: not valid JSON"),
        ("[1, {2]", 2, "item 2: not valid JSON"),
        ("[1}", 1, "item 1: not valid JSON"),
        ("[1] 2", 2, "item 2: not valid JSON: there is more"),
        ("[1", 2, "item 2: not valid JSON: the array is not closed"),
        ('["a', 1, "item 1: not valid JSON"),
    ],
)
def test_items_of_an_array(text: str, count: int, words: str, tmp_path: Path) -> None:
    """Also where a block of the file ends at any of their characters."""
    path = tmp_path / "f.json"
    for spaces in (0, *range(HEAD - len(text), HEAD)):
        path.write_text(f"[{' ' * spaces}{text[1:]}")
        records = list(RecordSource(path).records())
        assert len(records) == count
        told = [f"item {record.number}: {record.problem}" for record in records if record.problem]
        assert "".join(told).startswith(words) and bool(told) == bool(words)


@pytest.mark.slow
def test_a_large_array_is_not_held(tmp_path: Path) -> None:
    import tracemalloc

    path = tmp_path / "f.json"
    turn = {"from": "gpt", "value": "x" * 20_000}
    with path.open("w") as file:
        for number in range(1500):
            asked = {"from": "human", "value": f"{number}"}
            file.write("[" if number == 0 else ",")
            file.write(json.dumps({"conversations": [asked, turn]}))
        file.write("]")
    tracemalloc.start()
    count = sum(1 for _ in read_file(path, "sharegpt"))
    _, peak = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    assert count == 1500
    assert peak < 8 * 2**20 < path.stat().st_size


def test_whole_records_come_back_whole() -> None:
    (run,) = made(ATIF, "atif")
    run = run.model_copy(update={"imported": None, "tags": ["t"]})
    record = run.model_dump(mode="json")  # what our own export writes
    (back,) = made(record, "jsonl")
    assert back == run
    (other,) = made(record, "jsonl", Importing(("u",), loop="l"))
    assert (other.tags, other.loop) == (["t", "u"], "l")
    record["trajectory"]["turns"][0]["call"]["run_id"] = "another"
    with pytest.raises(BadInput, match="'another'"):
        made(record, "jsonl")
    assert ModelCall.model_validate(run.calls[0].model_dump())
