"""A process that takes training steps when asked to: our trainer's, or TRL's own trainers'.

`python -m bench.rivals.step_sides SIDE METHOD MODEL VOCABULARY LONGEST` reads a line of stdin
for each round, and answers with a line of JSON: its seconds, its steps' losses, and the most memory
that the process has had. SIDE is `ours`, `trl` or `trl-padded`. TRL's steps are those of
`train()` of its SFTTrainer and GRPOTrainer, which pause between rounds. GRPOTrainer gets the
completions through its `rollout_func`, and their order through the function by which it shuffles
them. Called by steps.py; the batches are of step_batches.py.
"""

import json
import os
import resource
import select
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np

from bench.rivals.step_batches import (
    ATTEMPTS,
    BATCH,
    GROUPS,
    HYPER,
    STEPS,
    Completion,
    advantages_of,
    places_of,
    round_of,
)
from bench.rivals.trl_settings import for_cpu, load

Rounds = Callable[[int], list[Completion]]


class Answers:
    """Lines of JSON on a descriptor that no library writes to. `clock` is set when a line comes.

    `wakes` is called now and then while it waits: our launcher ends a rank that does nothing.
    """

    def __init__(self, out: int, wakes: Callable[[], None] = lambda: None) -> None:
        self._out, self.clock, self.losses = out, time.perf_counter(), list[float]()
        self._wakes = wakes

    def wait(self) -> bool:
        """Wait for the next round; False where there is none."""
        while not select.select([sys.stdin], [], [], 10)[0]:
            self._wakes()
        more = bool(sys.stdin.readline())
        self.clock = time.perf_counter()
        return more

    def send(self) -> None:
        """Answer with the round that has ended."""
        seconds = time.perf_counter() - self.clock
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024
        line = {"seconds": seconds, "losses": self.losses, "peak_mib": peak}
        os.write(self._out, json.dumps(line).encode() + b"\n")
        self.losses = []


# ---- ours
def ours(method: str, model: Path, rounds: Rounds, out: int) -> None:
    """Run our trainer, in a rank that is forked as a job forks it."""
    from cray_agents.trainers.job.launch import find_placement, run_ranks
    from cray_agents.trainers.models.megatron_fixes import load_megatron
    from cray_agents.trainers.training import train_step  # noqa: F401  (loaded before the fork)

    load_megatron()
    work = partial(_our_rank, method, model, rounds, out)
    run_ranks(find_placement(1, "bench"), model.parent / f"logs-{os.getpid()}", work)


def _our_rank(
    method: Any, model: Path, rounds: Rounds, out: int, rank: int, store: Any, stop: Any
) -> int:
    import torch

    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.progress import CLOCK
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining
    from cray_agents.training_jobs import Layout

    torch.set_num_threads(1)
    layout = Layout()
    join_ranks(layout, rank, 1, store, on_cpu=True)
    architecture = read_architecture(model, "megatron")
    training = RankTraining(architecture, layout, HYPER, model, on_cpu=True, method=method)
    answers, number = Answers(out, CLOCK.tick), 0
    while answers.wait():
        baseline = _baseline(training, rounds(number))
        answers.losses = [training.step(baseline).loss for _ in range(STEPS)]
        answers.send()
        number += 1
    return 0


def _baseline(training: Any, completions: list[Completion]) -> Any:
    """A round as our trainer takes it: for grpo with the log-probabilities before its steps."""
    from cray_agents.trainers.data.packer import BaselineLogprobs, TrainedTokenRows
    from cray_agents.trainers.data.samples import Samples

    masks = [
        np.array([0] * len(one.prompt) + [1] * len(one.answer), np.float32) for one in completions
    ]
    samples = Samples.of([one.prompt + one.answer for one in completions], masks)
    if training.method == "sft":
        return BaselineLogprobs(samples)
    rows = TrainedTokenRows(masks, dict(enumerate(training.score(samples))))
    gains = TrainedTokenRows(masks, dict(enumerate(advantages_of(completions))))
    columns: dict[str, Any] = {
        "sampled": samples.sampled, "advantages": gains, "before": rows, "reference": rows,
    }  # fmt: skip
    return BaselineLogprobs(samples, columns)


# ---- TRL
def trl(method: str, model: Path, rounds: Rounds, out: int, *, packed: bool) -> None:
    """Run TRL's trainer of a method."""
    import torch

    torch.set_num_threads(1)
    answers = Answers(out)
    if method == "sft":
        _sft_trainer(model, rounds, answers, packed).train()
    else:
        _grpo_trainer(model, rounds, answers).train()


def settings(folder: Path) -> dict[str, Any]:
    """What a TRL trainer is set to beside its defaults: our batch and our optimizer."""
    return {
        **for_cpu(folder),
        "per_device_train_batch_size": BATCH,
        "learning_rate": HYPER.learning_rate,
        "lr_scheduler_type": "constant",
        "adam_beta1": HYPER.adam_beta1,
        "adam_beta2": HYPER.adam_beta2,
        "adam_epsilon": HYPER.adam_eps,
        "weight_decay": HYPER.weight_decay,
        "max_grad_norm": HYPER.clip_grad,
    }


