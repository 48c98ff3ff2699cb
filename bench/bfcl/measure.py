"""Answers of a version to entries of the benchmark, and what of them was right.

A platform is started on the folder of an arm, serves its promoted version in bfloat16 on both
cores, and every entry is answered once. Nothing is recorded: these runs teach nothing.
"""

import asyncio
import os
from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from cray_agents.config import load_config
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.server.platform_process import client, serving

TINY = os.environ.get("CRAY_BENCH_TINY") == "1"
AT_ONCE = 64
#: Settings of `up`. 64 prompts of 700 tokens take 1 GiB; the trainer is beside.
REPLICA = {"dtype": "bfloat16", "threads": 1 if TINY else 2, "kv_cache_gib": 1.5}
NAME = "caller"


@contextmanager
def platform(home: Path, model: Path | None = None) -> Iterator[Platform]:
    """The platform of an arm. `model`: what it begins with."""
    config = load_config({"home": home, "port": 0, **REPLICA})
    with serving(config, model=model, name=NAME, ready=True) as info:
        yield client(info)


async def promoted(where: Platform) -> Any:
    """The promoted version."""
    version = await where.promoted(NAME)
    assert version is not None
    return version


def checkpoint(home: Path, model: Path | None = None) -> Path:
    """The directory of the checkpoint that an arm's folder promotes. `model`: as of `platform`."""
    with platform(home, model) as where:
        version = asyncio.run(_closed(where, promoted))
    return Home(home).checkpoint(version.checkpoint)


def answers(
    where: Platform,
    calling: Any,
    entries: Sequence[dict[str, Any]],
    said: Callable[[str], None],
    temperature: float = 0.0,
    attempts: int = 1,
) -> dict[str, list[str | None]]:
    """The answers to each entry by its id; None for a prompt that the model has no room for."""

    async def ask(where: Platform) -> dict[str, list[str | None]]:
        version, places = await promoted(where), asyncio.Semaphore(AT_ONCE)
        agent = calling.agent().at(version)  # with the prompt that an arm learned
        agent = agent.override(engine=where.engine(), temperature=temperature, recorder=None)
        given: dict[str, list[str | None]] = defaultdict(list)

        async def one(entry: dict[str, Any], attempt: int) -> None:
            async with places:
                run = await agent.run(calling.task(entry), seed=attempt)
            if run.error is not None and run.error.infrastructure:
                raise RuntimeError(f"{entry['id']}: {run.error.message}")
            given[entry["id"]].append(None if run.error else run.output)
            done = sum(map(len, given.values()))
            if done % 100 == 0:
                said(f"{done} of {attempts * len(entries)} answers")

        async with asyncio.TaskGroup() as group:
            for entry in entries:
                for attempt in range(attempts):
                    group.create_task(one(entry, attempt))
        return given

    return asyncio.run(_closed(where, ask))


async def _closed(where: Platform, ask: Callable[[Platform], Any]) -> Any:
    try:
        return await ask(where)
    finally:
        await where.close()


def marks(calling: Any, given: dict[str, list[str | None]]) -> dict[str, str]:
    """By category a text of 1 and 0, BFCL's verdict on each entry, in the order of their ids."""
    verdicts: dict[str, str] = defaultdict(str)
    for name in sorted(given):
        entry = calling.entries[name]
        calls = calling.prompt.read(given[name][0] or "")
        verdicts[entry["category"]] += str(int(calling.right(entry, calls)))
    return dict(verdicts)


def load() -> float:
    """The load of the machine: a benchmark's figures are to be read with it."""
    return round(os.getloadavg()[0], 1)
