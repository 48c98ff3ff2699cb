"""Methods of a loop: how each iteration collects its runs, and trains on them.

    Loop(..., method=GRPO(group_size=8))                         one method, to the end
    Loop(..., method=[RFT(iterations=2), GRPO(group_size=8)])    one after the other

The last method goes on, unless it names a number of iterations: then the loop ends with them.
Called by loop.py.
"""

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

from pydantic import Field, field_validator, model_validator

from cray_agents.errors import BadInput
from cray_agents.records import StrictRecord
from cray_agents.training_jobs import (
    Hyperparameters,
    MethodName,
    Policy,
    PolicyLoss,
    Preference,
    TrainingSettings,
)


class Training(TrainingSettings):
    """Settings of a loop's training jobs.

    Args:
        steps: of a job. None: as many as see its set three times, with GRPO and Distill once. A
            number is taken as it is, however few samples an iteration has: a remark says how often
            each was seen.
        publish_every: steps after which a job publishes a version in the background; None: its
            result alone. With `PromotionTest.choosing` the best one is what the loop decides on.
        seed: each iteration's job has a seed of its own, made of this one.
        logprob_limit: how far trainer and engine may lie apart before a job's first step, in nats:
            see JobSpec. None: by the rounding of both.

    All others are described at TrainingSettings. With `lora` each job trains its parent's adapters
    on.
    """

    steps: int | None = Field(default=None, gt=0)
    publish_every: int | None = Field(default=None, gt=0)
    logprob_limit: float | None = Field(default=None, gt=0)

    def job(self, steps: int, **changes: Any) -> Hyperparameters:
        """The hyperparameters of a job with so many steps."""
        own = self.model_dump(
            exclude_unset=True, exclude={"steps", "publish_every", "logprob_limit"}
        )
        return Hyperparameters.model_validate({**own, "steps": steps, **changes})


class Method(StrictRecord):
    """A method, and the iterations that it trains.

    Args:
        iterations: how many; None, for the last method alone: no end.
        group_size: runs per task and iteration.
        tasks_per_iteration: how many train tasks an iteration draws (see Curriculum).
        parent: the version that the next iteration samples from and trains on. `promoted`: the
            promoted version. `latest`: the last candidate, unless its evaluation was worse by more
            than a standard error; the promoted version stays promoted (and waits to be served,
            where one replica takes turns). Methods whose steps are too small to be told from chance
            have `latest`, the others `promoted`.
        evaluate_every: evaluate every N-th iteration on held-out tasks, and always the last one of
            a method or of a call of run. The others are only checked by their log-probabilities.
        training: settings of the training jobs.
    """

    name: ClassVar[str]
    trained_by: ClassVar[MethodName]
    compares: ClassVar[bool] = False  # learns from how the runs of a group differ
    on_policy: ClassVar[bool] = False  # learns from the iteration's own runs alone
    runs: ClassVar[bool] = True  # runs the agent on train tasks
    trains: ClassVar[bool] = True  # makes weights; False: a prompt, with its parent's weights

    iterations: int | None = Field(default=None, ge=1)
    group_size: int = Field(default=1, ge=1)
    tasks_per_iteration: int = Field(default=512, ge=1)
    parent: Literal["promoted", "latest"] = "promoted"
    evaluate_every: int = Field(default=1, ge=1)
    training: Training = Field(default_factory=Training)

    @model_validator(mode="after")
    def _check_evaluation(self) -> Self:
        if self.evaluate_every > 1 and self.parent == "promoted":
            raise ValueError(
                f"evaluate_every={self.evaluate_every} with parent 'promoted' trains one version "
                "again and again: only what is evaluated can be promoted"
            )
        return self

    def job(self, steps: int, seed: int, temperature: float) -> Hyperparameters:
        """The hyperparameters of a job. `temperature`: that of the runs it learns from."""
        loss: dict[str, Any] = {}
        if isinstance(self, PolicyLoss):
            own = self.model_dump(include=set(PolicyLoss.model_fields), exclude_unset=True)
            loss["policy"] = Policy(**own, temperature=temperature)
        elif own := self.model_dump(include=set(Preference.model_fields), exclude_unset=True):
            loss["preference"] = Preference(**own)
        return self.training.job(steps, seed=seed, **loss)


class RFT(Method):
    """Rejection sampling: imitate the runs whose reward is at least `Data.min_reward`."""

    name = "rft"
    trained_by = "sft"


class SFT(Method):
    """Imitate the demonstrations alone; nothing is run."""

    name = "sft"
    trained_by = "sft"
    runs = False


class GRPO(Method, PolicyLoss):
    """Learn from the iteration's own runs, by their advantages within each group.

    The fields of the loss are described at PolicyLoss.
    """

    name = "grpo"
    trained_by = "grpo"
    compares = True
    on_policy = True

    group_size: int = Field(default=8, ge=2)
    parent: Literal["promoted", "latest"] = "latest"


class DPO(Method):
    """Prefer the best to the worst run of each group. `beta`, `label_smoothing`: see Preference."""

    name = "dpo"
    trained_by = "dpo"
    compares = True

    group_size: int = Field(default=4, ge=2)
    beta: float = Field(default=0.1, gt=0)
    label_smoothing: float = Field(default=0.0, ge=0, lt=0.5)


class KTO(Method):
    """Learn from good runs and bad ones. `beta`, `desirable`, `undesirable`: see Preference."""

    name = "kto"
    trained_by = "kto"

    beta: float = Field(default=0.1, gt=0)
    desirable: float = Field(default=1.0, gt=0)
    undesirable: float = Field(default=1.0, gt=0)


