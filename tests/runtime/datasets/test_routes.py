"""Routes of a mixture: from what vLLM returns to a job's samples, and refused by name there."""

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.errors import BadInput
from cray_agents.records import ModelCall
from cray_agents.runtime.datasets.run_samples import merge_calls
from cray_agents.trainers.data.packer import pack
from cray_agents.trainers.data.samples import Samples, read_samples
from cray_agents.trainers.job.job_inputs import check_routes
from cray_agents.training_jobs import JobSpec, Layout
from tests.support.datasets.dataset_runs import call, made, run_events, several, stored
from tests.support.trainers.model_configs import SMALL

LAYERS, TOP = 2, 2


def encode(*given: Any) -> Any:
    """As the plug-in does. Its import is vLLM's, which would be part of every collection."""
    from cray_agents.runtime.vllm_plugins import capture

    return capture.encode(*given)


def experts(first: int, count: int) -> np.ndarray:
    """Of tokens [count, layers, experts], told apart by their numbers."""
    return np.arange(first, first + count * LAYERS * TOP).reshape(count, LAYERS, TOP) % 300


async def test_they_stand_beside_the_tokens_that_went_there(tmp_path: Path) -> None:
    first, second = experts(0, 3), experts(100, 6)
    calls = [
        call("a", [1, 2], [3, 4], routes=encode([first], 3)),
        call("b", [1, 2, 3, 4, 5], [6, 7], started=2.0, routes=encode([second], 6)),
    ]
    events = several(run_events("known", calls=calls), run_events("unknown", [8, 9]))
    home = await stored(tmp_path, events)
    manifest, _ = made(home, loop="l", router_replay=True)
    samples = read_samples(home.dataset(manifest["id"]), "sft")
    of = dict(zip(samples.run_ids, samples.routes, strict=True))
    whole = np.concatenate([first, second[3:]]).reshape(6, -1)
    assert samples.tokens[samples.run_ids.index("known")].tolist() == [1, 2, 3, 4, 5, 6, 7]
    assert of["known"].tolist() == [*whole.tolist(), [-1] * LAYERS * TOP]  # of the last: nobody
    assert of["unknown"].tolist() == [[-1] * LAYERS * TOP] * 4
    packed = pack(samples, [0, 1])
    assert packed.routes is not None and len(packed.routes) == len(packed.tokens) == 9
    plain, rows = made(home, loop="l")
    assert plain["id"] != manifest["id"] and all("routes" not in row for row in rows)
    assert not read_samples(home.dataset(plain["id"]), "sft").routes


def test_vllms_pieces_become_a_calls_routes() -> None:
    chosen = experts(0, 5)
    pieces = [chosen[:2], chosen[2:].astype(np.uint8)]  # two too many: a stop string
    recorded = ModelCall.model_validate(call("c", [1, 2], [3, 4], routes=encode(pieces, 3)))
    [sample] = merge_calls([recorded])
    assert np.frombuffer(sample.routes or b"", "<u2").tolist() == [
        *chosen[:3].flatten().tolist(),
        *[0xFFFF] * LAYERS * TOP,
    ]
    assert encode([], 3) is None


def test_what_cannot_be_replayed_is_refused_by_name() -> None:
    mixture = replace(SMALL, kind="mixtral", layers=2, experts=4, experts_per_token=2)
    samples = replace(Samples.of([[1, 2]]), routes=[np.full((2, 4), 3, np.int32)])
    spec: Any = JobSpec.model_validate(
        {"dataset": "d", "parent": "/m", "parent_sha256": "0" * 64, "code": "0",
         "hyperparameters": {"steps": 1, "batch_size": 1}}
    )  # fmt: skip
    check_routes(samples, mixture, spec)
    cases = {
        "backend=transformers: take": (replace(mixture, backend="transformers"), {}),
        "not of this model: 4 numbers": (replace(mixture, layers=3), {}),
        "not of this model: expert 3 of 3": (replace(mixture, experts=3), {}),
        "recompute=none": (mixture, {"layout": Layout(pipeline=2), "recompute": "moe"}),
    }
    for message, (model, changes) in cases.items():
        with pytest.raises(BadInput, match=message):
            check_routes(samples, model, spec.model_copy(update=changes))
