"""Stop rules of a loop: target reached, no progress, budget used up, nothing learned.

They look at the iterations on record alone, so a restart changes nothing. Called by loop.py.
"""

from collections.abc import Sequence
from typing import Any

from pydantic import Field

from cray_agents.errors import BadInput, JobError
from cray_agents.iteration import Iteration, promoted_holdout_success
from cray_agents.loop.methods import METHODS
from cray_agents.records import StrictRecord


class Budget(StrictRecord):
    """An amount after which a loop begins no further iteration; None: any amount.

    Args:
        seconds: of time, over its finished iterations.
        runs: training runs, trials of prompts, and those on held-out and test tasks.
        tokens: sampled in training runs.
        trainer_seconds: of its training jobs, by their own clock.
    """

    seconds: float | None = Field(default=None, gt=0)
    runs: int | None = Field(default=None, gt=0)
    tokens: int | None = Field(default=None, gt=0)
    trainer_seconds: float | None = Field(default=None, gt=0)

    def used_up(self, done: Sequence[Iteration]) -> str | None:
        """The limit that is used up, in words, if any."""
        used = {
            "seconds": sum(g.wall for g in done),
            "runs": sum(g.runs + g.trials + g.holdout_tasks + (g.test_tasks or 0) for g in done),
            "tokens": sum(g.tokens for g in done),
            "trainer_seconds": sum(g.trainer_seconds for g in done),
        }
        for name, amount in used.items():
            limit: Any = getattr(self, name)
            if limit is not None and amount >= limit:
                return f"budget: {amount:.6g} of {limit:g} {name} are used"
        return None


class Stop(StrictRecord):
    """Conditions on which a loop stops by itself.

    Args:
        target: when held-out success reaches it.
        patience: after so many evaluated candidates in a row of which none was promoted.
        budget: when it is used up.
    """

    target: float | None = None
    patience: int | None = Field(default=None, ge=1)
    budget: Budget = Field(default_factory=Budget)


def why_stopped(done: Sequence[Iteration], stop: Stop) -> str | None:
    """Why no further iteration is begun; None: one is."""
    target, patience = stop.target, stop.patience
    if not done:
        return None
    best = promoted_holdout_success(done)
    if target is not None and best >= target:
        return f"target: held-out success {best:.3f} of {target:g}"
    judged = [g for g in done if g.holdout_tasks or g.note]  # not those that were only passed on
    stalled = patience is not None and len(judged) > patience
    if stalled and not any(g.promoted for g in judged[-(patience or 0) :]):
        return f"no progress: none of the last {patience} candidates was promoted"
    return stop.budget.used_up(done)


def record_without_update(
    made: Iteration, done: Sequence[Iteration], error: BadInput | JobError, *, live: bool
) -> Iteration:
    """Record an iteration that produced no training data. Re-raise any other error.

    On live traffic a failed job counts as "no update" too, because new runs will arrive.
    """
    empty = error.code == "empty_dataset" and (live or made.method != "sft")
    if not (empty or (live and error.code == JobError.code)):
        raise error
    note = {"note": f"no update: {error}", "onward": done[-1].onward}
    return made.model_copy(update={"holdout_success": promoted_holdout_success(done), **note})


def check_learned_something(done: Sequence[Iteration]) -> None:
    """Raise BadInput when nothing could be learned from the newest iteration's own runs.

    A method that compares a task's attempts may go on once: the next attempts may differ more.
    """
    newest, before = done[-1], done[-2:-1]
    made = newest.dataset is not None or newest.prompt is not None
    if not newest.iteration or made or not METHODS[newest.method].runs:
        return
    cold = f" ({done[0].note})" if done[0].note else ""
    again = any(g.iteration and g.dataset is None and METHODS[g.method].trains for g in before)
    if not METHODS[newest.method].compares or again:
        raise BadInput(
            f"iteration {newest.iteration}: {newest.note}{cold}. The same command goes on "
            "with the next iteration's tasks; Sampling(temperature=0.8) samples nearer to what "
            "the model finds likely",
            code="empty_dataset",
        )
