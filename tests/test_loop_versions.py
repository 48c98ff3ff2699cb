"""A loop whose jobs publish versions: tasks that do not decide choose the best of them."""

import asyncio
import logging
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cray_agents import RFT, Agent, Loop, Platform, PromotionTest, Task, TaskSet, Training, reward
from cray_agents.agent.user_code import wait_for
from cray_agents.errors import BadInput
from cray_agents.iteration import Iteration
from cray_agents.loop.warmup import WarmUp
from cray_agents.paths import Home
from cray_agents.promotion.sequential_test import choosing_tasks, deciding_tasks, entry_of
from cray_agents.queries import RunQuery
from cray_agents.records import Prompt, Run
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.scripted_platform import PROBE, platform
from tests.support.scripted_trainer import ScriptedTrainer

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


class HeldJobs:
    """A platform whose jobs stand still until a test moves them on; `asked` counts its requests."""

    def __init__(self, root: Path, replicas: int) -> None:
        self.home, self.store = Home(root), Store(Home(root))
        self.trainer = ScriptedTrainer(self.home, probe=PROBE, by_hand=True)
        self.asked = Counter[tuple[str, str]]()
        self.held = set[str]()  # tasks that m@3 does not answer now
        self.engines = [ScriptedEngine(self.answer) for _ in range(replicas)]

    async def answer(self, request: dict[str, Any], version: str) -> str:
        text = request["messages"][-1]["content"]
        self.asked[version, text] += 1
        while version == "m@3" and text in self.held:  # noqa: ASYNC110 - the test tells
            await asyncio.sleep(0.02)
        return answer(request, version)

    @asynccontextmanager
    async def looping(self, **changes: Any) -> AsyncIterator["asyncio.Task[list[Iteration]]"]:
        """A loop of one iteration, at the begin of its job; at the end of the block it is ended."""
        engine, *others = self.engines
        with platform(self.home.root, engine, others=others, trainer=self.trainer) as where:

            async def work() -> list[Iteration]:
                try:
                    return [one async for one in make_loop(where, **changes).run(1)]
                finally:
                    await where.close()

            loop = asyncio.create_task(work())
            try:
                await until(lambda: [*self.home.jobs.glob("*/spec.json")], loop)
                yield loop
            finally:
                loop.cancel()
                await asyncio.wait({loop})

    def advance(self, step: int | None = None) -> None:
        self.trainer.advance(self.trainer.submitted[0].id, step)

    def recorded(self, version: str) -> int:
        return len(self.store.runs(RunQuery(loop="it", split="holdout", model=version)))

    def tried(self, version: str) -> bool:
        return self.recorded(version) == choosing()

    def loads(self, version: str) -> int:
        return sum(engine.loaded.count(version) for engine in self.engines)


async def until(true: Callable[[], Any], loop: "asyncio.Task[Any]") -> None:
    async with asyncio.timeout(300):
        while not true():
            assert not loop.done(), loop.exception()
            await asyncio.sleep(0.05)


def choosing() -> int:
    return len(choosing_tasks(tasks().split("holdout"), TEST))


@pytest.mark.slow
async def test_versions_are_tried_while_the_job_trains(tmp_path: Path) -> None:
    """Also after one whose check fails, which is not loaded again."""
    site = HeldJobs(tmp_path, replicas=2)
    method = RFT(training=Training(steps=4, publish_every=1))
    async with site.looping(method=method) as loop:
        for engine in site.engines:
            engine.drift = 9.0
        site.advance(1)
        registry = Registry(site.home)
        await until(lambda: "rejected" in [one.kind for one in registry.history("m")], loop)
        for engine in site.engines:
            engine.drift = 0.0
        for step, version in ((2, "m@3"), (3, "m@4")):
            site.advance(step)
            await until(partial(site.tried, version), loop)
        assert site.engines[0].version == "m@1" or site.engines[1].version == "m@1"
        loads = [site.loads(version) for version in ("m@2", "m@3", "m@4")]
        site.advance()
        (_, one) = await loop
    assert list(one.choice) == ["m@3", "m@4", "m@5"] and one.version == "m@3" and one.promoted
    assert (site.loads("m@2"), site.loads("m@4")) == (loads[0], loads[2])
    assert set(site.asked.values()) == {1}
    (rejected,) = [one for one in registry.history("m") if one.kind == "rejected"]
    assert rejected.version == 2 and rejected.reason.startswith("check failed: ")


@pytest.mark.slow
async def test_a_killed_loop_asks_for_nothing_again(tmp_path: Path) -> None:
    site = HeldJobs(tmp_path, replicas=2)
    *_, held = choosing_tasks(tasks().split("holdout"), TEST)
    site.held.add(str(held.input))
    async with site.looping() as loop:
        site.advance(1)
        await until(partial(site.tried, "m@2"), loop)
        site.advance(2)
        await until(lambda: site.recorded("m@3") == choosing() - 1, loop)
    site.held.clear()
    async with site.looping() as loop:
        await until(partial(site.tried, "m@3"), loop)
        site.advance()
        (_, one) = await loop
    assert list(one.choice) == ["m@2", "m@3", "m@4"] and one.version == "m@3"
    again = {what for what, count in site.asked.items() if count > 1}
    assert again <= {("m@3", str(held.input))} and site.loads("m@2") == 1


@pytest.mark.slow
async def test_the_only_replica_stays_until_the_job_ends(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    site = HeldJobs(tmp_path, replicas=1)
    with caplog.at_level(logging.INFO):
        async with site.looping() as loop:
            site.advance(1)
            await until(lambda: "tried when it has ended: " in caplog.text, loop)
            assert site.engines[0].loaded == ["m@1"]
            site.advance()
            (_, one) = await loop
    assert list(one.choice) == ["m@2", "m@3", "m@4"] and one.version == "m@3"
    assert set(site.asked.values()) == {1}


@pytest.mark.slow
def test_versions_have_the_prompt_of_their_parent_and_are_registered_once(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:

        async def prompted() -> None:
            first = await where.version("m@1")
            prompts = {"a": Prompt(instructions="Be exact.")}
            version = await where.register("m", first.checkpoint, prompts)
            await where.promote(version, who="test", reason="it is to have a prompt")
            await where.close()

        wait_for(prompted())
        (_, one) = list(make_loop(where).run_sync(1))
    _, shown, *made = Registry(Home(tmp_path)).versions("m")
    assert [version.id for version in made] == list(one.choice) == ["m@3", "m@4", "m@5"]
    assert shown.prompts and all(version.prompts == shown.prompts for version in made)


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
