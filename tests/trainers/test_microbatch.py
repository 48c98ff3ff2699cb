"""The micro-batch of jobs that name none: by the memory of the GPUs, declared here, or 4,096."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from cray_agents.cli import app
from cray_agents.errors import NotFound
from cray_agents.paths import Home
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.planning.arithmetic import estimate_memory
from cray_agents.trainers.planning.cluster_resources import Gpus, Resources
from cray_agents.trainers.planning.job_layout import SIZES, choose_microbatch
from cray_agents.trainers.planning.layouts import RESERVE, LayoutQuestion, choose_layout
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout, Lora
from tests.support.trainers.model_configs import LLAMA_2_70B, LLAMA_31_8B, hyper, written
from tests.support.waiting_scheduler import WaitingScheduler

GIB = {"L4": 22, "H100": 79, "H200": 140}


def chosen(folder: Path, config: dict[str, Any], gib: float, ranks: int = 1, **how: Any) -> int:
    sizes = how.pop("hyper", hyper(lora=Lora()))
    model = written(folder, config)
    return choose_microbatch(LayoutQuestion(model, sizes, ranks, gib, 8, 2048, **how))


# ---- the choice


@pytest.mark.parametrize(("gpu", "tokens"), [("L4", 4096), ("H100", 8192), ("H200", 16384)])
def test_more_memory_is_more_tokens(tmp_path: Path, gpu: str, tokens: int) -> None:
    """LoRA of an 8B model. The next size does not fit, by the planner's own estimate."""
    assert chosen(tmp_path, LLAMA_31_8B, GIB[gpu]) == tokens
    assert chosen(tmp_path, LLAMA_31_8B, GIB[gpu], layout=Layout(), recompute="none") == tokens
    model, room = written(tmp_path, LLAMA_31_8B), GIB[gpu] * (1 - RESERVE)

    def gib(size: int) -> float:
        sizes = hyper(lora=Lora(), max_tokens_per_microbatch=size)
        return estimate_memory(model, Layout(), sizes, sequence_length=2048).gib

    assert gib(2 * tokens) > room
    assert gib(tokens) <= room or tokens == SIZES[-1]


def test_a_small_model_takes_the_most(tmp_path: Path) -> None:
    small = LLAMA_31_8B | {"num_hidden_layers": 2, "vocab_size": 32000}
    assert chosen(tmp_path, small, GIB["H100"]) == 65536


def test_a_size_that_would_cost_speed_is_not_taken(tmp_path: Path) -> None:
    """On 8 H200 65,536 tokens fit by computing activations twice, 8,192 without."""

    def best(tokens: int) -> Any:
        model, sizes = written(tmp_path, LLAMA_31_8B), hyper(max_tokens_per_microbatch=tokens)
        return choose_layout(LayoutQuestion(model, sizes, 8, GIB["H200"], 8, 2048))

    how: dict[str, Any] = {"ranks": 8, "hyper": hyper()}
    assert chosen(tmp_path, LLAMA_31_8B, GIB["H200"], **how) == 8192
    assert best(16384).fits and best(16384).slowdown > best(4096).slowdown
    assert chosen(tmp_path, LLAMA_31_8B, GIB["H200"], recompute="full", **how) == 65536


def test_a_pipeline_keeps_its_micro_batches(tmp_path: Path) -> None:
    """Fewer and larger ones would leave its stages waiting."""
    layout = Layout(tensor=8, pipeline=4, sequence_parallel=True)
    how: dict[str, Any] = {"layout": layout, "recompute": "full"}
    tokens = chosen(tmp_path, LLAMA_2_70B, GIB["H200"], 32, hyper=hyper(), **how)
    assert tokens == SIZES[-1]
    one_stage = how | {"layout": layout.model_copy(update={"pipeline": 1, "data": 4})}
    assert chosen(tmp_path, LLAMA_2_70B, 400, 32, hyper=hyper(), **one_stage) > tokens


def test_what_does_not_fit_at_all_takes_the_least(tmp_path: Path) -> None:
    assert chosen(tmp_path, LLAMA_2_70B, 22, hyper=hyper()) == 4096


