"""A run in which another agent took over: each conversation as the calls in it saw it."""

import asyncio
from typing import Any

import orjson
import pytest

from cray_agents import Agent
from cray_agents.engines.openai_engine import OpenAIEngine
from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.records import Message, Run, Task
from cray_agents.runtime.exports.export_format import Written
from cray_agents.runtime.exports.formats.huggingface import rows_of
from cray_agents.runtime.exports.formats.verl import rows_of as verl_rows
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.calculator import calculator
from tests.support.exports.example_runs import LINE_FORMATS, called, of_calls
from tests.support.scripted_platform import platform

SORT, BILL = "You sort.", "You bill."


def reply(request: dict[str, Any]) -> Any:
    """The first agent hands over; the second calculates, and answers with a tenth of its seed."""
    system, last = request["messages"][0]["content"], request["messages"][-1]
    if system == SORT:
        return {"id": "h", "name": "transfer_to_bill", "arguments": {}}
    if last["content"] == "2":
        return f"answer {request['seed'] // 10}"
    return {"id": "c", "name": "calculator", "arguments": {"expression": "1 + 1"}}


@pytest.fixture(scope="module")
def handed(tmp_path_factory: pytest.TempPathFactory) -> list[Run]:
    """Two runs on one task, as the store gives them; the second agent's answers differ."""
    root = tmp_path_factory.mktemp("handed") / "home"

    async def record(url: str) -> None:
        engine = OpenAIEngine(url)
        bill = Agent(name="bill", instructions=BILL, tools=[calculator], model="m")
        sort = Agent(name="sort", instructions=SORT, handoffs=[bill], model="m", engine=engine)
        for seed in (1, 2):
            await sort.run(Task(input="How much?", target="2"), run_id=f"r{seed}", seed=10 * seed)
        await engine.close()

    with platform(root, ScriptedEngine(reply)) as where:
        asyncio.run(record(where.url))
    store = Store(Home(root))
    return [store.run(name) for name in ("r1", "r2")]


def written(name: str, run: Run) -> Written:
    write_run = LINE_FORMATS[name].write_run
    assert write_run is not None
    return write_run(run)


def seen(messages: list[Message]) -> list[tuple[str, Any]]:
    return [(m["role"], m.get("content") or m["tool_calls"][0]["function"]["name"])
            for m in messages]  # fmt: skip


SORTED = [("system", SORT), ("user", "How much?"), ("assistant", "transfer_to_bill")]
BILLED = [
    ("system", BILL),
    *SORTED[1:],
    ("tool", "bill has taken over."),
    ("assistant", "calculator"),
    ("tool", "2"),
    ("assistant", "answer 1"),
]


def test_each_line_is_what_its_calls_saw(handed: list[Run]) -> None:
    run = handed[0]
    (first, second), _ = written("openai", run)
    assert [seen(each["messages"]) for each in (first, second)] == [SORTED, BILLED]
    tools = [[tool["function"]["name"] for tool in each["tools"]] for each in (first, second)]
    assert tools == [["transfer_to_bill"], ["calculator"]]
    assert [seen(call.messages) for call in run.calls] == [SORTED[:-1], BILLED[:4], BILLED[:-1]]
    answers = [m.get("weight") for m in second["messages"] if m["role"] == "assistant"]
    assert answers == [0, None, None]  # the first agent's is not the second's to learn


def test_other_formats_split_it_too(handed: list[Run]) -> None:
    run = handed[0]
    rows, losses = written("trl", run)
    assert [seen(row["messages"]) for row in rows] == [SORTED, BILLED]
    assert "weights" in losses and [len(orjson.loads(row["tools"])) for row in rows] == [1, 1]
    rows = written("trl-prompt-completion", run).records
    told = [seen([*row["prompt"], *row["completion"]]) for row in rows]
    assert told == [SORTED, BILLED]
    rows = written("sharegpt", run).records
    assert [row["id"] for row in rows] == ["r1.1", "r1.2"]
    assert [row["conversations"][0]["value"] for row in rows] == [SORT, BILL]
    rows = rows_of(run, 0).records
    assert [(row["part"], row["messages"][0]["content"]) for row in rows] == [(0, SORT), (1, BILL)]
    assert verl_rows(run, 0).records[0]["prompt"][0]["content"] == SORT


def test_documents_of_the_whole_run_keep_what_each_call_saw(handed: list[Run]) -> None:
    run = handed[0]
    (document,) = written("atif", run).records
    extra = [step["extra"] for step in document["steps"] if step.get("llm_call_count")]
    assert extra[0]["messages"] == run.calls[0].messages
    assert [each["tools"] for each in extra] == [call.tools for call in run.calls]


def test_a_pair_parts_where_the_second_agent_speaks(handed: list[Run]) -> None:
    write_pair = LINE_FORMATS["trl-preference"].write_pair
    assert write_pair is not None
    (record,) = write_pair(*handed).records
    assert seen(record["prompt"]) == BILLED[:-1]
    assert [record[side][0]["content"] for side in ("chosen", "rejected")] == [
        "answer 1",
        "answer 2",
    ]
    with pytest.raises(BadInput, match="say the same"):
        write_pair(handed[0], handed[0])


def test_an_agent_that_takes_over_again_goes_on_with_its_own() -> None:
    def said(text: str) -> Message:
        return {"role": "assistant", "content": text}

    a, b, question = ({"role": role, "content": role} for role in ("system", "system", "user"))
    b = {**b, "content": "other"}
    run = of_calls(
        called([a, question], said("a1"), "c1"),
        called([b, question, said("a1")], said("b1"), "c2"),
        called([a, question, said("a1"), said("b1")], said("a2"), "c3"),
    )
    first, second = written("openai", run).records
    assert [m["content"] for m in first["messages"]] == ["system", "user", "a1", "b1", "a2"]
    assert [m.get("weight") for m in first["messages"]] == [None, None, None, 0, None]
    assert [m["content"] for m in second["messages"]] == ["other", "user", "a1", "b1"]
    assert [m.get("weight") for m in second["messages"]] == [None, None, 0, None]
