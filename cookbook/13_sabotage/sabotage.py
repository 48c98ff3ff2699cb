"""13: twelve failures that training tools tend to keep quiet about, made on purpose, and caught.

    python cookbook/13_sabotage/sabotage.py [--only NAME ...]

A tiny model learns to use a calculator, in seconds. Then each failure is switched on in turn:
either in what a user gives (data, rewards, a chat template), or inside the platform's processes,
where sitecustomize.py breaks one function. A line says what caught it, after how many seconds, and
with which message; the exit code is 1 if one went through. Two minutes on two cores.
"""

import argparse
import asyncio
import json
import logging
import os
import shutil
import sys
import textwrap
import time
from collections.abc import Awaitable, Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from cray_agents import (
    GRPO,
    Agent,
    Loop,
    Message,
    Platform,
    Run,
    Task,
    TaskSet,
    local_platform,
    reward,
)
from cray_agents.testing import make_tiny_model
from cray_agents.tools.calculator import calculator
from cray_agents.training import DatasetRecipe, Hyperparameters, Lora, ModelVersion

HERE = Path(__file__).parent
THOUGHT = "<think>a job for the calculator</think>"

agent = Agent(
    name="calculator",
    model="calc",
    instructions="Use the calculator. Answer with the number.",
    tools=[calculator],
    max_turns=2,
    max_tokens=60,
    temperature=0.0,
)


def question(n: int) -> Task:
    """Return a task; every fourth one is held out."""
    a, b, operator = n, 7 * n % 90 + 10, "+-*"[n % 3]
    split = "holdout" if n % 4 == 0 else "train"
    answer = {"+": a + b, "-": a - b, "*": a * b}[operator]
    return Task(input=f"What is {a} {operator} {b}?", target=str(answer), split=split)


TASKS = TaskSet([question(n) for n in range(10, 58)])


def demonstration(task: Task) -> list[Message]:
    """Return the conversation of a perfect agent, which thinks before it calls."""
    expression = task.input.removeprefix("What is ").removesuffix("?")
    call = {"name": "calculator", "arguments": json.dumps({"expression": expression})}
    tool_call = {"id": "0", "type": "function", "function": call}
    return [
        {"role": "system", "content": agent.instructions},
        {"role": "user", "content": task.input},
        {"role": "assistant", "content": THOUGHT, "tool_calls": [tool_call]},
        {"role": "tool", "tool_call_id": "0", "content": str(task.target)},
        {"role": "assistant", "content": str(task.target)},
    ]


SHOWN = [demonstration(task) for task in TASKS.split("train")]


@reward
def right(run: Run) -> float:
    """Tell whether the answer is the target."""
    return float(run.output == run.target)


class WentThroughError(Exception):
    """Nothing noticed the failure."""


@dataclass
class Site:
    """A platform, the version of the model that learnt its task, and that version's dataset."""

    platform: Platform
    home: Path
    warm: ModelVersion
    dataset: str

    @contextmanager
    def broken(self, name: str) -> Iterator[None]:
        """Switch a failure of sitecustomize.py on for the block."""
        switch = self.home / "sabotage" / "switch"
        switch.write_text(name)
        try:
            yield
        finally:
            switch.unlink()

    async def build(self, shown: Sequence[list[Message]], **recipe: Any) -> dict[str, Any]:
        """Build a training set of demonstrations; return its id and counts."""
        given = {"tokenizer": "calc", "tools": agent.tool_schemas} | recipe
        return await self.platform.build_dataset(DatasetRecipe(demonstrations=list(shown), **given))

    async def train(self, parent: ModelVersion, seed: int, **more: Any) -> ModelVersion:
        """Train a version for some steps. Raises with the job's error."""
        hyper = Hyperparameters(steps=4, learning_rate=5e-3, seed=seed, lora=more.pop("lora", None))
        job = await self.platform.submit_job(
            **{"dataset": self.dataset, "parent": parent.id, "hyperparameters": hyper} | more
        )
        job = await self.platform.wait_for(job, on_progress=lambda status: None)
        return await self.platform.register(parent.name, str(job.checkpoint))

    async def run(self, version: ModelVersion, tasks: Sequence[Task], **labels: Any) -> list[Run]:
        """Run the agent on each task, under a version that serves."""
        able = agent.override(engine=self.platform.engine(), model=version.id)
        return await asyncio.gather(*(able.run(task, **labels) for task in tasks))


