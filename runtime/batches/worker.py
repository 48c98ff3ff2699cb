"""The batch worker: `python -m cray_agents.runtime.batches.worker HOME URL`.

It validates inputs, claims chunks of lines and sends each line to the gateway at URL. Then it
stores the results, seals the chunks and publishes the files. Any number of workers may share a
home, on any number of hosts. Each may be killed at any moment. A worker sends at most `window`
lines at once, and the gateway decides when each gets to a replica. The API key is taken from
$CRAY_AGENTS_API_KEY.

Failures unrelated to a line are retried: the gateway is unreachable, full, or has no replica. Every
attempt carries the same idempotency key, so the gateway repeats an answer that it gave before.

A disk error ends the process. Another worker then takes over its claims, or the same worker once
compose.py has started it again. Read next: board.py, chunks.py.
"""

import argparse
import asyncio
import contextlib
import logging
import os
import random
import signal
import sys
from collections.abc import Callable, Mapping
from functools import partial
from pathlib import Path
from typing import NamedTuple, TypeVar

import aiohttp

from cray_agents.errors import Corrupt
from cray_agents.exact_json import dump_json, load_json
from cray_agents.paths import Home
from cray_agents.processes import die_with_parent
from cray_agents.runtime.batches import chunks
from cray_agents.runtime.batches.board import Board, Chore, ClaimedChunk, Lane, OpenBatch
from cray_agents.runtime.batches.chunks import RequestLine, Result, ResultWriter
from cray_agents.runtime.batches.claims import HEARTBEAT_INTERVAL, LEASE, Holder, forget_dead
from cray_agents.runtime.batches.validation import validate
from cray_agents.runtime.controller_lease import is_followed
from cray_agents.runtime.files.files import Files

WINDOW = 64  # lines in flight at once
POLL_INTERVAL = 0.5  # seconds between checks for new batches and for decisions to stop
GRACE = {"cancelled": 5.0, "expired": 0.0}  # seconds left to lines in flight when a batch stops
TEMPORARY = {408, 425, 429, 503, 504, 507}  # not caused by the line; 507: until there is room
UNAUTHORIZED = {401, 403}  # caused by this worker's key, not by the line
SERVER_ERRORS = {500, 502}  # temporary or caused by the line: tried SERVER_ERROR_ATTEMPTS times
SERVER_ERROR_ATTEMPTS = 8  # attempts, in about 20 seconds
FIRST_PAUSE = 0.1  # seconds; doubles with every attempt
LONGEST_PAUSE = 20.0  # seconds
LONGEST_UNREACHABLE_PAUSE = 2.0  # seconds between attempts to reach an unreachable gateway
TIMEOUT = aiohttp.ClientTimeout(total=6 * 3600, sock_connect=10)
SWITCH_INTERVAL = 0.0005  # seconds that a validating thread may hold the interpreter lock

log = logging.getLogger(__name__)

T = TypeVar("T")


class LineAnswer(NamedTuple):
    """The final answer to a line."""

    custom_id: str
    status: int
    request_id: str
    body: bytes


class LineSender:
    """The worker's connection to the gateway at `url`. Call close() at the end."""

    def __init__(self, url: str, key: str | None = None) -> None:
        self._url = url.rstrip("/").removesuffix("/v1")
        headers = {"Content-Type": "application/json", "X-Priority": "batch"}
        if key:
            headers["Authorization"] = f"Bearer {key}"
        self._session = aiohttp.ClientSession(
            connector=aiohttp.TCPConnector(limit=0),
            headers=headers,
            timeout=TIMEOUT,
            auto_decompress=True,
        )

    async def close(self) -> None:
        """Close the connections."""
        await self._session.close()

    async def send(
        self, batch_id: str, endpoint: str, line: RequestLine, owner: str = ""
    ) -> LineAnswer:
        """Send a line until it has an answer. `owner` becomes the owner of its run."""
        request = load_json(line.raw)
        body = dump_json(request["body"])
        headers = {
            "Idempotency-Key": f"{batch_id}:{line.number}",
            "X-Run-Id": f"{batch_id}-{line.number}",
            "X-On-Behalf-Of": owner,
        }
        attempt = 0
        while True:
            attempt += 1
            try:
                async with self._session.post(
                    self._url + endpoint, data=body, headers=headers
                ) as answer:
                    content = await answer.read()
            except (aiohttp.ClientError, TimeoutError, OSError) as error:
                pause = _pause(attempt, LONGEST_UNREACHABLE_PAUSE)
                _log_attempt(attempt, batch_id, line, f"{type(error).__name__}: {error}")
            else:
                is_permanent = answer.headers.get("x-should-retry") == "false"
                if _is_final(answer.status, attempt) or (
                    is_permanent and answer.status in SERVER_ERRORS
                ):
                    request_id = answer.headers.get("x-request-id", "")
                    return LineAnswer(request["custom_id"], answer.status, request_id, content)
                pause = _requested_pause(answer.headers) or _pause(attempt, LONGEST_PAUSE)
                _log_attempt(attempt, batch_id, line, f"{answer.status} {content[:200]!r}")
            await asyncio.sleep(pause)


