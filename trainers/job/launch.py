"""Launcher: start a job's ranks on this node, watch them, end all when one dies.

Each rank dies with this process, writes its own log, and holds a pipe to the launcher. The default
is a single node. Under Slurm with several nodes, or with a task for each rank, each launcher starts
its share of the ranks. The first one opens a free port, and writes it to the shared root, in a file
of this start alone, for which the others wait. So nobody has to guess a port that is free.

On CPUs ranks are forked after Megatron's import, and start in milliseconds. On GPUs each is
spawned: a new Python, which imports Megatron and reads the job again. A fork of a process that has
touched CUDA cannot use it, and what touches it depends on packages (flash-attn under Transformer
Engine) and on the driver (MIG).

The launcher also writes the job's lines of the ledger: when a node is held and left, with the GPUs
that it sees, and the steps of an attempt when it ends, or, if it was killed, when the next attempt
begins, before the events of lost steps are dropped. Read next: rank_monitor.py.
"""

import ctypes
import faulthandler
import gc
import importlib
import io
import json
import os
import signal
import socket
import sys
import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, replace
from datetime import timedelta
from functools import partial
from pathlib import Path
from typing import Any, NoReturn, TextIO

from cray_agents.errors import FULL, BadInput, Corrupt, CrayError, JobError, SetupError, StoreError
from cray_agents.paths import Home, host_cache
from cray_agents.processes import importing_much, python
from cray_agents.records import Record
from cray_agents.runtime.accounting.ledger import LedgerFile, holding
from cray_agents.runtime.disk import checksums, durable
from cray_agents.runtime.scheduler.gpu_placement import gpu_type, host_gpus
from cray_agents.runtime.scheduler.sampler import HardwareSampler
from cray_agents.trainers.job.failures.hang_report import (
    RECORDED,
    RECORDER_VARIABLE,
    write_stacks_on_signal,
)
from cray_agents.trainers.job.failures.rank_monitor import (
    HANGS,
    LOST,
    PATIENCE,
    NodeClocks,
    RankProcess,
    describe,
    find_culprit,
    first_end,
    look_interval,
    node_name,
    note_end,
    pulse,
    refuse,
    watch,
)
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.training_jobs import Layout

EX_TEMPFAIL = 75  # go on later
POLL = 0.1  # seconds between looks for the file
MEETING_SECONDS = 600.0  # seconds to wait for the other ranks, whatever they load
SLOWEST = 2e8  # bytes a second, of a shared file system on a bad day
_PR_SET_PDEATHSIG = 1
START = "RANKS_START"  # set by the batch script: unique to a start, the same for all its launchers
_STOP_SIGNALS = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)


@dataclass(frozen=True)
class RankPlacement:
    """The ranks of this launcher, and the address where all ranks of the job connect.

    `node` counts launchers: of nodes, or (`unit`) of Slurm's tasks. `attempt` fences what other
    launchers say. `patience` is the time in seconds that ranks wait for each other.
    """

    node: int
    nodes: int
    world: int
    host: str
    port: int  # 0: any free one
    start: str = ""  # unique to this start of the job, the same on all nodes
    unit: str = "node"
    attempt: int = 0
    patience: float = MEETING_SECONDS

    @property
    def ranks(self) -> range:
        """The ranks of this launcher."""
        share = self.world // self.nodes
        return range(self.node * share, (self.node + 1) * share)

    @property
    def node_phrase(self) -> str:
        """This node in words; empty if it is the only one."""
        phrase = f" on {self.unit} {self.node} of {self.nodes} ({node_name()})"
        return phrase if self.nodes > 1 else ""


def find_placement(world: int, job_id: str) -> RankPlacement:
    """Return this launcher's ranks, from Slurm's variables if there are several launchers.

    The host is this one, by Slurm's name of it: the first launcher's is where all connect. Raises
    BadInput.
    """
    nodes = int(os.environ.get("SLURM_NNODES", "1"))
    launchers = int(os.environ.get("SLURM_STEP_NUM_TASKS", nodes))
    if launchers == 1:
        return RankPlacement(0, 1, world, "127.0.0.1", 0)
    unit = "node" if launchers == nodes else "task"
    share_of(world, launchers, unit)
    names = ("SLURM_JOB_ID", "SLURM_RESTART_COUNT", "SLURM_STEP_ID")
    start = os.environ.get(START) or "-".join(os.environ.get(name, "0") for name in names)
    number = int(os.environ["SLURM_PROCID" if unit == "task" else "SLURM_NODEID"])
    here = os.environ.get("SLURMD_NODENAME") or socket.gethostname()
    host = "127.0.0.1" if nodes == 1 else here
    return RankPlacement(number, launchers, world, host, 0, f"{job_id}-{start}", unit)