# ---- inside the platform's processes
async def tied(site: Site) -> str:
    """Weights are reloaded, and the tied output layer keeps the old ones."""
    version = await site.train(site.warm, seed=1)
    with site.broken("tied"):
        async with site.platform.staged(version, holder="sabotage") as proof:
            return proof.load_note  # the fresh process that follows is proven, too


async def adapter(site: Site) -> str:
    """A LoRA adapter is loaded, and nothing of it is applied."""
    version = await site.train(site.warm, seed=2, lora=Lora(rank=4))
    with site.broken("adapter"):
        return await refusal(site.platform.stage(version))


async def nan(site: Site) -> str:
    """A loss is not a number from the third step on."""
    with site.broken("nan"):
        return await refusal(site.train(site.warm, seed=3))


async def rate(site: Site) -> str:
    """A job is paused and resumed, and its learning rate begins anew."""
    hyper = Hyperparameters(steps=400, learning_rate=1e-3, warmup_steps=200)
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
        return await refusal(site.platform.wait_for(job, on_progress=lambda status: None))


async def reference(site: Site) -> str:
    """A reference's weights are not loaded: the policy is compared with itself."""
    policy = await site.train(site.warm, seed=4)
    worse = [{"role": "assistant", "content": "no"}] * len(SHOWN)
    pairs = await site.build(SHOWN, method="dpo", demonstrations_rejected=worse)
    job = {"method": "dpo", "dataset": pairs["id"], "reference": site.warm.id}
    with site.broken("reference"):
        return await refusal(site.train(policy, seed=5, **job))


async def parser(site: Site) -> str:
    """The server's parser of tool calls never finds one."""
    with site.broken("parser"), captured_warnings() as warnings:
        await site.run(site.warm, TASKS.split("train")[:8])
    return "; ".join(warnings)


# ---- in what a user gives
async def tokenizer(site: Site) -> str:
    """Training data is tokenised by another model's tokenizer."""
    other = [[{"role": "user", "content": "zyx wvu tsr"}, *talk] for talk in SHOWN]
    folder = make_tiny_model(site.home / "other", [(talk, {}) for talk in other], seed=9)
    version = await site.platform.register("other", str(folder))
    made = await site.build(SHOWN, tokenizer=version.id)
    return await refusal(site.train(site.warm, seed=6, dataset=made["id"]))


async def template(site: Site) -> str:
    """A chat template strips what the model thought from its earlier turns."""
    checkpoint = site.home / "checkpoints" / site.warm.checkpoint
    folder = site.home / "stripping"
    folder.mkdir()
    for file in checkpoint.iterdir():
        if file.is_file() and file.name != "manifest.json":
            shutil.copy(file, folder)
    text = (folder / "chat_template.jinja").read_text()
    text = text.replace("(message.content or '')", "(message.content or '').split('</think>')[-1]")
    (folder / "chat_template.jinja").write_text(text)
    version = await site.platform.register("stripping", str(folder))
    async with site.platform.staged(version, holder="sabotage"):
        for run in await site.run(version, TASKS.split("train"), loop="stripping"):
            await site.platform.reward(run.id, right(run), name="right", who="recipe 13")
    made = await site.platform.build_dataset(DatasetRecipe(loop="stripping"))
    if not made["split_runs"]:
        return ""
    return f"{made['split_runs']} of {made['accepted_runs']} runs are several sequences"


async def equal(site: Site) -> str:
    """All attempts at a task get the same reward, so there is nothing to compare."""

    @reward
    def generous(run: Run) -> float:
        """Return 1 for anything."""
        return 1.0

    return await site_loop(site, "equal", generous)


async def raising(site: Site) -> str:
    """A reward function fails."""

    @reward
    def careless(run: Run) -> float:
        """Read what is not there."""
        return float(run.task.metadata["score"])  # type: ignore[union-attr]

    return await site_loop(site, "raising", careless)


async def leak(site: Site) -> str:
    """Demonstrations hold questions that measure the model."""
    await site.run(site.warm, TASKS.split("holdout")[:6])
    leaked = [demonstration(task) for task in TASKS.split("holdout")[:6]]
    return left_out(await site.build([*SHOWN, *leaked]))


async def doubled(site: Site) -> str:
    """Data is given twice."""
    return left_out(await site.build([*SHOWN, *SHOWN]))


# ---- how the failures are watched
async def refusal(work: Awaitable[Any]) -> str:
    """Return the message of what refuses the work, or "" if nothing does."""
    try:
        await work
    except Exception as error:  # noqa: BLE001  (its message is what a user sees)
        return f"{type(error).__name__}: {error}"
    return ""


