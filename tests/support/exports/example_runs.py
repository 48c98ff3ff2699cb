"""Runs to export: some recorded by a real gateway from real agents, some made up to be nasty."""

import asyncio
import contextlib
import json
import threading
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any

import openai
import pytest

from cray_agents import Agent, Task, tool
from cray_agents.engines.openai_engine import OpenAIEngine
from cray_agents.errors import BadInput, CrayError, EngineError, ToolError
from cray_agents.paths import Home
from cray_agents.records import (
    Message,
    ModelCall,
    Redaction,
    Reward,
    Run,
    RunError,
    StopReason,
    ToolCall,
    Trajectory,
    Turn,
)
from cray_agents.runtime.exports.export_format import LOSSES, LineFormat, Written, line_of
from cray_agents.runtime.exports.exporter import FORMATS
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from cray_agents.tools.calculator import calculator
from tests.support.scripted_platform import platform
from tests.support.waiting import until

#: Those that write a run, or a pair, by itself.
LINE_FORMATS = {
    name: form
    for name, form in FORMATS.items()
    if isinstance(form, LineFormat) and form.with_store is None
}
SUM = Task(input="What is 47 + 385?", target="432", metadata={"kind": "sum"}, id="sum")
HISTORY: list[Message] = [
    {"role": "user", "content": "Earlier?"},
    {"role": "assistant", "content": "Earlier."},
]


BEGUN = threading.Event()  # the tool that never answers


@tool
def refuse(reason: str) -> str:
    """Refuse.

    Args:
        reason: why.
    """
    raise ToolError(f"refused: {reason}")


@tool
def table(rows: int) -> list[dict[str, int]]:
    """A table."""
    return [{"row": row} for row in range(rows)]


@tool
async def forever() -> str:
    """Never answers."""
    BEGUN.set()
    await asyncio.Event().wait()
    return "late"


def asks(name: str, call_id: str = "call_0", **arguments: Any) -> dict[str, Any]:
    return {"id": call_id, "name": name, "arguments": arguments}


#: What the model says in the run of this name; the input ends in it.
SCRIPTS: dict[str, list[Any]] = {
    "calc": [asks("calculator", expression="47 + 385"), "It is 432."],
    "wrong": [asks("calculator", "call_other", expression="47 + 385"), "It is 431."],
    "lazy": ["Some number."],
    "parallel": [
        {
            "role": "assistant",
            "content": "Both at once.",
            "tool_calls": [
                {
                    "id": f"call_{number}",
                    "type": "function",
                    "function": {"name": "table", "arguments": f'{{"rows": {number}}}'},
                }
                for number in (1, 2)
            ],
        },
        "Done: ä ✓ 𝔘.",
    ],
    "mangled": [{"name": "calculator", "arguments": '{"expression": '}, "I give up."],
    "refused": [asks("refuse", reason="no"), "It was refused."],
    "endless": [asks("calculator", expression="1"), asks("calculator", expression="2")],
    "broken": [asks("calculator", expression="1 + 1"), EngineError("the engine died", status=400)],
    "mute": [EngineError("the engine died", status=400)],
    "stopped": [asks("forever")],
    "history": ["Later."],
    "thinking": [{"role": "assistant", "content": "So.", "reasoning": "I think."}],
    "empty": [{"role": "assistant", "content": ""}],
    "again": ["no number", "17"],
}


#: Attempts at the task of another run: the same input, told apart by the seed: ten for each.
ATTEMPTS = {"calc": 0, "wrong": 1, "lazy": 2}


