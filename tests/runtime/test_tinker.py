"""Tinker's wire API: the real client against the real gateway, over scripted engine and trainer."""

import json
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.runtime.gateway.tinker.protobuf import (
    write_bytes,
    write_whole,
)
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.trainers.session.command_journal import CommandJournal
from cray_agents.training_commands import ForwardBackward, OptimStep, Publish, Save
from tests.support.scripted_platform import platform
from tests.support.tinker.environment import TokenEngine, run

SCRIPT = Path(__file__).parents[1] / "support" / "tinker" / "script.py"


async def test_a_script_trains_saves_and_samples(tmp_path: Path) -> None:
    home, engines = Home(tmp_path / "home"), [TokenEngine(), TokenEngine()]
    _, secret = Keys(home).create("script", Role.train)
    with platform(home.root, engines[0], spares=[engines[1]]) as where:
        out = run(SCRIPT, where.url, f"tml-{secret}", folder=tmp_path)
    found = json.loads(out)
    model = found["model"]
    assert model.endswith(":train:0") and found["base"] == "Qwen/m"

    # what was sampled, by which version, with exact numbers; a snapshot never changes
    def samples(version: int, sampler: int, request: int) -> list[Any]:
        session = model.removesuffix(":train:0")
        name = f"{session}:sample:{sampler}/sample/{request}"
        return [[[version, k], [-1.0, -0.5], "stop", f"{name}/{k}"] for k in range(2)]

    assert found["before"] == samples(1, 0, 0)
    assert found["after"] == samples(2, 1, 0)
    assert found["alias"] == samples(2, 2, 0)
    assert found["still before"] == samples(1, 0, 1)
    requests = [r for engine in engines for r in engine.requests]
    asked = next(r for r in requests if "stop_token_ids" in r)
    wanted = {"model": "m@2", "prompt": [5, 6, 7], "n": 2, "max_tokens": 4, "seed": 1}
    assert asked.items() >= (wanted | {"top_k": 3, "stop_token_ids": [9]}).items()
    assert found["saved"] == [f"tinker://{model}/sampler_weights/{name}" for name in "ab"]
    assert found["checkpoints"] == [*found["saved"], f"tinker://{model}/weights/s"]
    assert found["weights"] == 4 and model in found["runs"]

    # log-probabilities of what is trained on, or of everything where only these are asked for
    assert found["imitation"] == [[[0, 0, -0.5, -0.5], [-0.5] * 4], {"loss:sum": 0.5 * 7}]
    assert found["scored"] == [[-0.5] * 4] and found["loaded"][1] == [[-0.5] * 4]
    for loss in ("importance_sampling", "ppo", "cispo"):
        assert found[loss] == [[0, 0, -0.5, -0.5]] * 2
    assert found["step"] == {"grad_norm": 1.0}

    refused = found["refused"]
    for name, reason in {
        "loss": "'gspo' is not served: use cross_entropy, importance_sampling, ppo, cispo",
        "setting": "ppo has no 'clip'; it has clip_low_threshold, clip_high_threshold",
        "targets": "only the next token is trained on",
        "column": "ppo does not read 'weights'",
        "base": "'Qwen/none' is not served here",
        "optimizer": "saved weights are without their optimizer's state",
        "name": "saved weights never change",
        "path": "no weights at",
        "alternatives": "topk_sample_logprobs is not served",
    }.items():
        assert reason in refused[name], name

    # the commands, the versions with their lineage, and the runs that were recorded
    folders = {}
    for spec in home.jobs.glob("*/spec.json"):
        folders[json.loads(spec.read_text())["commands"]] = CommandJournal(spec.parent)
    journal = folders[model]
    commands = [journal.command(number) for number in range(1, 12)]
    kinds = [Save, ForwardBackward, OptimStep, *[ForwardBackward] * 4, OptimStep, Publish, Save]
    assert [type(command) for command in commands] == [*kinds, Save]
    assert commands[2] == OptimStep(
        learning_rate=1e-3, weight_decay=0.1, clip_grad=2, beta1=0.9, beta2=0.95, eps=1e-12
    )
    first = commands[1].data[0]
    assert (first.token_ids, first.weights) == ([5, 6, 7, 8, 9], [0, 0, 0, 1, 2])
    policy = commands[5]
    assert policy.loss == "ppo" and policy.clip_low == pytest.approx(0.1)
    assert policy.data[1].weights == [0, 0, 0, 1, 1]
    assert policy.data[1].advantages == [0, 0, 0, -1, -1]
    assert policy.data[0].logprobs == [0, 0, 0, -0.5, -0.25]
    assert [command.backward for command in commands[3:5]] == [False, True]
    registry = Registry(home)
    assert [version.id for version in registry.versions("m")] == ["m@1", "m@2"]
    assert registry.promoted("m").id == "m@1"
    store = Store(home)
    runs = [run async for run in store.runs()] if hasattr(store, "runs") else []
    await store.close()


def datum(tokens: list[int], targets: list[int], weights: list[float]) -> bytes:
    import struct

    def tensor(kind: int, content: bytes, length: int) -> bytes:
        return write_bytes(1, content) + write_whole(3, kind) + write_whole(4, length)

    def column(name: str, content: bytes) -> bytes:
        return write_bytes(2, write_bytes(1, name.encode()) + write_bytes(2, content))

    text = write_bytes(1, struct.pack(f"<{len(tokens)}i", *tokens))
    ids = struct.pack(f"<{len(targets)}q", *targets)
    numbers = struct.pack(f"<{len(weights)}f", *weights)
    return (
        write_bytes(1, write_bytes(1, text))
        + column("target_tokens", tensor(2, ids, len(targets)))
        + column("weights", tensor(1, numbers, len(weights)))
    )


def forward_backward(model_id: str, sequence: int, *data: bytes) -> bytes:
    return (
        write_bytes(1, model_id.encode())
        + write_whole(2, sequence)
        + b"".join(write_bytes(3, one) for one in data)
        + write_bytes(4, b"cross_entropy")
    )
