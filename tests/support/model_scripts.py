"""Replies of scripted models, for tests of agents, and the time that passes meanwhile."""

import asyncio
from typing import Any

from cray_agents import Agent
from cray_agents.testing import ScriptedEngine

SUM = ("calculator", {"expression": "47 + 385"})


def script(*replies: Any) -> ScriptedEngine:
    """Replies one after another, or one function for all."""
    every = len(replies) == 1 and callable(replies[0])
    return ScriptedEngine(replies[0] if every else replies)


def asks(*calls: tuple[str, Any]) -> list[dict[str, Any]]:
    """The reply that asks for these tools: (name, arguments) pairs."""
    return [
        {"id": f"call_{number}", "name": name, "arguments": arguments}
        for number, (name, arguments) in enumerate(calls)
    ]


def pass_time(seconds: float) -> None:
    """Let so many seconds pass at once for all that the running event loop waits for."""
    loop = asyncio.get_running_loop()
    now = loop.time
    loop.time = lambda: now() + seconds  # type: ignore[method-assign]


def agent(engine: Any, **options: Any) -> Agent:
    return Agent(**{"name": "a", "model": "calc", "engine": engine, **options})
