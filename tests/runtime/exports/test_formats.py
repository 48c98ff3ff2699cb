"""All formats: whatever stands in a run, it is written or refused by name, and never changed."""

import json
from typing import Any

import atif
import orjson
import pytest
from google.protobuf import json_format
from hypothesis import given, settings
from hypothesis import strategies as st
from opentelemetry.proto.trace.v1.trace_pb2 import TracesData

from cray_agents.errors import BadInput
from cray_agents.records import Run, Task, ToolCall, Trajectory, Turn
from cray_agents.runtime.exports.export_files import TableFormat
from cray_agents.runtime.exports.export_format import LOSSES, LineFormat, Written, line_of
from cray_agents.runtime.exports.exporter import FORMATS
from cray_agents.runtime.exports.sources import run_of_demonstration
from tests.support.exports.example_runs import LINE_FORMATS, called, chat, made

BIG = 123456789012345678901234567890
DEEP = '{"a":' * 70 + "1" + "}" * 70
ANY = st.recursive(
    st.none() | st.booleans() | st.integers(-5, 2**70) | st.floats() | st.text(max_size=3),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=3), inner),
    max_leaves=5,
)
FUNCTION = st.fixed_dictionaries(
    {},
    optional={
        "name": st.just("f") | ANY,
        "arguments": st.sampled_from(["{}", DEEP, '{"a": "\\ud83d"}', '{"a": NaN}', "{", "7"])
        | ANY,
    },
)
TOOL_CALL = st.fixed_dictionaries(
    {}, optional={"id": st.sampled_from(["a", "b"]) | ANY, "type": ANY, "function": FUNCTION | ANY}
)
PART = st.fixed_dictionaries(
    {},
    optional={
        "type": st.sampled_from(["text", "image_url", "image", "input_audio"]) | ANY,
        "text": st.just("t") | ANY,
        "image_url": st.just({"url": "https://a.test/i.png"}) | ANY,
        "source": st.fixed_dictionaries({"type": st.just("base64")}, optional={"data": ANY}) | ANY,
        "input_audio": st.just({"data": "QQ==", "format": "wav"}) | ANY,
    },
)
MESSAGE = st.fixed_dictionaries(
    {},
    optional={
        "role": st.sampled_from(["system", "user", "assistant", "assistant", "tool"]) | ANY,
        "content": st.just("x") | st.lists(PART | ANY, max_size=2) | ANY,
        "tool_calls": st.lists(TOOL_CALL | ANY, max_size=2) | ANY,
        "tool_call_id": st.sampled_from(["a", "b"]) | ANY,
        "reasoning": st.just("r") | ANY,
        "name": ANY,
        "weight": ANY,
        "audio": ANY,
    },
)
TOOL = st.fixed_dictionaries(
    {}, optional={"type": st.just("function") | ANY, "function": FUNCTION | ANY, "name": ANY}
)
SAMPLING = st.fixed_dictionaries(
    {},
    optional={
        name: ANY | st.floats() | st.integers(-(2**64), 2**64)
        for name in ("seed", "n", "top_k", "temperature", "max_tokens", "stop")
    },
)
MESSAGES = st.lists(MESSAGE, max_size=4)


def written(form: LineFormat, run: Run, other: Run) -> Written:
    """What the format makes of it. Raises BadInput."""
    if form.write_run is not None:
        return form.write_run(run)
    assert form.write_pair is not None
    return form.write_pair(run, other)


