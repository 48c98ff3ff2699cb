"""A run that is cut off, at whatever moment: what is recorded, and what is ended first."""

import asyncio
from typing import Any

import pytest

from cray_agents import Environment, Run, RunContext, Task, tool
from cray_agents.agent import Hooks
from cray_agents.agent.sessions import MemorySession
from cray_agents.agent.stream_events import ModelFinished
from cray_agents.engines.no_real_models import no_real_models
from cray_agents.errors import RealModelCall
from tests.support.model_scripts import SUM, agent, asks, pass_time, script


class Recorder:
    """Keeps runs, one loop's turn after it was asked to."""

    def __init__(self) -> None:
        self.began = asyncio.Event()
        self.runs: list[Run] = []

    async def __call__(self, run: Run) -> None:
        self.began.set()
        for _ in range(3):
            await asyncio.sleep(0)
        self.runs.append(run)


async def cancelled(running: asyncio.Task[Any]) -> None:
    running.cancel()
    with pytest.raises(asyncio.CancelledError):
        await running


async def test_a_stream_left_after_its_last_answer_is_recorded_and_remembered():
    kept, session = Recorder(), MemorySession()
    events = agent(script("4"), recorder=kept).stream("go", session=session)
    async for event in events:
        if isinstance(event, ModelFinished):
            await kept.began.wait()
            break
    await events.aclose()
    assert [(run.output, run.stop_reason) for run in kept.runs] == [("4", "completed")]
    assert [message["content"] for message in session.messages] == ["go", "4"]


async def test_a_cancellation_breaks_off_neither_record_nor_teardown():
    ending, ended = asyncio.Event(), []

    class World(Environment):
        async def teardown(self) -> None:
            ending.set()
            await asyncio.sleep(0)
            ended.append(self)

    kept = Recorder()
    running = asyncio.create_task(agent(script("4"), environment=World, recorder=kept).run("go"))
    await ending.wait()
    await cancelled(running)
    assert [run.output for run in kept.runs] == ["4"] and len(ended) == 1


async def test_a_reset_that_is_cut_off_cleans_up_before_the_teardown():
    order: list[str] = []
    resetting = asyncio.Event()

    class World(Environment):
        async def reset(self, task: Task, context: RunContext) -> None:
            resetting.set()
            try:
                await asyncio.Event().wait()
            finally:
                await asyncio.sleep(0)
                order.append("reset")

        def teardown(self) -> None:
            order.append("teardown")

    kept = Recorder()
    running = asyncio.create_task(agent(script("4"), environment=World, recorder=kept).run("go"))
    await resetting.wait()
    await cancelled(running)
    assert order == ["reset", "teardown"]
    assert [run.stop_reason for run in kept.runs] == ["cancelled"]


async def test_the_run_of_a_sub_agent_is_recorded_before_its_parents():
    async def never(request: Any) -> str:
        pass_time(45)
        await asyncio.Event().wait()
        return ""

    kept = Recorder()
    sub = agent(script(never), name="sub", recorder=kept)
    parent = agent(script(asks(("sub", {"input": "?"}))), tools=[sub.as_tool()], recorder=kept)
    await parent.override(timeout=30).run("go")
    assert [(run.agent, run.stop_reason) for run in kept.runs] == [
        ("sub", "cancelled"), ("a", "timeout"),
    ]  # fmt: skip


async def test_a_runs_end_is_no_failure_of_a_tool_that_is_tried_again():
    calls = 0

    @tool(retries=3)
    async def slow() -> str:
        nonlocal calls
        calls += 1
        pass_time(45)
        await asyncio.Event().wait()
        return ""

    engine = script(asks(("slow", {})), "ok")
    run = await agent(engine, tools=[slow], timeout=30).run("go")
    assert (run.stop_reason, calls, len(engine.requests)) == ("timeout", 1, 1)


async def test_tool_calls_that_were_cut_off_stand_in_the_models_order():
    @tool
    async def hang() -> str:
        for _ in range(99):  # turns of the event loop: the other call is done after few of them
            await asyncio.sleep(0)
        pass_time(45)
        await asyncio.Event().wait()
        return ""

    @tool
    async def work() -> str:
        return "done"

    engine = script(asks(("hang", {}), ("work", {})))
    run = await agent(engine, tools=[hang, work], timeout=30).run("go")
    hung, done = run.trajectory.turns[0].tool_calls
    assert (hung.name, hung.error) == ("hang", "the run ended before this call did")
    assert (done.name, done.result, done.error) == ("work", "done", None)


async def test_after_run_sees_the_environment_and_may_reward():
    class World(Environment):
        def reset(self, task: Task, context: RunContext) -> None:
            self.open = True

        def teardown(self) -> None:
            self.open = False

    def judge(run: Run, context: RunContext) -> None:
        assert context.environment.open
        context.reward(len(run.output), "length")

    kept = Recorder()
    run = await agent(
        script("four"), environment=World, hooks=[Hooks(after_run=judge)], recorder=kept
    ).run("go")
    assert [(r.name, r.value, r.turn) for r in run.rewards] == [("length", 4.0, 0)]
    assert kept.runs == [run]


async def test_the_guard_of_tests_holds_in_sub_agents_too():
    sub = agent(None, name="sub", base_url="http://127.0.0.1:9/v1", recorder=None)
    parent = agent(script(asks(("sub", {"input": "?"}), SUM), "ok"), tools=[sub.as_tool()])
    with no_real_models(), pytest.raises(RealModelCall):
        await parent.run("go")
