"""Iteration: what a loop records of each finished iteration, and its progress until then.

Made by loop/loop.py; rendered by cli/iteration_table.py, and in a notebook by itself.
"""

from collections.abc import Sequence
from dataclasses import dataclass

from pydantic import Field

from cray_agents.cell_html import curves, table
from cray_agents.records import LogprobDistance, Record
from cray_agents.training_jobs import TakenUp

#: The columns, which need no knowledge of training.
COLUMNS = (
    "iter", "method", "held-out", "test", "runs", "good", "set", "seconds", "version", "outcome",
)  # fmt: skip
SETTINGS_VERSION = 2  # of the record of a loop's settings, in its journal


class Iteration(Record):
    """The record of an iteration; number 0 only measures the model that the loop began with.

    - `version` is the candidate. `sampled_from` is the version that made the training runs.
      `onward` is the version that later iterations go on from (None: the promoted one).
    - `seconds` are by phase; phases of an asynchronous loop overlap. `early` and `transfer` overlap
      others, too: a replica received weights without files, while the job wrote them, or while the
      replica changed version. `wall` is the seconds from the end of the previous iteration to the
      end of this one. `idle_share` is the fraction of `wall` in which no replica had a request in
      flight (None: the platform cannot tell).
    - `turns` are the seconds by phase of the turns that training had on the replicas' GPUs, and
      their number as `turns`: see Share a host's GPUs in docs/cluster.md.
    - `runs` counts training runs, `tokens` the tokens sampled in them. `carried` counts runs of the
      previous iteration that ended too late for its training set. `trainer_seconds` is the time of
      the job's steps alone. `session` is the training session that ran it; None: own processes.
      `taken_up` tells where that session had the weights, and the seconds to put them in place.
      `layers` are those of JobStatus. `load_note` is that of ProbeReport: why the candidate's
      weights were read from files, where they were to come directly.
    - `holdout_success` is the mean reward over `holdout_tasks` tasks: all that decide, or those up
      to the decision. With 0 tasks nothing was evaluated, and the success is the promoted
      version's. `evidence` is against "it is not better"; `wins`, `losses` and `ties` count the
      pairs behind it. `unscored` of these count with the worst reward, as the candidate could not
      be scored. `unpaired` and `failed_pairs` were left out (see Gaps in
      promotion/sequential_test.py).
    - `choice`: the success of each version that the job published, on the held-out tasks that chose
      `version` among them and decide nothing; empty if there was no choice.
    - `zero_variance_groups` counts tasks whose attempts all got the same reward, `resampled` the
      tasks drawn in their place.
    - `agreement` and `mean_metrics` are those of JobStatus: what trainer and sampler disagreed by,
      and what the method's clips and corrections did.
    - `samples` counts the training set's, `demonstrations` those of them that are no runs; the job
      saw each `epochs` times. `kinds` counts the good runs by kind of task, where a metadata key
      names the kinds. `remarks` are warnings about these: see loop/loop.py.
    - `prompt` is the hash of the candidate's prompt, if one was learned; `trials` counts the runs
      by which it was found.
    - `stopped` says why the loop ended itself with this iteration. `target` is the held-out success
      at which it does, `control` what makes it a control, if it is one.
    """

    iteration: int
    method: str = "rft"
    holdout_success: float
    holdout_tasks: int
    test_success: float | None = None
    test_tasks: int | None = None
    test_version: str | None = None
    prompt: str | None = None
    trials: int = 0
    runs: int = 0
    accepted_runs: int = 0
    failed_runs: int = 0
    carried: int = 0
    zero_variance_groups: int = 0
    resampled: int = 0
    tokens: int = 0
    trained_tokens: int = 0
    trainer_seconds: float = 0.0
    session: str | None = None
    taken_up: TakenUp | None = None
    layers: str = ""
    loss_first: float | None = None
    loss_last: float | None = None
    agreement: LogprobDistance | None = None
    mean_metrics: dict[str, float] = Field(default_factory=dict)
    probe_max_logprob_diff: float | None = None
    load_note: str = ""
    seconds: dict[str, float] = Field(default_factory=dict)
    wall: float = 0.0
    turns: dict[str, float] = Field(default_factory=dict)
    idle_share: float | None = None
    version: str
    sampled_from: str | None = None
    onward: str | None = None
    job_id: str | None = None
    job: str | None = None
    dataset: str | None = None
    samples: int = 0
    demonstrations: int = 0
    epochs: float = 0.0
    kinds: dict[str, int] = Field(default_factory=dict)
    remarks: list[str] = Field(default_factory=list)
    choice: dict[str, float] = Field(default_factory=dict)
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
    target: float | None = None
    control: str | None = None

    def _repr_html_(self) -> str:
        return Iterations([self])._repr_html_()


class Iterations(list[Iteration]):
    """Iterations as a notebook shows them: success over iterations, and a row for each."""

    def _repr_html_(self) -> str:
        cells = [row(iteration) for iteration in self]
        shown = table(COLUMNS, [[cell[name] for name in COLUMNS] for cell in cells])
        if len(self) < 2:
            return shown
        held_out = [(one.iteration, one.holdout_success) for one in self if one.holdout_tasks]
        test = [(one.iteration, one.test_success) for one in self if one.test_success is not None]
        return curves({"held-out": held_out, "test": test}, "iteration") + shown


@dataclass(frozen=True)
class LoopProgress:
    """The loop's progress: `done` of `total` units of `phase` in this iteration."""

    iteration: int
    phase: str
    done: int = 0
    total: int = 0
    note: str = ""


def promoted_version(done: Sequence[Iteration]) -> str:
    """Return the version of a loop's last recorded promotion. A crash may leave one unrecorded."""
    return next(iteration.version for iteration in reversed(done) if iteration.promoted)


def base_version(done: Sequence[Iteration]) -> str:
    """Return the version that a loop goes on from: the one to sample from and to train further."""
    return done[-1].onward or promoted_version(done)


def decisions_in(done: Sequence[Iteration]) -> int:
    """Count the candidates that a promotion test decided on."""
    return sum(iteration.evidence is not None for iteration in done)


def promoted_holdout_success(done: Sequence[Iteration]) -> float:
    """Return the held-out success of the promoted version."""
    return next(iteration.holdout_success for iteration in reversed(done) if iteration.promoted)


def row(g: Iteration) -> dict[str, str]:
    """Return an iteration as a cell for each of COLUMNS."""
    return {
        "iter": str(g.iteration),
        "method": g.method if g.iteration else "-",
        "held-out": f"{g.holdout_success:.3f}" if g.holdout_tasks else "-",
        "test": "-" if g.test_success is None else f"{g.test_success:.3f}",
        "runs": str(g.runs) if g.runs else "-",
        "good": f"{g.accepted_runs / g.runs:.{0 if g.accepted_runs * 20 > g.runs else 1}%}"
        if g.runs
        else "-",
        "set": f"{g.samples:,} ×{g.epochs:.3g}" if g.samples else "-",
        "seconds": f"{g.wall or sum(g.seconds.values()):.0f}",  # asynchronous phases overlap
        "version": g.version,
        "outcome": outcome(g),
    }


def outcome(g: Iteration) -> str:
    """Describe the outcome of an iteration in a few words."""
    text = "promoted" if g.promoted else "not promoted"
    if not g.iteration:
        text = "the start"
    elif not g.promoted and not g.holdout_tasks:
        text = g.note.partition(":")[0] or "passed on"  # check failed, no update
    if g.zero_variance_groups:
        text += f", {g.zero_variance_groups} groups without variance"
    if g.carried:
        text += f", {g.carried} runs of the one before"
    return text
