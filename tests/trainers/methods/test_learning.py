"""Each method trains a tiny model: what it is for goes up, and the rest goes down."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.trainers.data.samples import Ints, read_samples

pytestmark = pytest.mark.megatron

JOBS: dict[str, dict[str, Any]] = {
    "dpo": {"method": "dpo"},
    "kto": {"method": "kto", "hyper": {"preference": {"beta": 0.2}}},
    "ppo": {"method": "grpo", "hyper": {"policy": {"importance_cap": None}}},
}


def logprobs(checkpoint: Path, ids: Sequence[Ints], prompt: int) -> np.ndarray[Any, Any]:
    """The mean log-probability of each sequence behind its prompt, by transformers."""
    import torch
    from transformers import AutoModelForCausalLM

    model = AutoModelForCausalLM.from_pretrained(checkpoint, dtype=torch.float32)
    found = []
    with torch.no_grad():
        for row in ids:
            each = model(torch.tensor(row[None, :-1])).logits[0].log_softmax(-1)
            right = each.gather(1, torch.tensor(row[1:])[:, None])[:, 0]
            found.append(right[prompt - 1 :].mean().item())
    return np.array(found)


def train(lab: Any, name: str) -> Any:
    """A job on eight random sequences, every other one wanted; returns its spec."""
    job, random = JOBS[name], np.random.default_rng(3)
    ids = [[int(i) for i in random.integers(0, 300, random.integers(8, 14))] for _ in range(8)]
    lab.dataset(
        ids=ids,
        method=job["method"],
        chosen=[i % 2 == 0 for i in range(8)],
        advantages=[1.0 - i % 2 * 1.5 for i in range(8)],
    )
    hyper = {
        "steps": 6,
        "batch_size": 4 if job["method"] == "dpo" else 8,
        "max_tokens_per_microbatch": 40,
        **job.get("hyper", {}),
    }
    spec = lab.spec("qwen3", method=job["method"], hyper=hyper)
    lab.run(spec)
    return spec


@pytest.mark.parametrize("name", JOBS)
def test_the_wanted_becomes_likelier(lab: Any, name: str) -> None:
    spec = train(lab, name)
    ids = read_samples(lab.home.dataset("ds"), spec.method).tokens
    before = logprobs(Path(spec.parent), ids, 5)
    change = logprobs(lab.home.checkpoint(spec.id), ids, 5) - before
    assert change[::2].min() > 0 > change[1::2].max()