def share_of(world: int, launchers: int, unit: str) -> int:
    """Return the ranks of each of several launchers. Raises BadInput."""
    if world % launchers:
        text = f"{world} ranks cannot be spread evenly over {launchers} {unit}s"
        raise BadInput(text, param="layout")
    return world // launchers


@dataclass(frozen=True)
class RanksOutcome:
    """The exit code of ranks that all ended on purpose.

    `refusal` is a reason that no restart would mend.
    """

    code: int
    refusal: str | None = None


class StopFlag:
    """A request to save a resume point and stop, set by SIGTERM, SIGUSR1 and SIGINT."""

    def __init__(self) -> None:
        self.set = False

    def listen(self) -> None:
        """Install the handlers in this process."""
        for number in _STOP_SIGNALS:
            signal.signal(number, self._on_signal)

    def _on_signal(self, number: int, frame: object) -> None:
        self.set = True


RankMain = Callable[[int, Any, StopFlag], int]
#: A module, and what its `rank_main(on_cpu, ...)` makes a RankMain of, as JSON can hold it.
Recipe = tuple[str, list[Any]]


# ---- where ranks meet
class Rendezvous(Record):
    """The place where a start's ranks connect. `attempt` is the start's, as a fence."""

    host: str
    port: int
    attempt: int


def meet(
    placement: RankPlacement, folder: Path, lost: Callable[[], bool] | None = None
) -> tuple[RankPlacement, socket.socket | None]:
    """Return the placement with the address where ranks connect, and the first node's socket there.

    With several launchers, the first one announces the address in a file of the folder, and the
    others wait for it. Raises SetupError, and JobError once another launcher is `lost`.
    """
    if placement.world == 1:
        return placement, None
    file = rendezvous_file(placement, folder)
    if placement.node == 0:
        listener = listen_for_ranks(placement)
        placement = replace(placement, port=listener.getsockname()[1])
        if placement.nodes > 1:
            place = Rendezvous(host=placement.host, port=placement.port, attempt=placement.attempt)
            durable.replace_file(file, checksums.record_text(place))
        return placement, listener
    place = await_rendezvous(file, placement.attempt, placement.patience, lost)
    return replace(placement, host=place.host, port=place.port), None


def rendezvous_file(placement: RankPlacement, folder: Path) -> Path:
    """Return the file in which a start's first launcher announces its address."""
    return folder / f"{placement.start}.rendezvous.json"


def listen_for_ranks(placement: RankPlacement) -> socket.socket:
    """Open the socket where all ranks connect: on loopback if all nodes are this host.

    A host may resolve its own name to another address than its peers do. A socket for other nodes
    therefore listens on all addresses.
    """
    host = placement.host if placement.host.startswith("127.") else ""
    return socket.create_server((host, placement.port))


def await_rendezvous(
    file: Path, attempt: int, seconds: float, lost: Callable[[], bool] | None = None
) -> Rendezvous:
    """Wait for a start's rendezvous, of this attempt or a later one.

    A launcher that is not the first may read the number of attempts before the first one claims its
    own. A lower number than that is left from an earlier start. Raises SetupError after `seconds`,
    and JobError once another launcher is `lost`.
    """
    deadline = time.monotonic() + seconds
    while True:
        if file.name in durable.names_in(file.parent):
            with suppress(FileNotFoundError, Corrupt):  # not seen whole yet from this node
                rendezvous = checksums.read_record(Rendezvous, file)
                if rendezvous.attempt >= attempt:
                    return rendezvous
        if lost is not None and lost():
            raise JobError(LOST)
        if time.monotonic() > deadline:
            raise SetupError(
                f"the first node did not say within {seconds:.0f} s where the ranks connect: {file}"
                " is missing; the end of the job's log shows how far that node is"
            )
        time.sleep(POLL)


