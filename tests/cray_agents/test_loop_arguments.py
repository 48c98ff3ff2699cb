"""Arguments of a Loop: refused at construction, or taken in more than one form."""

import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest
from cray_agents.loop.stages import Stage

from cray_agents import Agent, Loop, PromotionTest, Run, TaskSet, reward
from cray_agents.errors import BadInput
from cray_agents.loop import Curriculum
from cray_agents.training import Hyperparameters

AGENT = Agent("adder", model="m")
ROWS = [{"input": f"{n}+1", "target": n + 1, "metadata": {"level": n % 3}} for n in range(30)]
TASKS = TaskSet.from_list(ROWS)
SAID = [{"role": "user", "content": "1+1"}, {"role": "assistant", "content": "2"}]


@reward
def correct(run: Run) -> float:
    return float(run.output == run.target)


def made(**changes: Any) -> Loop:
    return Loop(**{"agent": AGENT, "tasks": TASKS, "rewards": [correct], **changes})


def test_forms_that_mean_the_same() -> None:
    assert made(rewards=correct).rewards == (correct,)
    hyper = Hyperparameters(steps=7, batch_size=4)
    assert made(hyperparameters={"steps": 7, "batch_size": 4}).hyperparameters == hyper
    stages = [Stage("rft", hyperparameters={"steps": 7, "batch_size": 4})]  # type: ignore[arg-type]
    assert made(method=stages).stages[0].hyperparameters == hyper
    assert len(made(demonstrations=[(SAID, {"level": 1})]).demonstrations) == 1
    assert made(balance_by="level", curriculum=Curriculum("level"), target=1.0).target == 1.0
    assert made(promotion=PromotionTest(high=5.0), target=5).target == 5


@pytest.mark.parametrize(
    ("changes", "param", "told"),
    [
        ({"agent": "adder"}, "agent", "give an Agent"),
        ({"agent": Agent("adder", model="m@3")}, "model", "model='m'"),
        ({"tasks": ROWS}, "tasks", "TaskSet.from_list"),
        ({"rewards": ["correct"]}, "rewards", r"rewards\[0\] is 'correct'"),
        ({"rewards": [correct, partial(correct)]}, "rewards", "two rewards are called 'correct'"),
        ({"rewards": [lambda run: 1, lambda run: 0]}, "rewards", "are called '<lambda>'"),
        (
            {"control": "shuffled-rewards", "method": "sft", "demonstrations": [(SAID, {})]},
            "control",
            "no effect with sft",
        ),
        ({"hyperparameters": {"step": 7}}, "hyperparameters", "hyperparameters.step"),
        ({"hyperparameters": 7}, "hyperparameters", "hyperparameters"),
        ({"demonstrations": [SAID[:1]]}, "demonstrations", r"demonstrations\[0\]: .*pair"),
        ({"demonstrations": [SAID]}, "demonstrations", "give a list of dicts"),
        ({"demonstrations": [(SAID, None)]}, "demonstrations", "metadata is None"),
        ({"demonstrations": [("2", {})]}, "demonstrations", "messages are '2'"),
        ({"demonstrations": [([{"content": "2"}], {})]}, "demonstrations", "message 0.*`role`"),
        ({"demonstrations": [(SAID[:1], {})]}, "demonstrations", "no assistant message"),
        ({"target": 5}, "target", "PromotionTest"),
        ({"temperature": -0.5}, "temperature", "from 0"),
        ({"balance_by": "levels"}, "balance_by", "there is 'level'"),
        ({"curriculum": Curriculum("kind")}, "curriculum", "curriculum.key='kind'"),
        ({"promotion": PromotionTest(guard="kind")}, "promotion", "promotion.guard='kind'"),
    ],
)
def test_what_cannot_be_meant_is_told_when_it_is_made(
    changes: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(BadInput, match=told) as error:
        made(**changes)
    assert error.value.param == param


@pytest.mark.parametrize("name", ["attempts", "method", "hyperparameters", "target", "teacher"])
def test_a_setting_of_a_made_loop_is_not_assigned_but_replaced(name: str) -> None:
    loop = made()
    with pytest.raises(BadInput, match=f"{name} is a setting.*replace"):
        setattr(loop, name, None)
    assert replace(loop, attempts=4).stages[0].attempts == 4
    loop.platform, loop.on_progress = None, print  # where it runs, and who is told


@pytest.mark.parametrize(
    "wrong", [{"floor": 0}, {"floor": math.nan}, {"hard": -1}, {"hard": math.inf}, {"revisit": 2}]
)
def test_a_curriculum_that_cannot_be(wrong: dict[str, Any]) -> None:
    with pytest.raises(BadInput, match=f"curriculum: {next(iter(wrong))}="):
        Curriculum(**wrong)


WRONG = (0, -1, 1.5, float("nan"), float("inf"), "x", [], {}, object())


@pytest.mark.parametrize("name", [f.name for f in fields(Loop)])
def test_no_argument_of_a_wrong_kind_gets_through(name: str) -> None:
    """Each is refused by name, or means what it says; nothing else is raised."""
    for value in WRONG:
        try:
            made(**{name: value})
        except BadInput as error:
            assert error.param is not None
        else:
            assert (name, value) in RIGHT, f"{name}={value!r}"


#: Wrong for most arguments, and right for these.
RIGHT = [
    *((name, 0) for name in ("staleness", "seed", "temperature", "resample", "min_reward")),
    *((name, 0) for name in ("balance_power", "discount", "target")),
    *((name, 1.5) for name in ("temperature", "resample", "min_reward", "balance_power")),
    ("min_reward", -1),
    ("logprob_limit", 1.5),
    ("name", "x"),
    ("demonstrations", []),
    ("hyperparameters", {}),  # steps follow the sets
]
