"""Bytes and seconds of a run of many turns, each of about 97 tokens: open, sealed, and read."""

import random
import time
from pathlib import Path
from typing import Any

from bench.rounds import row
from cray_agents.paths import Home
from cray_agents.records import Event, new_id
from cray_agents.runtime.store import Store

TURNS = (400, 800)
SAMPLED, ADDED = 47, 50  # tokens of an answer; of a tool's result with what the template adds
TOOL = {
    "type": "function",
    "function": {"name": "calculator", "description": "Calculate. " * 20, "parameters": {}},
}


def calls(turns: int) -> list[Event]:
    """The calls of a run whose agent calls a tool each turn."""
    rnd, events = random.Random(0), []
    messages: list[Any] = [{"role": "system", "content": "You are a helpful agent. " * 4}]
    messages.append({"role": "user", "content": "question"})
    prompt = [rnd.randrange(4000) for _ in range(60)]
    for number in range(turns):
        prompt = [*prompt, *(rnd.randrange(4000) for _ in range(ADDED))]
        sampled = [rnd.randrange(4000) for _ in range(SAMPLED)]
        function = {"name": "calculator", "arguments": f'{{"expression": "{number} + {number}"}}'}
        call = {"id": new_id("call"), "type": "function", "function": function}
        answer = {"role": "assistant", "content": "word " * 20, "tool_calls": [call]}
        body = {
            "id": new_id("chatcmpl"), "run_id": "r", "api": "/v1/chat/completions", "model": "m@1",
            "messages": messages, "message": answer, "tools": [TOOL], "prompt_token_ids": prompt,
            "token_ids": sampled, "logprobs": [-2 * rnd.random() for _ in sampled],
            "sampling": {"temperature": 1.0, "max_tokens": 512}, "finish_reason": "tool_calls",
            "started": float(number), "seconds": rnd.random(),
        }  # fmt: skip
        events.append(Event(id=body["id"], run_id="r", kind="call", body=body))
        result = {"role": "tool", "tool_call_id": call["id"], "content": "result " * 15}
        messages, prompt = [*messages, answer, result], [*prompt, *sampled]
    return events


async def main(home: Path) -> None:
    """Print a row for each number of turns."""
    for turns in TURNS:
        root, events = Home(home / f"turns-{turns}"), calls(turns)
        store = Store(root)
        for event in events:
            await store.append([event], new=True)
        sizes = [_bytes(root)]
        await store.close()
        sizes.append(_bytes(root))
        store = Store(root, "again")
        begun = time.perf_counter()
        store.body(events[-1].id)
        opened, begun = time.perf_counter() - begun, time.perf_counter()
        store.run("r")
        read = time.perf_counter() - begun
        await store.close()
        figures = " / ".join(f"{size / 1e6:.2f}" for size in sizes)
        row(f"a run of {turns} turns", "open / sealed", f"{figures} MB")
        row("", "its last turn / all of it, read", f"{1000 * opened:.0f} ms / {read:.2f} s")


def _bytes(root: Home) -> int:
    return sum(file.stat().st_size for file in root.segments.iterdir())
