"""Inputs that are lists of messages, and examples of an agent, from the data set to the export."""

import asyncio
import json
import re
import zipfile
from pathlib import Path
from typing import Any

import pyarrow as pa
import pyarrow.parquet
import pytest

from cray_agents import Agent, Environment, Run, Task, TaskSet
from cray_agents.agent import MemorySession, PlatformSession, WorkerEnvironment
from cray_agents.errors import BadInput
from cray_agents.loop.evaluator import hold_out
from cray_agents.loop.settings_record import _agent, differences
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe, RunFilter, RunQuery
from cray_agents.records import Event, Message, StopReason
from cray_agents.rewards.llm_judge import judged_sections
from cray_agents.runtime.datasets.decontamination import BlockedTexts, inputs_of_messages
from cray_agents.runtime.exports.exporter import export, format_named, open_runs
from cray_agents.runtime.exports.formats.verl import rows_of
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.redaction.redactor import Redactor
from cray_agents.tasks.readers import TaskLike
from tests.support.exports.example_runs import made
from tests.support.model_scripts import agent, asks, script
from tests.support.scripted_platform import platform

CALL: Message = {
    "id": "call_1_0",
    "type": "function",
    "function": {"name": "add", "arguments": '{"a": 2, "b": 3}'},
}
ASKED: list[Message] = [
    {"role": "system", "content": "Be brief."},
    {"role": "user", "content": "My name is Ada."},
    {"role": "assistant", "content": "Hello Ada."},
    {"role": "user", "content": "What is my name?"},
]
SHOTS: list[Message] = [
    {"role": "user", "content": "2+3?"},
    {"role": "assistant", "content": "", "tool_calls": [CALL]},
    {"role": "tool", "tool_call_id": "call_1_0", "content": "5"},
    {"role": "assistant", "content": "five"},
]


def user(text: Any) -> Message:
    return {"role": "user", "content": text}


def said(text: Any) -> Message:
    return {"role": "assistant", "content": text}


BAD: list[tuple[Any, str]] = [
    ([], "it is an empty list"),
    ({"role": "user", "content": "x"}, "it is of type dict"),
    ([*ASKED, said("Ada")], "it ends with a message of role 'assistant'"),
    ([user("x"), {"role": "bot", "content": "y"}], "message 1 has the role 'bot': it must be one"),
    ([user(3)], "message 0 has the content 3: it must be a text"),
    ([user([{"text": "no type"}])], "message 0 has the content "),
    ([user("x"), ASKED[0]], "message 1 is of the system: only the first"),
    ([{"role": "system", "content": [{"type": "image_url"}]}], "message 0 is of the system: its"),
    (["x"], "message 0 is 'x'"),
    ([{"role": "tool", "content": "5"}], "message 0 is the result of a tool call None that is not"),
    ([*SHOTS[:1], {**SHOTS[1], "tool_calls": [3]}], "message 1 has the tool call 3"),
]


@pytest.mark.parametrize(("bad", "problem"), [*BAD, ([user({1})], "it has what JSON cannot hold")])
def test_a_list_that_is_no_input_is_refused_with_its_place(
    bad: Any, problem: str, tmp_path: Path
) -> None:
    if "JSON" not in problem:
        path = tmp_path / "t.jsonl"
        path.write_text("".join(json.dumps({"input": one}) + "\n" for one in ("fine", bad)))
        with pytest.raises(BadInput, match=re.escape(f"t.jsonl:2: input: {problem}")) as refused:
            TaskSet.from_jsonl(path)
        assert refused.value.param == "input"
    with pytest.raises(BadInput, match=re.escape(f"task 1: input: {problem}")):
        TaskSet.from_list(["fine", {"input": bad}])
    engine = script("never")
    with pytest.raises(BadInput, match=re.escape(f"input: {problem}")):
        agent(engine).run_sync(bad)
    assert engine.requests == []


@pytest.mark.parametrize(
    ("examples", "problem"),
    [
        ([user("x")], "they end with a message of role 'user'"),
        ([*ASKED, said("Ada")], "message 0 is of the system: give that text as the agent's instr"),
        ([user("x"), {"role": "bot", "content": "y"}], "message 1 has the role 'bot'"),
        ("2+3", "instances are not allowed as a Sequence"),
    ],
)
def test_examples_that_are_none(examples: Any, problem: str) -> None:
    with pytest.raises(BadInput, match=re.escape(problem)) as refused:
        agent(script("never"), examples=examples)
    assert refused.value.param == "examples"
    with pytest.raises(BadInput, match="the workers of 'w' make the messages"):
        Agent("a", examples=SHOTS, environment=WorkerEnvironment("w"))


