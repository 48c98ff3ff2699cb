"""grpo, dpo and kto as a user has them: real vLLM, gateway, store, datasets, Slurm and Megatron.

An agent runs at temperature 1, its runs are scored, three training sets and three jobs are made of
them over HTTP, and the checkpoints are loaded into the pool. One platform for all of it.
"""

import asyncio
import json
import math
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

import pytest

from cray_agents import Agent, Task
from cray_agents.config import load_config
from cray_agents.loop.rollouts import RolloutRequest, Rollouts
from cray_agents.loop.version_gate import VersionGate
from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.records import ProbeReport, Run
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.server.platform_process import client, fetch, serving
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model
from cray_agents.training import Hyperparameters
from cray_agents.training_jobs import JobStatus, Layout, Lora, MethodName, Policy
from tests.support.command_line import cli

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.slurm,
    pytest.mark.megatron,
    pytest.mark.usefixtures("forked_servers"),
]

TASKS, ATTEMPTS = 8, 6
STEPS = 3
METHODS: tuple[MethodName, ...] = ("grpo", "dpo", "kto")
QUESTIONS = [f"Say something about the number {n * 37}." for n in range(TASKS)]
PEAKED = ModelShape(init_std=0.15)  # so that tokens differ in probability
HYPER = Hyperparameters(steps=STEPS, batch_size=12, learning_rate=5e-4)
JOBS: dict[str, dict[str, Any]] = {
    "grpo": {"hyperparameters": HYPER.model_copy(update={"policy": Policy(kl=0.01)})},
    "dpo": {
        "hyperparameters": HYPER.model_copy(update={"batch_size": 4, "lora": Lora(rank=4)}),
        "layout": Layout(tensor=2, sequence_parallel=True),
    },
    "kto": {"hyperparameters": HYPER, "layout": Layout(data=1)},
}

agent = Agent(name="talker", model="m", instructions="Talk.", max_turns=1, max_tokens=20)


def odd(run: Run) -> float:
    """A reward that splits the runs of a task: 1 for an answer of odd length."""
    return float(len(run.output or "") % 2)


@dataclass
class Site:
    """A running platform, and what came of the jobs that were submitted to it."""

    home: Home
    info: dict[str, Any]
    runs: list[Run] = field(default_factory=list)
    datasets: dict[str, dict[str, Any]] = field(default_factory=dict)
    jobs: dict[str, JobStatus] = field(default_factory=dict)

    async def train(self) -> None:
        """Run the agent, build a dataset for each method, train on each."""
        platform = client(self.info)
        try:
            version = await platform.promoted("m")
            assert version is not None
            wanted = [
                RolloutRequest(Task(input=question), "g1", attempt, iteration=1)
                for question in QUESTIONS
                for attempt in range(ATTEMPTS)
            ]
            rollouts = Rollouts(
                platform, VersionGate(platform), agent, "talk", [odd], concurrency=16
            )
            self.runs = await rollouts.run(wanted, version, 1.0, lambda done: None)
            even = {run.id: 1 - odd(run) for run in self.runs}
            for method in METHODS:
                recipe = DatasetRecipe(
                    method=method, loop="talk", rewards=even if method == "kto" else None
                )
                self.datasets[method] = await platform.build_dataset(recipe)
                self.jobs[method] = await platform.submit_job(
                    dataset=self.datasets[method]["id"],
                    parent=version.id,
                    method=method,
                    **JOBS[method],
                )
            for method in METHODS:
                job = self.jobs[method]
                self.jobs[method] = await platform.wait_for(job, lambda status: None)
        finally:
            await platform.close()

    async def load(self, method: str) -> tuple[ProbeReport, Run]:
        """Register a job's checkpoint, load it into the pool, and let it answer."""
        platform = client(self.info)
        try:
            version = await platform.register("m", self.jobs[method].checkpoint or "")
            proof = await platform.stage(version, force=True)
            run = await agent.override(model=version.id, engine=platform.engine()).run("Hello")
            return proof, run
        finally:
            await platform.close()

    def events(self, method: str, kind: str) -> list[dict[str, Any]]:
        data = fetch(self.info, f"/v1/jobs/{self.jobs[method].id}/events")["data"]
        return [event for event in data if event["event"] == kind]


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    folder = tmp_path_factory.mktemp("training")
    make_seed_model(folder / "model", seed=0, corpus=QUESTIONS, shape=PEAKED)
    config = load_config({"home": folder / "home"})
    with serving(config, model=folder / "model", name="m") as info:
        site = Site(config.root, info)
        asyncio.run(site.train())
        yield site


