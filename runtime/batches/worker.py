"""The batch worker: `python -m cray_agents.runtime.batches.worker HOME URL`.

It validates inputs, claims chunks of lines, asks the gateway at URL for each line, keeps the
results, seals the chunks and publishes the files. Any number of workers may share a home, on any
number of hosts; each may be killed at any moment. One asks for at most `window` lines at once, and
the gateway decides when each gets to a replica. The API key is taken from $CRAY_AGENTS_API_KEY.

An error of the disk ends the process: its claims are then taken over, by itself when supervisor.py
has started it again. Read next: board.py, what is done next; chunks.py, how results are kept.
"""

import argparse
import asyncio
import contextlib
import logging
import signal
import sys
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Literal, TypeVar

from cray_agents.errors import Corrupt
from cray_agents.paths import Home
from cray_agents.processes import die_with_parent
from cray_agents.runtime.batches import chunks, result_files
from cray_agents.runtime.batches.board import Board, ClaimedChunk, Lane, OpenBatch
from cray_agents.runtime.batches.chunks import RequestLine, Result
from cray_agents.runtime.batches.claims import BEAT, LEASE, Holder, forget_dead
from cray_agents.runtime.batches.line_request import Asker, api_key
from cray_agents.runtime.batches.results import ResultWriter
from cray_agents.runtime.batches.validation import validate
from cray_agents.runtime.files.files import Files

WINDOW = 64  # lines asked at once
POLL = 0.5  # seconds between looks for new batches and for decisions to stop
GRACE = {"cancelled": 5.0, "expired": 0.0}  # seconds for the lines in flight when a batch stops
SWITCH = 0.0005  # seconds a validating thread may keep the others waiting

log = logging.getLogger(__name__)

Found = TypeVar("Found")


class Worker:
    """One process's share of the work. `window`: lines asked at once; `lease`: seconds."""

    def __init__(self, home: Home, asker: Asker, window: int, lease: float) -> None:
        self._home = home
        self._asker = asker
        self._window = window
        workers = home.batches / "workers"
        forget_dead(workers)
        self._holder = Holder(workers, lease)
        self._board = Board(home, self._holder)
        self._files = Files(home)

    async def run(self) -> None:
        """Work until cancelled. Raises StoreError."""
        self._slots = asyncio.Semaphore(self._window)
        self._on_board = asyncio.Lock()
        self._news = asyncio.Condition()  # told after each look at the board
        self._look = asyncio.Event()  # asks for the next look at once
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._beat())
                self._tasks.create_task(self._watch())
                self._tasks.create_task(self._lane("oldest"))
                self._tasks.create_task(self._lane("others"))
        finally:
            self._holder.leave()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(min(BEAT, self._holder.lease / 4))
            await asyncio.to_thread(self._holder.beat)

    async def _watch(self) -> None:
        """Keep the board up to date, and do what is not asking lines."""
        while True:
            self._look.clear()
            await self._board_call(self._board.refresh)
            await self._start_chore("validation", self._validate)
            await self._start_chore("final", self._finish)
            async with self._news:
                self._news.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL):
                    await self._look.wait()

    async def _start_chore(
        self, what: Literal["validation", "final"], chore: Callable[[OpenBatch], None]
    ) -> None:
        batch = await self._board_call(lambda: self._board.chore(what))
        if batch is not None:
            self._tasks.create_task(self._chore(batch, chore))

    async def _chore(self, batch: OpenBatch, chore: Callable[[OpenBatch], None]) -> None:
        try:
            await asyncio.to_thread(chore, batch)
        except Corrupt as problem:
            await self._board_call(partial(self._board.fail, batch, problem))
        batch.busy = False
        self._look.set()

    def _validate(self, batch: OpenBatch) -> None:
        try:
            validate(batch.folder, batch.request)
        except FileNotFoundError:
            if not batch.folder.end_file.exists():
                raise

    def _finish(self, batch: OpenBatch) -> None:
        assert batch.accepted is not None
        damaged = result_files.finish(batch.folder, batch.request, batch.accepted, self._files)
        batch.done.difference_update(damaged)

    async def _lane(self, lane: Lane) -> None:
        """Take chunks, and ask their lines one after another as the window has room."""
        while True:
            work = await self._board_call(lambda: self._board.claim(lane))
            if work is None:
                async with self._news:
                    await self._news.wait()
                continue
            run = ChunkRun(work, self._asker, self._slots, self._tasks)
            try:
                await run.ask()
            except Corrupt as problem:
                await self._fail(run, problem)
            self._tasks.create_task(self._seal(run))  # its last answers may take their time

    async def _fail(self, run: "ChunkRun", problem: Corrupt) -> None:
        await self._board_call(partial(self._board.fail, run.work.batch, problem))

    async def _seal(self, run: "ChunkRun") -> None:
        try:
            await run.seal()
        except Corrupt as problem:
            await self._fail(run, problem)
        await self._board_call(lambda: self._board.release(run.work))
        self._look.set()

    async def _board_call(self, call: Callable[[], Found]) -> Found:
        async with self._on_board:
            return await asyncio.to_thread(call)


