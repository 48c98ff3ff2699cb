"""Slurm's reports of a job: why it waits, in words, and what it took where Slurm keeps an account.

The reasons are those of squeue's column REASON, printed by `cray-agents why`. The account is that
of `sacct -P` of Slurm 22.05 to 26.05 (slurmdbd); no cluster with accounting was seen. Called by
views/job_hardware.py.
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


_WAITS = "wait"
_ADMIN = "ask the cluster's administrators"

#: How a reason begins: what it means, and the next step. The first that fits counts.
_REASONS: list[tuple[tuple[str, ...], str, str]] = [
    (("Priority",), "jobs of higher priority are before it", f"{_WAITS}, or ask for less"),
    (
        ("Resources",),
        "the nodes that it asks for are busy",
        f"{_WAITS}; `squeue --start` estimates when it begins",
    ),
    (
        ("AssocGrp", "AssocMax", "MaxCpuPer", "QOSGrp", "QOSMax", "QOSMin", "Assoc", "QOS"),
        "a limit of your account or quality of service is used up or too low for it",
        "wait until your other jobs end, ask for less, or name another account or qos in"
        " slurm_options",
    ),
    (
        ("ReqNodeNotAvail", "Nodes_required", "NodeDown"),
        "the nodes that it needs are down, drained or reserved",
        f"look at `sinfo -R`, and {_ADMIN}",
    ),
    (
        ("PartitionTimeLimit", "PartitionNodeLimit", "PartitionConfig", "BadConstraints"),
        "no node of its partition can ever give what it asks for",
        "cancel it, and change train_minutes, the layout or slurm_options",
    ),
    (("PartitionDown", "PartitionInactive"), "its partition takes no jobs now", _ADMIN),
    (("Reservation",), "a reservation holds the nodes", f"{_WAITS}, or {_ADMIN}"),
    (("JobHeldUser",), "somebody holds it", "`scontrol release` lets it go"),
    (
        ("JobHeldAdmin", "launch failed requeued held", "JobHoldMaxRequeue"),
        "the cluster holds it, often because a node's prolog failed",
        f"{_ADMIN}; `scontrol release` lets it go",
    ),
    (("Dependency", "BeginTime"), "it is to begin later", _WAITS),
    (("Licenses",), "no licence is free", _WAITS),
    (("InvalidAccount", "InvalidQOS"), "its account or qos is not valid", "mend slurm_options"),
]


def describe_reason(reason: str) -> tuple[str, str]:
    """Return what a pending reason means and the next step; the reason itself if it is unknown."""
    word = reason.strip("()")
    for beginnings, meaning, step in _REASONS:
        if word.startswith(beginnings):
            return f"{meaning} (Slurm: {word})", step
    return word, _WAITS
