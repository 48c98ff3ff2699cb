"""A process that lets one side learn the calculator task, or makes the checkpoint they begin with.

`python -m bench.rivals.training_sides SIDE SEED LIMIT FOLDER` writes FOLDER/SIDE.json. SIDE
is `start` (seed model and warm-up, as the demo's GRPO has them), `grpo` or `rft` (our loop),
`trl` (TRL's GRPOTrainer with the calculator among its `tools`), `skyrl` (SkyRL's server with
tinker-cookbook's loop). All begin with FOLDER/start, have the same training tasks, and end at the
demo's target or after LIMIT seconds. Called by training.py.
"""

import asyncio
import itertools
import json
import os
import shutil
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel

from bench.rivals import held_out, skyrl_side
from bench.rivals.trl_settings import for_cpu, load
from cray_agents.cli import calculator_loop
from cray_agents.config import load_config
from cray_agents.iteration import base_version
from cray_agents.paths import Home
from cray_agents.platform.client import Platform
from cray_agents.server.platform_process import client, serving
from cray_agents.tasks.task_set import TaskSet
from cray_agents.tools.calculator import evaluate

#: TRL's settings: groups of our size, and our clipping. A generation is learned from once.
GROUP, BATCH, STEPS_PER_GENERATION = 8, 128, 4
#: and our two rates. Ours warms up for 4 steps and falls after 48. TRL came to 0.9 (seed 500) after
#: 116 s with these, after 155 s with 4 and 96; with RATE alone it reached 0.92, and fell to 0.76.
RATE, WARM_UP = 2.5e-4, 30
STABLE, FALLING, LAST_RATE = 120, 8, 1.2e-4  # steps, steps, rate


class Point(BaseModel):
    """What a side had reached: `seconds` of its own clock, `tokens` sampled to learn from."""

    seconds: float
    tokens: int
    success: float


class Learned(BaseModel):
    """A side's way. `starting`: seconds before its clock; `evaluating`: on it, by the side."""

    points: list[Point]
    limit: float
    starting: float
    evaluating: float
    load: float


# ---- ours
def start(seed: int, limit: float, folder: Path) -> Learned:
    """Make the checkpoint that all sides begin with, and measure it."""
    loop = calculator_loop.make_loop(seed, method="grpo")
    home, begun = _empty(folder / "start-home"), time.perf_counter()
    calculator_loop.make_model(home / "seed-model", seed)
    config = load_config({"home": home, "port": 0})
    name = loop.agent.model
    with serving(config, model=home / "seed-model", name=name, ready=True) as info:
        loop.platform = client(info)
        calculator_loop.warm_up(loop)
        checkpoint = asyncio.run(_promoted(client(info), name))
    shutil.copytree(Home(home).checkpoint(checkpoint), folder / "start", dirs_exist_ok=True)
    point = Point(seconds=0, tokens=0, success=_success_of(folder / "start", seed))
    seconds = time.perf_counter() - begun
    return Learned(
        points=[point], limit=limit, starting=seconds, evaluating=0, load=os.getloadavg()[0]
    )


def ours(method: Literal["grpo", "rft"], seed: int, limit: float, folder: Path) -> Learned:
    """Run the demo's loop, whose own evaluations are on its clock: they decide.

    It has no test tasks here, which would decide nothing.
    """
    loop = calculator_loop.make_loop(seed, method=method)
    loop = replace(loop, tasks=TaskSet(task for task in loop.tasks if task.split != "test"))
    size, busy, begun = calculator_loop.size_of(method, False), os.getloadavg()[0], time.time()
    config = load_config({"home": _empty(folder / f"{method}-home"), "port": 0})
    name = loop.agent.model
    ends, done = [], []
    with serving(config, model=folder / "start", name=name, ready=True) as info:
        starting = time.time() - begun
        loop.platform = client(info)
        for iteration in loop.run_sync(size.iterations):
            ends.append(time.time() - begun - starting)
            done.append(iteration)
            if ends[-1] > limit:
                break
        checkpoints = asyncio.run(_checkpoints(client(info), name, config.root))
    tokens = itertools.accumulate(iteration.tokens for iteration in done)
    points = [
        Point(
            seconds=seconds,
            tokens=sampled,
            success=_success_of(checkpoints[base_version(done[: number + 1])], seed),
        )
        for number, (seconds, sampled) in enumerate(zip(ends, tokens, strict=True))
    ]
    evaluating = sum(
        seconds
        for iteration in done
        for phase, seconds in iteration.seconds.items()
        if phase.startswith("evaluate")
    )
    return Learned(points=points, limit=limit, starting=starting, evaluating=evaluating, load=busy)


def _empty(home: Path) -> Path:
    """A root without what a killed try left: the loop would go on from there, on a new clock."""
    shutil.rmtree(home, ignore_errors=True)
    return home


async def _promoted(platform: Platform, name: str) -> str:
    try:
        promoted = await platform.promoted(name)
    finally:
        await platform.close()
    assert promoted is not None
    return promoted.checkpoint


async def _checkpoints(platform: Platform, name: str, home: Home) -> dict[str, Path]:
    """The directory of each version."""
    try:
        versions = await platform.versions(name)
    finally:
        await platform.close()
    return {f"{name}@{one['number']}": home.checkpoint(one["checkpoint"]) for one in versions}


def _success_of(checkpoint: Path, seed: int) -> float:
    tasks = list(calculator_loop.make_loop(seed, method="grpo").tasks.split("holdout"))
    return held_out.success(*load(checkpoint), tasks)