def test_the_messages_of_data_sets(tmp_path: Path) -> None:
    # Parquet has every field in every row, and TRL's tool calls have objects and no ids
    function = {"name": "add", "arguments": {"a": 2, "b": 3}}
    called = {"role": "assistant", "tool_calls": [{"function": function}]}
    prompt = [user("2+3?"), called, {"role": "tool", "name": "add", "content": "5"}]
    rows = [{"prompt": prompt, "answer": "5"}, {"prompt": ASKED, "answer": "Ada"}]
    pyarrow.parquet.write_table(pa.Table.from_pylist(rows), tmp_path / "t.parquet")
    (tmp_path / "t.jsonl").write_text("\n".join(map(json.dumps, rows)))
    tasks = TaskSet.from_parquet(tmp_path / "t.parquet", input="prompt", target="answer")
    other = TaskSet.from_jsonl(tmp_path / "t.jsonl", input="prompt", target="answer")
    assert [task.id for task in tasks] == [task.id for task in other]
    assert [*tasks] == [*other] and [task.text for task in tasks] == ["2+3?", "What is my name?"]
    assert tasks[1].input == ASKED and tasks[1].target == "Ada"
    assert tasks[0].input == [SHOTS[0], SHOTS[1], {**SHOTS[2], "name": "add"}]
    again = Task(input=[dict(reversed(message.items())) for message in ASKED], target="Ada")
    assert again.id == tasks[1].id == Task.model_validate_json(again.model_dump_json()).id


@pytest.mark.parametrize(
    ("one", "other"), [(ASKED, ASKED[1:]), ([user("What is 2+3?")], "what is 2 + 3")]
)
def test_equal_lists_and_texts_are_one_task(one: TaskLike, other: TaskLike) -> None:
    with pytest.raises(BadInput, match="is in split 'train' here and in 'holdout' at task 1"):
        TaskSet.from_list([{"input": one, "split": "train"}, {"input": other, "split": "holdout"}])
    placed = [task.split for task in TaskSet.from_list([one, other], holdout=0.5)]
    assert placed[0] == placed[1]
    pictures = [[user([{"type": "image_url", "image_url": {"url": url}}])] for url in "ab"]
    one, other = pictures
    TaskSet.from_list([{"input": one, "split": "train"}, {"input": other, "split": "test"}])


async def test_what_the_model_reads() -> None:
    engine = script("Ada", "still Ada", "five", "1")
    asked = agent(engine, instructions="Answer.", examples=SHOTS)
    session = MemorySession()
    run = await asked.run(ASKED, session=session)
    begin = {"role": "system", "content": "Answer.\n\nBe brief."}
    assert engine.requests[0]["messages"] == [begin, *SHOTS, *ASKED[1:]]
    assert (run.input, run.output) == ("What is my name?", "Ada")
    assert run.task == Task(input=ASKED) and run.task.input == ASKED
    assert session.messages == [*ASKED[1:], said("Ada")]
    await asked.run("And now?", session=session)
    again = [{"role": "system", "content": "Answer."}, *SHOTS, *ASKED[1:], said("Ada")]
    assert engine.requests[1]["messages"] == [*again, user("And now?")]
    await asked.run("2+3?", history=run.trajectory.messages)  # it has the examples, too
    assert engine.requests[2]["messages"] == [*again, user("2+3?")]
    number = agent(engine, output_type=list[int])
    await number.run(ASKED[:2])
    assert engine.requests[3]["messages"][0]["content"].startswith("Be brief.\n\n")
    assert "Hello Ada." in judged_sections(run, transcript=False)["task"]


async def test_examples_and_handoffs() -> None:
    engine = script(asks(("transfer_to_b", {})), "done", "more")
    second = Agent("b", "Second.", examples=SHOTS)
    first = agent(engine, examples=[user("hi"), said("ho")], handoffs=[second])
    session = MemorySession()
    await first.run(ASKED, session=session)
    read = engine.requests[1]["messages"]
    assert read[0]["content"] == "Second.\n\nBe brief." and read[1 : 1 + 4 + 3] == [
        *SHOTS,
        *ASKED[1:],
    ]
    assert session.messages[:3] == ASKED[1:] and len(session.messages) == 3 + 3
    await first.run("on", history=read)
    assert engine.requests[2]["messages"][:2] == first.examples
    assert user("2+3?") not in engine.requests[2]["messages"]


