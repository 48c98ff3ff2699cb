"""What a loop tells: a record per finished generation, and progress while it works.

Made by loop.py; shown by cli/progress.py and cli/report.py.
"""

from dataclasses import dataclass

from pydantic import Field

from cray_agents.records import Record


class Generation(Record):
    """One turn of the loop; generation 0 is the model it began with. Seconds by phase."""

    generation: int
    holdout_success: float
    holdout_tasks: int
    test_success: float | None = None
    test_tasks: int | None = None
    test_version: str | None = None
    runs: int = 0
    accepted_runs: int = 0
    failed_runs: int = 0
    trained_tokens: int = 0
    loss_first: float | None = None
    loss_last: float | None = None
    probe_max_logprob_diff: float | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    version: str
    job_id: str | None = None
    job: str | None = None
    dataset: str | None = None
    promoted: bool = True
    note: str = ""


@dataclass(frozen=True)
class Progress:
    """What the loop is doing: `done` of `total` units of `phase` in this generation."""

    generation: int
    phase: str
    done: int = 0
    total: int = 0
    note: str = ""
