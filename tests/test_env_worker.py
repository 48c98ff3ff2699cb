"""Environment workers: loops over TRL environments, and what happens when either side fails."""

import asyncio
import ctypes
import re
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from cray_agents import RFT, Agent, Data, Loop, Platform, PromotionTest, Task, TaskSet, Training
from cray_agents.agent import WorkerEnvironment
from cray_agents.engines.scripted import tool_call
from cray_agents.errors import BadInput
from cray_agents.loop import rollouts
from cray_agents.loop.rollouts import RolloutRequest, Rollouts
from cray_agents.loop.version_gate import VersionGate
from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.records import Run
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from tests.support.environments.trl_environments import rows
from tests.support.environments.workers import TRL, worker
from tests.support.scripted_platform import platform
from tests.support.waiting import until

SKILL = {"m@1": 1, "m@2": 6, "m@3": 1}  # of the first numbers 0 to 5, how many are added right


def add(request: dict[str, Any], version: str) -> Any:
    """Submit the sum, or too much; then say so."""
    last = request["messages"][-1]
    if last["role"] == "tool":
        return "done"
    a, b = map(int, re.findall(r"\d+", last["content"])[-2:])
    return tool_call("submit", number=a + b + (a >= SKILL.get(version, 6)))


def adder(**changes: Any) -> Agent:
    given: dict[str, Any] = {"name": "adder", "model": "m", **changes}
    return Agent(environment=WorkerEnvironment("trl"), **given)


def tasks() -> TaskSet:
    made = [
        Task(input="Work.", metadata=row, identity=["a", "b"],
             split="holdout" if row["b"] > 2 else "train")
        for row in rows
    ]  # fmt: skip
    return TaskSet(made)


def stored(root: Path) -> list[Run]:
    return Store(Home(root)).runs(RunQuery(loop="loop"))


async def carried_out(
    where: Platform, agent: Agent, given: list[Task], beside: Any = None
) -> list[Run]:
    """The runs of a loop on these tasks."""
    version = await where.promoted("m")
    assert version is not None
    gate = VersionGate(where)
    await gate.look()
    made = Rollouts(where, gate, agent, "loop", [], concurrency=8)
    wanted = [RolloutRequest(task, "g1", iteration=1) for task in given]
    try:
        running = asyncio.create_task(made.run(wanted, version, 1.0, lambda done: None))
        if beside is not None:
            await beside()
        return await running
    finally:
        await where.close()


@pytest.fixture(autouse=True)
def soon(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(rollouts, "BACKOFF", 0.02)


@pytest.mark.slow
def test_a_loop_trains_on_an_environment_of_trl(tmp_path: Path) -> None:
    loop = Loop(
        adder(max_tokens=50),
        tasks(),
        rewards=[],
        name="loop",
        method=RFT(tasks_per_iteration=18, training=Training(steps=1)),
        data=Data(min_reward=1.5),
        promotion=PromotionTest(hidden=0, batch=18, high=1.5),
    )
    functions = f"rewards={TRL}:brevity"
    with (
        platform(tmp_path, ScriptedEngine(add)) as where,
        worker(where, "trl", f"{TRL}:Adder", "--option", functions, "--slots", 2),
    ):
        loop.platform = where
        done = list(loop.run_sync(2))
    assert [g.version for g in done] == ["m@1", "m@2", "m@3"]
    assert [g.promoted for g in done] == [True, True, False]
    runs = stored(tmp_path)
    assert len(runs) == len({run.id for run in runs}) and not [r for r in runs if r.error]
    for run in runs:
        a = run.task.metadata["a"]
        right = float(a < SKILL[run.model])
        given = {reward.name: reward.value for reward in run.rewards}
        assert given == {"Adder": right} | ({} if a == 5 else {"brevity": 0.5})
        assert [call.run_id for call in run.calls] == [run.id, run.id]
        assert all(call.token_ids for call in run.calls)
        assert (
            run.calls[0].messages[-1]["content"] == f"Work. Add {a} and {run.task.metadata['b']}."
        )
        assert run.calls[0].tools[0]["function"]["parameters"]["required"] == ["number"]
        assert run.calls[0].sampling["max_tokens"] == 50
        assert (run.agent, run.output) == ("adder", "done")
    assert {run.calls[0].sampling["temperature"] for run in runs} == {0.0, 1.0}


@pytest.mark.slow
def test_a_killed_worker_loses_no_run_and_doubles_none(tmp_path: Path) -> None:
    calls: list[str] = []

    async def slow(request: dict[str, Any], version: str) -> Any:
        calls.append(version)
        if len(calls) <= 2:
            await asyncio.sleep(30)  # until the worker is killed
        return add(request, version)

    given = list(tasks().split("train"))[:6]
    with platform(tmp_path, ScriptedEngine(slow)) as where:
        options: Any = (where, "trl", f"{TRL}:Adder", "--slots", 2)
        with worker(*options, "--lease", 1) as first:  # the second one loses no run to a pause

            async def kill() -> None:
                await until(lambda: len(calls) >= 2)
                first.process.send_signal(signal.SIGKILL)
                begun.append(worker(*options))
                begun[0].__enter__()

            begun: list[Any] = []
            try:
                runs = asyncio.run(carried_out(where, adder(), given, kill))
            finally:
                begun[0].__exit__(None, None, None)
    assert [run.error for run in runs] == [None] * 6
    records = stored(tmp_path)
    lost = [run for run in records if run.error]
    assert {run.error.type for run in lost} == {"WorkerLost"} and len(lost) == 2
    assert sorted(run.id for run in records if not run.error) == sorted(run.id for run in runs)
    assert all(len(run.calls) == 2 for run in runs)


@pytest.mark.slow
@pytest.mark.skipif(sys.platform != "linux", reason="sends a signal to one thread by glibc")
def test_a_worker_ends_whichever_thread_takes_the_signal(tmp_path: Path) -> None:
    def threads(pid: int) -> list[int]:
        return [int(path.name) for path in Path(f"/proc/{pid}/task").glob("*")]

    with (
        platform(tmp_path, ScriptedEngine(add)) as where,
        worker(where, "trl", f"{TRL}:Adder", "--slots", 1) as begun,
    ):
        pid = begun.process.pid
        asyncio.run(until(lambda: begun.lines and len(threads(pid)) == 2))
        (slot,) = set(threads(pid)) - {pid}
        assert ctypes.CDLL(None).tgkill(pid, slot, signal.SIGTERM) == 0
        assert begun.process.wait(120) == 0


def test_an_agent_of_a_worker_runs_in_loops_alone() -> None:
    with pytest.raises(BadInput, match="only a Loop runs it"):
        adder().run_sync("x")
    with pytest.raises(BadInput, match="letters, digits"):
        WorkerEnvironment("a b")
