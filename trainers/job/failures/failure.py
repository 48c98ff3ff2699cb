"""Failure: why a command of a job ended early, and the rule for what follows.

megatron_trainer.py asks `judge` about every command that ended before its job. The answer rests on
Slurm's state and reason, the exit code, the launcher's report (rank_monitor.py's BadEnd), and the
end of the log since that start. An XID counts as gpu_errors.py says. Rules:

    elsewhere   start again, without the node for a while        node, gpu, stopped process
    back_off    start again after a pause that grows             network, storage, launcher, hang
    smaller     start again with half the tokens a micro-batch   gpu_memory, host_memory
    again       start again at once                              preempted, time_limit, stopped
    give_up     fail the job at once                             program

A sign in a text is a heuristic: an unknown end is started again, as often as MAX_RESTARTS says.
Read next: megatron_trainer.py.
"""

import re
from dataclasses import dataclass
from typing import Literal

from cray_agents.config import Config
from cray_agents.ports import CommandStatus
from cray_agents.records import Record
from cray_agents.trainers.job.failures.gpu_errors import GPU_SIGN, PROGRAM_SIGN
from cray_agents.trainers.job.failures.rank_monitor import BadEnd
from cray_agents.trainers.job.launch import EX_TEMPFAIL

FailureKind = Literal[
    "node",
    "gpu",
    "network",
    "storage",
    "host_memory",
    "gpu_memory",
    "preempted",
    "time_limit",
    "stopped",
    "launcher",
    "hang",
    "program",
    "unknown",
]
Rule = Literal["elsewhere", "back_off", "smaller", "again", "give_up"]

RULES: dict[FailureKind, Rule] = {
    "node": "elsewhere",
    "gpu": "elsewhere",
    "network": "back_off",
    "storage": "back_off",
    "host_memory": "smaller",
    "gpu_memory": "smaller",
    "preempted": "again",
    "time_limit": "again",
    "stopped": "again",
    "launcher": "back_off",
    "hang": "back_off",
    "program": "give_up",
    "unknown": "again",
}
#: Words of each kind, and what somebody can do if it goes on.
WORDS: dict[FailureKind, tuple[str, str]] = {
    "node": ("its node failed", "look at the node's state and reason in `sinfo -R`"),
    "gpu": ("a GPU failed", "look at `nvidia-smi -q` and the kernel's log for XIDs on the node"),
    "network": (
        "the ranks lost each other",
        "look at the network between the nodes, and at the interface that NCCL or gloo takes"
        " (NCCL_SOCKET_IFNAME, GLOO_SOCKET_IFNAME)",
    ),
    "storage": (
        "the shared root could not be read or written",
        "look at its free space and at the file system's servers",
    ),
    "host_memory": ("a node's memory was used up", "give the job fewer ranks a node"),
    "gpu_memory": (
        "a GPU's memory was used up",
        "submit it with a layout that splits the model further, or with recompute=full",
    ),
    "preempted": ("a job of higher priority took its nodes", "nothing: it goes on by itself"),
    "time_limit": (
        "its time limit was over",
        "nothing: it goes on by itself; if a start makes no step before its end, raise"
        " train_minutes",
    ),
    "stopped": ("it was asked to stop, or its platform ended", "nothing: it goes on by itself"),
    "launcher": (
        "its processes could not be started",
        "read its log: a path, a module or a permission is missing on the node",
    ),
    "hang": ("no rank moved any more", "read the stacks of all ranks, in hangs/ of its folder"),
    "program": ("its own program raised an error", "mend the cause, and submit the job again"),
    "unknown": ("its end has no known cause", "read the end of its log"),
}

# The first kind whose sign is found counts: a GPU's failure also breaks the network, and memory
# that was used up is also a program's error.
_SIGNS: list[tuple[FailureKind, str]] = [
    ("node", r"health gate: "),
    (
        "gpu",
        GPU_SIGN + r"|uncorrectable ECC|ECC error|fallen off the bus|GPU is lost"
        r"|CUDA error: (hardware stack error|unspecified launch failure|unknown error)"
        r"|CUDA_ERROR_(ECC|HARDWARE|SYSTEM)|Unable to determine the device handle"
        r"|ERR_NVGPU|NVML: (Unknown Error|GPU is lost)|no CUDA-capable device",
    ),
    ("program", PROGRAM_SIGN),
    (
        "gpu_memory",
        r"CUDA out of memory|OutOfMemoryError|CUBLAS_STATUS_ALLOC_FAILED"
        r"|cudaErrorMemoryAllocation|CUDA error: out of memory",
    ),
    (
        "host_memory",
        r"OUT_OF_MEMORY|\bOOM\b|oom[-_]kill|\bMemoryError\b|Cannot allocate memory|bad_alloc"
        r"|can't allocate memory|memory ran out on the node",
    ),
    ("preempted", r"PREEMPTED|DUE TO PREEMPTION"),
    ("time_limit", r"^TIMEOUT|DEADLINE|DUE TO TIME LIMIT|^time limit"),
    ("node", r"NODE_FAIL|BOOT_FAIL|DUE TO NODE FAILURE"),
    ("stopped", r"its platform ended|died with its platform"),
    ("hang", r"no longer responds, for|has not moved for"),
    (
        "storage",
        r"Input/output error|Stale file handle|No space left on device|Read-only file system"
        r"|Disk quota exceeded|File too large|was not written: ",
    ),
    (
        "network",
        r"ncclSystemError|ncclRemoteError|ncclInternalError|unhandled (system|cuda) error"
        r"|Watchdog caught collective|Connection (closed|reset|refused)|Dist(Network|Store)Error"
        r"|Broken pipe|No route to host|Network is unreachable|Socket Timeout|ibv_"
        r"|Timed out waiting \d+ms|[Cc]onnect(ion)? timed? ?out",
    ),
    (
        "launcher",
        r"srun: error: .*(launch|Unable|credential)|execve\(\)|No module named"
        r"|JobLaunchFailure|Prolog|launch failed",
    ),
]
# Errors that the same program on the same data raises again.
_PROGRAM = {
    *("ArithmeticError", "AssertionError", "AttributeError", "FloatingPointError", "ImportError"),
    *("IndentationError", "IndexError", "KeyError", "LookupError", "NameError", "SyntaxError"),
    *("NotImplementedError", "RecursionError", "TypeError", "UnboundLocalError", "ValueError"),
    *("UnicodeDecodeError", "ZeroDivisionError"),
}
_ERROR_LINE = re.compile(r"^(?:[a-z_]\w*\.)*([A-Z]\w*(?:Error|Exception)): ?(.*)$", re.MULTILINE)