# ---- the trainer
@pytest.fixture
def ask(home: Home, models: Any) -> Any:
    """A spec of a tiny model that leaves its micro-batch to the trainer."""
    home.dataset("ds").mkdir(parents=True)
    counts = {"splits": {"train": {"samples": 10, "tokens": 300}}}
    (home.dataset("ds") / "manifest.json").write_text(json.dumps(counts))

    def spec(**hyper: Any) -> JobSpec:
        return JobSpec(
            dataset="ds",
            parent=str(models("llama")),
            parent_sha256="0" * 64,
            hyperparameters=Hyperparameters(steps=1, learning_rate=1e-3, **hyper),
        )

    return spec


def on_gpus(home: Home, gib: float) -> MegatronTrainer:
    return MegatronTrainer(home, WaitingScheduler(), Resources(1, 1, Gpus("L4", gib, 1)))


def tokens_of(home: Home, job_id: str) -> int:
    return JobJournal(home, job_id).spec().hyperparameters.max_tokens_per_microbatch


def test_jobs_on_gpus_get_one_before_their_id(home: Home, ask: Any) -> None:
    large, middle = on_gpus(home, 22), on_gpus(home, 0.08)
    first = large.submit(ask()).id
    assert tokens_of(home, first) == 65536
    assert first == ask(max_tokens_per_microbatch=65536, dtype="bfloat16").id
    second = middle.submit(ask(seed=1)).id
    assert 4096 < tokens_of(home, second) < 65536
    (event, *_) = JobJournal(home, second).events()
    assert f"micro-batches of {tokens_of(home, second):,} tokens" in event["reasons"][0]

    named = middle.submit(ask(max_tokens_per_microbatch=5000)).id
    assert tokens_of(home, named) == 5000
    assert middle.submit(ask()).id == first  # a job that is there goes on, on other GPUs too
    assert middle.submit(ask(max_tokens_per_microbatch=4096)).id not in (first, second, named)


def test_jobs_on_cpus_keep_their_id(home: Home, ask: Any) -> None:
    trainer = MegatronTrainer(home, WaitingScheduler(), Resources(ranks=1))
    asked = ask()
    assert trainer.submit(asked).id == asked.id == ask(max_tokens_per_microbatch=4096).id
    assert tokens_of(home, asked.id) == 4096


def test_what_cannot_be_read_is_told_as_ever(home: Home, ask: Any, tmp_path: Path) -> None:
    trainer = on_gpus(home, 22)
    with pytest.raises(NotFound) as gone:
        trainer.submit(ask().model_copy(update={"parent": str(tmp_path / "gone")}))
    assert gone.value.param == "parent"
    with pytest.raises(NotFound, match="none"):
        trainer.submit(ask().model_copy(update={"dataset": "none"}))


def test_a_job_by_commands_gets_one_too(home: Home, ask: Any) -> None:
    asked = ask().model_copy(update={"dataset": "", "commands": "mine"})
    job = on_gpus(home, 22).submit(asked)
    assert tokens_of(home, job.id) == 65536
    assert JobJournal(home, job.id).spec().layout == Layout()


def test_fine_tuning_gets_one_before_its_data_is_read(
    home: Home, models: Any, tmp_path: Path
) -> None:
    parent, on_cpus = models("llama"), MegatronTrainer(home, WaitingScheduler(), Resources())
    assert on_gpus(home, 22).microbatch(parent) == 65536
    assert 4096 < on_gpus(home, 0.08).microbatch(parent) < 65536
    assert on_cpus.microbatch(parent) == on_gpus(home, 22).microbatch(tmp_path / "gone") == 4096


# ---- the plan
def test_the_plan_takes_what_the_trainer_would(tmp_path: Path) -> None:
    written(tmp_path, LLAMA_31_8B)
    words = ["plan", "train", "--model", str(tmp_path), "--tokens", "1e6", "--gpus", "1", "--json"]
    words += ["--gpu", "H200", "--lora-rank", "16", "--sequence-length", "2048"]

    def planned(*more: str) -> Any:
        done = CliRunner().invoke(app, [*words, *more], catch_exceptions=False)
        return json.loads(done.stdout)

    assert planned()["microbatch_tokens"] == 16384
    assert planned("--microbatch-tokens", "5000")["microbatch_tokens"] == 5000
    more, fewer = planned()["memory_gib"], planned("--microbatch-tokens", "4096")["memory_gib"]
    assert more["total"] > fewer["total"]
