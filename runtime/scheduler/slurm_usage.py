"""Slurm usage: what a job took by Slurm's own account, where the cluster keeps one (slurmdbd).

Called by views/job_hardware.py. The text is that of `sacct -P` of Slurm 22.05 to 26.05; no cluster
with accounting was seen.
"""

import re

from cray_agents.records import Record
from cray_agents.runtime.scheduler.choose import run_client

COLUMNS = ("JobIDRaw", "ElapsedRaw", "TotalCPU", "MaxRSS", "ConsumedEnergyRaw", "JobName")
NO_ACCOUNT = (
    "Slurm keeps no account of jobs here (sacct gave no answer), so the CPU time, memory and"
    " energy of the whole job are not known"
)
_UNITS = {"": 1, "K": 1 << 10, "M": 1 << 20, "G": 1 << 30, "T": 1 << 40}


class SlurmUsage(Record):
    """The account of a job's newest start so far; None: Slurm does not know.

    `cpu_seconds`: of all processes. `memory_bytes`: the most that a task had. `joules`: of whole
    nodes, not of GPUs alone. `why_unknown`: where there is no account.
    """

    seconds: float | None = None
    cpu_seconds: float | None = None
    memory_bytes: int | None = None
    joules: float | None = None
    why_unknown: str = ""


def read_usage(job_id: str, name: str) -> SlurmUsage:
    """Ask the site's Slurm what a job of this id took; `name`: how its name begins."""
    options = ("-n", "-P", "--noconvert", f"--format={','.join(COLUMNS)}")
    printed = run_client("sacct", *options, "-j", job_id)
    if printed is None:
        return SlurmUsage(why_unknown=NO_ACCOUNT)
    return parse_usage(printed, name)


def parse_usage(printed: str, name: str) -> SlurmUsage:
    """Return what the lines of a job and its steps say.

    Steps of one node measure the same node's energy, so the largest figure counts. A private
    cluster's ids may be other jobs' of the site: these have other names.
    """
    rows = [line.split("|", 5) for line in printed.splitlines() if line.count("|") >= 5]
    whole = next((row for row in rows if "." not in row[0] and row[5].startswith(name)), None)
    if whole is None:
        return SlurmUsage(why_unknown="Slurm's account does not have this job (yet)")
    memory = [size for row in rows if (size := _bytes(row[3]))]
    joules = [int(row[4]) for row in rows if row[4].isdecimal() and int(row[4])]
    return SlurmUsage(
        seconds=float(whole[1]) if whole[1].isdecimal() else None,
        cpu_seconds=_seconds(whole[2]),
        memory_bytes=max(memory, default=None),
        joules=float(max(joules)) if joules else None,
    )


def _seconds(text: str) -> float | None:
    """Parse `[days-][hours:]minutes:seconds`."""
    match = re.fullmatch(r"(?:(\d+)-)?(?:(\d+):)?(\d+):(\d+(?:\.\d+)?)", text)
    if match is None:
        return None
    days, hours, minutes, seconds = (float(part or 0) for part in match.groups())
    return ((days * 24 + hours) * 60 + minutes) * 60 + seconds


def _bytes(text: str) -> int | None:
    match = re.fullmatch(r"(\d+(?:\.\d+)?)([KMGT]?)", text)
    return None if match is None else int(float(match[1]) * _UNITS[match[2]])
