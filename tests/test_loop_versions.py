"""A loop whose jobs publish versions: tasks that do not decide choose the best of them."""

import asyncio
from pathlib import Path
from typing import Any

import pytest

from cray_agents import RFT, Agent, Loop, Platform, PromotionTest, Task, TaskSet, Training, reward
from cray_agents.errors import BadInput
from cray_agents.loop.warmup import WarmUp
from cray_agents.paths import Home
from cray_agents.promotion.sequential_test import choosing_tasks, deciding_tasks, entry_of
from cray_agents.queries import RunQuery
from cray_agents.records import Run
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.scripted_platform import platform

SKILL = {"m@1": 2, "m@2": 5, "m@3": 8, "m@4": 4}  # of 10 tasks; m@4 is the job's result
TEST = PromotionTest(hidden=0, choosing=0.3, batch=100)
TRAINING = Training(steps=3, publish_every=1)


@reward
def right(run: Run) -> float:
    return float(run.task is not None and run.output == run.task.target)


def answer(request: dict[str, Any], version: str) -> str:
    number = request["messages"][-1]["content"].split()[-1]
    return number if int(number) % 10 < SKILL.get(version, 0) else f"{number}, wrong"


def tasks(held_out: int = 60) -> TaskSet:
    splits = [("train", n) for n in range(20)] + [
        ("holdout", n) for n in range(100, 100 + held_out)
    ]
    return TaskSet([Task(input=f"say {n}", target=str(n), split=split) for split, n in splits])


def make_loop(where: Platform, **changes: Any) -> Loop:
    arguments: dict[str, Any] = {
        "agent": Agent(name="a", model="m"),
        "tasks": tasks(),
        "rewards": [right],
        "method": RFT(training=TRAINING),
        "promotion": TEST,
        "name": "it",
        "platform": where,
    }
    return Loop(**arguments | changes)


@pytest.mark.slow
def test_the_best_version_is_decided_on_by_tasks_that_did_not_choose(tmp_path: Path) -> None:
    held_out = tasks().split("holdout")
    choosing = {task.id for task in choosing_tasks(held_out, TEST)}
    deciding = {task.id for task in deciding_tasks(held_out, TEST)}
    assert choosing and not choosing & deciding
    assert choosing | deciding == {task.id for task in held_out}

    with platform(tmp_path, ScriptedEngine(answer)) as where:
        (before, one) = list(make_loop(where).run_sync(1))
        assert before.choice == {}
        assert list(one.choice) == ["m@2", "m@3", "m@4"]
        assert one.choice["m@3"] > max(one.choice["m@2"], one.choice["m@4"])
        assert (one.version, one.promoted) == ("m@3", True)

        async def noted() -> dict[str, Any]:
            pairs = await where.recall("it", entry_of(1))
            await where.close()
            return pairs or {}

        pairs = asyncio.run(noted())
        assert {pair["task"] for pair in pairs["pairs"]} <= deciding
        assert pairs["planned"] == len(deciding)
        runs = Store(Home(tmp_path)).runs(RunQuery(loop="it", split="holdout"))
        of = {model: {run.task.id for run in runs if run.model == model} for model in SKILL}
        assert of["m@2"] == of["m@4"] == choosing
        assert of["m@1"] == deciding and of["m@3"] == choosing | deciding

        again = list(make_loop(where).run_sync(1))  # on record: nothing is chosen anew
        assert again[1] == one


@pytest.mark.slow
def test_without_choosing_the_result_is_decided_on(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        loop = make_loop(where, promotion=PromotionTest(hidden=0, batch=100))
        (_, one) = list(loop.run_sync(1))
        assert (one.version, one.choice) == ("m@4", {})


def test_a_choice_that_cannot_be_made_is_refused() -> None:
    nowhere = Platform("http://127.0.0.1:9")
    with pytest.raises(BadInput, match="jobs publish their result alone"):
        make_loop(nowhere, method=RFT(training=Training(steps=3)))
    with pytest.raises(BadInput, match="none of 2 held-out tasks is left to"):
        make_loop(nowhere, tasks=tasks(2), promotion=PromotionTest(choosing=0.001))
    with pytest.raises(BadInput, match="a warm-up tries whole jobs alone"):
        WarmUp(TRAINING)
