"""Hardware of a job, for `jobs show --hardware`: its nodes with their GPUs and ports."""

import time

from cray_agents.cli.screen import line, show, size, when
from cray_agents.paths import Home
from cray_agents.runtime.scheduler.choose import site_cluster
from cray_agents.runtime.views.job_hardware import JobHardware, NodeHardware, job_hardware
from cray_agents.trainers.job.job_state import read_status

NODES = 100_000  # of a job, at most
COLUMNS = ["device", "load", "memory", "watts", "celsius", "sent", "received",
           "notes"]  # fmt: skip


def read_hardware(home: Home, job_id: str, points: int) -> JobHardware:
    """Return a job on its nodes, from the files of the root. Raises NotFound."""
    status = read_status(home, job_id)
    if status.scheduler_job_id and site_cluster() is not None:
        status = status.model_copy(update={"scheduler": "slurm"})
    return job_hardware(home, status, points=points, limit=NODES, now=time.time())


def print_hardware(hardware: JobHardware) -> None:
    """Print the last sample of each node, the slowest rank, why it waits, and Slurm's account."""
    line(hardware.id, style="bold")
    if (waits := hardware.waits) is not None:
        line(f"it waits: {waits.meaning}; next: {waits.next}", 2)
    if (slow := hardware.slowest) is not None:
        times = slow.seconds / slow.median
        line(f"slowest: rank {slow.rank} on {slow.node}, {times:.1f} times the median", 2)
    if (slurm := hardware.slurm) is not None:
        facts = [
            f"{slurm.cpu_seconds:.0f} CPU-seconds" if slurm.cpu_seconds is not None else "",
            f"{size(slurm.memory_bytes)} at most in a task" if slurm.memory_bytes else "",
            f"{slurm.joules:.0f} J of its nodes" if slurm.joules is not None else "",
        ]
        line(slurm.why_unknown or f"by Slurm: {', '.join(filter(None, facts)) or 'nothing'}", 2)
    if not hardware.nodes:
        line("no node of it was sampled: it has not started, or an older release trained it", 2)
    for node in hardware.nodes:
        _print_node(node)


def _print_node(node: NodeHardware) -> None:
    seen = "was not sampled in its time" if node.time is None else f"at {when(node.time)}"
    line(f"{node.node} {seen}", style="bold")
    newest = node.newest
    load, cores = newest.get("host.load"), newest.get("host.rank_cores")
    host = [
        f"load {load}" if load is not None else "",
        f"its ranks use {cores:.1f} cores" if isinstance(cores, float) else "",
    ]
    line("; ".join(filter(None, host)), 2)
    rows = []
    for gpu in node.gpus:
        at = f"gpu{gpu['gpu']}."
        rows.append(
            {
                "device": f"GPU {gpu['gpu']} {gpu['name']}",
                "load": _share(newest.get(f"{at}utilization")),
                "memory": _size(newest.get(f"{at}memory_bytes")),
                "watts": newest.get(f"{at}power_watts"),
                "celsius": newest.get(f"{at}temperature_celsius"),
                "notes": newest.get(f"{at}slowed_by", ""),
            }
        )
    for port in sorted({name.rpartition(".")[0] for name in newest if ":" in name}):
        figures = {name.removeprefix(f"{port}."): value for name, value in newest.items()
                   if name.startswith(f"{port}.")}  # fmt: skip
        grown = [f"{name} {value}" for name, value in figures.items()
                 if name != "up" and not name.endswith("_per_second")]  # fmt: skip
        rows.append(
            {
                "device": port,
                "sent": _rate(figures.get("sent_bytes_per_second")),
                "received": _rate(figures.get("received_bytes_per_second")),
                "notes": "; ".join(([] if figures.get("up", 1) else ["down"]) + grown),
            }
        )
    if rows:
        show(rows, COLUMNS)


def _share(value: float | str | None) -> str:
    return f"{value:.0%}" if isinstance(value, int | float) else ""


def _size(value: float | str | None) -> str:
    return size(int(value)) if isinstance(value, int | float) else ""


def _rate(value: float | str | None) -> str:
    return f"{_size(value)}/s" if value is not None else ""
