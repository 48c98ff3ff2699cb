"""Damaged candidates on a real vLLM: never promoted, while one that is better is.

Targets are the first words of an undamaged model. The incumbent is a little noisy, so it can be
improved on. The loop's jobs give, in turn: more noise, weights that learnt wrong labels, and noise
that came after the golden probe; the last one gives the undamaged model back. CRAY_TEST_TRIES: how
many damaged ones (`make soak`; the third kind is also in runtime/test_vllm.py, as a wrong probe).
"""

import asyncio
import os
import random
import shutil
from collections.abc import AsyncIterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio
import torch
from safetensors.torch import load_file, save_file
from transformers import AutoModelForCausalLM, AutoTokenizer

from cray_agents import RFT, Agent, Loop, Run, Sampling, Task, TaskSet, Training, reward
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.queries import RunQuery
from cray_agents.runtime.disk import durable
from cray_agents.runtime.pool.vllm_process import EngineSettings, VllmProcess
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.checkpoints import hash_files
from cray_agents.trainers.models.seed_model import ModelShape, make_seed_model
from cray_agents.training_commands import CommandResult, TrainingCommand
from cray_agents.training_jobs import JobSpec, JobStatus
from tests.support.scripted_gateway import Gateway, served
from tests.support.scripted_trainer import ScriptedTrainer
from tests.support.vllm_pool import golden_probe

pytestmark = [
    pytest.mark.vllm,
    pytest.mark.asyncio(loop_scope="module"),
    pytest.mark.usefixtures("forked_servers"),
]

TRIES = int(os.environ.get("CRAY_TEST_TRIES", "2"))
DAMAGES = ("noise", "wrong labels", "late noise")
PEAKED = ModelShape(init_std=0.15)  # so that it prefers some tokens
WORDS = 4  # tokens of an answer
NOISY = 0.03  # of the incumbent, as a share of each tensor's own spread
QUESTIONS = [f"What about {n * 37}?" for n in range(160)]

agent = Agent(name="talker", model="calc", instructions="Talk.", max_turns=1, max_tokens=WORDS)


@reward
def as_before(run: Run) -> float:
    """Whether it says what the undamaged model says."""
    return float(run.task is not None and run.output == run.task.target)


def weights_of(model: Path) -> dict[str, torch.Tensor]:
    return load_file(model / "model.safetensors")


def noisy(weights: dict[str, torch.Tensor], share: float, seed: int) -> dict[str, torch.Tensor]:
    drawn = torch.Generator().manual_seed(seed)
    return {
        name: value + share * value.std() * torch.randn(value.shape, generator=drawn)
        for name, value in weights.items()
    }


def mistaught(model: Path, tasks: TaskSet, seed: int) -> dict[str, torch.Tensor]:
    """The weights after some steps on questions with the answers of others."""
    torch.manual_seed(seed)
    tokenizer: Any = AutoTokenizer.from_pretrained(model)
    taught: Any = AutoModelForCausalLM.from_pretrained(model, dtype=torch.float32)
    answers = [str(task.target) for task in tasks]
    random.Random(seed).shuffle(answers)
    optimizer = torch.optim.AdamW(taught.parameters(), lr=1e-3)
    for step in range(8):
        taught.zero_grad()
        for task, answer in list(zip(tasks, answers, strict=True))[step::8][:8]:
            asked = [
                {"role": "system", "content": "Talk."},
                {"role": "user", "content": task.input},
                {"role": "assistant", "content": answer},
            ]
            ids = tokenizer.apply_chat_template(asked, return_tensors="pt", return_dict=False)
            taught(ids, labels=ids).loss.backward()
        optimizer.step()
    return {name: value.detach().contiguous() for name, value in taught.state_dict().items()}


@dataclass
class Damaging:
    """A ports.Trainer: what it publishes is damaged, but for the job `good`."""

    home: Home
    model: Path
    tasks: TaskSet
    good: int
    jobs: list[str] = field(default_factory=list)

    def __post_init__(self) -> None:
        self.scripted = ScriptedTrainer(self.home)
        self.dtype = self.scripted.dtype
        self.microbatch = self.scripted.microbatch

    def submit(self, spec: JobSpec) -> JobStatus:
        status = self.scripted.submit(spec)
        if spec.id not in self.jobs:
            self._publish(self.home.checkpoint(spec.id), len(self.jobs))
            self.jobs.append(spec.id)
        return status

    def status(self, job_id: str) -> JobStatus:
        return self.scripted.status(job_id)

    def unchanged(self) -> set[str]:
        return self.scripted.unchanged()

    def cancel(self, job_id: str) -> JobStatus:
        return self.scripted.cancel(job_id)

    def pause(self, job_id: str) -> JobStatus:
        return self.scripted.pause(job_id)

    def resume(self, job_id: str) -> JobStatus:
        return self.scripted.resume(job_id)

    def command(self, job_id: str, sequence: int, command: TrainingCommand) -> None:
        self.scripted.command(job_id, sequence, command)

    def last_command(self, job_id: str) -> int:
        return self.scripted.last_command(job_id)

    def result(self, job_id: str, sequence: int) -> CommandResult | None:
        return self.scripted.result(job_id, sequence)

    def _publish(self, folder: Path, number: int) -> None:
        damage = DAMAGES[number % len(DAMAGES)] if number != self.good else None
        weights, probe = weights_of(folder), None
        if damage is None:
            weights = weights_of(self.model)
        elif damage == "wrong labels":
            weights = mistaught(folder, self.tasks, number)
        else:
            probe = golden_probe(folder) if damage == "late noise" else None
            weights = noisy(weights, random.Random(number).uniform(0.05, 0.2), number)
        save_file(weights, folder / "model.safetensors", metadata={"format": "pt"})
        files = hash_files(folder)
        manifest = checkpoints.read_manifest(folder).model_copy(
            update={
                "files": files,
                "weights_sha256": checkpoints.weights_sha256(files),
                "probe": probe or golden_probe(folder),
            }
        )
        durable.replace_file(folder / "manifest.json", manifest.model_dump_json().encode())


