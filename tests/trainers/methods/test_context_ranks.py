"""Sequences split over context-parallel ranks: two real processes that reduce over gloo."""

from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cray_agents.trainers.job.launch import RankPlacement, run_ranks
from cray_agents.trainers.methods import METHODS
from cray_agents.trainers.methods.loss import TrainedTokens
from tests.support.trainers.method_batches import VARIANTS, answers, gradient, marked

RANKS = 2
LENGTHS = [5, 4, 1, 7, 2, 6]


def of_rank(whole: TrainedTokens, rank: int) -> TrainedTokens:
    """Its tokens in turns of two: of the answer of one token, a rank has none."""
    mine = torch.arange(len(whole.logprobs)) // 2 % RANKS == rank
    per_token = ("sequence", "weight", "advantages", "sampled", "before", "reference", "teacher")
    return replace(
        whole,
        logprobs=whole.logprobs.detach()[mine].requires_grad_(),
        **{name: getattr(whole, name)[mine] for name in (*per_token, "entropy")},
        context=torch.distributed.group.WORLD,
        counts=rank == 1,
    )


def measure(out: Path, rank: int, store: Any, stop: Any) -> int:
    """One rank: its part of each variant's loss, written down."""
    torch.set_num_threads(1)  # the threads that other tests started did not come through the fork
    torch.distributed.init_process_group("gloo", store=store, rank=rank, world_size=RANKS)
    found: dict[str, Any] = {}
    for name, (method, hyper) in VARIANTS.items():
        given = of_rank(marked(answers(41, LENGTHS), fillers=1), rank)
        loss = METHODS[method](given, hyper)
        measures = [value for pair in loss.measures.values() for value in pair]
        found[name] = torch.stack([loss.total, loss.count, *measures]).detach().numpy()
        found[f"{name} gradient"] = gradient(given, loss)
    np.savez(out / f"{rank}.npz", **found)
    torch.distributed.destroy_process_group()
    return 0


@pytest.fixture(scope="module")
def ranks(tmp_path_factory: pytest.TempPathFactory) -> list[Any]:
    out = tmp_path_factory.mktemp("ranks")
    place = RankPlacement(0, 1, RANKS, "127.0.0.1", 0)
    assert run_ranks(place, out / "logs", partial(measure, out)).code == 0
    return [np.load(out / f"{rank}.npz") for rank in range(RANKS)]


@pytest.mark.parametrize("name", VARIANTS)
def test_the_ranks_add_up_to_the_whole(ranks: list[Any], name: str) -> None:
    method, hyper = VARIANTS[name]
    whole = marked(answers(41, LENGTHS), fillers=1)
    loss = METHODS[method](whole, hyper)
    measures = [value for pair in loss.measures.values() for value in pair]
    expected = torch.stack([loss.total, loss.count, *measures]).detach().numpy()
    np.testing.assert_allclose(sum(rank[name] for rank in ranks), expected, rtol=1e-12, atol=1e-12)
    slopes, turns = np.zeros(sum(LENGTHS)), np.arange(sum(LENGTHS)) // 2 % RANKS
    for rank, found in enumerate(ranks):
        assert found[f"{name} gradient"].any()
        slopes[turns == rank] = found[f"{name} gradient"]
    np.testing.assert_allclose(slopes, gradient(whole, loss), rtol=1e-12, atol=1e-15)
