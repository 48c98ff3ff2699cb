"""Resources of a job from the configuration, and the layout of jobs that name none."""

import json
from math import ceil
from pathlib import Path
from typing import Any

import pytest
import torch
from pydantic import ValidationError
from transformers import AutoConfig, AutoModelForCausalLM

from cray_agents.cli.jobs import print_script
from cray_agents.config import load_config
from cray_agents.config.job_section import JobSettings
from cray_agents.errors import BadInput, ConfigError, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.scheduler.batch_script import batch_script
from cray_agents.runtime.scheduler.gpu_placement import nvidia_devices
from cray_agents.trainers.job.job_command import notice_seconds
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.trainers.planning.cluster_resources import (
    Gpus,
    HostResources,
    Resources,
    parse_nvidia_smi,
    resources_of,
)
from cray_agents.trainers.planning.job_layout import LOUD, usual_length
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout, Lora
from tests.support.trainers.model_configs import LLAMA_2_70B
from tests.support.waiting_scheduler import WaitingScheduler

H100 = {"train_gpu": "h100"}
CONFIG = LLAMA_2_70B | {"vocab_size": 128256}


def resources(tmp_path: Path, **config: Any) -> Resources:
    return resources_of(load_config(config, tmp_path))


def open_spec(parent: Path, **changes: Any) -> JobSpec:
    """One that leaves its layout to the trainer."""
    hyper = {"steps": 10, "batch_size": 64, "dtype": "bfloat16", **changes.pop("hyper", {})}
    return JobSpec(
        dataset="ds",
        parent=str(parent),
        parent_sha256="0" * 64,
        hyperparameters=Hyperparameters(**{"learning_rate": 1e-3, **hyper}),
        **changes,
    )


def hollow_weights(model: Path) -> None:
    """The weights that a config implies: a real header, and a hole in the file for the numbers."""
    with torch.device("meta"):
        tensors = AutoModelForCausalLM.from_config(AutoConfig.from_pretrained(model)).state_dict()
    header, end = {}, 0
    for name, tensor in tensors.items():
        place = [end, end := end + 2 * tensor.numel()]
        header[name] = {"dtype": "BF16", "shape": [*tensor.shape], "data_offsets": place}
    text = json.dumps(header).encode()
    with (model / "model.safetensors").open("wb") as file:
        file.write(len(text).to_bytes(8, "little") + text)
        file.truncate(8 + len(text) + end)


@pytest.fixture
def llama70(home: Home, tmp_path: Path) -> Path:
    """Its config, and a dataset of samples of 1,000 tokens."""
    folder = tmp_path / "llama70"
    folder.mkdir()
    (folder / "config.json").write_text(json.dumps(CONFIG))
    hollow_weights(folder)
    home.dataset("ds").mkdir(parents=True)
    counts = {"splits": {"train": {"samples": 50, "tokens": 50_000}}}
    (home.dataset("ds") / "manifest.json").write_text(json.dumps(counts))
    return folder


# ---- the configuration
def test_named_gpus_are_had_by_every_node(tmp_path: Path) -> None:
    two = resources(tmp_path, **H100, train_nodes=2, train_gpus_per_node=8, train_minutes=90)
    assert two == Resources(16, 2, Gpus("H100", 79, 8), two.cpus_per_rank, 90)
    assert two.ranks_per_node == 8
    assert str(two).startswith("16 ranks on 2 nodes of 8 x H100 (79 GiB), ")
    assert str(two).endswith(", for at most 90 minutes")
    fewer = resources(tmp_path, **H100, train_ranks=2, train_gpus_per_node=4, train_cpus_per_rank=3)
    assert str(fewer) == "2 ranks on a node of 4 x H100 (79 GiB), 3 cores each"


