"""Rollouts that go on while jobs train: which version they sample from, the gate, stragglers."""

import asyncio
from collections import Counter
from collections.abc import Awaitable, Callable
from pathlib import Path
from typing import Any

import pytest

from cray_agents import GRPO, Agent, Platform, PromotionTest, TaskSet, tool
from cray_agents.agent.hooks import Hooks
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import SwapError
from cray_agents.iteration import Iteration, LoopProgress
from cray_agents.loop.version_gate import GatedEngine, VersionGate
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.records import Run
from cray_agents.runtime.datasets.reader import dataset_runs
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.killable_loop import echo, shape, signed, site_loop, some_tasks
from tests.support.scripted_platform import platform
from tests.support.timed_trainer import TimedTrainer

pytestmark = pytest.mark.slow

ASYNC: dict[str, Any] = {"method": GRPO, "group_size": 3, "tasks_per_iteration": 8}


def runs_of(root: Path, iteration: int) -> list[Run]:
    return Store(Home(root)).runs(RunQuery(loop="loop", iteration=iteration))


@pytest.mark.parametrize("staleness", [1, 2])
def test_samples_from_the_version_decided_so_many_iterations_before(
    tmp_path: Path, staleness: int
) -> None:
    seen: list[LoopProgress] = []
    with platform(tmp_path, ScriptedEngine(echo),
                  trainer=TimedTrainer(Home(tmp_path), 0.3)) as where:  # fmt: skip
        loop = site_loop(max_staleness=staleness, platform=where, on_progress=seen.append, **ASYNC)
        done = list(loop.run_sync(4))
        again = site_loop(max_staleness=staleness, platform=where, **ASYNC)
        assert shape(list(again.run_sync(4))) == shape(done)

    def after(number: int) -> str:
        """What was decided with an iteration."""
        return done[number].onward or next(g for g in done[number::-1] if g.promoted).version

    for iteration in done[1:]:
        number = iteration.iteration
        assert iteration.sampled_from == after(max(0, number - 1 - staleness))
        assert {run.model for run in runs_of(tmp_path, number)} == {iteration.sampled_from}
        lines = dataset_runs(Home(tmp_path), iteration.dataset or "")
        used = {line["run"] for line in lines if line["accepted"]}
        assert used <= {run.id for run in runs_of(tmp_path, number)}
    # the second iteration's runs were there before the first one's job was done
    jobs = [Home(tmp_path).job(g.job or "") / "status.json" for g in done[1:]]
    begun = min(run.started for run in runs_of(tmp_path, 2))
    assert begun < jobs[0].stat().st_mtime


def test_a_bound_of_zero_is_the_synchronous_loop(tmp_path: Path) -> None:
    with platform(tmp_path, ScriptedEngine(echo),
                  trainer=TimedTrainer(Home(tmp_path), 0.1)) as where:  # fmt: skip
        done = list(site_loop(platform=where, **ASYNC).run_sync(2))
    first = Home(tmp_path).job(done[1].job or "") / "status.json"
    assert min(run.started for run in runs_of(tmp_path, 2)) > first.stat().st_mtime


def with_two_versions(tmp_path: Path, work: Callable[[VersionGate, Any], Awaitable[None]]) -> None:
    """Run `work(gate, ask)` over one replica and the versions that two iterations made."""
    engine = ScriptedEngine(lambda request, version: f"{version}")
    with platform(tmp_path, engine) as where:
        list(site_loop(platform=where, rewards=[always_better], tasks=few()).run_sync(1))

        async def main() -> None:
            gate = VersionGate(where)
            await gate.look()

            async def ask(number: int) -> str:
                version = await where.version(f"m@{number}")
                passing = GatedEngine(where.engine(), gate, version)
                message = {"role": "user", "content": "which?"}
                answer = await passing.chat({"model": version.id, "messages": [message]})
                return str(answer["choices"][0]["message"]["content"])

            await work(gate, ask)
            await where.close()

        asyncio.run(main())


def few() -> TaskSet:
    return some_tasks(12, 20, 0)


def always_better(run: Run) -> float:
    return float(run.model != "m@1" or run.task is None or run.task.split == "train")


