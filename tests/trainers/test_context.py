"""Context parallelism: how sequences are cut over ranks, and that it changes nothing."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.trainers.data.context_parallel import share
from cray_agents.trainers.data.packer import Packed, pack
from cray_agents.trainers.data.samples import Samples
from cray_agents.training_jobs import JobSpec, Layout
from tests.support.trainers.forked_ranks import run_forked

STEPS = 3
LENGTHS = [7, 31, 1, 16, 4]


def packed(lengths: list[int] = LENGTHS) -> Packed:
    """Token 100 * sequence + position; a column of the same numbers; every other label counts."""
    sequences = [[100 * s + i for i in range(n + 1)] for s, n in enumerate(lengths)]
    samples = Samples.of(sequences)
    for row in samples.masks:
        row[1::2] = 0
    column = [np.array(sequence, np.float32) + 0.5 for sequence in sequences]
    return pack(samples, range(len(lengths)), {"before": column})


@pytest.mark.parametrize("multiple", [1, 2, 3])
@pytest.mark.parametrize("ranks", [2, 3, 4])
def test_every_token_is_on_one_rank_and_as_it_was(ranks: int, multiple: int) -> None:
    whole = packed()
    shares = [share(whole, rank, ranks, multiple) for rank in range(ranks)]
    places = np.concatenate([part.places for part in shares])
    assert sorted(places[places >= 0]) == list(range(len(whole.tokens)))
    for part in shares:
        real, at = part.places >= 0, part.places[part.places >= 0]
        for name in ("tokens", "labels", "positions", "mask"):
            np.testing.assert_array_equal(getattr(part, name)[real], getattr(whole, name)[at])
        np.testing.assert_array_equal(part.sequence[real], whole.tokens[at] // 100)
        np.testing.assert_array_equal(part.columns["before"][real], whole.columns["before"][at])
        assert not part.mask[~real].any() and not part.columns["before"][~real].any()
        assert len(part.tokens) == len(shares[0].tokens)
        assert len(part.tokens) % multiple == 0
        assert part.bounds[-1] == ranks * len(part.tokens)
        np.testing.assert_array_equal(part.bounds, shares[0].bounds)
        np.testing.assert_array_equal(part.chosen, whole.chosen)
        # fillers stand behind their sequence's real tokens, where causal attention cannot see them
        lengths = np.diff(whole.bounds)
        assert (part.positions[~real] >= lengths[part.sequence[~real]]).all()


def test_the_work_of_causal_attention_is_even() -> None:
    whole = packed([64, 16, 128])
    work = [share(whole, rank, 4).positions.sum() for rank in range(4)]
    assert max(work) == min(work)


def test_a_rank_alone_has_the_micro_batch_as_it_is() -> None:
    whole = packed()
    alone = share(whole, 0, 1)
    for name in ("tokens", "labels", "positions", "bounds", "mask", "chosen"):
        np.testing.assert_array_equal(getattr(alone, name), getattr(whole, name))
    np.testing.assert_array_equal(alone.sequence, whole.tokens // 100)
    np.testing.assert_array_equal(alone.places, np.arange(len(whole.tokens)))
    assert len(share(whole, 0, 1, 8).tokens) == -(-len(whole.tokens) // 8) * 8


# ---- the same losses and gradients as on one rank, and as transformers'
def learn(spec: JobSpec, dataset: Path, out: Path, rank: int, store: Any, stop: Any) -> int:
    """One rank: train a few steps; write losses, and its share of the first step's gradients."""
    import torch

    from cray_agents.trainers.data.baseline_logprobs import BaselineLogprobs
    from cray_agents.trainers.data.samples import read_samples
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.training.parallel_groups import join_ranks
    from cray_agents.trainers.training.train_step import RankTraining

    join_ranks(spec.layout, rank, spec.layout.world, store, on_cpu=True)
    parent = Path(spec.parent)
    model = read_architecture(parent)
    known = BaselineLogprobs(read_samples(dataset))
    training = RankTraining(model, spec.layout, spec.hyperparameters, parent, on_cpu=True)
    scored = training.score(known.samples, [0, 1, 2])
    reports = [training.step(known)]
    buffer = training.wrapped_chunks[0].buffers[0]
    mine = buffer.grad_data.chunk(torch.distributed.get_world_size(buffer.data_parallel_group))
    names = {parameter: name for name, parameter in training.chunks[0].named_parameters()}
    index = {names[p]: (*ends[:2], list(p.shape)) for p, ends in buffer.param_index_map.items()}
    torch.save((mine[buffer.data_parallel_group.rank()].clone(), index), out / f"{rank}.pt")
    reports += [training.step(known) for _ in range(STEPS - 1)]
    measured = {
        "losses": [report.loss for report in reports],
        "norms": [report.grad_norm for report in reports],
        "scored": [row.tolist() for row in scored],
    }
    (out / f"{rank}.json").write_text(json.dumps(measured))
    return 0