@dataclass(frozen=True)
class FailureSettings:
    """Numbers of the rules.

    `hang_seconds`: a job whose ranks do not move for so long is ended. `exclude_minutes`: how long
    a node that failed is left out. `back_off`: seconds of the pauses, the last one again and again.
    """

    hang_seconds: float = 120.0
    exclude_minutes: float = 60.0
    back_off: tuple[float, ...] = (5.0, 30.0, 120.0)

    def pause(self, verdict: "FailureVerdict", restarts: int) -> float:
        """Return the seconds to wait before the n-th restart in a row.

        A network or a file system needs time to come back; others are tried at once the first time.
        """
        number = restarts if verdict.kind in ("network", "storage") else restarts - 1
        if verdict.rule != "back_off" or not self.back_off or number < 1:
            return 0.0
        return self.back_off[min(number, len(self.back_off)) - 1]


def failure_settings(config: Config) -> FailureSettings:
    """Return the configured settings."""
    return FailureSettings(config.train_hang_seconds, config.exclude_minutes)


class FailureVerdict(Record):
    """Why a command ended early, and what follows.

    `node`: the one that failed, as Slurm names it; "" if unknown. `evidence`: a line of the log, of
    Slurm or of the launcher.
    """

    kind: FailureKind
    rule: Rule
    node: str = ""
    evidence: str = ""

    def __str__(self) -> str:
        words, _ = WORDS[self.kind]
        place = f" ({self.node})" if self.node else ""
        return f"{words}{place}{f': {self.evidence}' if self.evidence else ''}"

    @property
    def remedy(self) -> str:
        """The step that somebody can take, if it goes on."""
        return WORDS[self.kind][1]


def judge(
    command: CommandStatus, end: BadEnd | None, log: str, *, started: bool, on_cpu: bool
) -> FailureVerdict:
    """Return the verdict on a command that ended before its job.

    Args:
        end: the launcher's report; None if it left none.
        log: the end of what the command wrote since it was handed to the scheduler.
        started: whether its processes began with the job.
        on_cpu: ranks compute in the node's memory.
    """
    own = "" if end is None else f"{end}\n{end.log_tail}"
    # Slurm's word and the culprit's own log before the log of all, which also has consequences
    for text in (command.reason, own, log):
        if (sign := _find_sign(text)) is not None:
            return _verdict(*sign, command, end, on_cpu=on_cpu)
    for text in (own, log):
        errors = list(_ERROR_LINE.finditer(text))
        if errors and errors[-1][1] in _PROGRAM:
            return _verdict("program", errors[-1][0], command, end, on_cpu=on_cpu)
    refused = "refused" in command.reason  # a second start of the same Slurm job
    if command.exit_code == EX_TEMPFAIL and end is None and not refused:
        return _verdict("stopped", "", command, end, on_cpu=on_cpu)
    how = f"exit code {command.exit_code}" if command.exit_code is not None else command.reason
    evidence = str(end) if end is not None else how or command.state
    return _verdict("unknown" if started else "launcher", evidence, command, end, on_cpu=on_cpu)


def _find_sign(text: str) -> tuple[FailureKind, str] | None:
    """Return the kind of the first sign in a text, with its line."""
    for kind, pattern in _SIGNS:
        if (match := re.search(pattern, text, re.MULTILINE)) is not None:
            start = text.rfind("\n", 0, match.start()) + 1
            line = text[start:].partition("\n")[0].strip()
            return kind, line[:300]
    return None


def _verdict(
    kind: FailureKind, evidence: str, command: CommandStatus, end: BadEnd | None, *, on_cpu: bool
) -> FailureVerdict:
    node = end.node if end is not None and end.node else command.node
    if (gate := re.search(r"health gate: node (\S+):", evidence)) is not None:
        node = gate[1]
    rule = RULES[kind]
    if kind == "host_memory" and not on_cpu:
        rule = "back_off"  # a micro-batch takes the GPU's memory, not the node's
    if kind == "hang":
        evidence = str(end) if end is not None else evidence
        if end is not None and end.node_is_suspect:
            rule = "elsewhere"
        else:
            node = "" if end is None else end.node
    if kind == "program" or (kind in ("network", "storage") and end is None):
        node = ""
    return FailureVerdict(kind=kind, rule=rule, node=node, evidence=evidence)
