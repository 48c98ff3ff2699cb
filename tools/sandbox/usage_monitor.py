"""Usage monitor: measure a sandboxed program's processes, their memory, and its folders.

The numbers are from /proc and the disk, as not every machine lets us make control groups. Called by
process.py.
"""

import contextlib
import functools
import os
import signal
import stat
from pathlib import Path

OPEN_FILES = 256  # limit of a process
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


def start_time(pid: int) -> str:
    """Return a process's start time as the kernel's text; "" if it is gone. With the pid, an id."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def kill(processes: dict[int, str]) -> None:
    """Kill processes whose start time is unchanged, and their descendants."""
    for pid, beginning in processes.items():
        if beginning and start_time(pid) == beginning:
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
            hidden += OPEN_FILES if _sum_lines(f"/proc/{pid}/status", ("VmSize:",)) else 0
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
