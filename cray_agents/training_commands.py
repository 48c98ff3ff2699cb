"""Training commands: what a training session does for a client that writes its own loop.

A client numbers its commands from 1. Each is done once, in order, and has one result. Losses and
their gradients are sums over tokens, never means: divide the weights to get a mean. Carried out by
trainers/job/command_run.py.
"""

from typing import Annotated, Any, Literal, Self

from pydantic import (
    Field,
    SerializerFunctionWrapHandler,
    TypeAdapter,
    model_serializer,
    model_validator,
)

from cray_agents.records import StrictRecord

LossName = Literal["cross_entropy", "importance_sampling", "ppo", "cispo", "linear"]

#: Columns of a Datum that a loss reads besides the weights.
COLUMNS_OF: dict[LossName, tuple[str, ...]] = {
    "cross_entropy": (),
    "importance_sampling": ("logprobs", "advantages"),
    "ppo": ("logprobs", "advantages"),
    "cispo": ("logprobs", "advantages"),
    "linear": ("gradients",),
}


class Datum(StrictRecord):
    """A sequence with numbers for each of its tokens, lists [length].

    - `weights`: the factor of the token's loss; 0: not trained on; None: 1 for all. The first token
      is never predicted, so its numbers have no effect.
    - `advantages`, and `logprobs` that the tokens were sampled with, for the losses of policies.
    - `gradients` of a loss of your own with respect to the tokens' log-probabilities ("linear").
    """

    token_ids: list[int] = Field(min_length=2)
    weights: list[float] | None = None
    advantages: list[float] | None = None
    logprobs: list[float] | None = None
    gradients: list[float] | None = None

    @model_validator(mode="after")
    def _check_numbers(self) -> Self:
        for name in ("weights", "advantages", "logprobs", "gradients"):
            values = getattr(self, name)
            if values is not None and len(values) != len(self.token_ids):
                raise ValueError(
                    f"{name} has {len(values)} numbers, and token_ids has {len(self.token_ids)}"
                )
        if min(self.token_ids) < 0:
            raise ValueError("token_ids holds a negative number")
        return self


class ForwardBackward(StrictRecord):
    """Add the gradient of a loss over `data` to those since the last optimizer step.

    With `backward` False only the loss and the log-probabilities are computed. `clip_low` and
    `clip_high` bound the importance ratio of ppo and cispo to [1 - clip_low, 1 + clip_high].
    `source` names a loss of the client's own and the hash of its code; it is only recorded.
    """

    kind: Literal["forward_backward"] = "forward_backward"
    data: list[Datum] = Field(min_length=1)
    loss: LossName = "cross_entropy"
    backward: bool = True
    clip_low: float = Field(default=0.2, gt=0, lt=1)
    clip_high: float = Field(default=0.2, gt=0)
    source: str = ""

    @model_validator(mode="after")
    def _check_columns(self) -> Self:
        for number, datum in enumerate(self.data):
            for name in COLUMNS_OF[self.loss]:
                if getattr(datum, name) is None:
                    raise ValueError(f"data[{number}] lacks {name}, which {self.loss} needs")
        return self


class OptimStep(StrictRecord):
    """Take a step of AdamW with the gradients since the last one. Raises without gradients.

    `clip_grad` bounds the gradient's norm; 0: nothing does. None for `learning_rate`, `beta1`,
    `beta2` and `eps`: those of the job's hyperparameters.
    """

    kind: Literal["optim_step"] = "optim_step"
    learning_rate: float | None = Field(default=None, ge=0, allow_inf_nan=False)
    weight_decay: float = Field(default=0.0, ge=0, allow_inf_nan=False)
    clip_grad: float = Field(default=1.0, ge=0, allow_inf_nan=False)
    beta1: float | None = Field(default=None, ge=0, lt=1)
    beta2: float | None = Field(default=None, ge=0, lt=1)
    eps: float | None = Field(default=None, gt=0)


class Score(StrictRecord):
    """Return the log-probabilities of the tokens of `data`, without a gradient."""

    kind: Literal["score"] = "score"
    data: list[Datum] = Field(min_length=1)


class _KeepsState(StrictRecord):
    """A command that can keep the training state as it leaves it: weights and optimizer.

    Another run begins with it: `state_from` of training_jobs.py.
    """

    keep_state: bool = False

    @model_serializer(mode="wrap")
    def _leave_default_out(self, handler: SerializerFunctionWrapHandler) -> dict[str, Any]:
        """Return the fields; commands older than `keep_state` are written as they were."""
        fields: dict[str, Any] = handler(self)
        if not self.keep_state:
            del fields["keep_state"]
        return fields


class Publish(_KeepsState):
    """Write the weights as a checkpoint. Training goes on from the weights as they are stored."""

    kind: Literal["publish"] = "publish"


class Save(_KeepsState):
    """Write a resume point, so that less is done again after a failure."""

    kind: Literal["save"] = "save"


class End(StrictRecord):
    """Write the weights as the job's checkpoint, and end the job."""

    kind: Literal["end"] = "end"


TrainingCommand = Annotated[
    ForwardBackward | OptimStep | Score | Publish | Save | End, Field(discriminator="kind")
]
COMMAND: TypeAdapter[TrainingCommand] = TypeAdapter(TrainingCommand)


class CommandRequest(StrictRecord):
    """A command and its number, counted from 1 in its job."""

    sequence: int = Field(ge=1)
    command: TrainingCommand


class CommandResult(StrictRecord):
    """The result of a command: `error`, or the fields that its kind has.

    `loss` is the sum over all tokens of the weighted losses. `logprobs` are of every token of each
    datum, [length], with 0 for its first one and those that are not trained on.
    """

    sequence: int
    error: str | None = None
    loss: float | None = None
    measures: dict[str, float] = Field(default_factory=dict)
    logprobs: list[list[float]] | None = None
    grad_norm: float | None = None
    checkpoint: str | None = None
    seconds: float = 0.0
