"""Runs of a loop: whose fault it is that one failed, and what is done again."""

import asyncio
import json
from collections.abc import AsyncIterator, Awaitable, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import pytest

from cray_agents import Agent, Platform, PromotionTest, Task, judge_group
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import EngineUnavailable, SwapError
from cray_agents.iteration import Iteration, LoopProgress
from cray_agents.loop import rollouts
from cray_agents.loop.rollouts import RolloutRequest, Rollouts
from cray_agents.loop.version_gate import GatedEngine, VersionGate
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.records import ModelVersion, Run
from cray_agents.runtime.datasets.reader import dataset_runs
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.killable_loop import shape, site_loop, some_tasks
from tests.support.scripted_platform import platform
from tests.support.scripted_pool import Mortal
from tests.support.waiting import until

pytestmark = pytest.mark.slow

TARGET = "yes"


def right(run: Run) -> float:
    return float(run.output == TARGET)


def said_to(request: dict[str, Any]) -> str:
    return str(request["messages"][-1]["content"])


def wanted(*inputs: str) -> list[RolloutRequest]:
    return [RolloutRequest(Task(input=text, target=TARGET), "g1", iteration=1) for text in inputs]


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "BACKOFF", 0.02)


@asynccontextmanager
async def opened(where: Platform) -> AsyncIterator[tuple[VersionGate, ModelVersion]]:
    """A gate that has looked, and the version that is served."""
    gate, version = VersionGate(where), await where.promoted("m")
    assert version is not None
    await gate.look()
    try:
        yield gate, version
    finally:
        await where.close()


async def carried_out(
    where: Platform, agent: Agent, *inputs: str, final: bool = False
) -> list[Run]:
    """The runs of a loop that begins anew each time."""
    async with opened(where) as (gate, version):
        found = Rollouts(where, gate, agent, "loop", [right], concurrency=1)
        return await found.run(wanted(*inputs), version, 1.0, lambda done: None, final=final)


def slow_at(word: str) -> Callable[[dict[str, Any]], Awaitable[str]]:
    """What an engine says that takes its time over one input."""

    async def says(request: dict[str, Any]) -> str:
        if said_to(request) == word:
            await asyncio.sleep(30)
        return TARGET

    return says


def stored(root: Path, **query: Any) -> list[Run]:
    return Store(Home(root)).runs(RunQuery(**query))


# ---- whose fault it is


async def test_a_run_that_is_too_slow_by_itself_has_its_reward(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(slow_at("slowly"))) as where:
        (slow,) = await carried_out(where, Agent("a", model="m", timeout=3), "slowly")
        (quick,) = await carried_out(where, Agent("a", model="m"), "at once")
    assert (slow.stop_reason, slow.error, slow.reward) == ("timeout", None, 0.0)
    assert (quick.stop_reason, quick.reward) == ("completed", 1.0)
    assert len(stored(tmp_path, loop="loop")) == 2


class Slow(Mortal):
    """Comes back when it may."""

    back = False

    async def start(self, checkpoint: Path, version: str) -> None:
        while self.starts and not self.back:  # noqa: ASYNC110 - the test tells
            await asyncio.sleep(0.02)
        await super().start(checkpoint, version)


@pytest.mark.parametrize(
    ("late", "why"), [(True, "no replica serves m@1"), (False, "m@1 was restarted")]
)
async def test_a_replica_that_restarts_is_not_the_agents_fault(
    tmp_path: Path, late: bool, why: str
) -> None:
    async def says(request: dict[str, Any]) -> Any:
        if host.starts == 1:
            host.die()
            return EngineUnavailable("it died")
        if host.starts == 2 and len(engine.requests) == 2 and not late:
            await asyncio.sleep(30)
        return TARGET

    engine = ScriptedEngine(says)
    host = Slow(engine)
    host.back = not late
    with platform(tmp_path, host) as where:
        agent = Agent("a", model="m", timeout=3)
        trying = asyncio.create_task(carried_out(where, agent, "go"))
        await until(lambda: stored(tmp_path, loop="loop") or trying.done())
        host.back = True
        (run,) = await trying
    assert run.reward == 1.0
    failed = [each for each in stored(tmp_path, loop="loop") if each.reward is None]
    assert failed
    for each in failed:
        assert each.stop_reason == "timeout" and each.error is not None
        assert each.error.infrastructure and why in each.error.message