def test_without_gpus_ranks_are_few(tmp_path: Path) -> None:
    cpu = resources(tmp_path, train_gpus="off")
    assert cpu.gpus is None and 1 <= cpu.ranks <= 2
    assert str(resources(tmp_path, train_gpus="off", train_ranks=1)) == (
        "1 rank on a node of CPU cores, 1 core each"
    )
    if not nvidia_devices():
        assert resources(tmp_path) == cpu


def test_ranks_divide_the_cores_of_a_host_that_runs_all_jobs(tmp_path: Path) -> None:
    here = resources_of(load_config({"train_gpus": "off"}, tmp_path), here=True)
    assert here.host is not None and here.cpus_per_rank == here.host.cores // here.ranks
    eight = Resources(2, cpus_per_rank=4, host=HostResources(8, 16), divides=True)
    assert [eight.cores_each(world) for world in (1, 2, 4, 8, 9)] == [4, 4, 2, 1, 1]
    given = load_config({"train_gpus": "off", "train_cpus_per_rank": 7}, tmp_path)
    assert resources_of(given, here=True).cores_each(8) == 7, "what is set is not changed"
    assert resources(tmp_path, train_gpus="off").cores_each(1) == 1, "a site's nodes are its own"


def test_jobs_of_this_host_use_the_gpus_that_serving_leaves(tmp_path: Path) -> None:
    def here(*host_gpus: str, **config: Any) -> Resources:
        return resources_of(load_config(config, tmp_path), here=True, host_gpus=host_gpus)

    seven = here(*"1234567", **H100)
    assert (seven.ranks, seven.gpus) == (7, Gpus("H100", 79, 7))
    with pytest.raises(ConfigError, match="it has 7 GPUs"):
        here(*"1234567", **H100, train_ranks=8)
    assert here().gpus is None  # all are hidden from the platform
    assert here("1", train_gpus="off").gpus is None
    assert here("MIG-1", "MIG-2", **H100).ranks == 1  # CUDA shows a job one of them


@pytest.mark.parametrize(
    ("config", "key", "told"),
    [
        ({"train_gpu": "H1000"}, "train_gpu", "known are GB200"),
        ({"train_gpu": "H100", "train_gpus": "off"}, "train_gpu", "no effect"),
        ({"train_ranks": 3, "train_nodes": 2}, "train_ranks", "evenly over train_nodes = 2"),
        ({**H100, "train_ranks": 16, "train_gpus_per_node": 8}, "train_ranks", "it has 8 GPUs"),
        ({"train_minutes": 0}, "train_minutes", "greater than 0"),
        ({"train_gpus": "some"}, "train_gpus", "'auto', 'on' or 'off'"),
        pytest.param(
            {"train_gpus": "on"},
            "train_gpu",
            "train_gpu = 'H100'",
            marks=pytest.mark.skipif(bool(nvidia_devices()), reason="this host has GPUs"),
        ),
    ],
)
def test_a_configuration_that_cannot_be_is_refused(
    tmp_path: Path, config: dict[str, Any], key: str, told: str
) -> None:
    with pytest.raises(ConfigError, match=told) as refused:
        resources(tmp_path, **config)
    assert refused.value.param == key


def test_what_nvidia_smi_says() -> None:
    """Of several GPUs the smallest counts; what is no answer is told with what to do."""
    assert parse_nvidia_smi("NVIDIA H200, 143771\nNVIDIA H200, 143771\n") == ("H200", 143771 / 1024)
    assert parse_nvidia_smi("NVIDIA A100-SXM4-40GB, 40960\nA, 1024\n") == ("A100-40GB", 1.0)
    assert parse_nvidia_smi("Quadro P400, 2048\n") == ("Quadro P400", 2.0)
    for broken in ("", "No devices were found\n", "NVIDIA H200, [N/A]\n"):
        with pytest.raises(ConfigError, match="train_gpus = 'off'"):
            parse_nvidia_smi(broken)


