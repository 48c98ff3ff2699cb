"""Runs that end at the same time share requests; what is refused of one is not the others'."""

import asyncio
from pathlib import Path

import pytest

from cray_agents import Platform, Run
from cray_agents.agent import StopReason
from cray_agents.errors import BadInput, StoreError
from cray_agents.platform.transport import MAX_EVENTS, Event, Recording
from tests.support.scripted_gateway import served


class Slow:
    """Takes groups of events, one after the other, once it is let."""

    def __init__(self) -> None:
        self.groups: list[list[int]] = []
        self.begun, self.open = asyncio.Event(), asyncio.Event()
        self.failing = False

    async def __call__(self, events: list[Event]) -> None:
        self.groups.append([event["n"] for event in events])
        self.begun.set()
        await self.open.wait()
        if self.failing:
            raise StoreError("the disk is full")


async def test_what_comes_while_a_request_is_under_way_shares_the_next_ones() -> None:
    slow = Slow()
    recording = Recording(slow)
    first = asyncio.create_task(recording.put({"n": 0}))
    await slow.begun.wait()
    others = [asyncio.create_task(recording.put({"n": n})) for n in range(1, MAX_EVENTS + 3)]
    await asyncio.sleep(0.01)
    assert (slow.groups, first.done()) == ([[0]], False)
    others[0].cancel()  # nobody else's run is lost with it
    slow.open.set()
    await asyncio.gather(first, *others[1:])
    assert slow.groups == [[0], list(range(1, MAX_EVENTS + 1)), [MAX_EVENTS + 1, MAX_EVENTS + 2]]
    await recording.put({"n": 99})
    assert slow.groups[-1] == [99]


async def test_all_of_a_group_are_told_that_it_failed_and_the_next_is_sent() -> None:
    slow = Slow()
    recording = Recording(slow)
    slow.failing = True
    slow.open.set()
    told = await asyncio.gather(*(recording.put({"n": n}) for n in range(3)),
                                return_exceptions=True)  # fmt: skip
    assert [type(one) for one in told] == [StoreError] * 3
    slow.failing = False
    await recording.put({"n": 3})
    assert slow.groups == [[0, 1, 2], [3]]


async def test_a_run_that_is_refused_takes_none_with_it(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        platform = Platform(gateway.url)
        runs = [Run(id=name, agent="a", model="calc", input="x", stop_reason=StopReason.completed)
                for name in ("r1", "no id", "r2")]  # fmt: skip
        told = await asyncio.gather(*(platform.record([run]) for run in runs),
                                    return_exceptions=True)  # fmt: skip
        assert [told[0], told[2]] == [None, None]
        assert isinstance(told[1], BadInput) and told[1].param == "events.0.run_id"
        assert [run.id async for run in platform.runs()] == ["r1", "r2"]
        await platform.close()


def test_a_platform_records_from_one_event_loop_after_the_other(tmp_path: Path) -> None:
    async def both() -> None:
        async with served(tmp_path) as gateway:
            platform = Platform(gateway.url)

            def alone(name: str) -> None:
                run = Run(id=name, agent="a", model="calc", input="x",
                          stop_reason=StopReason.completed)  # fmt: skip

                async def one() -> None:
                    await platform.record([run])
                    await platform.close()

                asyncio.run(one())

            await asyncio.gather(*(asyncio.to_thread(alone, f"r{n}") for n in range(4)))
            assert len([run async for run in platform.runs()]) == 4
            await platform.close()

    asyncio.run(both())


@pytest.mark.parametrize("count", [0, 1, MAX_EVENTS + 1])
async def test_a_list_of_runs(tmp_path: Path, count: int) -> None:
    async with served(tmp_path) as gateway:
        platform = Platform(gateway.url)
        await platform.record(
            [Run(id=f"r{n}", agent="a", model="calc", input="x", stop_reason=StopReason.completed)
             for n in range(count)]
        )  # fmt: skip
        assert len([run async for run in platform.runs()]) == count
        await platform.close()
