"""Jobs of kinds without Megatron layers: methods, resume, their record, and what is refused."""

import json
import math
import shutil
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from cray_agents.errors import BadInput
from cray_agents.runtime.registry import checkpoints
from cray_agents.trainers.job.job_state import read_status
from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.models.tensors import read_parent
from cray_agents.trainers.models.transformers_backend.initial_weights import initial_weights
from cray_agents.trainers.models.transformers_backend.linear_adapter import add_adapters
from cray_agents.trainers.planning.layouts import check_layout
from cray_agents.training_jobs import Layout, Lora
from tests.support.trainers.tiny_families import FAMILIES, write_parent

pytestmark = pytest.mark.megatron


@pytest.fixture(scope="module")
def sinks(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A tiny gpt-oss: experts, windows and sinks."""
    folder = tmp_path_factory.mktemp("parent") / "gpt_oss"
    write_parent(folder, FAMILIES["gpt_oss"]())
    return folder


@pytest.mark.parametrize(
    ("method", "dtype", "recompute"), [("grpo", "float32", "none"), ("dpo", "bfloat16", "full")]
)
def test_a_method_trains_and_publishes(
    lab: Any, sinks: Path, method: str, dtype: str, recompute: str
) -> None:
    lab.dataset(method=method)
    hyper = {"steps": 2, "learning_rate": 1e-3, "dtype": dtype}
    spec = lab.spec(sinks, method=method, hyper=hyper, layout={"data": 2}, recompute=recompute)
    job = lab.run(spec)
    events = {event["event"]: event for event in job.journal.events()}
    assert events["started"]["layers"] == (
        "transformers' GptOssForCausalLM: there are no Megatron layers for gpt_oss"
    )
    assert events["packing"]["how"] == "packed: attention within each sequence"
    how = f"{events['started']['layers']}; {events['packing']['how']}"
    assert read_status(lab.home, spec.id).layers == how
    assert {"dpo": "accuracy", "grpo": "entropy"}[method] in events["step"]
    child = lab.home.checkpoint(spec.id)
    manifest = checkpoints.verify(child)
    assert manifest.probe and read_parent(child) == read_parent(sinks)
    ours, theirs = (json.loads((f / "config.json").read_text()) for f in (child, sinks))
    assert ours == theirs


def test_a_killed_job_goes_on_as_if_nothing_had_happened(lab: Any, sinks: Path) -> None:
    from safetensors.torch import load_file

    lab.dataset()
    spec = lab.spec(sinks, save_every=2, hyper={"steps": 5})
    whole = lab.run(spec)
    weights = load_file(lab.home.checkpoint(spec.id) / "model.safetensors")
    other = type(lab)(type(lab.home)(lab.home.root.parent / "other"), lab.models)
    other.dataset()
    job = other.start(spec)
    job.wait_for_step(3)
    job.kill(signal.SIGKILL)
    again = other.run(spec)
    assert again.journal.events()[-1]["event"] != "failed"
    assert again.losses == whole.losses
    resumed = load_file(other.home.checkpoint(spec.id) / "model.safetensors")
    assert all(bool((resumed[name] == weights[name]).all()) for name in weights)


def test_lora_of_the_transformers_backend_is_what_peft_loads(lab: Any, sinks: Path) -> None:
    from peft import PeftModel
    from transformers import AutoModelForCausalLM

    lab.dataset()
    hyper = {"steps": 3, "learning_rate": 1e-2, "lora": {"rank": 4}}
    spec = lab.spec(sinks, hyper=hyper, layout={"data": 2})
    lab.run(spec)
    child = lab.home.checkpoint(spec.id)
    networks = [
        AutoModelForCausalLM.from_pretrained(f, dtype=torch.float32) for f in (child, sinks, sinks)
    ]
    networks[1] = PeftModel.from_pretrained(networks[1], child / checkpoints.ADAPTER)
    ids = torch.arange(40)[None]
    merged, adapted, before = (network.eval()(ids).logits for network in networks)
    step = (merged - before).abs().max()
    assert step > 0.1 and (merged - adapted).abs().max() < 0.05 * step  # stored in bfloat16


def test_what_the_transformers_backend_cannot_do_is_refused_by_name(
    sinks: Path, models: Any
) -> None:
    model = read_architecture(sinks)
    assert (model.backend, model.kind, model.vocab, model.max_tokens) == (
        "transformers", "gpt_oss", 500, 512,
    )  # fmt: skip
    for name in ("tensor", "pipeline", "context", "expert"):
        with pytest.raises(BadInput, match=rf"{name}=2.*data parallelism.*fit: data="):
            check_layout(model, Layout(**{"data": 2, name: 2}))
    check_layout(model, Layout(data=4))
    asked = read_architecture(models("qwen3"), "transformers")
    assert (asked.backend, asked.network) == ("transformers", "Qwen3ForCausalLM")
    with pytest.raises(BadInput, match=r"tensor=2.*backend=megatron splits it"):
        check_layout(asked, Layout(tensor=2))
    with pytest.raises(BadInput, match=r"no linear layer of these names.*train all weights"):
        add_adapters(torch.nn.Module(), Lora(), 0)
    with pytest.raises(BadInput, match=r"'gpt_oss'.*backend=megatron.*llama.*backend=transformers"):
        read_architecture(sinks, "megatron")


def test_a_job_starts_at_random_from_a_config_alone(lab: Any, sinks: Path, tmp_path: Path) -> None:
    """As transformers draws the weights, equal on both ranks, and trained as it trains them."""
    from transformers import AutoConfig, AutoModelForCausalLM

    lab.dataset()
    bare = tmp_path / "bare"
    bare.mkdir()
    shutil.copy(sinks / "config.json", bare)
    hyper = {"init": "random", "seed": 5, "steps": 4, "learning_rate": 1e-3}
    sha256 = checkpoints.config_sha256(bare)
    spec = lab.spec(bare, hyper=hyper, parent_sha256=sha256, layout={"data": 2})
    job = lab.run(spec)
    child = lab.home.checkpoint(spec.id)
    assert checkpoints.verify(child).parent_sha256 == sha256
    assert json.loads((child / "config.json").read_text()) == json.loads(
        (bare / "config.json").read_text()
    )
    AutoModelForCausalLM.from_pretrained(child)
    drawn = initial_weights(bare, 5)
    config = AutoConfig.from_pretrained(bare)
    with torch.random.fork_rng(devices=[]):
        torch.manual_seed(5)
        theirs = AutoModelForCausalLM.from_config(config).state_dict()
    ours = AutoModelForCausalLM.from_pretrained(drawn).state_dict()
    assert ours.keys() == theirs.keys()
    assert all(torch.equal(ours[name].float(), theirs[name].float()) for name in theirs)
    assert initial_weights(bare, 6) != drawn
    assert job.losses[0] == pytest.approx(math.log(500), abs=0.5)
    no_rate = {"learning_rate": 0.0, "min_learning_rate": 0.0}
    still = lab.spec(bare, hyper=hyper | no_rate, parent_sha256=sha256)
    lab.run(still)
    kept = AutoModelForCausalLM.from_pretrained(lab.home.checkpoint(still.id)).state_dict()
    assert all(torch.equal(kept[name], ours[name]) for name in ours)


def test_weights_are_counted_as_transformers_has_them(sinks: Path, models: Any) -> None:
    from transformers import AutoModelForCausalLM

    from cray_agents.trainers.planning.arithmetic import count_weights, weights_per_token

    network, model = AutoModelForCausalLM.from_pretrained(sinks), read_architecture(sinks)
    assert count_weights(model).total == sum(p.numel() for p in network.parameters())
    experts = sum(p.numel() for n, p in network.named_parameters() if ".experts." in n)
    idle = experts // 2  # two of four experts
    table = network.get_input_embeddings().weight.numel()
    assert weights_per_token(model) == count_weights(model).total - idle - table
    tied = models("qwen3-tied")
    assert (
        count_weights(read_architecture(tied, "transformers")).total
        == count_weights(read_architecture(tied)).total
    )


def test_of_a_size_that_differs_by_layer_the_largest_counts(tmp_path: Path) -> None:
    write_parent(tmp_path, FAMILIES["gemma4_text"]())  # 512 in full attention, 16 in windows
    assert read_architecture(tmp_path).head_size == 512


def test_a_pass_keeps_no_more_than_is_planned(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    from cray_agents.trainers.planning.arithmetic import layer_activations

    write_parent(tmp_path, FAMILIES["gemma3_text"]())
    model = read_architecture(tmp_path)
    network = AutoModelForCausalLM.from_pretrained(
        tmp_path, dtype=torch.float32, attn_implementation="sdpa"
    )
    own = {parameter.data_ptr() for parameter in network.parameters()}
    kept: dict[int, torch.Tensor] = {}

    def keep(tensor: torch.Tensor) -> torch.Tensor:
        kept[tensor.untyped_storage().data_ptr()] = tensor
        return tensor

    tokens = 8  # so few that the scores, which fused attention does not keep, hardly count
    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        out = network.base_model(torch.arange(tokens)[None], use_cache=False)
    real = sum(t.untyped_storage().nbytes() for place, t in kept.items() if place not in own)
    assert out.last_hidden_state.shape[1] == tokens
    planned = tokens * model.layers * layer_activations(model, Layout(), 4)
    assert planned / 2 < real < planned


def test_a_config_of_more_layers_than_tensors_is_refused_before_it_is_built(tmp_path: Path) -> None:
    write_parent(tmp_path, FAMILIES["llama"]())
    config = json.loads((tmp_path / "config.json").read_text())
    says = config | {"num_hidden_layers": 16_000}
    (tmp_path / "config.json").write_text(json.dumps(says | {"model_type": "olmo2"}))
    with pytest.raises(BadInput, match="16000 layers"):
        read_architecture(tmp_path)
