"""TRL's SFTTrainer, killed again and again, and continued with `resume_from_checkpoint`.

    python -m bench.rivals.resume_trl MODEL FOLDER

Each attempt is forked from this process, which has imported TRL and computed nothing. It goes on
from the newest checkpoint, as transformers' own scripts do. Where that cannot be loaded, a person
has to remove it: here the benchmark does, and counts it.
"""

import os

os.environ.setdefault("OMP_NUM_THREADS", "1")

import random
import shutil
import signal
import sys
import time
import traceback
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset
from transformers import AutoTokenizer
from transformers.trainer_utils import get_last_checkpoint
from trl import SFTConfig, SFTTrainer

from bench.rivals.resume_kills import (
    BATCH,
    KILLS,
    LEARNING_RATE,
    SAVE_EVERY,
    STEPS,
    Moment,
    Notes,
    Outcome,
    token_rows,
)

LAST = "trainer_state.json"  # written when the rest of a checkpoint is


class Noting(SFTTrainer):  # type: ignore[misc]  # it is untyped
    """Notes the samples of each step as it begins."""

    notes: Notes
    numbers: dict[tuple[int, ...], int]

    def training_step(self, model: Any, inputs: dict[str, Any], *args: Any) -> torch.Tensor:
        rows = zip(inputs["input_ids"].tolist(), inputs["labels"].tolist(), strict=True)
        kept = [tuple(t for t, label in zip(*row, strict=True) if label >= 0) for row in rows]
        self.notes.add(self.state.global_step, [self.numbers[row] for row in kept])
        loss: torch.Tensor = super().training_step(model, inputs, *args)
        return loss


def train(model: Path, folder: Path) -> None:
    """The job, from its newest checkpoint on."""
    torch.set_num_threads(1)
    rows = token_rows()
    config = SFTConfig(
        output_dir=str(folder / "out"),
        max_steps=STEPS,
        per_device_train_batch_size=BATCH,
        learning_rate=LEARNING_RATE,
        save_strategy="steps",
        save_steps=SAVE_EVERY,
        seed=1,
        use_cpu=True,
        bf16=False,
        gradient_checkpointing=False,
        report_to=[],
        disable_tqdm=True,
        logging_strategy="no",
        dataset_kwargs={"skip_prepare_dataset": True},
    )
    trainer = Noting(
        model=str(model),
        args=config,
        train_dataset=Dataset.from_dict({"input_ids": rows}),
        processing_class=AutoTokenizer.from_pretrained(model),
    )
    trainer.notes = Notes(folder / "notes")
    trainer.numbers = {tuple(row): number for number, row in enumerate(rows)}
    newest = get_last_checkpoint(config.output_dir) if Path(config.output_dir).is_dir() else None
    trainer.train(resume_from_checkpoint=newest)
    trainer.save_model(str(folder / "end"))


class Attempt:
    """A start of the job in a process of its own."""

    def __init__(self, model: Path, folder: Path) -> None:
        self.folder, self.notes = folder, Notes(folder / "notes")
        folder.mkdir(parents=True, exist_ok=True)
        self.pid = os.fork()
        if self.pid == 0:
            code = 1
            try:
                log = os.open(folder / "log", os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o644)
                os.dup2(log, 1)
                os.dup2(log, 2)
                train(model, folder)
                code = 0
            except Exception:  # noqa: BLE001  the process ends here
                traceback.print_exc()
            finally:
                sys.stderr.flush()
                os._exit(code)

    @property
    def checkpoints(self) -> list[Path]:
        """By their numbers."""
        folders = (self.folder / "out").glob("checkpoint-*")
        return sorted(folders, key=lambda path: int(path.name.rpartition("-")[2]))

    @property
    def half(self) -> bool:
        """Whether the newest checkpoint is not finished."""
        newest = self.checkpoints[-1:]
        return bool(newest) and not (newest[0] / LAST).exists()

    @property
    def ended(self) -> bool:
        how = os.WEXITED | os.WNOHANG | os.WNOWAIT
        return os.waitid(os.P_PID, self.pid, how) is not None

    def bear(self, moment: Moment) -> bool:
        """Kill it at the moment; False if it had ended."""
        while not (self.notes.step >= moment.step and (self.half or not moment.saving)):
            if self.ended:
                return False
            time.sleep(0.0005)
        time.sleep(moment.delay)
        if self.ended:
            return False
        os.kill(self.pid, signal.SIGKILL)
        return True

    def end(self) -> int:
        return os.waitstatus_to_exitcode(os.waitpid(self.pid, 0)[1])

    @property
    def error(self) -> str:
        """The last line of its log, with paths from its folder on."""
        line = (self.folder / "log").read_text().strip().rpartition("\n")[2]
        return line.replace(f"{self.folder}/", "")


def main(model: Path, folder: Path) -> None:
    """An undisturbed job, a killed one, and what differs."""
    calm = Attempt(model, folder / "calm")
    if calm.end():
        raise RuntimeError(f"the undisturbed job failed:\n{(calm.folder / 'log').read_text()}")
    outcome, chance = Outcome(), random.Random(1)
    while True:
        attempt = Attempt(model, folder / "killed")
        moment = Moment.draw(chance, attempt.notes.step) if outcome.kills < KILLS else None
        killed = moment is not None and attempt.bear(moment)
        code = attempt.end()
        if killed:
            outcome.kills += 1
            outcome.in_saves += attempt.half
        elif code == 0:
            break
        else:
            if not attempt.checkpoints:
                raise RuntimeError(f"the job fails:\n{(attempt.folder / 'log').read_text()}")
            outcome.refused.append(attempt.error)
            shutil.rmtree(attempt.checkpoints[-1])
    weights = "end/model.safetensors"
    outcome.compare(attempt.folder / weights, calm.folder / weights, attempt.notes, calm.notes)
    outcome.print()


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
