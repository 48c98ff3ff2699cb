"""tinker-cookbook's loop over SkyRL's server, at the calculator task, in an environment of its own.

`python -m tests.bench.rivals.skyrl_loop SEED LIMIT FOLDER URL` writes FOLDER/skyrl-way.json: the
seconds, the tokens and the sampler's checkpoint after each iteration. Called by training_sides.py
with the Python of `.venv-skyrl`.
"""

import asyncio
import json
import random
import sys
import time
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any

import chz
import tinker
from tinker_cookbook.rl import train
from tinker_cookbook.rl.types import (
    ActionExtra,
    Env,
    EnvGroupBuilder,
    RLDataset,
    RLDatasetBuilder,
    StepResult,
)
from transformers import AutoTokenizer

from cray_agents.cli.loop import calculator_loop
from cray_agents.records import Task
from tests.bench.rivals import held_out

#: a generation of our recipe: groups of 8, and four optimizer steps of 128 runs
GROUPS, GROUP, SUBSTEPS = 64, 8, 4
#: an adapter of this rank on all linear layers, for SkyRL trains no other weights, and its rate
RANK, RATE = 32, 1e-3
CLIP = {"clip_low_threshold": 0.8, "clip_high_threshold": 1.28}


class TimeUpError(Exception):
    """The side's time is up."""


class Progress:
    """What was reached before each iteration."""

    def __init__(self, limit: float) -> None:
        self.limit = limit
        self.tokens = 0
        self.points: list[tuple[float, int]] = []
        self.begun = 0.0

    def note(self) -> None:
        """Note the begin of an iteration. Raises TimeUpError."""
        self.begun = self.begun or time.perf_counter()
        self.points.append((time.perf_counter() - self.begun, self.tokens))
        if self.points[-1][0] > self.limit:
            raise TimeUpError


class Question(Env):
    """An attempt at a task: two turns, the tool's result between them."""

    def __init__(self, task: Task, tokenizer: Any, progress: Progress) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._progress = progress
        self._talk = held_out.prompt_of(task)
        self._turns = 0

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        """The task."""
        return self._prompt(), self._stop

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        """Carry out the call that the model wrote, or end with its answer's reward."""
        self._turns += 1
        self._progress.tokens += len(action)
        text = self._tokenizer.decode(action, skip_special_tokens=True)
        call = held_out.call_in(text) if self._turns < held_out.AGENT.max_turns else None
        if call is None:
            right = float(text == self._task.target)
            return StepResult(right, True, tinker.ModelInput.empty(), self._stop)
        message, result = call
        self._talk += [message, {"role": "tool", "tool_call_id": "call_0", "content": result}]
        return StepResult(0.0, False, self._prompt(), self._stop)

    @property
    def _stop(self) -> list[int]:
        return [self._tokenizer.eos_token_id]

    def _prompt(self) -> tinker.ModelInput:
        text = self._tokenizer.apply_chat_template(
            self._talk,
            tools=held_out.AGENT.tool_schemas,
            add_generation_prompt=True,
            tokenize=False,
        )
        ids = self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tinker.ModelInput.from_ints(ids)


class Attempts(EnvGroupBuilder):
    """The attempts at a task."""

    def __init__(self, *given: Any) -> None:
        self._given = given

    async def make_envs(self) -> Sequence[Env]:
        """GROUP of them."""
        return [Question(*self._given) for _ in range(GROUP)]


class Questions(RLDataset):
    """The training tasks of a seed, shuffled."""

    def __init__(self, tasks: list[Task], tokenizer: Any, progress: Progress) -> None:
        self._attempts = [Attempts(task, tokenizer, progress) for task in tasks]
        self._progress = progress

    def get_batch(self, index: int) -> Sequence[EnvGroupBuilder]:
        """The groups of an iteration."""
        self._progress.note()
        return self._attempts[index * GROUPS : (index + 1) * GROUPS]

    def __len__(self) -> int:
        return len(self._attempts) // GROUPS


@chz.chz
class Builder(RLDatasetBuilder):
    """What tinker-cookbook asks for a dataset."""

    made: Questions

    async def __call__(self) -> tuple[RLDataset, None]:
        """The dataset, and none to test."""
        return self.made, None


def main(seed: str, limit: str, folder: str, url: str) -> None:
    """Learn until the time is up, and write the way."""
    home = Path(folder)
    tokenizer = AutoTokenizer.from_pretrained(home / "start")
    progress = Progress(float(limit))
    tasks = list(calculator_loop.make_loop(int(seed), method="grpo").tasks.split("train"))
    random.Random(int(seed)).shuffle(tasks)
    config = train.Config(
        learning_rate=RATE,
        dataset_builder=Builder(made=Questions(tasks, tokenizer, progress)),
        model_name=str(home / "start"),
        max_tokens=held_out.AGENT.max_tokens,
        log_path=str(home / "skyrl-log"),
        loss_fn="ppo",
        loss_fn_config=CLIP,
        num_substeps=SUBSTEPS,
        lora_rank=RANK,
        remove_constant_reward_groups=True,
        eval_every=0,
        save_every=1,
        num_groups_to_log=0,
        rollout_json_export=False,
        base_url=url,
    )
    with suppress(TimeUpError):
        asyncio.run(train.main(config))
    (home / "skyrl-way.json").write_text(json.dumps(progress.points))


if __name__ == "__main__":
    main(*sys.argv[1:])
