"""13, beside it: what TRL says to the failures of sabotage.py that it can have, too.

    python cookbook/13_sabotage/trl_says.py [--only NAME ...]

Each failure is made for TRL's GRPOTrainer or SFTTrainer on the same tiny model, on a CPU, for a few
steps. A line says how it ended: with an error, or trained, and with which warnings and measures.
TRL is in the project's development requirements; nothing else here needs it.
"""

import argparse
import json
import logging
import shutil
import tempfile
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from datasets import Dataset, disable_progress_bars
from sabotage import SHOWN, agent
from transformers import AutoModelForCausalLM, AutoTokenizer
from trl import GRPOConfig, GRPOTrainer, SFTConfig, SFTTrainer, __version__

from cray_agents.testing import make_tiny_model

STEPS = 4
Ended = tuple[str, dict[str, Any]]  # how it ended, and the last step's measures


def model_of(folder: Path) -> Any:
    """Load the tiny model."""
    return AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)


def settings(folder: Path) -> dict[str, Any]:
    """Return the settings that both trainers get."""
    return {
        "output_dir": str(folder / "out"),
        "max_steps": STEPS,
        "logging_steps": 1,
        "report_to": [],
        "use_cpu": True,
        "save_strategy": "no",
        "disable_tqdm": True,
        "learning_rate": 1e-4,
    }


def grpo(folder: Path, judged: Callable[..., list[Any]]) -> GRPOTrainer:
    """Make a GRPO trainer with a reward function."""
    prompts = [{"prompt": [{"role": "user", "content": talk[1]["content"]}]} for talk in SHOWN]
    return GRPOTrainer(
        model=model_of(folder),
        processing_class=AutoTokenizer.from_pretrained(folder),
        reward_funcs=judged,
        args=GRPOConfig(
            **settings(folder),
            per_device_train_batch_size=8,
            num_generations=4,
            max_completion_length=8,
        ),
        train_dataset=Dataset.from_list(prompts),
    )


def sft(folder: Path, talks: list[Any], model: Any = None, tokenizer: Path | None = None) -> Any:
    """Make an SFT trainer of conversations."""
    rows = [{"messages": [{"role": m["role"], "content": m["content"]} for m in t]} for t in talks]
    return SFTTrainer(
        model=model or model_of(folder),
        processing_class=AutoTokenizer.from_pretrained(tokenizer or folder),
        args=SFTConfig(**settings(folder), per_device_train_batch_size=8),
        train_dataset=Dataset.from_list(rows),
        eval_dataset=Dataset.from_list(rows[:4]),
    )


def equal(folder: Path) -> Any:
    """All attempts get the same reward."""
    return grpo(folder, lambda completions, **columns: [1.0] * len(completions))


def raising(folder: Path) -> Any:
    """A reward function fails."""
    return grpo(folder, lambda completions, **columns: [columns["score"]])


def nan(folder: Path) -> Any:
    """A weight is not a number, and so the loss is none."""
    model = model_of(folder)
    with torch.no_grad():
        model.lm_head.weight[5, 5] = float("nan")
    return sft(folder, SHOWN, model)


def tokenizer(folder: Path) -> Any:
    """Data is tokenised by another model's tokenizer."""
    other = [[{"role": "user", "content": "zyx wvu tsr"}, *talk] for talk in SHOWN]
    made = make_tiny_model(folder / "other", [(talk, {}) for talk in other], seed=9)
    return sft(folder, SHOWN, tokenizer=made)


def leak(folder: Path) -> Any:
    """What measures the model is trained on: the first four rows are its evaluation set, too."""
    return sft(folder, SHOWN)


def doubled(folder: Path) -> Any:
    """Data is given twice."""
    return sft(folder, [*SHOWN, *SHOWN])


FAILURES = {each.__name__: each for each in (equal, raising, nan, tokenizer, leak, doubled)}


def end_of(make: Callable[[Path], Any], folder: Path) -> Ended:
    """Train; return how it ended."""
    trainer = None
    try:
        trainer = make(folder)
        trainer.train()
        ended = f"trained {trainer.state.global_step} of {STEPS} steps"
    except Exception as error:  # noqa: BLE001  (how it ended)
        ended = f"stopped: {type(error).__name__}: {error}"
    history = trainer.state.log_history if trainer is not None else []
    steps = [entry for entry in history if "loss" in entry]
    return ended, steps[-1] if steps else {}


def main(names: list[str]) -> None:
    """Make each failure, and print what TRL says."""
    disable_progress_bars()
    print(f"TRL {__version__}")
    words = [(talk, {}) for talk in SHOWN]
    for name in names:
        folder = Path(tempfile.mkdtemp())
        model = make_tiny_model(folder / "model", words, tools=agent.tool_schemas)
        said: list[str] = []
        handler = logging.Handler(logging.WARNING)
        handler.emit = lambda record, said=said: said.append(record.getMessage())  # type: ignore[method-assign]
        logging.getLogger().addHandler(handler)
        with warnings.catch_warnings(record=True) as caught:
            warnings.simplefilter("always", UserWarning)
            ended, measures = end_of(FAILURES[name], model)
        logging.getLogger().removeHandler(handler)
        said += [str(each.message) for each in caught if each.category is UserWarning]
        kept = ("loss", "grad_norm", "reward", "reward_std", "frac_reward_zero_std")
        numbers = {key: measures[key] for key in kept if key in measures}
        print(f"{name:<10} {ended}; {json.dumps(numbers)}", flush=True)
        for line in dict.fromkeys(said):
            print(f"           warned: {line[:200]}")
        shutil.rmtree(folder)


if __name__ == "__main__":
    arguments = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    arguments.add_argument("--only", nargs="+", choices=list(FAILURES), default=list(FAILURES))
    main(arguments.parse_args().only)
