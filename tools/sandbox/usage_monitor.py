"""How much a sandboxed program takes: its processes, their memory, its folders.

Read from /proc and the disk, because control groups are not ours to make on every machine.
Called by sandbox.py.
"""

import contextlib
import functools
import os
import signal
from pathlib import Path

OPEN_FILES = 256  # of a process
ENTRIES = 100_000  # files and folders: as many are too many, however small
FREE_SOCKETS = 64  # so many are not counted: an honest program has fewer, and they are mostly empty
NAME_IN_MEMORY = 1024  # bytes that the kernel takes for a file in /dev/shm, however empty
_HELD = ("RssAnon:", "RssShmem:", "VmSwap:", "VmPTE:", "HugetlbPages:")


def family(pid: int) -> list[int]:
    """A process and all its descendants."""
    found: list[int] = []
    waiting = [pid]
    while waiting:
        at = waiting.pop()
        found.append(at)
        try:
            for thread in Path(f"/proc/{at}/task").iterdir():
                waiting += map(int, (thread / "children").read_text().split())
        except (FileNotFoundError, ProcessLookupError):
            continue
    return found


def begun(pid: int) -> str:
    """When a process began, in the kernel's words: with its pid, its identity. "" if it is gone."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[19]
    except OSError:
        return ""


def kill(processes: dict[int, str]) -> None:
    """Kill those of these processes that are still the same, and what descends from them."""
    for pid, beginning in processes.items():
        if beginning and begun(pid) == beginning:
            for each in family(pid):
                with contextlib.suppress(ProcessLookupError):
                    os.kill(each, signal.SIGKILL)


def processor_time(pids: list[int]) -> float:
    """Seconds of processor time that processes have used, with those that they waited for."""
    ticks = 0
    for pid in pids:
        try:
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:
            continue
        ticks += sum(map(int, fields[11:15]))  # utime, stime, cutime, cstime
    return ticks / os.sysconf("SC_CLK_TCK")


def takes_more(pids: list[int], memory: int, *, inside: int | None, network: bool) -> bool:
    """Whether processes together hold more than so many bytes.

    Counted are memory and swap, page tables, and what sockets and the names in /dev/shm can take.
    The quick count takes what they share for each one's own; only if that is too much, the exact
    one is made.

    Args:
        pids: the processes, their holder first.
        memory: bytes.
        inside: one of them that is in namespaces of its own, if they have any.
        network: they share the host's network.
    """
    room = memory - (0 if inside is None else NAME_IN_MEMORY * _names_in_memory(inside))
    room -= _fd_sockets(pids[1:]) if inside is None or network else _sockets(inside)
    return (
        sum(_sum(f"/proc/{pid}/status", _HELD) for pid in pids) > room
        and sum(_exact(pid) for pid in pids) > room
    )


def fills_more(folder: Path, size: int) -> bool:
    """Whether a folder takes more than so many bytes on disk, or cannot be looked into."""
    total = entries = 0
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
        except OSError:  # no permission, or a path that is too long: made to hide something
            return True
    return False


def _exact(pid: int) -> int:
    """Bytes of a process, its share of what it shares; the quick count where that is hidden."""
    shared = _sum(f"/proc/{pid}/smaps_rollup", ("Pss_Anon:", "Pss_Shmem:", "SwapPss:"))
    return _sum(f"/proc/{pid}/status", _HELD[3:] if shared else _HELD) + shared


def _names_in_memory(inside: int) -> int:
    """How many files and folders there are in /dev/shm, which a process has for itself."""
    try:
        found = os.statvfs(f"/proc/{inside}/root/dev/shm")
    except OSError:
        return 0
    return found.f_files - found.f_ffree


def _sockets(inside: int) -> int:
    """Bytes that the sockets of a network namespace can hold, those in flight included.

    Buffers are as large as the system makes them (seccomp.py), but TCP's grow by themselves: of
    these, what waits in them is counted twice over, for what the kernel keeps beside it.
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
    """Bytes that the sockets which processes have open can hold; of what is hidden, the most."""
    hidden = 0
    links: list[Path] = []
    for pid in pids:
        try:
            links += list(Path(f"/proc/{pid}/fd").iterdir())
        except PermissionError:  # of a process that hides, or of a dead one, which has no memory
            hidden += OPEN_FILES if _sum(f"/proc/{pid}/status", ("VmSize:",)) else 0
        except OSError:
            continue
    found = set()
    if len(links) + hidden > FREE_SOCKETS:
        for link in links:
            with contextlib.suppress(OSError):
                found.add(link.readlink().name)
    return _buffers(hidden + sum(each.startswith("socket:") for each in found))


def _buffers(sockets: int) -> int:
    """Bytes that the buffers of so many sockets can hold, one message too large included."""
    return max(sockets - FREE_SOCKETS, 0) * 2 * _buffer_size()


@functools.cache
def _buffer_size() -> int:
    """Bytes of a socket's buffer, as the system makes it."""
    sizes = [Path(f"/proc/sys/net/core/{kind}mem_default") for kind in "rw"]
    return max(int(size.read_text()) for size in sizes if size.exists())


def _sum(path: str, names: tuple[str, ...]) -> int:
    """The sum of some lines of a file such as `RssAnon:  1024 kB`: bytes; 0 if it is gone."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))
