"""Failures inside vLLM and the trainer that no loss shows: each is made, and caught.

tests/support/sabotage/sitecustomize.py breaks one function in the platform's processes while a file
names it.
"""

import asyncio
import json
import logging
import shutil
from collections.abc import Awaitable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from cray_agents import Agent, Message, Platform, Task, local_platform
from cray_agents.testing import make_tiny_model
from cray_agents.tools.calculator import calculator
from cray_agents.training import DatasetRecipe, Hyperparameters, Lora, ModelVersion

pytestmark = [pytest.mark.vllm, pytest.mark.megatron, pytest.mark.timeout(1800)]

BREAKER = Path(__file__).parent / "support" / "sabotage" / "sitecustomize.py"
TASKS = [Task(input=f"What is {n} + {7 * n % 90 + 10}?", target=str(n + 7 * n % 90 + 10))
         for n in range(10, 46)]  # fmt: skip

agent = Agent(
    name="calculator",
    model="calc",
    instructions="Use the calculator. Answer with the number.",
    tools=[calculator],
    max_turns=2,
    max_tokens=60,
    temperature=0.0,
)


def demonstration(task: Task) -> list[Message]:
    expression = task.input.removeprefix("What is ").removesuffix("?")
    call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    tool_call = {"id": "0", "type": "function", "function": call}
    return [
        {"role": "system", "content": agent.instructions},
        {"role": "user", "content": task.input},
        {"role": "assistant", "content": "", "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": "0", "content": str(task.target)},
        {"role": "assistant", "content": str(task.target)},
    ]


SHOWN = [demonstration(task) for task in TASKS]


@dataclass
class Site:
    """A platform, the version that learnt its task, and that version's dataset."""

    platform: Platform
    switch: Path
    warm: ModelVersion
    dataset: str = ""

    @contextmanager
    def broken(self, name: str) -> Iterator[None]:
        self.switch.write_text(name)
        try:
            yield
        finally:
            self.switch.unlink()

    async def build(self, **recipe: Any) -> str:
        given = {"tokenizer": "calc", "tools": agent.tool_schemas} | recipe
        made = await self.platform.build_dataset(DatasetRecipe(demonstrations=SHOWN, **given))
        return str(made["id"])

    async def train(self, parent: ModelVersion, seed: int, **more: Any) -> ModelVersion:
        hyper = Hyperparameters(steps=4, learning_rate=5e-3, seed=seed, lora=more.pop("lora", None))
        given: dict[str, Any] = {"dataset": self.dataset, "hyperparameters": hyper}
        job = await self.platform.submit_job(parent=parent.id, **given | more)
        job = await self.platform.wait_for(job, on_progress=lambda status: None)
        return await self.platform.register(parent.name, str(job.checkpoint))


async def refusal(work: Awaitable[Any]) -> str:
    """Return the message of what refuses the work; "" if nothing does."""
    try:
        await work
    except Exception as error:  # noqa: BLE001  (its message is what a user sees)
        return f"{type(error).__name__}: {error}"
    return ""


async def tied(site: Site) -> None:
    """Weights are reloaded, and the tied output layer keeps the old ones."""
    version = await site.train(site.warm, seed=1)
    with site.broken("tied"):
        async with site.platform.staged(version, holder="sabotage") as proof:
            # the fresh process that follows is checked, too
            assert "logprobs on the probe" in proof.load_note


async def adapter(site: Site) -> None:
    """A LoRA adapter is loaded, and nothing of it is applied."""
    whole = await site.train(site.warm, seed=6, lora=Lora(rank=4))
    async with site.platform.staged(whole, holder="sabotage"):
        pass  # what is not broken is not refused
    version = await site.train(site.warm, seed=2, lora=Lora(rank=4))
    with site.broken("adapter"):
        assert "logprobs on the probe" in await refusal(site.platform.stage(version))


async def rate(site: Site) -> None:
    """A job is paused and resumed, and its learning rate begins anew."""
    hyper = Hyperparameters(steps=4000, learning_rate=1e-3, warmup_steps=200)  # never done
    job = await site.platform.submit_job(
        dataset=site.dataset, parent=site.warm.id, hyperparameters=hyper
    )
    while job.step < 2:
        job = await site.platform.job(job.id)
    await site.platform.pause_job(job.id)
    while job.state != "paused":
        job = await site.platform.job(job.id)
    with site.broken("rate"):
        job = await site.platform.resume_job(job.id)
        said = await refusal(site.platform.wait_for(job, on_progress=lambda status: None))
    assert "after the resume the schedule" in said


async def reference(site: Site) -> None:
    """A reference's weights are not loaded: the policy is compared with itself."""
    policy = await site.train(site.warm, seed=4)
    worse = [{"role": "assistant", "content": "no"}] * len(SHOWN)
    pairs = await site.build(method="dpo", demonstrations_rejected=worse)
    job = {"method": "dpo", "dataset": pairs, "reference": site.warm.id}
    with site.broken("reference"):
        said = await refusal(site.train(policy, seed=5, **job))
    assert "not those of the reference" in said


def tie_embeddings(model: Path) -> None:
    """Let a model's output layer be its embedding, as in most small models."""
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


def test_failures_that_no_loss_shows_are_caught(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    breaker = tmp_path / "sabotage"
    breaker.mkdir()
    shutil.copy(BREAKER, breaker)
    monkeypatch.setenv("PYTHONPATH", str(breaker))  # of the platform, of vLLM and of jobs
    monkeypatch.setenv("CRAY_AGENTS_MAX_LORA_RANK", "8")
    words = [(talk, {}) for talk in SHOWN]
    model = make_tiny_model(tmp_path / "model", words, tools=agent.tool_schemas)
    tie_embeddings(model)

    async def sabotage(platform: Platform) -> None:
        site = Site(platform, breaker / "switch", await platform.version("calc@1"))
        site.dataset = await site.build()
        learn = Hyperparameters(steps=80, learning_rate=3e-3, warmup_steps=5)
        site.warm = await site.train(site.warm, seed=0, hyperparameters=learn)
        async with platform.staged(site.warm, holder="sabotage"):
            await platform.promote(site.warm, who="test", reason="it was shown what to do")
        for make in (tied, adapter, rate, reference):
            await make(site)
        able = agent.override(engine=platform.engine(), model=site.warm.id)
        caplog.set_level(logging.WARNING, "cray_agents")
        with site.broken("parser"):  # the server's parser of tool calls never finds one
            await asyncio.gather(*(able.run(task) for task in TASKS[:8]))
        assert "were not understood" in caplog.text
        await platform.close()

    with local_platform(tmp_path / "home", model=model, name="calc") as platform:
        asyncio.run(sabotage(platform))