async def site_loop(site: Site, name: str, judged: Any) -> str:
    """Run a GRPO loop with a reward; return the message that ends it."""
    loop = Loop(
        agent.override(temperature=1.0),
        TASKS,
        rewards=[judged],
        method=GRPO(group_size=4, tasks_per_iteration=4),
        name=name,
        platform=site.platform,
    )
    try:
        async for generation in loop.run(2):
            if generation.promoted and generation.generation:
                raise WentThroughError(f"{generation.version} was promoted")
    except WentThroughError:
        raise
    except Exception as error:  # noqa: BLE001
        return f"{type(error).__name__}: {error}"
    return ""


def left_out(made: dict[str, Any]) -> str:
    """Say what a training set left out."""
    counts = made["rejected_demonstrations"]
    return "left out: " + ", ".join(f"{n} {why}" for why, n in counts.items()) if counts else ""


@contextmanager
def captured_warnings() -> Iterator[list[str]]:
    """Yield the list of the warnings that are logged in the block."""
    messages: list[str] = []
    handler = logging.Handler(logging.WARNING)
    handler.emit = lambda record: messages.append(record.getMessage())  # type: ignore[method-assign]
    logging.getLogger("cray_agents").addHandler(handler)
    try:
        yield messages
    finally:
        logging.getLogger("cray_agents").removeHandler(handler)


FAILURES: dict[str, tuple[Callable[[Site], Awaitable[str]], str, str]] = {
    # name: (what makes it, what catches it, in which words)
    "tied": (tied, "golden probe at the reload", "logprobs on the probe"),
    "adapter": (adapter, "golden probe of the adapter", "logprobs on the probe"),
    "tokenizer": (tokenizer, "check of a job's inputs", "tokenizer"),
    "template": (template, "count of split runs", "several sequences"),
    "equal": (equal, "loop, after two generations", "zero_variance"),
    "raising": (raising, "loop, after two generations", "reward_error"),
    "parser": (parser, "agent's count of missed calls", "were not understood"),
    "nan": (nan, "trainer, at that step", "the loss is nan"),
    "rate": (rate, "trainer, at the resume", "after the resume the schedule"),
    "leak": (leak, "decontamination", "contaminated"),
    "doubled": (doubled, "dataset build", "duplicate"),
    "reference": (reference, "golden probe of the reference", "not those of the reference"),
}


async def main(names: Sequence[str]) -> int:
    """Warm a model up, then make each failure; return how many went through."""
    home = (Path(".cray-agents") / "cookbook-13").absolute()
    shutil.rmtree(home, ignore_errors=True)  # an earlier start's
    (home / "sabotage").mkdir(parents=True)
    shutil.copy(HERE / "sitecustomize.py", home / "sabotage")
    os.environ["PYTHONPATH"] = str(home / "sabotage")  # of the platform, of vLLM and of jobs
    os.environ["CRAY_AGENTS_MAX_LORA_RANK"] = "8"
    model = make_tiny_model(
        home / "model", [(talk, {}) for talk in SHOWN], tools=agent.tool_schemas
    )
    tie_embeddings(model)
    through = 0
    with local_platform(home, model=model, name="calc") as platform:
        site = Site(platform, home, await platform.version("calc@1"), "")
        site.dataset = (await site.build(SHOWN))["id"]
        learn = Hyperparameters(steps=80, learning_rate=3e-3, warmup_steps=5)
        site.warm = await site.train(site.warm, seed=0, hyperparameters=learn)
        async with platform.staged(site.warm, holder="sabotage"):
            await platform.promote(site.warm, who="recipe 13", reason="it was shown what to do")
        for name in names:
            make, catcher, words = FAILURES[name]
            began = time.monotonic()
            message = await make(site)
            caught = words in message
            through += not caught
            seconds = f"{time.monotonic() - began:.1f} s"
            print(f"{name:<10} {seconds:>7}  {catcher if caught else 'WENT THROUGH'}", flush=True)
            print(textwrap.indent(textwrap.shorten(message, 300), "           "), flush=True)
        await platform.close()
    print(f"{len(names) - through} of {len(names)} caught")
    return through


def tie_embeddings(model: Path) -> None:
    """Let a model's output layer be its embedding, as in most small models."""
    from safetensors.torch import load_file, save_file

    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"tie_word_embeddings": True}))
    weights = load_file(model / "model.safetensors")
    del weights["lm_head.weight"]
    save_file(weights, model / "model.safetensors", metadata={"format": "pt"})


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--only", nargs="+", choices=list(FAILURES), default=list(FAILURES))
    sys.exit(min(1, asyncio.run(main(arguments.parse_args().only))))
