"""A rank around its steps: baselines, evaluation, stopping, and giving up a job."""

import hashlib
import json
import os
import shutil
import signal
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.errors import JobError
from cray_agents.records import Manifest
from cray_agents.trainers.checkpointing.hf_export import parent_sha256, weights_sha256
from cray_agents.trainers.data.packer import samples_to_train_on, step_units
from cray_agents.trainers.data.samples import Samples, read_samples
from cray_agents.trainers.job.rank import RECENT, JobTotals
from cray_agents.trainers.job.weights_check import FailedEverywhere
from cray_agents.trainers.training.train_step import RankTraining, StepReport
from cray_agents.training_jobs import Hyperparameters, JobSpec, Layout
from tests.support.trainers.forked_ranks import run_forked, training_in_rank

pytestmark = pytest.mark.megatron

STEADY = {"learning_rate": 1e-3, "schedule": "constant", "warmup_steps": 0}


def events(job: Any, kind: str) -> list[dict[str, Any]]:
    return [event for event in job.journal.events() if event["event"] == kind]


def small_slices(patch: pytest.MonkeyPatch) -> None:
    """Let jobs score and evaluate a few samples at a time."""
    from cray_agents.trainers.training import train_step

    patch.setattr(train_step, "SCORED_TOGETHER", 3)


def stop_while_it_reads(patch: pytest.MonkeyPatch, step: int) -> None:
    """Let jobs be asked to stop while they score or evaluate after this step."""
    pack = RankTraining.pack_share

    def packed(training: RankTraining, *arguments: Any) -> Any:
        if training.done == step:
            os.kill(os.getpid(), signal.SIGTERM)
        return pack(training, *arguments)

    small_slices(patch)
    patch.setattr(RankTraining, "pack_share", packed)


class Transformers:
    """A checkpoint as transformers computes it, in float32."""

    def __init__(self, folder: Path) -> None:
        import torch
        from transformers import AutoModelForCausalLM

        self.network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)

    def __call__(self, samples: Samples, place: int, temperature: float = 1.0) -> tuple[Any, Any]:
        """Of a sample's marked tokens [n]: log-probabilities, entropies of their distributions."""
        import torch

        ids = torch.tensor(samples.tokens[place].astype(np.int64))
        marked = torch.from_numpy(samples.masks[place][1:] > 0)
        logits = self.network(ids[None, :-1]).logits[0, marked] / temperature
        logs = logits.log_softmax(-1)
        return logs.gather(1, ids[1:][marked, None])[:, 0], -(logs.exp() * logs).sum(-1)

    def loss(self, samples: Samples, weights: Any = None) -> float:
        """The mean over all marked tokens, each weighted by its sample."""
        import torch

        weights = np.ones(len(samples)) if weights is None else weights
        with torch.no_grad():
            rows = [-self(samples, place)[0] for place in range(len(samples))]
        total = sum(weight * float(row.sum()) for weight, row in zip(weights, rows, strict=True))
        return total / sum(weight * len(row) for weight, row in zip(weights, rows, strict=True))


def first_step(lab: Any, spec: Any) -> tuple[Samples, list[int]]:
    """The samples of a dataset, and the places of those that the first step takes."""
    samples = read_samples(lab.home.dataset(spec.dataset), spec.method)
    units = step_units(spec.hyperparameters, 0, samples.unit_weights)
    return samples, [place for unit in units for place in samples.units[unit]]


