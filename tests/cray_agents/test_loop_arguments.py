"""Arguments of a Loop: refused at construction, or taken in more than one form."""

import math
from dataclasses import fields, replace
from functools import partial
from typing import Any

import pytest

from cray_agents import GRPO, RFT, SFT, Agent, Data, Loop, PromotionTest, Run, Stop, TaskSet, reward
from cray_agents.errors import BadInput
from cray_agents.loop import Curriculum

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
    assert made(method=RFT()).settings == made(method=[RFT()]).settings == made().settings
    assert Loop(AGENT, TASKS, [correct], RFT()).method == RFT()
    assert made(promotion=PromotionTest(high=5.0), stop=Stop(target=5)).stop.target == 5


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
            {
                "control": "shuffled-rewards",
                "method": SFT(),
                "data": Data(demonstrations=[(SAID, {})]),
            },
            "control",
            "no effect with sft",
        ),
        ({"stop": Stop(target=5)}, "target", "PromotionTest"),
        ({"data": Data(balance_by="levels")}, "balance_by", "there is 'level'"),
        ({"data": Data(curriculum=Curriculum("kind"))}, "curriculum", "curriculum.key='kind'"),
        ({"promotion": PromotionTest(guard="kind")}, "promotion", "promotion.guard='kind'"),
    ],
)
def test_what_cannot_be_meant_is_told_when_it_is_made(
    changes: dict[str, Any], param: str, told: str
) -> None:
    with pytest.raises(BadInput, match=told) as error:
        made(**changes)
    assert error.value.param == param


@pytest.mark.parametrize(
    ("wrong", "told"),
    [
        (SAID[:1], r"demonstrations\[0\]: .*pair"),
        ([SAID], "give a list of dicts"),
        ([(SAID, None)], "metadata is None"),
        ([("2", {})], "messages are '2'"),
        ([([{"content": "2"}], {})], "message 0.*`role`"),
        ([(SAID[:1], {})], "no assistant message"),
        (7, "give a list of pairs"),
    ],
)
def test_demonstrations_that_cannot_be(wrong: Any, told: str) -> None:
    with pytest.raises(ValueError, match=told):
        Data(demonstrations=wrong)


@pytest.mark.parametrize("name", ["method", "sampling", "stop", "rewards"])
def test_a_setting_of_a_made_loop_is_not_assigned_but_replaced(name: str) -> None:
    loop = made()
    with pytest.raises(BadInput, match=f"{name} is a setting.*replace"):
        setattr(loop, name, None)
    assert replace(loop, method=GRPO(group_size=4)).method == GRPO(group_size=4)
    loop.platform, loop.on_progress = None, print  # where it runs, and who is told


def test_an_unknown_keyword_is_refused_with_the_known_ones() -> None:
    with pytest.raises(BadInput, match="no attempt: give agent, tasks") as refusal:
        made(attempt=2)
    assert refusal.value.param == "attempt"


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
RIGHT = [("name", "x")]