def loading_seconds(*folders: Path | None) -> float:
    """Return the seconds that ranks may wait for each other while files in folders are loaded."""
    sizes = 0
    for folder in filter(None, folders):
        for root, _, names in os.walk(folder):  # unlike `rglob` it bears what vanishes meanwhile
            for name in names:
                with suppress(FileNotFoundError):
                    sizes += Path(root, name).stat().st_size
    return MEETING_SECONDS + sizes / SLOWEST


# ---- ranks
def load_for_ranks(placement: RankPlacement, layout: Layout, *, ipc: bool = False) -> bool:
    """Load Megatron for this node's ranks; return True if they have to train on the CPU.

    `ipc`: they give memory of their GPUs to other processes, which takes segments of fixed size.
    Raises SetupError if the node has too few GPUs.
    """
    os.environ.setdefault(RECORDER_VARIABLE, RECORDED)
    # all ranks and jobs share what one has compiled: by default it is in TMPDIR, often a job's own
    os.environ.setdefault("TORCHINDUCTOR_CACHE_DIR", str(host_cache() / "torchinductor"))
    if layout.tensor > 1:  # CUDA reads it once: Megatron's order of transfers and products needs it
        os.environ.setdefault("CUDA_DEVICE_MAX_CONNECTIONS", "1")
    with importing_much():
        import torch

        from cray_agents.trainers.models.megatron_fixes import load_megatron

        on_cpu = load_megatron()
    knows = tuple(map(int, torch.__version__.split(".")[:2])) >= (2, 13)
    if knows and "PYTORCH_CUDA_ALLOC_CONF" not in os.environ:
        # else torch rounds page-locked memory, of saving and offloading, up to a power of two
        # micro-batches differ in length: with segments that grow, no memory is lost between them
        settings = f"pinned_max_round_threshold_mb:1,expandable_segments:{not ipc}"
        os.environ.setdefault("PYTORCH_ALLOC_CONF", settings)
    if not on_cpu and len(placement.ranks) > (gpus := torch.cuda.device_count()):
        raise SetupError(
            f"{len(placement.ranks)} ranks are to run on this node, and it has {gpus} GPUs"
        )
    return on_cpu


def run_ranks(
    placement: RankPlacement,
    logs: Path,
    main: RankMain,
    recipe: Recipe | None = None,
    lost: Callable[[], bool] | None = None,
) -> RanksOutcome:
    """Fork this node's ranks, each running `main(rank, store, stop) -> exit code`, and wait.

    With a recipe they are spawned, as GPUs need. Raises JobError with the rank and its log's tail
    if one dies or no longer responds, and once another launcher is `lost`.
    """
    logs.mkdir(parents=True, exist_ok=True)
    start = partial(_fork, main) if recipe is None else partial(_spawn, recipe)
    placement, listener = meet(placement, logs, lost)
    ranks: list[RankProcess] = []
    sampler: HardwareSampler | None = None
    before = {number: signal.getsignal(number) for number in _STOP_SIGNALS}
    try:
        received = _forward_signals(ranks)
        signal.pthread_sigmask(signal.SIG_BLOCK, _STOP_SIGNALS)  # none is lost between two starts
        for rank in placement.ranks:
            ranks.append(start(rank, placement, listener, _log(logs, rank)))
        if os.environ.get("SLURM_LOCALID", "0") == "0":  # of a node's launchers one samples
            sampler = HardwareSampler(logs.parent, [process.pid for process in ranks])
            sampler.start()  # while signals are blocked: it leaves them to this thread
        signal.pthread_sigmask(signal.SIG_UNBLOCK, _STOP_SIGNALS)
        if received:  # another thread took the signal before all ranks were started
            os.kill(os.getpid(), signal.SIGTERM)
        clocks = NodeClocks(logs, placement.start, placement.node, placement.nodes)
        bad = watch(ranks, clocks, lost)
        if bad is None:
            _end(ranks)
            return RanksOutcome(max(process.code or 0 for process in ranks))
        process, how = bad
        if how == LOST:
            raise JobError(LOST)
        waits, patience = False, PATIENCE
        if how == HANGS:
            report = logs.parent / "hangs" / f"{time.time_ns()}-{placement.node}.txt"
            files = {rank: _log(logs, rank) for rank in placement.ranks}
            process, how, waits = find_culprit(ranks, files, report)
            patience += 2 * look_interval()  # another node may see the hang later
        ours = describe(process, how, placement.node_phrase, _log(logs, process.rank), waits=waits)
        if not waits:  # ranks that wait stay, until the node with the cause has looked at its own
            _end(ranks)
        note = logs / f"{placement.start}.json" if placement.nodes > 1 else None
        ended = first_end(note, ours, patience)
        _end(ranks)
        if ended.refusal is not None:
            return RanksOutcome(1, ended.refusal)
        note_end(logs.parent, ended)
        raise JobError(str(ended), log_tail=ended.log_tail)
    finally:
        _end(ranks)
        if sampler is not None:
            sampler.close()
        for number, handler in before.items():
            signal.signal(number, handler)
        if listener is not None:
            listener.close()
            rendezvous_file(placement, logs).unlink(missing_ok=True)


