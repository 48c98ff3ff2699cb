"""tinker-cookbook's loop over SkyRL's server, at the calculator task, in an environment of its own.

`python -m bench.rivals.skyrl_loop SEED LIMIT MODEL FOLDER URL` writes FOLDER/way.json: when
its clock began, and the seconds and tokens at each iteration's begin. Called by skyrl_side.py with
the Python of `.venv-skyrl`.
"""

import asyncio
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

from bench.rivals import held_out
from bench.rivals.skyrl_side import CLIP, GROUP, GROUPS, RANK, RATE, SUBSTEPS, Way
from cray_agents.cli import calculator_loop
from cray_agents.records import Task


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
        """Note the begin of an iteration, after the first if time is left. Raises TimeUpError."""
        self.begun = self.begun or time.time()
        self.points.append((time.time() - self.begun, self.tokens))
        if len(self.points) > 1 and self.points[-1][0] > self.limit:
            raise TimeUpError


class Question(Env):  # type: ignore[misc]
    """An attempt at a task: two turns, the tool's result between them."""

    def __init__(self, task: Task, tokenizer: Any, progress: Progress) -> None:
        self._task = task
        self._tokenizer = tokenizer
        self._progress = progress
        self._talk = held_out.prompt_of(task)
        self._seen: list[int] = []
        self._turns = 0

    async def initial_observation(self) -> tuple[tinker.ModelInput, list[int]]:
        """The task."""
        return self._see(self._text(answer_next=True)), [self._tokenizer.eos_token_id]

    async def step(self, action: list[int], *, extra: ActionExtra | None = None) -> StepResult:
        """Carry out the call that the model wrote, or end with its answer's reward."""
        stop = [self._tokenizer.eos_token_id]
        self._turns += 1
        self._progress.tokens += len(action)
        self._seen += action
        text = self._tokenizer.decode(action, skip_special_tokens=True)
        more = self._turns < held_out.AGENT.max_turns and action[-1:] == stop
        if (call := held_out.call_in(text) if more else None) is None:
            right = float(text == self._task.target)
            return StepResult(right, True, tinker.ModelInput.empty(), stop)
        message, result = call
        self._talk.append(message)
        before = self._text(answer_next=False)
        self._talk.append({"role": "tool", "tool_call_id": "call_0", "content": result})
        added = self._text(answer_next=True).removeprefix(before)
        return StepResult(0.0, False, self._see(f"\n{added}"), stop)

    def _see(self, text: str) -> tinker.ModelInput:
        """What was seen and sampled until now, to the token, and this after it."""
        self._seen += self._tokenizer(text, add_special_tokens=False)["input_ids"]
        return tinker.ModelInput.from_ints(self._seen)

    def _text(self, answer_next: bool) -> str:
        return str(
            self._tokenizer.apply_chat_template(
                self._talk,
                tools=held_out.AGENT.tool_schemas,
                add_generation_prompt=answer_next,
                tokenize=False,
            )
        )


class Attempts(EnvGroupBuilder):  # type: ignore[misc]
    """The attempts at a task."""

    def __init__(self, *given: Any) -> None:
        self._given = given

    async def make_envs(self) -> Sequence[Env]:
        """GROUP of them."""
        return [Question(*self._given) for _ in range(GROUP)]


class Questions(RLDataset):  # type: ignore[misc]
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
class Builder(RLDatasetBuilder):  # type: ignore[misc]
    """What tinker-cookbook asks for a dataset."""

    made: Questions

    async def __call__(self) -> tuple[RLDataset, None]:
        """The dataset, and none to test."""
        return self.made, None


def main(seed: str, limit: str, model: str, folder: str, url: str) -> None:
    """Learn until the time is up, and write the way."""
    home = Path(folder)
    tokenizer = AutoTokenizer.from_pretrained(model)
    progress = Progress(float(limit))
    tasks = list(calculator_loop.make_loop(int(seed), method="grpo").tasks.split("train"))
    random.Random(int(seed)).shuffle(tasks)
    config = train.Config(
        learning_rate=RATE,
        dataset_builder=Builder(made=Questions(tasks, tokenizer, progress)),
        model_name=model,
        max_tokens=held_out.AGENT.max_tokens,
        log_path=str(home / "loop"),
        loss_fn="ppo",
        loss_fn_config=CLIP,
        num_substeps=SUBSTEPS,
        lora_rank=RANK,
        remove_constant_reward_groups=False,  # JAX would compile anew for what is left
        eval_every=0,
        save_every=1,
        num_groups_to_log=0,
        rollout_json_export=False,
        base_url=url,
    )
    with suppress(TimeUpError):
        asyncio.run(train.main(config))
    way = Way(begun=progress.begun, points=progress.points)
    (home / "way.json").write_text(way.model_dump_json())


if __name__ == "__main__":
    main(*sys.argv[1:])
