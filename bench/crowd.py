"""Processor time that a model call costs its caller when many are in flight at once.

Our engine against one openai client, which it is made of, on a server that answers at once from a
process of its own. Processor time: noisy neighbours hardly touch it.
"""

import asyncio
import time
from collections.abc import Awaitable, Callable
from functools import partial
from pathlib import Path
from typing import Any

import openai

from bench.rivals.agent_overhead import scripted_server
from bench.rounds import side_by_side
from cray_agents.agent import OpenAIEngine

CALLS = 2000
ASK: dict[str, Any] = {"model": "m", "messages": [{"role": "user", "content": "hi"}]}
Call = Callable[[], Awaitable[Any]]


async def main(home: Path) -> None:
    """A row for each number of calls at a time."""
    with scripted_server() as url:
        for width in (1, 64, 512):
            await side_by_side(
                f"a model call, {width} at a time",
                "ms of processor time",
                {"our engine": partial(_ours, url, width), "openai": partial(_theirs, url, width)},
            )


async def _ours(url: str, width: int) -> float:
    engine = OpenAIEngine(url, exact_tokens=False)
    try:
        return await _cost(partial(engine.chat, ASK), width)
    finally:
        await engine.close()


async def _theirs(url: str, width: int) -> float:
    async with openai.AsyncOpenAI(base_url=url, api_key="none") as client:
        return await _cost(partial(client.chat.completions.create, **ASK), width)


async def _cost(call: Call, width: int) -> float:
    """Milliseconds a call, once connections are open."""

    async def several(count: int) -> None:
        for _ in range(count):
            await call()

    await asyncio.gather(*(several(1) for _ in range(width)))
    each = CALLS // width
    begun = time.process_time()
    await asyncio.gather(*(several(each) for _ in range(width)))
    return 1000 * (time.process_time() - begun) / (each * width)