@pytest.mark.parametrize(
    ("world", "nodes"), [(16, 2), (8, 1), (1, 1), (12, 2), (24, 3), (17, 17), (40, 5)]
)
def test_a_layout_of_its_own_gets_as_many_nodes_as_it_takes(world: int, nodes: int) -> None:
    assert Resources(16, 2, Gpus("H100", 79, 8)).nodes_for(world) == nodes
    assert Resources(4, 2).nodes_for(world) == (1 if world % 2 else 2)


# ---- layouts
SCRIPT = """\
#!/bin/bash
#SBATCH --job-name={job}
#SBATCH --nodes=2
#SBATCH --ntasks=16
#SBATCH --ntasks-per-node=8
#SBATCH --cpus-per-task=6
#SBATCH --gpus-per-node=8
#SBATCH --time=240
#SBATCH --signal=TERM@{notice}
#SBATCH --chdir={folder}
#SBATCH --output={folder}/log.txt
#SBATCH --open-mode=append
#SBATCH --no-requeue

export NCCL_DEBUG=WARN
export OMP_NUM_THREADS=6
export PYTHONSAFEPATH=1
"""
SRUN = (
    "srun --nodes=2 --ntasks=2 --ntasks-per-node=1 --cpus-per-task=48 --cpu-bind=cores"
    " --quiet --kill-on-bad-exit=1 --export=ALL "
)


def test_a_large_model_is_spread_over_two_nodes(home: Home, llama70: Path, tmp_path: Path) -> None:
    config = {"train_nodes": 2, "train_gpus_per_node": 8, "train_cpus_per_rank": 6}
    given = resources(tmp_path, **H100, **config, train_minutes=240)
    scheduler = WaitingScheduler()
    trainer = MegatronTrainer(home, scheduler, given)
    asked = open_spec(llama70, hyper={"lora": Lora()})
    assert trainer.submit(asked).id == asked.id
    journal = JobJournal(home, asked.id)
    spec = journal.spec()
    assert spec.layout == Layout(data=4, tensor=4, sequence_parallel=True)
    assert spec.recompute == "none"
    (event,) = journal.events()
    assert (event["event"], event["layout"]) == ("layout", spec.layout.model_dump())
    assert "70.6 billion parameters" in event["reasons"][0] and LOUD not in event["reasons"]
    log = journal.log.read_text().splitlines()
    assert log[0] == "layout data=4 tensor=4 sequence_parallel=true:"
    assert [line.strip() for line in log[1:]] == event["reasons"]

    (command,) = scheduler.commands
    script = batch_script(command, tmp_path / "ledger", settings=JobSettings(inherit=[]))
    notice = notice_seconds(spec, home, 2)
    start = SCRIPT.format(job=spec.id, folder=journal.folder, notice=notice)
    assert script.startswith(start)
    assert SRUN in script
    assert command.kind == "training" and command.slurm_options == []
    again = MegatronTrainer(home, scheduler, Resources())  # as of a platform with another config
    assert again.submit(asked).state == "queued"
    assert journal.spec() == spec and len(scheduler.commands) == 1
    assert len(journal.events()) == 1


