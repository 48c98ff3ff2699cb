"""LoRA against PEFT's own training, in every layout; its adapters as PEFT and vLLM read them."""

import json
import shutil
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from typing import Any

import aiohttp
import numpy as np
import pytest

from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime import checkpoints
from cray_agents.training import JobSpec, Layout, Lora

pytestmark = pytest.mark.megatron

STEPS = 6
PROMPTS = [[5, 9, 200, 301, 17, 3, 3, 42, 77, 120], [8, 8, 1, 250], list(range(40, 70))]
SIZE = {"rank": 4, "alpha": 8.0}
TOGETHER = (("self_attn", ("q_proj", "k_proj", "v_proj")), ("mlp", ("gate_proj", "up_proj")))


@dataclass
class Trained:
    """What a rank saw in a few steps."""

    losses: list[float]
    norms: list[float]
    logprobs: list[float]  # of PROMPTS after the steps, with the adapters beside the weights
    folded: list[float]  # the same, with the adapters in the weights


def train(spec: JobSpec, dataset: Path, out: Path, rank: int, store: Any, stop: Any) -> int:
    """One rank: write the adapters, train, write them again, and the merged weights."""
    from cray_agents.trainers import export
    from cray_agents.trainers.adapter import write_adapter
    from cray_agents.trainers.data.known import Known
    from cray_agents.trainers.data.samples import Samples, read_samples
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.models.lora import fold
    from cray_agents.trainers.ranks import join_ranks
    from cray_agents.trainers.train import Training

    join_ranks(spec.layout, rank, spec.layout.world, store, on_cpu=True)
    parent, hyper = Path(spec.parent), spec.hyperparameters
    model = read_architecture(parent)
    training = Training(model, spec.layout, hyper, parent, on_cpu=True, recompute=spec.recompute)
    write_adapter(training.inner, model, hyper.lora, spec.parent, out / "before")
    known = Known(read_samples(dataset))
    reports = [training.step(known) for _ in range(STEPS)]
    write_adapter(training.inner, model, hyper.lora, spec.parent, out / "after")

    def score() -> list[float]:
        return [float(x) for row in training.score(Samples.of(PROMPTS)) for x in row]

    losses, norms = [r.loss for r in reports], [r.grad_norm for r in reports]
    logprobs = score()
    fold(training.inner)
    found = Trained(losses, norms, logprobs, folded=score())
    export.export_weights(training, out / "merged")
    (out / f"rank-{rank}.json").write_text(json.dumps(asdict(found)))
    return 0


def in_ranks(spec: JobSpec, out: Path, main: Callable[..., int], *arguments: Any) -> None:
    """Run `main(spec, *arguments, out, rank, store, stop)` in a forked process per rank."""
    from cray_agents.trainers import adapter, export, train  # noqa: F401 (before the fork)
    from cray_agents.trainers.launch import find_place, run_ranks
    from cray_agents.trainers.models.cpu_megatron import load_megatron

    load_megatron()
    place = find_place(spec.layout.world, spec.id)
    outcome = run_ranks(place, out / "logs", partial(main, spec, *arguments, out))
    assert outcome.code == 0, outcome


def trained(lab: Any, out: Path, spec: JobSpec) -> Trained:
    (out / "merged").mkdir(parents=True)
    in_ranks(spec, out, train, lab.home.dataset("ds"))
    for name in ("config.json", "generation_config.json"):
        shutil.copyfile(Path(spec.parent) / name, out / "merged" / name)
    ranks = [json.loads(path.read_bytes()) for path in sorted(out.glob("rank-*.json"))]
    assert len(ranks) == spec.layout.world and all(found == ranks[0] for found in ranks)
    return Trained(**ranks[0])


def tensors_in(folder: Path) -> dict[str, Any]:
    from safetensors.torch import load_file

    files = sorted(folder.glob("*.safetensors"))
    return {name: tensor for file in files for name, tensor in load_file(file).items()}


@dataclass
class Expected:
    """PEFT's training, from the same start."""

    before: dict[str, Any]
    losses: list[float]
    norms: list[float]
    after: dict[str, Any]


