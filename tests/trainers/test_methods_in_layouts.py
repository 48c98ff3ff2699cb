"""Every method but sft (test_numerics.py) through a whole job: the same numbers in each layout."""

from typing import Any

import pytest

from cray_agents.trainers.checkpointing.hf_export import weights_sha256

pytestmark = pytest.mark.megatron

LAYOUTS = {
    "data2": {"data": 2},
    "tensor2": {"tensor": 2, "sequence_parallel": True},
    "pipeline2": {"pipeline": 2},
    "context2": {"context": 2},
}
METHODS: dict[str, tuple[str, dict[str, Any]]] = {
    "dpo": ("dpo", {"preference": {"label_smoothing": 0.1}}),
    "kto": ("kto", {"preference": {"undesirable": 2.0}}),
    "grpo": ("grpo", {"policy": {"kl": 0.1, "temperature": 0.7}}),
    "cispo": ("grpo", {"policy": {"objective": "cispo", "normalization": "constant"}}),
    "gspo": ("grpo", {"policy": {"objective": "gspo", "normalization": "sequence"}}),
    "distill": ("distill", {"policy": {"temperature": 0.7}}),
}


def numbers(job: Any) -> list[dict[str, float]]:
    """What was measured in each step and evaluation."""
    left_out = {"time", "seconds", "tokens_per_second", "memory_gib", "communication"}
    return [
        {name: v for name, v in e.items() if name not in left_out and not isinstance(v, str)}
        for e in job.journal.events()
        if e["event"] in ("step", "evaluation")
    ]


def run(lab: Any, name: str, layout: dict[str, Any]) -> list[dict[str, float]]:
    method, hyper = METHODS[name]
    dataset = f"ds-{name}-{'-'.join(layout) or 'one'}"
    kind = {"method": method, "temperature": hyper.get("policy", {}).get("temperature", 1.0)}
    lab.dataset(dataset, **kind)
    lab.dataset(dataset, samples=8, split="validation", **kind)
    steps = {"steps": 4, "max_tokens_per_microbatch": 80}
    more = {"dataset": dataset, "method": method, "layout": layout, "hyper": hyper | steps}
    if method == "distill":  # by a teacher of another kind
        teacher = lab.models("llama")
        more |= {"teacher": str(teacher), "teacher_sha256": weights_sha256(teacher)}
    spec = lab.spec("qwen3", **more)
    return numbers(lab.run(spec.model_copy(update={"evaluate_every": 2})))


@pytest.mark.parametrize("name", list(METHODS))
def test_a_method_gives_the_same_in_every_layout(lab: Any, name: str) -> None:
    one = run(lab, name, {})
    assert len(one) == 4 + 3
    for untrained in one[:2]:
        untrained.pop("accuracy", None)  # before anything is learnt, rounding decides it
    for layout in LAYOUTS.values() if name in ("dpo", "grpo") else list(LAYOUTS.values())[::2]:
        for ours, theirs in zip(run(lab, name, layout), one, strict=True):
            same = {measure: ours[measure] for measure in theirs}
            assert same == pytest.approx(theirs, rel=1e-4, abs=2e-6), layout
