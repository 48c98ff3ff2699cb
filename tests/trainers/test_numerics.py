"""Megatron against transformers: logits, losses, weights there and back, in every layout."""

import json
import math
from dataclasses import asdict, dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.records import JobSpec, Layout

pytestmark = pytest.mark.megatron

STEPS = 6
PROMPTS = [[5, 9, 200, 301, 17, 3, 3, 42, 77, 120], [8, 8, 1, 250], list(range(40, 70))]


@dataclass
class Measured:
    """What one rank saw; `logits` only where the output layer is, [tokens, its share of vocab]."""

    logprobs: list[float]
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)


def measure(spec: JobSpec, dataset: Path, out: Path, rank: int, store: Any, stop: Any) -> int:
    """One rank: score prompts, export the untouched weights, train a few steps, write it down."""
    import torch

    from cray_agents.trainers import export
    from cray_agents.trainers.architecture import check_layout, read_architecture
    from cray_agents.trainers.data import read_samples
    from cray_agents.trainers.train import Training, join_ranks

    join_ranks(spec.layout, rank, spec.layout.world, store, on_cpu=True)
    parent = Path(spec.parent)
    model = read_architecture(parent)
    check_layout(model, spec.layout)
    training = Training(model, spec.layout, spec.hyperparameters, parent, on_cpu=True)
    seen: list[torch.Tensor] = []
    if training.inner.post_process:
        training.inner.output_layer.register_forward_hook(
            lambda _, __, output: seen.append(output[0].detach()[:, 0].clone())
        )
    measured = Measured(training.logprobs(PROMPTS))
    if seen:
        torch.save(seen[0], out / f"logits-{rank}.pt")
    export.export_weights(training, out / "hf")
    samples = read_samples(dataset)
    for _ in range(STEPS):
        report = training.step(samples)
        measured.losses.append(report.loss)
        measured.norms.append(report.grad_norm)
    (out / f"rank-{rank}.json").write_text(json.dumps(asdict(measured)))
    return 0


def measured(lab: Any, tmp_path: Path, spec: JobSpec) -> list[Measured]:
    from cray_agents.trainers import train  # noqa: F401  (loaded before the fork)
    from cray_agents.trainers.cpu_megatron import load_megatron
    from cray_agents.trainers.launch import find_place, run_ranks

    load_megatron()
    (tmp_path / "hf").mkdir()
    place = find_place(spec.layout.world, spec.id)
    work = partial(measure, spec, lab.home.dataset("ds"), tmp_path)
    outcome = run_ranks(place, tmp_path / "logs", work)
    assert outcome.code == 0, outcome
    files = [tmp_path / f"rank-{r}.json" for r in range(spec.layout.world)]
    return [Measured(**json.loads(file.read_bytes())) for file in files]


def by_transformers(spec: JobSpec, samples: Any) -> tuple[Any, list[float]]:
    """(logits of PROMPTS one after the other, losses of a plain AdamW loop), sample by sample."""
    import torch
    from transformers import AutoModelForCausalLM

    from cray_agents.trainers.data import step_indices
    from cray_agents.trainers.sft import learning_rate

    model = AutoModelForCausalLM.from_pretrained(spec.parent, dtype=torch.float32)
    hyper = spec.hyperparameters
    with torch.no_grad():
        logits = torch.cat([model(torch.tensor([p[:-1]])).logits[0] for p in PROMPTS])
    shrunk = [p for p in model.parameters() if p.dim() > 1]
    kept = [p for p in model.parameters() if p.dim() == 1]
    adam = torch.optim.AdamW(
        [
            {"params": shrunk, "weight_decay": hyper.weight_decay},
            {"params": kept, "weight_decay": 0.0},
        ],
        betas=(hyper.adam_beta1, hyper.adam_beta2),
        eps=hyper.adam_eps,
    )
    losses = []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0.0
        for i in step_indices(hyper, step, samples.weights):
            ids = torch.from_numpy(samples.tokens[i])[None]
            mask = torch.from_numpy(samples.masks[i])[1:]
            found = model(ids[:, :-1]).logits[0].float().log_softmax(-1)
            total = total - (found.gather(1, ids[0, 1:, None])[:, 0] * mask).sum()
            count += float(mask.sum())
        loss = total / count
        adam.zero_grad()
        loss.backward()
        torch.nn.utils.clip_grad_norm_(model.parameters(), hyper.clip_grad)
        for group in adam.param_groups:
            group["lr"] = learning_rate(hyper, step)
        adam.step()
        losses.append(loss.item())
    return logits, losses


LAYOUTS = {
    "one": Layout(),
    "data2": Layout(data=2),
    "tensor2": Layout(tensor=2),
    "tensor2sp": Layout(tensor=2, sequence_parallel=True),
    "pipeline2": Layout(pipeline=2),
    "expert2": Layout(data=2, expert=2),
}
CASES = [
    *[(kind, name) for kind in ("qwen3", "qwen3-tied") for name in list(LAYOUTS)[:5]],
    *[("llama", name) for name in ("one", "tensor2", "pipeline2")],
    *[(kind, "one") for kind in ("qwen2", "mistral", "mixtral")],
    *[("qwen3_moe", name) for name in ("one", "expert2")],
]


@pytest.mark.parametrize(("kind", "layout"), CASES, ids=lambda value: value)
def test_a_layout_agrees_with_transformers(
    lab: Any, tmp_path: Path, kind: str, layout: str
) -> None:
    import torch
    from safetensors.torch import load_file

    from cray_agents.trainers.data import read_samples

    lab.dataset()
    spec = lab.spec(
        kind,
        layout=LAYOUTS[layout].model_dump(),
        hyper={"steps": STEPS, "max_tokens_per_microbatch": 60},
    )
    ranks = measured(lab, tmp_path, spec)
    logits, losses = by_transformers(spec, read_samples(lab.home.dataset("ds")))

    shares = [torch.load(path) for path in sorted(tmp_path.glob("logits-*.pt"))]
    whole = torch.cat(shares, -1) if spec.layout.tensor > 1 else shares[0]
    assert (whole[: len(logits)] - logits).abs().max() < 1e-4
    targets = torch.tensor([token for prompt in PROMPTS for token in prompt[1:]])
    expected = logits.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    for rank in ranks:
        np.testing.assert_allclose(rank.logprobs, expected, atol=1e-4)
        np.testing.assert_allclose(rank.losses, losses, rtol=1e-5)
        assert rank.losses == ranks[0].losses
        assert all(math.isfinite(norm) and norm > 0 for norm in rank.norms)
    assert losses[-1] < losses[0]

    before, after = Path(spec.parent), {}
    for file in (tmp_path / "hf").glob("*.safetensors"):
        after |= load_file(file)
    original = load_file(before / "model.safetensors")
    assert after.keys() == original.keys()
    assert all(torch.equal(after[name], original[name]) for name in after)


def test_packing_changes_nothing(lab: Any, tmp_path: Path) -> None:
    lab.dataset()
    found = []
    for limit in (40, 4096):  # a sequence or two a micro-batch; all in one
        folder = tmp_path / str(limit)
        folder.mkdir()
        hyper = {"steps": STEPS, "max_tokens_per_microbatch": limit}
        found.append(measured(lab, folder, lab.spec("qwen3", hyper=hyper))[0])
    np.testing.assert_allclose(found[0].losses, found[1].losses, rtol=1e-5)
    np.testing.assert_allclose(found[0].norms, found[1].norms, rtol=1e-4)
