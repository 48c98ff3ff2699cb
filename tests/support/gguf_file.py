"""A GGUF file of a Llama of two layers, with a byte-level tokenizer and a ChatML template."""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import gguf
import numpy as np
from gguf import GGMLQuantizationType as Type

EXPERT_FFN = 768  # transformers takes it for Qwen3-MoE, whatever a file says
LAYERS, HIDDEN, FFN, HEADS, KV_HEADS = 2, 64, 96, 4, 2
MARKS = ["<|endoftext|>", "<|im_start|>", "<|im_end|>"]
TEMPLATE = (
    "{% for message in messages %}{{'<|im_start|>' + message['role'] + '\\n' + message['content']"
    " + '<|im_end|>\\n'}}{% endfor %}"
    "{% if add_generation_prompt %}{{ '<|im_start|>assistant\\n' }}{% endif %}"
)


def byte_tokens() -> list[str]:
    """The marks, the tokens of GPT-2's bytes, and one of two of them."""
    plain = [*range(33, 127), *range(161, 173), *range(174, 256)]
    others = [byte for byte in range(256) if byte not in plain]
    letters = dict(zip(plain, map(chr, plain), strict=True))
    letters |= {byte: chr(256 + n) for n, byte in enumerate(others)}
    return [*MARKS, *(letters[byte] for byte in range(256)), "he"]


def write_gguf(
    path: Path,
    *,
    architecture: str = "llama",
    experts: int = 0,
    more: Mapping[str, Any] | None = None,
    tensors: Mapping[str, int] | None = None,
) -> dict[str, np.ndarray]:
    """Write it; return its weights by transformers' names, dequantized.

    `experts`: of a Qwen3-MoE. `more`: metadata beside the usual. `tensors`: further ones,
    by name and number of elements.
    """
    draw = np.random.default_rng(7)
    writer = gguf.GGUFWriter(path, architecture)
    writer.add_block_count(LAYERS)
    writer.add_context_length(512)
    writer.add_embedding_length(HIDDEN)
    ffn = EXPERT_FFN if experts else FFN
    writer.add_feed_forward_length(ffn)
    writer.add_head_count(HEADS)
    writer.add_head_count_kv(KV_HEADS)
    writer.add_rope_dimension_count(HIDDEN // HEADS)
    writer.add_rope_freq_base(1e5)
    writer.add_layer_norm_rms_eps(1e-5)
    if experts:
        writer.add_key_length(HIDDEN // HEADS)
        writer.add_expert_count(experts)
        writer.add_expert_used_count(2)
    tokens = byte_tokens()
    writer.add_vocab_size(len(tokens))
    writer.add_tokenizer_model("gpt2")
    writer.add_token_list(tokens)
    writer.add_token_types([3] * len(MARKS) + [1] * 257)
    writer.add_token_merges(["h e"])
    writer.add_bos_token_id(1)
    writer.add_eos_token_id(2)
    writer.add_pad_token_id(0)
    writer.add_chat_template(TEMPLATE)
    for key, value in (more or {}).items():
        add = writer.add_string if isinstance(value, str) else writer.add_uint32
        add(key, value)
    held = {}

    def put(name: str, theirs: str, shape: tuple[int, ...], kind: Type, heads: int = 0) -> None:
        weights = draw.normal(size=shape).astype(np.float32)
        data = gguf.quants.quantize(weights, kind)
        held[theirs] = plain = gguf.dequantize(data, kind)
        if heads:  # llama.cpp's order of a head's rows: the halves that RoPE turns alternate
            held[theirs] = plain.reshape(heads, -1, 2, shape[1]).swapaxes(1, 2).reshape(shape)
        writer.add_tensor(name, data, raw_dtype=kind)

    put("token_embd.weight", "model.embed_tokens.weight", (len(tokens), HIDDEN), Type.Q8_0)
    put("output_norm.weight", "model.norm.weight", (HIDDEN,), Type.F32)
    kv = HIDDEN // HEADS * KV_HEADS
    for n in range(LAYERS):
        ours, theirs = f"blk.{n}", f"model.layers.{n}"
        put(f"{ours}.attn_norm.weight", f"{theirs}.input_layernorm.weight", (HIDDEN,), Type.F32)
        after = f"{theirs}.post_attention_layernorm.weight"
        put(f"{ours}.ffn_norm.weight", after, (HIDDEN,), Type.F32)
        for letter, rows, kind, heads in (
            ("q", HIDDEN, Type.Q4_1, HEADS),
            ("k", kv, Type.Q4_1, KV_HEADS),
            ("v", kv, Type.F16, 0),
        ):
            projection = f"{theirs}.self_attn.{letter}_proj.weight"
            halves = 0 if experts else heads
            put(f"{ours}.attn_{letter}.weight", projection, (rows, HIDDEN), kind, halves)
        square = (HIDDEN, HIDDEN)
        put(f"{ours}.attn_output.weight", f"{theirs}.self_attn.o_proj.weight", square, Type.Q8_0)
        if experts:
            for letter in "qk":
                norm = f"{theirs}.self_attn.{letter}_norm.weight"
                put(f"{ours}.attn_{letter}_norm.weight", norm, (HIDDEN // HEADS,), Type.F32)
            router = f"{theirs}.mlp.gate.weight"
            put(f"{ours}.ffn_gate_inp.weight", router, (experts, HIDDEN), Type.F32)
        for part in ("gate", "up", "down"):
            shape = (HIDDEN, ffn) if part == "down" else (ffn, HIDDEN)
            projection = f"{part}_proj.weight"
            if not experts:
                put(f"{ours}.ffn_{part}.weight", f"{theirs}.mlp.{projection}", shape, Type.Q4_1)
                continue
            put(f"{ours}.ffn_{part}_exps.weight", "all", (experts, *shape), Type.Q4_1)
            for number, weights in enumerate(held.pop("all")):
                held[f"{theirs}.mlp.experts.{number}.{projection}"] = weights
    for name, elements in (tensors or {}).items():
        writer.add_tensor(name, np.ones(elements, np.float32))
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    return held
