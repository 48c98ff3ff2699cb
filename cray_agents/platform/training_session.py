"""Training session: a model that is trained by a loop and a loss of your own.

The platform keeps model and optimizer in memory and carries out one command after the other, each
exactly once, also when the trainer, the platform or this client dies meanwhile. Made by
`Platform.training_session`. Read next: training_commands.py for what each command means.
"""

import asyncio
import functools
import hashlib
import inspect
import math
from collections.abc import Awaitable, Callable, Sequence
from typing import TYPE_CHECKING, Any

from pydantic import ValidationError

from cray_agents.errors import BadInput, JobError
from cray_agents.platform.transport import Transport
from cray_agents.records import ModelVersion
from cray_agents.training_commands import (
    COMMAND,
    CommandResult,
    Datum,
    End,
    ForwardBackward,
    LossName,
    OptimStep,
    Publish,
    Save,
    Score,
    TrainingCommand,
)
from cray_agents.training_jobs import JobStatus

if TYPE_CHECKING:
    import torch

    #: Log-probabilities of each datum's tokens and the data; returns a scalar with a gradient.
    OwnLoss = Callable[[list[torch.Tensor], Sequence[Datum]], torch.Tensor]

WAIT = 20  # seconds that the platform may hold a question for a result


class TrainingSession:
    """A run of training commands, named on its platform. Use one client at a time.

    A client that died goes on by opening the session of the same name again: `sequence` is then the
    number of the last command, and `result(n)` returns what came of the n-th. Its versions have
    the prompts of its parent.
    """

    def __init__(
        self,
        http: Transport,
        job: JobStatus,
        sequence: int,
        register: Callable[[str, str], Awaitable[ModelVersion]],
    ) -> None:
        self._http, self.job_id, self.sequence, self._register = http, job.id, sequence, register

    async def forward_backward(
        self, data: Sequence[Datum], loss: "LossName | OwnLoss" = "cross_entropy", **options: Any
    ) -> CommandResult:
        """Add the gradient of a loss over `data` to those since the last `optim_step`.

        `loss` is a name (see `ForwardBackward`, with its options), or a function `(logprobs, data)`
        of torch tensors, one [length] for each datum. It runs here, on the log-probabilities that
        the trainer sends, and may mix all of them; the trainer gets its gradient. Its module, name
        and hash are recorded with the command. Raises BadInput.
        """
        if isinstance(loss, str):
            try:
                command = ForwardBackward(data=list(data), loss=loss, **options)
            except ValidationError as error:
                first = error.errors(include_url=False)[0]
                place = ".".join(map(str, first["loc"]))
                message = first["msg"].removeprefix("Value error, ")
                raise BadInput(f"{place}: {message}" if place else message) from error
            return await self.do(command)
        before = await self.do(ForwardBackward(data=list(data), backward=False))
        value, gradients = gradient_of(loss, before.logprobs or [], data)
        linear = [
            # the trainer multiplies by the weights, which mark what is trained on
            datum.model_copy(update={"gradients": row, "weights": _marks(datum)})
            for datum, row in zip(data, gradients, strict=True)
        ]
        own = ForwardBackward(data=linear, loss="linear", source=source_of(loss))
        return (await self.do(own)).model_copy(update={"loss": value})

    async def optim_step(
        self, learning_rate: float | None = None, **options: float
    ) -> CommandResult:
        """Take a step of AdamW with the gradients since the last one; see `OptimStep`."""
        return await self.do(OptimStep(learning_rate=learning_rate, **options))

    async def score(self, data: Sequence[Datum]) -> list[list[float]]:
        """Return log-probabilities of the tokens of `data`, lists [length]."""
        return (await self.do(Score(data=list(data)))).logprobs or []

    async def publish(self, model: str) -> ModelVersion:
        """Write the weights as a checkpoint and register it as the next version of a model.

        Training goes on from the weights as they are stored.
        """
        result = await self.do(Publish())
        return await self._register(model, result.checkpoint or "")

    async def save(self) -> None:
        """Write a resume point, so that less is done again after a failure."""
        await self.do(Save())

    async def keep_state(self) -> str:
        """Keep weights and optimizer as they are now; return a name for `state_from`.

        They stay as long as the weights that were published last, or the parent's.
        """
        result = await self.do(Save(keep_state=True))
        return f"{self.job_id}/{result.sequence}"

    async def end(self, model: str | None = None) -> ModelVersion | None:
        """End with a checkpoint; register it as the next version of `model`, if given."""
        result = await self.do(End())
        return None if model is None else await self._register(model, result.checkpoint or "")

    # ---- commands
    async def do(self, command: TrainingCommand) -> CommandResult:
        """Send the next command and return its result. Raises BadInput, JobError."""
        sequence = self.sequence + 1
        body = {"sequence": sequence, "command": COMMAND.dump_python(command, mode="json")}
        await self._http.post(f"/jobs/{self.job_id}/commands", body)
        self.sequence = sequence
        result = await self.result(sequence)
        if result.error is not None:
            raise BadInput(result.error)
        return result

    async def result(self, sequence: int) -> CommandResult:
        """Wait for the result of a command. Raises NotFound, JobError."""
        while True:
            path = f"/jobs/{self.job_id}/commands/{sequence}"
            answer = await self._http.get(path, {"wait": WAIT})
            if answer["result"] is not None:
                return CommandResult.model_validate(answer["result"])
            if (state := answer["state"]) not in ("queued", "running"):
                raise JobError(
                    f"{self.job_id} is {state}, and command {sequence} has no result: see"
                    f" `cray-agents jobs logs {self.job_id}`"
                )
            await asyncio.sleep(0)