def test_the_runs_are_stored_with_what_was_sampled(site: Site) -> None:
    assert len(site.runs) == TASKS * ATTEMPTS
    assert {run.reward for run in site.runs} == {0.0, 1.0}
    assert site.datasets["grpo"]["considered_runs"] == TASKS * ATTEMPTS
    assert all(dataset["samples"] > 0 for dataset in site.datasets.values())
    assert {site.datasets[method]["method"] for method in METHODS} == set(METHODS)
    for job in site.jobs.values():
        assert (job.state, job.step, job.attempts) == ("succeeded", STEPS, 1)
        assert job.scheduler == ("local" if missing_programs() else "slurm")


@pytest.mark.parametrize("method", METHODS)
def test_engine_and_trainer_agree(site: Site, method: str) -> None:
    sampled = [value for run in site.runs for call in run.calls for value in call.logprobs]
    assert max(sampled) - min(sampled) > 3  # of a model that has preferences, it is not easy
    [found] = site.events(method, "agreement")
    assert found["max_difference"] < 1e-3 < found["limit"]
    assert found["tokens"] == site.datasets[method]["trained_tokens"]
    assert found["run_id"] in {run.id for run in site.runs}


def test_the_first_step_is_of_the_policy_that_sampled(site: Site) -> None:
    """Where nothing is learnt yet, theory knows what the numbers are."""
    first = {method: site.events(method, "step")[0] for method in METHODS}
    assert first["grpo"]["ratio"] == pytest.approx(1, abs=1e-4)
    assert first["grpo"]["engine_ratio"] == pytest.approx(1, abs=1e-3)
    assert first["grpo"]["kl"] == pytest.approx(0, abs=1e-6)
    assert first["grpo"]["clip_fraction"] == 0
    assert 0 < first["grpo"]["entropy"] < math.log(PEAKED.vocabulary)
    assert first["dpo"]["loss"] == pytest.approx(math.log(2), abs=1e-4)
    assert first["kto"]["loss"] == pytest.approx(0.5, abs=1e-4)
    for method in METHODS:
        steps = site.events(method, "step")
        assert [event["step"] for event in steps] == list(range(1, STEPS + 1))
        assert all(event["grad_norm"] > 0 for event in steps)
    assert site.events("grpo", "step")[-1]["kl"] > 1e-6


@pytest.mark.parametrize("method", METHODS)
def test_checkpoints_are_proven_in_the_pool_and_answer(site: Site, method: str) -> None:
    proof, run = asyncio.run(site.load(method))
    assert proof.passed and proof.prompts > 0 and proof.max_logprob_diff < 1e-3
    assert run.error is None and run.model == proof.version


def test_an_adapter_is_a_version_without_weights(site: Site) -> None:
    checkpoints = {m: site.home.checkpoint(job.checkpoint or "") for m, job in site.jobs.items()}
    there = {m: (path / "adapter").is_dir() for m, path in checkpoints.items()}
    assert there == {"grpo": False, "dpo": True, "kto": False}
    whole = {m: (path / "model.safetensors").is_file() for m, path in checkpoints.items()}
    assert whole == {"grpo": True, "dpo": False, "kto": True}
    config = json.loads((checkpoints["dpo"] / "adapter" / "adapter_config.json").read_text())
    assert (config["r"], config["peft_type"]) == (4, "LORA")


@pytest.mark.parametrize("method", METHODS)
def test_the_command_line_tells_of_them(site: Site, method: str) -> None:
    def jobs(*words: str) -> str:
        done = cli("jobs", *words, "--home", site.home.root, cwd=site.home.root)
        assert done.returncode == 0, done.stderr
        return done.stdout

    name = site.jobs[method].id
    page = jobs("show", name)
    assert "succeeded" in page and method in page and "log-probabilities differ" in page
    told = jobs("logs", name)
    assert f"step {STEPS}/{STEPS}" in told and f"succeeded: checkpoint {name}" in told
    losses = [event["loss"] for event in site.events(method, "step")]
    assert f"{losses[0]:.4f} → {losses[-1]:.4f}" in page
