"""Each method trains a tiny model: what it is for goes up, and the rest goes down."""

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.paths import Home
from cray_agents.trainers.data.samples import Ints, read_samples

pytestmark = pytest.mark.megatron

JOBS: dict[str, dict[str, Any]] = {
    "dpo": {"method": "dpo"},
    "kto": {"method": "kto", "hyper": {"preference": {"beta": 0.2}}},
    "ppo": {"method": "grpo", "hyper": {"policy": {"importance_cap": None}}},
    "gspo": {
        "method": "grpo",
        "hyper": {
            "policy": {"objective": "gspo", "clip_low": 0.5, "clip_high": 1, "importance_cap": None}
        },
    },
    "cispo": {
        "method": "grpo",
        "hyper": {"policy": {"objective": "cispo", "kl": 0.01, "importance_cap": None}},
    },
}
LAYOUTS: dict[str, list[dict[str, int]]] = {  # whose steps must be as those of one rank
    "dpo": [{"context": 2}, {"data": 2}],
    "kto": [{"context": 2}, {"data": 2}],
    "gspo": [{"context": 2}, {"data": 2}],
    "cispo": [{"pipeline": 2}],
}


def logprobs(checkpoint: Path, ids: list[Ints], prompt: int) -> np.ndarray[Any, Any]:
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


def train(lab: Any, name: str, **layout: int) -> tuple[Any, Any]:
    """A job on eight random sequences, every other one wanted: its spec, and itself at its end."""
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
    spec = lab.spec("qwen3", method=job["method"], hyper=hyper, layout=layout)
    return spec, lab.run(spec)


def metrics(job: Any) -> list[dict[str, float]]:
    """What each step's event says of the loss and the policy."""
    how = {"event", "time", "seconds", "tokens_per_second", "memory_gib"}
    steps = [event for event in job.journal.events() if event["event"] == "step"]
    return [{k: v for k, v in step.items() if k not in how} for step in steps]


@pytest.mark.parametrize("name", JOBS)
def test_the_wanted_becomes_likelier(lab: Any, name: str) -> None:
    spec, _ = train(lab, name)
    ids = read_samples(lab.home.dataset("ds"), spec.method).tokens
    before = logprobs(Path(spec.parent), ids, 5)
    change = logprobs(lab.home.checkpoint(spec.id), ids, 5) - before
    assert change[::2].min() > 0 > change[1::2].max()


@pytest.mark.parametrize("name", LAYOUTS)
def test_every_layout_tells_the_same(lab: Any, tmp_path: Path, name: str) -> None:
    expected = metrics(train(lab, name)[1])
    assert len(expected) == 6
    for layout in LAYOUTS[name]:
        other = type(lab)(Home(tmp_path / str(layout)), lab.models)
        found = metrics(train(other, name, **layout)[1])
        for ours, theirs in zip(found, expected, strict=True):
            assert ours == pytest.approx(theirs, rel=1e-3, abs=1e-4), layout
