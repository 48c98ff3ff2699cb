"""A job through everything that happens to jobs: it ends right, or says exactly why not."""

import json
import os
import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.records import Manifest
from cray_agents.runtime.durable import sha256_file
from cray_agents.trainers.publish import weights_sha256
from cray_agents.training import Layout

pytestmark = pytest.mark.megatron


def test_it_publishes_a_checkpoint_whose_probe_transformers_confirms(undisturbed: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    lab, job = undisturbed
    folder = lab.home.checkpoint(job.journal.job_id)
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    assert manifest.files.keys() == {p.name for p in folder.iterdir()} - {"manifest.json"}
    assert all(sha256_file(folder / name) == found for name, found in manifest.files.items())
    assert {"config.json", "tokenizer.json", "chat_template.jinja"} < manifest.files.keys()
    assert manifest.weights_sha256 == weights_sha256(folder) != manifest.parent_sha256
    assert 4 <= len(manifest.probe) <= 8
    assert manifest.metrics["loss_last"] < manifest.metrics["loss_first"]
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in manifest.probe:
        ids = torch.tensor(prompt.token_ids)
        with torch.no_grad():
            logprobs = model(ids[None]).logits[0, :-1].log_softmax(-1)
        expected = logprobs.gather(1, ids[1:, None])[:, 0]
        np.testing.assert_allclose(prompt.logprobs, expected, atol=1e-4)
    status = job.journal.status()
    assert (status.state, status.step, status.checkpoint) == ("succeeded", 8, folder.name)
    assert status.trained_tokens == sum(
        e["tokens"] for e in job.journal.events() if e["event"] == "step"
    )


def test_a_finished_job_trains_nothing_more(undisturbed: Any) -> None:
    lab, job = undisturbed
    before = job.losses
    again = lab.run(job.journal.spec())
    assert "trained 0 steps" in again.log
    assert again.losses == before
    assert again.journal.attempts == 1


@pytest.mark.parametrize("seed", [1, 2])
def test_killed_at_any_step_it_resumes_the_same_curve(
    lab: Any, undisturbed: Any, seed: int
) -> None:
    lab.dataset()
    spec = undisturbed[1].journal.spec()
    job = lab.start(spec)
    job.wait_for_step(random.Random(seed).randint(1, 7))
    job.kill(signal.SIGKILL)
    assert job.journal.status() is None
    draft = job.journal.folder / "megatron" / ".step-00000099.1"  # as of a kill in mid-save
    draft.mkdir(parents=True)
    (draft / "metadata.json").write_text("{")
    resumed = lab.run(spec)
    assert resumed.losses == undisturbed[1].losses
    assert not draft.exists()
    ours, theirs = (x.home.checkpoint(spec.id) for x in (lab, undisturbed[0]))
    assert weights_sha256(ours) == weights_sha256(theirs)


def test_asked_to_stop_it_saves_and_goes_on_later(lab: Any, undisturbed: Any) -> None:
    lab.dataset()
    spec = undisturbed[1].journal.spec().model_copy(update={"save_every": 1000})
    job = lab.start(spec)
    job.wait_for_step(2)
    assert job.kill(signal.SIGUSR1) == 75
    step = job.journal.step
    assert 2 <= step < 8
    assert [p.name for p in (job.journal.folder / "megatron").iterdir()] == [f"step-{step:08d}"]
    resumed = lab.run(spec)
    assert f"starts at step {step}" in resumed.log
    assert resumed.losses == undisturbed[1].losses


def test_a_corrupt_resume_point_is_named_and_the_one_before_used(
    lab: Any, undisturbed: Any
) -> None:
    lab.dataset()
    spec = undisturbed[1].journal.spec()
    job = lab.run(spec)
    for path in (job.journal.folder / "status.json", job.journal.home.checkpoint(spec.id)):
        path.unlink() if path.is_file() else shutil.rmtree(path)
    points = sorted((job.journal.folder / "megatron").glob("step-*"))
    assert [p.name for p in points] == ["step-00000006", "step-00000008"]
    data = next(points[-1].glob("*.distcp"))
    content = bytearray(data.read_bytes())
    content[len(content) // 2] ^= 1
    data.write_bytes(content)
    resumed = lab.run(spec)
    assert f"{points[-1].name}: {data.name}" in resumed.log
    assert "starts at step 6" in resumed.log
    assert resumed.losses == undisturbed[1].losses


def test_an_optimizer_goes_on_with_the_next_job(lab: Any) -> None:
    """Four steps and four more with the first job's moments are the eight of a single job."""
    lab.dataset()
    whole = {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0, "batch_size": 24}
    eight = lab.run(lab.spec("qwen3", hyper={**whole, "steps": 8}))
    four = lab.run(lab.spec("qwen3", hyper={**whole, "steps": 4}))
    parent = lab.home.checkpoint(four.journal.job_id)
    hyper = {**whole, "steps": 4}
    going_on = lab.run(lab.spec(parent, optimizer_from=four.journal.job_id, hyper=hyper))
    afresh = lab.run(lab.spec(parent, hyper=hyper))
    np.testing.assert_allclose(four.losses + going_on.losses, eight.losses, rtol=2e-5)
    assert abs(afresh.losses[-1] - eight.losses[-1]) > 1e-3
    assert len(eight.losses) == 8


def test_a_missing_optimizer_is_an_error(lab: Any) -> None:
    lab.dataset()
    error = lab.fail(lab.spec("qwen3", optimizer_from="job-never"))
    assert "job-never" in error and "no resume point" in error


def test_a_dead_rank_ends_all_and_is_named(lab: Any) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2}, hyper={"steps": 2000})
    job = lab.start(spec)
    job.wait_for_step(2)
    task = Path(f"/proc/{job.pid}/task/{job.pid}/children")
    ranks = [int(pid) for pid in task.read_text().split()]
    assert len(ranks) == 2
    os.kill(ranks[1], signal.SIGKILL)
    assert job.wait() == 1
    assert "rank 1 died (signal 9)" in job.log
    assert not any(Path(f"/proc/{pid}").exists() for pid in ranks)
    assert job.journal.status() is None  # it may be started again


