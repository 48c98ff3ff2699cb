"""Tiny families: a random model of each kind that transformers builds, with what it is known for.

Two to four layers, hidden 64, vocabulary 500; experts, sliding windows, sinks, latent attention and
recurrent layers where the family has them. `write_parent` writes one as transformers does.
"""

from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch

_SIZES = {
    "vocab_size": 500,
    "hidden_size": 64,
    "intermediate_size": 128,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "max_position_embeddings": 512,
    "pad_token_id": 0,
    "bos_token_id": 1,
    "eos_token_id": 2,
}
_HEAD = {"head_dim": 16}
_WINDOW = {"sliding_window": 16, "layer_types": ["sliding_attention", "full_attention"]}
_EXPERTS = {"num_experts": 4, "num_experts_per_tok": 2, "moe_intermediate_size": 32}
_WIDER = _EXPERTS | {"moe_intermediate_size": 48}  # gate and up together are no square
_LOCAL = {"num_local_experts": 4, "num_experts_per_tok": 2}
_ROUTED = {
    "n_routed_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "n_shared_experts": 1,
    "n_group": 1,
    "topk_group": 1,
}
_FIRST_DENSE = {"first_k_dense_replace": 1}
_DENSE_SPARSE = {"mlp_layer_types": ["dense", "sparse"]}
_LATENT = {  # DeepSeek's multi-head latent attention
    "q_lora_rank": 32,
    "kv_lora_rank": 16,
    "qk_rope_head_dim": 8,
    "qk_nope_head_dim": 16,
    "v_head_dim": 16,
    "num_key_value_heads": 4,
}
_INDEXER = {"index_topk": 8, "index_head_dim": 16, "index_n_heads": 2}
_INDEXER16 = _INDEXER | {"index_n_heads": 16}  # of fewer heads' scores many are zero, and tie
_DELTA = {  # gated delta rule beside full attention
    "linear_conv_kernel_dim": 4,
    "linear_key_head_dim": 16,
    "linear_value_head_dim": 16,
    "linear_num_key_heads": 2,
    "linear_num_value_heads": 4,
    "layer_types": ["linear_attention", "full_attention"],
}
_SHARED = {"shared_expert_intermediate_size": 32}
_MAMBA = {
    "mamba_n_heads": 8,
    "mamba_d_head": 16,
    "mamba_d_state": 16,
    "mamba_n_groups": 1,
    "mamba_chunk_size": 16,
}
_GEMMA3 = _HEAD | _WINDOW | {"query_pre_attn_scalar": 16}
_GEMMA4 = _HEAD | _WINDOW | {"hidden_size_per_layer_input": 16, "vocab_size_per_layer_input": 500}
_YARN = {
    "rope_parameters": {
        "rope_type": "yarn",
        "rope_theta": 10000.0,
        "factor": 4.0,
        "original_max_position_embeddings": 128,
    }
}
_VISION = {"depth": 1, "hidden_size": 32, "intermediate_size": 32, "num_heads": 2}
_VISION |= {"patch_size": 4, "out_hidden_size": 64, "num_position_embeddings": 16}