def _log(logs: Path, rank: int) -> Path:
    return logs / f"rank-{rank}.txt"


def _forward_signals(ranks: list[RankProcess]) -> list[int]:
    """Pass this process's stop signals on to the ranks; return the growing list of them."""
    received: list[int] = []

    def forward(number: int, frame: object) -> None:
        received.append(number)
        for process in ranks:
            if process.code is None:
                with suppress(ProcessLookupError):  # its code is being taken just now
                    os.kill(process.pid, signal.SIGTERM)

    for number in _STOP_SIGNALS:
        signal.signal(number, forward)
    return received


def _end(ranks: list[RankProcess]) -> None:
    """Kill the ranks that still run, and close all pipes."""
    for process in ranks:
        if process.code is None:
            os.kill(process.pid, signal.SIGKILL)
            process.code = os.waitstatus_to_exitcode(os.waitpid(process.pid, 0)[1])
        if process.pipe >= 0:
            os.close(process.pipe)
            process.pipe = -1


def _fork(
    main: RankMain, rank: int, placement: RankPlacement, listener: socket.socket | None, log: Path
) -> RankProcess:
    launcher = os.getpid()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        os.close(read_end)
        _be_rank(
            launcher,
            log,
            write_end,
            lambda stop: main(rank, open_store(rank, placement, listener), stop),
        )
    os.close(write_end)
    return RankProcess(rank, pid, read_end)


def _spawn(
    recipe: Recipe, rank: int, placement: RankPlacement, listener: socket.socket | None, log: Path
) -> RankProcess:
    """Start a rank in a new Python, which inherits the pipe and the listener."""
    read_end, write_end = os.pipe()
    os.set_inheritable(write_end, True)
    if listener is not None:
        listener.set_inheritable(True)
    handles = [write_end, None if listener is None else listener.fileno()]
    program = f"from {__name__} import be_spawned_rank; be_spawned_rank()"
    described = json.dumps([rank, os.getpid(), str(log), *handles, vars(placement), recipe])
    # not by fork and exec: between the two, another thread's lock could block the child
    pid = os.posix_spawn(sys.executable, python("-c", program, described), os.environ)
    os.close(write_end)
    return RankProcess(rank, pid, read_end)


def be_spawned_rank() -> NoReturn:
    """Run the rank that `_spawn` describes in the argument of this new Python."""
    rank, launcher, log, pipe, listening, place, (module, arguments) = json.loads(sys.argv[1])
    placement = RankPlacement(**place)

    def main(stop: StopFlag) -> int:
        import torch

        from cray_agents.trainers.models.megatron_fixes import load_megatron

        if torch.cuda.is_available():  # or the import would take memory of GPU 0 for every rank
            torch.cuda.set_device(rank % torch.cuda.device_count())
        on_cpu = load_megatron()
        main_of_rank: RankMain = importlib.import_module(module).rank_main(on_cpu, *arguments)
        listener = None if listening is None else socket.socket(fileno=listening)
        return main_of_rank(rank, open_store(rank, placement, listener), stop)

    _be_rank(launcher, Path(log), pipe, main)


