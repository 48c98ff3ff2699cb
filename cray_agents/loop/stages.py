"""Stages of a loop: the method that each generation trains by, and its settings.

    Loop(..., method="grpo")                                              one stage, to the end
    Loop(..., method=[Stage("rft", generations=2), Stage("grpo", attempts=8)])

A stage names what it changes; all else is the loop's. The last stage goes on, unless it names a
number of generations: then the loop ends with them. Called by loop.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from typing import Literal, get_args

from cray_agents.errors import BadInput
from cray_agents.training_jobs import (
    ON_POLICY,
    Hyperparameters,
    MethodName,
    as_hyperparameters,
)

Method = Literal["rft", "grpo", "dpo", "kto", "sft", "distill"]
COMPARING = ("grpo", "dpo")  # those that learn from how the attempts at a task differ
TRAINED_BY: dict[Method, MethodName] = {
    "rft": "sft",  # rejection sampling: the runs that were good enough are imitated
    "sft": "sft",
    "grpo": "grpo",
    "dpo": "dpo",
    "kto": "kto",
    "distill": "distill",
}


@dataclass(frozen=True)
class Stage:
    """Some generations of a loop. Fields that are None take the loop's value.

    Args:
        method: `rft`: imitate the runs with reward >= min_reward. `grpo`: the generation's own runs
            with their advantages. `dpo`: the best against the worst run at a task. `kto`: good runs
            and bad ones. `sft`: the demonstrations alone; nothing is run. `distill`: the
            generation's own runs, whose every token a teacher judges; rewards do not count.
        generations: how many; None, of the last stage: all that come.
        hyperparameters: of its training jobs.
        attempts: runs per task and generation; grpo and dpo compare them, and want at least two.
        tasks_per_generation: how many train tasks a generation draws.
        evaluate_every: evaluate every N-th generation on held-out tasks, and always the last one of
            a stage or of a call of run. The others are only checked with the golden probe.
        parent: the version that the next generation samples from and trains on. `promoted`: the
            promoted version. `latest`: the last candidate, unless its evaluation was worse by more
            than a standard error; the promoted version stays promoted (and waits to be served,
            where one replica takes turns).
            Default: `latest` for grpo and distill, whose steps are too small to be told from
            chance, else `promoted`.
        teacher: of distill: a version such as `big@3`, or a checkpoint's directory. Its tokens must
            be those of the agent's model; its kind may be another. `Platform.register` makes a
            version of a Hugging Face directory.
    """

    method: Method
    generations: int | None = None
    hyperparameters: Hyperparameters | None = None
    attempts: int | None = None
    tasks_per_generation: int | None = None
    evaluate_every: int | None = None
    parent: Literal["promoted", "latest"] | None = None
    teacher: str | None = None

    def __post_init__(self) -> None:
        if self.hyperparameters is not None:
            given = as_hyperparameters(self.hyperparameters)
            object.__setattr__(self, "hyperparameters", given)


@dataclass(frozen=True)
class Planned:
    """A stage with all fields filled. `first` and `last` are generations; None: there is no end."""

    method: Method
    first: int
    last: int | None
    hyperparameters: Hyperparameters
    attempts: int
    tasks_per_generation: int
    evaluate_every: int
    parent: Literal["promoted", "latest"]
    teacher: str | None = None

    @property
    def runs(self) -> bool:
        """Its generations run the agent on train tasks."""
        return self.method != "sft"

    def evaluates(self, number: int, last: int) -> bool:
        """Tell whether a generation's candidate is evaluated, and may be promoted.

        `last`: the last generation of this call, which is always evaluated.
        """
        return number in (self.last, last) or (number - self.first + 1) % self.evaluate_every == 0


def planned(method: Method | Sequence[Stage], default: Stage) -> list[Planned]:
    """Fill the stages from `default`, in their order. Raises BadInput."""
    if not isinstance(method, str | Sequence):
        raise BadInput(f"method={method!r}: give a name or a list of Stages", param="method")
    stages = [Stage(method)] if isinstance(method, str) else list(method)
    if not stages or not all(isinstance(stage, Stage) for stage in stages):
        raise BadInput(f"method={method!r}: a schedule needs Stages", param="method")
    filled_in: list[Planned] = []
    first = 1
    for place, stage in enumerate(stages):
        name = f"method[{place}]" if len(stages) > 1 else "method"
        if stage.method not in get_args(Method):
            known = ", ".join(map(repr, get_args(Method)))
            message = f"{name}: {stage.method!r} is not known; valid: {known}"
            raise BadInput(message, param="method")
        if stage.generations is None and place < len(stages) - 1:
            message = f"{name}: say for how many generations: only the last stage goes on"
            raise BadInput(message, param="method")
        filled = _filled(stage, default, name)
        last = None if stage.generations is None else first + stage.generations - 1
        filled_in.append(_checked(filled, first, last, name))
        first = (last or 0) + 1
    if default.teacher is not None and all(stage.teacher is None for stage in filled_in):
        raise BadInput("teacher has no effect without method 'distill'", param="teacher")
    return filled_in


def stage_of(stages: Sequence[Planned], number: int) -> Planned:
    """The stage that a generation is in."""
    return next(stage for stage in stages if stage.last is None or number <= stage.last)


def ended(stages: Sequence[Planned], number: int) -> str | None:
    """The reason why nothing comes after a generation, if the schedule ends with it."""
    last = stages[-1].last
    return None if last is None or number < last else f"schedule: all {last} generations are done"


def _filled(stage: Stage, default: Stage, label: str) -> Stage:
    for name in ("generations", "attempts", "tasks_per_generation", "evaluate_every"):
        value = getattr(stage, name)
        if value is not None and (not isinstance(value, int) or value < 1):
            message = f"{label}: {name}={value!r}: give a whole number of at least 1"
            raise BadInput(message, param=name)
    if stage.teacher is not None and stage.method != "distill":
        message = f"{label}: teacher has no effect with {stage.method}: it is of distill"
        raise BadInput(message, param="teacher")
    open_names = [f.name for f in fields(stage) if getattr(stage, f.name) is None]
    left = {name: getattr(default, name) for name in open_names if name != "generations"}
    return replace(stage, **left)


def _checked(stage: Stage, first: int, last: int | None, label: str) -> Planned:
    attempts, hyper = stage.attempts, stage.hyperparameters
    assert attempts and hyper and stage.tasks_per_generation and stage.evaluate_every
    if stage.method in COMPARING and attempts < 2:
        raise BadInput(
            f"{label}: {stage.method} compares the attempts at a task: attempts={attempts} leaves "
            "nothing to compare, give at least 2",
            param="attempts",
        )
    teacher = stage.teacher if stage.method == "distill" else None
    named = isinstance(teacher, str) and ("@" in teacher or "/" in teacher)
    if stage.method == "distill" and not named:
        raise BadInput(
            f"{label}: distill with teacher={teacher!r}: name a version, such as 'big@3' (the"
            " promoted one may change), or a directory, such as './big'",
            param="teacher",
        )
    parent = stage.parent or ("latest" if stage.method in ON_POLICY else "promoted")
    if stage.evaluate_every > 1 and parent == "promoted":
        raise BadInput(
            f"{label}: evaluate_every={stage.evaluate_every} with parent 'promoted' trains one "
            "version again and again: only what is evaluated can be promoted",
            param="evaluate_every",
        )
    return Planned(stage.method, first, last, hyper, attempts, stage.tasks_per_generation,
                   stage.evaluate_every, parent, teacher)  # fmt: skip
