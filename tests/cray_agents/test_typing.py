"""Types of agents, runs and rewards as type checkers see them: `make lint` has mypy read this.

An ignored error that is none any more is an error there, too (pyproject.toml).
"""

import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, assert_type

import pytest
from openai.types.chat import ChatCompletionMessageParam
from pydantic import BaseModel

import cray_agents
from cray_agents import Agent, Loop, Run, RunContext, Task, TaskSet, reward, tool
from cray_agents.agent import Hooks
from cray_agents.errors import BadInput
from cray_agents.records import ToolCall
from cray_agents.testing import ScriptedEngine, tool_call


class Order(BaseModel):
    item: str


@dataclass
class Shop:
    owner: str
    stock: dict[str, int]


NUMBER = Agent("number", output_type=int, engine=ScriptedEngine(["4"] * 4))


@reward
def correct(run: Run) -> float:
    return float(run.output == run.target)


@reward(weight=0.5)
async def close(run: Run[int]) -> float:
    return 0.0 if run.output is None else 1 / (1 + abs(run.output - int(run.target)))


@tool
def sell(item: str, context: RunContext[Shop]) -> int:
    assert_type(context.deps, Shop)
    context.deps.stock[item] -= 1
    return context.deps.stock[item]


@tool
def misspell(context: RunContext[Shop]) -> int:
    return len(context.deps.stok)  # type: ignore[attr-defined]


def greet(context: RunContext[Shop]) -> str:
    return f"You serve {context.deps.owner}."


def refuse(call: ToolCall, context: RunContext[Shop]) -> str | None:
    return None if context.deps.stock else "nothing is left"


def of_texts(context: RunContext[str]) -> str:
    return context.deps.upper()


def test_the_output_type_is_the_runs() -> None:
    assert_type(NUMBER, Agent[Any, int])
    run = NUMBER.run_sync("2+2")
    assert_type(run, Run[int])
    assert_type(run.output, int | None)
    assert run.output == 4 and run.target is None
    assert_type(NUMBER.override(temperature=0.0), Agent[Any, int])
    order = Agent("order", output_type=Order, engine=ScriptedEngine(['{"item": "tea"}']))
    assert_type(order.run_sync("tea").output, Order | None)
    words = Agent("words", output_type=list[str])
    assert_type(words, Agent[Any, list[str]])
    choice: Agent[Any, Literal["a", "b"]] = Agent("choice", output_type=Literal["a", "b"])
    agents: list[Agent] = [NUMBER, order, words, choice, Agent("plain")]
    assert len(agents) == 5


def test_the_deps_are_the_tools_the_hooks_and_the_instructions() -> None:
    engine = ScriptedEngine([tool_call("sell", item="tea"), "1"])
    clerk = Agent[Shop, int](
        "clerk", instructions=greet, tools=[sell], hooks=[Hooks(before_tool=refuse)],
        handoffs=[Agent("manager")], output_type=int, engine=engine,
    )  # fmt: skip
    assert_type(clerk, Agent[Shop, int])
    shop = Shop("Ada", {"tea": 2})
    assert clerk.run_sync("one tea", deps=shop).output == 1 and shop.stock == {"tea": 1}
    assert engine.requests[0]["messages"][0]["content"] == "You serve Ada."
    inferred = Agent("inferred", instructions=greet)
    assert_type(inferred, Agent[Shop, Any])


def test_wrong_deps_are_type_errors() -> None:
    clerk = Agent("clerk", instructions=greet, engine=ScriptedEngine(["no"]))
    assert clerk.run_sync("tea", deps="Ada").error  # type: ignore[arg-type]
    Agent[Shop, int]("clerk", instructions=of_texts)  # type: ignore[arg-type]
    Agent[Shop, int]("clerk", handoffs=[Agent[str, Any]("other")])  # type: ignore[list-item]
    Agent[Shop, int]("clerk", output_type=str)  # type: ignore[arg-type]


def test_inputs_and_examples_are_texts_or_messages() -> None:
    asked: list[ChatCompletionMessageParam] = [{"role": "user", "content": "2+2"}]
    plain = [{"role": "user", "content": "2+2"}, {"role": "assistant", "content": "4"}]
    again = NUMBER.override(examples=plain, engine=ScriptedEngine(["4"] * 2))
    assert again.run_sync(asked).output == again.run_sync(Task(input=plain[:1])).output == 4
    assert_type(Task(input=plain[:1]).input, str | list[dict[str, Any]])
    assert_type(Task(input=plain[:1]).text, str)
    assert len(TaskSet.from_list([asked, "3+3"])) == 2
    with pytest.raises(BadInput, match="message 0 is '2"):
        again.run_sync(["2+2"])  # type: ignore[list-item]


async def test_also_of_async_runs() -> None:
    run = await NUMBER.run("2+2")
    assert_type(run, Run[int])


def test_rewards_as_they_are_written_suit_a_loop() -> None:
    tasks = TaskSet.from_list([{"input": f"{n}+1", "target": n + 1} for n in range(20)])
    Loop(NUMBER, tasks, rewards=[correct, close])


def test_defaults_have_their_name() -> None:
    """For pyright a setting with `Field(8)` must be given; one with `Field(default=8)` not."""
    package = Path(cray_agents.__file__).parent
    files = [*package.glob("loop/**/*.py"), *package.glob("promotion/*.py")]
    files += [package / f"{name}.py" for name in ("records", "training_jobs", "training_commands")]
    unnamed = re.compile(r"\bField\((?!\s*(?:\w+=|\.\.\.|\)))")
    assert len(files) > 20
    assert [file.name for file in files if unnamed.search(file.read_text())] == []


def test_what_is_wrong_is_told() -> None:
    text: str = NUMBER.run_sync("2+2").output  # type: ignore[assignment]
    assert str(text) == "4"
