"""The loop over a real gateway, store and registry, with a scripted engine and trainer."""

import asyncio
import signal
import subprocess
import sys
import threading
from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from cray_agents import (
    GRPO,
    RFT,
    SFT,
    Agent,
    Environment,
    Loop,
    PromotionTest,
    RunContext,
    Task,
    TaskSet,
    Training,
    reward,
)
from cray_agents.errors import BadInput, JobError
from cray_agents.loop import Budget
from cray_agents.loop.rollouts import success
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.records import Run
from cray_agents.runtime.datasets.reader import dataset_runs
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.loops import grouped
from tests.support.scripted_platform import platform

pytestmark = pytest.mark.slow

SKILL = {"m@1": 3, "m@2": 6, "m@3": 5, "m@4": 9}  # of 10 tasks, how many a version solves


@reward
def right(run: Run) -> float:
    return float(run.task is not None and run.output == run.task.target)


def answer(request: dict[str, Any], version: str) -> str:
    """Right on the tasks whose number's last digit is below the version's skill."""
    number = request["messages"][-1]["content"].split()[-1]
    return number if int(number) % 10 < SKILL.get(version, 0) else "wrong"


def tasks() -> TaskSet:
    def some(split: Any, numbers: range) -> list[Task]:
        return [Task(input=f"say {n}", target=str(n), split=split) for n in numbers]

    return TaskSet([*some("train", range(100)), *some("holdout", range(100, 140)),
                    *some("test", range(200, 220))])  # fmt: skip


def make_loop(**changes: Any) -> Loop:
    arguments: dict[str, Any] = {
        "rewards": [right],
        "tasks_per_iteration": 30,
        "training": Training(steps=1),
        "promotion": PromotionTest(hidden=0, batch=40),
        "concurrency": 8,
        "name": "loop",
    }
    settings = grouped(**arguments | changes)
    return Loop(Agent(name="a", model="m"), tasks(), **settings)


def stored_runs(root: Path) -> list[Run]:
    return Store(Home(root)).runs(RunQuery(loop="loop"))


