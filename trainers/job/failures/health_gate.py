"""Health gate: checks of a node, and of the ranks together, before a job or session begins.

job.py and session_process.py call `check_node` on each node before anything else, and rank.py calls
`check_ranks` when the ranks have met. A bad node costs seconds then, and not an hour later. The
error names the node; the trainer leaves it out for a time (failure.py) and starts the job again.
cli/preflight.py, which is `doctor --node` and `--cluster`, calls the same and the slower ones here.
"""

import json
import os
import shutil
import statistics
import subprocess
import threading
import time
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from itertools import pairwise
from pathlib import Path
from typing import Any

from cray_agents.errors import FULL, SetupError
from cray_agents.runtime.disk import durable
from cray_agents.trainers.job.failures.gpu_errors import recent_xids
from cray_agents.trainers.job.failures.rank_monitor import node_name

ROOT_SECONDS = 60.0  # that the shared root may take for a small file
GPU_SECONDS = 60.0  # that nvidia-smi may take
SKEW_SECONDS = 10.0  # between a node's clock and the median: events and leases carry times
XID_SECONDS = 600.0  # for which an error of a GPU counts: it may have been reset since
#: Fields of nvidia-smi; an older driver has fewer.
QUERIES = (
    "--query-gpu=index,ecc.errors.uncorrected.volatile.total,remapped_rows.failure",
    "--query-gpu=index,ecc.errors.uncorrected.volatile.total",
)
NUMBERS = 1 << 18  # float32, of the sum over all ranks
#: Of `root_speed` and `sum_over_nodes`: small files, MiB of a large one, float32, sums.
SMALL_FILES, LARGE_MIB, RATE_NUMBERS, RATE_SUMS = 16, 64, 1 << 24, 4


def gate_error(node: str, problem: str) -> SetupError:
    """Return the error of a node that failed, as failure.py finds it in a log."""
    return SetupError(f"health gate: node {node}: {problem}")


# ---- in the launcher
def check_node(root: Path) -> None:
    """Check the shared root and the GPUs from this node. Raises SetupError."""
    check_root(root)
    if os.environ.get("CUDA_VISIBLE_DEVICES") != "" and shutil.which("nvidia-smi") is not None:
        check_gpus()


def check_root(root: Path, seconds: float = ROOT_SECONDS) -> None:
    """Write, rename and read a small file on the shared root. Raises SetupError.

    It tries for a third of the time: a file system may be away for seconds, everywhere. A full one
    is no node's fault; the job itself says so.
    """
    problem = f"the shared root {root} did not answer within {seconds:g} s"
    deadline = time.monotonic() + seconds / 3

    def try_root() -> None:
        nonlocal problem
        path = root / f".gate-{node_name()}-{os.getpid()}"
        content = os.urandom(64)
        while True:
            try:
                durable.replace_file(path, content)
                whole = path.read_bytes() == content
                path.unlink()
                problem = "" if whole else f"{path} did not hold what was written"
                return
            except OSError as error:
                if error.errno in FULL:
                    problem = ""
                    return
                if time.monotonic() > deadline:
                    problem = f"{path} cannot be written: {error.strerror or error}"
                    return
            time.sleep(seconds / 100)

    trial = threading.Thread(target=try_root, daemon=True)
    trial.start()
    trial.join(seconds)
    if problem:
        raise gate_error(node_name(), problem)


def claim(path: Path) -> bool:
    """Create a file by O_EXCL; return False if the name is taken."""
    try:
        os.close(os.open(path, os.O_CREAT | os.O_EXCL | os.O_WRONLY))
    except FileExistsError:
        return False
    return True


def claim_names(folder: Path, count: int) -> list[str]:
    """Claim names that other hosts claim too, by O_EXCL and by link; return those that were won."""
    won = []
    for number in range(count):
        with suppress(OSError):
            won += [f"O_EXCL {number}"] * claim(folder / f"claim-{number}")
            won += [f"link {number}"] * durable.create_file(folder / f"link-{number}", b"1")
    return won


def _publish(target: Path) -> bool:
    draft = durable.draft_directory(target)
    durable.write_file(draft / "file", b"1")
    return durable.publish_directory(draft, target)


#: What must give a name once on the root, each tried twice in a folder: False if it fails.
ROOT_TRIALS: dict[str, Callable[[Path], bool]] = {
    "exclusive create": lambda at: claim(at / "own") and not claim(at / "own"),
    "hard link": lambda at: (
        durable.create_file(at / "link", b"1") and not durable.create_file(at / "link", b"2")
    ),
    "rename of folders": lambda at: _publish(at / "whole") and not _publish(at / "whole"),
}


