"""Remarks on an iteration: what its figures alone would hide. Called by loop.py."""

from collections import Counter
from collections.abc import Sequence

from cray_agents.iteration import Iteration
from cray_agents.loop.dataset_recipes import min_reward_for
from cray_agents.loop.methods import Method
from cray_agents.loop.settings import LoopSettings
from cray_agents.records import Run
from cray_agents.training_jobs import MANY_EPOCHS

SMALL, TWICE = 64, 2.0  # a set of fewer samples is learned by heart when it is seen again
COOL = 0.8  # a temperature that few models need to be below
FEW = 0.1  # of a set: so many demonstrations teach little beside the runs
MANY = 100  # kinds: a key with more values names tasks


def successes_by_kind(runs: Sequence[Run], loop: LoopSettings, method: Method) -> dict[str, int]:
    """Count the good runs of each kind: each value of the curriculum's, balance's or guard's key.

    A good run has the method's least reward; where it has none, more than the least of all.
    """
    key = loop.data.curriculum.key or loop.data.balance_by or loop.promotion.guard
    least, good = min_reward_for(loop.data, method), Counter[str]()
    for run in runs:
        kind = run.task.metadata.get(key) if run.task is not None and key is not None else None
        if kind is not None and run.reward is not None:
            good[str(kind)] += (
                run.reward > loop.promotion.low if least is None else run.reward >= least
            )
    return dict(sorted(good.items())) if len(good) <= MANY else {}


def remarks_on(new: Iteration, done: Sequence[Iteration], loop: LoopSettings) -> list[str]:
    """The remarks on an iteration that trained, as sentences without a full stop."""
    remarks, won = [], Counter[str]()
    if new.epochs > MANY_EPOCHS or (new.samples < SMALL and new.epochs >= TWICE):
        now = loop.sampling.temperature
        cooler = f", or a lower temperature, such as {COOL:g} (now {now:g})" if now > COOL else ""
        remarks.append(
            f"a set of {new.samples} samples, each seen {new.epochs:.3g} times, is rather learned "
            f"by heart: larger groups or more tasks bring more good runs{cooler}"
        )
    if new.demonstrations > FEW * new.samples:
        remarks.append(
            f"{new.demonstrations / new.samples:.0%} of the set are demonstrations, from which it "
            "learns whatever the rewards are: a loop without them shows what these teach"
        )
    for iteration in (*done, new):
        won.update(iteration.kinds)
    if never := ", ".join(sorted(kind for kind, count in won.items() if not count)):
        remarks.append(
            f"kinds without any success so far: {never}; they need demonstrations, easier tasks or "
            "a reward for a part"
        )
    if loop.control is not None and new.promoted:
        remarks.append("a control was promoted: what the loop gains may be without rewards, too")
    return remarks