def said(request: dict[str, Any]) -> Any:
    """The next reply to the run whose name its question ends in."""
    messages = request["messages"]
    asked = [m for m in messages if m["role"] == "user" and "|" in m["content"]][-1]["content"]
    name = asked.split("|")[1]
    number = sum(message["role"] == "assistant" for message in messages) - (name == "history")
    if name == "calc" and (seed := request.get("seed")) is not None:
        name = next(name for name, attempt in ATTEMPTS.items() if attempt == seed // 10)
    return SCRIPTS[name][number]


async def _record(url: str) -> None:
    engine = OpenAIEngine(url, retries=0)
    agent = Agent(
        name="clerk",
        instructions="Use the tools.",
        tools=[calculator, refuse, table, forever],
        model="m",
        engine=engine,
        temperature=0.5,
        max_turns=2,
        sampling={"top_k": 3, "parallel_tool_calls": True},
    )

    async def run(name: str) -> None:
        chosen = agent.override(output_type=int) if name == "again" else agent
        asked = "calc" if name in ATTEMPTS else name
        task = SUM.model_copy(update={"input": f"{SUM.input} |{asked}", "id": f"task-{asked}"})
        work = chosen.run(
            task,
            run_id=f"run-{name}",
            history=HISTORY if name == "history" else (),
            loop="l",
            iteration=1,
            attempt=ATTEMPTS.get(name),
            seed=10 * ATTEMPTS[name] if name in ATTEMPTS else None,
        )
        running = asyncio.create_task(work)
        if name == "stopped":
            await until(BEGUN.is_set)
            running.cancel()
        with contextlib.suppress(CrayError, asyncio.CancelledError):
            await running

    BEGUN.clear()
    await asyncio.gather(*map(run, SCRIPTS))
    await _told(engine)
    await engine.close()


async def _told(engine: OpenAIEngine) -> None:
    """What a plain client asks, whose runs nobody describes: with a tool, and for three answers."""
    messages: list[Any] = [{"role": "user", "content": "|calc"}]
    tools: Any = [calculator_schema()]
    headers = {"X-Run-Id": "run-told"}
    client = openai.AsyncOpenAI(base_url=engine.base_url, api_key="none")
    for _ in range(2):
        answer = await client.chat.completions.create(
            model="m", messages=messages, tools=tools, extra_headers=headers
        )
        message = answer.choices[0].message.model_dump(exclude_none=True)
        messages.append(message)
        for call in message.get("tool_calls") or ():
            messages.append({"role": "tool", "tool_call_id": call["id"], "content": "432"})
    asked: Any = [{"role": "user", "content": "|lazy"}]
    await client.chat.completions.create(
        model="m", messages=asked, n=3, extra_headers={"X-Run-Id": "run-many"}
    )


def calculator_schema() -> dict[str, Any]:
    return Agent(name="a", tools=[calculator]).tool_schemas[0]


def recorded(root: Path) -> dict[str, Run]:
    """A run for each script, as the store gives it; `told` and `many` are told by their calls."""
    with platform(root, ScriptedEngine(said)) as where:
        asyncio.run(_record(where.url))
    home = Home(root)
    store = Store(home)
    runs = {name: store.run(f"run-{name}") for name in [*SCRIPTS, "told", "many"]}
    score = Reward(name="correct", value=1.0, time=1_700_000_009.5)
    runs["calc"] = runs["calc"].model_copy(update={"rewards": [score], "tags": ["a", "b:c"]})
    return runs


def made(run_id: str = "run-made", messages: list[Any] | None = None, **more: Any) -> Run:
    """A run by hand."""
    trajectory = more.pop("trajectory", None) or Trajectory(messages=messages or [])
    fields: dict[str, Any] = {
        "agent": "clerk",
        "model": "m@1",
        "input": "x",
        "stop_reason": StopReason.completed,
        "started": 1_700_000_000.25,
        "seconds": 1.5,
        **more,
    }
    return Run(id=run_id, trajectory=trajectory, **fields)


def chat(*said: str) -> list[Message]:
    """Texts of user and assistant in turn."""
    return [
        {"role": "assistant" if place % 2 else "user", "content": text}
        for place, text in enumerate(said)
    ]


def called(messages: list[Any], message: Message, call_id: str = "c", **more: Any) -> ModelCall:
    """A call by hand."""
    fields: dict[str, Any] = {
        "prompt_token_ids": [1, 2],
        "token_ids": [3, 4],
        "logprobs": [-0.5, -9999.0],
        "finish_reason": "stop",
        "started": 1_700_000_000.5,
        "seconds": 0.25,
        **more,
    }
    return ModelCall(
        id=call_id, run_id="run-made", model="m@1", messages=messages, message=message, **fields
    )


def of_calls(*calls: ModelCall, messages: list[Any] | None = None, **more: Any) -> Run:
    """A run by hand that is told by its calls."""
    turns = [Turn(call_id=call.id, call=call) for call in calls]
    return made(trajectory=Trajectory(messages=messages or [], turns=turns), **more)


def nasty() -> dict[str, Run]:
    """Runs that are odd in one way each, all of which some format carries."""
    question: Message = {"role": "user", "content": "x"}
    answer: Message = {"role": "assistant", "content": "y"}
    flat = {"type": "function", "name": "f", "parameters": {"type": "object", "properties": {}}}
    blocks = {"name": "g", "description": "d", "input_schema": {"type": "object"}}
    image = {"type": "image_url", "image_url": {"url": "https://a.test/i.png", "detail": "low"}}
    wild: Message = {
        "role": "assistant",
        "content": None,
        "tool_calls": [
            {"id": "a", "type": "function", "function": {"name": "f", "arguments": "not json"}},
            {"id": "b", "type": "function", "function": {"name": "f", "arguments": "[1]"}},
            {"id": "c", "type": "function", "function": {"name": "f"}},
        ],
    }
    results = [{"role": "tool", "tool_call_id": name, "content": name} for name in "cab"]
    unfinished = ToolCall(id="a", name="f", arguments="{}", error="the run ended before this did")
    asked_a = {"id": "a", "type": "function", "function": {"name": "f", "arguments": "{}"}}
    cut: Message = {"role": "assistant", "content": None, "tool_calls": [asked_a]}
    return {
        "nothing": made(
            error=RunError(type="EngineUnavailable", message="no", infrastructure=True)
        ),
        "no_messages": of_calls(called([question], answer)),
        "no_answer": made(messages=[question]),
        "completions": of_calls(called([question], answer, api="/v1/completions")),
        "token_prompt": of_calls(
            called([{"role": "user", "content": [5, 6]}], answer, api="/v1/completions")
        ),
        "responses": of_calls(called([question], answer, api="/v1/responses", tools=[flat])),
        "anthropic": of_calls(called([question], answer, api="/v1/messages", tools=[blocks])),
        "builtin": of_calls(called([question], answer, tools=[{"type": "web_search"}])),
        "tools_changed": of_calls(
            called([question], answer, "c1", tools=[flat]),
            called([question, answer, question], {"role": "assistant", "content": "z"}, "c2"),
        ),
        "image": made(messages=[{"role": "user", "content": [image]}, answer]),
        "audio": made(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "input_audio", "input_audio": {"data": "QQ=="}}],
                },
                answer,
            ]
        ),
        "parts": made(
            messages=[
                {
                    "role": "user",
                    "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}],
                },
                answer,
            ]
        ),
        "wild": of_calls(called([question], wild), messages=[question, wild, *results, answer]),
        "refusal": made(
            messages=[question, {"role": "assistant", "content": None, "refusal": "No."}]
        ),
        "untold": of_calls(called([question], {"role": "assistant", "content": None})),
        "weights": made(messages=[question, {**answer, "weight": 0}, question, answer]),
        "developer": made(messages=[{"role": "developer", "content": "d"}, question, answer]),
        "named": made(messages=[{**question, "name": "Ann"}, answer]),
        "orphan": made(messages=[question, results[0], answer]),
        "late": made(
            messages=[question, cut, answer, {**results[0], "tool_call_id": "a"}, question, answer]
        ),
        "strange": made(messages=[{"role": None, "content": "x"}, answer]),
        "surrogate": made(messages=[{"role": "user", "content": "\ud800"}, answer]),
        "cancelled": made(
            trajectory=Trajectory(
                messages=[question, cut],
                turns=[
                    Turn(call_id="c", call=called([question], cut, "c"), tool_calls=[unfinished])
                ],
            ),
            stop_reason=StopReason.cancelled,
        ),
        "lost_call": made(
            trajectory=Trajectory(
                messages=[question, cut, {**results[0], "tool_call_id": "a"}, answer],
                turns=[
                    Turn(
                        call_id="gone",
                        tool_calls=[ToolCall(id="a", name="f", arguments="{}", result=[1])],
                    ),
                    Turn(call_id="gone2"),
                ],
            )
        ),
        "trimmed": of_calls(
            called([question], answer, "c1"),
            called([{"role": "user", "content": "short"}], {"role": "assistant", "content": "z"}),
            messages=[question, answer, question, {"role": "assistant", "content": "z"}],
        ),
        "two": of_calls(
            called(
                [{"role": "user", "content": "sub"}], {"role": "assistant", "content": "s"}, "s"
            ),
            called([question], answer, "c2"),
        ),
        "redacted": of_calls(
            called(
                [question],
                answer,
                prompt_token_ids=[],
                token_ids=[],
                logprobs=[],
                redacted=[Redaction(kind="email", count=2)],
            ),
            redacted=[Redaction(kind="email", count=2)],
        ),
        "infinite": made(
            messages=[question, answer], rewards=[Reward(name="r", value=float("inf"))]
        ),
        "unicode": made(
            messages=[{"role": "user", "content": "\x00\u2028 ½ 🦊"}, {**answer, "content": "𝔘\n"}],
            tags=["ü"],
        ),
        "imported": made(
            trajectory=Trajectory(
                messages=[question, cut, {**results[0], "tool_call_id": "a"}, answer],
                tools=[{"type": "function", "function": {"name": "f"}}],
            ),
            imported="openai",
            started=0.0,
        ),
    }


def stated_losses(
    write: Callable[[Run], Written], runs: dict[str, Run], expected: Mapping[str, set[str] | str]
) -> Iterator[tuple[Run, list[dict[str, Any]]]]:
    """Check each run's losses beyond conversation_only, or its error. Yield those with records."""
    for name, want in expected.items():
        if isinstance(want, str):
            with pytest.raises(BadInput, match=want) as caught:
                write(runs[name])
            assert caught.value.code == "unsupported_export"
            assert runs[name].id in str(caught.value)
            continue
        records, losses = write(runs[name])
        assert set(losses) == want | {"conversation_only"}, name
        assert set(losses) <= set(LOSSES)
        for record in records:
            assert json.loads(line_of(runs[name], record)) == record
        yield runs[name], records