def test_an_older_attempt_publishes_nothing(lab: Any) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", hyper={"steps": 60}, save_every=1000)
    job = lab.start(spec)
    job.wait_for_step(1)
    assert job.journal.claim_attempt() == 2
    assert job.wait() == 0
    assert "attempt 2 took over from attempt 1" in job.log
    assert not lab.home.checkpoint(spec.id).exists()
    assert not list((job.journal.folder / "megatron").glob("step-*"))


def test_two_layouts_give_the_same_checkpoint_but_for_rounding(lab: Any, undisturbed: Any) -> None:
    from safetensors.torch import load_file

    lab.dataset()
    spec = lab.spec("qwen3", layout={"data": 2})
    job = lab.run(spec)
    other = undisturbed[1]
    assert spec.id == other.journal.job_id  # how it is run is not what it is
    np.testing.assert_allclose(job.losses, other.losses, rtol=1e-5)
    ours, theirs = (
        load_file(x.home.checkpoint(spec.id) / "model.safetensors") for x in (lab, undisturbed[0])
    )
    assert all((ours[n] - theirs[n]).abs().max() < 1e-4 for n in ours)


@pytest.mark.parametrize(
    "layout",
    [{"tensor": 2}, {"pipeline": 2}, {"data": 2}],
    ids=lambda layout: next(iter(layout)),
)
def test_a_job_goes_on_under_another_layout(
    lab: Any, undisturbed: Any, layout: dict[str, int]
) -> None:
    lab.dataset()
    spec = undisturbed[1].journal.spec().model_copy(update={"save_every": 1000})
    job = lab.start(spec)
    job.wait_for_step(2)
    assert job.kill(signal.SIGTERM) == 75
    other = spec.model_copy(update={"layout": Layout(**layout)})
    (job.journal.folder / "spec.json").write_text(other.model_dump_json())
    resumed = lab.run(other)
    assert f"starts at step {job.journal.events()[0]['from_step']}" in resumed.log
    np.testing.assert_allclose(resumed.losses, undisturbed[1].losses, rtol=2e-5)


