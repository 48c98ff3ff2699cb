"""A client of a training session by commands, without a platform, and data for it to train on."""

import random
import time
from pathlib import Path
from typing import Any

import torch

from cray_agents.paths import Home
from cray_agents.trainers.job.journal import CommandJournal
from cray_agents.training_commands import (
    CommandResult,
    Datum,
    ForwardBackward,
    OptimStep,
    Publish,
    TrainingCommand,
)
from tests.support.trainers.running_session import RunningSession

RATE = 1e-3


class Client:
    """A client of one training run: sends commands, waits for their results."""

    def __init__(
        self, lab: Any, session: RunningSession, parent: str | Path = "qwen3", **how: Any
    ) -> None:
        self.session, self.sequence = session, 0
        layout = session.journal.spec().layout.model_dump()
        how = {"commands": "mine", **how}
        spec = lab.spec(parent, dataset="", layout=layout, **how)
        self.job = session.start(spec)
        self.commands = CommandJournal(self.job.folder)

    def send(self, command: TrainingCommand) -> int:
        self.sequence += 1
        self.commands.append(self.sequence, command)
        return self.sequence

    def do(self, command: TrainingCommand) -> CommandResult:
        sequence = self.send(command)
        while (result := self.commands.result(sequence)) is None:
            self.session.journal.hand_over(self.job.job_id)  # it may have left it for another one
            self.session.check()
            time.sleep(0.002)
        return result

    def trained(self, data: list[Datum], **how: Any) -> CommandResult:
        """One optimizer step on data."""
        result = self.do(ForwardBackward(data=data, **how))
        self.do(OptimStep(learning_rate=RATE))
        return result

    def weights(self) -> dict[str, torch.Tensor]:
        """Of a checkpoint that is published now."""
        return weights_of(self.session.journal.home, self.do(Publish()).checkpoint)


def weights_of(home: Home, checkpoint: str | None) -> dict[str, torch.Tensor]:
    from safetensors.torch import load_file

    tensors: dict[str, torch.Tensor] = {}
    for path in home.checkpoint(str(checkpoint)).glob("*.safetensors"):
        tensors |= load_file(path)
    return tensors


def data_of(seed: int, count: int = 4) -> list[Datum]:
    """Sequences of several lengths with a prompt that is not trained on."""
    draw = random.Random(seed)
    data = []
    for _ in range(count):
        length = draw.randrange(6, 14)
        data.append(
            Datum(
                token_ids=[draw.randrange(3, 90) for _ in range(length)],
                weights=[0.0, 0.0, *(draw.choice((0.5, 1.0)) for _ in range(length - 2))],
                advantages=[draw.uniform(-1, 1) for _ in range(length)],
                logprobs=[draw.uniform(-6, -3) for _ in range(length)],
            )
        )
    return data


def differ(one: dict[str, torch.Tensor], other: dict[str, torch.Tensor]) -> float:
    """The largest difference of two sets of weights."""
    assert one.keys() == other.keys()
    return max(float((one[name].float() - other[name].float()).abs().max()) for name in one)
