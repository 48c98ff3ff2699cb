"""GGUF export: a Hugging Face directory as a file for llama.cpp, the inverse of gguf_conversion.py.

Matrices in bfloat16 stay so, the rest is in float32. The file is then read by transformers, which
must get the same log-probabilities of it as of the directory. What llama.cpp or transformers would
compute otherwise is refused. Called by model_export.py.
"""

import json
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

from cray_agents.errors import BadInput, Corrupt
from cray_agents.records import LogprobDistance
from cray_agents.runtime.logprob_limits import FLOAT32_PROBE, measure
from cray_agents.runtime.registry.foreign_model import read_config

#: The kinds that are written, by llama.cpp's name: the settings below describe them, and of their
#: weights only the order changes. `gguf` has names of many more, and transformers reads some.
ARCHITECTURES = {"llama": "llama", "mistral": "llama", "phi3": "phi3", "qwen2": "qwen2",
                 "qwen3": "qwen3", "qwen3_moe": "qwen3moe"}  # fmt: skip
#: Settings of config.json by the writer's name of them.
SIZES = {"context_length": "max_position_embeddings", "block_count": "num_hidden_layers",
         "embedding_length": "hidden_size", "feed_forward_length": "intermediate_size",
         "head_count": "num_attention_heads", "head_count_kv": "num_key_value_heads",
         "layer_norm_rms_eps": "rms_norm_eps", "vocab_size": "vocab_size"}  # fmt: skip
EXPERTS = {"expert_count": "num_local_experts", "expert_used_count": "num_experts_per_tok",
           "expert_feed_forward_length": "moe_intermediate_size"}  # fmt: skip
NORMAL, CONTROL, USER_DEFINED, UNUSED = 1, 3, 4, 5  # ggml's types of tokens


def write_gguf(directory: Path, target: Path, name: str, licence: str | None) -> None:
    """Write a whole model directory as a GGUF file.

    Raises BadInput for a kind, a RoPE, an attention or a tokenizer that a file cannot have.
    """
    import gguf
    import torch
    from safetensors.torch import load_file

    config = _settings(directory)
    architecture = ARCHITECTURES[config["model_type"]]
    writer = gguf.GGUFWriter(target, architecture, use_temp_file=True)
    writer.add_name(name)
    if licence is not None:
        writer.add_license(licence)
    _add_settings(writer, config)
    _add_tokens(writer, directory, config["vocab_size"])
    arch = next(key for key, value in gguf.MODEL_ARCH_NAMES.items() if value == architecture)
    names = gguf.get_tensor_name_map(arch, config["num_hidden_layers"])
    experts: defaultdict[str, dict[int, Any]] = defaultdict(dict)
    for path in sorted(directory.glob("*.safetensors")):
        for theirs, tensor in load_file(path).items():
            if theirs == "lm_head.weight" and config.get("tie_word_embeddings"):
                continue  # without one, the embedding is the head
            layer, mark, rest = theirs.partition(".mlp.experts.")
            number, _, part = rest.partition(".")
            ours = names.get_name(f"{layer}{mark}{part}", try_suffixes=(".weight", ".bias"))
            if ours is None:
                _refuse(f"has the tensor {theirs}, which GGUF has no name for")
            if mark:
                experts[ours][int(number)] = tensor
                if len(experts[ours]) < config["num_local_experts"]:
                    continue
                tensor = torch.stack([one for _, one in sorted(experts.pop(ours).items())])
            elif architecture == "llama" and (".attn_q." in ours or ".attn_k." in ours):
                # llama.cpp's order of a head's rows: the halves that RoPE turns alternate
                heads = config[SIZES["head_count" if ".attn_q." in ours else "head_count_kv"]]
                halves = tensor.reshape(heads, 2, -1, *tensor.shape[1:])
                tensor = halves.transpose(1, 2).reshape(tensor.shape)
            exact = tensor.dtype == torch.bfloat16 and tensor.ndim > 1 and "gate_inp" not in ours
            kind = gguf.GGMLQuantizationType["BF16" if exact else "F32"]
            data = gguf.quants.quantize(tensor.float().contiguous().numpy(), kind)
            writer.add_tensor(ours, data, raw_dtype=kind)
    if experts:
        _refuse(f"lacks experts of {min(experts)}")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()


