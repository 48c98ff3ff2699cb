"""A client's own training loop over HTTP: a gateway, real ranks, the loss of the client's own."""

import asyncio
import os
import signal
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch

from cray_agents import Platform
from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.platform.training_session import TrainingSession
from cray_agents.records import Prompt
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.pool.pool import Pool
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.server.gpu_turns import TrainingSide, take_turns
from cray_agents.testing import ScriptedEngine
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.job.session_journal import sessions
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.trainers.planning.cluster_resources import Gpus, Resources
from cray_agents.training import Hyperparameters
from cray_agents.training_commands import Datum, OptimStep
from cray_agents.training_jobs import JobSpec, JobStatus
from tests.support.scripted_platform import platform
from tests.support.scripted_pool import ASK

pytestmark = pytest.mark.megatron

GOOD, BAD = [5, 6, 7, 8, 9, 10], [5, 6, 11, 12, 13, 14]
PAIR = [Datum(token_ids=ids, weights=[0, 0, 1, 1, 1, 1]) for ids in (GOOD, BAD)]


@pytest.fixture
def site(tmp_path: Path) -> Iterator[Platform]:
    """A platform with a scripted engine and the real trainer, on local processes."""
    make_seed_model(tmp_path / "model", seed=0, corpus=["What is 1 + 1?"])
    home = Home(tmp_path / "home")
    with LocalProcesses(home.slurm) as scheduler:
        trainer = MegatronTrainer(home, scheduler, Resources(ranks=1))
        model = tmp_path / "model"
        with platform(home.root, ScriptedEngine(["."]), model=model, trainer=trainer) as where:
            yield where
        for session in sessions(home):
            session.ask_to_end()


def preference(logprobs: list[torch.Tensor], data: Sequence[Datum]) -> torch.Tensor:
    """A loss over the whole batch that no sum over tokens can express."""
    good, bad = (row.sum() for row in logprobs)
    return -torch.nn.functional.logsigmoid(good - bad)


def nothing(logprobs: list[torch.Tensor], data: Sequence[Datum]) -> torch.Tensor:
    return torch.tensor(1.0)


def not_a_number(logprobs: list[torch.Tensor], data: Sequence[Datum]) -> torch.Tensor:
    return logprobs[0].sum() * float("nan")


def a_list(logprobs: list[torch.Tensor], data: Sequence[Datum]) -> Any:
    return logprobs[0]


def broken(logprobs: list[torch.Tensor], data: Sequence[Datum]) -> torch.Tensor:
    raise ZeroDivisionError("in the client's own code")


async def margin(session: TrainingSession) -> float:
    good, bad = await session.score(PAIR)
    return sum(good) - sum(bad)


async def test_a_loop_and_a_loss_of_ones_own(site: Platform, tmp_path: Path) -> None:
    hyper = Hyperparameters(steps=1, seed=3)
    told = {"guide": Prompt(instructions="Be brief.")}
    parent = (await site.register("told", (await site.version("m@1")).checkpoint, told)).id
    session = await site.training_session("mine", parent=parent, hyperparameters=hyper)
    before = await margin(session)
    for wrong, why in (
        (nothing, "does not depend"),
        (not_a_number, "is nan"),
        (a_list, "returned"),
    ):
        with pytest.raises(BadInput, match=why):
            await session.forward_backward(PAIR, wrong)
    with pytest.raises(BadInput, match="lacks logprobs, which ppo needs"):
        await session.forward_backward(PAIR, "ppo")
    with pytest.raises(BadInput, match="loss: Input should be 'cross_entropy', 'importance"):
        await session.forward_backward(PAIR, "gspo")  # type: ignore[arg-type]
    with pytest.raises(ZeroDivisionError):
        await session.forward_backward(PAIR, broken)
    with pytest.raises(BadInput, match="made with another tokenizer"):
        await session.forward_backward([Datum(token_ids=[5, 10**6])])
    stranger = JobStatus(id="job-of-another-root", state="running", steps=1)
    with pytest.raises(NotFound):
        await TrainingSession(session._http, stranger, 0, site.register).save()
    losses = []
    for _ in range(3):
        losses.append((await session.forward_backward(PAIR, preference)).loss)
        await session.optim_step(1e-3)
    version = await session.publish("m")
    assert (version.id, version.prompts) == ("m@2", told)
    assert losses == sorted(losses, reverse=True)

    # the session's processes die, and another client goes on with it
    home = Home(tmp_path / "home")
    [journal] = sessions(home)
    assert journal.attempts == 1  # what was refused above ended no process
    claim = checksums.read_json(journal.folder / "attempts" / str(journal.attempts))
    os.kill(claim["pid"], signal.SIGKILL)
    failed = JobStatus(id=session.job_id, state="failed", steps=1, error="the disk was full")
    JobJournal(home, session.job_id).write_status(failed)
    with pytest.raises(BadInput, match="is failed and takes no commands: open its session again"):
        await session.save()
    again = await site.training_session("mine", parent=parent, hyperparameters=hyper)
    assert again.sequence == session.sequence
    after = await margin(again)
    assert after > before + 1
    assert (await again.result(1)).logprobs == (await session.result(1)).logprobs
    kept = await again.keep_state()
    how: dict[str, Any] = {"parent": "m@1", "hyperparameters": hyper}
    assert await margin(await site.training_session("other", **how, state_from=kept)) == after
    with pytest.raises(BadInput, match="state_from"):
        await site.training_session("other", **how, state_from="../x/1")
    with pytest.raises(BadInput, match="two clients"):
        session.sequence -= 2
        await session.do(OptimStep(learning_rate=0.5))
    last = await again.end("m")
    assert last is not None and last.id == "m@3"
    status = await site.wait_for(await site.job(again.job_id), lambda job: None)
    assert status.state == "succeeded" and status.checkpoint == again.job_id
    with pytest.raises(BadInput, match="is succeeded and takes no commands"):
        await again.save()
    with pytest.raises(NotFound):
        await again.result(99)


