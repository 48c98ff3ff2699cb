"""Build process: build datasets in a child process, away from the gateway's interpreter lock.

The gateway has one BuildProcess and uses it from its event loop. The first build starts the child,
which is kept because importing transformers takes seconds. The child has a lower priority than the
gateway and dies with it. Errors raised by a build are raised again here. Read next: build.py.
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
from cray_agents.processes import die_with_parent, hide
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.store import Store

NICE = 10
TRIES = 2  # a build is tried again if its process died, for example for lack of memory


class BuildProcess:
    """A child process that runs one build at a time. `close` kills it even during a build."""

    def __init__(self, home: Home) -> None:
        self._home = home
        self._turn = asyncio.Lock()
        self._executor: ProcessPoolExecutor | None = None
        self._closed = False

    async def build(self, recipe: DatasetRecipe) -> dict[str, Any]:
        """Build a dataset like build_dataset. Raises StoreError, too, if the process died twice."""
        async with self._turn:
            for _ in range(TRIES):
                text = await asyncio.to_thread(recipe.model_dump_json)
                executor = self._start()
                try:  # submit() also raises BrokenProcessPool after a death
                    work = executor.submit(_build, str(self._home.root), text)
                    return await asyncio.wrap_future(work)
                except BrokenProcessPool:
                    await asyncio.to_thread(self._end)
                if self._closed:
                    raise StoreError("the platform is ending: build it again when it is up")
        raise StoreError("the process that builds datasets died, twice: see the platform's log")

    async def close(self) -> None:
        """End the process. A later build removes its draft."""
        self._closed = True
        await asyncio.to_thread(self._end)

    def _start(self) -> Executor:
        """Start the child, on the thread of the event loop: the child dies with that thread."""
        if self._executor is None:
            self._executor = ProcessPoolExecutor(
                1,
                mp_context=multiprocessing.get_context("spawn"),
                initializer=_initialize,
                initargs=(os.getpid(),),
            )
        return self._executor

    def _end(self) -> None:
        executor, self._executor = self._executor, None
        if executor is None:
            return
        # like kill_workers() of Python 3.14
        for process in list((executor._processes or {}).values()):
            process.kill()
        executor.shutdown(wait=True, cancel_futures=True)


def _initialize(parent: int) -> None:
    """Prepare the child process."""
    die_with_parent(parent)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # the platform handles Ctrl-C
    hide("torch")  # tokenizers load in a third of the time, and in a fifth of the memory
    os.nice(NICE)


def _build(root: str, recipe: str) -> dict[str, Any]:
    """Build a dataset, in the child process."""
    home = Home(Path(root))
    return build_dataset(_store(root), home, DatasetRecipe.model_validate_json(recipe))


@functools.lru_cache(maxsize=1)
def _store(root: str) -> Store:
    """Open the store in the child process, which only reads it."""
    return Store(Home(Path(root)))
