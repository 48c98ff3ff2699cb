"""Sandboxed process: start a program in its sandbox, watch its limits, and end it.

Processes, their memory and folders are measured from /proc and the disk, as not every machine lets
us make control groups. Called by sandbox.py and tools/python.py.
"""

import asyncio
import contextlib
import functools
import math
import os
import signal
import stat
from collections.abc import AsyncIterator, Mapping, Sequence
from pathlib import Path
from typing import Literal

from cray_agents.errors import SetupError
from cray_agents.processes import alive, start_time
from cray_agents.tools.sandbox import backends

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
ENTRIES = 100_000  # limit on files and folders of any size
FREE_SOCKETS = 64  # sockets that do not count: an honest program has fewer, mostly empty ones
NAME_IN_MEMORY = 1024  # bytes that the kernel uses for a file in /dev/shm, even if it is empty
_MEMORY_LINES = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:", "HugetlbPages:")


def process_tree(pid: int) -> list[int]:
    """Return the pids of a process and all its descendants."""
    pids: list[int] = []
    waiting = [pid]
    while waiting:
        at = waiting.pop()
        pids.append(at)
        try:
            for thread in Path(f"/proc/{at}/task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return pids


def kill_processes(processes: dict[int, int | None]) -> None:
    """Kill processes whose start time is unchanged, and their descendants."""
    for pid, beginning in processes.items():
        if beginning is not None and start_time(pid) == beginning:
            for each in process_tree(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)


def processor_time(pids: list[int]) -> float:
    """Return seconds of processor time of processes, including children that they waited for."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


def exceeds_memory(pids: list[int], memory: int, *, inside: int | None, network: bool) -> bool:
    """Return True if processes together use more than `memory` bytes.

    Memory, swap, page tables, and the most that sockets and names in /dev/shm can use are counted.
    A quick count takes shared memory for each process's own. Only if it is too large, the exact
    count is made.

    Args:
        pids: the processes, the one that holds the sandbox first.
        memory: bytes.
        inside: one of them that is in its own namespaces, if they have any.
        network: True if they share the host's network.
    """
    room = memory - (0 if inside is None else NAME_IN_MEMORY * _shm_entries(inside))
    room -= _fd_sockets(pids[1:]) if inside is None or network else _sockets(inside)
    return (
        sum(_sum_lines(f"/proc/{pid}/status", _MEMORY_LINES) for pid in pids) > room
        and sum(_exact_memory(pid) for pid in pids) > room
    )


def exceeds_disk(folder: Path, size: int, pids: list[int]) -> bool:
    """Return True if a folder takes more than `size` bytes on disk, or cannot be read.

    Files without a name that processes have open count, too.
    """
    total, entries = _deleted(pids), 0
    waiting = [str(folder)]
    while waiting:
        try:
            with os.scandir(waiting.pop()) as listing:
                for entry in listing:
                    entries += 1
                    if entry.is_dir(follow_symlinks=False):
                        waiting.append(entry.path)
                    total += entry.stat(follow_symlinks=False).st_blocks * 512
                    if total > size or entries > ENTRIES:
                        return True
        except FileNotFoundError:
            continue
        except OSError:  # no permission, or a path too long: an attempt to hide data
            return True
    return False


def _deleted(pids: list[int]) -> int:
    sizes = {}
    for pid in pids:
        with contextlib.suppress(OSError):
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    at = link.stat()
                    if stat.S_ISREG(at.st_mode) and not at.st_nlink:
                        sizes[at.st_dev, at.st_ino] = at.st_blocks * 512
    return sum(sizes.values())


def _exact_memory(pid: int) -> int:
    """Return bytes of a process with its fraction of shared memory, or the quick count."""
    shared = _sum_lines(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
    return (
        _sum_lines(f"/proc/{pid}/status", _MEMORY_LINES[3:] if shared else _MEMORY_LINES) + shared
    )


def _shm_entries(inside: int) -> int:
    """Count the files and folders in a process's own /dev/shm."""
    try:
        status = os.statvfs(f"/proc/{inside}/root/dev/shm")
    except OSError:
        return 0
    return status.f_files - status.f_ffree


def _sockets(inside: int) -> int:
    """Return the bytes that the sockets of a network namespace can buffer, also those in flight.

    Buffers have the system's size (seccomp.py), but TCP's grow by themselves. The bytes waiting in
    those are counted twice, as the kernel keeps records beside them.
    """
    used = waiting = tcp = 0
    with contextlib.suppress(OSError):
        for name in ("sockstat", "sockstat6"):
            for line in Path(f"/proc/{inside}/net/{name}").read_text().splitlines():
                words = line.split()
                used += int(words[2]) if words[0] == "sockets:" else 0
                tcp += int(words[2]) if words[0] in ("TCP:", "TCP6:") else 0
        for name in ("tcp", "tcp6") if tcp else ():
            for line in Path(f"/proc/{inside}/net/{name}").read_text().splitlines()[1:]:
                waiting += sum(int(bytes_, 16) for bytes_ in line.split()[4].split(":"))
    return _buffers(used) + 2 * waiting


def _fd_sockets(pids: list[int]) -> int:
    """Return the bytes that open sockets of processes can buffer; at most, if they are hidden."""
    hidden = 0
    links: list[Path] = []
    for pid in pids:
        try:
            links += list(Path(f"/proc/{pid}/fd").iterdir())
        except PermissionError:  # the process hides its files, or is dead and has no memory
            hidden += backends.OPEN_FILES if _sum_lines(f"/proc/{pid}/status", ("VmSize:",)) else 0
        except OSError:
            continue
    names = set()
    if len(links) + hidden > FREE_SOCKETS:
        for link in links:
            with contextlib.suppress(OSError):
                names.add(link.readlink().name)
    return _buffers(hidden + sum(each.startswith("socket:") for each in names))


def _buffers(sockets: int) -> int:
    """Return the bytes of the buffers of sockets, including one message beyond their size."""
    return max(sockets - FREE_SOCKETS, 0) * 2 * _buffer_size()


@functools.cache
def _buffer_size() -> int:
    """Return the default size of a socket's buffer, in bytes."""
    sizes = [Path(f"/proc/sys/net/core/{kind}mem_default") for kind in "rw"]
    return max(int(size.read_text()) for size in sizes if size.exists())


def _sum_lines(path: str, names: tuple[str, ...]) -> int:
    """Sum lines of a file such as `RssAnon:  1024 kB`, in bytes; 0 if it is gone."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))


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
        self.seen: dict[int, int | None] = {}  # pid: start time, at the last check
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
        pids = process_tree(self.pid)
        if len(pids) > 1:  # otherwise the holder is dead and has no children any more
            self.seen = {pid: start_time(pid) for pid in pids}
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
        self._used = max(self._used, processor_time(pids))
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
            kill_processes(confined.seen)
            continue
        pids = confined.look()
        if confined.exceeds_time(pids):
            confined.kill("processor")
        first, network = confined.first, spec.network
        if exceeds_memory(pids, spec.memory, inside=first, network=network):
            confined.kill("memory")
        if look % DISK_EVERY == 0 and await asyncio.to_thread(exceeds_disk, base, disk, pids[1:]):
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
