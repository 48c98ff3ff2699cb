"""Hardware records: the JSON of a job on its nodes, as view_records.py has that of other things."""

from typing import Any

from cray_agents.records import Record
from cray_agents.runtime.scheduler.slurm_reports import SlurmUsage


class NodeHardware(Record):
    """The load of a node that trains a job, and its GPUs.

    `series[name]` are [time, value], thinned as in JobSeries. `newest`: the figures of the last
    sample at `time`, with texts. What a device does not measure is missing, never 0.
    """

    node: str
    time: float | None
    gpus: list[dict[str, Any]]
    newest: dict[str, float | str]
    series: dict[str, list[tuple[float, float]]]


class SlowRank(Record):
    """The last rank whose own work of a step took much longer than the median rank's (seconds)."""

    rank: int
    node: str
    seconds: float
    median: float
    steps: int
    after_step: int


class JobWait(Record):
    """Why a job waits: Slurm's word, what it means, and the next step."""

    reason: str
    meaning: str
    next: str


class JobHardware(Record):
    """A job on its nodes. `names`: all series of the nodes here. `slurm`: Slurm's own account."""

    id: str
    names: list[str]
    nodes: list[NodeHardware]
    has_more: bool
    slowest: SlowRank | None
    waits: JobWait | None
    slurm: SlurmUsage | None
