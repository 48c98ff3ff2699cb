"""Parent files: each family's module has the parent's weights, and gives its files back."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import save_file

from cray_agents.errors import BadInput, NotFound
from cray_agents.trainers.models.transformers_backend.parent_files import ParentFiles
from tests.support.trainers.tiny_families import FAMILIES, write_parent

TOKENS = torch.arange(3, 43)[None]
Files = dict[str, torch.Tensor]


def stored(folder: Path) -> Files:
    tensors: Files = {}
    for file in sorted(folder.glob("*.safetensors")):
        with safe_open(file, "pt") as opened:
            tensors |= {name: opened.get_tensor(name) for name in opened.keys()}  # noqa: SIM118
    return tensors


def exported(parent: ParentFiles, module: Any) -> Files:
    tensors: Files = {}
    units = parent.units(module)
    parameters = [name for unit in units for name in unit.parameters]
    assert len(parameters) == len(set(parameters))
    for unit in units:
        made = dict(parent.export(module, unit))
        assert {n: (t.dtype, tuple(t.shape)) for n, t in made.items()} == unit.tensors
        assert not made.keys() & tensors.keys()
        tensors |= made
    return tensors


def assert_same(one: Files, other: Files) -> None:
    assert one.keys() == other.keys()
    assert {n: t.dtype for n, t in one.items()} == {n: t.dtype for n, t in other.items()}
    different = [name for name in one if not torch.equal(one[name], other[name])]
    assert different == []


def logits(module: Any) -> torch.Tensor:
    with torch.no_grad():
        return module(input_ids=TOKENS, use_cache=False).logits


def write(folder: Path, tensors: Files, config: dict[str, Any]) -> Path:
    folder.mkdir(exist_ok=True)
    save_file({n: t.contiguous() for n, t in tensors.items()}, folder / "model.safetensors")
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def config_of(folder: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((folder / "config.json").read_text())
    return config


@pytest.mark.slow
@pytest.mark.parametrize("family", FAMILIES)
def test_a_family_comes_back_to_the_bit(family: str, tmp_path: Path) -> None:
    model = write_parent(tmp_path, FAMILIES[family](), shard="100KB")
    assert len(list(tmp_path.glob("*.safetensors"))) > 1
    parent = ParentFiles(tmp_path)
    module = parent.build(torch.float32)
    assert {p.dtype for p in module.parameters()} == {torch.float32}
    assert_same(exported(parent, module), stored(tmp_path))
    # the numbers are where transformers has them, and its buffers are computed as it does
    mine, own = module.state_dict(), model.state_dict()
    assert mine.keys() <= own.keys()
    assert [n for n in mine if not torch.equal(mine[n], own[n].to(mine[n].dtype))] == []
    fresh = type(model)._from_config(FAMILIES[family](), dtype=torch.float32).eval()
    fresh.load_state_dict(own)
    mine, own = dict(module.named_buffers()), dict(fresh.named_buffers())
    assert [name for name in mine if not torch.equal(mine[name], own[name])] == []
    torch.testing.assert_close(logits(module), logits(fresh), atol=1e-5, rtol=1e-5)


# ---- parents as they lie on the hub: published names and layouts
def renamed(tensors: Files, *pairs: tuple[str, str]) -> Files:
    made = {}
    for name, tensor in tensors.items():
        old, new = next(((o, n) for o, n in pairs if name.startswith(o)), ("", ""))
        made[new + name.removeprefix(old)] = tensor
    return made


def plain(family: str, folder: Path, **fields: Any) -> tuple[Files, dict[str, Any]]:
    config = FAMILIES[family]()
    for name, value in fields.items():
        setattr(config, name, value)
    write_parent(folder, config)
    return stored(folder), config_of(folder)


SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
SIGLIP |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
QWEN_EYE = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
QWEN_EYE |= {"patch_size": 4, "out_hidden_size": 64, "num_position_embeddings": 16}
# the whole model's kind -> (its text, its vision, how the hub names text, head and other parts)
MULTIMODAL: dict[str, tuple[str, dict, list[tuple[str, str]], list[str]]] = {
    "gemma3": (
        "gemma3_text",
        SIGLIP,
        [("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")],
        [
            "vision_tower.vision_model.post_layernorm.weight",
            "multi_modal_projector.mm_soft_emb_norm.weight",
        ],
    ),
    "gemma4": (
        "gemma4_text",
        {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
        | {"num_attention_heads": 2, "num_key_value_heads": 2},
        [("model.", "model.language_model.")],
        ["model.vision_tower.std_bias", "model.embed_vision.embedding_projection.weight"],
    ),
    "qwen3_5": (
        "qwen3_5_text",
        QWEN_EYE,
        [("model.", "model.language_model.")],
        ["model.visual.pos_embed.weight", "mtp.fc.weight", "mtp.layers.0.mlp.up_proj.weight"],
    ),
    "qwen3_5_moe": (
        "qwen3_5_moe_text",
        QWEN_EYE,
        [("model.", "model.language_model.")],
        ["model.visual.pos_embed.weight", "mtp.layers.0.mlp.experts.1.up_proj.weight"],
    ),
    "llama4": (
        "llama4_text",
        SIGLIP | {"projector_input_dim": 32, "projector_output_dim": 32, "vision_output_dim": 32},
        [("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")],
        ["vision_model.class_embedding", "multi_modal_projector.linear_1.weight"],
    ),
    "mistral3": (
        "ministral3",
        SIGLIP | {"model_type": "pixtral", "head_dim": 16},
        [("model.", "language_model.model."), ("lm_head.", "language_model.lm_head.")],
        ["vision_tower.ln_pre.weight", "multi_modal_projector.norm.weight"],
    ),
}


@pytest.mark.slow
@pytest.mark.parametrize("kind", MULTIMODAL)
def test_the_text_of_a_multimodal_parent(kind: str, tmp_path: Path) -> None:
    family, vision, names, other_parts = MULTIMODAL[kind]
    tensors, text = plain(family, tmp_path / "text")
    tied = text["tie_word_embeddings"]
    hub = renamed(tensors, *names) | {name: torch.randn(3, 5) for name in other_parts}
    config = {"model_type": kind, "text_config": text, "vision_config": vision}
    folder = write(tmp_path / "whole", hub, config | {"tie_word_embeddings": tied})
    parent = ParentFiles(folder)
    module = parent.build(torch.float32)
    alone = ParentFiles(tmp_path / "text").build(torch.float32)
    assert type(module) is type(alone)
    assert_same(dict(module.state_dict()), dict(alone.state_dict()))
    assert_same(exported(parent, module), hub)
    copied = [unit for unit in parent.units(module) if not unit.parameters]
    assert sorted(name for unit in copied for name in unit.tensors) == sorted(other_parts)


def test_a_text_without_a_class_of_its_own_is_trained_without_eyes(tmp_path: Path) -> None:
    write_parent(tmp_path, FAMILIES["qwen3_vl"]())
    parent = ParentFiles(tmp_path)
    module = parent.build(torch.float32)
    assert not [name for name, _ in module.named_parameters() if "visual" in name]
    assert logits(module).shape == (1, TOKENS.shape[1], 500)
    assert any("visual" in name for unit in parent.units(module) for name in unit.tensors)


def test_experts_that_the_hub_has_transposed_come_back_so(tmp_path: Path) -> None:
    # Qwen3-VL-MoE's are [experts, in, out] on the hub, [experts, out, in] in transformers' module
    write_parent(tmp_path, FAMILIES["qwen3_vl_moe"]())
    tensors = stored(tmp_path)
    mine = ParentFiles(tmp_path).build(torch.float32).state_dict()
    hub = {n: t.mT if ".experts." in n and t.ndim == 3 else t for n, t in tensors.items()}
    shapes = {tuple(t.shape) for n, t in hub.items() if ".experts." in n}
    other = {tuple(t.shape) for n, t in tensors.items() if ".experts." in n}
    assert len(shapes) == 2 and not shapes & other
    parent = ParentFiles(write(tmp_path / "hub", hub, config_of(tmp_path)))
    module = parent.build(torch.float32)
    assert_same(dict(module.state_dict()), dict(mine))
    assert_same(exported(parent, module), hub)


def test_layers_that_guess_further_tokens_are_copied(tmp_path: Path) -> None:
    tensors, config = plain("glm4_moe", tmp_path / "plain")
    further = {
        name.replace("model.layers.1.", "model.layers.2."): torch.randn_like(tensor)
        for name, tensor in tensors.items()
        if name.startswith("model.layers.1.")
    }
    hub = tensors | further | {"model.layers.2.eh_proj.weight": torch.randn(64, 128)}
    folder = write(tmp_path / "hub", hub, config | {"num_nextn_predict_layers": 1})
    parent = ParentFiles(folder)
    assert_same(exported(parent, parent.build(torch.float32)), hub)
    with pytest.raises(BadInput, match=r"model\.safetensors has tensors that config\.json"):
        ParentFiles(write(tmp_path / "lie", hub, config | {"num_nextn_predict_layers": 0}))


def test_kimi_k2_is_deepseek_v3_by_another_name(tmp_path: Path) -> None:
    tensors, config = plain("deepseek_v3", tmp_path / "plain")
    config |= {"model_type": "kimi_k2", "auto_map": {"AutoConfig": "configuration_deepseek.Of"}}
    parent = ParentFiles(write(tmp_path / "hub", tensors, config))
    module = parent.build(torch.float32)
    assert type(module).__name__ == "DeepseekV3ForCausalLM"
    assert_same(exported(parent, module), tensors)


def tied_parent(folder: Path) -> tuple[Files, dict[str, Any]]:
    tensors, config = plain("qwen3", folder)
    assert "lm_head.weight" not in tensors
    return tensors, config


@pytest.mark.parametrize("stored_as", ["embedding", "head", "both", "two"])
def test_tied_weights_are_written_as_they_were(stored_as: str, tmp_path: Path) -> None:
    tensors, config = tied_parent(tmp_path / "plain")
    embedding = tensors["model.embed_tokens.weight"]
    if stored_as == "head":
        tensors["lm_head.weight"] = tensors.pop("model.embed_tokens.weight")
    elif stored_as != "embedding":
        tensors["lm_head.weight"] = embedding.clone() if stored_as == "both" else embedding + 1
    parent = ParentFiles(write(tmp_path / "hub", tensors, config))
    module: Any = parent.build(torch.float32)
    shared = module.lm_head.weight is module.model.embed_tokens.weight
    assert shared == (stored_as != "two")
    assert_same(exported(parent, module), tensors)
    known = dict(module.named_parameters())
    for unit in parent.units(module):
        assert set(unit.parameters) <= known.keys()
    with torch.no_grad():
        module.model.embed_tokens.weight.add_(1)
    changed = exported(parent, module)
    for name in {"lm_head.weight", "model.embed_tokens.weight"} & changed.keys():
        same = torch.equal(changed[name], tensors[name])
        assert same == (stored_as == "two" and name == "lm_head.weight")


def test_fill_brings_the_weights_back_in_place(tmp_path: Path) -> None:
    write_parent(tmp_path, FAMILIES["qwen3_moe"]())
    parent = ParentFiles(tmp_path)
    module = parent.build(torch.float32)
    places = {name: p.data_ptr() for name, p in module.named_parameters()}
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.zero_()
    parent.fill(module)
    assert {name: p.data_ptr() for name, p in module.named_parameters()} == places
    assert_same(exported(parent, module), stored(tmp_path))


def test_numbers_that_are_stored_more_exactly_stay_so(tmp_path: Path) -> None:
    tensors, config = plain("qwen3_next", tmp_path / "plain")
    decays = [name for name in tensors if name.endswith("A_log")]
    assert decays
    for name in decays:
        tensors[name] = torch.rand(4) + 0.1  # float32 among bfloat16, as on the hub
    parent = ParentFiles(write(tmp_path / "hub", tensors, config))
    assert_same(exported(parent, parent.build(torch.float32)), tensors)


def test_a_module_in_bfloat16_has_the_types_that_transformers_gives_it(tmp_path: Path) -> None:
    from transformers import AutoModelForCausalLM

    write_parent(tmp_path, FAMILIES["ernie4_5_moe"]())
    parent = ParentFiles(tmp_path)
    module = parent.build(torch.bfloat16)
    own = AutoModelForCausalLM.from_pretrained(tmp_path, dtype=torch.bfloat16)
    types = {name: p.dtype for name, p in module.named_parameters()}
    assert types == {name: p.dtype for name, p in own.named_parameters()}
    assert set(types.values()) == {torch.bfloat16, torch.float32}
    assert_same(exported(parent, module), stored(tmp_path))


def test_units_are_small_and_always_the_same(tmp_path: Path) -> None:
    write_parent(tmp_path, FAMILIES["qwen3_moe"]())
    parent = ParentFiles(tmp_path)
    module = parent.build(torch.bfloat16)
    units = parent.units(module)
    assert units == ParentFiles(tmp_path).units(module)
    assert max(len(unit.parameters) for unit in units) == 1
    everything = [name for unit in units for name in unit.parameters]
    assert sorted(everything) == sorted(name for name, _ in module.named_parameters())


# ---- quantised parents: packed here value by value, as their layouts are published
def draws(seed: int, *shape: int, below: int) -> torch.Tensor:
    return torch.randint(0, below, shape, generator=torch.Generator().manual_seed(seed))


def fp8(weight: torch.Tensor, seed: int) -> tuple[Files, torch.Tensor]:
    """DeepSeek-V3: each 128x128 block times its own scale; the last ones are short."""
    numbers = (draws(seed, *weight.shape, below=97) - 48).float().to(torch.float8_e4m3fn)
    rows, columns = (-(-n // 128) for n in weight.shape)
    scale = (draws(seed, rows, columns, below=9).float() + 1) / 4096
    wanted = numbers.float()
    for row in range(rows):
        for column in range(columns):
            block = wanted[row * 128 : row * 128 + 128, column * 128 : column * 128 + 128]
            block *= scale[row, column]
    return {"": numbers, "_scale_inv": scale}, wanted


E2M1 = [0, 0.5, 1, 1.5, 2, 3, 4, 6, -0.0, -0.5, -1, -1.5, -2, -3, -4, -6]


def mxfp4(weight: torch.Tensor, seed: int) -> tuple[Files, torch.Tensor]:
    """gpt-oss: [experts, in, out] lies as [experts, out, in / 32, 16], the low half byte first."""
    experts, inputs, outputs = weight.shape
    codes = draws(seed, experts, outputs, inputs, below=16)
    powers = draws(seed, experts, outputs, inputs // 32, below=9) + 118
    pairs = codes.unflatten(2, (-1, 16, 2))
    blocks = (pairs[..., 0] + 16 * pairs[..., 1]).to(torch.uint8)
    wanted = torch.tensor(E2M1)[codes] * 2.0 ** (powers.repeat_interleave(32, 2) - 127)
    return {"_blocks": blocks, "_scales": powers.to(torch.uint8)}, wanted.transpose(1, 2)


def words(numbers: torch.Tensor, bits: int = 4, order: list[int] | None = None) -> torch.Tensor:
    """Pack columns into words of 32 bits; column order[k] of a word lies at bit k * bits."""
    each = 32 // bits
    packed = torch.zeros(numbers.shape[0], numbers.shape[1] // each, dtype=torch.int64)
    for word in range(packed.shape[1]):
        for place, column in enumerate(order or range(each)):
            packed[:, word] += numbers[:, each * word + column] << bits * place
    return torch.where(packed >= 2**31, packed - 2**32, packed).to(torch.int32)


def grouped(weight: torch.Tensor, seed: int, bits: int = 4) -> tuple[torch.Tensor, ...]:
    """Numbers [in, out], zero points and scales [groups of 32, out], and the weight [out, in]."""
    outputs, inputs = weight.shape
    numbers = draws(seed, inputs, outputs, below=2**bits)
    zeros = draws(seed + 1, inputs // 32, outputs, below=2**bits - 1) + 1
    scales = (draws(seed + 2, inputs // 32, outputs, below=50).half() + 1) / 2048
    group = torch.arange(inputs) // 32
    return numbers, zeros, scales, ((numbers - zeros[group]) * scales[group].float()).T


def gptq(weight: torch.Tensor, seed: int, bits: int = 4) -> tuple[Files, torch.Tensor]:
    """AutoGPTQ: words of inputs; zero points are stored minus one; any order of the groups."""
    numbers, zeros, scales, wanted = grouped(weight, seed, bits)
    shuffled = torch.randperm(len(numbers), generator=torch.Generator().manual_seed(seed))
    return {
        "qweight": words(numbers[shuffled].T, bits).T,
        "qzeros": words(zeros - 1, bits),
        "scales": scales,
        "g_idx": (shuffled // 32).to(torch.int32),
    }, wanted[:, shuffled]


def awq(weight: torch.Tensor, seed: int) -> tuple[Files, torch.Tensor]:
    """AutoAWQ, gemm: words of eight outputs in an order of their own; zero points as they are."""
    numbers, zeros, scales, wanted = grouped(weight, seed)
    order = [0, 2, 4, 6, 1, 3, 5, 7]
    return {
        "qweight": words(numbers, order=order),
        "qzeros": words(zeros, order=order),
        "scales": scales,
    }, wanted


def compressed(weight: torch.Tensor, seed: int, bits: int = 4) -> tuple[Files, torch.Tensor]:
    """compressed-tensors, pack-quantized: words of inputs; half the range is a zero."""
    numbers = draws(seed, *weight.shape, below=2**bits)
    scales = (draws(seed, weight.shape[0], weight.shape[1] // 32, below=50).bfloat16() + 1) / 512
    wanted = (numbers - 2 ** (bits - 1)) * scales.float().repeat_interleave(32, 1)
    return {
        "_packed": words(numbers, bits),
        "_scale": scales,
        "_shape": torch.tensor(weight.shape),
    }, wanted


def rows(weight: torch.Tensor, seed: int, kind: torch.dtype) -> tuple[Files, torch.Tensor]:
    """compressed-tensors, float-quantized and int-quantized: a scale a row."""
    numbers = (draws(seed, *weight.shape, below=97) - 48).float().to(kind)
    scale = (draws(seed, weight.shape[0], 1, below=9).bfloat16() + 1) / 4096
    return {"": numbers, "_scale": scale}, numbers.float() * scale.float()


def compressed_settings(layout: str, bits: int) -> dict[str, Any]:
    weights = {"num_bits": bits, "symmetric": True}
    groups = {"group_0": {"targets": ["Linear"], "weights": weights}}
    return {"quant_method": "compressed-tensors", "format": layout, "config_groups": groups}


QUANTISED: dict[str, tuple[str, Any, dict[str, Any]]] = {
    "fp8": ("deepseek_v3", fp8, {"quant_method": "fp8", "weight_block_size": [128, 128]}),
    "mxfp4": ("gpt_oss", mxfp4, {"quant_method": "mxfp4"}),
    "gptq": ("qwen3_moe", gptq, {"quant_method": "gptq", "bits": 4, "group_size": 32}),
    "gptq 2": ("llama", partial(gptq, bits=2), {"quant_method": "gptq", "bits": 2}),
    "gptq 8": ("llama", partial(gptq, bits=8), {"quant_method": "gptq", "bits": 8}),
    "awq": ("llama", awq, {"quant_method": "awq", "bits": 4, "version": "gemm"}),
    "packed": ("deepseek_v3", compressed, compressed_settings("pack-quantized", 4)),
    "packed 8": ("llama", partial(compressed, bits=8), compressed_settings("pack-quantized", 8)),
    "rows of FP8": (
        "llama",
        partial(rows, kind=torch.float8_e4m3fn),
        compressed_settings("float-quantized", 8),
    ),
    "rows of int8": (
        "llama",
        partial(rows, kind=torch.int8),
        compressed_settings("int-quantized", 8),
    ),
}


def is_quantised(method: str, name: str, tensor: torch.Tensor) -> bool:
    if method == "mxfp4":
        return name.endswith(("experts.gate_up_proj", "experts.down_proj"))
    return tensor.ndim == 2 and "_proj" in name and min(tensor.shape) >= 32


def quantised(method: str, folder: Path) -> tuple[Path, Files]:
    """Write a quantised parent, and return what its tensors are worth."""
    family, pack, settings = QUANTISED[method]
    larger = {"intermediate_size": 160} if method == "fp8" else {}
    tensors, config = plain(family, folder / "plain", **larger)
    hub, wanted = {}, {}
    for seed, (name, tensor) in enumerate(tensors.items()):
        if not is_quantised(method, name, tensor):
            hub[name] = wanted[name] = tensor
            continue
        made, worth = pack(tensor, seed)
        stem = name.removesuffix("weight") if "qweight" in made else name
        hub |= {stem + suffix: part for suffix, part in made.items()}
        wanted[name] = worth.to(torch.bfloat16)
    config |= {"quantization_config": settings}
    return write(folder / "hub", hub, config), wanted


@pytest.mark.slow
@pytest.mark.parametrize("method", QUANTISED)
def test_a_quantised_parent_is_dequantised_on_reading(method: str, tmp_path: Path) -> None:
    folder, wanted = quantised(method, tmp_path)
    assert len(stored(folder)) > len(wanted)
    parent = ParentFiles(folder)
    module = parent.build(torch.float32)
    assert_same(exported(parent, module), wanted)
    assert "quantization_config" not in parent.config and parent.config["dtype"] == "bfloat16"
    # the export is a parent as any other
    again = ParentFiles(write(tmp_path / "export", exported(parent, module), parent.config))
    assert_same(dict(again.build(torch.float32).state_dict()), dict(module.state_dict()))


@pytest.mark.megatron
@pytest.mark.parametrize(
    ("method", "dtype", "recompute"), [("fp8", "bfloat16", "full"), ("mxfp4", "float32", "none")]
)
def test_a_job_trains_a_quantised_parent_as_it_does_the_dequantised_one(
    method: str, dtype: str, recompute: str, lab: Any, tmp_path: Path
) -> None:
    packed, wanted = quantised(method, tmp_path)
    whole = write(tmp_path / "whole", wanted, ParentFiles(packed).config)
    lab.dataset()
    hyper = {"steps": 2, "learning_rate": 1e-2, "dtype": dtype}
    specs = [lab.spec(parent, hyper=hyper, recompute=recompute) for parent in (packed, whole)]
    losses = [lab.run(spec).losses for spec in specs]
    assert losses[0] == losses[1]
    children = [lab.home.checkpoint(spec.id) for spec in specs]
    assert_same(stored(children[0]), stored(children[1]))
    assert not torch.equal(stored(children[0])["lm_head.weight"], wanted["lm_head.weight"])
    assert config_of(children[0]) == config_of(whole)


@pytest.mark.parametrize(
    ("settings", "reason"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method 'bitsandbytes', which is not read"),
        ({"quant_method": "awq", "bits": 4, "version": "gemv"}, "AWQ of 4 bits, version 'gemv'"),
        ({"quant_method": "gptq", "bits": 3}, "GPTQ of 3 bits"),
        ({"quant_method": "compressed-tensors", "format": "nvfp4-pack-quantized"}, "nvfp4"),
    ],
)
def test_other_formats_are_refused_by_name(settings: dict, reason: str, tmp_path: Path) -> None:
    tensors, config = plain("llama", tmp_path / "plain")
    folder = write(tmp_path / "hub", tensors, config | {"quantization_config": settings})
    with pytest.raises(BadInput, match=f"{reason}.*unquantised checkpoint"):
        ParentFiles(folder)


def test_a_quantised_weight_without_its_scale_is_refused(tmp_path: Path) -> None:
    folder, _ = quantised("gptq", tmp_path)
    tensors = stored(folder)
    lost = next(name for name in tensors if name.endswith("scales"))
    del tensors[lost]
    with pytest.raises(BadInput, match=rf"without '{lost}'"):
        ParentFiles(write(folder, tensors, config_of(folder)))


@pytest.mark.parametrize("shape", [(64,), (7, 64), (0, 64)])
def test_a_quantised_weight_that_does_not_fit_is_refused(
    shape: tuple[int, ...], tmp_path: Path
) -> None:
    folder, _ = quantised("awq", tmp_path)
    tensors = stored(folder)
    name = next(name for name in tensors if name.endswith("q_proj.scales"))
    words = name.replace("scales", "qweight")
    wrong = words if len(shape) == 1 else name
    tensors[wrong] = torch.zeros(shape, dtype=tensors[wrong].dtype)
    with pytest.raises(BadInput, match=r"download the checkpoint again"):
        ParentFiles(write(folder, tensors, config_of(folder))).build(torch.float32)


def test_fp8_without_a_config_of_it_is_refused(tmp_path: Path) -> None:
    folder, _ = quantised("fp8", tmp_path)
    config = config_of(folder)
    del config["quantization_config"]
    with pytest.raises(BadInput, match=r"stored as F8_E4M3.*quantization_config"):
        ParentFiles(write(folder, stored(folder), config))


# ---- bad directories
NAME = "model.layers.1.mlp.down_proj.weight"


def damaged(damage: str, tensors: Files, config: dict[str, Any]) -> None:
    if damage == "missing":
        del tensors[NAME]
    elif damage == "shape":
        tensors[NAME] = tensors[NAME][:, :-1]
    elif damage == "nan":
        tensors[NAME][3, 5] = float("nan")
    elif damage == "layers":
        config["num_hidden_layers"] = 1
    elif damage == "more layers":
        config["num_hidden_layers"] = 100
    elif damage == "deep eyes":
        config["vision_config"] = {"depth": 10**9}
    elif damage == "heads":
        config["num_attention_heads"] = 0
    elif damage == "bias":
        tensors["model.layers.1.self_attn.q_proj.bias"] = torch.zeros(64)
    elif damage == "kind":
        config |= {"model_type": "novel", "auto_map": {"AutoConfig": "configuration_novel.Novel"}}
    elif damage == "no text":
        config["model_type"] = "vit"


DAMAGES = {
    "missing": rf"lacks the weights of {NAME}",
    "shape": rf"model\.safetensors: '{NAME}' has the shape \[64, 127\].*different models",
    "nan": rf"model\.safetensors: '{NAME}' has infinite numbers or NaN",
    "layers": r"model\.safetensors has tensors that config\.json does not.*model\.layers\.1\.",
    "more layers": "speaks of 100 layers, and there are",
    "deep eyes": "depth = 1000000000, which must be at most",
    "heads": "config.json",
    "bias": r"does not imply.*self_attn\.q_proj\.bias",
    "kind": "'novel'.*does not know this kind.*never run",
    "no text": "no causal language model of this kind",
}


@pytest.mark.parametrize("damage", DAMAGES)
def test_a_bad_directory_is_refused_by_name(damage: str, tmp_path: Path) -> None:
    tensors, config = plain("olmo2", tmp_path / "plain")
    damaged(damage, tensors, config)
    folder = write(tmp_path / "bad", tensors, config)
    with pytest.raises(BadInput, match=DAMAGES[damage]):
        ParentFiles(folder).build(torch.float32)


def test_files_are_read_from_the_directory_alone(tmp_path: Path) -> None:
    write_parent(tmp_path / "model", FAMILIES["olmo2"](), shard="100KB")
    first, *_ = sorted((tmp_path / "model").glob("*.safetensors"))
    moved = first.rename(tmp_path / first.name)
    with pytest.raises(BadInput, match=rf"{first.name} is missing"):
        ParentFiles(tmp_path / "model")
    first.symlink_to(moved)
    with pytest.raises(BadInput, match="leads out of its directory"):
        ParentFiles(tmp_path / "model")


def test_pickled_weights_are_not_read(tmp_path: Path) -> None:
    write_parent(tmp_path, FAMILIES["olmo2"]())
    (tmp_path / "model.safetensors").rename(tmp_path / "pytorch_model.bin")
    with pytest.raises(NotFound, match="other formats are not read"):
        ParentFiles(tmp_path)
