"""Hang report: the stacks of ranks that do not move, and which of them keeps the others waiting.

rank_monitor.py calls `report_hang` in the launcher when no rank has moved for too long. Each rank
writes its stacks on a signal, by faulthandler, which works also while Python is blocked. What it
waits for is in torch's flight recorders. A rank that is stopped writes nothing. The culprit is a
rank that is stopped, else one that waits for no other rank, else the one furthest behind in the
collectives of its groups, else one that waits where few do.

On GPUs a rank waits where it reads a number, which is anywhere in the code: only NCCL's recorder
has for what. It was not run.
"""

import faulthandler
import json
import os
import re
import signal
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from cray_agents.runtime.disk import durable

RECORDER_VARIABLE = "TORCH_FR_BUFFER_SIZE"
RECORDED = "200"  # collectives that a flight recorder keeps
_RECORDERS = ("_dump_fr_trace_json", "_dump_nccl_trace_json")  # of CPUs; NCCL's, in torch for CUDA
DUMP_SECONDS = 10.0  # that a rank may take to write its stacks
_FRAME = re.compile(r'^  File "(?P<file>.*)", line (?P<line>\d+) in (?P<name>.*)$')
# A rank whose innermost frame is in one of these waits for other ranks.
_WAITING = (
    "/torch/distributed/",
    "/megatron/core/distributed/",
    "/megatron/core/pipeline_parallel/",
    "/megatron/core/tensor_parallel/mappings.py",
    "/trainers/training/parallel_groups.py",
)
_LIBRARIES = ("/torch/", "/megatron/", "/lib/python")


@dataclass(frozen=True)
class RankStack:
    """A rank of a hang: its place in its code, and the collective that it waits in, if known.

    `reached`: of each group, the numbers of the last collectives that ended and that were called.
    """

    rank: int
    state: str = ""  # "it is stopped", ...; "" for a process that runs
    place: str = "an unknown place"
    waits: bool = False
    collective: str = ""
    reached: Mapping[str, tuple[int, int]] = field(default_factory=dict)


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
    """Write what torch's flight recorders hold beside the rank's log, or why they hold nothing."""
    entries: list[Any] = []
    problem = "this torch has no flight recorder"
    try:
        from torch._C import _distributed_c10d as c10d

        for name in _RECORDERS:
            if (dump := vars(c10d).get(name)) is not None:
                entries += json.loads(dump()).get("entries", [])
                problem = ""
    except (ImportError, RuntimeError, ValueError) as error:
        problem = f"{type(error).__name__}: {error}"
    flight_file(log).write_text(json.dumps({"entries": entries, "problem": problem}))


# ---- in the launcher
def report_hang(
    states: Mapping[int, str], pids: Mapping[int, int], logs: Mapping[int, Path], report: Path
) -> list[RankStack]:
    """Let all ranks write their stacks, keep them in the file `report`, and return what they say.

    Args:
        states: by rank; "" for one that runs.
    """
    awaited = [rank for rank, state in states.items() if not state]
    before = {rank: _size(stacks_file(logs[rank])) for rank in awaited}
    for pid in pids.values():
        os.kill(pid, signal.SIGUSR2)
    deadline, sizes = time.monotonic() + DUMP_SECONDS, before
    while time.monotonic() < deadline:
        last, sizes = sizes, {rank: _size(stacks_file(logs[rank])) for rank in awaited}
        if sizes == last and all(sizes[rank] > before[rank] for rank in awaited):
            break  # a stack is written line by line
        time.sleep(0.1)
    stacks, texts = [], []
    for rank, log in logs.items():
        text, flight = _read(stacks_file(log)), _read_flight(_read(flight_file(log)))
        stacks.append(_read_rank(rank, states[rank], text, flight))
        texts.append(f"==== rank {rank} {states[rank]}\n{text or 'no stack: it did not answer'}\n")
        if flight.problem:
            texts.append(f"its collectives are not known: {flight.problem}\n")
    report.parent.mkdir(parents=True, exist_ok=True)
    durable.write_file(report, "\n".join(texts).encode())
    return stacks


def culprit(stacks: Sequence[RankStack]) -> tuple[RankStack, str]:
    """Return the rank that keeps the others waiting, and the hang in words."""

    furthest: dict[str, tuple[int, int]] = {}
    for stack in stacks:
        for group, reached in stack.reached.items():
            furthest[group] = tuple(map(max, reached, furthest.get(group, (0, 0))))  # type: ignore[assignment]

    def order(stack: RankStack) -> tuple[bool, bool, int, int, int]:
        alike = sum(other.place == stack.place for other in stacks)
        behind = sum(
            sum(furthest[group]) - sum(reached) for group, reached in stack.reached.items()
        )
        return (not stack.state, stack.waits, -behind, alike, stack.rank)

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


@dataclass
class _Flight:
    """A rank's collectives: the one that it waits in, and RankStack's `reached`."""

    collective: str = ""
    reached: dict[str, tuple[int, int]] = field(default_factory=dict)
    problem: str = ""


def _read_rank(rank: int, state: str, stacks: str, flight: _Flight) -> RankStack:
    collective, frames = flight.collective, _main_thread(stacks)
    if not frames or state:
        return RankStack(rank, state)
    file, _, name = frames[0]
    waits = any(part in file for part in _WAITING)
    ours = next((f for f in frames if not any(part in f[0] for part in _LIBRARIES)), frames[0])
    place = f"{ours[2]} ({Path(ours[0]).name}:{ours[1]})"
    if (waits or collective) and ours[0] != file:
        place = f"{collective or name}, called by {place}"
    return RankStack(rank, "", place, waits or bool(collective), collective, flight.reached)


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


def _read_flight(text: str) -> _Flight:
    """Read a rank's collectives. It waits in the first that has not ended."""
    flight = _Flight()
    try:
        record = json.loads(text or '{"entries": [], "problem": "it wrote none"}')
        flight.problem = record["problem"]
        for entry in record["entries"]:
            backend, _, kind = entry["profiling_name"].rpartition(":")
            number, group = entry["collective_seq_id"], entry["process_group"]
            ended = entry["retired"] or entry["state"] == "completed"
            if not ended and not flight.collective:
                flight.collective = f"{kind} {number} of group {group[1] or group[0]}"
            if not entry["is_p2p"]:
                name = f"{backend} {group[0]}"
                done, called = flight.reached.get(name, (0, 0))
                done = max(done, number) if ended else done
                flight.reached[name] = (done, max(called, number))
    except (ValueError, KeyError, TypeError, IndexError) as error:  # of another version of torch
        return _Flight(problem=f"{type(error).__name__}: {error}")
    return flight


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