def test_versions_take_turns_on_one_replica_and_each_call_gets_its_own(tmp_path: Path) -> None:
    async def work(gate: VersionGate, ask: Any) -> None:
        numbers = [1, 2] * 10
        said = await asyncio.gather(*map(ask, numbers))
        assert said == [f"m@{number}" for number in numbers]

    with_two_versions(tmp_path, work)


def test_no_call_for_another_version_goes_on_while_one_is_evaluated(tmp_path: Path) -> None:
    async def work(gate: VersionGate, ask: Any) -> None:
        version = await gate._platform.version("m@2")
        async with gate.only(version):
            held_back = asyncio.create_task(ask(1))
            assert [await ask(2) for _ in range(5)] == ["m@2"] * 5
            assert not held_back.done()
        assert await held_back == "m@1"

    with_two_versions(tmp_path, work)


def test_a_call_that_is_cut_off_at_the_gate_leaves_it_usable(tmp_path: Path) -> None:
    async def work(gate: VersionGate, ask: Any) -> None:
        for _ in range(3):
            cut_off = asyncio.create_task(ask(1))
            await asyncio.sleep(0)
            cut_off.cancel()
            await asyncio.gather(cut_off, return_exceptions=True)
        assert await ask(2) == "m@2"
        assert await ask(1) == "m@1"

    with_two_versions(tmp_path, work)


def test_a_version_that_cannot_be_proven_is_an_error_and_others_go_on(tmp_path: Path) -> None:
    async def work(gate: VersionGate, ask: Any) -> None:
        missing = (await gate._platform.version("m@1")).model_copy(update={"number": 1})
        assert await ask(1) == "m@1"
        with pytest.raises((SwapError, LookupError)):
            await gate.stage(missing.model_copy(update={"number": 99}))
        assert await ask(1) == "m@1"

    with_two_versions(tmp_path, work)


class Slow:
    """A tool that takes until it is let go, on some tasks of an iteration's."""

    def __init__(self) -> None:
        self.let_go = asyncio.Event()
        self.waiting = 0

    def tool(self) -> Any:
        @tool
        async def look_up(number: int) -> str:
            """Look a number up."""
            if number % 5 == 0:
                self.waiting += 1
                await self.let_go.wait()
            return "found"

        return look_up


def by_attempt(run: Run) -> float:
    """Each group has both."""
    return float((run.attempt or 0) % 2)


def looks_up(request: dict[str, Any]) -> Any:
    last = request["messages"][-1]
    if last["role"] == "user" and int(last["content"].split()[-1]) < 1000:
        return tool_call("look_up", number=int(last["content"].split()[-1]))
    return echo(request)


def test_slow_tools_do_not_hold_up_the_others_and_their_runs_are_carried_over(
    tmp_path: Path,
) -> None:
    """The first iteration closes without them; its successor trains on what came late."""
    done: list[Iteration] = []

    async def go(where: Platform) -> None:
        slow = Slow()
        agent = Agent(name="a", model="m", tools=[slow.tool()],
                      hooks=[Hooks(before_model=signed)])  # fmt: skip
        loop = site_loop(agent=agent, tasks=some_tasks(60, 40, 0),
                         straggler_quantile=0.6, concurrency=16,
                         rewards=[by_attempt], promotion=PromotionTest(hidden=0), platform=where,
                         **ASYNC | {"tasks_per_iteration": 20})  # fmt: skip
        async for iteration in loop.run(2):
            done.append(iteration)
            if iteration.iteration == 1:
                assert slow.waiting > 0
                slow.let_go.set()
        await where.close()

    with platform(tmp_path, ScriptedEngine(looks_up)) as where:
        asyncio.run(go(where))
    _, first, second = done
    runs = runs_of(tmp_path, 1)
    assert first.runs < len(runs) == 60
    assert second.carried == 60 - first.runs
    late = {run.id for run in runs if int(run.input.split()[-1]) % 5 == 0}
    lines = [dataset_runs(Home(tmp_path), g.dataset or "") for g in (first, second)]
    used = [{line["run"] for line in each if line["accepted"]} for each in lines]
    assert not used[0] & late
    assert used[1] & late
    assert not used[0] & used[1]  # none is trained on twice
    assert {run.model for run in runs} == {"m@1"}  # those that came late, too
    assert set(Counter(run.id for run in runs).values()) == {1}
