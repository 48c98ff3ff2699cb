"""Versions of a job that trains: published in the background, whole, each once, or told of."""

import json
import resource
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from pydantic import ValidationError

from cray_agents.records import Manifest, Prompt
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.trainers.job.job_state import read_status
from cray_agents.training_jobs import JobSpec, PublishEvery
from tests.support.trainers.plain_model import logprobs_of
from tests.trainers.test_faults import ranks_of, until

pytestmark = pytest.mark.megatron


def steps_of(lab: Any, job: Any) -> list[int]:
    return [one.step for one in read_status(lab.home, job.journal.job_id).versions]


def manifest_of(folder: Path) -> Manifest:
    return checksums.read_record(Manifest, folder / "manifest.json")


@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"layout": {"tensor": 2}, "hyper": {"dtype": "bfloat16"}},
        {"layout": {"data": 2}, "hyper": {"lora": {"rank": 2}}},
    ],
    ids=["one rank", "tensor ranks in bfloat16", "adapters"],
)
def test_versions_are_whole_and_change_nothing_of_the_job(
    lab: Any, undisturbed_job: Any, changes: dict[str, Any]
) -> None:
    """The job is to the bit the one that publishes nothing."""
    import torch
    from transformers import AutoModelForCausalLM

    lab.dataset()
    prompts = {"a": Prompt(instructions="Be brief.")}
    every = PublishEvery(name="m", steps=3, prompts=prompts)
    spec = lab.spec("qwen3", publish_every=every, **changes)
    plain = undisturbed_job(lab.spec("qwen3", **changes))
    job = lab.run(spec)
    assert spec.id == plain.journal.job_id and job.losses == plain.losses
    result = lab.home.checkpoint(spec.id)
    assert manifest_of(result).weights_sha256 == weights_sha256(
        plain.journal.home.checkpoint(spec.id)
    )

    versions = read_status(lab.home, spec.id).versions
    assert [(one.version, one.step) for one in versions] == [("m@1", 3), ("m@2", 6)]
    assert [one.loss for one in versions] == [job.losses[2], job.losses[5]]
    registry = Registry(lab.home)
    for one in versions:
        version = registry.resolve(one.version)
        assert (version.checkpoint, version.prompts) == (one.checkpoint, prompts)
        folder = lab.home.checkpoint(one.checkpoint)
        manifest = checkpoints.verify(folder)
        assert manifest.job == spec.id and manifest.metrics["steps"] == one.step
        network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        for prompt in manifest.probe:
            ours = logprobs_of(network, prompt.token_ids).detach().numpy()
            coarse = "hyper" in changes and "dtype" in changes["hyper"]
            np.testing.assert_allclose(prompt.logprobs, ours, atol=0.3 if coarse else 1e-4)
    assert len({manifest_of(p.parent).weights_sha256 for p in lab.home.root.glob(
        "checkpoints/job-*/manifest.json")}) == 3  # fmt: skip
    assert not list(lab.home.root.glob("checkpoints/.*"))


def test_a_killed_job_publishes_each_version_once(lab: Any, hold: Any) -> None:
    """Also one that was whole at the kill, with nobody left to tell of it."""
    lab.dataset()
    every = PublishEvery(name="m", steps=5)
    spec = lab.spec("qwen3", hyper={"steps": 40}, save_every=7, publish_every=every)
    gate = hold(20)
    job = lab.start(spec)
    until(lambda: len(steps_of(lab, job)) >= 2, lambda: job.log)
    job.kill()
    gate.unlink()
    file = job.journal.events_file
    lines = file.read_bytes().splitlines(keepends=True)
    file.write_bytes(b"".join(line for line in lines if b'"event":"version"' not in line))
    assert steps_of(lab, job) == []
    again = lab.run(spec)
    assert steps_of(lab, again) == [5, 10, 15, 20, 25, 30, 35]
    assert [version.number for version in Registry(lab.home).versions("m")] == [*range(1, 8)]
    assert not list(lab.home.root.glob("checkpoints/.*.2"))  # what the kill left half-written has 1


def test_what_cannot_be_written_costs_a_version_and_nothing_else(lab: Any, hold: Any) -> None:
    lab.dataset()
    every = PublishEvery(name="m", steps=60)
    hyper = {"steps": 400}
    spec = lab.spec("qwen3", hyper=hyper, save_every=1000, publish_every=every)
    first, second = hold(1), hold(150)
    job = lab.start(spec)
    job.wait_for_step(1)
    (rank,) = ranks_of(job)
    unlimited = (resource.RLIM_INFINITY, resource.RLIM_INFINITY)
    resource.prlimit(rank, resource.RLIMIT_FSIZE, (300_000, resource.RLIM_INFINITY))

    def warnings() -> list[str]:
        found = read_status(lab.home, spec.id).warnings
        return [text for text in found if "the version of step" in text]

    taken = lab.home.checkpoint(f".{spec.id}-120.1")
    taken.parent.mkdir()
    taken.touch()  # where the draft of the second version has to be
    first.unlink()

    (told, *_) = until(warnings, lambda: job.log)
    resource.prlimit(rank, resource.RLIMIT_FSIZE, unlimited)
    second.unlink()
    assert job.wait() == 0, job.log
    assert "the version of step 60 could not be written: " in told
    assert "File too large" in told and "; make room in " in told
    _, other = warnings()
    assert "the version of step 120 could not be written: " in other
    assert "File exists" in other and "make room" not in other
    for each in (told, other):
        assert each.endswith("; the job goes on without this version")
        assert "the one before it stays" not in each
    steps = steps_of(lab, job)
    assert steps == [180, 240, 300, 360]
    taken.unlink()
    assert not list(lab.home.root.glob("checkpoints/.*"))


def test_by_minutes_all_ranks_agree_when(lab: Any) -> None:
    lab.dataset()
    every = PublishEvery(name="m", minutes=1e-6)
    job = lab.run(lab.spec("qwen3", layout={"data": 2}, publish_every=every))
    assert steps_of(lab, job) == [*range(1, 8)]


@pytest.mark.parametrize(
    ("fields", "told"),
    [
        ({"name": "m"}, "give either `steps` or `minutes`"),
        ({"name": "m", "steps": 2, "minutes": 1}, "give either `steps` or `minutes`"),
        ({"name": "../m", "steps": 2}, "should match pattern"),
    ],
)
def test_nonsense_is_refused(fields: dict[str, Any], told: str) -> None:
    with pytest.raises(ValidationError, match=told):
        PublishEvery(**fields)


def test_a_job_by_commands_publishes_by_commands_alone(lab: Any) -> None:
    fields = json.loads(lab.spec("qwen3").model_dump_json()) | {"dataset": "", "commands": "c"}
    with pytest.raises(ValidationError, match="no effect with commands"):
        JobSpec(**fields | {"publish_every": {"name": "m", "steps": 2}})
