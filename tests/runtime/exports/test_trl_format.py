"""TRL's formats, read by `datasets` and by TRL's own functions with a real chat template."""

import json
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput
from cray_agents.records import Run
from cray_agents.runtime.datasets.demonstrations import Renderer
from cray_agents.runtime.exports.export_format import Written, line_of
from cray_agents.runtime.store.run_conversation import conversation_of
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model
from tests.support.exports.example_runs import LINE_FORMATS, chat, made, stated_losses

TRL = LINE_FORMATS["trl"].write_run
COMPLETION = LINE_FORMATS["trl-prompt-completion"].write_run
PREFERENCE = LINE_FORMATS["trl-preference"].write_pair

#: The losses of each run beyond conversation_only, or what its error says.
EXPECTED: dict[str, set[str] | str] = {
    "calc": set(),
    "parallel": set(),
    "mangled": {"tool_arguments"},
    "endless": set(),  # all is there, the unanswered end too
    "mute": "has no message of the assistant",
    "history": {"weights"},
    "thinking": set(),
    "many": {"other_calls"},
    "completions": {"completions"},
    "token_prompt": "content has a part of type 'int'",
    "builtin": {"other_tools"},
    "image": "content has a part of type 'image_url'",
    "parts": {"text_parts"},
    "refusal": {"message_fields"},
    "weights": {"weights"},
    "developer": {"developer_role"},
    "named": set(),
    "orphan": "which no message asked for",
    "redacted": {"redacted"},
    "unicode": set(),
}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    directory = tmp_path_factory.mktemp("trl") / "model"
    shape = ModelShape(vocabulary=300, hidden=32, layers=1, heads=1, kv_heads=1)
    make_seed_model(directory, seed=0, corpus=["What is 47 + 385?"], shape=shape)
    return directory


@pytest.fixture(scope="module")
def tokenizer(model: Path) -> Any:
    from transformers import AutoTokenizer  # long to import, for one test process of several

    return AutoTokenizer.from_pretrained(model)


def rendered(record: dict[str, Any], tokenizer: Any) -> dict[str, str]:
    from trl.data_utils import is_conversational, maybe_apply_chat_template

    assert is_conversational(record)
    tools = json.loads(record["tools"]) if isinstance(record["tools"], str) else record["tools"]
    return maybe_apply_chat_template(record, tokenizer, tools=tools)  # type: ignore[no-any-return]


def loaded(path: Path, runs: list[Run], written: list[Written]) -> Any:
    import datasets

    records = [(run, w.records[0]) for run, w in zip(runs, written, strict=True)]
    path.write_bytes(b"\n".join(line_of(run, record) for run, record in records))
    return datasets.load_dataset(
        "json", data_files=str(path), split="train", cache_dir=str(path.parent / "cache")
    )


def test_losses_are_stated_and_errors_name_the_run(runs: dict[str, Run]) -> None:
    assert list(stated_losses(TRL, runs, EXPECTED))


def test_datasets_loads_the_lines_as_they_are(runs: dict[str, Run], tmp_path: Path) -> None:
    names = [name for name, expected in EXPECTED.items() if isinstance(expected, set)]
    written = [TRL(runs[name]) for name in names]
    read = loaded(tmp_path / "trl.jsonl", [runs[name] for name in names], written)
    assert read.to_list() == [each.records[0] for each in written]  # no null filled in


def test_from_list_takes_runs_with_and_without_tools(runs: dict[str, Run]) -> None:
    import datasets

    records = [TRL(runs[name]).records[0] for name in ("unicode", "calc")]
    read = datasets.Dataset.from_list(records)
    assert read["tools"] == [None, records[1]["tools"]]


def test_the_template_renders_what_is_trained_on_here(
    runs: dict[str, Run], model: Path, tokenizer: Any
) -> None:
    """TRL's text has the tokens that demonstrations.py gives the same conversation."""
    for name in ("calc", "told", "parallel"):
        (record,) = TRL(runs[name]).records
        told = conversation_of(runs[name])
        (sample,) = Renderer(model).samples(told.messages, told.tools)
        ours = list(sample.input_ids)
        tokens = tokenizer(rendered(record, tokenizer)["text"])["input_ids"]
        assert tokens[: len(ours)] == ours, name
        assert tokenizer.decode(tokens[len(ours) :]) == "\n"


