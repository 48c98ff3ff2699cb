"""Which method a generation trains by, and with what: the stages of a loop.

    Loop(..., method="grpo")                                              one stage, to the end
    Loop(..., method=[Stage("rft", generations=2), Stage("grpo", attempts=8)])

A stage says what it changes; all else is the loop's. The last one goes on, unless it says for how
many generations: then the loop ends with them. Called by loop.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from cray_agents.errors import BadInput
from cray_agents.training_jobs import Hyperparameters, MethodName, as_hyperparameters

Method = Literal["rft", "grpo", "dpo", "kto", "sft"]
COMPARING = ("grpo", "dpo")  # those that learn from how the attempts at a task differ
TRAINED_BY: dict[Method, MethodName] = {
    "rft": "sft",  # rejection sampling: the runs that were good enough are imitated
    "sft": "sft",
    "grpo": "grpo",
    "dpo": "dpo",
    "kto": "kto",
}


@dataclass(frozen=True)
class Stage:
    """Some generations of a loop. What is None is the loop's.

    Args:
        method: `rft`: imitate the runs with reward >= min_reward. `grpo`: the generation's own runs
            with their advantages. `dpo`: the best against the worst run at a task. `kto`: good runs
            and bad ones. `sft`: the demonstrations alone; nothing is run.
        generations: how many; None, of the last stage: all that come.
        hyperparameters: of its training jobs.
        attempts: runs per task and generation; grpo and dpo compare them, and want at least two.
        tasks_per_generation: how many train tasks a generation draws.
        evaluate_every: each so manieth generation is evaluated on held-out tasks, and the last one
            of a stage or of a call of run; those in between are proven, and passed on.
        parent: what the next generation samples from and trains on. `promoted`: the promoted
            version. `latest`: the last candidate, unless its evaluation found it worse by more
            than a standard error; what is promoted stays the same (and waits to be served,
            where one replica takes turns).
            Default: `latest` for grpo, whose steps are too small to be told from chance, else
            `promoted`.
    """

    method: Method
    generations: int | None = None
    hyperparameters: Hyperparameters | None = None
    attempts: int | None = None
    tasks_per_generation: int | None = None
    evaluate_every: int | None = None
    parent: Literal["promoted", "latest"] | None = None

    def __post_init__(self) -> None:
        if self.hyperparameters is not None:
            given = as_hyperparameters(self.hyperparameters)
            object.__setattr__(self, "hyperparameters", given)


@dataclass(frozen=True)
class Planned:
    """A stage with nothing left open. `first` and `last` are generations; None: there is no end."""

    method: Method
    first: int
    last: int | None
    hyperparameters: Hyperparameters
    attempts: int
    tasks_per_generation: int
    evaluate_every: int
    parent: Literal["promoted", "latest"]

    @property
    def runs(self) -> bool:
        """Whether its generations run the agent on train tasks."""
        return self.method != "sft"

    def evaluates(self, number: int, asked: int) -> bool:
        """Whether a generation's candidate is evaluated, and may be promoted.

        `asked`: the last generation that is wanted now; none is left unjudged at the end.
        """
        return number in (self.last, asked) or (number - self.first + 1) % self.evaluate_every == 0


def planned(method: Method | Sequence[Stage], default: Stage) -> list[Planned]:
    """The stages in their order; `default` fills what they leave open. Raises BadInput."""
    stages = [Stage(method)] if isinstance(method, str) else list(method)
    if not stages:
        raise BadInput("a schedule needs at least one stage", param="method")
    found: list[Planned] = []
    first = 1
    for place, stage in enumerate(stages):
        where = f"method[{place}]" if len(stages) > 1 else "method"
        if stage.method not in get_args(Method):
            known = ", ".join(map(repr, get_args(Method)))
            message = f"{where}: {stage.method!r} is not known; valid: {known}"
            raise BadInput(message, param="method")
        if stage.generations is None and place < len(stages) - 1:
            message = f"{where}: say for how many generations: only the last stage goes on"
            raise BadInput(message, param="method")
        filled = _filled(stage, default, where)
        last = None if stage.generations is None else first + stage.generations - 1
        found.append(_checked(filled, first, last, where))
        first = (last or 0) + 1
    return found


def stage_of(stages: Sequence[Planned], number: int) -> Planned:
    """The stage that a generation is in."""
    return next(stage for stage in stages if stage.last is None or number <= stage.last)


def ended(stages: Sequence[Planned], number: int) -> str | None:
    """Why nothing comes after a generation, in words, if the schedule ends with it."""
    last = stages[-1].last
    return None if last is None or number < last else f"schedule: all {last} generations are done"


def _filled(stage: Stage, default: Stage, where: str) -> Stage:
    for name in ("generations", "attempts", "tasks_per_generation", "evaluate_every"):
        value = getattr(stage, name)
        if value is not None and value < 1:
            raise BadInput(f"{where}: {name}={value!r}: must be at least 1", param=name)
    open_names = [f.name for f in fields(stage) if getattr(stage, f.name) is None]
    left = {name: getattr(default, name) for name in open_names if name != "generations"}
    return replace(stage, **left)


def _checked(stage: Stage, first: int, last: int | None, where: str) -> Planned:
    attempts, hyper = stage.attempts, stage.hyperparameters
    assert attempts and hyper and stage.tasks_per_generation and stage.evaluate_every
    if stage.method in COMPARING and attempts < 2:
        raise BadInput(
            f"{where}: {stage.method} compares the attempts at a task: attempts={attempts} leaves "
            "nothing to compare, give at least 2",
            param="attempts",
        )
    parent = stage.parent or ("latest" if stage.method == "grpo" else "promoted")
    if stage.evaluate_every > 1 and parent == "promoted":
        raise BadInput(
            f"{where}: evaluate_every={stage.evaluate_every} with parent 'promoted' trains one "
            "version again and again: only what is evaluated can be promoted",
            param="evaluate_every",
        )
    return Planned(stage.method, first, last, hyper, attempts, stage.tasks_per_generation,
                   stage.evaluate_every, parent)  # fmt: skip
