"""LoRA against PEFT's own training, in every layout, and its adapters as PEFT reads them."""

import json
import shutil
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from cray_agents.errors import BadInput
from cray_agents.training_jobs import JobSpec, Layout, Lora
from tests.support.trainers.forked_ranks import run_forked, training_in_rank
from tests.support.trainers.peft_training import Expected, by_peft, tensors_in

pytestmark = pytest.mark.megatron

STEPS = 6
PROMPTS = [[5, 9, 200, 301, 17, 3, 3, 42, 77, 120], [8, 8, 1, 250], list(range(40, 70))]
SIZE = {"rank": 4, "alpha": 8.0}


@dataclass
class Trained:
    """What a rank saw in a few steps."""

    losses: list[float]
    norms: list[float]
    logprobs: list[float]  # of PROMPTS after the steps, with the adapters beside the weights
    folded: list[float]  # the same, with the adapters in the weights


def started(spec: JobSpec, rank: int, store: Any) -> Any:
    """A rank's training, before its first step."""
    folder, how = Path(spec.parent), {"recompute": spec.recompute}
    return training_in_rank(folder, spec.layout, spec.hyperparameters, rank, store, **how)


def write(training: Any, folder: Path) -> None:
    from cray_agents.trainers.checkpointing.peft_adapter import write_adapter

    lora = training.hyper.lora
    write_adapter(training.chunks, training.model, lora, str(training.parent), folder)


def train(spec: JobSpec, dataset: Path, out: Path, *place: Any) -> int:
    """One rank: take steps, and write all that they made."""
    from cray_agents.trainers.checkpointing import hf_export
    from cray_agents.trainers.data.packer import BaselineLogprobs
    from cray_agents.trainers.data.samples import Samples, read_samples
    from cray_agents.trainers.models.lora import without_adapters

    rank, store, _ = place
    training = started(spec, rank, store)
    write(training, out / "before")
    known = BaselineLogprobs(read_samples(dataset))
    reports = [training.step(known) for _ in range(STEPS)]
    write(training, out / "after")

    def score() -> list[float]:
        return [float(x) for row in training.score(Samples.of(PROMPTS)) for x in row]

    losses, norms = [r.loss for r in reports], [r.grad_norm for r in reports]
    logprobs = score()
    hf_export.export_weights(training, out / "merged")
    training.settle()
    with without_adapters(training.chunks):
        found = Trained(losses, norms, logprobs, folded=score())
    (out / f"rank-{rank}.json").write_text(json.dumps(asdict(found)))
    return 0


def in_ranks(spec: JobSpec, out: Path, main: Callable[..., int], *arguments: Any) -> None:
    """Run `main(spec, *arguments, out, rank, store, stop)` in a forked process per rank."""
    work = partial(main, spec, *arguments, out)
    assert run_forked(spec.layout.world, out / "logs", work) is None


def trained(lab: Any, out: Path, spec: JobSpec) -> Trained:
    (out / "merged").mkdir(parents=True)
    in_ranks(spec, out, train, lab.home.dataset("ds"))
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(Path(spec.parent) / name, out / "merged" / name)
    ranks = [json.loads(path.read_bytes()) for path in sorted(out.glob("rank-*.json"))]
    assert len(ranks) == spec.layout.world and all(found == ranks[0] for found in ranks)
    return Trained(**ranks[0])


@pytest.fixture(scope="module")
def expected() -> Callable[[str, JobSpec, Path, Any], Expected]:
    """PEFT's training of a kind of model, done once."""
    done: dict[str, Expected] = {}

    def get(kind: str, spec: JobSpec, start: Path, samples: Any) -> Expected:
        if kind not in done:
            done[kind] = by_peft(spec, start, samples, STEPS)
        return done[kind]

    return get


