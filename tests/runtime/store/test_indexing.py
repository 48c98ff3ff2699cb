"""The way into the index goes on, whatever one of the events that go it is."""

import asyncio
from pathlib import Path

from cray_agents.runtime.store.index import Index
from cray_agents.runtime.store.indexing import Indexing
from cray_agents.runtime.store.segments.line_format import Fact, LinePlace, Placed


def reward(number: int, segment: str, about: dict[str, object]) -> Placed:
    fact = Fact(f"e{number}", "r", "reward", float(number), about)
    return Placed(fact, LinePlace(segment, 0, 99))


async def test_what_cannot_be_indexed_holds_up_nothing(tmp_path: Path) -> None:
    index = Index(tmp_path / "index.sqlite", "root")
    indexed: list[str] = []
    indexing = Indexing(index, lambda placed: indexed.extend(one.fact.id for one in placed))
    good = {"name": "n", "source": "s", "value": 1.0, "time": 1.0, "turn": None, "giver": ""}
    for number, about in enumerate([good, {}, good, {}, good]):  # {}: a reward that says nothing
        indexing.submit([reward(number, f"segment_{number}", about)])
    async with asyncio.timeout(120):
        await asyncio.to_thread(indexing.wait_for, 5)
        await asyncio.to_thread(indexing.close)
    assert indexed == [f"e{number}" for number in range(5)]
    assert [index.known(f"e{number}") for number in range(5)] == [True, False, True, False, True]
    index.close()
