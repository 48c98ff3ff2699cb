"""Settings of TRL's trainers in both benchmarks: float32 models, and arguments for a CPU."""

from pathlib import Path
from typing import Any


def load(checkpoint: Path) -> tuple[Any, Any]:
    """The model in float32, and its tokenizer."""
    import torch
    from transformers import AutoModelForCausalLM, AutoTokenizer

    network = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    return network, AutoTokenizer.from_pretrained(checkpoint)


def for_cpu(folder: Path) -> dict[str, Any]:
    """Arguments of any TRL trainer: on a CPU in float32, without checkpoints, logs and a limit."""
    return {
        "output_dir": str(folder),
        "max_steps": 10**6,
        "use_cpu": True,
        "bf16": False,
        "gradient_checkpointing": False,
        "disable_tqdm": True,
        "report_to": "none",
        "save_strategy": "no",
        "logging_strategy": "no",
    }