DEEP = "qwen3-tied of four layers"
LAYOUTS = {
    "one": Layout(),
    "data2": Layout(data=2),
    "tensor2": Layout(tensor=2),
    "tensor2sp": Layout(tensor=2, sequence_parallel=True),
    "pipeline2": Layout(pipeline=2),
    "context2": Layout(context=2),
    "interleaved": Layout(pipeline=2, interleave=2),
    "expert2": Layout(data=2, expert=2),
}
CASES = [
    *[("qwen3-tied", name, "none") for name in list(LAYOUTS)[:6]],
    ("qwen3-tied", "tensor2", "full"),
    (DEEP, "interleaved", "none"),
    ("qwen2", "one", "none"),
    ("mixtral", "expert2", "none"),
]


def deepened(parent: Path, folder: Path) -> Path:
    """A random model like another, of four layers: two for each pipeline stage's chunks."""
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.from_pretrained(parent, num_hidden_layers=4)
    config.layer_types = ["full_attention"] * 4
    torch.manual_seed(3)
    network: Any = AutoModelForCausalLM.from_config(config)
    with torch.no_grad():
        for weight in network.parameters():
            weight.mul_(3 if weight.dim() > 1 else 1)
    network.save_pretrained(folder)
    return folder


def asked(lab: Any, parent: str | Path, layout: str, **changes: Any) -> JobSpec:
    hyper = {"steps": STEPS, "max_tokens_per_microbatch": 60, "lora": SIZE}
    spec: JobSpec = lab.spec(parent, layout=LAYOUTS[layout].model_dump(), hyper=hyper, **changes)
    return spec