def gradient_of(
    loss: "OwnLoss", rows: Sequence[Sequence[float]], data: Sequence[Datum]
) -> tuple[float, list[list[float]]]:
    """Return a loss of the client's own, and its gradient at the log-probabilities.

    Raises BadInput if it returns no finite scalar, or one that does not depend on them.
    """
    import torch

    logprobs = [torch.tensor(row, requires_grad=True) for row in rows]
    value = loss(logprobs, data)
    name = getattr(loss, "__qualname__", repr(loss))
    if not isinstance(value, torch.Tensor) or value.numel() != 1:
        shape = list(value.shape) if isinstance(value, torch.Tensor) else type(value).__name__
        raise BadInput(f"the loss {name} returned {shape}: return a torch scalar", param="loss")
    if not math.isfinite(float(value.detach())):
        raise BadInput(f"the loss {name} is {float(value.detach())}", param="loss")
    if not value.requires_grad:
        message = f"the loss {name} does not depend on the log-probabilities: nothing to learn"
        raise BadInput(message, param="loss")
    partials = torch.autograd.grad(value.reshape(()), logprobs, allow_unused=True)
    gradients = [
        torch.zeros_like(p) if g is None else g for p, g in zip(logprobs, partials, strict=True)
    ]
    if not all(bool(torch.isfinite(gradient).all()) for gradient in gradients):
        raise BadInput(f"the gradient of the loss {name} is not finite", param="loss")
    return float(value.detach()), [gradient.tolist() for gradient in gradients]


def source_of(loss: Callable[..., Any]) -> str:
    """Return a function's module and name, and the SHA-256 of its source if it can be read."""
    while isinstance(loss, functools.partial):
        loss = loss.func
    try:
        digest = hashlib.sha256(inspect.getsource(loss).encode()).hexdigest()
    except (OSError, TypeError):
        digest = "unknown"
    module, name = getattr(loss, "__module__", "?"), getattr(loss, "__qualname__", repr(loss))
    return f"{module}:{name} sha256:{digest}"


def _marks(datum: Datum) -> list[float] | None:
    """Return 1 for every token that is trained on, else 0."""
    if datum.weights is None:
        return None
    return [float(weight != 0) for weight in datum.weights]
