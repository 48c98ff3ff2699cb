"""Layouts that take more than there is of cores, memory or GPUs are refused everywhere."""

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.trainers.job.journal import JobJournal
from cray_agents.trainers.job.megatron_trainer import MegatronTrainer
from cray_agents.trainers.models.seed_model import make_seed_model
from cray_agents.trainers.planning.cluster_resources import (
    Gpus,
    HostResources,
    Resources,
    this_host,
)
from cray_agents.trainers.planning.job_layout import check_layout_fits
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout, Lora
from tests.support.fine_tuning_site import Site
from tests.support.trainers.model_configs import LLAMA_2_70B
from tests.support.waiting_scheduler import WaitingScheduler

LAPTOP = HostResources(cores=2, gib=64)
H100 = Gpus("H100", 79, 8)


@pytest.fixture
def home(tmp_path: Path) -> Home:
    """With a dataset of samples of 1,000 tokens."""
    home = Home(tmp_path / "home")
    home.dataset("ds").mkdir(parents=True)
    counts = {"splits": {"train": {"samples": 50, "tokens": 50_000}}}
    (home.dataset("ds") / "manifest.json").write_text(json.dumps(counts))
    return home


def of_layers(home: Home, layers: int, **changes: Any) -> JobSpec:
    """A job on a model of so many layers of a Llama 2 70B, 0.86 billion parameters each."""
    folder = home.root / f"model-{layers}"
    folder.mkdir(exist_ok=True)
    config = LLAMA_2_70B | {"num_hidden_layers": layers}
    (folder / "config.json").write_text(json.dumps(config))
    hyper = {"steps": 1, "batch_size": 64, "dtype": "bfloat16", **changes.pop("hyper", {})}
    return JobSpec(
        dataset="ds",
        parent=str(folder),
        parent_sha256="0",
        hyperparameters=Hyperparameters(**hyper),
        **changes,
    )


def refusal(spec: JobSpec, home: Home, resources: Resources, *, chosen: bool = False) -> str:
    """What is said against it; nothing if it may run."""
    try:
        check_layout_fits(spec, home, resources, chosen=chosen)
    except BadInput as error:
        assert (error.param, error.code) == ("layout", "does_not_fit")
        check_layout_fits(
            spec.model_copy(update={"oversubscribe": True}), home, resources, chosen=chosen
        )
        return str(error)
    return ""


@pytest.mark.parametrize(
    ("layout", "each", "told"),
    [
        (Layout(data=2), 1, ""),
        (Layout(data=64), 1, "a core for each of its 64 ranks, and this host has 2"),
        (Layout(data=2, tensor=2), 1, "at most 2 ranks"),
        (Layout(context=3), 1, "its 3 ranks"),
        (Layout(pipeline=4), 1, "its 4 ranks"),
        (Layout(data=2), 2, "2 cores for each of its 2 ranks, and this host has 2"),
        (Layout(), 3, "train_cpus_per_rank = 2 at most"),
    ],
)
def test_ranks_are_held_against_cores(home: Home, layout: Layout, each: int, told: str) -> None:
    spec = of_layers(home, 1, layout=layout, hyper={"max_tokens_per_microbatch": 1})
    said = refusal(spec, home, Resources(ranks=2, cpus_per_rank=each, host=LAPTOP))
    assert told in said and bool(told) == ("--oversubscribe" in said)
    assert refusal(spec, home, Resources(ranks=2, cpus_per_rank=each)) == ""  # a site's own to say


