"""A virtual node of a private Slurm that dies with all that runs on it, and comes back empty."""

import os
import signal
from contextlib import suppress
from pathlib import Path

from cray_agents.runtime.scheduler.private_cluster import PrivateCluster


def kill_node(cluster: PrivateCluster, node: str) -> None:
    """Kill the node's tasks and steps, and stop its slurmd, which Slurm then misses."""
    own = {pid for pid, _, variables in processes(cluster) if on(node, variables)}
    steps = {parent_of(pid) for pid in own}
    steps = {pid for pid, words, _ in processes(cluster) if pid in steps and "slurmstepd" in words}
    signal_slurmd(cluster, node, signal.SIGSTOP)
    # None may do a thing when another dies. A stopped process goes on when its process group is
    # orphaned, and srun's shepherd then ends a step on another node: so children die first.
    order = sorted((*own, *steps), key=depth_of, reverse=True)
    for number in (signal.SIGSTOP, signal.SIGKILL):
        for pid in order:
            with suppress(ProcessLookupError):
                os.kill(pid, number)


def revive_node(cluster: PrivateCluster, node: str) -> None:
    """Let the node's slurmd go on: Slurm takes the node back."""
    signal_slurmd(cluster, node, signal.SIGCONT)


def signal_slurmd(cluster: PrivateCluster, node: str, number: signal.Signals) -> None:
    for pid, words, _ in processes(cluster):
        if words.startswith("slurmd") and words.split()[-1] == node:
            with suppress(ProcessLookupError):  # what it forked to start a step bears its name, too
                os.kill(pid, number)


def on(node: str, variables: list[str]) -> bool:
    return f"SLURMD_NODENAME={node}" in variables


def processes(cluster: PrivateCluster) -> list[tuple[int, str, list[str]]]:
    """The pid, the words and the variables of each process of a cluster."""
    found = []
    for entry in Path("/proc").glob("[0-9]*"):
        with suppress(OSError):
            variables = (entry / "environ").read_bytes().decode(errors="replace").split("\0")
            words = (entry / "cmdline").read_bytes().decode(errors="replace").replace("\0", " ")
            if f"CRAY_AGENTS_SUPERVISED={cluster.directory}" in variables:
                found.append((int(entry.name), words, variables))
    return found


def depth_of(pid: int) -> int:
    """The number of a process's ancestors."""
    depth = 0
    while (pid := parent_of(pid)) > 1:
        depth += 1
    return depth


def parent_of(pid: int) -> int:
    """0: the process has ended."""
    with suppress(OSError):
        return int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1])
    return 0
