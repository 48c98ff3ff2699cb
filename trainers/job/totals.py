"""What accumulates over a job's life, across restarts, and when it has gone wrong. See rank.py."""

import math
from dataclasses import dataclass, field
from typing import Any

from cray_agents.errors import JobError
from cray_agents.trainers.training.train_step import StepReport

RECENT = 50  # steps whose gradient norms a new one is compared with
EXPLODED = 1000.0  # times the largest of them
SMALL = 1.0  # the least that it counts as: a gradient below is not even clipped, by default


@dataclass
class JobTotals:
    """Kept in every resume point, so that a restarted job counts on."""

    loss_first: float | None = None
    loss_last: float | None = None
    validation_loss: float | None = None
    trained_tokens: int = 0
    seconds: float = 0.0  # spent in steps
    norms: list[float] = field(default_factory=list)  # of the last RECENT gradients
    evaluated: int = -1  # after how many steps that was done last

    def add(self, report: StepReport, seconds: float, before: int) -> None:
        """Count a step, with so many before it.

        Raises JobError when its loss or gradient makes no sense.
        """
        for name, value in (("loss", report.loss), ("gradient norm", report.grad_norm)):
            if not math.isfinite(value):
                raise _nonsense(f"the {name} is {value}", report, before)
        # not what is usual: where few batches have anything to learn, that is next to nothing
        largest = max(SMALL, *self.norms) if len(self.norms) >= 10 else math.inf
        if report.grad_norm > EXPLODED * largest:
            what = f"the gradient norm is {report.grad_norm:g}, and was at most {largest:g} before"
            raise _nonsense(what, report, before)
        self.norms = [*self.norms[1 - RECENT :], report.grad_norm]
        self.loss_first = report.loss if self.loss_first is None else self.loss_first
        self.loss_last = report.loss
        self.trained_tokens += report.tokens
        self.seconds += seconds

    def state(self) -> dict[str, Any]:
        """Plain data for a resume point."""
        return vars(self).copy()

    def summary(self) -> dict[str, Any]:
        """What the checkpoint's manifest says."""
        known = {name: value for name, value in vars(self).items() if value is not None}
        del known["norms"], known["evaluated"]
        return known


def _nonsense(what: str, report: StepReport, before: int) -> JobError:
    return JobError(
        f"{what} after {before} whole steps (learning rate {report.learning_rate:g}): nothing was"
        " saved from there; lower the learning rate, or look at the parent's weights and the"
        " samples"
    )
