"""Distillation as a whole job: a teacher's scores, what is refused, and a job that goes on."""

import json
import shutil
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from cray_agents.errors import BadInput
from cray_agents.trainers.checkpointing.hf_export import weights_sha256
from cray_agents.trainers.data.packer import samples_to_train_on
from cray_agents.trainers.data.samples import read_samples
from cray_agents.trainers.job.job_inputs import check_teacher
from cray_agents.training_jobs import JobSpec, Layout

pytestmark = pytest.mark.megatron


def teach(lab: Any, teacher: Path, **more: Any) -> JobSpec:
    """The spec of a job that distills a teacher into a random qwen3."""
    names = {"teacher": str(teacher), "teacher_sha256": weights_sha256(teacher)}
    spec: JobSpec = lab.spec("qwen3", method="distill", **names, **more)
    return spec


def transformers_logprobs(folder: Path, ids: Any, mask: Any, temperature: float) -> torch.Tensor:
    """[marked tokens]: as transformers computes them, in float32."""
    from transformers import AutoModelForCausalLM

    network: Any = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    row = torch.tensor(ids.astype(np.int64))
    marked = torch.from_numpy(mask[1:] > 0)
    with torch.no_grad():
        logs = (network(row[None, :-1]).logits[0, marked] / temperature).log_softmax(-1)
    return logs.gather(1, row[1:][marked, None])[:, 0]


def numbers_in(file: Path) -> np.ndarray[Any, Any]:
    return np.frombuffer(file.read_bytes()[32:], "<f4")


def test_the_teachers_scores_are_those_of_transformers(lab: Any) -> None:
    """A teacher of another kind, with tied embeddings, at a temperature; the student is trained."""
    teacher = lab.models("llama-tied")
    lab.dataset(samples=12, method="distill", temperature=0.7)
    hyper = {"steps": 2, "batch_size": 12, "policy": {"temperature": 0.7}}
    spec = teach(lab, teacher, hyper=hyper)
    job = lab.run(spec)
    samples = read_samples(lab.home.dataset("ds"), "distill")
    places = samples_to_train_on(spec.hyperparameters, samples)
    folder = job.journal.folder / "baselines"
    assert sorted(file.name for file in folder.iterdir()) == ["train-before", "train-teacher"]
    expected = {}
    for name, model in (("before", Path(spec.parent)), ("teacher", teacher)):
        rows = [
            transformers_logprobs(model, samples.tokens[i], samples.masks[i], 0.7) for i in places
        ]
        expected[name] = torch.cat(rows).numpy()
        np.testing.assert_allclose(numbers_in(folder / f"train-{name}"), expected[name], atol=2e-4)
    first, second = (e for e in job.journal.events() if e["event"] == "step")
    divergence = float((expected["before"] - expected["teacher"]).mean())
    assert first["reverse_kl"] == pytest.approx(divergence, abs=1e-4)
    assert first["ratio"] == pytest.approx(1.0, abs=1e-6)
    assert second["reverse_kl"] != first["reverse_kl"]
    assert "entropy" in first and "reward" not in first
    published = lab.home.checkpoint(spec.id)
    rows = [
        transformers_logprobs(published, samples.tokens[i], samples.masks[i], 0.7) for i in places
    ]
    change = torch.cat(rows).numpy() - expected["before"]
    assert (change * (expected["teacher"] - expected["before"])).sum() > 0  # towards the teacher


def test_the_teacher_decides_the_job(lab: Any, tmp_path: Path) -> None:
    lab.dataset(method="distill")
    spec = teach(lab, lab.models("llama"))
    moved = Path(shutil.copytree(lab.models("llama"), tmp_path / "elsewhere"))
    assert teach(lab, moved).id == spec.id
    assert teach(lab, lab.models("qwen3")).id != spec.id
    wrong = spec.model_copy(update={"teacher_sha256": "0" * 64})
    assert "were changed, or the path is wrong" in lab.fail(wrong)


def retold(folder: Path, vocabulary: dict[str, int], copy: Path) -> Path:
    """A copy of a model with a tokenizer of these words."""
    shutil.copytree(folder, copy)
    (copy / "tokenizer.json").write_text(json.dumps({"model": {"vocab": vocabulary}}))
    return copy


def test_a_teacher_must_have_the_students_tokens(lab: Any, tmp_path: Path) -> None:
    lab.dataset(samples=2, method="distill")
    samples = read_samples(lab.home.dataset("ds"), "distill")
    student = retold(lab.models("qwen3"), {"a": 0, "b": 1}, tmp_path / "student")
    spec = teach(lab, lab.models("llama"))

    def check(teacher: Path) -> None:
        check_teacher(teacher, student, [samples], spec)

    check(retold(lab.models("llama"), {"a": 0, "b": 1, "c": 2}, tmp_path / "more"))
    for words, told in (({"a": 0, "c": 1}, "token 1 is 'b'.*it is 'c'"),
                        ({"a": 0}, "token 1 is 'b'.*it is None")):  # fmt: skip
        other = retold(lab.models("llama"), words, tmp_path / str(len(words)))
        with pytest.raises(BadInput, match=f"tokenizer is not the student's: .*{told}"):
            check(other)


def test_a_teacher_that_cannot_score_the_samples_is_refused(lab: Any, tmp_path: Path) -> None:
    """Of another vocabulary where no tokenizer tells, with too short a context, for the layout."""
    from transformers import LlamaConfig, LlamaForCausalLM

    lab.dataset(samples=2, method="distill")
    samples = read_samples(lab.home.dataset("ds"), "distill")
    sizes = {"hidden_size": 16, "num_hidden_layers": 1, "intermediate_size": 16}
    sizes |= {"num_attention_heads": 2, "num_key_value_heads": 2}
    short = {"max_position_embeddings": max(map(len, samples.tokens)) - 1}
    student, spec = lab.models("qwen3"), teach(lab, lab.models("llama"))
    for name, more, told in (
        ("wide", {"vocab_size": 320}, "a vocabulary of 304, and in .* one of 320"),
        ("narrow", {"vocab_size": 304} | short, "does not fit: .* attends to"),
        ("equal", {"vocab_size": 304}, None),
    ):
        LlamaForCausalLM(LlamaConfig(**sizes, **more)).save_pretrained(tmp_path / name)
        if told is None:
            check_teacher(tmp_path / name, student, [samples], spec)
            continue
        with pytest.raises(BadInput, match=told):
            check_teacher(tmp_path / name, student, [samples], spec)
    experts = spec.model_copy(update={"layout": Layout(data=2, expert=2)})
    with pytest.raises(BadInput, match=r"the teacher .* does not fit: .*has no experts"):
        check_teacher(lab.models("llama"), lab.models("qwen3_moe"), [samples], experts)


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"method": "distill"}, "method 'distill' needs a teacher"),
        ({"method": "grpo", "teacher": "x", "teacher_sha256": "y"}, "teacher has no effect with"),
        ({"method": "distill", "teacher": "x"}, "teacher and teacher_sha256 go together"),
        ({"method": "distill", "reference": "x", "reference_sha256": "y"}, "reference has no eff"),
    ],
)
def test_a_spec_that_does_not_add_up_is_refused(changes: dict[str, Any], told: str) -> None:
    fields = {"dataset": "ds", "parent": "p", "parent_sha256": "z", "hyperparameters": {"steps": 1}}
    with pytest.raises(ValueError, match=told):
        JobSpec.model_validate(fields | changes)