@pytest.mark.skipif(not shutil.which("scontrol"), reason="scontrol expands the list of nodes")
def test_two_nodes_share_a_job(lab: Any, undisturbed: Any, tmp_path: Path) -> None:
    lab.dataset()
    config = tmp_path / "slurm.conf"
    config.write_text("ClusterName=lab\nSlurmctldHost=localhost(127.0.0.1)\n")
    spec = lab.spec("qwen3", layout={"data": 2})
    slurm = {"SLURM_NNODES": "2", "SLURM_JOB_NODELIST": "127.0.0.[1-2]"}
    slurm["SLURM_CONF"] = str(config)
    nodes = [lab.start(spec, **slurm, SLURM_NODEID=str(node)) for node in (0, 1)]
    assert [node.wait() for node in nodes] == [0, 0], nodes[0].log
    np.testing.assert_allclose(nodes[0].losses, undisturbed[1].losses, rtol=1e-5)
    assert nodes[0].journal.attempts == 1
    assert nodes[0].journal.status().state == "succeeded"


def spoil_config(folder: Path, **changes: Any) -> Path:
    config = json.loads((folder / "config.json").read_bytes())
    (folder / "config.json").write_text(json.dumps({**config, **changes}))
    return folder


@pytest.mark.parametrize(
    ("dataset", "expected"),
    [
        ({"ids": [[5, 6, 7], [5, 999, 7]]}, "token id 999"),
        ({"ids": []}, "is empty"),
        ({"ids": [[5, 6, 7]], "masks": [[1, 0, 0]]}, "zero trainable tokens"),
        ({"ids": [[5] * 300], "masks": [[1] * 300]}, "attends to 256"),
    ],
    ids=["vocabulary", "empty", "mask", "length"],
)
def test_data_that_cannot_be_trained_on(lab: Any, dataset: Any, expected: str) -> None:
    lab.dataset(**{"masks": [[1] * len(row) for row in dataset["ids"]], **dataset})
    assert expected in lab.fail(lab.spec("qwen3"))


@pytest.mark.parametrize(
    ("changes", "expected"),
    [
        ({"model_type": "gpt_neox"}, "supported: llama, mistral, mixtral, qwen2, qwen3, qwen3_moe"),
        ({"attention_bias": True}, "attention_bias=True"),
        ({"rope_parameters": {"rope_type": "yarn", "rope_theta": 1e4}}, "'yarn'"),
    ],
    ids=["architecture", "variant", "rope"],
)
def test_a_model_that_cannot_be_trained(
    lab: Any, tmp_path: Path, changes: dict[str, Any], expected: str
) -> None:
    lab.dataset()
    folder = Path(shutil.copytree(lab.models("qwen3"), tmp_path / "parent"))
    assert expected in lab.fail(lab.spec(spoil_config(folder, **changes)))


def test_other_bad_inputs_say_what_to_do(lab: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    lab.dataset()
    error = lab.fail(lab.spec("qwen3", layout={"tensor": 4}))
    assert "does not divide its 2 key-value heads" in error
    assert "data=4 tensor=1 pipeline=1" in error and "data=2 tensor=2" in error
    assert "were changed, or the path is wrong" in lab.fail(
        lab.spec("qwen3", parent_sha256="0" * 64)
    )
    assert "no dataset at" in lab.fail(lab.spec("qwen3", dataset="none"))

    folder = Path(shutil.copytree(lab.models("qwen3"), tmp_path / "parent"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    assert "the loss is nan after 0 whole steps" in lab.fail(lab.spec(folder))
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "lacks the tensor 'model.norm.weight'" in lab.fail(lab.spec(folder))


def test_bfloat16_trains_and_resumes_exactly(lab: Any) -> None:
    lab.dataset()
    spec = lab.spec("qwen3-tied", hyper={"dtype": "bfloat16"}, layout={"data": 2})
    job = lab.start(spec)
    job.wait_for_step(4)
    job.kill(signal.SIGKILL)
    resumed = lab.run(spec)
    assert resumed.journal.attempts == 2
    assert len(resumed.losses) == 8
    assert resumed.losses[-1] < resumed.losses[0] * 0.95
    shutil.rmtree(lab.home.root / "jobs")
    shutil.rmtree(lab.home.root / "checkpoints")
    assert lab.run(spec).losses == resumed.losses
