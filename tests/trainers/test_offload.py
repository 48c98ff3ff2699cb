"""Offload: weights and optimizer leave a rank's memory between two steps, and nothing changes."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from cray_agents.trainers.data.samples import read_samples
from cray_agents.training_jobs import JobSpec
from tests.support.trainers.forked_ranks import run_forked, training_in_rank

pytestmark = pytest.mark.megatron


def sail(spec: JobSpec, dataset: Path, out: Path, rank: int, store: Any, stop: Any) -> int:
    """One rank: four steps, with its state elsewhere after the second and the third."""
    import torch

    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.training.offload import Offload, gradients, kept

    training = training_in_rank(Path(spec.parent), spec.layout, spec.hyperparameters, rank, store)
    known = BaselineLogprobs(read_samples(dataset))
    offload, losses = Offload(training), []

    def sizes() -> list[int]:
        tensors = [*kept(training), *gradients(training)]
        return [tensor.untyped_storage().nbytes() for tensor in tensors]

    for number in range(4):
        if number >= 2 and out.name == "moved":
            before, state = sizes(), [tensor.clone() for tensor in kept(training)]
            views = [tensor.data_ptr() - tensor.untyped_storage().data_ptr()
                     for tensor in kept(training)]  # fmt: skip
            offload.move_out()
            assert set(sizes()) == {0} and offload.nbytes > 3 * 4 * 30_000
            offload.move_in()
            assert sizes() == before
            assert all(map(torch.equal, kept(training), state))
            assert views == [tensor.data_ptr() - tensor.untyped_storage().data_ptr()
                             for tensor in kept(training)]  # fmt: skip
            assert not any(tensor.any() for tensor in gradients(training))
        report = training.step(known)
        losses.append((report.loss, report.grad_norm))
    weights = [float(each.double().sum()) for each in kept(training)]
    (out / f"{rank}.json").write_text(json.dumps([losses, weights]))
    return 0


def run(spec: JobSpec, dataset: Path, out: Path) -> list[Any]:
    out.mkdir()
    work = partial(sail, spec, dataset, out)
    assert run_forked(spec.layout.world, out / "logs", work) is None
    return [json.loads((out / f"{rank}.json").read_bytes()) for rank in range(spec.layout.world)]


def test_training_goes_on_to_the_bit(lab: Any, tmp_path: Path) -> None:
    """Of experts in bfloat16; test_session.py has whole jobs of other kinds."""
    lab.dataset()
    hyper = {"steps": 4, "dtype": "bfloat16"}
    spec = lab.spec("qwen3_moe", layout={"data": 2, "expert": 2}, hyper=hyper)
    dataset = lab.home.dataset("ds")
    moved = run(spec, dataset, tmp_path / "moved")
    assert moved == run(spec, dataset, tmp_path / "stayed")