def by_peft(spec: JobSpec, start: Path, samples: Any) -> Expected:
    """Train what `start` holds with PEFT and a plain AdamW loop, q, k and v sharing their A."""
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from cray_agents.trainers.data.packing import step_units
    from cray_agents.trainers.methods.schedule import learning_rate

    hyper = spec.hyperparameters
    network = AutoModelForCausalLM.from_pretrained(spec.parent, dtype=torch.float32)
    model = PeftModel.from_pretrained(network, start, is_trainable=True)
    for layer in network.model.layers:
        for place, (first, *others) in TOGETHER:
            block = getattr(layer, place)
            for name in others if hasattr(getattr(block, first, None), "lora_A") else ():
                shared = getattr(block, first).lora_A["default"].weight
                getattr(block, name).lora_A["default"].weight = shared
    learning = [p for p in model.parameters() if p.requires_grad]
    adam = torch.optim.AdamW(
        learning,
        weight_decay=hyper.weight_decay,
        betas=(hyper.adam_beta1, hyper.adam_beta2),
        eps=hyper.adam_eps,
    )
    losses, norms = [], []
    for step in range(STEPS):
        total, count = torch.zeros(()), 0.0
        for unit in step_units(hyper, step, samples.unit_weights):
            (i,) = samples.units[unit]
            ids = torch.from_numpy(samples.tokens[i]).long()[None]
            mask = torch.from_numpy(samples.masks[i])[1:]
            found = model(ids[:, :-1]).logits[0].log_softmax(-1)
            total = total - (found.gather(1, ids[0, 1:, None])[:, 0] * mask).sum()
            count += float(mask.sum())
        adam.zero_grad()
        (total / count).backward()
        norms.append(float(torch.nn.utils.clip_grad_norm_(learning, hyper.clip_grad)))
        for group in adam.param_groups:
            group["lr"] = learning_rate(hyper, step)
        adam.step()
        losses.append((total / count).item())
    named = model.named_parameters(remove_duplicate=False)
    after = {name.replace(".default", ""): p.detach() for name, p in named if ".lora_" in name}
    return Expected(tensors_in(start), losses, norms, after)


@pytest.fixture(scope="module")
def expected() -> Callable[[str, JobSpec, Path, Any], Expected]:
    """PEFT's training of a kind of model, done once."""
    done: dict[str, Expected] = {}

    def get(kind: str, spec: JobSpec, start: Path, samples: Any) -> Expected:
        if kind not in done:
            done[kind] = by_peft(spec, start, samples)
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


@pytest.mark.parametrize(("kind", "layout", "recompute"), CASES, ids=lambda value: value)
def test_a_layout_trains_as_peft_does(
    lab: Any, tmp_path: Path, expected: Any, kind: str, layout: str, recompute: str
) -> None:
    import torch
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    from cray_agents.trainers.data.samples import read_samples

    lab.dataset()
    hyper = {"steps": STEPS, "max_tokens_per_microbatch": 60, "lora": SIZE}
    parent = deepened(lab.models("qwen3-tied"), tmp_path / "deep") if kind == DEEP else kind
    spec = lab.spec(parent, layout=LAYOUTS[layout].model_dump(), hyper=hyper, recompute=recompute)
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

    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.models.lora import adapters
    from cray_agents.trainers.ranks import join_ranks
    from cray_agents.trainers.train import Training

    join_ranks(spec.layout, rank, spec.layout.world, store, on_cpu=True)
    parent = Path(spec.parent)
    training = Training(
        read_architecture(parent), spec.layout, spec.hyperparameters, parent, on_cpu=True
    )
    training.ranks.seed(0, 3)
    found = {}
    for _, name, adapter in list(adapters(training.inner))[:4]:
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


def interrupted(lab: Any, spec: JobSpec, layout: Layout) -> Any:
    """A job that is asked to stop in its midst, and goes on in a layout."""
    job = lab.start(spec)
    job.wait_for_step(2)
    assert job.kill(signal.SIGTERM) == 75, job.log
    moved = spec.model_copy(update={"layout": layout})
    (job.journal.folder / "spec.json").write_text(moved.model_dump_json())
    return lab.run(moved)


def test_a_stopped_job_goes_on_bit_for_bit_with_dropout(lab: Any) -> None:
    lab.dataset()
    hyper = {"steps": 8, "lora": SIZE | {"dropout": 0.1}}
    spec = lab.spec("qwen3", hyper=hyper, layout={"tensor": 2})
    whole = spec.model_copy(update={"code": "undisturbed"})
    losses = lab.run(whole).losses
    assert interrupted(lab, spec, spec.layout).losses == losses
    one, other = (tensors_in(lab.home.checkpoint(job.id) / "adapter") for job in (spec, whole))
    assert all((one[name] == other[name]).all() for name in one | other)


@pytest.mark.parametrize("layout", ["tensor2", "pipeline2"])
def test_a_job_goes_on_in_another_layout(lab: Any, layout: str) -> None:
    lab.dataset()
    spec = lab.spec("qwen3", hyper={"steps": 8, "lora": SIZE})
    losses = lab.run(spec.model_copy(update={"code": "undisturbed"})).losses
    np.testing.assert_allclose(interrupted(lab, spec, LAYOUTS[layout]).losses, losses, rtol=1e-5)


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