async def test_an_environment_speaks_below_the_input() -> None:
    class World(Environment):
        def reset(self, task: Task, context: Any) -> str:
            return f"of {len(task.input)}"

    engine = script("1", "2")
    player = agent(engine, environment=World)
    await player.run(ASKED)
    assert engine.requests[0]["messages"][-1] == user("What is my name?\n\nof 4")
    await player.run([user([{"type": "text", "text": "x"}])])
    parts = [{"type": "text", "text": "x"}, {"type": "text", "text": "of 1"}]
    assert engine.requests[1]["messages"][-1] == user(parts)


async def test_examples_make_another_agent() -> None:
    plain, shown = (_agent(agent(script("x"), examples=e)) for e in ((), SHOTS))
    older = {name: value for name, value in plain.items() if name != "examples"}
    assert [one[0] for one in differences(older, shown)] == ["examples"]
    assert differences(older, plain) == differences(shown, shown) == []


def test_what_is_redacted_is_still_an_input() -> None:
    run = made(task=Task(input=[*ASKED[:3], *SHOTS[:3]]))
    event = Event(id="e", run_id=run.id, kind="run", body=run.model_dump(mode="json"))
    body = Redactor([], {"word": "Ada|user|add|call|text"}).apply(event).body
    read = Run.model_validate(body).task.input
    assert read[1] == user("My name is [redacted:word].") and len(read) == 6


def test_on_record_and_in_every_format(tmp_path: Path) -> None:
    home = Home(tmp_path / "home")
    task, held = Task(input=ASKED, target="Ada"), [user("A"), said("B"), user("Yes")]
    engine = script("Ada", "Ada again", "x")

    async def work(place: Any) -> None:
        asked = agent(place.engine(), model="m", examples=SHOTS[:1] + SHOTS[3:])
        session = PlatformSession("ada", place)
        await asked.run(task, session=session, loop="l", run_id="run-1")
        await asked.run("Again?", session=session, run_id="run-2")
        await hold_out(place, "l", TaskSet([Task(input=held, split="holdout")]))
        await place.close()

    with platform(home.root, engine) as place:
        asyncio.run(work(place))
    read = [message["content"] for message in engine.requests[1]["messages"]]
    assert read == ["2+3?", "five", *(m["content"] for m in ASKED[1:]), "Ada", "Again?"]
    store = Store(home)
    assert [run.id for run in store.runs(RunQuery(text="is my name?", loop="l"))] == ["run-1"]
    run = store.run("run-1")
    assert run.task == task and run.input == "What is my name?"
    prompt = [{k: m[k] for k in ("role", "content")} for m in run.trajectory.messages[:-1]]
    assert prompt[0] == ASKED[0] and prompt[1:] == [SHOTS[0], SHOTS[3], *ASKED[1:]]
    (row,) = rows_of(run, 0).records
    assert row["prompt"] == prompt
    with pytest.raises(BadInput, match=r"messages\[1\]\.tool_calls are there, and verl's prompt"):
        rows_of(made("run-1", task=Task(input=SHOTS[:3])), 0)
    source = open_runs(home, RunFilter(loop="l"), False)
    for form in ("openai", "trl", "trl-prompt-completion", "sharegpt", "atif", "otel", "jsonl"):
        export(source, format_named(form), tmp_path / form)
        (line,) = (tmp_path / form).read_text().splitlines()
        assert "Hello Ada." in line, form
    record = json.loads((tmp_path / "openai").read_text())
    assert [m.get("weight") for m in record["messages"]] == [None, None, 0, None, 0, None, None]
    export(source, format_named("eval"), tmp_path / "x.eval")
    with zipfile.ZipFile(tmp_path / "x.eval") as log:
        (name,) = (one for one in log.namelist() if one.startswith("samples/"))
        sample = json.loads(log.read(name))
    assert [(m["role"], m["content"]) for m in sample["input"]] == [
        (m["role"], m["content"]) for m in ASKED
    ]

    blocked = BlockedTexts.of(store, home, DatasetRecipe(loop="l"))
    assert blocked.match_run(run) is None
    same = Run(id="r", agent="a", model="m", input="Yes", stop_reason=StopReason.completed,
               task=Task(input=[ASKED[0], *held]))  # fmt: skip
    for match in (
        blocked.match_run(same),
        blocked.match_any(inputs_of_messages([*held, said("C")])),
    ):
        assert match is not None and match.how == "equal"
    assert blocked.match_any(inputs_of_messages([user("Yes"), said("C")])) is None