@pytest.mark.parametrize("chosen", [True, False])
def test_on_cpus_all_ranks_are_held_against_the_memory(home: Home, chosen: bool) -> None:
    """A layer takes 16 bytes a parameter, 14 GiB, less what data ranks share."""
    one, two = (Resources(ranks=2, host=HostResources(cores=2, gib=gib)) for gib in (24, 40))
    for spec in (
        of_layers(home, 1, layout=Layout(data=1)),
        of_layers(home, 1, layout=Layout(data=2)),
    ):
        ranks = "its rank" if spec.layout.world == 1 else "its 2 ranks"
        assert f"GiB for {ranks}, and this host has 24.0" in refusal(spec, home, one, chosen=chosen)
        assert refusal(spec, home, two, chosen=chosen) == ""
    lora = of_layers(home, 1, layout=Layout(data=2), hyper={"lora": Lora()})
    assert refusal(lora, home, one, chosen=chosen) == ""


def test_a_small_dataset_makes_small_micro_batches(home: Home) -> None:
    """Room for more tokens than there are is no reason to refuse a job."""
    wide = {"batch_size": 1, "max_tokens_per_microbatch": 10**9}
    spec = of_layers(home, 1, layout=Layout(), hyper=wide)
    assert refusal(spec, home, Resources(host=HostResources(cores=2, gib=32))) == ""


def test_gpus_are_held_to_their_number_and_memory(home: Home) -> None:
    here = Resources(8, 1, H100, 1, None, HostResources(cores=64, gib=1000))
    assert refusal(of_layers(home, 8, layout=Layout(data=8)), home, here) == ""
    many = of_layers(home, 8, layout=Layout(data=16))
    with pytest.raises(BadInput, match="takes 16 GPUs, one a rank, and this host has 8: ask") as no:
        check_layout_fits(many, home, here, chosen=False)
    assert "--oversubscribe" not in str(no.value)  # two ranks cannot share one
    assert refusal(many, home, Resources(8, 1, H100)) == ""  # at a site, on two nodes
    whole = of_layers(home, 80, layout=Layout(data=8))
    for resources in (here, Resources(8, 1, H100)):
        assert "a H100 has 79" in refusal(whole, home, resources)
        assert refusal(whole, home, resources, chosen=True) == ""  # said loudly, by job_layout.py


def test_schedulers_say_whether_they_run_everything_here(tmp_path: Path) -> None:
    with LocalProcesses(tmp_path / "local") as local:
        assert local.on_this_host
    assert Slurm(tmp_path, PrivateCluster(tmp_path)).on_this_host
    assert not Slurm(tmp_path).on_this_host
    host = this_host()
    assert host.cores >= 1 and host.gib > 0.1


def test_http_fine_tuning_and_loops_are_held_too(tmp_path: Path) -> None:
    """A loop asks as any client does, by POST /v1/jobs; so does Platform.submit_job."""
    model = tmp_path / "model"
    make_seed_model(model, seed=0, corpus=["What is 1 + 1?"])
    site, queue = Site(tmp_path / "root", model), WaitingScheduler()
    trainer = MegatronTrainer(site.home, queue, Resources(ranks=4, host=LAPTOP))
    with site.served(trainer=trainer):
        job = site.until(site.create().id, "failed")
        assert "takes a core for each of its 4 ranks, and this host has 2" in job.error.message
        assert queue.commands == [] and not site.home.jobs.exists()

        [dataset] = (path.name for path in site.home.datasets.iterdir())
        body: dict[str, Any] = {
            "dataset": dataset,
            "parent": "m@1",
            "hyperparameters": {"steps": 1},
        }
        url = f"{site.platform.url}/v1/jobs"
        for more in ({}, {"layout": {"data": 64}}):
            answer = httpx.post(url, json=body | more)
            error = answer.json()["error"]
            assert (answer.status_code, error["param"], error["code"]) == (
                400,
                "layout",
                "does_not_fit",
            )
        assert queue.commands == [] and not site.home.jobs.exists()
        answer = httpx.post(url, json=body | {"layout": {"data": 64}, "oversubscribe": True})
        assert answer.status_code == 200
        assert [command.ranks for command in queue.commands] == [64]
        assert JobJournal(site.home, answer.json()["id"]).spec().oversubscribe