def compare(file: Path, directory: Path, prompts: Sequence[list[int]]) -> LogprobDistance:
    """Return how far the log-probabilities of token ids by a GGUF file are from a directory's.

    Raises Corrupt where they are not the same, or its settings, float32, are read otherwise.
    """
    import torch
    from transformers import AutoConfig, AutoModelForCausalLM, GgufConfig

    source = {"pretrained_model_name_or_path": file.parent, "gguf_file": file.name}
    read, text = AutoConfig.from_pretrained(**source), json.dumps(_settings(directory))
    rounded = json.loads(text, parse_float=lambda number: torch.tensor(float(number)).item())
    config = type(read).from_dict(rounded | {"model_type": read.model_type})  # a Mistral is a Llama
    for key in (*SIZES.values(), "rope_parameters", "hidden_act"):
        if (value := getattr(read, key, None)) != (right := getattr(config, key, None)):
            raise Corrupt(f"{file} is read with {key} {value}, and the model has {right}")

    def logprobs(**place: Any) -> list[float]:
        model = AutoModelForCausalLM.from_pretrained(**place, dtype=torch.float32)
        found: list[float] = []
        for ids in (torch.tensor(prompt) % config.vocab_size for prompt in prompts):
            with torch.no_grad():
                scores = model(ids[None, :-1]).logits[0].log_softmax(-1)
            found += scores.gather(1, ids[1:, None])[:, 0].tolist()
        return found

    ours = logprobs(**source, config=config, quantization_config=GgufConfig(dequantize=True))
    distance = measure(ours, logprobs(pretrained_model_name_or_path=directory))
    if FLOAT32_PROBE.exceeded(distance):
        far = f"logprobs of {distance.tokens} tokens differ by up to {distance.max:.3g}"
        raise Corrupt(f"{file} does not read back as the model: {far}")
    return distance


def _refuse(why: str) -> NoReturn:
    raise BadInput(f"the model {why}: export it with --to hf", param="to")


def _settings(directory: Path) -> dict[str, Any]:
    """Return config.json with transformers' defaults. Raises BadInput for what GGUF cannot hold."""
    raw = read_config(directory)
    kind, rope = raw.get("model_type"), raw.get("rope_parameters") or raw.get("rope_scaling") or {}
    if kind not in ARCHITECTURES:
        _refuse(f"is of the kind {kind!r}, and GGUF files are made of {', '.join(ARCHITECTURES)}")
    if (scaling := rope.get("rope_type", rope.get("type", "default"))) != "default":
        _refuse(f"scales its RoPE ({scaling}), which is not read back from GGUF")
    from transformers import AutoConfig

    config: dict[str, Any] = AutoConfig.from_pretrained(directory).to_dict()
    window = config.get("sliding_window") if config.get("use_sliding_window", True) else None
    if window and window < config["max_position_embeddings"]:
        _refuse(f"attends to {window:,} tokens (sliding_window), which its GGUF files do not say")
    if kind == "qwen3_moe" and (not config["norm_topk_prob"] or config["mlp_only_layers"]):
        _refuse("has experts whose weights are not normed, or not in all layers (norm_topk_prob)")
    return config


def _add_settings(writer: Any, config: dict[str, Any]) -> None:
    for name, key in (SIZES | (EXPERTS if config["model_type"] == "qwen3_moe" else {})).items():
        getattr(writer, f"add_{name}")(config[key])
    size = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    for name in ("key_length", "value_length", "rope_dimension_count"):
        getattr(writer, f"add_{name}")(size)
    writer.add_rope_freq_base(config["rope_parameters"]["rope_theta"])


def _add_tokens(writer: Any, directory: Path, size: int) -> None:
    """Add a byte-level BPE tokenizer, its special tokens, and the chat template."""
    import gguf

    path = directory / "tokenizer.json"
    tokenizer = json.loads(path.read_text()) if path.is_file() else {}
    model, splitting = tokenizer.get("model", {}), _splitting(tokenizer.get("pre_tokenizer"))
    if model.get("type") != "BPE" or splitting is None:
        _refuse("has no tokenizer of byte-level BPE that llama.cpp knows by name")
    tokens, kinds = [f"[PAD{n}]" for n in range(size)], [UNUSED] * size
    for token, number in model["vocab"].items():
        tokens[number], kinds[number] = token, NORMAL
    for each in tokenizer.get("added_tokens", []):
        tokens[each["id"]] = each["content"]
        kinds[each["id"]] = CONTROL if each["special"] else USER_DEFINED
    writer.add_tokenizer_model("gpt2")
    writer.add_tokenizer_pre(splitting)
    writer.add_token_list(tokens)
    writer.add_token_types(kinds)
    gguf.SpecialVocab(directory, load_merges=True, n_vocab=size).add_to_gguf(writer, quiet=True)


def _splitting(rule: dict[str, Any] | None) -> str | None:
    """Return llama.cpp's name of the way in which a tokenizer splits texts; None: it has none."""
    from transformers.integrations.gguf.gguf_tokenizer_mapping import GGUF_PRE_TOKENIZER_SPLITS

    match rule and rule.get("pretokenizers", [rule]):
        case [{"type": "ByteLevel", "use_regex": True}]:
            return "gpt-2"
        case [{"type": "Digits", "individual_digits": True}, {"use_regex": True}]:
            return "smollm"
        case [{"type": "Split", "pattern": {"Regex": pattern}}, {"use_regex": False}]:
            named = GGUF_PRE_TOKENIZER_SPLITS.items()
            return next((name for name, one in named if one == pattern), None)
    return None
