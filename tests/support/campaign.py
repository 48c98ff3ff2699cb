"""Fault campaigns: something is hurt at points drawn from a seed, and must then be as if unhurt.

CRAY_TEST_KILLS and CRAY_TEST_SEEDS make one longer; `python -m tests.soak` sets them.
"""

import importlib
import os
import random
import runpy
import signal
import socket
import sys
import time
import traceback
from collections import Counter
from collections.abc import Callable
from contextlib import AbstractContextManager, suppress
from dataclasses import dataclass, field
from multiprocessing.context import ForkProcess
from pathlib import Path
from typing import Generic, TypeVar

from cray_agents.runtime.scheduler.private_cluster import PORTS

T = TypeVar("T")
SEEDS = [int(seed) for seed in os.environ.get("CRAY_TEST_SEEDS", "1").split(",")]
MOST = 10  # failed rounds, after which a campaign ends


def kills(usual: int) -> int:
    """How often a campaign kills at least: so often, unless CRAY_TEST_KILLS says otherwise."""
    return int(os.environ.get("CRAY_TEST_KILLS", usual))


def free_port() -> int:
    """A port that nobody takes while a killed gateway is away: neither kernel nor private Slurm."""
    while True:
        port = random.SystemRandom().randrange(10_000, PORTS.start)
        with socket.socket() as free, suppress(OSError):
            free.bind(("127.0.0.1", port))
            return port


@dataclass(frozen=True)
class Campaign(Generic[T]):
    """Rounds of faults: a failed one ends neither the campaign nor hides another's failure.

    `process` makes what is hurt, in a folder that is not there yet. `points` hurts it at moments
    drawn from the chance, so often at most, and returns what it hit; it ends when the work has
    ended. `check` then asserts what must hold, before `process` is closed.
    """

    process: Callable[[Path, random.Random], AbstractContextManager[T]]
    points: Callable[[T, random.Random, int], Counter[str]]
    check: Callable[[T], None]

    def run(self, folder: Path, enough: int, seeds: list[int] | None = None) -> Counter[str]:
        """For each seed, rounds until there were `enough` hits; return all hits by their kind."""
        failures, total = [], Counter[str]()
        for seed in SEEDS if seeds is None else seeds:
            hits, begun, number = Counter[str](), time.monotonic(), 0
            while hits.total() < enough and len(failures) < MOST:
                number += 1
                chance = random.Random(f"{seed} {number}")
                try:
                    with self.process(folder / f"{seed}-{number}", chance) as hurt:
                        found = self.points(hurt, chance, enough - hits.total())
                        hits += found
                        self.check(hurt)
                except Exception:  # noqa: BLE001 - all are told at the end
                    failures.append(f"seed {seed}, round {number}:\n{traceback.format_exc()}")
            seconds = time.monotonic() - begun
            print(f"\nseed {seed}: {hits.total()} hits {dict(hits)}"
                  f" in {number} rounds, {seconds:.0f} s")  # fmt: skip
            total += hits
        assert not failures, "\n\n".join(failures)
        return total


class Child(ForkProcess):
    """A module that runs as `python -m` does, in a fork: what it imports is imported once."""

    def __init__(self, log: Path, module: str, *words: object) -> None:
        importlib.import_module(module)
        log.touch()
        super().__init__(target=_be_module, args=(log, module, *map(str, words)))
        self.start()

    def send_signal(self, number: signal.Signals) -> None:
        assert self.pid is not None
        os.kill(self.pid, number)

    def poll(self) -> int | None:
        return self.exitcode

    def wait(self) -> int:
        self.join()
        assert self.exitcode is not None
        return self.exitcode


def _be_module(log: Path, module: str, *words: str) -> None:
    sys.stdout = sys.stderr = log.open("a", buffering=1)
    for descriptor in (1, 2):
        os.dup2(sys.stdout.fileno(), descriptor)
    os.environ["TEST_PARENT"] = str(os.getppid())
    sys.argv = [module, *words]
    runpy.run_module(module, run_name="__main__", alter_sys=True)


@dataclass
class Children:
    """Named processes of a test, each with a log in the folder; they die with the test."""

    folder: Path
    processes: dict[str, Child] = field(default_factory=dict)

    def start(self, name: str, module: str, *words: object) -> None:
        self.processes[name] = Child(self.folder / f"{name}.log", module, *words)

    def kill(self, name: str) -> int:
        """Kill one; return its exit code, which is another if it had ended by itself."""
        self.processes[name].kill()
        return self.processes[name].wait()

    def ended(self, name: str) -> bool:
        """Whether one has done its work; whoever ends in another way has failed."""
        code = self.processes[name].poll()
        log = (self.folder / f"{name}.log").read_text()
        assert code in (None, 0), f"{name} ended with {code}: {log[-3000:]}"
        return code == 0

    def stop(self) -> None:
        for name in self.processes:
            self.kill(name)
