"""Hooks: what they see, change and refuse, and what becomes of a run whose hook fails."""

import asyncio
from typing import Any

import pytest

from cray_agents import Run, RunContext, tool
from cray_agents.agent import Hooks
from cray_agents.records import ModelCall, ToolCall
from cray_agents.tools.calculator import calculator
from tests.support.model_scripts import SUM, agent, asks, script


async def test_all_moments_in_order():
    seen: list[Any] = []

    async def before_run(context: RunContext) -> None:
        seen.append(("run begins", context.messages[0]["role"], context.deps))

    def before_model(request: dict[str, Any], context: RunContext) -> None:
        seen.append(("model asked", context.turn, len(request["messages"])))

    async def after_model(call: ModelCall, context: RunContext) -> None:
        seen.append(("model said", call.message["content"]))

    def before_tool(call: ToolCall, context: RunContext) -> None:
        seen.append(("tool asked", call.name, call.result))

    def after_tool(call: ToolCall, context: RunContext) -> None:
        seen.append(("tool said", call.result, context.turn))

    def after_run(run: Run, context: RunContext) -> None:
        seen.append(("run ended", run.output, recorded[:]))

    recorded: list[Run] = []

    async def keep(run: Run) -> None:
        recorded.append(run)

    hooks = Hooks(
        before_run=before_run, after_run=after_run, before_model=before_model,
        after_model=after_model, before_tool=before_tool, after_tool=after_tool,
    )  # fmt: skip
    a = agent(script(asks(SUM), "432"), tools=[calculator], hooks=[hooks], recorder=keep)
    run = await a.override(instructions="Add.").run("go", deps="mine")
    assert seen == [
        ("run begins", "system", "mine"),
        ("model asked", 0, 2), ("model said", None),
        ("tool asked", "calculator", None), ("tool said", 432, 0),
        ("model asked", 1, 4), ("model said", "432"),
        ("run ended", "432", []),
    ]  # fmt: skip
    assert recorded == [run]


async def test_a_changed_request_is_what_is_sent_and_recorded():
    def warmer(request: dict[str, Any], context: RunContext) -> dict[str, Any]:
        return {**request, "temperature": 0.9, "messages": [*request["messages"], EXTRA]}

    async def header(request: dict[str, Any], context: RunContext) -> dict[str, Any]:
        return {**request, "extra_headers": {"X-Team": "blue", "X-Run-Id": "forged"}}

    engine = script("ok", "ok")
    a = agent(engine, hooks=[Hooks(before_model=warmer), Hooks(before_model=header)])
    run = await a.run("go", run_id="r")
    sent = engine.requests[0]
    assert sent["temperature"] == 0.9 and sent["messages"][-1] == EXTRA
    assert sent["extra_headers"]["X-Team"] == "blue" and sent["extra_headers"]["X-Run-Id"] == "r"
    assert run.calls[0].messages == sent["messages"]
    assert run.calls[0].sampling == {"temperature": 0.9}
    assert EXTRA not in run.trajectory.messages
    await a.override(hooks=()).run("go", run_id="r")
    keys = [request["extra_headers"]["Idempotency-Key"] for request in engine.requests]
    assert keys[0] != keys[1]


EXTRA = {"role": "user", "content": "It is noon."}


async def test_a_refused_tool_call_is_told_and_recorded():
    def careful(call: ToolCall, context: RunContext) -> str | None:
        return "ask a person first" if call.name == "delete" else None

    @tool
    def delete() -> None:
        raise AssertionError("it ran")

    engine = script(asks(("delete", {}), SUM), "ok")
    run = await agent(engine, tools=[delete, calculator], hooks=[Hooks(before_tool=careful)]).run(
        ""
    )
    refused, done = run.trajectory.turns[0].tool_calls
    assert (refused.error, refused.result) == ("ask a person first", None) and done.result == 432
    assert engine.requests[1]["messages"][-2]["content"] == "Error: ask a person first"


def fail(*arguments: Any) -> None:
    raise LookupError("no such row")


@pytest.mark.parametrize(
    "moment",
    ["before_run", "before_model", "after_model", "before_tool", "after_tool", "after_run"],
)
async def test_a_hook_that_fails_is_the_runs_error(moment):
    kept: list[Run] = []

    async def keep(run: Run) -> None:
        kept.append(run)

    a = agent(script(asks(SUM), "432"), tools=[calculator], recorder=keep)
    run = await a.override(hooks=[Hooks(**{moment: fail})]).run("go")
    assert (run.stop_reason, run.output) == ("error", None) and kept == [run]
    assert run.error is not None and run.error.infrastructure
    assert run.error.message == f"the hook {moment} (fail) failed: LookupError: no such row"


@pytest.mark.parametrize(("moment", "wrong"), [("before_model", [1]), ("before_tool", False)])
async def test_a_hook_that_returns_something_odd(moment, wrong):
    a = agent(script(asks(SUM), "432"), tools=[calculator])
    run = await a.override(hooks=[Hooks(**{moment: lambda *_: wrong})]).run("go")
    assert run.error is not None and f"the hook {moment} (<lambda>) returned" in run.error.message


async def test_a_hook_that_fails_ends_the_other_tool_calls_too():
    ended = asyncio.Event()

    @tool
    async def wait() -> str:
        try:
            await asyncio.Event().wait()
        finally:
            ended.set()
        return ""

    def first_alone(call: ToolCall, context: RunContext) -> None:
        if call.name == "calculator":
            raise LookupError

    engine = script(asks(("wait", {}), SUM), "x")
    a = agent(engine, tools=[wait, calculator], hooks=[Hooks(after_tool=first_alone)])
    run = await a.run("go")
    assert run.stop_reason == "error" and len(engine.requests) == 1
    await asyncio.wait_for(ended.wait(), 5)