# family -> (transformers' kind, what it has besides _SIZES)
_FAMILIES: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("llama", {}),
    "mistral": ("mistral", {"sliding_window": 16}),
    "mixtral": ("mixtral", _LOCAL),
    "qwen2": ("qwen2", {}),
    "qwen2_moe": ("qwen2_moe", _EXPERTS | _SHARED),
    "qwen3": ("qwen3", _HEAD | {"tie_word_embeddings": True}),
    "qwen3_moe": ("qwen3_moe", _HEAD | _EXPERTS),
    "qwen3_next": ("qwen3_next", _HEAD | _DELTA | _EXPERTS | _SHARED),
    "qwen3_5_text": ("qwen3_5_text", _HEAD | _DELTA),
    "qwen3_5_moe_text": ("qwen3_5_moe_text", _HEAD | _DELTA | _EXPERTS | _SHARED),
    "qwen4_exp_text": (
        "qwen4_exp_text",
        _HEAD
        | _DELTA
        | _EXPERTS
        | _SHARED
        | {
            "layer_types": ["linear_attention", "indexed_attention"],
            "hc_lowrank": 8,
            "ple_layer_ids": [1],
            "heads_per_ngram": 2,
            "ngram_vocab_size_base": 40,
            "split_ngram_parts": 4,  # of one embedding, in files
            "indexer_n_heads": 2,
            "indexer_kv_heads": 1,
            "indexer_head_dim": 16,
            "indexer_budget": 16,
            "indexer_compress_ratio": 4,
        },
    ),
    "gpt_oss": ("gpt_oss", _HEAD | _LOCAL | _WINDOW | _YARN | {"intermediate_size": 32}),
    "gemma2": ("gemma2", _HEAD | _WINDOW | {"query_pre_attn_scalar": 16}),
    "gemma3_text": ("gemma3_text", _GEMMA3),
    "gemma3n_text": (
        "gemma3n_text",
        _GEMMA4
        | {
            "num_hidden_layers": 4,
            "layer_types": ["sliding_attention", "full_attention"] * 2,
            "num_kv_shared_layers": 2,
            "laurel_rank": 8,
            "activation_sparsity_pattern": [0.5, 0.5, 0.0, 0.0],
        },
    ),
    "gemma4_text": ("gemma4_text", _GEMMA4),
    "gemma4_moe": (
        "gemma4_text",
        _GEMMA4
        | {
            "enable_moe_block": True,
            "num_experts": 4,
            "top_k_experts": 2,
            "moe_intermediate_size": 32,
        },
    ),
    "deepseek_v3": ("deepseek_v3", _ROUTED | _LATENT | _FIRST_DENSE),
    "deepseek_v32": ("deepseek_v32", _ROUTED | _LATENT | _INDEXER16 | _DENSE_SPARSE),
    "deepseek_v4": (
        "deepseek_v4",
        _ROUTED
        | _INDEXER
        | {
            "num_key_value_heads": 1,
            "head_dim": 16,
            "q_lora_rank": 32,
            "o_groups": 2,
            "o_lora_rank": 16,
            "sliding_window": 16,
            "hc_mult": 2,
            "num_hidden_layers": 3,
            "layer_types": [
                "sliding_attention",
                "compressed_sparse_attention",
                "heavily_compressed_attention",
            ],
        },
    ),
    "glm4": ("glm4", _HEAD),
    "glm4_moe": ("glm4_moe", _HEAD | _ROUTED | _FIRST_DENSE | {"use_qk_norm": True}),
    "glm4_moe_lite": ("glm4_moe_lite", _ROUTED | _LATENT | _DENSE_SPARSE),
    "glm_moe_dsa": ("glm_moe_dsa", _ROUTED | _LATENT | _INDEXER16 | _DENSE_SPARSE),
    "llama4_text": (
        "llama4_text",
        _HEAD
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 1,
            "intermediate_size_mlp": 128,
            "interleave_moe_layer_step": 2,
            "attention_chunk_size": 16,
            "no_rope_layer_interval": 2,
        },
    ),
    "ministral": ("ministral", _HEAD | _WINDOW),
    "ministral3": (
        "ministral3",
        _HEAD
        | {
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "llama_4_scaling_beta": 0.1,
            }
        },
    ),
    "mistral4": (
        "mistral4",
        _ROUTED
        | _LATENT
        | {
            "qk_nope_head_dim": 8,
            "rope_parameters": {
                "rope_type": "yarn",
                "rope_theta": 10000.0,
                "factor": 4.0,
                "original_max_position_embeddings": 128,
                "mscale": 1.0,
                "mscale_all_dim": 1.0,
                "llama_4_scaling_beta": 0.1,
                "partial_rotary_factor": 0.5,
            },
        },
    ),
    "olmo2": ("olmo2", {}),
    "olmo3": ("olmo3", _WINDOW),
    "olmoe": ("olmoe", {"num_experts": 4, "num_experts_per_tok": 2}),
    "olmo_hybrid": (
        "olmo_hybrid",
        _DELTA | {"linear_num_key_heads": 4, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "granite": ("granite", {"logits_scaling": 2.0, "residual_multiplier": 0.5}),
    "granitemoe": ("granitemoe", _LOCAL),
    "granitemoehybrid": (
        "granitemoehybrid",
        _LOCAL | _MAMBA | {"layer_types": ["mamba", "attention"], "shared_intermediate_size": 32},
    ),
    "phi3": ("phi3", {"sliding_window": 16}),
    "phimoe": ("phimoe", _LOCAL | {"lm_head_bias": True, "attention_bias": True}),
    "smollm3": ("smollm3", {"no_rope_layer_interval": 2}),
    "nemotron_h": (
        "nemotron_h",
        _HEAD
        | _ROUTED
        | {
            "layers_block_type": ["mamba", "attention", "moe"],
            "num_hidden_layers": 3,
            "ssm_state_size": 16,
            "mamba_num_heads": 8,
            "mamba_head_dim": 16,
            "n_groups": 1,
            "chunk_size": 16,
            "moe_shared_expert_intermediate_size": 32,
        },
    ),
    "minimax_m2": ("minimax_m2", _HEAD | _LOCAL | {"intermediate_size": 32}),
    "kimi_linear": (
        "kimi_linear",
        _LATENT
        | _DENSE_SPARSE
        | {
            "num_local_experts": 4,
            "num_experts_per_tok": 2,
            "moe_intermediate_size": 32,
            "q_lora_rank": None,
            "linear_head_dim": 16,
            "linear_num_heads": 4,
            "layer_types": ["linear_attention", "full_attention"],
        },
    ),
    "ernie4_5": ("ernie4_5", _HEAD),
    "ernie4_5_moe": (
        "ernie4_5_moe",
        {"moe_intermediate_size": 32, "moe_k": 2, "moe_num_experts": 4, "moe_layer_start_index": 1},
    ),
    "hunyuan_v1_dense": ("hunyuan_v1_dense", _HEAD),
    "hunyuan_v1_moe": ("hunyuan_v1_moe", _HEAD | {"num_experts": 4, "moe_topk": 2}),
    "exaone4": ("exaone4", _HEAD | _WINDOW),
    "exaone_moe": ("exaone_moe", _HEAD | _EXPERTS | _WINDOW | _DENSE_SPARSE),
    "falcon_h1": ("falcon_h1", _HEAD | _MAMBA | {"mamba_d_ssm": 128}),
    "bamba": ("bamba", _MAMBA | {"attn_layer_indices": [1]}),
    "jamba": (
        "jamba",
        {
            "num_experts": 4,
            "attn_layer_period": 2,
            "attn_layer_offset": 1,
            "mamba_dt_rank": 8,
            "use_mamba_kernels": False,
        },
    ),
    "mamba2": (
        "mamba2",
        {"num_heads": 8, "head_dim": 16, "state_size": 16, "n_groups": 1, "chunk_size": 16},
    ),
    "lfm2": ("lfm2", {"layer_types": ["conv", "full_attention"]}),
    "lfm2_moe": (
        "lfm2_moe",
        _EXPERTS | {"num_dense_layers": 1, "layer_types": ["conv", "full_attention"]},
    ),
    "seed_oss": ("seed_oss", _HEAD),
    "cohere2": ("cohere2", _WINDOW),
    "gpt2": ("gpt2", {"n_embd": 64, "n_layer": 2, "n_head": 4, "n_positions": 512}),
    "dots1": ("dots1", _HEAD | _ROUTED | _FIRST_DENSE),
    "solar_open": ("solar_open", _HEAD | _ROUTED),
    "mimo_v2_flash": (
        "mimo_v2_flash",
        _HEAD | _ROUTED | _WINDOW | _DENSE_SPARSE | {"v_head_dim": 8},
    ),
    "afmoe": ("afmoe", _HEAD | _EXPERTS | _WINDOW | {"num_shared_experts": 1}),
    "longcat_flash": (
        "longcat_flash",
        _LATENT
        | {
            "num_hidden_layers": 4,  # two layers of two blocks
            "head_dim": 8,
            "ffn_hidden_size": 128,
            "expert_ffn_hidden_size": 32,
            "n_routed_experts": 4,
            "moe_topk": 2,
            "zero_expert_num": 2,
        },
    ),
    "starcoder2": ("starcoder2", {"use_bias": True}),
    "minimax": (
        "minimax",
        _HEAD | _LOCAL | {"block_size": 16, "layer_types": ["linear_attention", "full_attention"]},
    ),
    "zaya": ("zaya", _HEAD | _EXPERTS | {"num_experts_per_tok": 1, "router_hidden_size": 16}),
    "laguna": ("laguna", _HEAD | _EXPERTS | _SHARED | _WINDOW | _DENSE_SPARSE),
    "apertus": ("apertus", _HEAD),
    "hy_v3": ("hy_v3", _HEAD | _EXPERTS | _DENSE_SPARSE),
    "qwen3_vl": ("qwen3_vl", {}),
    "qwen3_vl_moe": ("qwen3_vl_moe", {}),
}
# what the campaign of test_families.py tries besides, and other tests need not
_FURTHER: dict[str, tuple[str, dict[str, Any]]] = {
    "gemma": ("gemma", _HEAD),
    "cohere": ("cohere", {"logit_scale": 0.25}),
    "cohere2_moe": ("cohere2_moe", _HEAD | _EXPERTS | _WINDOW),
    "deepseek_v2": ("deepseek_v2", _ROUTED | _LATENT | _FIRST_DENSE | {"topk_method": "greedy"}),
    "glm": ("glm", _HEAD),
    "granitemoeshared": ("granitemoeshared", _LOCAL | {"shared_intermediate_size": 32}),
    "minimax_m3_vl_text": ("minimax_m3_vl_text", _HEAD | _LOCAL),
    "olmo": ("olmo", {}),
    "flex_olmo": ("flex_olmo", {"num_experts": 4, "num_experts_per_tok": 2}),
    "nemotron": ("nemotron", _HEAD),
    "arcee": ("arcee", _HEAD),
    "mellum": ("mellum", _HEAD | _EXPERTS | _WINDOW),
    "hy_v4": ("hy_v4", _HEAD | _EXPERTS | _DENSE_SPARSE),
    "phi": ("phi", {"partial_rotary_factor": 0.5}),
    "stablelm": ("stablelm", {}),
    "gpt_neox": ("gpt_neox", {}),
    "falcon": ("falcon", {"num_kv_heads": 2, "new_decoder_architecture": True}),
    "opt": ("opt", {"ffn_dim": 128, "word_embed_proj_dim": 64}),
    "bloom": ("bloom", {"n_layer": 2, "n_head": 4}),
    "mamba": ("mamba", {"state_size": 16}),
    "falcon_mamba": ("falcon_mamba", {"state_size": 16}),
    "recurrent_gemma": (
        "recurrent_gemma",
        {"num_hidden_layers": 3, "attention_window_size": 16, "lru_width": 64},
    ),
}


def _text(family: str) -> dict[str, Any]:
    kind, fields = _FAMILIES[family]
    return _SIZES | fields | {"model_type": kind}


_SIGLIP = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1}
_SIGLIP |= {"num_attention_heads": 2, "image_size": 8, "patch_size": 4}
_PIXTRAL = _SIGLIP | {"model_type": "pixtral", "head_dim": 16}
_LLAMA4_EYE = _SIGLIP | {"projector_input_dim": 32, "projector_output_dim": 32}
_GEMMA4_EYE = {"hidden_size": 32, "intermediate_size": 32, "num_hidden_layers": 1, "head_dim": 16}
_GEMMA4_EYE |= {"num_attention_heads": 2, "num_key_value_heads": 2}
_NESTED = {  # kinds whose text is a part: its fields, and the vision's
    "qwen3_vl": (_SIZES | _HEAD, _VISION | {"deepstack_visual_indexes": [0]}),
    "qwen3_vl_moe": (_SIZES | _HEAD | _WIDER, _VISION | {"deepstack_visual_indexes": [0]}),
    "gemma3": (_text("gemma3_text"), _SIGLIP),
    "gemma4": (_text("gemma4_text"), _GEMMA4_EYE),
    "qwen3_5": (_text("qwen3_5_text"), _VISION),
    "qwen3_5_moe": (_text("qwen3_5_moe_text"), _VISION),
    "llama4": (_text("llama4_text"), _LLAMA4_EYE | {"vision_output_dim": 32}),
    "mistral3": (_text("ministral3"), _PIXTRAL),
}


