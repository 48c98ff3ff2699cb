"""Rivals on the same tasks and reward, from the same weights: TRL's GRPOTrainer, DSPy's examples.

TRL goes on from its newest checkpoint after a kill. Groups, batch, rate, clipping and temperature
are our GRPO's. It samples with transformers, in float32 on both cores, as TRL does on a CPU.
DSPy asks our server, with prompts of our form.
"""

import json
import subprocess
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.bfcl.clock import Clock
from bench.rivals.server_process import foreign
from bench.rivals.trl_settings import for_cpu, load

SAVE = 600.0  # seconds between two checkpoints


@dataclass(frozen=True)
class Learned:
    """The model that TRL came to, its optimizer steps, and their seconds."""

    model: Path
    steps: int
    seconds: float


def learn(
    begin: Path,
    calling: Any,
    tasks: Sequence[Any],
    folder: Path,
    seed: int,
    seconds: float,
    temperature: float,
    tiny: bool,
) -> Learned:
    """Train for so many seconds. They begin when the trainer is made, as ours do."""
    import torch
    from datasets import Dataset
    from transformers import TrainerCallback
    from transformers.trainer_utils import get_last_checkpoint
    from trl import GRPOConfig, GRPOTrainer

    torch.set_num_threads(2)
    model, out = folder / "model", folder / "out"
    network, tokenizer = load(begin)
    agent = calling.agent()
    system = {"role": "system", "content": agent.instructions}
    rows = [
        {
            "prompt": [system, *calling.prompt.shown, {"role": "user", "content": task.text}],
            "entry": task.id,
        }
        for task in tasks
    ]

    def correct(completions: list[Any], entry: list[str], **columns: Any) -> list[float]:
        read = [calling.prompt.read(talk[-1]["content"] or "") for talk in completions]
        return [
            float(calls is not None and calling.right(calling.entries[name], calls))
            for calls, name in zip(read, entry, strict=True)
        ]

    class Timed(TrainerCallback):  # type: ignore[misc]
        """Ends the training when its time is up, and saves now and then."""

        saved = time.monotonic()

        def on_step_end(self, args: Any, state: Any, control: Any, **rest: Any) -> None:
            clock.tick()
            control.should_training_stop = clock.seconds > seconds
            control.should_save = time.monotonic() - self.saved > (0 if tiny else SAVE)
            if control.should_save:
                self.saved = time.monotonic()

    groups, group, device = (1, 2, 2) if tiny else (8, 8, 8)
    settings = for_cpu(out) | {"save_total_limit": 1, "disable_tqdm": False}
    trainer = GRPOTrainer(
        network,
        reward_funcs=correct,
        args=GRPOConfig(
            **settings,
            per_device_train_batch_size=device,
            gradient_accumulation_steps=groups * group // device,
            num_generations=group,
            max_completion_length=agent.max_tokens,
            temperature=temperature,
            learning_rate=1e-5,
            weight_decay=0.1,
            adam_beta2=0.95,
            epsilon=0.2,
            epsilon_high=0.28,
            seed=seed,
        ),
        train_dataset=Dataset.from_list(rows),
        processing_class=tokenizer,
        callbacks=[Timed()],
    )
    clock = Clock(folder.with_suffix(".clock"))
    newest = get_last_checkpoint(str(out)) if out.is_dir() else None
    trainer.train(resume_from_checkpoint=newest)
    trainer.save_model(str(model))
    return Learned(model, trainer.state.global_step, clock.seconds)


def bootstrap(
    python: Path, job: dict[str, Any], folder: Path, right: Callable[[str, str], bool]
) -> dict[str, Any]:
    """Let DSPy choose examples, and answer the test with them: see dspy_program.py.

    `python`: of DSPy's environment. `right`: the verdict on an answer to the entry of a name.
    """
    folder.mkdir(parents=True, exist_ok=True)
    file, found = folder / "dspy.json", None
    file.write_text(json.dumps(job))
    program = Path(__file__).with_name("dspy_program.py")
    with subprocess.Popen(
        [python, program, file],
        stdin=subprocess.PIPE,
        stdout=subprocess.PIPE,
        text=True,
        env=foreign(folder),
    ) as process:
        assert process.stdin and process.stdout
        for line in process.stdout:
            if isinstance(said := json.loads(line), list):
                print(json.dumps(right(*said)), file=process.stdin, flush=True)
            else:
                found = said
    if found is None:
        raise SystemExit(f"DSPy ended with code {process.returncode} and no result")
    return found
