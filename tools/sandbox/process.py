"""A program in its sandbox, from its first moment to the end of its last process.

Called by sandbox.py and tools/python.py. Read next: watching.py.
"""

import asyncio
import contextlib
import math
import os
import signal
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from cray_agents.errors import SetupError
from cray_agents.processes import alive
from cray_agents.tools.sandbox import backends, usage_monitor

Limit = Literal["seconds", "processor", "memory", "disk", "output"]
TOO_MUCH: dict[Limit, str] = {
    "seconds": "it took too long",
    "processor": "it took too much processor time",
    "memory": "it took too much memory",
    "disk": "it wrote too much to files",
    "output": "it printed too much",
}

START = 60.0  # seconds that a machine gets to start a sandbox
PERIOD = 0.025  # seconds between looks at the memory
DISK_EVERY = 10  # looks
FLOOD = 32 * backends.MEGABYTE  # bytes of output: a program that writes more is ended
BLOCK = 1 << 16


class SandboxLost(SetupError):
    """The sandbox failed after its program had begun: by chance, or by what the program did."""


class SandboxedProcess:
    """A program that runs. `limit` says which limit ended it, if one did."""

    def __init__(self, process: asyncio.subprocess.Process, layer: backends.Layer) -> None:
        assert process.stdin and process.stdout and process.stderr
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self.limit: Limit | None = None
        self._process = process
        self._layer = layer
        self.first: int | None = None  # of bubblewrap's namespaces, and within them
        self.seen: dict[int, str] = {}  # at the last look: pid and when it began
        self._used = 0.0  # seconds of processor time, at the last look
        self._allowed = math.inf

    @property
    def pid(self) -> int:
        """The process that holds the sandbox: the program's are its descendants."""
        return self._process.pid

    @property
    def holds(self) -> bool:
        """Whether that process is there."""
        return self._process.returncode is None

    async def begin(self) -> None:
        """Wait until all is ready for the program. Raises SetupError."""
        try:
            async with asyncio.timeout(START):
                line = await self.stdout.readline()
        except TimeoutError:
            raise SetupError(f"the sandbox did not start within {START:g} s") from None
        if line != backends.STARTED:
            told = (await self.stderr.read()).decode(errors="replace").strip()
            raise SetupError(f"the sandbox did not start: {told[-500:] or line!r}")
        pids = self.look()
        if self._layer == "bubblewrap":
            self.first = next(iter(pids[1:]), None)

    def look(self) -> list[int]:
        """The processes of the sandbox, its holder first."""
        pids = usage_monitor.family(self.pid)
        if len(pids) > 1:  # else the holder is dead, and the others are no longer its children
            self.seen = {pid: usage_monitor.begun(pid) for pid in pids}
        return pids

    def allow(self, seconds: float) -> None:
        """End the program once it has used so much more processor time, all processes together.

        Of a child that nobody waited for it is forgotten when it ends: hold the clock too.
        """
        self._allowed = self._used_now(self.look()) + seconds

    def takes_more_time(self, pids: list[int]) -> bool:
        """Whether it has used more than it was allowed."""
        return self._allowed < math.inf and self._used_now(pids) > self._allowed

    def _used_now(self, pids: list[int]) -> float:
        self._used = max(self._used, usage_monitor.processor_time(pids))
        return self._used

    async def wait(self) -> int:
        """The exit status, once the program has ended with all its processes.

        Its output must be read meanwhile, or the end is never seen.
        """
        status = await self._process.wait()
        while self.first is not None and alive(self.first):  # noqa: ASYNC110 - of the kernel
            await asyncio.sleep(0.001)  # bubblewrap ends a moment before its namespace does
        return status

    def kill(self, limit: Limit | None = None) -> None:
        """Kill the program and all its processes: the kernel does, or keeper.py."""
        if self.holds:
            self.limit = self.limit or limit
            with contextlib.suppress(ProcessLookupError):
                if self._layer != "bubblewrap":
                    os.kill(self.pid, signal.SIGTERM)  # terminate() would take its exit status
                elif self.first is None:
                    self._process.kill()
                else:  # with it goes its namespace, and then bubblewrap
                    os.kill(self.first, signal.SIGKILL)

    async def end(self) -> None:
        """Kill all and wait until it is gone; what it still says is dropped."""
        self.kill()
        self.stdin.close()
        await asyncio.gather(self.wait(), _drop(self.stdout), _drop(self.stderr))


@contextlib.asynccontextmanager
async def start(
    layer: backends.Layer,
    cell: backends.SandboxSpec,
    argv: Sequence[str],
    env: Mapping[str, str],
    base: Path,
    disk: int,
) -> AsyncIterator[SandboxedProcess]:
    """A program that has begun; watched while the block lasts, gone after it."""
    program = backends.seccomp_file(layer, cell)
    try:
        command = await asyncio.to_thread(backends.command, layer, cell, argv, program)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(env), cwd=cell.work,
            pass_fds=[program], start_new_session=True, limit=BLOCK,
        )  # fmt: skip
    finally:
        os.close(program)
    confined = SandboxedProcess(process, layer)
    watch = asyncio.create_task(_watch(confined, cell, base, disk))
    try:
        await confined.begin()
        yield confined
    finally:
        await asyncio.shield(confined.end())
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


async def _watch(
    confined: SandboxedProcess, cell: backends.SandboxSpec, base: Path, disk: int
) -> None:
    look = 0
    while True:
        await asyncio.sleep(PERIOD)
        look += 1
        if not confined.holds:  # killed from outside: the kernel ends what bubblewrap held
            usage_monitor.kill(confined.seen)
            continue
        pids = confined.look()
        if confined.takes_more_time(pids):
            confined.kill("processor")
        if usage_monitor.takes_more(pids, cell.memory, inside=confined.first, network=cell.network):
            confined.kill("memory")
        if look % DISK_EVERY == 0 and await asyncio.to_thread(usage_monitor.fills_more, base, disk):
            confined.kill("disk")


async def _drop(stream: asyncio.StreamReader) -> None:
    while await stream.read(BLOCK):
        pass


async def feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write all of a program's stdin, as far as it reads it."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
        stream.close()


async def collect(
    stream: asyncio.StreamReader, chars: int, confined: SandboxedProcess
) -> tuple[str, bool]:
    """What a program writes until it ends, cut to about `chars`; whether it was cut.

    Memory stays flat: of what comes, the beginning and the end are kept.
    """
    room = 4 * chars  # bytes: a character has at most four
    head, tail, total = bytearray(), bytearray(), 0
    while block := await stream.read(BLOCK):
        total += len(block)
        taken = room - len(head)
        head += block[:taken]
        tail += block[taken:]
        del tail[:-room]
        if total > max(FLOOD, 2 * room):
            confined.kill("output")
    gap = total - len(head) - len(tail)
    begin, rest = head.decode(errors="replace"), tail.decode(errors="replace")
    if not gap and len(begin) + len(rest) <= chars:
        whole = (bytes(head) + bytes(tail)).decode(errors="replace")
        return whole, False
    half = chars // 2
    last = rest if len(rest) >= half else begin[half:] + rest
    note = f"\n[... {total - 2 * half} bytes left out ...]\n"
    return begin[:half] + note + last[-half:], True
