"""Types of agents, runs and rewards as type checkers see them: `make lint` has mypy read this.

An ignored error that is none any more is an error there, too (pyproject.toml).
"""

from typing import Literal, assert_type

from pydantic import BaseModel

from cray_agents import Agent, Loop, Run, TaskSet, reward
from cray_agents.agent.agent import Changes
from cray_agents.testing import ScriptedEngine


class Order(BaseModel):
    item: str


NUMBER = Agent("number", output_type=int, engine=ScriptedEngine(["4"] * 4))


@reward
def correct(run: Run) -> float:
    return float(run.output == run.target)


@reward(weight=0.5)
async def close(run: Run[int]) -> float:
    return 0.0 if run.output is None else 1 / (1 + abs(run.output - int(run.target)))


def test_the_output_type_is_the_runs() -> None:
    assert_type(NUMBER, Agent[int])
    run = NUMBER.run_sync("2+2")
    assert_type(run, Run[int])
    assert_type(run.output, int | None)
    assert run.output == 4 and run.target is None
    assert_type(NUMBER.override(temperature=0.0), Agent[int])
    order = Agent("order", output_type=Order, engine=ScriptedEngine(['{"item": "tea"}']))
    assert_type(order.run_sync("tea").output, Order | None)
    words = Agent("words", output_type=list[str])
    assert_type(words, Agent[list[str]])
    choice: Agent[Literal["a", "b"]] = Agent("choice", output_type=Literal["a", "b"])
    agents: list[Agent] = [NUMBER, order, words, choice, Agent("plain")]
    assert len(agents) == 5


async def test_also_of_async_runs() -> None:
    run = await NUMBER.run("2+2")
    assert_type(run, Run[int])


def test_rewards_as_they_are_written_suit_a_loop() -> None:
    tasks = TaskSet.from_list([{"input": f"{n}+1", "target": n + 1} for n in range(20)])
    Loop(NUMBER, tasks, rewards=[correct, close])


def test_what_is_wrong_is_told() -> None:
    text: str = NUMBER.run_sync("2+2").output  # type: ignore[assignment]
    assert text == 4  # type: ignore[comparison-overlap]
    try:
        NUMBER.override(temprature=0.0)  # type: ignore[call-arg]
    except TypeError as error:
        assert "temprature" in str(error)
    else:
        raise AssertionError("an argument that there is not was taken")


def test_override_takes_every_argument() -> None:
    given = {name for name, field in Agent.__dataclass_fields__.items() if field.init}
    assert Changes.__annotations__.keys() == given
