"""Sandboxed process: start a program in its sandbox, watch its limits, and end it.

Called by sandbox.py and tools/python.py. Read next: usage_monitor.py.
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

START = 60.0  # seconds that the start of a sandbox may take
PERIOD = 0.025  # seconds between checks of the memory
DISK_EVERY = 10  # checks of the memory between two of the disk
FLOOD = 32 * backends.MEGABYTE  # bytes of output after which a program is killed
BLOCK = 1 << 16


class SandboxLost(SetupError):
    """The sandbox failed after its program had begun, by chance or by an act of the program."""


class SandboxedProcess:
    """A running program in a sandbox. `limit` names the limit that ended it, if one did."""

    def __init__(self, process: asyncio.subprocess.Process, layer: backends.Layer) -> None:
        assert process.stdin and process.stdout and process.stderr
        self.stdin, self.stdout, self.stderr = process.stdin, process.stdout, process.stderr
        self.limit: Limit | None = None
        self._process = process
        self._layer = layer
        self.first: int | None = None  # pid of the first process within bubblewrap's namespaces
        self.seen: dict[int, str] = {}  # pid: start time, at the last check
        self._used = 0.0  # seconds of processor time, at the last check
        self._allowed = math.inf

    @property
    def pid(self) -> int:
        """The process that holds the sandbox; the program's processes are its descendants."""
        return self._process.pid

    @property
    def running(self) -> bool:
        """True while the process that holds the sandbox exists."""
        return self._process.returncode is None

    async def begin(self) -> None:
        """Wait until the sandbox is ready for the program. Raises SetupError."""
        try:
            async with asyncio.timeout(START):
                line = await self.stdout.readline()
        except TimeoutError:
            raise SetupError(f"the sandbox did not start within {START:g} s") from None
        if line != backends.STARTED:
            message = (await self.stderr.read()).decode(errors="replace").strip()
            raise SetupError(f"the sandbox did not start: {message[-500:] or line!r}")
        pids = self.look()
        if self._layer == "bubblewrap":
            self.first = next(iter(pids[1:]), None)

    def look(self) -> list[int]:
        """Return the pids of the sandbox, its holder first, and remember them in `seen`."""
        pids = usage_monitor.process_tree(self.pid)
        if len(pids) > 1:  # otherwise the holder is dead and has no children any more
            self.seen = {pid: usage_monitor.start_time(pid) for pid in pids}
        return pids

    def allow(self, seconds: float) -> None:
        """End the program once all its processes together have used `seconds` of processor time.

        The time of an ended child that no process waited for is lost, so limit the clock too.
        """
        self._allowed = self._processor_time(self.look()) + seconds

    def exceeds_time(self, pids: list[int]) -> bool:
        """Return True if the program has used more processor time than allowed."""
        return self._allowed < math.inf and self._processor_time(pids) > self._allowed

    def _processor_time(self, pids: list[int]) -> float:
        self._used = max(self._used, usage_monitor.processor_time(pids))
        return self._used

    async def wait(self) -> int:
        """Wait for the end of the program and all its processes; return the exit status.

        Read the program's output meanwhile, or it may never end.
        """
        status = await self._process.wait()
        while self.first is not None and alive(self.first):  # noqa: ASYNC110 - of the kernel
            await asyncio.sleep(0.001)  # bubblewrap ends a moment before its namespace does
        return status

    def kill(self, limit: Limit | None = None) -> None:
        """Kill the program and all its processes, through the kernel or keeper.py."""
        if self.running:
            self.limit = self.limit or limit
            with contextlib.suppress(ProcessLookupError):
                if self._layer != "bubblewrap":
                    os.kill(self.pid, signal.SIGTERM)  # terminate() would take its exit status
                elif self.first is None:
                    self._process.kill()
                else:  # this ends its namespace, and then bubblewrap
                    os.kill(self.first, signal.SIGKILL)

    async def end(self) -> None:
        """Kill the program, wait until it is gone, and discard the rest of its output."""
        self.kill()
        self.stdin.close()
        await asyncio.gather(self.wait(), _discard(self.stdout), _discard(self.stderr))


@contextlib.asynccontextmanager
async def start(
    layer: backends.Layer,
    spec: backends.SandboxSpec,
    argv: Sequence[str],
    env: Mapping[str, str],
    base: Path,
    disk: int,
) -> AsyncIterator[SandboxedProcess]:
    """Start a program, watch it during the block, and end it after the block."""
    program = backends.seccomp_file(layer, spec)
    try:
        command = await asyncio.to_thread(backends.command, layer, spec, argv, program)
        pipe = asyncio.subprocess.PIPE
        process = await asyncio.create_subprocess_exec(
            *command, stdin=pipe, stdout=pipe, stderr=pipe, env=dict(env), cwd=spec.work,
            pass_fds=[program] if layer == "bubblewrap" else [],  # Landlock's keeper has its own
            start_new_session=True, limit=BLOCK,
        )  # fmt: skip
    finally:
        os.close(program)
    confined = SandboxedProcess(process, layer)
    watch = asyncio.create_task(_watch(confined, spec, base, disk))
    try:
        await confined.begin()
        yield confined
    finally:
        await asyncio.shield(confined.end())
        watch.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await watch


async def _watch(
    confined: SandboxedProcess, spec: backends.SandboxSpec, base: Path, disk: int
) -> None:
    look = 0
    while True:
        await asyncio.sleep(PERIOD)
        look += 1
        if not confined.running:  # killed from outside: the kernel ends bubblewrap's processes
            usage_monitor.kill(confined.seen)
            continue
        pids = confined.look()
        if confined.exceeds_time(pids):
            confined.kill("processor")
        first, network = confined.first, spec.network
        if usage_monitor.exceeds_memory(pids, spec.memory, inside=first, network=network):
            confined.kill("memory")
        if look % DISK_EVERY == 0 and await asyncio.to_thread(
            usage_monitor.exceeds_disk, base, disk, pids[1:]
        ):
            confined.kill("disk")


async def _discard(stream: asyncio.StreamReader) -> None:
    while await stream.read(BLOCK):
        pass


async def feed(stream: asyncio.StreamWriter, data: bytes) -> None:
    """Write a program's stdin, as far as the program reads it."""
    with contextlib.suppress(BrokenPipeError, ConnectionResetError):
        stream.write(data)
        await stream.drain()
        stream.close()


async def collect(
    stream: asyncio.StreamReader, chars: int, confined: SandboxedProcess
) -> tuple[str, bool]:
    """Return a program's whole output, cut to about `chars`, and True if it was cut.

    Only the beginning and the end are kept in memory.
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
