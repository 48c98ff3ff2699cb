"""A process that appends runs, for fault tests, until it is killed.

    python -m tests.support.store.writer_process ROOT NAME

Appends runs, each a call, a description and a reward in separate appends, some of them twice, and
prints an event's id once it is durable.
"""

import asyncio
import itertools
import sys
from pathlib import Path

from cray_agents.paths import Home
from cray_agents.records import Event
from cray_agents.runtime.store import Store

CALLERS = 8
FAST_RUNS = 100  # runs after which a writer slows down, so that a busy machine can keep up
PAUSE = 0.5  # seconds before each run after those


def events_of(run_id: str) -> list[Event]:
    """A run's three events; the same for the same run."""
    call_id = f"{run_id}.call"
    call = {
        "id": call_id,
        "run_id": run_id,
        "model": "m@1",
        "messages": [{"role": "user", "content": run_id}],
        "message": {"role": "assistant", "content": f"said in {run_id}"},
        "prompt_token_ids": [*range(20)],
        "token_ids": [hash_of(run_id), 7],
        "logprobs": [-0.5, -0.25],
        "finish_reason": "stop",
        "started": 1.0,
    }
    run = {
        "id": run_id,
        "agent": "a",
        "model": "m@1",
        "input": run_id,
        "output": f"said in {run_id}",
        "stop_reason": "completed",
        "task": {"id": f"t{hash_of(run_id) % 50}", "input": f"question {hash_of(run_id) % 50}"},
        "loop": "faults",
        "iteration": 1,
        "trajectory": {"messages": call["messages"], "turns": [{"call_id": call_id}]},
    }
    reward = {"name": "good", "value": float(hash_of(run_id) % 2), "source": "test", "time": 1.0}
    return [
        Event(id=call_id, run_id=run_id, kind="call", body=call, time=1.0),
        Event(id=f"{run_id}.run", run_id=run_id, kind="run", body=run, time=2.0),
        Event(id=f"{run_id}.good", run_id=run_id, kind="reward", body=reward, time=3.0),
    ]


def hash_of(run_id: str) -> int:
    """A small number that depends on the run alone."""
    return sum(ord(letter) * place for place, letter in enumerate(run_id, 1)) % 10_007


async def write(store: Store, run_ids: "itertools.count[int]", name: str) -> None:
    """One run after another, for ever."""
    while True:
        number = next(run_ids)
        if number > FAST_RUNS:
            await asyncio.sleep(PAUSE)
        events = events_of(f"run-{name}-{number:06d}")
        if number % 3 == 0:
            events.reverse()  # the reward before the run, the call last
        for event in events:
            await store.append([event])
            sys.stdout.write(f"{event.id}\n")
            sys.stdout.flush()
            if number % 5 == 0:
                await store.append([event, event])


async def main(root: str, name: str) -> None:
    """CALLERS at once."""
    store = Store(Home(Path(root)))
    numbers = itertools.count()
    async with asyncio.TaskGroup() as group:
        for _ in range(CALLERS):
            group.create_task(write(store, numbers, name))


if __name__ == "__main__":
    asyncio.run(main(*sys.argv[1:]))