def root_speed(folder: Path) -> tuple[float, float, float]:
    """Return the median ms of a small durable file, and the MB/s written and read.

    The writing ends with fsync. What is read was dropped from the page cache, where that is heeded.
    """
    times, block = [time.monotonic()], os.urandom(durable.BLOCK)
    for number in range(SMALL_FILES):
        durable.replace_file(folder / f"small-{number}", b"small")
        times.append(time.monotonic())
    with (folder / "large").open("wb", buffering=0) as file:
        for _ in range(LARGE_MIB):
            file.write(block)
        os.fsync(file.fileno())
        wrote = time.monotonic() - times[-1]
        os.posix_fadvise(file.fileno(), 0, 0, os.POSIX_FADV_DONTNEED)
    began = time.monotonic()
    durable.sha256_file(folder / "large")
    read = time.monotonic() - began
    middle = statistics.median(end - start for start, end in pairwise(times))
    megabytes = LARGE_MIB * durable.BLOCK / 1e6
    return 1000 * middle, megabytes / wrote, megabytes / read


def check_gpus(seconds: float = GPU_SECONDS) -> None:
    """Look for memory errors of this node's GPUs, and for XIDs of the last minutes.

    Raises SetupError.
    """
    rows = ""
    for query in QUERIES:
        try:
            done = subprocess.run(
                ["nvidia-smi", query, "--format=csv,noheader,nounits"],
                capture_output=True,
                text=True,
                timeout=seconds,
                check=False,
            )
        except subprocess.TimeoutExpired:
            problem = f"nvidia-smi did not answer within {seconds:g} s"
            raise gate_error(node_name(), problem) from None
        if done.returncode == 0:
            rows = done.stdout
            break
        text = done.stdout + done.stderr
        if "not a valid field" not in text:
            raise gate_error(node_name(), f"nvidia-smi: {text.strip()[:300]}")
    if problem := gpu_problem(rows):
        raise gate_error(node_name(), problem)
    for xid in recent_xids(XID_SECONDS):
        if xid.lost:
            raise gate_error(node_name(), f"in the last {XID_SECONDS / 60:g} minutes: {xid}")


def gpu_problem(text: str) -> str:
    """Return the first problem in nvidia-smi's rows of index, ECC errors, failed remappings."""
    for row in text.splitlines():
        index, *values = (cell.strip() for cell in row.split(","))
        errors, failed = [*values, "", ""][:2]
        if errors.isdecimal() and int(errors) > 0:
            return f"GPU {index} has {errors} uncorrectable ECC errors since its driver was loaded"
        if failed.lower() in ("yes", "1"):
            return f"GPU {index} could not remap a damaged row of its memory"
    return ""


# ---- in the ranks
def check_ranks(on_cpu: bool) -> None:
    """Add numbers over all ranks and compare the nodes' clocks. Raises SetupError. Collective."""
    import torch

    from cray_agents.trainers.training.parallel_groups import gather_from_ranks

    world, rank = torch.distributed.get_world_size(), torch.distributed.get_rank()
    if world == 1:
        return
    device = torch.device("cpu" if on_cpu else "cuda")
    numbers = torch.full((NUMBERS,), float(rank + 1), device=device)
    torch.distributed.all_reduce(numbers)
    wrong = int((numbers != world * (world + 1) / 2).sum())
    mine = json.dumps([node_name(), time.time(), wrong]).encode()
    every = [json.loads(one) for one in gather_from_ranks(mine)]
    refuse_ranks(every)


def refuse_ranks(every: Sequence[Any]) -> None:
    """Raise SetupError for a node whose sum is wrong, or whose clock is.

    Args:
        every: by rank: its node, its clock (unix seconds) at about the same moment, and how many
            numbers of the sum were wrong.
    """
    for node, _, wrong in every:
        if wrong:
            raise gate_error(node, f"a sum over all ranks came out wrong in {wrong} numbers")
    median = statistics.median(clock for _, clock, _ in every)
    node, clock, _ = max(every, key=lambda one: abs(one[1] - median))
    if abs(clock - median) > SKEW_SECONDS:
        raise gate_error(node, f"its clock is {clock - median:+.1f} s from the other nodes'")


def sum_over_nodes(folder: Path, number: int, world: int, seconds: float) -> str:
    """Add numbers over nodes that run this at the same time; return the rate. Collective.

    `number`: of this node, of `world`. `seconds`: to wait for the others. Raises SetupError for a
    wrong sum, RuntimeError for a broken network.
    """
    import torch

    from cray_agents.trainers.job.launch import RankPlacement, meet, open_store

    place = RankPlacement(number, world, world, node_name(), 0, "sum", patience=seconds)
    place, listener = meet(place, folder)
    on_cpu = not torch.cuda.is_available()
    kind, store = "gloo" if on_cpu else "nccl", open_store(number, place, listener)
    patience = timedelta(seconds=seconds)
    torch.distributed.init_process_group(kind, None, patience, world, number, store)
    check_ranks(on_cpu)
    numbers = torch.ones(RATE_NUMBERS, device="cpu" if on_cpu else "cuda")
    began = time.monotonic()
    for _ in range(RATE_SUMS):
        torch.distributed.all_reduce(numbers)
    float(numbers[0])  # waits for the GPU
    sent = 2 * (world - 1) / world * numbers.nbytes * RATE_SUMS
    torch.distributed.destroy_process_group()
    return f"{sent / (time.monotonic() - began) / 1e9:.2f} GB/s by {kind}"