@pytest.mark.slow
@settings(max_examples=150)
@given(
    messages=MESSAGES,
    read=MESSAGES,
    said=MESSAGE,
    tools=st.lists(TOOL, max_size=2),
    out=ANY,
    sampling=SAMPLING,
)
def test_anything_is_written_or_refused(
    messages: list[Any], read: list[Any], said: Any, tools: list[Any], out: Any, sampling: Any
) -> None:
    call = called(read, said, tools=tools, sampling=sampling)
    done = ToolCall(id="a", name="f", arguments="{}", result=out)
    turns = [Turn(call_id="c", call=call, tool_calls=[done])]
    run = made(trajectory=Trajectory(messages=messages, turns=turns, tools=tools), output=out)
    other = made("run-other", messages=chat("x", "y"))
    before = run.model_dump_json() if _is_json(run) else None
    for form in LINE_FORMATS.values():
        try:
            records, losses = written(form, run, other)
            lines = [orjson.loads(line_of(run, record)) for record in records]
        except BadInput as error:
            assert error.code == "unsupported_export"
            assert run.id in str(error) or other.id in str(error)
            continue
        assert set(losses) <= set(LOSSES)
        if form.name == "atif":
            atif.Trajectory.model_validate(lines[0], strict=True)
        if form.name == "otel":  # ids of hex digits happen to be base64 too
            json_format.Parse(orjson.dumps(lines[0]), TracesData())
    assert before is None or run.model_dump_json() == before  # nobody wrote into it


def _is_json(run: Run) -> bool:
    try:
        run.model_dump_json()
    except ValueError:
        return False
    return True


def test_a_demonstration_is_exported_as_a_run() -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    messages = chat("x", "y", "z", "a")
    messages[1]["weight"] = 0
    run = run_of_demonstration(messages, tools, {"kind": "sum"})
    assert run.id == run_of_demonstration(messages, tools).id
    assert run.id != run_of_demonstration(messages).id
    assert run.imported == "demonstration"
    for name, form in LINE_FORMATS.items():
        if form.write_run is not None and name != "openenv":  # which consists of tokens
            assert form.write_run(run).records, name
    openai = LINE_FORMATS["openai"].write_run
    assert openai is not None
    assert openai(run).records == [{"messages": messages, "tools": tools}]


def _text(form: LineFormat | TableFormat, run: Run, other: Run) -> tuple[str, set[str]]:
    """What any format makes of a run, as JSON, and its losses."""
    if isinstance(form, LineFormat):
        records, losses = written(form, run, other)
        return b"".join(line_of(run, record) for record in records).decode(), set(losses)
    assert form.write_run is not None
    rows, losses = form.write_run(run, 0)
    return json.dumps(rows, default=str), set(losses)


def _asking(arguments: str, **call: Any) -> Run:
    asked = {"id": "a", "type": "function", "function": {"name": "f", "arguments": arguments}}
    answer = {"role": "assistant", "content": None, "tool_calls": [asked]}
    read = [{"role": "user", "content": "x"}]
    turn = Turn(call_id="c", call=called(read, answer, **call))
    task = Task(input="x", target=BIG, metadata={"n": BIG})
    return made(trajectory=Trajectory(messages=[*read, answer], turns=[turn]), task=task)


#: Formats without the arguments of calls: tokens, tasks; html packs what the store has.
WITHOUT_TEXT = ("tokens", "verl", "html")


@pytest.mark.parametrize("name", [name for name in FORMATS if name not in WITHOUT_TEXT])
@pytest.mark.parametrize(
    ("arguments", "kept"),
    [
        (f'{{"n":{BIG},"m":{-BIG}}}', str(BIG)),
        (DEEP, "unparsed"),
        ('{"a": NaN}', "unparsed"),
        ("{broken", "unparsed"),
    ],
)
def test_arguments_keep_their_digits_or_are_told_as_unparsed(
    name: str, arguments: str, kept: str
) -> None:
    other = made("run-other", messages=chat("x", "y"))
    text, losses = _text(FORMATS[name], _asking(arguments), other)
    if kept in text:
        assert kept != "unparsed" or name == "atif" or "tool_arguments" in losses
    else:  # as the model wrote it
        assert json.dumps(arguments)[1:-1].replace("\\", "") in text.replace("\\", "")


@pytest.mark.parametrize("name", [name for name in FORMATS if name != "html"])
def test_settings_of_the_template_are_kept_or_named_as_lost(name: str) -> None:
    settings = {"chat_template_kwargs": {"enable_thinking": False}}
    run, other = _asking("{}", sampling=settings), made("run-other", messages=chat("x", "y"))
    text, losses = _text(FORMATS[name], run, other)
    exact = name == "tokens"  # the prompts themselves
    assert exact or ("enable_thinking" in text) != ("template_settings" in losses), losses