def pauses(answers: Answers) -> Any:
    """A callback that lets `train()` go from round to round."""
    from transformers import TrainerCallback

    class Pauses(TrainerCallback):  # type: ignore[misc]
        """Waits before the first step, and after the last one of each round."""

        def on_train_begin(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            answers.wait()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            if state.global_step % STEPS == 0:
                answers.send()
                control.should_training_stop = not answers.wait()

    return Pauses()


def _order() -> Iterator[int]:
    """The places of all steps, one after the other."""
    for step in range(HYPER.steps):
        yield from places_of(step)


def _sft_trainer(model: Path, rounds: Rounds, answers: Answers, packed: bool) -> Any:
    import torch
    from datasets import Dataset
    from trl import SFTConfig, SFTTrainer

    class Sequences(torch.utils.data.Dataset[dict[str, Any]]):
        """All rounds, of which one is in memory; the trainer is given its places in order."""

        def __init__(self) -> None:
            self._number, self._round = -1, list[Completion]()

        def __len__(self) -> int:
            return HYPER.steps * BATCH

        def __getitem__(self, place: int) -> dict[str, Any]:
            number, place = divmod(place, GROUPS * ATTEMPTS)
            if number != self._number:
                self._number, self._round = number, rounds(number)
            one = self._round[place]
            labels = [-100] * len(one.prompt) + one.answer
            return {"input_ids": one.prompt + one.answer, "labels": labels}

    class InOrder(torch.utils.data.Sampler[int]):
        """The order of our trainer."""

        def __len__(self) -> int:
            return HYPER.steps * BATCH

        def __iter__(self) -> Iterator[int]:
            for turn, place in enumerate(_order()):
                yield turn // (GROUPS * ATTEMPTS) * (GROUPS * ATTEMPTS) + place

    class Steps(SFTTrainer):  # type: ignore[misc]
        """SFTTrainer that takes the sequences in order, and notes its losses."""

        def _get_train_sampler(self, dataset: Any = None) -> Any:
            return InOrder()

        def compute_loss(self, *args: Any, **options: Any) -> Any:
            result = super().compute_loss(*args, **options)
            loss = result[0] if isinstance(result, tuple) else result
            answers.losses.append(float(loss.detach()))
            return result

    network, tokenizer = load(model)
    trainer = Steps(
        network,
        SFTConfig(
            **settings(model.parent / "trl"),
            padding_free=packed,
            max_length=None,
            dataset_kwargs={"skip_prepare_dataset": True},
            remove_unused_columns=False,
        ),
        train_dataset=Dataset.from_list([Sequences()[0]]),
        processing_class=tokenizer,
        callbacks=[pauses(answers)],
    )
    trainer.train_dataset = Sequences()  # its constructor takes none of torch's
    return trainer


def _grpo_trainer(model: Path, rounds: Rounds, answers: Answers) -> Any:
    from datasets import Dataset
    from trl import GRPOConfig, GRPOTrainer
    from trl.trainer import grpo_trainer

    number = iter(range(HYPER.steps))
    shuffles = iter(range(HYPER.steps))

    def completions(prompts: list[str], trainer: Any) -> dict[str, Any]:
        made = rounds(next(number))
        return {
            "prompt_ids": [one.prompt for one in made],
            "completion_ids": [one.answer for one in made],
            "logprobs": None,
            "points": [one.reward for one in made],
        }

    def points(points: list[float], **columns: Any) -> list[float]:
        return points

    def in_our_order(batch: dict[str, Any]) -> dict[str, Any]:
        first = next(shuffles) * STEPS
        places = [place for step in range(first, first + STEPS) for place in places_of(step)]
        return {
            name: values[places] if getattr(values, "ndim", 0) else values
            for name, values in batch.items()
        }

    class Steps(GRPOTrainer):  # type: ignore[misc]
        """GRPOTrainer that notes its losses."""

        def _compute_loss(self, *args: Any, **options: Any) -> Any:
            loss = super()._compute_loss(*args, **options)
            answers.losses.append(float(loss.detach()))
            return loss

    grpo_trainer.shuffle_sequence_dict = in_our_order
    network, tokenizer = load(model)
    return Steps(
        network,
        reward_funcs=points,
        args=GRPOConfig(
            **settings(model.parent / "trl"),
            steps_per_generation=STEPS,
            num_generations=ATTEMPTS,
            loss_type="bnpo",  # the mean over a step's tokens, as ours
            beta=HYPER.policy.kl,
            epsilon=HYPER.policy.clip_low,
            epsilon_high=HYPER.policy.clip_high,
        ),
        train_dataset=Dataset.from_list([{"prompt": "t2"}] * GROUPS),
        processing_class=tokenizer,
        rollout_func=completions,
        callbacks=[pauses(answers)],
    )


SIDES: dict[str, Callable[[str, Path, Rounds, int], None]] = {
    "ours": ours,
    "trl": partial(trl, packed=True),
    "trl-padded": partial(trl, packed=False),
}


def main(side: str, method: str, model: str, vocabulary: str, longest: str) -> None:
    """Take steps until stdin ends."""
    out = os.dup(1)
    os.dup2(2, 1)  # what libraries print is no answer
    rounds = partial(round_of, vocabulary=int(vocabulary), longest=int(longest))
    SIDES[side](method, Path(model), rounds, out)


if __name__ == "__main__":
    main(*sys.argv[1:])