@pytest.mark.parametrize(("kind", "layout", "recompute"), CASES, ids=lambda value: value)
def test_a_layout_trains_as_peft_does(
    lab: Any, tmp_path: Path, expected: Any, kind: str, layout: str, recompute: str
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from cray_agents.trainers.data.samples import read_samples

    lab.dataset()
    parent = deepened(lab.models("qwen3-tied"), tmp_path / "deep") if kind == DEEP else kind
    spec = asked(lab, parent, layout, recompute=recompute)
    found = trained(lab, tmp_path, spec)
    samples = read_samples(lab.home.dataset("ds"))
    peft = expected(kind, spec, tmp_path / "before", samples)

    before, after = tensors_in(tmp_path / "before"), tensors_in(tmp_path / "after")
    assert all(torch.equal(before[name], peft.before[name]) for name in peft.before)
    assert all(before[name].abs().max() == 0 for name in before if "lora_B" in name)
    np.testing.assert_allclose(found.losses, peft.losses, rtol=1e-5)
    np.testing.assert_allclose(found.norms, peft.norms, rtol=1e-4)
    assert before.keys() == after.keys() == peft.after.keys()
    for name in after:
        learnt = peft.after[name] - peft.before[name]
        assert (after[name] - peft.after[name]).norm() < 2e-3 * learnt.norm()
    assert found.losses[-1] < found.losses[0]

    base, merged = tensors_in(Path(spec.parent)), tensors_in(tmp_path / "merged")
    assert base.keys() == merged.keys()
    for name, weight in base.items():
        stem = f"base_model.model.{name.removesuffix('.weight')}"
        if f"{stem}.lora_A.weight" in after:
            weight = weight + 2 * after[f"{stem}.lora_B.weight"] @ after[f"{stem}.lora_A.weight"]
            torch.testing.assert_close(merged[name], weight, rtol=0, atol=1e-6)
        else:
            assert torch.equal(merged[name], weight)

    def logits(model: Any) -> Any:
        with torch.no_grad():
            return torch.cat([model(torch.tensor([p[:-1]])).logits[0] for p in PROMPTS])

    network = AutoModelForCausalLM.from_pretrained(spec.parent, dtype=torch.float32)
    plain = logits(network)
    read = logits(PeftModel.from_pretrained(network, tmp_path / "after"))
    whole = logits(AutoModelForCausalLM.from_pretrained(tmp_path / "merged", dtype=torch.float32))
    assert (read - whole).abs().max() < 1e-4
    assert (read - plain).abs().max() > 0.05
    targets = torch.tensor([token for prompt in PROMPTS for token in prompt[1:]])
    logprobs = read.log_softmax(-1).gather(1, targets[:, None])[:, 0]
    np.testing.assert_allclose(found.logprobs, logprobs, atol=1e-4)
    np.testing.assert_allclose(found.folded, logprobs, atol=1e-4)


def drop(spec: JobSpec, out: Path, rank: int, store: Any, stop: Any) -> int:
    """One rank: which inputs each of a layer's adapters drops, as the zeros of their gradient."""
    import torch

    from cray_agents.trainers.models.lora import adapters

    training = started(spec, rank, store)
    training.ranks.seed(0, 3)
    found = {}
    for _, name, adapter in list(adapters(training.chunks))[:4]:
        with torch.no_grad():
            adapter.base.weight.zero_()
            adapter.a.fill_(1.0)
            adapter.b.fill_(1.0)
        for mode in (True, False):
            adapter.train(mode)
            x = torch.ones(8, 1, adapter.a.shape[1], requires_grad=True)
            adapter(x)[0].sum().backward()
            found[f"{name}.{mode}"] = x.grad
    torch.save(found, out / f"rank-{rank}.pt")
    return 0


@pytest.mark.parametrize("layout", ["tensor2", "tensor2sp"])
def test_dropout_is_the_same_where_the_input_is_the_same(
    lab: Any, tmp_path: Path, layout: str
) -> None:
    import torch

    hyper = {"steps": 1, "lora": SIZE | {"dropout": 0.25}}
    in_ranks(lab.spec("qwen3", layout=LAYOUTS[layout].model_dump(), hyper=hyper), tmp_path, drop)
    first, second = (torch.load(tmp_path / f"rank-{rank}.pt") for rank in (0, 1))
    assert len(first) == 8
    for name, mine in first.items():
        other = second[name]
        if name.endswith(".False"):
            assert (mine == mine.flatten()[0]).all() and torch.equal(mine, other)
            continue
        whole = first[name.replace("True", "False")].flatten()[0]
        assert mine.unique().tolist() == pytest.approx([0.0, float(whole / 0.75)])
        assert 0.15 < (mine == 0).float().mean() < 0.35
        column = "qkv" in name or "fc1" in name
        assert torch.equal(mine, other) == (column and layout == "tensor2")


def test_bfloat16_is_close_to_float32(lab: Any) -> None:
    lab.dataset()
    hyper = {"steps": STEPS, "lora": SIZE}
    single = lab.run(lab.spec("qwen3", hyper=hyper)).journal.events()
    half = lab.spec("qwen3", hyper=hyper | {"dtype": "bfloat16"}, layout={"tensor": 2})
    for name in ("loss", "grad_norm"):
        exact, near = (
            [e[name] for e in events if e["event"] == "step"]
            for events in (single, lab.run(half).journal.events())
        )
        np.testing.assert_allclose(near, exact, rtol=0.03)


def test_what_cannot_be_adapted_is_refused(models: Callable[[str], Path]) -> None:
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.models.lora import choose_targets

    dense, experts = (read_architecture(models(kind)) for kind in ("qwen3", "mixtral"))
    assert choose_targets(dense, Lora(rank=64)) == ["qkv", "proj", "fc1", "fc2"]
    assert choose_targets(dense, Lora(rank=64, targets=["fc1"])) == ["fc1"]
    assert choose_targets(experts, Lora(rank=64)) == ["qkv", "proj"]
    with pytest.raises(BadInput, match="experts of a mixtral model"):
        choose_targets(experts, Lora(targets=["fc1", "fc2"]))
    with pytest.raises(BadInput, match=r"rank 65.*64 at most"):
        choose_targets(dense, Lora(rank=65))
