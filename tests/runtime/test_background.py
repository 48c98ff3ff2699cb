"""Background tasks: what fails is logged, counted and started again; a close ends all."""

import asyncio
import logging
import time
from collections.abc import Iterator
from pathlib import Path

import pytest

from cray_agents.errors import SwapError
from cray_agents.records import new_id
from cray_agents.runtime.background import FAILURES, BackgroundTasks
from cray_agents.runtime.store import Store
from cray_agents.runtime.views.change_feed import ChangeFeed
from tests.support.scripted_gateway import served, until


@pytest.fixture(autouse=True)
def no_failures() -> Iterator[None]:
    FAILURES.by_task.clear()
    yield
    FAILURES.by_task.clear()


def errors(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.ERROR]


@pytest.mark.slow
async def test_a_task_that_fails_is_logged_once_counted_and_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    starts, ended = 0, asyncio.Event()

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts <= 2:
            raise KeyError("choices")
        ended.set()

    tasks = BackgroundTasks()
    task = tasks.keep("watch", work, "replica 3")
    async with asyncio.timeout(60):
        await ended.wait()
        await task  # it returned, so it is not started again
    assert starts == 3
    assert FAILURES.by_task["watch"].number == 2
    (line,) = errors(caplog)  # the second failure is the first again
    assert line == "background task failed: watch (replica 3): KeyError: 'choices'"
    assert caplog.records[-1].exc_info  # with its traceback
    await tasks.close()


async def test_work_that_is_done_once_is_counted_and_not_started_again(
    caplog: pytest.LogCaptureFixture,
) -> None:
    async def work(error: Exception) -> None:
        raise error

    tasks = BackgroundTasks()
    unforeseen = tasks.run("save", work(ValueError("7")))
    foreseen = tasks.run("load", work(SwapError("no room")), "m@2")
    await asyncio.wait({unforeseen, foreseen})
    await until(lambda: "save" in FAILURES.by_task)
    assert {name: one.number for name, one in FAILURES.by_task.items()} == {"save": 1}
    assert errors(caplog) == ["background task failed: save: ValueError: 7"]
    with pytest.raises(SwapError):  # who waits has it
        await foreseen


async def test_a_close_ends_all_after_they_tidied_up() -> None:
    begun, tidied = asyncio.Event(), list[str]()

    async def work() -> None:
        try:
            begun.set()
            await asyncio.sleep(3600)
        finally:
            await asyncio.sleep(0.05)
            tidied.append("kept")

    async def once() -> None:
        try:
            await asyncio.sleep(3600)
        except asyncio.CancelledError:
            tidied.append("once")
            raise

    async def fails() -> None:
        raise ValueError

    tasks = BackgroundTasks()
    tasks.keep("watch", work)
    tasks.keep("waits for its restart", fails)
    task = tasks.run("once", once())
    await begun.wait()
    await tasks.close()
    assert sorted(tidied) == ["kept", "once"]
    assert task.cancelled()
    assert asyncio.all_tasks() == {asyncio.current_task()}


async def test_an_end_by_a_cancellation_of_something_else_is_a_failure() -> None:
    starts = 0

    async def work() -> None:
        nonlocal starts
        starts += 1
        if starts == 1:
            other = asyncio.get_running_loop().create_future()
            other.cancel()
            await other

    tasks = BackgroundTasks()
    async with asyncio.timeout(60):
        await tasks.keep("watch", work)
    assert (starts, FAILURES.by_task["watch"].number) == (2, 1)


@pytest.mark.slow
async def test_failures_are_a_metric_and_a_health_warning(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        FAILURES.add("replica watch", ValueError("no choice"))
        FAILURES.add("replica watch", ValueError("no choice"))
        _, text = await gateway.call("GET", "/metrics")
        assert 'cray_task_failures_total{task="replica watch"} 2.0' in text
        _, answer = await gateway.call("GET", "/v1/health/warnings")
        (warning,) = [one for one in answer["data"] if one["kind"] == "failed_task"]
        assert (warning["count"], warning["level"]) == (2, "warning")
        assert "'replica watch' failed 2 times" in warning["message"]
        assert "ValueError: no choice" in warning["message"]
        path = f"/v1/health/warnings?since={time.time() + 60}"
        assert (await gateway.call("GET", path))[1]["data"] == []


@pytest.mark.slow
async def test_readers_of_the_change_feed_start_anew_after_its_failure(tmp_path: Path) -> None:
    answers = iter([["serving"], "fails"])
    async with served(tmp_path) as gateway:
        store: Store = gateway.store

        def pool() -> object:
            if (state := next(answers, ["serving"])) == "fails":
                raise TypeError("this state is no JSON")
            return state

        feed = ChangeFeed(gateway.services.home, store, pool, lambda: False)
        reader = feed.read(None, 0.05)
        assert await anext(reader) == b": ok\n\n"
        async with asyncio.timeout(60):
            events = (event async for event in reader if event != b": keep-alive\n\n")
            assert b'"change":"restarted"' in await anext(events)
            assert FAILURES.by_task["change feed"].number == 1
            feed.note_runs([(run_id := new_id("run"), "appended")])
            assert run_id.encode() in await anext(events)
        await reader.aclose()
        await feed.close()