class Distill(Method, PolicyLoss):
    """Learn from the iteration's own runs, each token judged by a teacher; rewards do not count.

    `teacher` is a version such as `big@3`, or a checkpoint's directory. Its tokens must be those of
    the agent's model; its kind may be another. `Platform.register` makes a version of a Hugging
    Face directory. The fields of the loss are described at PolicyLoss.
    """

    name = "distill"
    trained_by = "distill"
    on_policy = True

    parent: Literal["promoted", "latest"] = "latest"
    teacher: str

    @field_validator("teacher")
    @classmethod
    def _check_teacher(cls, teacher: str) -> str:
        if "@" not in teacher and "/" not in teacher:
            raise ValueError(
                f"teacher={teacher!r}: name a version, such as 'big@3' (the promoted one may "
                "change), or a directory, such as './big'"
            )
        return teacher


class PromptMethod(Method):
    """A method that improves what stands before the agent's input, and leaves the weights alone.

    Args:
        trials: train tasks that measure what it tries, greedily, before held-out tasks decide.
    """

    trains = False

    trials: int = Field(default=32, ge=1)

    @model_validator(mode="after")
    def _check_training(self) -> Self:
        if "training" in self.model_fields_set:
            raise ValueError(f"training has no effect: {type(self).__name__} trains no weights")
        return self


class Examples(PromptMethod):
    """Show the agent its own good runs as examples; they replace those it has.

    Sets of good runs at different train tasks are drawn, and the one whose trials do best becomes
    the candidate (BootstrapFewShotWithRandomSearch of DSPy, arXiv 2310.03714). No gold answer is
    used. A good run has a reward of at least `Data.min_reward` (1).

    Args:
        count: examples in a set.
        sets: sets that are tried.
    """

    name = "examples"

    count: int = Field(default=4, ge=1)
    sets: int = Field(default=8, ge=1)


class Instructions(PromptMethod):
    """Let a model rewrite the agent's instructions, by what good and failed runs show (GEPA).

    The search is that of the package `gepa` (arXiv 2507.19457): `pip install cray-agents[prompts]`.
    The reflector reads inputs, conversations and rewards of runs at train tasks, and no target.

    Args:
        reflector: a version that is served, such as `big@3`; or another server's model, as in
            `https://host/v1#model`, asked with the key in $OPENAI_API_KEY.
        budget: runs at train tasks, at most; a last batch may go beyond.
    """

    name = "instructions"
    runs = False

    reflector: str
    budget: int = Field(default=300, ge=1)

    @model_validator(mode="after")
    def _check_reflector(self) -> Self:
        url, _, model = self.reflector.partition("#")
        if "://" in url and not model:
            problem = f"reflector={self.reflector!r}: name the server's model"
            raise ValueError(f"{problem}, as in '{url.rstrip('/')}#model'")
        if "://" not in url and "@" not in url:
            raise ValueError(
                f"reflector={self.reflector!r}: name a version, such as 'big@3' (the promoted one "
                "may change), or a server with its model, such as 'https://host/v1#model'"
            )
        if self.budget < 2 * self.trials:
            raise ValueError(
                f"budget={self.budget} is not enough to try one rewrite: it and the present "
                f"instructions are measured by trials={self.trials} runs each"
            )
        return self


METHODS = {kind.name: kind for kind in (RFT, SFT, GRPO, DPO, KTO, Distill, Examples, Instructions)}


@dataclass(frozen=True)
class Scheduled:
    """A method with its first and last iteration; `last` None: there is no end."""

    method: Method
    first: int
    last: int | None

    def evaluates(self, number: int, last: int) -> bool:
        """Tell whether an iteration's candidate is evaluated, and may be promoted.

        `last`: the last iteration of this call, which is always evaluated.
        """
        every = self.method.evaluate_every
        return number in (self.last, last) or (number - self.first + 1) % every == 0


def scheduled(given: Method | Sequence[Method]) -> tuple[Scheduled, ...]:
    """Number the iterations of methods in their order. Raises BadInput."""
    methods = [given] if isinstance(given, Method) else given
    listed = isinstance(methods, Sequence) and not isinstance(methods, str)
    if not listed or not methods or not all(isinstance(one, Method) for one in methods):
        kind = METHODS.get(str(given))
        example = "a method such as GRPO(group_size=8)" if kind is None else f"{kind.__name__}(...)"
        raise BadInput(f"method={given!r}: give {example}, or a list of methods", param="method")
    schedule: list[Scheduled] = []
    first = 1
    for place, method in enumerate(methods):
        if method.iterations is None and place < len(methods) - 1:
            raise BadInput(
                f"method[{place}]: say for how many iterations: only the last method goes on",
                param="method",
            )
        last = None if method.iterations is None else first + method.iterations - 1
        schedule.append(Scheduled(method, first, last))
        first = (last or 0) + 1
    return tuple(schedule)


def scheduled_at(schedule: Sequence[Scheduled], number: int) -> Scheduled:
    """The method that trains an iteration."""
    return next(one for one in schedule if one.last is None or number <= one.last)


def ended(schedule: Sequence[Scheduled], number: int) -> str | None:
    """The reason why nothing comes after an iteration, if the schedule ends with it."""
    last = schedule[-1].last
    return None if last is None or number < last else f"schedule: all {last} iterations are done"
