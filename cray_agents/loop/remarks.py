"""Remarks on a generation: what its figures alone would hide. Called by loop.py."""

from collections import Counter
from collections.abc import Sequence

from cray_agents.generation import Generation
from cray_agents.loop.dataset_recipes import min_reward_for
from cray_agents.loop.settings import LoopSettings
from cray_agents.loop.stages import Planned
from cray_agents.records import Run

SMALL = 64  # samples: a smaller set is learned by heart
OFTEN = 10.0  # epochs: so is a set that is seen more often
MANY = 100  # kinds: beyond, the key tells tasks apart, not kinds


def successes_by_kind(runs: Sequence[Run], loop: LoopSettings, stage: Planned) -> dict[str, int]:
    """The number of good runs of each kind of task; {} if nothing names the kinds, or too many.

    The kind is the value of the metadata key that the curriculum, the balance or the guard has. A
    run is good if it has the reward of a good one; without such a bound, more than the least.
    """
    key = loop.sampling.curriculum.key or loop.data.balance_by or loop.promotion.guard
    least, good = min_reward_for(loop.data, stage), Counter[str]()
    for run in runs:
        kind = run.task.metadata.get(key) if run.task is not None and key is not None else None
        if kind is not None and run.reward is not None:
            good[str(kind)] += (
                run.reward > loop.promotion.low if least is None else run.reward >= least
            )
    return dict(sorted(good.items())) if len(good) <= MANY else {}


def never_won(generations: Sequence[Generation]) -> list[str]:
    """The kinds that were tried, and of which no run was good in any of the generations."""
    total = Counter[str]()
    for generation in generations:
        for kind, count in generation.kinds.items():
            total[kind] += count
    return sorted(kind for kind, count in total.items() if not count)


def remarks_on(new: Generation, done: Sequence[Generation], loop: LoopSettings) -> list[str]:
    """What is to be said of a generation that trained, in sentences without a full stop."""
    remarks = []
    if new.samples < SMALL or new.epochs > OFTEN:
        remarks.append(
            f"a set of {new.samples} samples, each seen {new.epochs:.3g} times, is rather learned "
            f"by heart: {more_good_runs(loop.sampling.temperature)}"
        )
    if new.demonstrations:
        remarks.append(
            f"{new.demonstrations / new.samples:.0%} of the set are demonstrations, from which it "
            "learns whatever the rewards are: a loop without them shows what these teach"
        )
    if kinds := never_won([*done, new]):
        remarks.append(
            f"kinds without any success so far: {', '.join(kinds)}; they need demonstrations, "
            "easier tasks or a reward for a part"
        )
    if loop.sampling.control is not None and new.promoted:
        remarks.append(
            "a control was promoted: what the loop gains may be without its rewards, too"
        )
    return remarks


def more_good_runs(temperature: float) -> str:
    """Advice to get more good runs, for a sentence."""
    lower = ", or a lower temperature, such as 0.8" if temperature > 0.8 else ""
    return f"more attempts or tasks bring more good runs{lower}"