@pytest.fixture(scope="module")
def another(models: Callable[[str], Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model of the same kind with other weights, which are stored in bfloat16."""
    import torch
    from transformers import AutoModelForCausalLM

    folder = Path(shutil.copytree(models("qwen3"), tmp_path_factory.mktemp("another") / "model"))
    network = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.bfloat16)
    with torch.no_grad():
        for parameter in network.parameters():
            parameter.mul_(0.9)
    network.save_pretrained(folder)
    return folder


# ---- models that start afresh
def test_a_model_is_trained_from_a_config_alone(lab: Any, tmp_path: Path) -> None:
    from safetensors.torch import load_file

    folder = tmp_path / "afresh"
    folder.mkdir()
    for name in ("config.json", "tokenizer.json"):
        shutil.copy(lab.models("qwen3-tied") / name, folder)
    lab.dataset()
    lab.dataset(samples=8, split="validation")
    validation = read_samples(lab.home.dataset("ds"), "sft", "validation")
    found = []
    for layout in ({}, {"pipeline": 2}):
        spec = lab.spec(
            folder,
            parent_sha256=parent_sha256(folder, "random"),
            hyper={"init": "random", "steps": 4},
            layout=layout,
        )
        job = lab.run(spec)
        published = lab.home.checkpoint(spec.id)
        manifest = Manifest.model_validate_json((published / "manifest.json").read_bytes())
        loss = Transformers(published).loss(validation)
        assert manifest.metrics["validation_loss"] == pytest.approx(loss, rel=1e-5)
        weights = [load_file(path) for path in published.glob("*.safetensors")]
        found.append((job.losses, {n: w for file in weights for n, w in file.items()}))
        for folder_of_job in (lab.home.root / "jobs", lab.home.root / "checkpoints"):
            shutil.rmtree(folder_of_job)
    (whole, expected), *others = found
    assert whole[0] == pytest.approx(np.log(304), abs=0.05)  # nothing is known yet
    for losses, found_weights in others:
        np.testing.assert_allclose(losses, whole, rtol=1e-5)
        assert all((found_weights[n] - expected[n]).abs().max() < 1e-4 for n in expected)


# ---- numbers of whole methods, against transformers
def dpo_against(lab: Any, another: Path, **more: Any) -> JobSpec:
    """A dpo job whose reference is another checkpoint than its parent, and its dataset."""
    lab.dataset(method="dpo")
    reference = {"reference": str(another), "reference_sha256": weights_sha256(another)}
    spec: JobSpec = lab.spec("qwen3", method="dpo", **reference, **more)
    return spec


def test_dpo_compares_with_another_checkpoint(lab: Any, another: Path) -> None:
    import torch
    from torch.nn.functional import logsigmoid

    spec = dpo_against(lab, another, hyper={"steps": 1, "preference": {"beta": 0.3}})
    (step,) = events(lab.run(spec), "step")
    samples, places = first_step(lab, spec)
    policy, reference = Transformers(Path(spec.parent)), Transformers(another)
    rewards = [0.3 * (policy(samples, i)[0] - reference(samples, i)[0]).sum() for i in places]
    better, worse = torch.stack(rewards).view(-1, 2).unbind(1)
    assert step["loss"] == pytest.approx(-logsigmoid(better - worse).mean().item(), rel=1e-4)
    assert step["chosen_reward"] == pytest.approx(better.mean().item(), rel=1e-4)
    assert step["rejected_reward"] == pytest.approx(worse.mean().item(), rel=1e-4)
    assert step["accuracy"] == pytest.approx((better > worse).float().mean().item())


@pytest.mark.parametrize("layout", [{}, {"context": 2}], ids=["one", "context2"])
def test_grpo_with_a_reference_at_a_temperature(
    lab: Any, another: Path, layout: dict[str, Any]
) -> None:
    import torch

    lab.dataset(method="grpo", temperature=0.7)
    spec = lab.spec(
        "qwen3",
        method="grpo",
        reference=str(another),
        reference_sha256=weights_sha256(another),
        hyper={"steps": 1, "policy": {"kl": 0.2, "temperature": 0.7, "importance_cap": 1.5}},
        layout=layout,
    )
    (step,) = events(lab.run(spec), "step")
    samples, places = first_step(lab, spec)
    policy, reference = Transformers(Path(spec.parent)), Transformers(another)
    ours = [policy(samples, i, 0.7) for i in places]
    now, entropy = (torch.cat(rows) for rows in zip(*ours, strict=True))
    before = torch.cat([reference(samples, i, 0.7)[0] for i in places])
    marks = [samples.masks[i] > 0 for i in places]
    gains, sampled = (
        torch.from_numpy(np.concatenate([rows[i][m] for i, m in zip(places, marks, strict=True)]))
        for rows in (samples.advantages, samples.sampled)
    )
    kl = (before - now).exp() - (before - now) - 1
    weight = (now - sampled).exp().clamp(max=1.5)
    assert step["ratio"] == pytest.approx(1.0, abs=1e-6)  # before a step p is p_before
    assert (step["clip_fraction"], step["kl_before"]) == pytest.approx((0.0, 0.0), abs=1e-6)
    assert step["kl"] == pytest.approx(kl.mean().item(), rel=1e-4)
    assert step["entropy"] == pytest.approx(entropy.mean().item(), rel=1e-4)
    assert step["engine_ratio"] == pytest.approx((now - sampled).exp().mean().item(), rel=1e-3)
    loss = (0.2 * kl - weight * gains).mean().item()
    assert step["loss"] == pytest.approx(loss, rel=1e-4)


def test_weights_of_samples(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    import torch

    small_slices(monkeypatch)  # of weights that differ in the mean
    lab.dataset()
    lab.dataset(samples=8, split="validation")
    job = lab.run(lab.spec("qwen3", hyper={"steps": 1, "weigh_loss": True}))
    spec = job.journal.spec()
    samples, places = first_step(lab, spec)
    assert len(set(samples.weights[places])) > 1
    policy = Transformers(Path(spec.parent))
    rows = [-policy(samples, place)[0] for place in places]
    total = sum(samples.weights[i] * row.sum() for i, row in zip(places, rows, strict=True))
    marks = [len(row) for row in rows]
    loss: Any = total / (samples.weights[places] * marks).sum()
    loss.backward()
    norm = torch.nn.utils.get_total_norm([p.grad for p in policy.network.parameters()])
    (step,) = events(job, "step")
    assert step["loss"] == pytest.approx(loss.item(), rel=1e-5)
    assert step["grad_norm"] == pytest.approx(norm.item(), rel=1e-4)
    validation = read_samples(lab.home.dataset("ds"), "sft", "validation")
    trained = Transformers(lab.home.checkpoint(spec.id))
    before, after = (event["loss"] for event in events(job, "evaluation"))
    assert before == pytest.approx(policy.loss(validation, validation.weights), 1e-5)
    assert after == pytest.approx(trained.loss(validation, validation.weights), 1e-5)


# ---- evaluation
def test_evaluation_is_right_and_changes_nothing(lab: Any) -> None:
    hyper = {**STEADY, "lora": {"rank": 4, "dropout": 0.3}}
    lab.dataset("plain")
    lab.dataset("held-out")
    lab.dataset("held-out", samples=8, split="validation")
    validation = read_samples(lab.home.dataset("held-out"), "sft", "validation")
    plain = lab.run(lab.spec("qwen3", dataset="plain", hyper={**hyper, "steps": 5}))
    assert events(plain, "evaluation") == []
    evaluated = lab.spec("qwen3", dataset="held-out", hyper={**hyper, "steps": 5})
    job = lab.run(evaluated.model_copy(update={"evaluate_every": 3}))
    assert job.losses == plain.losses
    three = lab.run(lab.spec("qwen3", dataset="plain", hyper={**hyper, "steps": 3}))
    told = [(event["step"], event["loss"]) for event in events(job, "evaluation")]
    assert [step for step, _ in told] == [0, 3, 5]
    checkpoints = [lab.home.checkpoint(trained.journal.job_id) for trained in (three, job)]
    for (_, loss), folder in zip(told, (Path(evaluated.parent), *checkpoints), strict=True):
        checkpoint = Transformers(folder)
        assert loss == pytest.approx(checkpoint.loss(validation), rel=1e-5)
    assert events(job, "evaluation")[0]["tokens"] == sum(m[1:].sum() for m in validation.masks)


def test_a_validation_split_that_does_not_fit(lab: Any) -> None:
    lab.dataset()
    lab.dataset(ids=[[5] * 300], split="validation")
    error = lab.fail(lab.spec("qwen3"))
    assert "the validation split does not fit: sample 0 (run-0) has 300 tokens" in error


def test_an_evaluation_that_was_interrupted_is_done_after_all(
    lab: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    lab.dataset()
    lab.dataset(samples=8, split="validation")
    spec = lab.spec("qwen3", hyper={"steps": 2}).model_copy(update={"evaluate_every": 1})
    with monkeypatch.context() as patch:
        stop_while_it_reads(patch, 1)
        job = lab.start(spec)
    assert job.wait() == 75, job.log
    assert job.journal.step == 1
    assert [event["step"] for event in events(job, "evaluation")] == [0]
    assert [p.name for p in job.journal.resume_points] == ["step-00000001"]
    lab.run(spec)
    assert [event["step"] for event in events(job, "evaluation")] == [0, 1, 2]
    assert [event["from_step"] for event in events(job, "started")] == [0, 1]


# ---- what is known before the first step
def test_a_long_look_back_can_be_stopped(lab: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    lab.dataset(method="dpo")
    stop_while_it_reads(monkeypatch, 0)
    job = lab.start(lab.spec("qwen3", method="dpo", hyper={"steps": 1, "batch_size": 12}))
    assert job.wait() == 75, job.log
    assert job.journal.step == 0
    assert not (job.journal.folder / "baselines").exists()
    assert job.journal.resume_points == []


def test_a_restarted_job_reads_what_it_knew(lab: Any, another: Path, kill_at: Any) -> None:
    spec = dpo_against(lab, another, hyper={"steps": 24, "batch_size": 1}, save_every=1000)
    whole = lab.run(spec).losses
    shutil.rmtree(lab.home.root / "jobs")
    shutil.rmtree(lab.home.root / "checkpoints")

    job, _ = kill_at(spec, 1)
    assert job.journal.resume_points == []
    (file,) = (job.journal.folder / "baselines").iterdir()
    sound, node = file.read_bytes(), file.stat().st_ino
    assert lab.run(spec).losses == whole
    assert file.stat().st_ino == node  # it was read

    for wrong in (sound[:-4], sound[:-1] + bytes([sound[-1] ^ 1])):
        forget(lab, spec, job)
        file.write_bytes(wrong)
        assert lab.run(spec).losses == whole
        assert file.read_bytes() == sound

    forget(lab, spec, job)
    numbers = np.frombuffer(sound[32:], "<f4") - 1  # whole, but another reference's
    file.write_bytes(hashlib.sha256(numbers.tobytes()).digest() + numbers.tobytes())
    assert lab.run(spec).losses != whole


def forget(lab: Any, spec: Any, job: Any) -> None:
    """Undo a job's end and its resume points, as if it had been killed before the first."""
    shutil.rmtree(lab.home.checkpoint(spec.id))
    shutil.rmtree(job.journal.folder / "megatron")
    (job.journal.folder / "status.json").unlink()


@pytest.mark.parametrize("order", ["epoch", "weighted"])
def test_only_what_is_trained_on_is_looked_back_at(lab: Any, order: str) -> None:
    lab.dataset(samples=60, method="grpo")
    hyper = {"steps": 2, "batch_size": 4, "order": order, "policy": {"kl": 0.1}}
    job = lab.run(lab.spec("qwen3", method="grpo", hyper=hyper))
    samples = read_samples(lab.home.dataset("ds"), "grpo")
    draws = [step_units(job.journal.spec().hyperparameters, s, samples.weights) for s in (0, 1)]
    places = samples_to_train_on(job.journal.spec().hyperparameters, samples)
    assert places == sorted({place for draw in draws for place in draw})
    (file,) = (job.journal.folder / "baselines").iterdir()  # the parent is the reference, too
    marks = sum(int(samples.masks[place][1:].sum()) for place in places)
    assert file.stat().st_size == 32 + 4 * marks
    everything = Hyperparameters(steps=20, batch_size=3)
    assert list(samples_to_train_on(everything, samples)) == list(range(60))


def test_a_job_of_one_step_computes_its_own_policy_in_it(lab: Any) -> None:
    """Its step reports what the first of two steps does, whose policy was scored before."""
    lab.dataset(samples=12, method="grpo")
    found = []
    for steps in (1, 2):
        hyper = {"steps": steps, "batch_size": 4, "policy": {"kl": 0.1}}
        job = lab.run(lab.spec("qwen3", method="grpo", hyper=hyper))
        assert (job.journal.folder / "baselines").exists() == (steps == 2)
        found.append(events(job, "step")[0])
    for name in ("loss", "grad_norm", "engine_ratio", "engine_kl", "kl", "ratio", "entropy"):
        assert found[0][name] == pytest.approx(found[1][name], rel=1e-4, abs=1e-6), name


# ---- nonsense
def test_an_exploding_gradient_ends_the_job(lab: Any) -> None:
    """The order of samples is known: the twelfth step meets one with an absurd advantage."""
    hyper = {"steps": 12, "batch_size": 2, "learning_rate": 1e-6, "warmup_steps": 0}
    order = Hyperparameters(**hyper)
    poisoned = step_units(order, 11, np.ones(24))[0]
    advantages = [1e7 if place == poisoned else 1.0 for place in range(24)]
    lab.dataset(method="grpo", advantages=advantages)
    spec = lab.spec("qwen3", method="grpo", hyper=hyper, save_every=4)
    error = lab.fail(spec)
    assert "the gradient norm is" in error and "after 11 whole steps" in error
    job = lab.start(spec)
    assert job.wait() == 1  # what failed stays failed
    points = [point.name for point in job.journal.resume_points]
    # that of step 8 may have been on its way, or whole and not yet told: saves hold nothing up
    assert points in (["step-00000008", "step-00000004"], ["step-00000004"])
    saved = [event["step"] for event in events(job, "saved")]
    assert saved in ([4], [4, 8]) and len(saved) <= len(points)


@pytest.mark.parametrize("every", [5, 13, RECENT + 10])
def test_rare_signals_are_no_explosion(every: int) -> None:
    """Also where most steps, or all that are remembered, had nothing left to learn."""
    progress = JobTotals()

    def add(norm: float) -> None:
        progress.add(StepReport(1.0, 1e-3, norm, 1, 1, 1.0, False), 1.0, 0)

    for step in range(2 * (RECENT + 10) + 1):
        add(1.0 if step % every == every - 1 else 1e-4)
    add(1.0)
    with pytest.raises(JobError, match="the gradient norm is 2000, and was at most 1 before"):
        add(2000.0)
    for value in (float("nan"), float("inf")):
        with pytest.raises(JobError, match=f"the gradient norm is {value} after 0 whole steps"):
            add(value)


# ---- what travels while computing goes on, as on GPUs
Ship = tuple[Path, Path, Layout, Hyperparameters]


def sail(ship: Ship, out: Path, overlap: bool, rank: int, store: Any, stop: Any) -> int:
    """One rank: score, train, evaluate, train, and write the weights right after a step."""
    from cray_agents.trainers.checkpointing.hf_export import export_weights
    from cray_agents.trainers.data.packer import BaselineLogprobs

    folder, dataset, layout, hyper = ship
    training = training_in_rank(folder, layout, hyper, rank, store, overlap=overlap)
    known = BaselineLogprobs(read_samples(dataset))
    losses = [float(training.score(known.samples, [0])[0].sum())]
    losses += [training.step(known).loss for _ in range(2)]
    losses += [training.evaluate(known)[0]]
    losses += [training.step(known).loss for _ in range(2)]
    training.finish()
    export_weights(training, out)
    if rank == 0:
        (out / "losses.json").write_text(json.dumps(losses))
    return 0


@pytest.mark.parametrize(
    ("kind", "layout", "hyper"),
    [
        ("qwen3", {"data": 2}, {"batch_size": 1}),  # a rank has nothing but filler
        ("qwen3_moe", {"data": 2, "expert": 2}, {"dtype": "bfloat16"}),
    ],
    ids=["dense", "experts"],
)
def test_what_travels_during_computation_arrives(
    lab: Any, tmp_path: Path, kind: str, layout: dict[str, Any], hyper: dict[str, Any]
) -> None:
    from safetensors.torch import load_file

    lab.dataset()
    chosen = Hyperparameters(**{"steps": 4, "batch_size": 4, "learning_rate": 1e-3, **hyper})
    ship = lab.models(kind), lab.home.dataset("ds"), Layout(**layout), chosen
    found = []
    for overlap in (False, True):
        out = tmp_path / str(overlap)
        out.mkdir()
        main = partial(sail, ship, out, overlap)
        assert run_forked(2, out / "logs", main) is None
        weights = [load_file(path) for path in sorted(out.glob("*.safetensors"))]
        found.append((json.loads((out / "losses.json").read_bytes()), weights))
    (losses, plain), (overlapped, ours) = found
    assert overlapped == losses
    for weights, expected in zip(ours, plain, strict=True):
        assert all((weights[name] == expected[name]).all() for name in expected)


# ---- what no loss shows
def trained(lab: Any) -> Path:
    """Return a checkpoint that a job made, with its golden probe."""
    lab.dataset()
    spec = lab.spec("qwen3", hyper={"steps": 2})
    lab.run(spec)
    return Path(lab.home.checkpoint(spec.id))


def test_a_reference_that_computes_something_else_is_refused(lab: Any) -> None:
    reference = trained(lab)
    manifest = reference / "manifest.json"
    record = Manifest.model_validate_json(manifest.read_bytes())
    lab.dataset(method="dpo", name="pairs")
    named = {"reference": str(reference), "reference_sha256": weights_sha256(reference)}
    spec = lab.spec("qwen3", method="dpo", dataset="pairs", hyper={"steps": 1}, **named)
    assert record.dtype == "float32"
    assert events(lab.run(spec), "step")

    probe = [
        prompt.model_copy(update={"logprobs": [value + 0.01 for value in prompt.logprobs]})
        for prompt in record.probe
    ]
    changed = record.model_copy(update={"probe": probe})
    manifest.write_text(changed.model_dump_json())
    again = lab.spec("qwen3", method="dpo", dataset="pairs", hyper={"steps": 2}, **named)
    assert "not those of the reference" in lab.fail(again)


def test_a_schedule_that_does_not_go_on_is_refused() -> None:
    totals = JobTotals(learning_rate=1e-3)
    totals.check_schedule(7, 1e-3 * (1 + 1e-12))
    JobTotals().check_schedule(7, 5.0)  # a resume point of an older version says nothing
    with pytest.raises(FailedEverywhere, match=r"step 7 had a learning rate of 0\.001.* 0\.01"):
        totals.check_schedule(7, 0.01)
