"""GGUF export: a Hugging Face directory as a file for llama.cpp, the inverse of gguf_conversion.py.

Weights stay as exact as they are stored: bfloat16 and float16 matrices as such, the rest in
float32. Names of tensors are the package `gguf`'s. The file is then read by transformers, which
must get the same log-probabilities of it as of the directory. What llama.cpp or transformers would
compute otherwise is refused. Called by model_export.py.
"""

import json
from collections import defaultdict
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

import numpy as np

from cray_agents.errors import BadInput, Corrupt
from cray_agents.records import LogprobDistance
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE, measure
from cray_agents.runtime.registry.foreign_model import read_config

#: The kinds that both the package `gguf` and transformers' reader know, by llama.cpp's name.
ARCHITECTURES = {
    "llama": "llama",
    "mistral": "llama",
    "qwen2": "qwen2",
    "qwen3": "qwen3",
    "qwen3_moe": "qwen3moe",
}
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # ggml's types of tokens


def write_gguf(directory: Path, target: Path, name: str, licence: str | None) -> int:
    """Write a whole model directory as a GGUF file; return the number of its tensors.

    Raises BadInput for a kind, a RoPE, an attention or a tokenizer that a file cannot have.
    """
    import gguf

    config = read_config(directory)
    architecture = _architecture(config)
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=True)
    writer.add_name(name)
    if licence is not None:
        writer.add_license(licence)
    _add_sizes(writer, config)
    _add_tokens(writer, directory, config["vocab_size"])
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    experts: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    written = 0
    for theirs, tensor in _tensors(directory):
        if theirs == "lm_head.weight" and config.get("tie_word_embeddings"):
            continue  # without one, the embedding is the head
        layer, _, rest = theirs.partition(".mlp.experts.")
        number = rest.partition(".")[0]
        plain = f"{layer}.mlp.experts.{rest.partition('.')[2]}" if number.isdecimal() else theirs
        ours = names.get_name(plain, try_suffixes=(".weight", ".bias"))
        if ours is None:
            _refuse(f"has the tensor {theirs}, which GGUF has no name for")
        if number.isdecimal():
            experts[ours][int(number)] = tensor
            if len(experts[ours]) < config["num_experts"]:
                continue
            tensor = _stacked(experts.pop(ours))
        elif architecture == "llama" and (".attn_q." in ours or ".attn_k." in ours):
            heads = config["num_attention_heads"]
            tensor = _alternate(
                tensor, heads if "_q." in ours else config.get("num_key_value_heads") or heads
            )
        data, kind = _stored(tensor, whole="ffn_gate_inp" in ours)
        writer.add_tensor(ours, data, raw_dtype=kind)
        written += 1
    if experts:
        _refuse(f"lacks experts of {min(experts)}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return written


def compare(file: Path, directory: Path, prompts: Sequence[list[int]]) -> LogprobDistance:
    """Return how far the log-probabilities of token ids by a GGUF file are from a directory's.

    Raises Corrupt where they are not the same, or its settings are read otherwise.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    config = AutoConfig.from_pretrained(directory)
    read = AutoConfig.from_pretrained(**source)
    for key in ("hidden_size", "num_hidden_layers", "num_key_value_heads", "vocab_size",
                "intermediate_size", "rope_parameters", "num_experts_per_tok"):  # fmt: skip
        if getattr(read, key, None) != getattr(config, key, None):
            raise Corrupt(f"{file} is read with {key} {getattr(read, key, None)}: it is not kept")

    def logprobs(**place: Any) -> list[float]:
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        found: list[float] = []
        with torch.no_grad():
            for ids in prompts:
                tokens = torch.tensor([ids])
                scores = model(tokens[:, :-1]).logits[0].log_softmax(-1)
                found += scores.gather(1, tokens[0, 1:, None])[:, 0].tolist()
        return found

    dense = GgufConfig(dequantize=True)
    ours = logprobs(**source, config=config, quantization_config=dense)
    distance = measure(ours, logprobs(pretrained_model_name_or_path=directory))
    if FLOAT32_PROBE.exceeded(distance):
        raise Corrupt(
            f"{file} does not read back as the model: logprobs of {distance.tokens} tokens differ"
            f" by up to {distance.max:.3g}"
        )
    return distance


def _refuse(why: str) -> NoReturn:
    raise BadInput(f"the model {why}: export it with --to hf", param="to")


def _architecture(config: dict[str, Any]) -> str:
    kind = config.get("model_type")
    if kind not in ARCHITECTURES:
        _refuse(f"is of the kind {kind!r}, and GGUF files are made of {', '.join(ARCHITECTURES)}")
    rope = config.get("rope_parameters") or config.get("rope_scaling") or {}
    if (scaling := rope.get("rope_type", rope.get("type", "default"))) != "default":
        _refuse(f"scales its RoPE ({scaling}), which is not read back from GGUF")
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and window < config["max_position_embeddings"]:
        _refuse(f"attends to {window:,} tokens (sliding_window), which GGUF files of it do not say")
    if kind == "qwen3_moe" and not config.get("norm_topk_prob"):
        _refuse("does not norm its experts' weights (norm_topk_prob), and llama.cpp always does")
    return ARCHITECTURES[kind]


def _add_sizes(writer: Any, config: dict[str, Any]) -> None:
    heads = config["num_attention_heads"]
    size = config.get("head_dim") or config["hidden_size"] // heads
    rope = config.get("rope_parameters") or {}
    writer.add_context_length(config["max_position_embeddings"])
    writer.add_block_count(config["num_hidden_layers"])
    writer.add_embedding_length(config["hidden_size"])
    writer.add_feed_forward_length(config["intermediate_size"])
    writer.add_head_count(heads)
    writer.add_head_count_kv(config.get("num_key_value_heads") or heads)
    writer.add_key_length(size)
    writer.add_value_length(size)
    writer.add_rope_dimension_count(size)
    writer.add_rope_freq_base(config.get("rope_theta") or rope.get("rope_theta") or 10_000.0)
    writer.add_layer_norm_rms_eps(config["rms_norm_eps"])
    writer.add_vocab_size(config["vocab_size"])
    if config["model_type"] == "qwen3_moe":
        writer.add_expert_count(config["num_experts"])
        writer.add_expert_used_count(config["num_experts_per_tok"])
        writer.add_expert_feed_forward_length(config["moe_intermediate_size"])


def _add_tokens(writer: Any, directory: Path, size: int) -> None:
    """Add a byte-level BPE tokenizer, its special tokens, and the chat template."""
    import gguf

    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text()) if path.is_file() else {}
    model, added = tokenizer.get("model", {}), tokenizer.get("added_tokens", [])
    if model.get("type") != "BPE" or not (pre := _splitting(tokenizer.get("pre_tokenizer"))):
        _refuse("has no tokenizer of byte-level BPE that llama.cpp knows by name")
    tokens, kinds = [f"[PAD{n}]" for n in range(size)], [UNUSED] * size
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, NORMAL
    for each in added:
        kind = CONTROL if each["special"] else USER_DEFINED
        tokens[each["id"]], kinds[each["id"]] = each["content"], kind
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(pre)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(directory, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


def _splitting(rule: dict[str, Any] | None) -> str | None:
    """Return llama.cpp's name of the way in which a tokenizer splits texts; None: it has none."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    steps = rule.get("pretokenizers", [rule]) if rule else []
    match [step["type"] for step in steps]:
        case ["ByteLevel"] if steps[0].get("use_regex", True):
            return "gpt-2"
        case ["Digits", "ByteLevel"] if steps[0]["individual_digits"] and steps[1]["use_regex"]:
            return "smollm"
        case ["Split", "ByteLevel"] if not steps[1]["use_regex"]:
            pattern = steps[0]["pattern"].get("Regex")
            names = [name for name, one in GGUF_PRE_TOKENIZER_SPLITS.items() if one == pattern]
            return names[0] if names else None
    return None


def _tensors(directory: Path) -> Iterator[tuple[str, Any]]:
    from safetensors import safe_open

    for path in sorted(directory.glob("*.safetensors")):
        with safe_open(path, "pt") as stored:
            for name in stored.keys():  # noqa: SIM118 (it is no mapping)
                yield name, stored.get_tensor(name)


def _alternate(tensor: Any, heads: int) -> Any:
    """Bring a head's rows into llama.cpp's order: the halves that RoPE turns alternate."""
    return tensor.reshape(heads, 2, -1, *tensor.shape[1:]).transpose(1, 2).reshape(tensor.shape)


def _stacked(parts: dict[int, Any]) -> Any:
    import torch

    return torch.stack([parts[number] for number in sorted(parts)])


def _stored(tensor: Any, *, whole: bool) -> tuple[Any, Any]:
    """Return a tensor's data and ggml's type; `whole`: in float32, as vectors always are."""
    import gguf
    import torch

    if tensor.dtype == torch.float16 and tensor.ndim > 1 and not whole:
        return tensor.numpy(), gguf.GGMLQuantizationType.F16
    data = np.ascontiguousarray(tensor.float().numpy())
    if tensor.dtype == torch.bfloat16 and tensor.ndim > 1 and not whole:
        kind = gguf.GGMLQuantizationType.BF16
        return gguf.quants.quantize(data, kind), kind
    return data, gguf.GGMLQuantizationType.F32
