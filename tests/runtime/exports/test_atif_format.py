"""ATIF: every document passes the validator, and nothing of the run is missing from it."""

from typing import Any

import atif
import orjson
import pytest

from cray_agents.errors import BadInput
from cray_agents.records import Run
from cray_agents.runtime.exports.export_format import line_of
from cray_agents.runtime.exports.formats.atif import ATIF as FORMAT
from tests.support.exports.example_runs import chat, made

ATIF = FORMAT.write_run

#: Runs that this format cannot carry, and why.
REFUSED = {
    "audio": r"messages\[0\].content has a part of type 'input_audio', neither text nor image",
    "infinite": "rewards hold an infinity",
    "surrogate": "has no form in JSON",
}
#: What those that it carries lose.
LOSSES = {"image": ("message_fields",)}


def document(run: Run) -> dict[str, Any]:
    """The run's document, which the validator took as it is."""
    (record,) = ATIF(run).records
    read = orjson.loads(line_of(run, record))
    told = atif.Trajectory.model_validate(read, strict=True)
    assert told.model_dump(mode="json", exclude_unset=True) == read  # no field was passed over
    return dict(read)


@pytest.mark.slow
def test_every_run_is_valid_or_refused(runs: dict[str, Run]) -> None:
    for name, run in runs.items():
        if name in REFUSED:
            with pytest.raises(BadInput, match=REFUSED[name]) as caught:
                document(run)
            assert caught.value.code == "unsupported_export"
            assert run.id in str(caught.value)
            continue
        read = document(run)
        assert read["schema_version"] == "ATIF-v1.7", name
        assert [step["step_id"] for step in read["steps"]] == list(range(1, len(read["steps"]) + 1))
        assert ATIF(run).losses == LOSSES.get(name, ()), name


def test_a_recorded_run_is_told_with_its_exact_tokens(runs: dict[str, Run]) -> None:
    run = runs["calc"]
    read = document(run)
    assert read["session_id"] == read["trajectory_id"] == "run-calc"
    assert read["agent"]["name"] == "clerk"
    assert read["agent"]["model_name"] == "m@1"
    assert read["agent"]["tool_definitions"] == run.calls[0].tools
    assert [step["source"] for step in read["steps"]] == ["system", "user", "agent", "agent"]
    for step, call in zip(read["steps"][2:], run.calls, strict=True):
        assert step["metrics"] == {
            "prompt_tokens": len(call.prompt_token_ids),
            "completion_tokens": len(call.token_ids),
            "prompt_token_ids": call.prompt_token_ids,
            "completion_token_ids": call.token_ids,
            "logprobs": call.logprobs,
        }
        assert step["model_name"] == call.model
        assert step["llm_call_count"] == 1
        assert step["timestamp"].endswith("Z")
        about = step["extra"]
        assert (about["call_id"], about["sampling"]) == (call.id, call.sampling)
        assert "messages" not in about  # what it read is what the document tells
    asked = read["steps"][2]
    assert asked["message"] == ""
    assert asked["tool_calls"][0]["arguments"] == {"expression": "47 + 385"}
    assert asked["tool_calls"][0]["extra"]["seconds"] >= 0
    assert asked["observation"] == {"results": [{"content": "432", "source_call_id": "call_0"}]}


def test_what_the_schema_has_no_field_for_is_in_extra(runs: dict[str, Run]) -> None:
    run = runs["calc"]
    about = document(run)["extra"]
    assert about["reward"] == 1.0
    assert about["rewards"] == [run.rewards[0].model_dump()]
    assert about["tags"] == ["a", "b:c"]
    assert about["task"] == run.task.model_dump() if run.task else False
    assert (about["stop_reason"], about["output"]) == ("completed", "It is 432.")
    assert (about["loop"], about["iteration"]) == ("l", 1)
    failed = document(runs["broken"])["extra"]
    assert failed["error"]["type"] == "EngineError"
    assert failed["stop_reason"] == "error"
    assert document(runs["redacted"])["extra"]["redacted"] == [{"kind": "email", "count": 2}]
    assert document(runs["imported"])["extra"]["imported"] == "openai"


def test_arguments_that_are_no_object_are_kept_as_they_were_written(runs: dict[str, Run]) -> None:
    (call,) = document(runs["mangled"])["steps"][2]["tool_calls"]
    assert call["arguments"] == {"unparsed": '{"expression": '}  # as the model was told
    assert call["extra"]["arguments"] == '{"expression": '
    assert "bad arguments" in call["extra"]["error"]
    wild = document(runs["wild"])["steps"][1]
    assert [call["arguments"] for call in wild["tool_calls"]] == [{}, {}, {}]
    assert [call["extra"]["arguments"] for call in wild["tool_calls"]] == ["not json", "[1]", None]
    sources = [result["source_call_id"] for result in wild["observation"]["results"]]
    assert sources == ["c", "a", "b"]


def test_history_is_marked_as_copied(runs: dict[str, Run]) -> None:
    marked = [step.get("is_copied_context") for step in document(runs["history"])["steps"]]
    assert marked == [None, True, True, None, None]
    assert not any("is_copied_context" in step for step in document(runs["told"])["steps"])


def test_a_result_that_nothing_asked_for_has_a_step_of_its_own(runs: dict[str, Run]) -> None:
    step = document(runs["orphan"])["steps"][1]
    assert step["source"] == "system"
    assert step["observation"]["results"] == [
        {"content": "c", "extra": {"role": "tool", "tool_call_id": "c"}}
    ]


def test_what_a_call_read_is_told_where_it_read_something_else(runs: dict[str, Run]) -> None:
    steps = document(runs["trimmed"])["steps"]
    assert "messages" not in steps[1]["extra"]
    assert steps[3]["extra"]["messages"] == [{"role": "user", "content": "short"}]


def test_images_and_reasoning_and_roles(runs: dict[str, Run]) -> None:
    (part,) = document(runs["image"])["steps"][0]["message"]
    source = {"media_type": "image/png", "path": "https://a.test/i.png"}
    assert part == {"type": "image", "source": source}
    assert document(runs["thinking"])["steps"][-1]["reasoning_content"] == "I think."
    developer = document(runs["developer"])["steps"][0]
    assert (developer["source"], developer["extra"]) == ("system", {"role": "developer"})
    assert document(runs["refusal"])["steps"][1]["extra"] == {"refusal": "No."}
    assert document(runs["weights"])["steps"][1]["extra"] == {"weight": 0}
    assert document(runs["named"])["steps"][0]["extra"] == {"name": "Ann"}
    assert document(runs["token_prompt"])["steps"][0]["message"] == "[5,6]"


def test_images_without_a_known_type_are_refused() -> None:
    def image(url: str) -> Run:
        parts = [{"type": "image_url", "image_url": url}]
        return made(messages=[{"role": "user", "content": parts}, *chat("x", "y")[1:]])

    assert document(image("data:image/gif;base64,QQ=="))["steps"][0]["message"][0]["source"] == {
        "media_type": "image/gif",
        "path": "data:image/gif;base64,QQ==",
    }
    with pytest.raises(BadInput, match="not known to be JPEG, PNG, GIF or WebP"):
        document(image("https://a.test/picture"))


def test_tools_of_other_apis_are_there_in_both_shapes(runs: dict[str, Run]) -> None:
    agent = document(runs["anthropic"])["agent"]
    assert agent["tool_definitions"][0]["function"]["parameters"] == {"type": "object"}
    assert agent["extra"]["tools"][0]["input_schema"] == {"type": "object"}
    steps = document(runs["tools_changed"])["steps"]
    assert steps[3]["extra"]["tools"] == []
