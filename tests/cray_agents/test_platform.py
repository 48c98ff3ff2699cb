"""Platform, the HTTP client, at a real gateway over a scripted engine and trainer."""

from pathlib import Path

from cray_agents import Hyperparameters, Platform, Run, StopReason
from cray_agents.trainers.scripted_trainer import ScriptedTrainer
from tests.runtime.gateways import served


def tagged(name: str, *tags: str) -> Run:
    return Run(id=name, agent="a", model="calc", input="x", stop_reason=StopReason.completed,
               tags=list(tags))  # fmt: skip


async def test_runs_with_all_of_several_tags(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        platform = Platform(gateway.url)
        try:
            await platform.record([tagged("r1", "a", "b&c"), tagged("r2", "a"), tagged("r3")])
            asked = {"tag": ["a", "b&c"], "loop": None}
            assert [run.id async for run in platform.runs(page=1, **asked)] == ["r1"]
            assert [row["id"] async for row in platform.summaries(**asked)] == ["r1"]
            assert {run.id async for run in platform.runs(page=1, tag="a")} == {"r1", "r2"}
        finally:
            await platform.close()


async def test_a_job_is_submitted_as_it_was_asked_for(tmp_path: Path) -> None:
    async with served(tmp_path) as gateway:
        gateway.services.home.dataset("ds-1").mkdir(parents=True)
        platform = Platform(gateway.url)
        try:
            await platform.submit_job(
                dataset="ds-1",
                parent="calc@1",
                hyperparameters=Hyperparameters(steps=1),
                evaluate_every=5,
                logprob_limit=0.25,
            )
        finally:
            await platform.close()
        trainer = gateway.services.trainer
        assert isinstance(trainer, ScriptedTrainer)
        spec = trainer.submitted[-1]
        assert (spec.evaluate_every, spec.logprob_limit) == (5, 0.25)