class ChunkRun:
    """A claimed chunk while its lines are asked."""

    def __init__(
        self, work: ClaimedChunk, asker: Asker, slots: asyncio.Semaphore, tasks: asyncio.TaskGroup
    ) -> None:
        self.work = work
        self._asker = asker
        self._slots = slots
        self._tasks = tasks
        self._folder = work.batch.folder
        self._row = work.batch.index[work.chunk]
        self._asked: set[asyncio.Task[None]] = set()
        self._results: dict[int, Result] = {}
        name = f"{chunks.chunk_name(work.chunk)}.{work.fence}"
        self._writer = ResultWriter(self._folder.results, name)

    async def ask(self) -> None:
        """Ask every line that has no result yet, until the batch stops."""
        try:
            self._results = await asyncio.to_thread(
                chunks.results_so_far, self._folder, self.work.chunk
            )
            lines = await asyncio.to_thread(chunks.requests, self._folder, self._row)
        except FileNotFoundError:
            if not self._settled():
                raise
            return
        for line in lines:
            if line.number in self._results:
                continue
            if not await self._slot():
                return
            task = self._tasks.create_task(self._line(line))
            self._asked.add(task)
            task.add_done_callback(self._asked.discard)

    async def seal(self) -> None:
        """Wait for the answers, and seal the chunk with one result for every line."""
        stopping = 0.0  # seconds
        while self._asked:
            await asyncio.wait(self._asked, timeout=POLL)
            if (stopped := self.work.batch.stopped) is not None:
                stopping += POLL
                if stopping > GRACE[stopped]:
                    for task in self._asked:
                        task.cancel()
        await self._writer.close()
        await asyncio.to_thread(self._seal)

    def _seal(self) -> None:
        try:
            lines = chunks.requests(self._folder, self._row)
            chunks.seal(
                self._folder, self.work.chunk, lines, self._results, self.work.batch.stopped
            )
        except OSError:
            if not self._settled():
                raise
        chunks.remove_results(self._folder, self.work.chunk)

    def _settled(self) -> bool:
        """Whether another that had this chunk has sealed it, and so removed what we read."""
        sealed = chunks.seal_path(self._folder, self.work.chunk).exists()
        return sealed or self._folder.end_file.exists()

    async def _slot(self) -> bool:
        """Wait for room in the window; False when the batch stops first."""
        while self.work.batch.stopped is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL):
                    await self._slots.acquire()
                    return True
        return False

    async def _line(self, line: RequestLine) -> None:
        try:
            batch = self.work.batch.request
            answer = await self._asker.ask(batch.id, batch.endpoint, line, batch.owner)
            stored, ok, tokens = chunks.answered(batch.id, line.number, *answer)
            place = await self._writer.submit(stored)
            self._results[line.number] = Result(ok, tokens, place)
        finally:
            self._slots.release()


async def work(home: Home, url: str, *, window: int = WINDOW, lease: float = LEASE) -> None:
    """Work on the batches of a home until SIGTERM or SIGINT. Raises StoreError."""
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    asker = Asker(url, api_key())
    try:
        await Worker(home, asker, window, lease).run()
    except asyncio.CancelledError:
        log.info("asked to end")
    finally:
        await asker.close()


def main() -> None:
    """The process. Exit code 1: the disk failed."""
    parser = argparse.ArgumentParser(prog="batch worker", description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("url", help="of the gateway")
    parser.add_argument("--window", type=int, default=WINDOW, help="lines asked at once")
    parser.add_argument("--lease", type=float, default=LEASE, help="seconds")
    parser.add_argument("--parent", type=int, help="the pid to die with")
    given = parser.parse_args()
    if given.parent is not None:
        die_with_parent(given.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    sys.setswitchinterval(SWITCH)
    asyncio.run(
        work(Home(given.home.absolute()), given.url, window=given.window, lease=given.lease)
    )


if __name__ == "__main__":
    main()