async def test_a_sub_agent_that_is_held_back_is_not_at_fault(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(lambda request: TARGET)) as where:
        async with opened(where) as (gate, version):
            gate._only = "m@2"  # as while a candidate is evaluated
            passing = GatedEngine(where.engine(), gate, version)
            child = Agent("child", model=version.id, timeout=2)
            held = await child.through(passing).run("go")
            gate._only = None
            child = child.override(timeout=None)
            assert (await child.through(passing).run("go")).output == TARGET
    assert held.error is not None and held.error.infrastructure
    assert (held.stop_reason, held.error.type) == ("timeout", "HeldBack")


def asks_another(request: dict[str, Any]) -> Any:
    """The one that is instructed asks the other, and says what that says."""
    last = request["messages"][-1]
    if request["messages"][0]["role"] != "system":
        return TARGET
    return last["content"] if last["role"] == "tool" else tool_call("other", input="what?")


def test_runs_of_sub_agents_are_on_record_and_not_the_loops_own(tmp_path: Path) -> None:
    other = Agent("other", model="m")
    agent = Agent("a", "Ask the other.", model="m", tools=[other.as_tool()])
    with platform(tmp_path, ScriptedEngine(asks_another)) as where:
        loop = site_loop(platform=where, agent=agent, rewards=[right], tasks=some_tasks(8, 12, 0),
                         tasks_per_iteration=8, promotion=PromotionTest(hidden=0))  # fmt: skip
        _, first = list(loop.run_sync(1))
    parents = {run.id: run for run in stored(tmp_path, loop="loop")}
    children = [run for run in stored(tmp_path) if run.agent == "other"]
    assert len(children) == len(parents) and first.runs == 8
    for child in children:
        assert (child.loop, child.iteration, child.task, child.reward) == (None, None, None, None)
        (tag,) = child.tags
        parent = parents[tag.removeprefix("parent:")]
        assert (child.model, child.output) == (parent.model, TARGET)
    lines = dataset_runs(Home(tmp_path), first.dataset or "")
    assert {line["run"] for line in lines} == {r.id for r in parents.values() if r.iteration == 1}


async def test_a_sub_agents_run_that_was_cut_off_leaves_no_record(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(slow_at("hang"))) as where:
        async with opened(where) as (gate, version):
            child = Agent("child", model=version.id).through(
                GatedEngine(where.engine(), gate, version)
            )
            work = asyncio.create_task(child.run("hang", run_id="run_c"))
            await asyncio.sleep(0.3)
            work.cancel()
            await asyncio.gather(work, return_exceptions=True)
            await child.run("go", run_id="run_c")
            assert (await where.run("run_c")).output == TARGET


# ---- what is done again


async def test_what_the_infrastructure_failed_is_tried_again_when_it_is_asked_for_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    broken = True
    monkeypatch.setattr(rollouts, "BACKOFF", 0.1)

    def says(request: dict[str, Any]) -> Any:
        return SwapError("it will not") if broken and said_to(request) == "bad" else TARGET

    def tried() -> list[Run]:
        runs = [run for run in stored(tmp_path, loop="loop") if run.input == "bad"]
        return sorted(runs, key=lambda run: run.started)

    agent = Agent("a", model="m")
    with platform(tmp_path, ScriptedEngine(says)) as where:
        for _ in range(2):
            bad, good = await carried_out(where, agent, "bad", "good")
            assert (bad.reward, good.reward) == (None, 1.0)
        names = [run.id.partition("-")[2] for run in tried()]
        assert names == ["", "retry1", "retry2", "retry3", "retry4"]
        starts = [run.started for run in tried()]
        first, second = starts[1] - starts[0], starts[2] - starts[1]
        assert first >= 0.1 and second >= 0.4
        broken = False
        bad, _ = await carried_out(where, agent, "bad", "good", final=True)
        assert (bad.reward, len(tried())) == (None, 5)
        bad, _ = await carried_out(where, agent, "bad", "good")
        assert (bad.reward, bad.id) == (1.0, tried()[-1].id) and bad.id.endswith("-retry5")
        again, _ = await carried_out(where, agent, "bad", "good")
        assert (again.id, len(tried())) == (bad.id, 6)