async def test_a_loop_of_ones_own_by_turns_with_the_replica(tmp_path: Path) -> None:
    """The GPU is told. The session leaves it for each question, and goes on where it was."""
    make_seed_model(tmp_path / "model", seed=0, corpus=["What is 1 + 1?"])
    home = Home(tmp_path / "home")
    hyper = Hyperparameters(steps=1, seed=3)
    with LocalProcesses(home.slurm, gpus=["0"], turns=True) as scheduler:
        gpus = Resources(gpus=Gpus("H100", 79, 1))
        trainer = MegatronTrainer(home, scheduler, gpus, turns=True)
        with pytest.raises(BadInput, match="name a session, which leaves the GPU"):
            trainer.submit(JobSpec(dataset="", parent=str(tmp_path / "model"), parent_sha256="0",
                                   hyperparameters=hyper, commands="mine"))  # fmt: skip
        training = TrainingSide(home, scheduler)

        async def beside(pool: Pool) -> None:
            await take_turns(pool, training, lambda: False, least=0.0, every=0.01)

        engine, model = ScriptedEngine(lambda request: "."), tmp_path / "model"
        with platform(home.root, engine, model=model, trainer=trainer, beside=beside) as where:
            session = await where.training_session("mine", parent="m@1", hyperparameters=hyper)
            losses = []
            for _ in range(2):
                losses.append((await session.forward_backward(PAIR, preference)).loss or 0.0)
                await session.optim_step(1e-3)
                answer = await where.engine().chat({"model": "m", **ASK})
                assert answer["choices"][0]["message"]["content"] == "."
            assert losses[1] < losses[0]
            await session.end()
            async with asyncio.timeout(60):
                spent = await where.turns()
                while spent["turns"] < 3:  # one for each question, and the end
                    await asyncio.sleep(0.05)
                    spent = await where.turns()
        for each in sessions(home):
            each.ask_to_end()
    phases = {"drain", "sleep", "train", "onload", "offload", "wake", "prove"}
    assert spent.keys() == {"turns", *phases} and min(spent["train"], spent["offload"]) > 0


async def test_two_sessions_take_turns_on_one_set_of_ranks(site: Platform) -> None:
    """Each goes on from its own weights and optimizer."""

    async def train(name: str, rate: float) -> list[float]:
        session = await site.training_session(name, parent="m@1")
        found = []
        for _ in range(3):
            found.append((await session.forward_backward(PAIR, preference)).loss)
            await session.optim_step(rate)
        await session.end()
        return [loss for loss in found if loss is not None]

    slow, fast = await asyncio.gather(train("slow", 1e-4), train("fast", 1e-3))
    assert slow[0] == fast[0] and slow[-1] > fast[-1]
