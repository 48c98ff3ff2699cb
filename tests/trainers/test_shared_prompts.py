"""What prompts have in common: packed once, with the same numbers and gradients."""

from dataclasses import replace
from functools import partial
from itertools import groupby, takewhile
from operator import eq
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from cray_agents.trainers.data.packer import KEYS, Packed, microbatches, step_units
from cray_agents.trainers.data.samples import LEAST_SHARED, Samples
from cray_agents.training_jobs import Hyperparameters, Layout
from tests.support.trainers.forked_ranks import run_forked, training_in_rank

LAYOUTS = {
    "one": Layout(),
    "data2": Layout(data=2),
    "tensor2": Layout(tensor=2, sequence_parallel=True),
    "pipeline2": Layout(pipeline=2),
}
KINDS = ("qwen3", "llama-tied", "qwen3_moe")


def grouped(groups: list[tuple[int, int]], seed: int = 3, common: int = 0) -> Samples:
    """Samples after prompts: of each (tokens, samples), mixed; `common`: tokens of all prompts."""
    random = np.random.default_rng(seed)
    system = random.integers(1, 300, common).tolist()
    ids, masks = [], []
    for size, count in groups:
        prompt = [*system, *random.integers(1, 300, size).tolist()][:size]
        for _ in range(count):
            answer = random.integers(1, 300, int(random.integers(1, 9))).tolist()
            ids.append([*prompt, *answer])
            masks.append(np.array([0] * size + [1] * len(answer), np.float32))
        if common:  # a conversation that goes on
            ids.append([*ids[-1], 301, 302])
            masks.append(np.array([0] * len(ids[-2]) + [0, 1], np.float32))
    order = random.permutation(len(ids))
    made = Samples.of([ids[i] for i in order], [masks[i] for i in order])
    given = [np.where(mask > 0, random.normal(), 0).astype(np.float32) for mask in made.masks]
    return replace(made, advantages=given, rewards=np.ones(len(ids)))


def inputs_of(packed: Packed, place: int) -> tuple[list[int], list[int]]:
    """The tokens and positions that a sequence attends to, its own and those that it left out."""
    head, shared_tokens = int(packed.heads[place]), packed.shared_tokens[place]
    before = inputs_of(packed, head) if shared_tokens else ([], [])
    own = slice(packed.bounds[place], packed.bounds[place + 1])
    return tuple(  # type: ignore[return-value]
        [*first[:shared_tokens], *array[own].tolist()]
        for first, array in zip(before, (packed.tokens, packed.positions), strict=True)
    )


