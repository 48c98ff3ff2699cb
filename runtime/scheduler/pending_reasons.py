"""Pending reasons: why Slurm lets a job wait, in words, and what can be done.

`cray-agents why` prints them. The words are those of squeue's column REASON.
"""

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
