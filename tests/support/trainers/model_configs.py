"""Configs of well-known models as their makers published them, and small architectures."""

import json
from pathlib import Path
from typing import Any

from cray_agents.trainers.models.architecture import Architecture, Rope, read_architecture
from cray_agents.training_jobs import Hyperparameters

LLAMA_2_7B = {
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 11008,
    "num_attention_heads": 32,
    "num_key_value_heads": 32,
    "num_hidden_layers": 32,
    "vocab_size": 32000,
    "max_position_embeddings": 4096,
    "rms_norm_eps": 1e-5,
}
LLAMA_31_8B = LLAMA_2_7B | {
    "intermediate_size": 14336,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
}
LLAMA_31_405B = LLAMA_31_8B | {
    "hidden_size": 16384,
    "intermediate_size": 53248,
    "num_attention_heads": 128,
    "num_hidden_layers": 126,
}
LLAMA_2_70B = LLAMA_2_7B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_attention_heads": 64,
    "num_key_value_heads": 8,
    "num_hidden_layers": 80,
}
MISTRAL_7B = LLAMA_31_8B | {"model_type": "mistral", "vocab_size": 32000}
MIXTRAL_8X7B = MISTRAL_7B | {
    "model_type": "mixtral",
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
}
QWEN3_06B = LLAMA_2_7B | {
    "model_type": "qwen3",
    "hidden_size": 1024,
    "intermediate_size": 3072,
    "num_attention_heads": 16,
    "num_key_value_heads": 8,
    "head_dim": 128,
    "num_hidden_layers": 28,
    "vocab_size": 151936,
    "tie_word_embeddings": True,
}
QWEN3_30B_A3B = QWEN3_06B | {
    "model_type": "qwen3_moe",
    "hidden_size": 2048,
    "intermediate_size": 6144,
    "moe_intermediate_size": 768,
    "num_experts": 128,
    "num_experts_per_tok": 8,
    "norm_topk_prob": True,
    "num_attention_heads": 32,
    "num_key_value_heads": 4,
    "num_hidden_layers": 48,
    "tie_word_embeddings": False,
}
QWEN3_235B_A22B = QWEN3_30B_A3B | {
    "hidden_size": 4096,
    "intermediate_size": 12288,
    "moe_intermediate_size": 1536,
    "num_attention_heads": 64,
    "num_hidden_layers": 94,
}


SMALL = Architecture(
    kind="llama",
    layers=8,
    hidden=512,
    ffn=1024,
    heads=8,
    kv_heads=8,
    head_size=64,
    vocab=32001,
    max_tokens=4096,
    norm_eps=1e-6,
    tied=False,
    rope=Rope({"rope_type": "default", "rope_theta": 10000.0}, positions=4096),
)


def written(folder: Path, config: dict[str, Any]) -> Architecture:
    (folder / "config.json").write_text(json.dumps(config))
    return read_architecture(folder)


def hyper(**more: Any) -> Hyperparameters:
    return Hyperparameters(**{"steps": 1, "batch_size": 128, "dtype": "bfloat16", **more})
