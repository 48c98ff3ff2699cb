"""Sampler: a thread that writes the load of this node's devices beside a job's events, or a log.

    hardware.<node>.jsonl   a line every ten seconds, with a checksum

A `node` line with the names of its GPUs begins each attempt of the job. A `sample` line is flat:
`gpu0.power_watts`, `mlx5_0:1.sent_bytes_per_second`, `host.load`. Of errors it has those that grew
since the attempt began, and by how much. At MOST bytes every second sample is dropped, and the
next ones come half as often: the file has the whole job, if more coarsely.

Network ports are what the kernel counts at InfiniBand, RoCE and EFA ports (/sys/class/infiniband,
sysfs-class-infiniband and the drivers mlx5 and efa); only fake trees were read.

It runs in the launcher, so no rank ever waits for it. Any failure is printed once, and ends it.
run_ranks (job/launch.py) starts it for a job; pool/vllm_process.py does for a replica, in the
folder LOG.d beside its log. views/job_hardware.py reads the files.
"""

import os
import re
import threading
import time
from collections.abc import Iterator, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

from cray_agents.paths import HARDWARE
from cray_agents.runtime.disk import durable, journal
from cray_agents.runtime.scheduler.gpu_placement import host_gpus
from cray_agents.runtime.scheduler.nvml import LIBRARY, Nvml, describe_gpus, nvml, read_load

SYS = Path("/sys")
WORD = 4  # bytes that `port_xmit_data` and `port_rcv_data` count as one
#: What passed a port in each direction, and its size in bytes; the first file that exists counts.
SENT = [("counters/port_xmit_data", WORD), ("hw_counters/tx_bytes", 1)]
RECEIVED = [("counters/port_rcv_data", WORD), ("hw_counters/rx_bytes", 1)]
#: Further amounts, of which rates are made.
AMOUNTS = {
    "rdma_read_bytes": "hw_counters/rdma_read_bytes",
    "rdma_write_bytes": "hw_counters/rdma_write_bytes",
    "sent_packets": "hw_counters/tx_pkts",
    "received_packets": "hw_counters/rx_pkts",
    "wait_ticks": "counters/port_xmit_wait",
}
#: Errors, and signs of a crowded network (the last three).
ERRORS = {
    "counters": (
        "symbol_error", "link_downed", "link_error_recovery", "port_rcv_errors",
        "port_xmit_discards", "local_link_integrity_errors", "excessive_buffer_overrun_errors",
    ),
    "hw_counters": (
        "out_of_sequence", "packet_seq_err", "rnr_nak_retry_err", "local_ack_timeout_err",
        "rx_drops", "retrans_timeout_events", "np_cnp_sent", "rp_cnp_handled",
        "np_ecn_marked_roce_packets",
    ),
}  # fmt: skip


def ports_of(sys: Path = SYS) -> Iterator[tuple[str, Path]]:
    """Yield all ports with their folders, named as in `mlx5_0:1`."""
    for folder in sorted((sys / "class" / "infiniband").glob("*/ports/*")):
        yield f"{folder.parents[1].name}:{folder.name}", folder


def read_amounts(folder: Path) -> dict[str, int]:
    """Return what passed a port so far, as far as it counts that."""
    amounts: dict[str, int] = {}
    for name, sources in (("sent_bytes", SENT), ("received_bytes", RECEIVED)):
        for file, size in sources:
            if (value := number_in(folder / file)) is not None:
                amounts[name] = value * size
                break
    for name, file in AMOUNTS.items():
        if (value := number_in(folder / file)) is not None:
            amounts[name] = value
    return amounts


def read_errors(folder: Path) -> dict[str, int]:
    """Return a port's counters of errors, by the kernel's names."""
    read = {
        name: number_in(folder / kind / name) for kind, names in ERRORS.items() for name in names
    }
    return {name: value for name, value in read.items() if value is not None}


def text_of(path: Path) -> str:
    """Return a short text of sysfs; "" where it is missing or cannot be read."""
    with suppress(OSError):
        return path.read_text().strip()
    return ""


def number_in(path: Path) -> int | None:
    """Return a number of sysfs; None without one."""
    text = text_of(path)
    return int(text) if text.lstrip("-").isdecimal() else None


EVERY = 10.0  # seconds
MOST = 8 << 20  # bytes of a file
_TICKS = os.sysconf("SC_CLK_TCK")


