"""Router replay: the engine's experts are trained through, in every layout, from record to loss."""

import json
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.trainers.data.packer import BaselineLogprobs
from cray_agents.trainers.data.samples import Samples
from cray_agents.training_jobs import Hyperparameters, Layout
from tests.support.trainers.forked_ranks import run_forked, training_in_rank

pytestmark = pytest.mark.megatron

HYPER = Hyperparameters(steps=2, batch_size=6, learning_rate=3e-3, max_tokens_per_microbatch=60)
LAYERS, EXPERTS, TOP = 2, 4, 2
LAYOUTS = {
    "one": Layout(),
    "tensor2sp": Layout(tensor=2, sequence_parallel=True),
    "expert2": Layout(data=2, expert=2),
    "pipeline2": Layout(pipeline=2),
}


def routed() -> Samples:
    """Sequences whose tokens went to experts by chance; of a third of them nobody knows."""
    random = np.random.default_rng(3)
    samples = Samples.of([random.integers(3, 300, n).tolist() for n in (21, 17, 9, 30, 12, 25)])
    routes = []
    for place, tokens in enumerate(samples.tokens):
        of_layers = [
            random.permuted(np.tile(np.arange(EXPERTS), (len(tokens), 1)), axis=1)[:, :TOP]
            for _ in range(LAYERS)
        ]
        routes.append(np.concatenate(of_layers, 1).astype(np.int32))
        routes[-1][place * 5 :] = -1
    return replace(samples, routes=routes)


def by_hand(folder: Path) -> list[list[float]]:
    """transformers' log-probabilities with the experts put into its routers."""
    import torch
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    samples, found = routed(), []
    for ids, routes in zip(samples.tokens, samples.routes, strict=True):
        for layer, block in enumerate(network.model.layers):
            gate = block.mlp.gate
            own = torch.from_numpy(routes[:-1, layer * TOP : (layer + 1) * TOP].astype(np.int64))

            def forward(hidden: Any, gate: Any = gate, own: Any = own) -> Any:
                logits = torch.nn.functional.linear(hidden, gate.weight)
                probabilities = logits.softmax(-1)
                chosen = torch.where(own >= 0, own, probabilities.topk(TOP).indices)
                weights = probabilities.gather(1, chosen)
                return logits, weights / weights.sum(-1, keepdim=True), chosen

            gate.forward = forward
        with torch.no_grad():
            logprobs = network(torch.tensor(ids[None, :-1].astype(np.int64))).logits[0]
        logprobs = logprobs.log_softmax(-1)
        found.append([float(logprobs[at, token]) for at, token in enumerate(ids[1:])])
    return found


def measure(
    folder: Path, out: Path, layout: Layout, recompute: str, rank: int, store: Any, stop: Any
) -> int:
    training = training_in_rank(folder, layout, HYPER, rank, store, recompute=recompute)
    samples = routed()
    known = [row.tolist() for row in training.score(samples)]
    own = [row.tolist() for row in training.score(replace(samples, routes=[]))]
    steps = [training.step(BaselineLogprobs(samples)) for _ in range(HYPER.steps)]
    text = json.dumps([known, own, [[step.loss, step.grad_norm] for step in steps]])
    (out / f"{rank}.json").write_text(text)
    return 0


def test_tokens_are_trained_through_the_experts_that_the_engine_chose(tmp_path: Path) -> None:
    import torch
    from transformers import Qwen3MoeConfig, Qwen3MoeForCausalLM

    torch.manual_seed(5)
    config = Qwen3MoeConfig(
        hidden_size=32,
        moe_intermediate_size=24,
        num_hidden_layers=LAYERS,
        num_attention_heads=4,
        num_key_value_heads=2,
        head_dim=8,
        vocab_size=304,
        num_experts=EXPERTS,
        num_experts_per_tok=TOP,
        norm_topk_prob=True,
        initializer_range=0.3,
        max_position_embeddings=64,
    )
    Qwen3MoeForCausalLM(config).save_pretrained(tmp_path / "model")
    expected, steps = by_hand(tmp_path / "model"), {}
    ways = [(name, layout, "none") for name, layout in LAYOUTS.items()]
    for name, layout, recompute in [*ways, ("recomputed", LAYOUTS["one"], "moe")]:
        out = tmp_path / name
        out.mkdir()
        work = partial(measure, tmp_path / "model", out, layout, recompute)
        assert run_forked(layout.world, out / "logs", work) is None
        known, own, steps[name] = json.loads((out / "0.json").read_text())
        for row, right in zip(known, expected, strict=True):
            assert row == pytest.approx(right, abs=1e-4), name
        assert max(abs(a - b) for a, b in zip(known[3], own[3], strict=True)) > 0.1
    for name, measured in steps.items():
        for numbers, plain in zip(measured, steps["one"], strict=True):
            assert numbers == pytest.approx(plain, rel=2e-4), name
