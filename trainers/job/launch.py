"""Starts a job's ranks on this node: import Megatron once, fork, watch, end all when one dies.

Forking after the import makes ranks start in milliseconds. Each rank dies with this process, writes
its own log, and holds a pipe to the launcher. Single node by default; under Slurm with several
nodes, each node's launcher starts its share of the ranks. Read next: watching.py, job.py.
"""

import ctypes
import faulthandler
import os
import signal
import socket
import subprocess
import sys
import traceback
import zlib
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

from cray_agents.errors import BadInput, Corrupt, CrayError, JobError, SetupError, StoreError
from cray_agents.trainers.job.rank_monitor import (
    RankProcess,
    describe,
    first_end,
    pulse,
    refuse,
    watch,
)

EX_TEMPFAIL = 75  # go on later
_PR_SET_PDEATHSIG = 1
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class RankPlacement:
    """Which ranks this node runs, and where all ranks meet."""

    node: int
    nodes: int
    world: int
    host: str
    port: int  # 0: any free one (single node)
    start: str = ""  # what tells this start of the job from others, on all nodes

    @property
    def ranks(self) -> range:
        """The ranks of this node."""
        share = self.world // self.nodes
        return range(self.node * share, (self.node + 1) * share)

    @property
    def where(self) -> str:
        """This node, for people; nothing if it is the only one."""
        here = f" on node {self.node} of {self.nodes} ({socket.gethostname()})"
        return here if self.nodes > 1 else ""


def find_place(world: int, job_id: str) -> RankPlacement:
    """This node's place, from Slurm's variables if there are several nodes. Raises BadInput."""
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    if nodes == 1:
        return RankPlacement(0, 1, world, "127.0.0.1", 0)
    if world % nodes:
        raise BadInput(f"{world} ranks cannot be spread evenly over {nodes} nodes", param="layout")
    listed = subprocess.run(
        ["scontrol", "show", "hostnames", os.environ["SLURM_JOB_NODELIST"]],
        capture_output=True,
        text=True,
        check=False,
    )
    if listed.returncode:
        raise SetupError(f"scontrol cannot list the job's nodes: {listed.stderr.strip()}")
    port = 20000 + zlib.crc32(job_id.encode()) % 20000
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    start = "-".join(["end", *(os.environ.get(name, "0") for name in names)])
    node = int(os.environ["SLURM_NODEID"])
    return RankPlacement(node, nodes, world, listed.stdout.split()[0], port, start)


@dataclass(frozen=True)
class RanksOutcome:
    """How a job's ranks on this node ended, when all of them ended as they meant to.

    `refusal` is a reason that no restart would mend.
    """

    code: int
    refusal: str | None = None


class StopFlag:
    """Set by SIGTERM and SIGUSR1: save a resume point and stop."""

    def __init__(self) -> None:
        self.set = False

    def listen(self) -> None:
        """Install the handlers in this process."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.set = True


RankMain = Callable[[int, Any, StopFlag], int]


def meeting_point(place: RankPlacement) -> socket.socket:
    """Where the ranks of all nodes find each other: on loopback if all nodes are this host.

    A host can have another address under its own name than others know it by, so what others are
    to reach listens on all of them.
    """
    return socket.create_server((place.host if place.host.startswith("127.") else "", place.port))


def run_ranks(place: RankPlacement, logs: Path, main: RankMain) -> RanksOutcome:
    """Fork this node's ranks, each running `main(rank, store, stop) -> exit code`, and wait.

    Raises JobError, naming the rank and with its log's tail, when one dies or no longer responds.
    """
    logs.mkdir(parents=True, exist_ok=True)
    listener = meeting_point(place) if place.node == 0 and place.world > 1 else None
    ranks: list[RankProcess] = []
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        asked = _forward_signals(ranks)
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # none is lost between two forks
        for rank in place.ranks:
            ranks.append(_fork(rank, place, listener, _log(logs, rank), main))
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        if asked:  # another thread took the signal while there were not all ranks to pass it to
            os.kill(os.getpid(), signal.SIGTERM)
        bad = watch(ranks)
        _end(ranks)
        if bad is None:
            return RanksOutcome(max(process.code or 0 for process in ranks))
        process, how = bad
        ended = first_end(
            logs / f"{place.start}.json" if place.nodes > 1 else None,
            describe(process, how, place.where, _log(logs, process.rank)),
        )
        if ended.refusal is not None:
            return RanksOutcome(1, ended.refusal)
        raise JobError(str(ended), log_tail=ended.log_tail)
    finally:
        _end(ranks)
        for number, handler in before.items():
            signal.signal(number, handler)
        if listener is not None:
            listener.close()


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.txt"


def _forward_signals(ranks: list[RankProcess]) -> list[int]:
    """Let the ranks hear what this process is sent; returns what it was sent, as it comes."""
    asked: list[int] = []

    def forward(number: int, frame: object) -> None:
        asked.append(number)
        for process in ranks:
            if process.code is None:
                os.kill(process.pid, signal.SIGTERM)

    for number in _STOP_SIGNALS:
        signal.signal(number, forward)
    return asked


def _end(ranks: list[RankProcess]) -> None:
    """End those that run on."""
    for process in ranks:
        if process.code is None:
            os.kill(process.pid, signal.SIGKILL)
            process.code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if process.pipe >= 0:
            os.close(process.pipe)
            process.pipe = -1


def _fork(
    rank: int, place: RankPlacement, listener: socket.socket | None, log: Path, main: RankMain
) -> RankProcess:
    launcher = os.getpid()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _be_rank(rank, launcher, place, listener, log, main, write_end)
    os.close(write_end)
    return RankProcess(rank, pid, read_end)


def _be_rank(
    rank: int,
    launcher: int,
    place: RankPlacement,
    listener: socket.socket | None,
    log: Path,
    main: RankMain,
    pipe: int,
) -> NoReturn:
    """The child: never returns. The outermost edge of a rank: whatever goes wrong is logged."""
    code = 1
    try:
        stop = StopFlag()
        stop.listen()
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
        if os.getppid() != launcher:
            os._exit(1)
        handle = os.open(log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
        os.dup2(handle, 1)
        os.dup2(handle, 2)
        sys.stdout = sys.stderr = os.fdopen(handle, "w", buffering=1)
        faulthandler.enable()
        pulse(pipe)
        code = main(rank, _store(rank, place, listener), stop)
    except CrayError as problem:
        if _mended_by_a_restart(problem):
            print(problem)
        else:
            refuse(pipe, str(problem))
    except BaseException:  # noqa: BLE001 (a forked child must never return into its parent)
        traceback.print_exc()
    finally:
        os._exit(code)


def _mended_by_a_restart(problem: CrayError) -> bool:
    """A full disk and a machine that lacks something are not the job's fault."""
    return isinstance(problem, SetupError | StoreError) and not isinstance(problem, Corrupt)


def _store(rank: int, place: RankPlacement, listener: socket.socket | None) -> Any:
    """Where ranks find each other; its port was opened before the fork, so nobody can take it."""
    from torch._C._distributed_c10d import HashStore, TCPStore

    if place.world == 1:
        return HashStore()
    if place.host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    port = listener.getsockname()[1] if listener is not None else place.port
    if rank == 0 and listener is not None:
        return TCPStore(
            place.host, port, place.world, is_master=True, master_listen_fd=listener.detach()
        )
    return TCPStore(place.host, port, place.world)
