"""A writer of trajectories.py: `python -m bench.writer ROOT store|raw N CALLERS ME`.

Says "ready", waits for the end of its input, and writes N calls of 4 KB durably.
"""

import asyncio
import os
import sys
from pathlib import Path

from cray_agents.paths import Home
from cray_agents.records import Event, ModelCall
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.segments.line_format import line_of


def event(name: str) -> Event:
    """A call that is a line of 4 KB."""
    said = {"role": "assistant", "content": "x" * 3700}
    call = ModelCall(id=name, run_id=name, model="m@1", messages=[], message=said)
    return Event(id=name, run_id=name, kind="call", body=call.model_dump())


def ready() -> None:
    """Tell the parent, and wait for its word."""
    sys.stdout.write("ready\n")
    sys.stdout.flush()
    sys.stdin.read()


async def stored(root: Path, records: int, callers: int, me: str) -> None:
    """Through a store, by callers at once."""
    store = Store(Home(root))

    async def one(caller: int) -> None:
        for number in range(records // callers):
            await store.append([event(f"{me}.{caller}.{number}")])

    await asyncio.to_thread(ready)
    await asyncio.gather(*(one(caller) for caller in range(callers)))
    os._exit(0)  # all is durable; what the index lacks, the next reader adds


def raw(root: Path, records: int, me: str) -> None:
    """A write and an fsync for each."""
    root.mkdir(parents=True, exist_ok=True)
    with (root / me).open("ab", buffering=0) as file:
        ready()
        for number in range(records):
            file.write(line_of(event(f"{me}.{number}")) + b"\n")
            os.fsync(file.fileno())


if __name__ == "__main__":
    where, how, count, at_once, name = sys.argv[1:]
    if how == "store":
        asyncio.run(stored(Path(where), int(count), int(at_once), name))
    else:
        raw(Path(where), int(count), name)
