"""Hang report: the stacks of ranks that do not move, and which of them keeps the others waiting.

rank_monitor.py calls `report_hang` in the launcher when no rank has moved for too long. Each rank
writes its stacks on a signal, by faulthandler, which works also while Python is blocked. What it
waits for is in torch's flight recorder. A rank that is stopped writes nothing. The culprit is a
rank that is stopped, else one that waits for no other rank, else one that waits where few do.
"""

import faulthandler
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cray_agents.runtime.disk import durable

RECORDER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
RECORDED = "200"  # collectives that the flight recorder keeps
DUMP_SECONDS = 3.0  # that a rank may take to write its stacks
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
# A rank whose innermost frame is in one of these waits for other ranks.
_WAITING = (
    "/torch/distributed/",
    "/megatron/core/distributed/",
    "/megatron/core/pipeline_parallel/",
    "/megatron/core/tensor_parallel/mappings.py",
    "/trainers/training/relay.py",
)
_LIBRARIES = ("/torch/", "/megatron/", "/lib/python")


@dataclass(frozen=True)
class RankStack:
    """A rank of a hang: its place in its code, and the collective that it waits in, if known."""

    rank: int
    state: str = ""  # "it is stopped", ...; "" for a process that runs
    place: str = "an unknown place"
    waits: bool = False
    collective: str = ""


# ---- in a rank
def stacks_file(log: Path) -> Path:
    """Return the file for the stacks of the rank with this log."""
    return log.with_suffix(".stacks")


def flight_file(log: Path) -> Path:
    """Return the file for the last collectives of the rank with this log."""
    return log.with_suffix(".collectives.json")


def write_stacks_on_signal(log: Path) -> None:
    """Let SIGUSR2 write the stacks of all threads beside the rank's log."""
    flight_file(log).unlink(missing_ok=True)
    file = stacks_file(log).open("w")  # open as long as the process lives
    faulthandler.register(signal.SIGUSR2, file=file, all_threads=True)


def write_collectives(log: Path) -> None:
    """Write torch's flight recorder beside the rank's log, if it has one."""
    try:
        from torch._C import _distributed_c10d as c10d

        content: Any = vars(c10d)["_dump_fr_trace_json"]()
    except (ImportError, KeyError, RuntimeError):  # a torch without it
        return
    flight_file(log).write_bytes(content if isinstance(content, bytes) else content.encode())


# ---- in the launcher
def report_hang(
    states: Mapping[int, str], pids: Mapping[int, int], logs: Mapping[int, Path], report: Path
) -> list[RankStack]:
    """Let all ranks write their stacks, keep them in the file `report`, and return what they say.

    Args:
        states: by rank; "" for one that runs.
    """
    sizes = {rank: _size(stacks_file(log)) for rank, log in logs.items()}
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR2)
    deadline = time.monotonic() + DUMP_SECONDS
    awaited = [rank for rank, state in states.items() if not state]
    while time.monotonic() < deadline and any(
        _size(stacks_file(logs[rank])) == sizes[rank] for rank in awaited
    ):
        time.sleep(0.02)
    time.sleep(0.1)  # a stack is written line by line
    stacks, texts = [], []
    for rank, log in logs.items():
        text = _read(stacks_file(log))
        stacks.append(_read_rank(rank, states[rank], text, _read(flight_file(log))))
        texts.append(f"==== rank {rank} {states[rank]}\n{text or 'no stack: it did not answer'}\n")
    report.parent.mkdir(parents=True, exist_ok=True)
    durable.write_file(report, "\n".join(texts).encode())
    return stacks


def culprit(stacks: Sequence[RankStack]) -> tuple[RankStack, str]:
    """Return the rank that keeps the others waiting, and the hang in words."""

    def order(stack: RankStack) -> tuple[bool, bool, int, int]:
        alike = sum(other.place == stack.place for other in stacks)
        return (not stack.state, stack.waits, alike, stack.rank)

    first = min(stacks, key=order)
    how = first.state or f"it {'waits' if first.waits else 'is'} in {first.place}"
    groups: dict[str, list[int]] = {}
    for stack in stacks:
        if stack is not first and stack.waits:
            place = stack.collective or stack.place
            groups.setdefault(place, []).append(stack.rank)
    waiting = [
        f"rank{'s' if len(ranks) > 1 else ''} {_ranges(ranks)} wait{'s' if len(ranks) == 1 else ''}"
        f" in {place}"
        for place, ranks in groups.items()
    ]
    return first, "; ".join([how, *waiting])


def _read_rank(rank: int, state: str, stacks: str, flight: str) -> RankStack:
    collective, frames = _read_flight(flight), _main_thread(stacks)
    if not frames or state:
        return RankStack(rank, state)
    file, _, name = frames[0]
    waits = any(part in file for part in _WAITING)
    ours = next((f for f in frames if not any(part in f[0] for part in _LIBRARIES)), frames[0])
    place = f"{ours[2]} ({Path(ours[0]).name}:{ours[1]})"
    if (waits or collective) and ours[0] != file:
        place = f"{collective or name}, called by {place}"
    return RankStack(rank, "", place, waits or bool(collective), collective)


def _main_thread(text: str) -> list[tuple[str, str, str]]:
    """Return file, line and function of the main thread's frames in the newest dump, innermost
    first: faulthandler writes the main thread last.
    """
    frames: list[tuple[str, str, str]] = []
    for line in text.splitlines():
        if (match := _FRAME.match(line)) is not None:
            frames.append((match["file"], match["line"], match["name"]))
        elif "hread 0x" in line:
            frames = []
    return frames


def _read_flight(text: str) -> str:
    """Return the oldest collective that a rank has called and that has not ended; "" if unknown."""
    try:
        for entry in json.loads(text)["entries"]:
            if not entry["retired"] and entry["state"] != "completed":
                kind = entry["profiling_name"].partition(":")[2] or entry["profiling_name"]
                group = entry["process_group"]
                return f"{kind} {entry['collective_seq_id']} of group {group[1] or group[0]}"
    except (ValueError, KeyError, TypeError, IndexError):  # no recorder, or another version's
        pass
    return ""


def _ranges(ranks: Sequence[int]) -> str:
    """Return numbers as in "0-3, 7"."""
    runs: list[list[int]] = []
    for rank in sorted(ranks):
        if runs and rank == runs[-1][-1] + 1:
            runs[-1].append(rank)
        else:
            runs.append([rank])
    return ", ".join(f"{p[0]}-{p[-1]}" if len(p) > 1 else str(p[0]) for p in runs)


def _size(path: Path) -> int:
    return path.stat().st_size if path.exists() else 0


def _read(path: Path) -> str:
    return path.read_text(errors="replace") if path.exists() else ""