def _config(family: str) -> Any:
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    kind, fields = (_FAMILIES | _FURTHER).get(family, (family, {}))
    config_of = CONFIG_MAPPING[kind]
    if kind in _NESTED:
        text, vision = _NESTED[kind]
        return config_of(text_config=text, vision_config=vision, tie_word_embeddings=False)
    return config_of(**(_SIZES | fields))


def _factory(family: str) -> Callable[[], Any]:
    return lambda: _config(family)


#: Makes transformers' config of a tiny model, by the family's name.
FAMILIES: dict[str, Callable[[], Any]] = {family: _factory(family) for family in _FAMILIES}
#: The same of whole models, whose text is a kind of FAMILIES, and of kinds that fewer people train.
FURTHER = {each: _factory(each) for each in (*_NESTED, *_FURTHER) if each not in _FAMILIES}


def write_parent(
    folder: Path,
    config: Any,
    *,
    seed: int = 0,
    dtype: torch.dtype = torch.bfloat16,
    shard: str = "5GB",
) -> Any:
    """Write a random model as transformers saves it, and return it. No tensor is left at ones."""
    from transformers import AutoModelForCausalLM, AutoModelForMultimodalLM, logging

    logging.set_verbosity_error()
    logging.disable_progress_bar()
    torch.manual_seed(seed)
    auto = AutoModelForCausalLM._model_mapping
    if config.get_text_config() is not config or type(config) not in auto:
        auto = AutoModelForMultimodalLM._model_mapping
    model = auto[type(config)]._from_config(config, dtype=dtype).eval()
    with torch.no_grad():
        for tensor in model.state_dict().values():
            if tensor.is_floating_point():
                tensor.add_(torch.randn_like(tensor) * 0.02)
    model.save_pretrained(folder, max_shard_size=shard)
    return model