@given(
    groups=st.lists(st.tuples(st.integers(2, 60), st.integers(1, 6)), min_size=1, max_size=6),
    ranks=st.integers(1, 3),
    limit=st.integers(70, 300),
    pairs=st.booleans(),
    common=st.sampled_from([0, 25, 60]),
)
def test_every_sample_is_whole_and_prompts_are_packed_once(
    groups: list[tuple[int, int]], ranks: int, limit: int, pairs: bool, common: int
) -> None:
    samples = grouped(groups, common=common)
    units = [[i] for i in range(len(samples))]
    if pairs and len(samples) % 2 == 0:
        units = [[i, i + 1] for i in range(0, len(samples), 2)]
    found = []
    for rank in range(ranks):
        batches, members = microbatches(samples, units, limit, rank, ranks, share=True)
        for packed, inside in zip(batches, members, strict=True):
            for place, i in enumerate(inside):
                tokens, positions = inputs_of(packed, place)
                assert tokens == samples.tokens[i][:-1].tolist()
                assert positions == [*range(len(tokens))]
                own = slice(packed.bounds[place], packed.bounds[place + 1])
                rest = packed.shared_tokens[place] + 1
                assert packed.labels[own].tolist() == samples.tokens[i][rest:].tolist()
                assert packed.mask[own].tolist() == samples.masks[i][rest:].tolist()
                assert packed.mask[own].sum() == samples.marks[i]  # none is left out
                prompt = samples.tokens[i][: int((samples.masks[i] == 0).sum()) - 1].tolist()
                heads = [other for other in inside[:place] if len(samples.prompt(other))]
                alike = [samples.tokens[other][:-1].tolist() for other in heads]
                most = max((sum(takewhile(bool, map(eq, prompt, one))) for one in alike), default=0)
                assert packed.shared_tokens[place] == (most if most >= LEAST_SHARED else 0)
                found.append(i)
            alone = len(inside) == len(units[0])
            keys = int((packed.shared_tokens // KEYS).sum())
            assert alone or len(packed.tokens) + keys <= limit
    assert sorted(found) == [*range(len(samples))]


def test_a_group_is_divided_where_ranks_would_have_nothing() -> None:
    samples, units = grouped([(40, 8)]), [[i] for i in range(8)]
    shares = [microbatches(samples, units, 1000, rank, 2, share=True)[1] for rank in range(2)]
    sizes = [sum(map(len, members)) for members in shares]
    assert min(sizes) >= 3 and sum(sizes) == 8


def test_an_epoch_takes_whole_groups_in_a_random_order() -> None:
    samples = grouped([(40, 5), (7, 3), (30, 4), (50, 6)]).grouped()
    assert samples.groups is not None and len(set(samples.groups.tolist())) == 3 + 3
    hyper = Hyperparameters(steps=9, batch_size=6)
    weights = np.ones(len(samples))
    seen = [i for step in range(9) for i in step_units(hyper, step, weights, samples.groups)]
    epochs = [seen[:18], seen[18:36], seen[36:]]
    assert all(sorted(epoch) == [*range(18)] for epoch in epochs)
    numbers = [[int(samples.groups[i]) for i in epoch] for epoch in epochs]
    assert all(len([*groupby(epoch)]) == 6 for epoch in numbers)
    assert numbers[0] != numbers[1] and epochs[0] != epochs[1]
    alone = np.arange(18)
    assert step_units(hyper, 1, weights, alone) == step_units(hyper, 1, weights)


def compare(
    folders: list[Path], out: Path, layout: Layout, dtype: str, rank: int, store: Any, stop: Any
) -> int:
    """One rank: score and differentiate with prompts packed once, and with each."""
    import torch

    from cray_agents.trainers.data.packer import BaselineLogprobs
    from tests.trainers.test_numerics import put_together

    hyper = Hyperparameters(steps=1, batch_size=4, dtype=dtype, max_tokens_per_microbatch=160)
    samples = grouped([(40, 5), (23, 3), (7, 2), (30, 1)], common=18)
    trained = [np.where(mask > 0, -1.0, 0).astype(np.float32) for mask in samples.masks]
    columns = {"advantages": samples.advantages, "sampled": trained}
    baseline = BaselineLogprobs(samples, columns)
    training = training_in_rank(folders[0], layout, hyper, rank, store, method="grpo")
    units = [[i] for i in range(len(samples))]
    tokens, results = [], []
    assert training.shares_prompts
    for share in (False, True):
        training.shares_prompts = share
        scores = training.score(samples)
        training.drop_gradients()
        sums = training._sums(baseline, units, 0.0, 1.0, learn=True)
        put_together(training.wrapped_chunks)
        grown = [each.main_grad.clone() for part in training.chunks for each in part.parameters()]
        results.append([torch.tensor(np.concatenate(scores)), torch.tensor(sums["loss"]), *grown])
        tokens.append(int(sums["length"][1]))
    assert tokens[1] < 0.6 * tokens[0] and tokens[0] == sum(map(samples.cost, range(len(samples))))
    close = 1e-5 if dtype == "float32" else 0.02
    for plain, shared in zip(*results, strict=True):
        assert float((plain - shared).abs().max()) <= close * float(plain.abs().max())
    return 0


@pytest.mark.megatron
@pytest.mark.parametrize("name", list(LAYOUTS))
def test_numbers_and_gradients_are_those_of_whole_samples(
    name: str, models: Any, tmp_path: Path
) -> None:
    layout = LAYOUTS[name]
    for kind in KINDS if name == "one" else KINDS[:1]:
        for dtype in ("float32", "bfloat16") if name == "one" else ("float32",):
            work = partial(compare, [models(kind)], tmp_path, layout, dtype)
            assert run_forked(layout.world, tmp_path / f"{kind}-{dtype}", work) is None
