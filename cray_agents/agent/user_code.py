"""User code: calls of tools, rewards and hooks that can neither stall nor kill a run.

Each sync function runs in a daemon thread, so that a hanging one blocks neither the event loop nor
the end of the process. `wait_for` gives sync callers an event loop that outlives their call, and
works beside one that runs, as in a notebook. Called by agent.py, conversation.py, tool.py,
rewards/reward.py and loop/loop.py.
"""

import asyncio
import concurrent.futures
import contextlib
import contextvars
import functools
import inspect
import logging
import os
import sys
import threading
from collections.abc import AsyncGenerator, Awaitable, Callable, Coroutine, Generator
from typing import Any, TypeVar

T = TypeVar("T")
Outcome = tuple[Any, BaseException | None]

GRACE = 5.0  # seconds for cancelled work to record its end and release its resources

log = logging.getLogger(__name__)


class UserCodeTimeout(Exception):
    """A function did not return in time; its thread, if it has one, is left behind."""


async def call(function: Callable[[], Any], timeout: float | None) -> Any:
    """Call a function. Raises UserCodeTimeout after `timeout` seconds, or the function's error.

    Async functions are awaited here, sync ones run in a thread with a copy of the context. A
    cancelled async function gets GRACE seconds to clean up.
    """
    future: asyncio.Future[Outcome]
    if _is_async(function):
        future = asyncio.ensure_future(_outcome(function))
    else:
        future = _in_thread(function)
    try:
        await asyncio.wait({future}, timeout=timeout)
        if not future.done():
            raise UserCodeTimeout
        if future.cancelled():
            raise RuntimeError("it cancelled itself")
        result, error = future.result()
    finally:
        if future.cancel():
            await asyncio.wait({future}, timeout=GRACE)
    if error is not None:
        raise error if isinstance(error, Exception) else RuntimeError(repr(error))
    if inspect.isawaitable(result):  # a sync wrapper around an async function
        return await call(functools.partial(_awaited, result), timeout)
    return result


async def shielded(coroutine: Coroutine[Any, Any, T]) -> T:
    """Await work that goes on, for GRACE seconds, when its caller is cancelled."""
    work = asyncio.create_task(coroutine)
    try:
        return await asyncio.shield(work)
    except asyncio.CancelledError:
        await asyncio.wait({work}, timeout=GRACE)
        if work.cancel():
            log.error("cancelled, and given up after %g s: %r", GRACE, work)
        elif not work.cancelled() and (error := work.exception()) is not None:
            log.error("cancelled, and it failed (%r): %r", error, work)
        raise


def wait_for(coroutine: Coroutine[Any, Any, T], grace: float = GRACE) -> T:
    """Run a coroutine on the background loop and block for its result.

    At a KeyboardInterrupt it is cancelled, and has `grace` seconds to end. The loop is shared by
    all sync callers of this process, so that their engines keep their connections. Called on that
    very loop (a sync call inside an async tool), a new one is used.
    """
    loop = _background_loop(os.getpid())
    if _running_loop() is loop:
        return _in_own_loop(coroutine)
    outcome: concurrent.futures.Future[T] = concurrent.futures.Future()
    ended = threading.Event()
    tasks: list[asyncio.Task[T]] = []

    def begin() -> None:
        tasks.append(loop.create_task(coroutine))
        tasks[0].add_done_callback(end)

    def end(task: asyncio.Task[T]) -> None:
        if task.cancelled():
            outcome.cancel()
        elif (error := task.exception()) is not None:
            outcome.set_exception(error)
        else:
            outcome.set_result(task.result())
        ended.set()

    def cancel() -> None:
        if tasks:
            tasks[0].cancel()
        else:
            coroutine.close()
            ended.set()

    try:
        loop.call_soon_threadsafe(begin)
        return outcome.result()
    except KeyboardInterrupt:  # at any moment: before `begin`, or when the task is under way
        loop.call_soon_threadsafe(cancel)
        ended.wait(grace)
        raise


def iterate_sync(items: AsyncGenerator[T, None], grace: float = GRACE) -> Generator[T, None, None]:
    """Iterate over an async generator in sync code; its items are never None.

    `grace`: as in `wait_for`. Raises RuntimeError on the background loop itself, which would wait
    for its own work.
    """
    if _running_loop() is _background_loop(os.getpid()):
        raise RuntimeError("this is async code that run_sync runs: use `async for` and `stream`")

    async def following() -> T | None:
        return await anext(items, None)

    try:
        while (item := wait_for(following(), grace)) is not None:
            yield item
    finally:
        # while Python ends, the loop's thread is gone; what outlived its grace is running still
        if not (sys.is_finalizing() or getattr(items, "ag_running", False)):
            wait_for(items.aclose(), grace)


async def _awaited(value: Awaitable[Any]) -> Any:
    return await value


async def _outcome(function: Callable[[], Any]) -> Outcome:
    try:
        return await function(), None
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the edge to the author's code
        return None, error


def _in_thread(function: Callable[[], Any]) -> asyncio.Future[Outcome]:
    loop = asyncio.get_running_loop()
    future: asyncio.Future[Outcome] = loop.create_future()
    context = contextvars.copy_context()

    def deliver(outcome: Outcome) -> None:
        if not future.done():
            future.set_result(outcome)

    def work() -> None:
        try:
            outcome: Outcome = (context.run(function), None)
        except BaseException as error:  # noqa: BLE001 - the edge to the author's code
            outcome = (None, error)
        with contextlib.suppress(RuntimeError):  # the loop is closed: nobody waits any more
            loop.call_soon_threadsafe(deliver, outcome)

    threading.Thread(target=work, name="cray-agents-call", daemon=True).start()
    return future


def _is_async(function: Callable[[], Any]) -> bool:
    while isinstance(function, functools.partial):
        function = function.func
    return inspect.iscoroutinefunction(function) or inspect.iscoroutinefunction(
        getattr(function, "__call__", None)  # noqa: B004 - an object with an async __call__
    )


def _running_loop() -> asyncio.AbstractEventLoop | None:
    try:
        return asyncio.get_running_loop()
    except RuntimeError:  # none runs here: the usual case
        return None


@functools.cache
def _background_loop(pid: int) -> asyncio.AbstractEventLoop:
    """One loop per process: keyed by pid, because a forked child inherits no threads."""
    loop = asyncio.new_event_loop()
    threading.Thread(target=loop.run_forever, name=f"cray-agents-loop-{pid}", daemon=True).start()
    return loop


def _in_own_loop(coroutine: Coroutine[Any, Any, T]) -> T:
    with concurrent.futures.ThreadPoolExecutor(1) as executor:
        return executor.submit(asyncio.run, coroutine).result()
