"""Loops of Tinker's cookbook, unchanged, against real vLLM and Megatron on a tiny model."""

import asyncio
import json
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from transformers import AutoTokenizer

from cray_agents import Platform
from cray_agents.paths import Home
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from cray_agents.trainers.job.journal import CommandJournal
from cray_agents.training import Hyperparameters
from cray_agents.training_commands import Datum, ForwardBackward
from tests.support.tinker import hub
from tests.support.tinker.environment import ROOT, python, run

ON = os.environ.get("CRAY_TEST_TINKER")
pytestmark = [
    pytest.mark.vllm,
    pytest.mark.megatron,
    pytest.mark.skipif(ON is None, reason="CRAY_TEST_TINKER is not set; `make soak` sets it"),
]

NAME = hub.MODEL.partition("/")[2]
OWN_LOSS = ROOT / "tests" / "support" / "tinker" / "own_loss.py"


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    python()  # skips where the client cannot be had, before anything is started
    folder = tmp_path_factory.mktemp("tinker")
    hub.make_hub(folder, rows=200)
    (folder / "cray-agents.toml").write_text("max_lora_rank = 8\n")
    return folder


def cli(folder: Path, *words: object) -> None:
    argv = [sys.executable, "-m", "cray_agents", *map(str, words), "--home", str(folder / "home")]
    done = subprocess.run(argv, cwd=folder, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr


@pytest.fixture(scope="module")
def url(folder: Path) -> Iterator[str]:
    cli(folder, "up", "--model", hub.MODEL, "--name", NAME, "--port", 0, "--detach")
    yield json.loads((folder / "home" / "platform.json").read_text())["url"]
    cli(folder, "down")


def loop(folder: Path, url: str, name: str, **settings: Any) -> list[dict[str, Any]]:
    """The metrics of a recipe's steps."""
    given = {"base_url": url, "model_name": hub.MODEL, "log_path": folder / name, **settings}
    words = [f"{key}={value}" for key, value in given.items()]
    run("-m", f"tinker_cookbook.recipes.{name}", *words, folder=folder, TINKER_API_KEY="tml-any")
    return [json.loads(line) for line in (folder / name / "metrics.jsonl").open()]


def test_supervised(folder: Path, url: str) -> None:
    settings = {"batch_size": 8, "learning_rate": 1e-2, "lora_rank": 8, "max_steps": 10}
    metrics = loop(folder, url, "sl_loop", **settings, save_every=5)
    losses = [row["train_mean_nll"] for row in metrics]
    assert len(losses) == 10 and losses[-1] < losses[0] - 1
    saved = [json.loads(line) for line in (folder / "sl_loop" / "checkpoints.jsonl").open()]
    assert [row["name"] for row in saved] == ["000005", "final"] and "sampler_path" in saved[-1]
    # had it died after the first save: it resumes there, with the optimizer's state
    (folder / "sl_loop" / "checkpoints.jsonl").write_text(json.dumps(saved[0]) + "\n")
    (folder / "sl_loop" / "metrics.jsonl").unlink()
    again = loop(folder, url, "sl_loop", **settings, save_every=5)
    assert [row["train_mean_nll"] for row in again] == pytest.approx(losses[5:], rel=1e-3)


def test_own_loss(folder: Path, url: str) -> None:
    """Its gradient goes to the trainer as weights of the tokens."""
    named, own, sampled, live = json.loads(run(OWN_LOSS, url, NAME, folder=folder))
    assert own == pytest.approx(named, rel=1e-4)
    assert sampled == pytest.approx(live, abs=1e-3)  # of a snapshot, and of what was saved


def test_reinforcement(folder: Path, url: str) -> None:
    asyncio.run(warm_up(folder, url))
    home = Home(folder / "home")
    registry = Registry(home)
    base = registry.promoted(NAME)
    before = {version.id for version in registry.versions(NAME)}
    metrics = loop(
        folder, url, "rl_loop", batch_size=2, group_size=8, learning_rate=1e-3, lora_rank=8,
        max_steps=3, max_tokens=16, save_every=0, loss_fn="importance_sampling",
    )  # fmt: skip
    assert [row["step"] for row in metrics] == [0, 1, 2]
    assert any(0 < row["reward/total"] < 1 for row in metrics)
    newer = Registry(home)
    snapshots = [v for v in newer.versions(NAME) if v.id not in before]
    [job] = {version.job for version in snapshots}
    assert snapshots and newer.promoted(NAME) == base

    # each batch came from a version of its own, with the trainer's own log-probabilities
    commands = CommandJournal(home.job(job))
    trained = {}
    for number in range(1, commands.last + 1):
        if isinstance(command := commands.command(number), ForwardBackward):
            trained[number] = command
            assert commands.result(number).measures["ratio"] == pytest.approx(1, abs=1e-2)
    store = Store(home)
    calls = [call for r in store.runs() for call in r.calls]
    asyncio.run(store.close())
    versions = sorted({call.model for call in calls})
    assert versions[0] == base.id and len(versions) >= len(trained)
    sampled = {(*call.prompt_token_ids, *call.token_ids) for call in calls}
    rows = {tuple(datum.token_ids) for command in trained.values() for datum in command.data}
    assert rows and rows <= sampled


async def warm_up(folder: Path, url: str) -> None:
    """Promote a version that answers with one of the digits, by chance."""
    tokenizer = AutoTokenizer.from_pretrained(folder / hub.MODEL)

    def datum(question: str, digit: int) -> Datum:
        prompt = tokenizer.encode(hub.prompt(question), add_special_tokens=False)
        answer = tokenizer.encode(hub.answer(digit), add_special_tokens=False)
        weights = [*[0.0] * len(prompt), *[1 / 128] * len(answer)]
        return Datum(token_ids=prompt + answer, weights=weights)

    data = [datum(question, digit) for question in hub.questions(8) for digit in hub.DIGITS]
    platform = Platform(url)
    hyper = Hyperparameters(steps=1, seed=1)
    session = await platform.training_session("warm", parent=f"{NAME}@1", hyperparameters=hyper)
    for _ in range(20):
        await session.forward_backward(data)
        await session.optim_step(3e-3)
    version = await session.publish(NAME)
    await platform.promote(version, who="test", reason="warm")