class HardwareSampler:
    """Samples until `close`.

    Args:
        folder: the job's, or its session's.
        pids: the processes whose cores are counted, with their children.
        sys, library: where the kernel's files and NVML are.
    """

    def __init__(
        self,
        folder: Path,
        pids: Sequence[int] = (),
        *,
        every: float = EVERY,
        most: int = MOST,
        sys: Path = SYS,
        library: str = LIBRARY,
        gpus: Sequence[str] | None = None,
    ) -> None:
        self.node = os.environ.get("SLURMD_NODENAME") or os.uname().nodename
        self.path = folder / f"{HARDWARE}{self.node}.jsonl"
        self._pids, self._sys, self._library = pids, sys, library
        self._gpus = host_gpus() if gpus is None else gpus
        self._every, self._most, self._size = every, most, 0
        self._before: dict[str, float] = {}  # amounts at the last sample
        self._errors: dict[str, int] = {}  # of ports, at the first one
        self._end = threading.Event()
        self._thread = threading.Thread(target=self._run, name="hardware", daemon=True)

    def start(self) -> None:
        """Begin. Signals that this thread has blocked go to others for ever."""
        try:
            self._thread.start()
        except RuntimeError as error:  # the limit of threads
            print(f"this node's hardware is not sampled: {error}", flush=True)

    def close(self) -> None:
        """Take a last sample, and end; a sample that hangs is left behind."""
        self._end.set()
        if self._thread.is_alive():
            self._thread.join(timeout=2.0)

    def _run(self) -> None:
        try:
            with nvml(self._library) as driver:
                self._drop_torn_line()
                gpus = [] if driver is None else describe_gpus(driver, self._gpus)
                self._write("node", {"node": self.node, "gpus": gpus})
                ended = False
                while not ended:
                    self._write("sample", self.sample(driver))
                    ended = self._end.wait(self._every)
                self._write("sample", self.sample(driver))
        except Exception as error:  # noqa: BLE001 (an account of the job, which must not harm it)
            print(f"this node's hardware is not sampled any more: {error!r}", flush=True)

    def sample(self, driver: Nvml | None = None) -> dict[str, Any]:
        """Return the figures of this moment, and rates since the last call."""
        figures: dict[str, Any] = {}
        if driver is not None:
            for gpu in self._gpus:
                load = read_load(driver, gpu)
                figures |= {f"gpu{gpu}.{name}": value for name, value in load.items()}
        amounts: dict[str, float] = {"": time.monotonic()}
        for port, folder in ports_of(self._sys):
            figures[f"{port}.up"] = int("ACTIVE" in text_of(folder / "state"))  # `4: ACTIVE`
            for name, amount in read_amounts(folder).items():
                amounts[f"{port}.{name}_per_second"] = amount
            for name, count in read_errors(folder).items():
                key = f"{port}.{name}"
                if grown := count - self._errors.setdefault(key, count):
                    figures[key] = grown
        times = [_cpu_seconds(pid) for pid in self._pids]
        if times and None not in times:
            amounts["host.rank_cores"] = sum(filter(None, times))
        before, self._before = self._before, amounts
        if before:
            seconds = amounts[""] - before[""]
            for name in amounts.keys() & before.keys() - {""}:
                if amounts[name] >= before[name] and seconds > 0:  # else it was reset
                    figures[name] = (amounts[name] - before[name]) / seconds
        return figures | {"host.load": os.getloadavg()[0], **_memory()}

    def _write(self, event: str, values: dict[str, Any]) -> None:
        line = journal.line_of({"event": event, "time": time.time(), **values})
        if self._size + len(line) >= self._most:
            self._thin()
        with self.path.open("ab") as file:
            file.write(line + b"\n")
            self._size = file.tell()

    def _thin(self) -> None:
        """Drop every second sample from the file, and take half as many from here on."""
        kept, samples = [], 0
        for line in self.path.read_bytes().splitlines():
            is_sample = b'"event":"sample"' in line
            samples += is_sample
            if not is_sample or samples % 2:
                kept.append(line + b"\n")
        durable.replace_file(self.path, b"".join(kept))
        self._size = sum(map(len, kept))
        self._every *= 2

    def _drop_torn_line(self) -> None:
        """Cut off what a killed process wrote of a line."""
        if self.path.exists():
            whole = self.path.read_bytes()
            self._size = whole.rfind(b"\n") + 1
            if self._size < len(whole):
                os.truncate(self.path, self._size)


def _cpu_seconds(pid: int) -> float | None:
    """Return the CPU time of a process and its children so far; None once it has ended."""
    text = text_of(Path(f"/proc/{pid}/stat"))
    fields = text[text.rfind(")") + 2 :].split()
    if len(fields) <= 12:
        return None
    tasks = Path(f"/proc/{pid}/task")  # which may be gone by now
    children = [text_of(tasks / name / "children") for name in durable.names_in(tasks)]
    below = sum(_cpu_seconds(int(child)) or 0.0 for child in " ".join(children).split())
    return (int(fields[11]) + int(fields[12])) / _TICKS + below


def _memory() -> dict[str, float]:
    free = free_memory()
    return {} if free is None else {"host.memory_available_bytes": free}


def memory_of_job(root: Path = Path("/")) -> int | None:
    """Return what the cgroups of this process leave of `free_memory`; None where it is unknown.

    `root`: of the files of the system.
    """
    free = free_memory(root)
    for line in text_of(root / "proc/self/cgroup").splitlines():
        _, kind, path = line.split(":", 2)
        if free is None or kind not in ("", "memory"):
            continue
        names = ("limit_in_bytes", "usage_in_bytes") if kind else ("max", "current")
        group = root / "sys/fs/cgroup" / kind / path.lstrip("/")
        for folder in (group, *group.parents):
            limit, used = (text_of(folder / f"memory.{name}").strip() for name in names)
            if limit.isdecimal() and used.isdecimal():
                stat = text_of(folder / "memory.stat")  # files that were read count as used
                cached = re.search(r"^(?:total_)?inactive_file (\d+)$", stat, re.MULTILINE)
                left = int(limit) - int(used) + (int(cached[1]) if cached else 0)
                free = min(free, max(0, left))
    return free


def free_memory(root: Path = Path("/")) -> int | None:
    """Return the bytes that processes of this host could still get; None where it is unknown."""
    for line in text_of(root / "proc/meminfo").splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) * 1024
    return None