@dataclass
class Site:
    """A gateway on a real vLLM, whose calc@2, the incumbent, is a little noisy."""

    gateway: Gateway
    tasks: TaskSet


@pytest_asyncio.fixture(scope="module", loop_scope="module")
async def site(tmp_path_factory: pytest.TempPathFactory) -> AsyncIterator[Site]:
    folder = tmp_path_factory.mktemp("damaged")
    make_seed_model(folder / "model", seed=0, corpus=QUESTIONS, shape=PEAKED)
    tasks = TaskSet([Task(input=text, split="train") for text in QUESTIONS])
    host = VllmProcess("calc", EngineSettings(kv_cache_gib=0.125), folder / "replica.log")

    def trainer(home: Home) -> Damaging:
        return Damaging(home, folder / "model", tasks, TRIES)

    async with served(folder, host=host, model=folder / "model", trainer=trainer) as gateway:
        engine = Platform(gateway.url).engine()
        told = agent.override(engine=engine, temperature=0.0)
        runs = await asyncio.gather(*(told.run(text) for text in QUESTIONS))
        tasks = TaskSet(
            Task(input=text, target=run.output, split="train" if n < 60 else "holdout")
            for n, (text, run) in enumerate(zip(QUESTIONS, runs, strict=True))
        )
        gateway.services.trainer.tasks = tasks  # type: ignore[attr-defined]
        incumbent = folder / "incumbent"
        shutil.copytree(folder / "model", incumbent)
        weights = noisy(weights_of(incumbent), NOISY, seed=1)
        save_file(weights, incumbent / "model.safetensors", metadata={"format": "pt"})
        await gateway.call("POST", "/v1/models/calc/versions", json={"checkpoint": str(incumbent)})
        await gateway.call("POST", "/v1/models/calc/promote", json={"version": 2})
        yield Site(gateway, tasks)


@pytest.mark.timeout(120 + 60 * TRIES)
async def test_what_is_damaged_is_never_promoted_and_what_is_better_is(site: Site) -> None:
    platform = Platform(site.gateway.url)
    loop = Loop(
        agent,
        site.tasks,
        rewards=[as_before],
        method=RFT(tasks_per_iteration=24, training=Training(learning_rate=1e-3, steps=1)),
        sampling=Sampling(temperature=0.3),
        name="damaged",
        platform=platform,
    )
    start, *damaged, good = [done async for done in loop.run(TRIES + 1)]
    assert 0.2 < start.holdout_success < 0.9  # it can get worse, and better
    for number, iteration in enumerate(damaged):
        assert not iteration.promoted
        unproven = DAMAGES[number % 3] == "late noise"
        assert ("logprobs on the probe" in iteration.note) == unproven
        assert ("rejected" in iteration.note) == (not unproven)
    assert good.promoted and good.holdout_success > 0.95
    history = (await site.gateway.call("GET", "/v1/models/calc/history"))[1]["data"]
    assert [event["version"] for event in history if event["kind"] == "promoted"][2:] == [
        int(good.version.partition("@")[2])
    ]


async def test_a_rollback_is_served_by_the_process_that_is_there(site: Site) -> None:
    gateway, changes = site.gateway, "/v1/models/calc"
    await gateway.call("POST", f"{changes}/promote", json={"version": 1})
    asked: dict[str, Any] = {"temperature": 0, "max_tokens": WORDS}
    told = [{"role": "system", "content": "Talk."}]
    found = gateway.store.stream(RunQuery(split="holdout"))
    bad = next(run for run in found if run.model == "calc@2" and run.reward == 0)
    told.append({"role": "user", "content": bad.input})
    assert bad.task is not None and (await gateway.ask(told, **asked)).text == bad.task.target
    pid = gateway.pool.status()[0]["pid"]
    body = {"to": 2, "who": "me", "reason": "complaints"}
    status, event = await gateway.call("POST", f"{changes}/rollback", json=body)
    assert (status, event["kind"], event["version"]) == (200, "rolled_back", 2)
    reply = await gateway.ask(told, **asked)
    assert (reply.json["model"], reply.text) == ("calc@2", bad.output)
    assert gateway.pool.status()[0]["pid"] == pid  # nothing was started: it took what loading takes
