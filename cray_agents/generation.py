"""What a loop tells: a record per finished generation, and progress while it works.

Made by loop.py; shown by cli/progress.py and cli/report.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from cray_agents.records import Record


class Generation(Record):
    """One turn of the loop; generation 0 is the model it began with.

    - `version` is the candidate, `sampled_from` the version that the training runs are of, and
      `onward` the one that later generations go on from (None: the promoted one).
    - `seconds` by phase; phases of an asynchronous loop overlap. `wall`: seconds from the end of
      the generation before to the end of this one; `idle_share`: the part of it in which the
      replicas had no request in flight (None where the platform cannot tell).
    - `runs` are training runs, `carried` those of the generation before that ended too late for its
      training set; `tokens` what was sampled in them; `trainer_seconds` the job's own.
    - `holdout_success` is the mean reward over `holdout_tasks` tasks: all that decide, or those up
      to the decision; 0 tasks: it was not evaluated, and the success is the promoted version's.
      `evidence` against "it is not better", and `wins`, `losses`, `ties` of the pairs behind it.
      `unscored` of these count with the worst reward, as the candidate could not be scored; beside
      them `unpaired` and `failed_pairs` were left out (see promotion.Gaps).
    - `zero_variance_groups`: tasks whose attempts were all rewarded alike; `resampled`: tasks drawn
      in their place.
    - `stopped`: why the loop ended with this generation, if it did so by itself.
    """

    generation: int
    method: str = "rft"
    holdout_success: float
    holdout_tasks: int
    test_success: float | None = None
    test_tasks: int | None = None
    test_version: str | None = None
    runs: int = 0
    accepted_runs: int = 0
    failed_runs: int = 0
    carried: int = 0
    zero_variance_groups: int = 0
    resampled: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    trainer_seconds: float = 0.0
    loss_first: float | None = None
    loss_last: float | None = None
    probe_max_logprob_diff: float | None = None
    seconds: dict[str, float] = Field(default_factory=dict)
    wall: float = 0.0
    idle_share: float | None = None
    version: str
    sampled_from: str | None = None
    onward: str | None = None
    job_id: str | None = None
    job: str | None = None
    dataset: str | None = None
    promoted: bool = True
    evidence: float | None = None
    wins: int | None = None
    losses: int | None = None
    ties: int | None = None
    unscored: int = 0
    unpaired: int = 0
    failed_pairs: int = 0
    note: str = ""
    stopped: str | None = None


@dataclass(frozen=True)
class LoopProgress:
    """What the loop is doing: `done` of `total` units of `phase` in this generation."""

    generation: int
    phase: str
    done: int = 0
    total: int = 0
    note: str = ""


def promoted_by(done: Sequence[Generation]) -> str:
    """The version that the last promotion of a loop made; not what a crash left behind it."""
    return next(generation.version for generation in reversed(done) if generation.promoted)


def onward_of(done: Sequence[Generation]) -> str:
    """The version that a loop goes on from: it is trained further, and sampled from."""
    return done[-1].onward or promoted_by(done)


def decisions_in(done: Sequence[Generation]) -> int:
    """How many candidates were decided on, not only passed on."""
    return sum(generation.evidence is not None for generation in done)


def standing_of(done: Sequence[Generation]) -> float:
    """The held-out success of what is promoted."""
    return next(g.holdout_success for g in reversed(done) if g.promoted)