class Worker:
    """The worker of one process. `window` is lines in flight at once; `lease` is in seconds."""

    def __init__(self, home: Home, sender: LineSender, window: int, lease: float) -> None:
        self._home = home
        self._sender = sender
        self._window = window
        workers = home.batches / "workers"
        forget_dead(workers)
        self._holder = Holder(workers, lease)
        self._board = Board(home, self._holder)
        self._files = Files(home)

    async def run(self) -> None:
        """Work until cancelled. Raises StoreError."""
        self._slots = asyncio.Semaphore(self._window)
        self._board_lock = asyncio.Lock()
        self._refreshed = asyncio.Condition()  # notified after each refresh of the board
        self._refresh_now = asyncio.Event()  # set to refresh the board at once
        try:
            async with asyncio.TaskGroup() as self._tasks:
                self._tasks.create_task(self._beat())
                self._tasks.create_task(self._watch())
                self._tasks.create_task(self._run_lane("oldest"))
                self._tasks.create_task(self._run_lane("others"))
        finally:
            self._holder.leave()

    async def _beat(self) -> None:
        while True:
            await asyncio.sleep(min(HEARTBEAT_INTERVAL, self._holder.lease / 4))
            await asyncio.to_thread(self._holder.beat)

    async def _watch(self) -> None:
        """Refresh the board, and start validating and publishing batches."""
        while True:
            self._refresh_now.clear()
            await self._call_board(self._board.refresh)
            await self._start_chore("validation", self._validate)
            await self._start_chore("final", self._finish)
            async with self._refreshed:
                self._refreshed.notify_all()
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL):
                    await self._refresh_now.wait()

    async def _start_chore(self, chore: Chore, function: Callable[[OpenBatch], None]) -> None:
        batch = await self._call_board(lambda: self._board.claim_chore(chore))
        if batch is not None:
            self._tasks.create_task(self._run_chore(batch, function))

    async def _run_chore(self, batch: OpenBatch, function: Callable[[OpenBatch], None]) -> None:
        try:
            await asyncio.to_thread(function, batch)
        except Corrupt as error:
            await self._call_board(partial(self._board.fail, batch, error))
        batch.busy = False
        self._refresh_now.set()

    def _validate(self, batch: OpenBatch) -> None:
        try:
            validate(batch.folder, batch.request)
        except FileNotFoundError:
            if not batch.folder.end_file.exists():
                raise

    def _finish(self, batch: OpenBatch) -> None:
        assert batch.accepted is not None
        damaged = chunks.finish(batch.folder, batch.request, batch.accepted, self._files)
        batch.done.difference_update(damaged)

    async def _run_lane(self, lane: Lane) -> None:
        """Claim chunks, and send their lines one after another as the window has room."""
        while True:
            claimed = await self._call_board(lambda: self._board.claim(lane))
            if claimed is None:
                async with self._refreshed:
                    await self._refreshed.wait()
                continue
            run = ChunkRun(claimed, self._sender, self._slots, self._tasks)
            try:
                await run.send()
            except Corrupt as error:
                await self._fail(run, error)
            self._tasks.create_task(self._seal(run))  # seals once the last answers are in

    async def _fail(self, run: "ChunkRun", error: Corrupt) -> None:
        await self._call_board(partial(self._board.fail, run.claimed.batch, error))

    async def _seal(self, run: "ChunkRun") -> None:
        try:
            await run.seal()
        except Corrupt as error:
            await self._fail(run, error)
        await self._call_board(lambda: self._board.release(run.claimed))
        self._refresh_now.set()

    async def _call_board(self, call: Callable[[], T]) -> T:
        async with self._board_lock:
            return await asyncio.to_thread(call)