# ---- TRL
def trl(seed: int, limit: float, folder: Path) -> Learned:
    """Run TRL's GRPOTrainer; its clock rests while it is measured, after each generation."""
    from transformers import TrainerCallback

    busy, begun = os.getloadavg()[0], time.perf_counter()
    loop = calculator_loop.make_loop(seed, method="grpo")
    network, tokenizer = load(folder / "start")
    trainer = trl_trainer(network, tokenizer, seed, folder / "trl")
    tasks, target = list(loop.tasks.split("holdout")), calculator_loop.FULL_GRPO.target
    assert target is not None
    points = [Point(seconds=0, tokens=0, success=held_out.success(network, tokenizer, tasks))]
    starting = resumed = time.perf_counter()

    class Measured(TrainerCallback):  # type: ignore[misc]
        """Measures after each generation, and ends the training."""

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            nonlocal resumed
            if state.global_step % STEPS_PER_GENERATION:
                return
            seconds = points[-1].seconds + time.perf_counter() - resumed
            reached = held_out.success(network, tokenizer, tasks)
            points.append(Point(seconds=seconds, tokens=trainer.sampled, success=reached))
            print(points[-1], file=sys.stderr, flush=True)
            control.should_training_stop = reached >= target or seconds > limit
            resumed = time.perf_counter()

    trainer.add_callback(Measured())
    trainer.train()
    return Learned(points=points, limit=limit, starting=starting - begun, evaluating=0, load=busy)


def trl_trainer(network: Any, tokenizer: Any, seed: int, folder: Path) -> Any:
    """GRPOTrainer for the calculator task. `sampled` counts the tokens that it has sampled."""
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.chat_template_utils import qwen3_template

    class Counting(GRPOTrainer):  # type: ignore[misc]
        """GRPOTrainer that counts sampled tokens: those of tools' results are none."""

        sampled = 0

        def _generate(self, prompts: Any) -> Any:
            made = super()._generate(prompts)
            self.sampled += sum(map(sum, made[2]))
            return made

    loop = calculator_loop.make_loop(seed, method="grpo")
    rows = [
        {"prompt": held_out.prompt_of(task), "target": task.target}
        for task in loop.tasks.split("train")
    ]
    tokenizer.response_template = qwen3_template  # the seed model's calls are written as Qwen's
    return Counting(
        network,
        reward_funcs=exact,
        args=GRPOConfig(
            **for_cpu(folder),
            per_device_train_batch_size=BATCH,
            steps_per_generation=STEPS_PER_GENERATION,
            num_generations=GROUP,
            max_completion_length=longest_run(tokenizer, loop),
            max_tool_calling_iterations=held_out.AGENT.max_turns - 1,
            learning_rate=RATE,
            warmup_steps=WARM_UP,
            lr_scheduler_type="warmup_stable_decay",
            lr_scheduler_kwargs={
                "num_stable_steps": STABLE,
                "num_decay_steps": FALLING,
                "min_lr_ratio": LAST_RATE / RATE,
            },
            adam_beta2=0.99,
            weight_decay=0.1,
            epsilon=0.2,
            epsilon_high=0.28,
            seed=seed,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        tools=[use_calculator],
    )


def use_calculator(expression: str) -> str:
    """Evaluate an arithmetic expression.

    Args:
        expression: such as '47+385'.
    """
    return str(evaluate(expression))


use_calculator.__name__ = "calculator"  # the tool's name, for TRL


def exact(completions: list[Any], target: list[str], **columns: Any) -> list[float]:
    """1 where the answer is the target and nothing else."""
    return [
        float(talk[-1]["role"] == "assistant" and talk[-1].get("content") == answer)
        for talk, answer in zip(completions, target, strict=True)
    ]


def longest_run(tokenizer: Any, loop: Any) -> int:
    """Tokens after the prompt of the longest demonstration: what TRL may sample, and the tool's."""
    lengths = []
    for messages, _ in loop.data.demonstrations:
        ends = [
            len(tokenizer.apply_chat_template(messages[:end], return_dict=False))
            for end in (2, len(messages))
        ]
        lengths.append(ends[1] - ends[0])
    return max(lengths)


# ---- SkyRL
def skyrl(seed: int, limit: float, folder: Path) -> Learned:
    """Run SkyRL to the limit, then measure its adapters, until one reaches the target."""
    busy, begun = os.getloadavg()[0], time.time()
    for left in folder.glob("skyrl*/"):
        shutil.rmtree(left)
    way = skyrl_side.learn(seed, limit, folder)
    tasks = list(calculator_loop.make_loop(seed, method="grpo").tasks.split("holdout"))
    target = calculator_loop.FULL_GRPO.target
    assert target is not None
    points: list[Point] = []
    for (seconds, tokens), adapter in zip(
        way.points, [None, *skyrl_side.adapters(folder)], strict=True
    ):
        network, tokenizer = load(folder / "start")
        if adapter is not None:
            skyrl_side.merge(network, adapter)
        reached = held_out.success(network, tokenizer, tasks)
        points.append(Point(seconds=seconds, tokens=tokens, success=reached))
        print(points[-1], file=sys.stderr, flush=True)
        if reached >= target:
            break
    return Learned(points=points, limit=limit, starting=way.begun - begun, evaluating=0, load=busy)


SIDES: dict[str, Callable[[int, float, Path], Learned]] = {
    "start": start,
    "grpo": partial(ours, "grpo"),
    "rft": partial(ours, "rft"),
    "trl": trl,
    "skyrl": skyrl,
}


def main(side: str, seed: str, limit: str, folder: str) -> None:
    """Run a side, and write its file whole."""
    learned = SIDES[side](int(seed), float(limit), Path(folder))
    path = Path(folder) / f"{side}.json"
    draft = path.with_suffix(".draft")
    draft.write_text(json.dumps(learned.model_dump()) + "\n")
    draft.rename(path)


if __name__ == "__main__":
    main(*sys.argv[1:])