def learnt(lab: Any, tmp_path: Path, name: str, **layout: Any) -> tuple[Any, dict[str, Any]]:
    """(what rank 0 measured, gradients by name where no tensor is split)."""
    import torch

    out = tmp_path / name
    out.mkdir()
    hyper = {"steps": STEPS, "max_tokens_per_microbatch": 90, "clip_grad": 1e9}
    spec = lab.spec("qwen3", layout=layout, hyper=hyper)
    work = partial(learn, spec, lab.home.dataset("ds"), out)
    assert run_forked(spec.layout.world, out / "logs", work) is None
    found = [json.loads((out / f"{r}.json").read_bytes()) for r in range(spec.layout.world)]
    assert all(one == found[0] for one in found)
    if spec.layout.tensor > 1:
        return found[0], {}
    saved = [torch.load(out / f"{rank}.pt") for rank in range(spec.layout.world)]
    whole = torch.cat([piece for piece, _ in saved])
    gradients = {
        name: whole[start:end].view(shape) for name, (start, end, shape) in saved[0][1].items()
    }
    return found[0], gradients


def by_transformers(lab: Any) -> tuple[float, dict[str, Any]]:
    """The first step's loss and gradients, sample by sample."""
    import torch
    from transformers import AutoModelForCausalLM

    from cray_agents.trainers.data.packer import step_units
    from cray_agents.trainers.data.samples import read_samples

    samples = read_samples(lab.home.dataset("ds"))
    spec = lab.spec("qwen3", hyper={"steps": STEPS})
    model = AutoModelForCausalLM.from_pretrained(spec.parent, dtype=torch.float32)
    total, count = torch.zeros(()), 0.0
    for unit in step_units(spec.hyperparameters, 0, samples.unit_weights):
        ids = torch.from_numpy(samples.tokens[unit])[None]
        mask = torch.from_numpy(samples.masks[unit])[1:]
        found = model(ids[:, :-1]).logits[0].log_softmax(-1)
        total = total - (found.gather(1, ids[0, 1:, None])[:, 0] * mask).sum()
        count += float(mask.sum())
    (total / count).backward()
    return (total / count).item(), {n: p.grad for n, p in model.named_parameters()}


SAME_TENSORS = {  # those that Megatron stores as transformers does
    "embedding.word_embeddings.weight": "model.embed_tokens.weight",
    "decoder.layers.0.input_layernorm.weight": "model.layers.0.input_layernorm.weight",
    "decoder.layers.0.self_attention.k_layernorm.weight": "model.layers.0.self_attn.k_norm.weight",
    "decoder.layers.1.self_attention.linear_proj.weight": "model.layers.1.self_attn.o_proj.weight",
    "decoder.layers.1.mlp.linear_fc2.weight": "model.layers.1.mlp.down_proj.weight",
    "output_layer.weight": "lm_head.weight",
}


@pytest.mark.megatron
def test_context_ranks_learn_what_one_rank_does(lab: Any, tmp_path: Path) -> None:
    lab.dataset()
    loss, expected = by_transformers(lab)
    alone, gradients = learnt(lab, tmp_path, "alone")
    apart, of_two = learnt(lab, tmp_path, "apart", context=2)
    both, _ = learnt(
        lab, tmp_path, "both", **Layout(context=2, tensor=2, sequence_parallel=True).model_dump()
    )
    assert alone["losses"][0] == pytest.approx(loss, rel=1e-6)
    for ours, theirs in SAME_TENSORS.items():
        for found in (gradients, of_two):
            scale = float(expected[theirs].abs().max())
            np.testing.assert_allclose(found[ours], expected[theirs], atol=2e-5 * scale)
    assert gradients.keys() == of_two.keys()
    for name, gradient in gradients.items():
        scale = float(gradient.abs().max())
        np.testing.assert_allclose(of_two[name], gradient, atol=2e-5 * scale, err_msg=name)
    for other in (apart, both):
        np.testing.assert_allclose(other["losses"], alone["losses"], rtol=1e-5)
        np.testing.assert_allclose(other["norms"], alone["norms"], rtol=1e-4)
        for row, wanted in zip(other["scored"], alone["scored"], strict=True):
            np.testing.assert_allclose(row, wanted, atol=2e-5)