def test_promotes_what_is_better_and_nothing_else(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        done = list(make_loop(platform=where).run_sync(3))
        assert [g.version for g in done] == ["m@1", "m@2", "m@3", "m@4"]
        assert [g.holdout_success for g in done] == [0.3, 0.6, 0.5, 0.9]
        assert [g.promoted for g in done] == [True, True, False, True]
        assert [g.test_success for g in done] == [0.3, None, None, 0.9]
        assert done[3].probe_max_logprob_diff == 0.0
        said = [(e.kind, e.version) for e in Registry(Home(tmp_path)).history("m")]
        assert said == [("promoted", 1), ("promoted", 2), ("rejected", 3), ("promoted", 4)]
        assert (done[1].wins, done[1].losses, done[1].ties) == (12, 0, 28)
        assert done[1].evidence is not None and done[1].evidence > 19
    runs = stored_runs(tmp_path)
    # iteration 3 sampled from the incumbent m@2, not from the rejected m@3
    versions = {run.iteration: run.model for run in runs if run.iteration is not None}
    assert versions == {1: "m@1", 2: "m@2", 3: "m@2"}
    assert all(call.token_ids for run in runs for call in run.calls)


@pytest.mark.parametrize("seeded", [True, False])
def test_training_runs_have_seeds_of_their_own(tmp_path: Path, seeded: bool) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        list(make_loop(platform=where, seeded=seeded, group_size=2).run_sync(2))
    runs = stored_runs(tmp_path)
    seeds = [run.calls[0].sampling.get("seed") for run in runs if run.iteration is not None]
    assert len(seeds) == 2 * 60
    assert len(set(seeds)) == (len(seeds) if seeded else 1) and (None in seeds) != seeded
    paired: dict[str, set[int]] = {}  # of held-out tasks: both versions have the same
    for run in runs:
        if run.task and run.task.split == "holdout":
            paired.setdefault(run.task.id, set()).add(run.calls[0].sampling["seed"])
    assert len(paired) == 40 and all(len(each) == 1 for each in paired.values())


def test_training_never_sees_a_held_out_task(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        done = list(make_loop(platform=where).run_sync(2))
        for iteration in done[1:]:
            splits = {run.id: run.task.split for run in stored_runs(tmp_path) if run.task}
            lines = dataset_runs(Home(tmp_path), iteration.dataset or "")
            used = [line["run"] for line in lines if line["accepted"]]
            assert used
            assert {splits[run] for run in used} == {"train"}


def test_shuffled_rewards_keep_the_count_and_lose_the_meaning(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        (_, trained) = list(make_loop(platform=where, control="shuffled-rewards").run_sync(1))
    rights = {run.id for run in stored_runs(tmp_path) if run.reward == 1 and run.iteration == 1}
    lines = dataset_runs(Home(tmp_path), trained.dataset or "")
    used = {line["run"] for line in lines if line["accepted"]}
    assert len(used) == len(rights)
    assert used != rights


def test_a_reward_that_fails_is_asked_again_and_never_counts(tmp_path: Path) -> None:
    """Not the run, but its reward is tried again: three times, and by each later loop."""
    tried = Counter[str]()

    @reward
    def flaky(run: Run) -> float:
        tried[run.input] += 1
        if run.input == "say 100" and tried[run.input] < 2:
            raise ConnectionError("the judge did not answer")
        if run.input == "say 101" and tried[run.input] < 5:
            raise ConnectionError("the judge is away")
        return right(run)

    engine = ScriptedEngine(answer)
    with platform(tmp_path, engine) as where:
        (first,) = list(make_loop(platform=where, rewards=[flaky], target=0.0).run_sync(1))
        assert first.holdout_success == pytest.approx(11 / 39)
        assert (tried["say 100"], tried["say 101"]) == (2, 3)
        [left] = [run for run in stored_runs(tmp_path) if run.error]
        assert (left.input, left.reward) == ("say 101", None)
        asked = len(engine.requests)
        again = make_loop(platform=where, rewards=[flaky])
        runs = asyncio.run(measure(again))
        assert success(runs) == 0.3
        assert tried["say 101"] == 5
        assert len(engine.requests) == asked


def test_a_reward_beyond_the_limit_is_an_error_of_its_run_and_not_of_the_loop(
    tmp_path: Path,
) -> None:
    @reward
    def huge(run: Run) -> float:
        return 1e9 if run.input == "say 3" else right(run)

    class Generous(Environment):
        def reset(self, task: Task, context: RunContext) -> None:
            context.reward(1e9 if task.input == "say 4" else 0.0)

    agent = Agent(name="a", model="m", environment=Generous)
    with platform(tmp_path, ScriptedEngine(answer)) as where:
        loop = make_loop(platform=where, rewards=[huge], tasks_per_iteration=100)
        (_, trained) = replace(loop, agent=agent).run_sync(1)
        alone = agent.override(base_url=f"{where.url}/v1").run_sync(Task(input="say 4"))
    failed = [run for run in stored_runs(tmp_path) if run.error]
    assert {run.input for run in failed} == {"say 3", "say 4"} and trained.failed_runs == 2
    for run in failed:
        assert run.error is not None and (run.error.type, run.reward) == ("RewardError", None)
        name = "huge" if run.input == "say 3" else "step"
        assert f"a reward of 1e+09 ({name}) is not taken" in run.error.message
    assert alone.error is not None and alone.error.type == "RewardError"  # recorded, not raised
    assert Store(Home(tmp_path)).run(alone.id).error == alone.error


async def measure(loop: Loop) -> list[Run]:
    version = await loop.platform.promoted("m")
    assert version is not None
    runs = await loop.evaluate(version, "holdout")
    await loop.platform.close()
    return runs


def test_a_candidate_that_is_not_proven_is_not_promoted(tmp_path: Path) -> None:
    engine = ScriptedEngine(answer)
    with platform(tmp_path, engine) as where:
        loop = make_loop(platform=where)
        steps = loop.run_sync(2)
        next(steps)
        engine.drift = 0.5  # from here on the engine's weights are not the trainer's
        second = next(steps)
        assert not second.promoted
        assert "check failed" in second.note
        assert Registry(Home(tmp_path)).resolve("m").id == "m@1"


def test_a_failed_job_says_why(tmp_path: Path) -> None:
    with (
        platform(tmp_path, ScriptedEngine(answer), failures={0: "the loss is NaN"}) as where,
        pytest.raises(JobError, match="the loss is NaN"),
    ):
        list(make_loop(platform=where).run_sync(1))


def test_bad_arguments_are_refused() -> None:
    loop: dict[str, Any] = {"agent": Agent("a", model="m"), "tasks": tasks(), "rewards": [right]}
    for method, told in (("ppo", "give a method"), ("grpo", r"give GRPO\(...\)"), ([], "methods")):
        with pytest.raises(BadInput, match=told):
            Loop(**loop | {"method": method})
    with pytest.raises(BadInput, match="no seed: give agent, tasks"):
        Loop(**loop | {"seed": 2})
    with pytest.raises(ValueError, match=r"group_size\n.*greater than or equal to 2"):
        GRPO(group_size=1)
    with pytest.raises(BadInput, match=r"method\[0\]: say for how many iterations"):
        make_loop(method=[RFT(), GRPO(group_size=2)])
    with pytest.raises(ValueError, match="evaluate_every=2 with parent 'promoted'"):
        make_loop(evaluate_every=2)
    with pytest.raises(BadInput, match="trains on demonstrations"):
        make_loop(method=SFT)
    with pytest.raises(BadInput, match="importance_cap"):
        make_loop(method=GRPO(importance_cap=None), max_staleness=1)
    with pytest.raises(BadInput, match="greedy runs"):
        make_loop(method=GRPO, group_size=2, temperature=0.0)
    with pytest.raises(BadInput, match="dynamic_sampling has no effect"):
        make_loop(dynamic_sampling=0.5)
    with pytest.raises(ValueError, match="straggler_quantile"):
        make_loop(straggler_quantile=0)
    with pytest.raises(BadInput, match="a control needs all runs"):
        make_loop(straggler_quantile=0.5, control="shuffled-rewards")
    with pytest.raises(ValueError, match="seconds"):
        Budget(seconds=0)
    with pytest.raises(BadInput, match="reward"):
        make_loop(rewards=[])
    with pytest.raises(BadInput, match="holdout"):
        Loop(Agent(name="a"), TaskSet([Task(input="x")]), rewards=[right])


async def test_it_runs_where_an_event_loop_runs(tmp_path: Path) -> None:
    with platform(tmp_path / "home", ScriptedEngine(answer)) as where:
        loop = make_loop(platform=where)
        assert [iteration.version for iteration in loop.run_sync(1)] == ["m@1", "m@2"]
        for _first in loop.run_sync(2):  # left early, and gone on with
            break
        assert [iteration.version for iteration in loop.run_sync(2)] == ["m@1", "m@2", "m@3"]


INTERRUPTED = """
import asyncio, signal, sys
from cray_agents import Agent, Loop, Platform, Task, TaskSet, reward

# a shell that starts tests in the background has it ignored
signal.signal(signal.SIGINT, signal.default_int_handler)

@reward
def right(run):
    return 0.0

tasks = TaskSet([Task(input=str(n), split="train" if n < 5 else "holdout") for n in range(70)])
loop = Loop(Agent(name="a", model="m"), tasks, rewards=[right], platform=Platform(sys.argv[1]),
            name="loop")

async def in_a_cell():
    try:
        list(loop.run_sync(1))
    finally:
        print(len(asyncio.all_tasks()), loop._components, flush=True)

asyncio.get_event_loop_policy().new_event_loop().run_until_complete(in_a_cell())
"""


def test_ctrl_c_ends_it_where_an_event_loop_runs(tmp_path: Path) -> None:
    asked = threading.Event()

    async def never(request: dict[str, Any]) -> str:
        asked.set()
        await asyncio.sleep(600)
        return ""

    with platform(tmp_path / "home", ScriptedEngine(never)) as where:
        argv = [sys.executable, "-c", INTERRUPTED, where.url]
        with subprocess.Popen(argv, stdout=-1, stderr=-1, text=True) as process:
            assert asked.wait(120)
            process.send_signal(signal.SIGINT)
            out, error = process.communicate(timeout=120)
    assert out == "1 None\n" and error.splitlines()[-1] == "KeyboardInterrupt", error
