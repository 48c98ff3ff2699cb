"""A job through everything that happens to jobs: it ends right, or says exactly why not."""

import random
import shutil
import signal
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.records import Manifest
from cray_agents.runtime.accounting.holdings import goodput
from cray_agents.runtime.disk.checksums import hash_of
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.training_jobs import Layout
from tests.trainers.test_faults import flip

pytestmark = pytest.mark.megatron


def test_it_publishes_a_checkpoint_whose_probe_transformers_confirms(undisturbed: Any) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    lab, job = undisturbed
    folder = lab.home.checkpoint(job.journal.job_id)
    manifest = Manifest.model_validate_json((folder / "manifest.json").read_bytes())
    assert manifest.files.keys() == {p.name for p in folder.iterdir()} - {"manifest.json"}
    assert all(hash_of(folder / name, stated) == stated for name, stated in manifest.files.items())
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


@pytest.mark.parametrize("lora", [None, {"rank": 2}], ids=["all weights", "lora"])
def test_at_a_learning_rate_of_0_the_weights_stay(lab: Any, lora: Any) -> None:
    """People test with it what becomes of a checkpoint on its way."""
    from safetensors.torch import load_file

    lab.dataset()
    still = {"learning_rate": 0, "min_learning_rate": 0, "steps": 2, "lora": lora}
    job = lab.run(lab.spec("qwen3", hyper=still))
    folder = lab.home.checkpoint(job.journal.job_id)
    before = load_file(lab.models("qwen3") / "model.safetensors")
    after = load_file(folder / "model.safetensors")
    assert after.keys() == before.keys()
    assert all(bool((after[name] == tensor).all()) for name, tensor in before.items())
    assert job.journal.status().state == "succeeded" and len(job.losses) == 2


def test_a_finished_job_trains_nothing_more(undisturbed: Any) -> None:
    lab, job = undisturbed
    before = job.losses
    again = lab.run(job.journal.spec())
    assert "trained 0 steps" in again.log
    assert again.losses == before
    assert again.journal.attempts == 1


@pytest.mark.parametrize(("seed", "how"), [(1, signal.SIGKILL), (4, signal.SIGUSR1)])
def test_ended_at_any_step_it_resumes_the_same_curve(
    lab: Any, undisturbed: Any, kill_at: Any, seed: int, how: signal.Signals
) -> None:
    lab.dataset()
    spec = undisturbed[1].journal.spec()
    job, ended = kill_at(spec, random.Random(seed).randint(1, 6), how)
    assert job.journal.status() is None
    points = {p.name for p in (job.journal.folder / "megatron").glob("step-*")}
    if how != signal.SIGKILL:
        step = job.journal.step
        assert (ended, f"step-{step:08d}" in points) == (75, True)
        assert 1 <= step < 8
    draft = job.journal.folder / "megatron" / ".step-00000099.1"  # as of a kill in mid-write
    draft.mkdir(parents=True)
    (draft / "rank-00000.bin").write_bytes(b"half")
    reached = job.journal.step
    resumed = lab.run(spec)
    account = goodput(lab.home)[-1]
    lost = reached - started_at(resumed)
    assert (account["steps"], account["steps_lost"]) == (8, lost)
    assert account["held_hours"] > account["useful_hours"] > 0
    assert max([0, *(int(name[5:]) for name in points)]) == started_at(resumed)
    assert resumed.losses == undisturbed[1].losses
    assert not draft.exists()
    ours, theirs = (x.home.checkpoint(spec.id) for x in (lab, undisturbed[0]))
    assert weights_sha256(ours) == weights_sha256(theirs)


def started_at(job: Any) -> int:
    """The step from which the newest attempt went on."""
    return int([e["from_step"] for e in job.journal.events() if e["event"] == "started"][-1])


def test_a_corrupt_resume_point_is_named_and_the_one_before_used(
    lab: Any, undisturbed: Any, kill_at: Any
) -> None:
    """Each of two ranks proves a part of it, and both go back to the one before."""
    lab.dataset()
    spec = undisturbed[1].journal.spec().model_copy(update={"layout": Layout(data=2)})
    job, ended = kill_at(spec, 4, signal.SIGTERM)
    assert ended == 75
    points = sorted((job.journal.folder / "megatron").glob("step-*"))
    assert len(points) == 2
    data = points[-1] / "rank-00001.bin"
    flip(data)
    resumed = lab.run(spec)
    (corrupt,) = [e["message"] for e in resumed.journal.events() if e["event"] == "corrupt"]
    assert f"{points[-1].name}: {data.name}" in corrupt
    assert started_at(resumed) == int(points[0].name[5:])
    np.testing.assert_allclose(resumed.losses, undisturbed[1].losses, rtol=1e-5)


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


def test_other_bad_inputs_say_what_to_do(lab: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file, save_file

    lab.dataset()
    error = lab.fail(lab.spec("qwen3", layout={"tensor": 4}))
    assert "does not divide its 2 key-value heads" in error
    assert "On 4 ranks these fit" in error and "data=4" in error
    assert "were changed, or the path is wrong" in lab.fail(
        lab.spec("qwen3", parent_sha256="0" * 64)
    )
    assert "no dataset at" in lab.fail(lab.spec("qwen3", dataset="none"))
    fp8 = lab.spec("qwen3", hyper={"fp8": "tensorwise"}, recompute="mlp")
    assert "fp8=tensorwise needs Transformer Engine on a GPU" in lab.fail(fp8)

    folder = Path(shutil.copytree(lab.models("qwen3"), tmp_path / "parent"))
    tensors = load_file(folder / "model.safetensors")
    tensors["model.norm.weight"][3] = float("nan")
    save_file(tensors, folder / "model.safetensors")
    assert "the loss is nan after 0 whole steps" in lab.fail(lab.spec(folder))
    del tensors["model.norm.weight"]
    save_file(tensors, folder / "model.safetensors")
    assert "lacks the tensor 'model.norm.weight'" in lab.fail(lab.spec(folder))


def test_bfloat16_trains_and_resumes_exactly(lab: Any, kill_at: Any) -> None:
    lab.dataset()
    spec = lab.spec("qwen3-tied", hyper={"dtype": "bfloat16"}, layout={"data": 2})
    kill_at(spec, 4)
    resumed = lab.run(spec)
    assert resumed.journal.attempts == 2
    assert len(resumed.losses) == 8
    assert resumed.losses[-1] < resumed.losses[0] * 0.95
    shutil.rmtree(lab.home.root / "jobs")
    shutil.rmtree(lab.home.root / "checkpoints")
    assert lab.run(spec).losses == resumed.losses
