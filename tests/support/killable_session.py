"""A training session's client, and its platform, as processes that can be killed.

    python -m tests.support.killable_session gateway HOME PORT    real ranks, a scripted engine
    python -m tests.support.killable_session client URL OUT       a loop of commands; its versions

The client's commands follow from their numbers, so that one that is started again goes on.
`CRAY_TEST_RANKS` data ranks train.
"""

import asyncio
import json
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING

import uvloop

from cray_agents import Platform
from cray_agents.errors import EngineTimeout, EngineUnavailable
from cray_agents.paths import Home
from cray_agents.platform.training_session import TrainingSession, gradient_of
from cray_agents.processes import die_with_parent
from cray_agents.runtime.gateway.app import create_app
from cray_agents.runtime.gateway.services import Services
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.runtime.store import Store
from cray_agents.testing import ScriptedEngine
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.planning.cluster_resources import Resources
from cray_agents.training import Datum, Hyperparameters
from cray_agents.training_commands import (
    End,
    ForwardBackward,
    OptimStep,
    Publish,
    Save,
    Score,
    TrainingCommand,
)
from cray_agents.training_jobs import Layout
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_services import first_version, server_of, start_pool

if TYPE_CHECKING:
    import torch

RANKS = int(os.environ.get("CRAY_TEST_RANKS", "1"))
STEPS = 6
ONE_STEP: list[type[TrainingCommand]] = [
    ForwardBackward,
    Score,
    ForwardBackward,
    OptimStep,
    Publish,
]


def pair(step: int) -> list[Datum]:
    """Return a better and a worse sequence."""
    start, weights = [5, 6 + step], [0.0, 0.0, 1.0, 1.0]
    return [Datum(token_ids=[*start, token, token + 1], weights=weights) for token in (20, 30)]


def preference(logprobs: "list[torch.Tensor]", data: Sequence[Datum]) -> "torch.Tensor":
    """A loss over the whole batch."""
    import torch  # not above: the gateway is without it

    good, bad = (row.sum() for row in logprobs)
    return -torch.nn.functional.logsigmoid(good - bad)


async def command(session: TrainingSession, number: int) -> TrainingCommand:
    """Return the command of a number, counted from 1."""
    step, place = divmod(number - 1, len(ONE_STEP))
    data = pair(step)
    if step == STEPS:
        return End()
    if place == 0:
        return ForwardBackward(data=data)
    if place == 1:
        return Score(data=data)
    if place == 2:
        rows = (await session.result(number - 1)).logprobs or []
        _, gradients = gradient_of(preference, rows, data)
        columns = zip(data, gradients, strict=True)
        own = [datum.model_copy(update={"gradients": row}) for datum, row in columns]
        return ForwardBackward(data=own, loss="linear", source="preference")
    if place == 3:
        return OptimStep(learning_rate=1e-3)
    return Publish() if step % 2 else Save()


async def train(
    platform: Platform,
    name: str = "mine",
    *,
    model: str = "m",
    ranks: int = RANKS,
    pause: float = 0.0,
) -> list[str]:
    """Give all commands, from the first that was not given; return the versions' names.

    `name`: of the session. `pause`: seconds before each command.
    """
    hyper, layout = Hyperparameters(learning_rate=1e-3, steps=1, seed=3), Layout(data=ranks)
    session = await platform.training_session(
        name, parent=f"{model}@1", hyperparameters=hyper, layout=layout
    )
    while session.sequence <= STEPS * len(ONE_STEP):
        await asyncio.sleep(pause)
        result = await session.do(await command(session, session.sequence + 1))
        assert result.error is None
    versions = []
    for number in range(1, session.sequence + 1):  # also those that an earlier client published
        if (checkpoint := (await session.result(number)).checkpoint) is not None:
            versions.append((await platform.register(model, checkpoint)).id)
    await platform.wait_for(await platform.job(session.job_id), lambda status: None)
    return versions


async def persist(url: str, out: Path) -> None:
    """Train, whenever the platform answers again."""
    while True:
        platform = Platform(url)
        try:
            out.write_text(json.dumps(await train(platform)))
        except (EngineUnavailable, EngineTimeout):
            await asyncio.sleep(0.1)
        else:
            return
        finally:
            await platform.close()


async def serve(home: Home, port: int) -> None:
    """The platform, until it is killed."""
    registry = first_version(home, model=home.root.parent / "model")
    with LocalProcesses(home.slurm) as scheduler:
        trainer = MegatronTrainer(home, scheduler, Resources(ranks=1))
        pool = Pool([InProcessEngine(ScriptedEngine(["."]))])
        services = Services(home, Store(home), registry, trainer, pool)
        await start_pool(pool, home, registry)
        await server_of(create_app(services), port=port).serve()


def main() -> None:
    """One of the processes."""
    die_with_parent(int(os.environ["TEST_PARENT"]))
    if sys.argv[1] == "gateway":
        uvloop.run(serve(Home(Path(sys.argv[2])), int(sys.argv[3])))
    else:
        uvloop.run(persist(sys.argv[2], Path(sys.argv[3])))


if __name__ == "__main__":
    main()
