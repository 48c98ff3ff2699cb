"""Agents for agents: as a tool, and taking over a run."""

import asyncio
from typing import Any

import pytest
from pydantic import BaseModel

from cray_agents import Agent, Environment, Run, RunContext, tool
from cray_agents.agent import Hooks
from cray_agents.agent.stream_events import Handoff
from cray_agents.errors import BadInput, EngineUnavailable, StoreError
from cray_agents.records import ToolCall
from cray_agents.tools.calculator import calculator
from tests.support.model_scripts import SUM, agent, asks, script


class Sum(BaseModel):
    value: int


# ---- as a tool


async def test_an_agent_as_a_tool_has_runs_of_its_own():
    kept: list[Run] = []

    async def keep(run: Run) -> None:
        kept.append(run)

    @tool
    def who(context: RunContext) -> str:
        """Who asks."""
        return context.deps["user"]

    inner = Agent(
        name="number cruncher", model="calc", output_type=Sum, description="It adds.",
        tools=[who], instructions="Add.", recorder=keep,
    )  # fmt: skip

    def say(request: dict[str, Any]) -> Any:
        asked = request["messages"][-1]
        if request["messages"][0]["content"] == "Delegate.":
            return "432" if asked["role"] == "tool" else asks(("number_cruncher", {"input": "sum"}))
        return '{"value": 432}' if asked["role"] == "tool" else asks(("who", {}))

    engine = script(say)
    outer = agent(engine, instructions="Delegate.", tools=[inner.as_tool()], recorder=keep)
    run = await outer.run("go", deps={"user": "Ada"}, model="calc@7", run_id="parent")
    assert outer.tool_schemas[0]["function"]["description"] == "It adds."
    assert run.trajectory.turns[0].tool_calls[0].result == {"value": 432}
    child, parent = kept
    assert parent == run and child.id != run.id
    assert (child.agent, child.input, child.output) == ("number cruncher", "sum", Sum(value=432))
    assert child.tags == ["parent:parent"]
    assert child.trajectory.turns[0].tool_calls[0].result == "Ada"
    # at the version that the parent is pinned to, and with an id that a repeated run has again
    assert [request["model"] for request in engine.requests] == ["calc@7"] * 4
    again = await outer.run("go", deps={"user": "Ada"}, model="calc@7", run_id="parent")
    assert again.id == "parent" and kept[2].id == child.id
    assert all("seed" not in request for request in engine.requests)
    for _ in range(2):
        await outer.run("go", deps={"user": "Ada"}, run_id="parent", seed=7)
    seeds = [request["seed"] for request in engine.requests[8:]]
    mine, theirs, more, last = seeds[:4]
    assert (mine, last, more) == (7, 8, theirs + 1) and theirs not in (6, 7, 8)
    assert seeds[4:] == seeds[:4]


async def test_a_sub_agent_of_another_model_and_engine():
    own = script("deep")
    inner = Agent(name="inner", model="other", engine=own)
    a = agent(script(asks(("look", {"input": "x"})), "ok"), tools=[inner.as_tool("look", "Look.")])
    run = await a.run("go", model="calc@7")
    assert run.trajectory.turns[0].tool_calls[0].result == "deep"
    assert own.requests[0]["model"] == "other"
    assert a.tool_schemas[0]["function"]["description"] == "Look."


async def test_a_sub_agent_without_an_answer_is_a_failed_tool():
    inner = Agent(name="inner", tools=[calculator], max_turns=1)
    engine = script(asks(("inner", {"input": "x"})), asks(SUM), "sorry")
    run = await agent(engine, tools=[inner.as_tool()]).run("go")
    assert run.output == "sorry"
    assert run.trajectory.turns[0].tool_calls[0].error == "inner came to no answer: max_turns"
    wrong = Agent(name="inner", output_type=int, output_retries=0)
    engine = script(asks(("inner", {"input": "x"})), "x", "sorry")
    run = await agent(engine, tools=[wrong.as_tool()]).run("go")
    assert "The answer is not of type int" in run.trajectory.turns[0].tool_calls[0].error


async def test_what_the_infrastructure_does_to_a_sub_agent_ends_the_run_that_asked_it():
    inner = Agent(name="inner")
    engine = script(asks(("inner", {"input": "x"})), EngineUnavailable("it is gone"), "sorry")
    run = await agent(engine, tools=[inner.as_tool()]).run("go")
    assert (run.stop_reason, run.output, len(engine.requests)) == ("error", None, 2)
    assert run.error is not None and run.error.infrastructure
    assert run.error.type == "SubagentError"
    assert run.error.message == (
        "inner was failed by the infrastructure: EngineUnavailable: it is gone"
    )

    async def full(run: Run) -> None:
        raise StoreError("the disk is full")

    kept = Agent(name="inner", recorder=full)
    engine = script(asks(("inner", {"input": "x"})), "deep", "sorry")
    run = await agent(engine, tools=[kept.as_tool()]).run("go")
    assert run.error is not None and run.error.infrastructure
    assert "the disk is full" in run.error.message


def test_an_agent_that_cannot_be_named():
    with pytest.raises(BadInput, match="give as_tool a name"):
        Agent(name="!").as_tool()


# ---- taking over


