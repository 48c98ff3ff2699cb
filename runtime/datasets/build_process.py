"""Builds datasets in a process beside this one: a build would hold Python's lock for seconds.

The gateway holds one BuildProcess, used from its event loop. The child is started by the first
build and kept, for importing transformers takes seconds; it gives way to the gateway, and dies with
it. What it raises on purpose comes back as it is. Read next: building.py, what the child does.
"""

import asyncio
import functools
import multiprocessing
import os
import signal
from concurrent.futures import Executor, ProcessPoolExecutor
from concurrent.futures.process import BrokenProcessPool
from pathlib import Path
from typing import Any

from cray_agents.errors import StoreError
from cray_agents.paths import Home
from cray_agents.processes import die_with_parent
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.store import Store

NICE = 10
TRIES = 2  # a build whose process died, for want of memory say, is tried once more


class BuildProcess:
    """One build at a time, the others wait. `close` ends the process, whatever it does."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._turn = asyncio.Lock()
        self._executor: ProcessPoolExecutor | None = None
        self._closed = False

    async def build(self, recipe: DatasetRecipe) -> dict[str, Any]:
        """As build_dataset; also raises StoreError if the process died twice."""
        async with self._turn:
            for _ in range(TRIES):
                executor = self._started()
                try:  # submitting raises, too, once its death was noticed
                    work = executor.submit(_build, str(self._home.root), recipe.model_dump_json())
                    return await asyncio.wrap_future(work)
                except BrokenProcessPool:
                    await asyncio.to_thread(self._end)
                if self._closed:
                    raise StoreError("the platform is ending: build it again when it is up")
        raise StoreError("the process that builds datasets died, twice: see the platform's log")

    async def close(self) -> None:
        """End the process. A draft it leaves is swept by a later build."""
        self._closed = True
        await asyncio.to_thread(self._end)

    def _started(self) -> Executor:
        """Called on the event loop's thread: the kernel ends the child when that thread ends."""
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_begin,
                initargs=(os.getpid(),),
            )
        return self._executor

    def _end(self) -> None:
        executor, self._executor = self._executor, None
        if executor is None:
            return
        for process in list((executor._processes or {}).values()):  # kill_workers() of 3.14
            process.kill()
        executor.shutdown(wait=True, cancel_futures=True)


def _begin(parent: int) -> None:
    """In the child, before anything else."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the platform's to answer
    os.nice(NICE)


def _build(root: str, recipe: str) -> dict[str, Any]:
    """In the child."""
    home = Home(Path(root))
    return build_dataset(_store(root), home, DatasetRecipe.model_validate_json(recipe))


@functools.lru_cache(maxsize=1)
def _store(root: str) -> Store:
    """The child's own view of the store: it only reads."""
    return Store(Home(Path(root)))