@pytest.mark.parametrize("split", ["train", "holdout"])
def test_a_loop_whose_runs_the_infrastructure_failed_goes_on_when_it_is_mended(
    tmp_path: Path, split: str
) -> None:
    broken = True

    def says(request: dict[str, Any]) -> Any:
        held_out = int(said_to(request).split()[-1]) >= 1000
        if broken and held_out == (split == "holdout"):
            return SwapError("it will not")
        return TARGET

    def loop(where: Platform) -> Any:
        return site_loop(platform=where, agent=Agent("a", model="m"), rewards=[right],
                         tasks=some_tasks(8, 12, 0), tasks_per_iteration=8,
                         promotion=PromotionTest(hidden=0))  # fmt: skip

    with platform(tmp_path, ScriptedEngine(says)) as where:
        with pytest.raises(EngineUnavailable, match=r"all of (8|12) runs.*it will not.*goes on"):
            list(loop(where).run_sync(1))
        broken = False
        _, first = list(loop(where).run_sync(1))
        assert (first.runs, first.accepted_runs, first.failed_runs) == (8, 8, 0)
        assert first.holdout_success == 1.0


@pytest.mark.parametrize("control", [None, "shuffled-rewards"])
def test_an_iteration_keeps_what_its_training_set_was_made_of(
    tmp_path: Path, control: str | None
) -> None:
    """Killed while its job trains, it does not try again what the infrastructure had failed."""
    broken = True

    def says(request: dict[str, Any]) -> Any:
        number = int(said_to(request).split()[-1])
        if number < 3 and broken:
            return SwapError("it will not")
        return TARGET if number % 2 else "no"

    class Killed(BaseException):
        pass

    def killing(progress: LoopProgress) -> None:
        if progress.phase == "train":
            raise Killed

    def done(root: Path, kill: bool) -> list[Iteration]:
        nonlocal broken
        broken = True
        with platform(root, ScriptedEngine(says)) as where:
            settings = {"platform": where, "agent": Agent("a", model="m"), "rewards": [right],
                        "tasks": some_tasks(12, 12, 0), "tasks_per_iteration": 12,
                        "promotion": PromotionTest(hidden=0), "control": control}  # fmt: skip
            if kill:
                with pytest.raises(BaseException) as death:
                    list(site_loop(**settings, on_progress=killing).run_sync(1))
                assert "Killed" in repr(death.value)
                broken = False
            return list(site_loop(**settings).run_sync(1))

    calm, killed = done(tmp_path / "calm", False), done(tmp_path / "killed", True)
    assert calm[1].failed_runs == 3 and shape(killed) == shape(calm)


# ---- what is found out about the server


# ---- a judge of whole groups


async def test_a_group_is_judged_when_all_have_ended_also_after_a_kill(tmp_path: Path) -> None:
    """A judge that fails, or a loop that dies before it, leaves runs that are judged later."""
    engine, asked = ScriptedEngine(lambda request: said_to(request) + "!"), list[str]()
    broken = True

    def compare(request: dict[str, Any]) -> str:
        asked.append(said_to(request))
        if broken:
            raise EngineUnavailable("nobody there")
        scores = {f"attempt_{place + 1}": place / 10 for place in range(asked[-1].count("<<< ans"))}
        return json.dumps({"comparison": "so", **scores})

    best = judge_group("Best?", model="judge", name="best", engine=ScriptedEngine(compare))
    requests = [
        RolloutRequest(Task(input=text), "g1", attempt, 1)
        for text in ("one", "two")
        for attempt in range(3)
    ]
    with platform(tmp_path, engine) as where:
        agent = Agent("a", model="m")
        async with opened(where) as (gate, version):

            async def collect() -> list[Run]:
                new = Rollouts(where, gate, agent, "loop", [best, right], concurrency=1)
                return await new.run(requests, version, 1.0, lambda done: None)

            unjudged = await collect()
            broken = False
            judged = await collect()
            again = await collect()
    assert [run.reward for run in unjudged] == [None] * 6
    assert {run.error and run.error.type for run in unjudged} == {"RewardError"}
    assert len(engine.requests) == 6, "no run is done twice"
    for group in (judged[:3], judged[3:]):
        assert {run.reward for run in group} == {0.0, 0.1, 0.2}
        assert all(run.error is None and len(run.rewards) == 2 for run in group)
    assert [(r.id, r.reward) for r in again] == [(r.id, r.reward) for r in judged]
    assert len(asked) == 2 * (1 + rollouts.RETRIES) + 2
    kept = {run.id: run.reward for run in stored(tmp_path, loop="loop")}
    assert kept == {run.id: run.reward for run in judged}