def test_reasoning_stays(runs: dict[str, Run]) -> None:
    assert TRL(runs["thinking"]).records[0]["messages"][-1] == {
        "role": "assistant",
        "content": "So.",
        "reasoning_content": "I think.",
    }


def test_arguments_are_objects_and_tools_json(runs: dict[str, Run]) -> None:
    (record,) = TRL(runs["calc"]).records
    call = record["messages"][2]
    assert call["content"] == ""
    assert call["tool_calls"][0]["function"]["arguments"] == {"expression": "47 + 385"}
    assert json.loads(record["tools"])[0]["function"]["name"] == "calculator"
    assert TRL(runs["unicode"]).records[0]["tools"] is None


def test_a_completion_is_the_last_answer(
    runs: dict[str, Run], tmp_path: Path, tokenizer: Any
) -> None:
    names = ["calc", "lazy", "thinking"]
    written = [COMPLETION(runs[name]) for name in names]
    read = loaded(tmp_path / "p.jsonl", [runs[name] for name in names], written)
    assert [row["completion"][0]["content"] for row in read] == [
        "It is 432.",
        "Some number.",
        "So.",
    ]
    texts = rendered(read[0], tokenizer)
    assert texts["completion"] == "It is 432.<|im_end|>\n"
    assert texts["prompt"].endswith("<|im_start|>tool\n432<|im_end|>\n<|im_start|>assistant\n")
    assert written[0].losses == ("conversation_only", "earlier_turns")
    assert written[1].losses == ("conversation_only",)


def test_a_completion_needs_a_question() -> None:
    answer = chat("x", "y")[1:]
    system = [{"role": "system", "content": "s"}]
    for messages in (answer, system + answer):
        with pytest.raises(BadInput, match="hold no question before the last answer"):
            COMPLETION(made(messages=messages))


def test_an_answer_of_weight_0_before_the_completion_is_no_loss(runs: dict[str, Run]) -> None:
    assert COMPLETION(runs["weights"]).losses == ("conversation_only", "earlier_turns")
    assert COMPLETION(runs["history"]).losses == ("conversation_only", "earlier_turns")


def test_a_preference_is_the_first_answers_that_differ(
    runs: dict[str, Run], tmp_path: Path, tokenizer: Any
) -> None:
    pairs = [(runs["calc"], runs["wrong"]), (runs["calc"], runs["lazy"])]
    written = [PREFERENCE(better, worse) for better, worse in pairs]
    cut = ("after_the_difference", "conversation_only")
    assert [each.losses for each in written] == [cut[1:], cut]  # results of tools are not learned
    read = loaded(tmp_path / "d.jsonl", [better for better, _ in pairs], written)
    assert [len(row["prompt"]) for row in read] == [4, 2]
    assert [message["role"] for message in read[1]["chosen"]] == ["assistant"]
    texts = rendered(read[0], tokenizer)
    assert texts["chosen"] == "It is 432.<|im_end|>\n"
    assert texts["rejected"] == "It is 431.<|im_end|>\n"
    assert texts["prompt"].endswith("432<|im_end|>\n<|im_start|>assistant\n")


def test_trl_finds_the_same_prompt(runs: dict[str, Run]) -> None:
    from trl.data_utils import extract_prompt

    (record,) = PREFERENCE(runs["calc"], runs["lazy"]).records
    whole = {side: record["prompt"] + record[side] for side in ("chosen", "rejected")}
    assert extract_prompt(whole) == {
        name: record[name] for name in ("prompt", "chosen", "rejected")
    }


def test_a_difference_in_reasoning_alone_is_one() -> None:
    better, worse = chat("x", "y"), chat("x", "y")
    better[1]["reasoning"], worse[1]["reasoning"] = "good", "bad"
    (record,), _ = PREFERENCE(made(messages=better), made("run-worse", messages=worse))
    assert record["chosen"][0]["reasoning_content"] == "good"
    with pytest.raises(BadInput, match="say the same"):
        PREFERENCE(made(messages=better), made("run-worse", messages=better))