def _be_rank(launcher: int, log: Path, pipe: int, main: Callable[[StopFlag], int]) -> NoReturn:
    """Run a rank in this child of the launcher, log any error, and exit."""
    code = 1
    gc.freeze()  # what was imported stays, and to look through it would copy the launcher's memory
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
        sys.stdout = sys.stderr = open_log(handle)
        faulthandler.enable()
        write_stacks_on_signal(log)
        pulse(pipe, log)
        code = main(stop)
    except CrayError as problem:
        if restart_may_help(problem):
            print(problem)
        else:
            refuse(pipe, str(problem))
    except BaseException:  # noqa: BLE001 (a forked child must never return into its parent)
        traceback.print_exc()
    finally:
        os._exit(code)


def open_log(file: Path | int) -> TextIO:
    """Open a log for the lines at its end. A full disk costs lines, and not their writer."""
    return io.TextIOWrapper(io.BufferedWriter(_Log(file, "a")), line_buffering=True)


class _Log(io.FileIO):
    def write(self, content: Any) -> int:
        try:
            return super().write(content)
        except OSError as error:
            if error.errno not in FULL:
                raise
            return len(content)


def restart_may_help(problem: CrayError) -> bool:
    """Return True for a full disk or a machine that lacks something: not the job's fault."""
    return isinstance(problem, SetupError | StoreError) and not isinstance(problem, Corrupt)


def open_store(rank: int, placement: RankPlacement, listener: socket.socket | None) -> Any:
    """Connect to the ranks' rendezvous store.

    Its port was opened before the fork, so no other process can take it.
    """
    from torch._C._distributed_c10d import HashStore, TCPStore

    if placement.world == 1:
        return HashStore()
    host, world = placement.host, placement.world
    if host.startswith("127."):
        os.environ.setdefault("GLOO_SOCKET_IFNAME", "lo")
    port, patience = placement.port, timedelta(seconds=placement.patience)
    if rank == 0 and listener is not None:
        fd = listener.detach()
        return TCPStore(host, port, world, is_master=True, timeout=patience, master_listen_fd=fd)
    return TCPStore(host, port, world, timeout=patience)


# ---- the ledger
@contextmanager
def holding_node(
    home: Home, kind: str, holder: str, attempt: int, what: str, ranks: int
) -> Iterator[LedgerFile]:
    """Write that this node's GPUs and cores are held while the block runs.

    `ranks`: of all nodes. Of several launchers on a node only the first one writes.
    """
    if os.environ.get("SLURM_LOCALID", "0") != "0":
        yield LedgerFile(home.ledger, holder)
        return
    with holding(
        home.ledger,
        kind=kind,
        holder=holder,
        attempt=attempt,
        what=what,
        state="training",
        gpus=tuple(host_gpus()),
        gpu_type=gpu_type(),
        cores=held_cores(ranks),
    ) as ledger:
        yield ledger


def held_cores(ranks: int) -> int:
    """Return the cores that a job has on this node: what Slurm gave it, else what it asked for.

    Without Slurm all `ranks` are here, with a core for each thread that the trainer gave them.
    """
    given = os.environ.get("SLURM_CPUS_ON_NODE", "")
    threads = os.environ.get("OMP_NUM_THREADS", "")
    if given.isdecimal() and int(given):
        return int(given)
    return ranks * (int(threads) if threads.isdecimal() else 1)


def note_steps(ledger: LedgerFile, journal: JobJournal, within: tuple[str, int] = ("", 0)) -> None:
    """Write the steps of a job's newest attempt so far.

    `within`: the session that trains it, and the session's attempt.
    """
    started: dict[str, Any] | None = None
    steps: list[dict[str, Any]] = []
    events: list[dict[str, Any]] = []
    with suppress(Corrupt, OSError):  # it is an account: the job itself meets the damage
        events = journal.events()
    for event in events:
        if event["event"] == "started":
            started, steps = event, []
        elif event["event"] == "step" and started is not None:
            steps.append(event)
    if started is None or not steps:
        return
    ledger.note(
        event="steps",
        kind="job",
        holder=journal.job_id,
        attempt=started["attempt"],
        within=within[0],
        within_attempt=within[1],
        node=os.environ.get("SLURMD_NODENAME") or os.uname().nodename,
        first=started["from_step"],
        last=steps[-1]["step"],
        seconds=sum(step["seconds"] for step in steps),
        tokens=sum(step["tokens"] for step in steps),
    )