async def test_a_handoff_switches_who_speaks_within_the_run():
    billing = Agent(
        name="billing desk", instructions="You bill.", model="calc", tools=[calculator],
        output_type=int, temperature=0.3, description="Knows the prices.",
    )  # fmt: skip
    engine = script(asks(("transfer_to_billing_desk", {})), asks(SUM), "432")
    triage = agent(engine, instructions="You sort.", handoffs=[billing], temperature=0.0)
    transfer = triage.tool_schemas[0]["function"]
    assert transfer["name"] == "transfer_to_billing_desk"
    assert "Knows the prices." in transfer["description"]
    events = [event async for event in triage.stream("How much?", model="calc@7", run_id="r")]
    run = events[-1].run
    assert [event for event in events if isinstance(event, Handoff)] == [Handoff("billing desk")]
    assert (run.output, run.stop_reason, run.agent) == (432, "completed", "a")
    first, second, third = engine.requests
    assert first["messages"][0]["content"] == "You sort."
    assert second["messages"][0]["content"] == "You bill."
    assert [m["role"] for m in second["messages"]] == ["system", "user", "assistant", "tool"]
    assert [t["function"]["name"] for t in second["tools"]] == ["calculator"]
    assert [r["temperature"] for r in engine.requests] == [0.0, 0.3, 0.3]
    assert [r["model"] for r in engine.requests] == ["calc@7"] * 3
    assert {r["extra_headers"]["X-Run-Id"] for r in engine.requests} == {"r"}
    assert len(run.trajectory.turns) == 3 and run.calls[2].messages == third["messages"]
    assert run.trajectory.turns[0].tool_calls[0].result == "billing desk has taken over."


async def test_a_handoff_to_an_engine_of_its_own_and_limits_that_stay():
    own = script(asks(SUM), asks(SUM), asks(SUM))
    other = Agent(name="other", engine=own, model="big", tools=[calculator], max_turns=50)
    engine = script(asks(("transfer_to_other", {})))
    run = await agent(engine, handoffs=[other], max_turns=3).run("go", model="calc@7")
    assert (run.stop_reason, len(run.trajectory.turns)) == ("max_turns", 3)
    assert [request["model"] for request in own.requests] == ["big", "big"]


async def test_who_took_over_is_held_by_hooks_of_his_own_and_those_of_the_run():
    seen: list[str] = []

    def note(who: str) -> Hooks:
        return Hooks(
            before_run=lambda context: seen.append(f"{who} before_run"),
            before_tool=lambda call, context: seen.append(f"{who} {call.name}"),
        )

    def refuse(call: ToolCall, context: RunContext) -> str:
        return "ask a person"

    shared = note("shared")
    other = Agent(name="other", tools=[calculator], hooks=[shared, Hooks(before_tool=refuse)],
                  parallel_tool_calls=False)  # fmt: skip
    engine = script(asks(("transfer_to_other", {})), asks(SUM), "no")
    run = await agent(engine, handoffs=[other], hooks=[note("run"), shared]).run("go")
    assert run.trajectory.turns[1].tool_calls[0].error == "ask a person"
    assert seen == [
        "run before_run", "shared before_run", "run transfer_to_other", "shared transfer_to_other",
        "run calculator", "shared calculator",
    ]  # fmt: skip


async def test_who_takes_over_keeps_his_tool_calls_in_order():
    running, most = 0, 0

    async def work() -> None:
        nonlocal running, most
        running += 1
        most = max(most, running)
        await asyncio.sleep(0)
        running -= 1

    other = Agent(name="other", tools=[work], parallel_tool_calls=False)
    engine = script(asks(("transfer_to_other", {})), asks(("work", {}), ("work", {})), "ok")
    assert (await agent(engine, handoffs=[other]).run("go")).output == "ok" and most == 1


def test_an_environment_that_would_have_no_effect():
    other = Agent(name="other", environment=Environment)
    with pytest.raises(BadInput, match="give first the environment of other"):
        Agent(name="first", handoffs=[other])


async def test_a_second_handoff_is_of_the_second_agent():
    last = Agent(name="last")
    middle = Agent(name="middle", handoffs=[last])
    engine = script(asks(("transfer_to_last", {})), asks(("transfer_to_middle", {})),
                    asks(("transfer_to_last", {})), "done")  # fmt: skip
    run = await agent(engine, handoffs=[middle]).run("go")
    assert run.output == "done"
    assert run.trajectory.turns[0].tool_calls[0].error.startswith("there is no tool")
    assert [[t["function"]["name"] for t in r.get("tools", ())] for r in engine.requests] == [
        ["transfer_to_middle"], ["transfer_to_middle"], ["transfer_to_last"], [],
    ]  # fmt: skip


async def test_of_several_handoffs_in_one_message_the_first_alone_is_told_as_done():
    sales, billing = (agent(None, name=name, instructions=name) for name in ("sales", "billing"))
    both = asks(("transfer_to_billing", {}), ("transfer_to_sales", {}))
    engine = script(both, "ok")
    run = await agent(engine, handoffs=[sales, billing]).run("go")
    first, second = run.trajectory.turns[0].tool_calls
    assert first.result == "billing has taken over."
    assert second.result is None and "another was named first" in (second.error or "")
    assert engine.requests[1]["messages"][0]["content"] == "billing"
