"""A root with many recorded runs, written as sealed segments: what a store looks like after months.

Each run is a conversation of two turns about a task, with a call of 200 tokens, the agent's
description and a reward: three events, about 4 KB.
"""

import random
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from functools import partial
from pathlib import Path
from typing import Any

import orjson

from cray_agents.paths import Home
from cray_agents.runtime.disk.checksums import with_crc
from cray_agents.runtime.store.segments.sealed import write_sealed

PART = 15_000  # runs of a segment
START = 1_750_000_000.0
AGENTS = ("calc", "search", "coder", "support")


def write_corpus(home: Home, runs: int) -> None:
    """Write so many runs; two processes do it."""
    home.segments.mkdir(parents=True)
    parts = range(0, runs, PART)
    with ProcessPoolExecutor(2) as pool:
        list(pool.map(partial(_write, home.root, runs), parts))


def _write(root: Path, runs: int, first: int) -> None:
    lines = _lines(first, min(PART, runs - first))
    write_sealed(Home(root).segments, f"segment_{first:09d}-0000", lines)


def _lines(first: int, count: int) -> Iterator[bytes]:
    chance = random.Random(first)
    for number in range(first, first + count):
        for event in _events(number, chance):
            yield with_crc(orjson.dumps(event))


def _events(number: int, chance: random.Random) -> Iterator[dict[str, Any]]:
    run_id, call_id = f"run_{number:09d}{chance.getrandbits(40):010x}", f"chatcmpl-{number:09d}"
    agent, task = AGENTS[number % 4], chance.randrange(20_000)
    time = START + number
    model = f"{agent}@{1 + number // 100_000}"
    asked = [
        {"role": "system", "content": f"You are {agent}. Use the tools you have, then answer."},
        {"role": "user", "content": f"Task {task}: what is {task} + {number % 977}?"},
    ]
    said = {"role": "assistant", "content": f"It is {task + number % 977}, for all I know."}
    prompt = [chance.randrange(32_000) for _ in range(140)]
    sampled = [chance.randrange(32_000) for _ in range(60)]
    call = {
        "id": call_id,
        "run_id": run_id,
        "api": "/v1/chat/completions",
        "model": model,
        "messages": asked,
        "message": said,
        "tools": [],
        "prompt_token_ids": prompt,
        "token_ids": sampled,
        "logprobs": [-chance.random() for _ in sampled],
        "sampling": {"temperature": 1.0},
        "finish_reason": "stop",
        "started": time,
        "seconds": 0.5,
    }
    yield _event(call_id, run_id, "call", time, call)
    error = {"type": "EngineTimeout", "message": "no answer", "infrastructure": True}
    run = {
        "id": run_id,
        "agent": agent,
        "model": model,
        "input": asked[1]["content"],
        "output": said["content"],
        "stop_reason": "error" if number % 200 == 0 else "completed",
        "error": error if number % 200 == 0 else None,
        "trajectory": {"messages": [*asked, said], "turns": [{"call_id": call_id}]},
        "task": {
            "id": f"t{task:05d}",
            "input": asked[1]["content"],
            "split": "holdout" if task % 20 == 0 else "train",
        },
        "loop": f"loop-{number % 8}",
        "iteration": number // 50_000,
        "attempt": number % 4,
        "started": time,
        "seconds": chance.random() * 9,
        "tags": ["night"] if number % 1000 == 0 else [],
    }
    yield _event(f"{run_id}.run", run_id, "run", time + 1, run)
    if number % 200:
        value = float(chance.random() < 0.4)
        reward = {"name": "correct", "value": value, "source": "function", "time": time + 1}
        yield _event(f"{run_id}.correct", run_id, "reward", time + 1, reward)


def _event(
    event_id: str, run_id: str, kind: str, time: float, body: dict[str, Any]
) -> dict[str, Any]:
    return {"id": event_id, "run_id": run_id, "kind": kind, "time": time, "body": body}