def test_what_slurm_gets_for_a_job_can_be_printed(
    home: Home, llama70: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    monkeypatch.setenv("NCCL_IB_HCA", "mlx5")
    settings = {**H100, "train_nodes": 2, "train_gpus_per_node": 8, "train_minutes": 240}
    settings |= {"home": home.root, "slurm_options": ["--partition=gpu"]}
    config = load_config(settings | {"job": {"slurm_options": {"session": ["--qos=a"]}}}, tmp_path)
    trainer = MegatronTrainer(home, WaitingScheduler(), resources_of(config))
    own = open_spec(llama70, hyper={"lora": Lora()}, slurm_options=["--qos=long"])
    assert trainer.submit(own).id == own.id == open_spec(llama70, hyper={"lora": Lora()}).id
    print_script(config, own.id)
    script = capsys.readouterr().out
    options = [line[10:] for line in script.splitlines() if line.startswith("#SBATCH --")]
    assert options[-2:] == ["partition=gpu", "qos=long"]
    assert "export NCCL_IB_HCA=mlx5\n" in script and f"ledger={home.slurm}/ledger/" in script
    assert f"cray_agents.trainers.job.job {home.job(own.id)}/spec.json &\n" in script
    stays = open_spec(llama70, session="s")
    trainer.submit(stays)
    print_script(config, stays.id)
    script = capsys.readouterr().out
    assert "#SBATCH --qos=a\n" in script and "session.session_process" in script


def test_a_jobs_own_options_change_neither_what_runs_nor_where(home: Home, llama70: Path) -> None:
    processes = WaitingScheduler()
    processes.name = "local"
    trainer = MegatronTrainer(home, processes, Resources(ranks=2))
    with pytest.raises(BadInput, match="--qos=a: jobs of this platform are local processes"):
        trainer.submit(open_spec(llama70, slurm_options=["--qos=a"]))
    assert not processes.commands and not list(home.jobs.glob("*"))
    for options, said in (
        (["--output=/tmp/a"], "--output is the platform's own"),
        (["--get-user-env"], "cannot be given to a single job; these can: --account"),
        (["-p gpu"], "write it as --partition=gpu"),
    ):
        with pytest.raises(ValidationError, match=said):
            open_spec(llama70, slurm_options=options)
    with pytest.raises(ValidationError, match=r"section \[job.slurm_options\]"):
        open_spec(llama70, slurm_options=["--qos=a"], session="s")


def test_the_early_signal_leaves_time_for_what_saves_took(home: Home, llama70: Path) -> None:
    lora, whole = open_spec(llama70, hyper={"lora": Lora()}), open_spec(llama70)
    assert 60 < notice_seconds(lora, home, 2) < 75  # adapters are small
    first = notice_seconds(whole, home, 16)
    assert first == 60 + ceil(2 * 12 * 70_553_706_496 / 16 / 5e8)
    journal = JobJournal(home, whole.id)
    journal.folder.mkdir(parents=True)
    for step in range(1, 20):
        journal.event("step", step=step, seconds=100.0 if step == 1 else 7.0)
    journal.event("saved", step=10, seconds=80.0)
    journal.event("saved", step=19, seconds=95.5)
    journal.close()
    assert notice_seconds(whole, home, 16) == 60 + 7 + 2 * 95.5
    command = MegatronTrainer(home, WaitingScheduler(), Resources(16, 2)).command_of(whole)
    assert command.notice_seconds == notice_seconds(whole, home, 2)
    gone = whole.model_copy(update={"parent": "/nowhere", "dataset": "other"})
    assert notice_seconds(gone, home, 1) == 60


def test_a_dtype_that_was_not_given_follows_the_ranks(home: Home, llama70: Path) -> None:
    fields = {"dataset": "ds", "parent": str(llama70), "parent_sha256": "0" * 64}
    asked, named = (
        JobSpec(
            **fields, hyperparameters=Hyperparameters(learning_rate=1e-3, steps=1, seed=n, **dtype)
        )
        for n, dtype in enumerate(({}, {"dtype": "float32"}))
    )
    on_gpus = Resources(16, 2, Gpus("H100", 79, 8))
    trainer = MegatronTrainer(home, WaitingScheduler(), on_gpus)
    decided = trainer.submit(asked).id
    spec = JobJournal(home, decided).spec()
    assert (spec.id, spec.hyperparameters.dtype) == (decided, "bfloat16")
    assert decided != asked.id and trainer.submit(asked).id == decided
    assert trainer.submit(named).id == named.id
    assert JobJournal(home, named.id).spec().hyperparameters.dtype == "float32"
    (event, *_) = JobJournal(home, decided).events()
    assert any("billion parameters in bfloat16" in reason for reason in event["reasons"])

    slow, fast = (
        MegatronTrainer(home, WaitingScheduler(), Resources(2, host=HostResources(2, 9e9, has)))
        for has in (False, True)
    )
    assert fast.dtype(llama70) == "float32"  # as its config has it
    (llama70 / "config.json").write_text(json.dumps(CONFIG | {"dtype": "bfloat16"}))
    assert (slow.dtype(llama70), fast.dtype(llama70)) == ("float32", "bfloat16")
    assert fast.dtype(home.root) == "float32"
    assert fast.submit(asked).id == decided
    assert slow.submit(asked).id == asked.id  # as before there was a choice
    assert fast.submit(asked).id == asked.id  # what has begun goes on


def test_what_does_not_fit_is_started_and_said_loudly(home: Home, llama70: Path) -> None:
    scheduler = WaitingScheduler()
    trainer = MegatronTrainer(home, scheduler, Resources(16, 2, Gpus("H100", 79, 8)))
    asked = open_spec(llama70)
    trainer.submit(asked)
    journal = JobJournal(home, asked.id)
    spec, (event,) = journal.spec(), journal.events()
    assert (spec.layout.tensor, spec.layout.pipeline, spec.recompute) == (8, 2, "full")
    assert event["reasons"][0] == LOUD and "nothing fits" in event["reasons"][2]
    assert event["recompute"] == "full"
    assert LOUD in journal.log.read_text()
    assert len(scheduler.commands) == 1

    kept = open_spec(llama70, hyper={"seed": 1}, recompute="none")
    trainer.submit(kept)
    assert JobJournal(home, kept.id).spec().recompute == "none"
    named = open_spec(llama70, hyper={"seed": 2}, layout=Layout(tensor=8), oversubscribe=True)
    trainer.submit(named)
    journal = JobJournal(home, named.id)
    assert (journal.spec(), journal.events()) == (named, [])
    assert (scheduler.commands[-1].nodes, scheduler.commands[-1].ranks) == (1, 8)


def test_ranks_without_gpus_share_the_batch(home: Home, tmp_path: Path) -> None:
    scheduler = WaitingScheduler()
    trainer = MegatronTrainer(home, scheduler, Resources(ranks=4))
    model = tmp_path / "model"
    make_seed_model(model, seed=0, corpus=["What is 1 + 1?"])
    wide, narrow = (open_spec(model, hyper={"batch_size": size}) for size in (16, 3))
    trainer.submit(wide)
    trainer.submit(narrow)
    assert JobJournal(home, wide.id).spec().layout == Layout(data=4)
    assert JobJournal(home, narrow.id).spec().layout == Layout(data=3)
    (event,) = JobJournal(home, narrow.id).events()
    (reason,) = event["reasons"]
    assert reason.startswith("data=3 of 4 ranks: a batch has no more; on CPUs")
    assert [command.ranks for command in scheduler.commands] == [4, 3]
    assert {command.environment["CUDA_VISIBLE_DEVICES"] for command in scheduler.commands} == {""}


def test_nothing_is_started_that_no_layout_can_be_chosen_for(home: Home, llama70: Path) -> None:
    scheduler = WaitingScheduler()
    trainer = MegatronTrainer(home, scheduler, Resources(8, 1, Gpus("H100", 79, 8)))
    (llama70 / "config.json").write_text('{"model_type": "unheard_of"}')
    with pytest.raises(BadInput, match="cannot train a 'unheard_of' model"):
        trainer.submit(open_spec(llama70))
    (llama70 / "config.json").write_text(json.dumps(CONFIG))
    with pytest.raises(NotFound, match="no dataset"):
        trainer.submit(open_spec(llama70).model_copy(update={"dataset": "none"}))
    (home.dataset("ds") / "manifest.json").write_text('{"splits": {}}')
    with pytest.raises(BadInput, match="no samples"):
        trainer.submit(open_spec(llama70))
    assert scheduler.commands == [] and not home.jobs.exists()


def test_a_pair_is_two_sequences(home: Home, llama70: Path) -> None:
    assert usual_length(open_spec(llama70), home) == 1000
    assert usual_length(open_spec(llama70, method="dpo"), home) == 2000
