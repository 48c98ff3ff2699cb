"""How much a sandboxed program takes: its processes, their memory, its folders.

Read from /proc and the disk, because control groups are not ours to make on every machine.
Called by sandbox.py.
"""

import contextlib
import os
import signal
from pathlib import Path

ENTRIES = 100_000  # files and folders: as many are too many, however small


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


def takes_more(pids: list[int], memory: int) -> bool:
    """Whether processes together hold more than so many bytes, in memory and swap.

    The quick count takes what they share for each one's own; only if that is too much, the exact
    one is made.
    """
    return (
        sum(_sum(f"/proc/{pid}/status", ("RssAnon:", "RssShmem:", "VmSwap:")) for pid in pids)
        > memory
        and sum(_exact(pid) for pid in pids) > memory
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
    names = ("Pss_Anon:", "Pss_Shmem:", "SwapPss:")
    return _sum(f"/proc/{pid}/smaps_rollup", names) or _sum(
        f"/proc/{pid}/status", ("RssAnon:", "RssShmem:", "VmSwap:")
    )


def _sum(path: str, names: tuple[str, ...]) -> int:
    """The sum of some lines of a file such as `RssAnon:  1024 kB`: bytes; 0 if it is gone."""
    try:
        lines = Path(path).read_text().splitlines()
    except OSError:
        return 0
    return sum(int(line.split()[1]) * 1024 for line in lines if line.startswith(names))
