"""A store of many small runs to export, written without a gateway: two turns, a tool, a reward."""

import asyncio
from collections.abc import Iterator
from typing import Any

from cray_agents.paths import Home
from cray_agents.records import Event
from cray_agents.runtime.store import Store

TOOLS = [{"type": "function", "function": {"name": "f", "parameters": {"type": "object"}}}]
ATTEMPTS = 4  # at each task
AT_ONCE = 2_000  # events in an append


def name_of(number: int) -> str:
    return f"run-{number:07d}"


def events_of(number: int, *, words: int = 10) -> list[Event]:
    """A run's two calls, its description and its reward; the same for the same number."""
    name, task = name_of(number), number // ATTEMPTS
    asked: list[Any] = [{"role": "user", "content": f"question {task}"}]
    calls = [{"id": "c0", "type": "function", "function": {"name": "f", "arguments": "{}"}}]
    told = {"role": "tool", "tool_call_id": "c0", "content": "result"}
    first: Any = {"role": "assistant", "content": None, "tool_calls": calls}
    last: Any = {"role": "assistant", "content": f"answer {number} " + "word " * words}
    prompt, sampled = [1, 2, task % 100, task // 100], [10 + number % 50, 11, 12]
    bodies = [
        _call(f"{name}.0", name, asked, first, prompt, sampled, number),
        _call(f"{name}.1", name, [*asked, first, told], last, [*prompt, *sampled, 4], [13, 14],
              number),
    ]  # fmt: skip
    run = {
        "id": name,
        "agent": "agent",
        "model": "m@1",
        "input": f"question {task}",
        "output": last["content"],
        "stop_reason": "completed",
        "trajectory": {
            "messages": [*asked, first, told, last],
            "turns": [
                {"call_id": f"{name}.0",
                 "tool_calls": [{"id": "c0", "name": "f", "arguments": "{}", "result": "result"}]},
                {"call_id": f"{name}.1"},
            ],
        },
        "task": {"id": f"task-{task:06d}", "input": f"question {task}", "target": str(task),
                 "split": "train",
                 "metadata": {"kind": task % 3}},
        "loop": "l",
        "iteration": 1,
        "attempt": number % ATTEMPTS,
        "started": 1_700_000_000.0 + number,
        "seconds": 0.5,
        "tags": ["small"],
    }  # fmt: skip
    reward = {"name": "right", "value": float(number % 2), "source": "test", "time": 1.0}
    return [
        *(Event(id=b["id"], run_id=name, kind="call", body=b, time=1.0) for b in bodies),
        Event(id=f"{name}.run", run_id=name, kind="run", body=run, time=2.0),
        Event(id=f"{name}.right", run_id=name, kind="reward", body=reward, time=3.0),
    ]


def _call(
    call_id: str,
    run: str,
    messages: list[Any],
    message: Any,
    prompt: list[int],
    sampled: list[int],
    number: int,
) -> dict[str, Any]:
    return {
        "id": call_id,
        "run_id": run,
        "model": f"m@{1 + number % 2}",
        "messages": messages,
        "message": message,
        "tools": TOOLS,
        "prompt_token_ids": prompt,
        "token_ids": sampled,
        "logprobs": [-0.5 - 0.25 * place for place in range(len(sampled))],
        "finish_reason": "stop",
        "started": 1_700_000_000.0 + number,
        "seconds": 0.25,
    }


def filled(home: Home, count: int, **how: Any) -> Store:
    """A store of so many runs."""

    def events() -> Iterator[Event]:
        for number in range(count):
            yield from events_of(number, **how)

    async def write() -> None:
        store = Store(home)
        some: list[Event] = []
        for event in events():
            some.append(event)
            if len(some) >= AT_ONCE:
                await store.append(some)
                some = []
        await store.append(some)
        await store.close()

    asyncio.run(write())
    return Store(home)