class ChunkRun:
    """A claimed chunk whose lines are being sent."""

    def __init__(
        self,
        claimed: ClaimedChunk,
        sender: LineSender,
        slots: asyncio.Semaphore,
        tasks: asyncio.TaskGroup,
    ) -> None:
        self.claimed = claimed
        self._sender = sender
        self._slots = slots
        self._tasks = tasks
        self._folder = claimed.batch.folder
        self._row = claimed.batch.index[claimed.chunk]
        self._pending: set[asyncio.Task[None]] = set()
        self._results: dict[int, Result] = {}
        name = f"{chunks.chunk_name(claimed.chunk)}.{claimed.fence}"
        self._writer = ResultWriter(self._folder.results, name)

    async def send(self) -> None:
        """Send every line without a result, until the batch stops."""
        try:
            self._results = await asyncio.to_thread(
                chunks.results_so_far, self._folder, self.claimed.chunk
            )
            lines = await asyncio.to_thread(chunks.requests, self._folder, self._row)
        except FileNotFoundError:
            if not self._is_sealed():
                raise
            return
        for line in lines:
            if line.number in self._results:
                continue
            if not await self._acquire_slot():
                return
            task = self._tasks.create_task(self._send_line(line))
            self._pending.add(task)
            task.add_done_callback(self._pending.discard)

    async def seal(self) -> None:
        """Wait for the answers, then seal the chunk with one result for every line."""
        stopping = 0.0  # seconds
        while self._pending:
            await asyncio.wait(self._pending, timeout=POLL_INTERVAL)
            if (stopped := self.claimed.batch.stopped) is not None:
                stopping += POLL_INTERVAL
                if stopping > GRACE[stopped]:
                    for task in self._pending:
                        task.cancel()
        await self._writer.close()
        await asyncio.to_thread(self._write_seal)

    def _write_seal(self) -> None:
        try:
            lines = chunks.requests(self._folder, self._row)
            chunks.seal(
                self._folder, self.claimed.chunk, lines, self._results, self.claimed.batch.stopped
            )
        except OSError:
            if not self._is_sealed():
                raise
        chunks.remove_results(self._folder, self.claimed.chunk)

    def _is_sealed(self) -> bool:
        """Tell whether another worker has sealed this chunk, or the batch has ended."""
        sealed = chunks.seal_path(self._folder, self.claimed.chunk).exists()
        return sealed or self._folder.end_file.exists()

    async def _acquire_slot(self) -> bool:
        """Wait for room in the window; False when the batch stops first."""
        while self.claimed.batch.stopped is None:
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_INTERVAL):
                    await self._slots.acquire()
                    return True
        return False

    async def _send_line(self, line: RequestLine) -> None:
        try:
            batch = self.claimed.batch.request
            answer = await self._sender.send(batch.id, batch.endpoint, line, batch.owner)
            stored, ok, tokens = chunks.result_line(batch.id, line.number, *answer)
            place = await self._writer.submit(stored)
            self._results[line.number] = Result(ok, tokens, place)
        finally:
            self._slots.release()


def _is_final(status: int, attempt: int) -> bool:
    if status in TEMPORARY or status in UNAUTHORIZED:
        return False
    return status not in SERVER_ERRORS or attempt >= SERVER_ERROR_ATTEMPTS


def _pause(attempt: int, longest: float) -> float:
    """Return seconds to wait, with jitter, so that many lines do not retry at once."""
    return float(min(longest, FIRST_PAUSE * 2 ** min(attempt, 20)) * random.uniform(0.5, 1.0))


def _requested_pause(headers: Mapping[str, str]) -> float | None:
    """Return the seconds that the gateway asks to wait, with a little jitter."""
    for name, unit in (("retry-after-ms", 0.001), ("retry-after", 1.0)):
        value = headers.get(name)
        if value and value.isascii() and value.isdecimal():
            return float(min(int(value) * unit, LONGEST_PAUSE) * random.uniform(1.0, 1.25))
    return None


def _log_attempt(attempt: int, batch_id: str, line: RequestLine, reason: str) -> None:
    """Log a failed attempt, but only the 1st, 8th, 64th and so on."""
    if attempt & (attempt - 1) == 0 and attempt.bit_length() % 3 == 1:
        log.warning("%s line %d, attempt %d: %s", batch_id, line.number, attempt, reason)


async def run_worker(
    home: Home, url: str, *, window: int = WINDOW, lease: float = LEASE, parent: int | None = None
) -> None:
    """Work on the batches of a home until SIGTERM or SIGINT. Raises StoreError.

    It also ends when another process than `parent` controls the platform. A parent that is stopped
    answers nothing, and the claims are wanted.
    """
    task = asyncio.current_task()
    assert task is not None
    for signum in (signal.SIGTERM, signal.SIGINT):
        asyncio.get_running_loop().add_signal_handler(signum, task.cancel)
    sender = LineSender(url, os.environ.get("CRAY_AGENTS_API_KEY"))
    watching = asyncio.create_task(_watch_parent(home, parent, task.cancel))
    try:
        await Worker(home, sender, window, lease).run()
    except asyncio.CancelledError:
        log.info("asked to end")
    finally:
        watching.cancel()
        await sender.close()


async def _watch_parent(home: Home, parent: int | None, end: Callable[[], object]) -> None:
    while parent is not None:
        await asyncio.sleep(HEARTBEAT_INTERVAL)
        if await asyncio.to_thread(is_followed, home, parent):
            end()
            return


def main() -> None:
    """Run the worker process. Exits with code 1 on a disk error."""
    parser = argparse.ArgumentParser(prog="batch worker", description=__doc__)
    parser.add_argument("home", type=Path)
    parser.add_argument("url", help="of the gateway")
    parser.add_argument("--window", type=int, default=WINDOW, help="lines asked at once")
    parser.add_argument("--lease", type=float, default=LEASE, help="seconds")
    parser.add_argument("--parent", type=int, help="the pid to die with")
    arguments = parser.parse_args()
    if arguments.parent is not None:
        die_with_parent(arguments.parent)
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(name)s %(message)s")
    sys.setswitchinterval(SWITCH_INTERVAL)
    asyncio.run(
        run_worker(
            Home(arguments.home.absolute()),
            arguments.url,
            window=arguments.window,
            lease=arguments.lease,
            parent=arguments.parent,
        )
    )


if __name__ == "__main__":
    main()