def test_a_checkpoint_holds_the_adapter_and_probes_what_is_stored(lab: Any, tmp_path: Path) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    lab.dataset()
    parent = tmp_path / "half"
    network = AutoModelForCausalLM.from_pretrained(lab.models("qwen3"), dtype=torch.bfloat16)
    network.save_pretrained(parent)
    for name in ("tokenizer.json", "chat_template.jinja"):
        shutil.copyfile(lab.models("qwen3") / name, parent / name)
    spec = lab.spec(parent, hyper={"steps": 4, "learning_rate": 1e-2, "lora": SIZE})
    lab.run(spec)
    folder = lab.home.checkpoint(spec.id)
    manifest = checkpoints.verify(folder)
    inside = {"adapter/adapter_config.json", "adapter/adapter_model.safetensors"}
    assert inside < set(manifest.files)
    weights = {"model.safetensors": manifest.files["model.safetensors"]}
    assert manifest.weights_sha256 == checkpoints.weights_sha256(weights)
    config = json.loads((folder / "adapter/adapter_config.json").read_bytes())
    assert config["base_model_name_or_path"] == spec.parent
    assert (config["r"], config["lora_alpha"]) == (4, 8)

    model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
    for prompt in manifest.probe:
        ids = torch.tensor([prompt.token_ids])
        with torch.no_grad():
            logits = model(ids[:, :-1]).logits[0].log_softmax(-1)
        truth = logits.gather(1, ids[0, 1:, None])[:, 0]
        np.testing.assert_allclose(prompt.logprobs, truth, atol=1e-4)

    other = Home(tmp_path / "other")
    name, copied = checkpoints.take_in(other, folder)
    assert copied.files == manifest.files
    adapter = other.checkpoint(name) / "adapter/adapter_model.safetensors"
    assert adapter.read_bytes() == (folder / "adapter/adapter_model.safetensors").read_bytes()


def test_what_cannot_be_adapted_is_refused(models: Callable[[str], Path]) -> None:
    from cray_agents.trainers.models.architecture import read_architecture
    from cray_agents.trainers.models.lora import adapted

    dense, experts = (read_architecture(models(kind)) for kind in ("qwen3", "mixtral"))
    assert adapted(dense, Lora(rank=64)) == ["qkv", "proj", "fc1", "fc2"]
    assert adapted(dense, Lora(rank=64, targets=["fc1"])) == ["fc1"]
    assert adapted(experts, Lora(rank=64)) == ["qkv", "proj"]
    with pytest.raises(BadInput, match="experts of a mixtral model"):
        adapted(experts, Lora(targets=["fc1", "fc2"]))
    with pytest.raises(BadInput, match=r"rank 65.*64 at most"):
        adapted(dense, Lora(rank=65))


@pytest.mark.vllm
@pytest.mark.slow
async def test_vllm_loads_the_adapter_into_a_running_server(
    lab: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    import torch
    from transformers import AutoModelForCausalLM

    from cray_agents.runtime.replica import EngineSettings, Replica
    from cray_agents.runtime.vllm_engine import VllmEngine
    from cray_agents.trainers.seed_model import ModelShape, make_seed_model

    parent = tmp_path / "parent"
    shape = ModelShape(init_std=0.1)
    make_seed_model(parent, seed=1, corpus=["What is 47 + 385?"], shape=shape)
    lab.dataset()
    spec = lab.spec(parent, hyper={"steps": STEPS, "learning_rate": 1e-2, "lora": SIZE})
    trained(lab, tmp_path, spec)

    def truth(folder: Path) -> list[float]:
        model = AutoModelForCausalLM.from_pretrained(folder, dtype=torch.float32)
        found = []
        for prompt in PROMPTS:
            with torch.no_grad():
                logits = model(torch.tensor([prompt])).logits[0].log_softmax(-1)
            found += [float(logits[i, token]) for i, token in enumerate(prompt[1:])]
        return found

    async def score(url: str, model: str) -> list[float]:
        engine = VllmEngine(url, model)
        try:
            return [x for row in await engine.score(PROMPTS) for x in row]
        finally:
            await engine.close()

    monkeypatch.setenv("VLLM_ALLOW_RUNTIME_LORA_UPDATING", "1")
    # vLLM gives the output layer a place for adapters too, and that fails on prompt_logprobs
    adapted = ("--lora-target-modules", "qkv_proj", "o_proj", "gate_up_proj", "down_proj")
    enabled = ("--enable-lora", "--max-lora-rank", "8", *adapted)
    settings = EngineSettings(engine_args=enabled)
    replica = Replica("m", settings, tmp_path / "replica.log")
    await replica.start(parent, "m@1")
    try:
        url = f"http://127.0.0.1:{replica.port}"
        body = {"lora_name": "learnt", "lora_path": str(tmp_path / "after")}
        async with (
            aiohttp.ClientSession() as session,
            session.post(f"{url}/v1/load_lora_adapter", json=body) as answer,
        ):
            assert answer.status == 200, await answer.text()
        with_adapter, without = await score(url, "learnt"), await score(url, "m")
    finally:
        await replica.stop()
    merged, plain = truth(tmp_path / "merged"), truth(parent)
    np.testing.assert_allclose(with_adapter, merged, atol=1e-3)
    np.testing.assert_allclose(without, plain, atol=1e-3)
    assert np.abs(np.subtract(merged, plain)).max() > 0.1
