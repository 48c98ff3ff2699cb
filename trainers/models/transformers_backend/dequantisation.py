"""Dequantisation: quantised tensors of a Hugging Face directory as plain ones, on reading.

A quantised weight lies in several tensors: packed numbers, scales, zero points. They are seen as
one tensor under the name that it has in an unquantised checkpoint, in bfloat16. Formats whose
layout is published are read; any other is refused by name. Called by parent_files.py.
"""

import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch

from cray_agents.errors import BadInput
from cray_agents.runtime.registry.foreign_model import Tensor

DTYPE = torch.bfloat16  # of every dequantised tensor
READABLE = "FP8 with weight_scale_inv, MXFP4, GPTQ, AWQ and compressed-tensors"
# int4 values of an AWQ word, from its lowest bits up, belong to these of 8 neighbouring columns
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
_Packing = dict[str, torch.Tensor]
Unpack = Callable[[_Packing], torch.Tensor]


@dataclass(frozen=True)
class PackedTensor:
    """A weight that lies in several stored tensors, `names` by their roles."""

    names: dict[str, str]
    shape: tuple[int, ...]  # of the weight itself
    unpack: Unpack  # float32 or bfloat16 of that shape


def packed_tensors(
    config: dict[str, Any], stored: dict[str, Tensor]
) -> tuple[dict[str, PackedTensor], set[str]]:
    """Return the quantised weights by name, and the names of all stored tensors they consist of.

    `config`: the model's, with `quantization_config` or without. Raises BadInput for a format that
    is not read, and for a weight without all of its tensors.
    """
    settings = config.get("quantization_config")
    if settings is None:
        settings = (config.get("text_config") or {}).get("quantization_config")
    if not settings:
        return {}, set()
    method = settings.get("quant_method") if isinstance(settings, dict) else settings
    formats = {
        "fp8": _fp8,
        "mxfp4": _mxfp4,
        "gptq": _words,
        "awq": _words,
        "compressed-tensors": _compressed,
    }
    if method not in formats:
        raise _refusal(f"quant_method {method!r}")
    packed = dict(formats[method](settings, stored))
    used = {name for tensor in packed.values() for name in tensor.names.values()}
    # scales of activations are of use to a quantised forward alone
    used |= {name for name in stored if re.search(r"\.(activation|input|k|v)_scale$", name)}
    return packed, used


def _refusal(what: str) -> BadInput:
    return BadInput(
        f"the weights are quantised with {what}, which is not read; train from an unquantised"
        f" checkpoint, or from one in {READABLE}",
        param="parent",
    )


def _role(stored: dict[str, Tensor], owner: str, name: str) -> str:
    if name not in stored:
        raise BadInput(
            f"{stored[owner].file} has {owner!r} without {name!r}, and they make sense together"
            " alone: download the checkpoint again",
            param="parent",
        )
    return name


# ---- FP8 in blocks
def _fp8(settings: dict[str, Any], stored: dict[str, Tensor]) -> Iterator[tuple[str, PackedTensor]]:
    rows, columns = settings.get("weight_block_size") or (None, None)
    for scale in [name for name in stored if name.endswith("_scale_inv")]:
        name = _role(stored, scale, scale.removesuffix("_scale_inv"))
        unpack = partial(_scaled_blocks, rows, columns)
        yield name, PackedTensor({"weight": name, "scale": scale}, stored[name].shape, unpack)


def _scaled_blocks(rows: int | None, columns: int | None, packing: _Packing) -> torch.Tensor:
    """Multiply each block of a weight [..., out, in] with its scale; the last blocks may be short.

    Source: DeepSeek-V3, README_WEIGHTS.md and `weight_dequant` in inference/kernel.py. One scale of
    a whole tensor, as Mistral stores it, has no block size.
    """
    weight, scale = packing["weight"], packing["scale"].to(torch.float32)
    if scale.numel() > 1:
        if rows is None or columns is None:
            raise _refusal("FP8 scales whose weight_block_size the config does not say")
        scale = scale.repeat_interleave(rows, -2).repeat_interleave(columns, -1)
        scale = scale[..., : weight.shape[-2], : weight.shape[-1]]
    return weight.to(torch.float32) * scale


# ---- MXFP4
def _mxfp4(
    settings: dict[str, Any], stored: dict[str, Tensor]
) -> Iterator[tuple[str, PackedTensor]]:
    del settings
    for blocks in [name for name in stored if name.endswith("_blocks")]:
        name = blocks.removesuffix("_blocks")
        scales = _role(stored, blocks, f"{name}_scales")
        *outer, out, groups, width = stored[blocks].shape
        names = {"blocks": blocks, "scales": scales}
        yield name, PackedTensor(names, (*outer, groups * width * 2, out), _unpack_mxfp4)


def _unpack_mxfp4(packing: _Packing) -> torch.Tensor:
    """Unpack experts [experts, out, in / 32, 16] of two E2M1 values a byte to [experts, in, out].

    A block of 32 values has one power of two, stored plus 127. Source: OCP Microscaling Formats
    (MX) 1.0, and gpt_oss/torch/weights.py of openai/gpt-oss.
    """
    from transformers.integrations.mxfp4 import convert_moe_packed_tensors

    unpacked: torch.Tensor = convert_moe_packed_tensors(
        packing["blocks"], packing["scales"], dtype=DTYPE
    )
    return unpacked


# ---- int4 and int8 in words of 32 bits
def _words(
    settings: dict[str, Any], stored: dict[str, Tensor]
) -> Iterator[tuple[str, PackedTensor]]:
    """Yield the weights of GPTQ, whose words hold inputs, and of AWQ, whose words hold outputs."""
    bits: Any = settings.get("bits")
    gptq = settings["quant_method"] == "gptq"
    version = str(settings.get("version", "gemm")).lower()
    if gptq and bits not in (2, 4, 8):
        raise _refusal(f"GPTQ of {bits} bits")
    if not gptq and (bits, version) != (4, "gemm"):
        raise _refusal(f"AWQ of {bits} bits, version {version!r}")
    # the first version of GPTQ's format stores zero points minus one
    offset = 1 if settings.get("checkpoint_format") != "gptq_v2" else 0
    for words in [name for name in stored if name.endswith(".qweight")]:
        prefix = words.removesuffix("qweight")
        names = {"words": words}
        names |= {role: _role(stored, words, prefix + role) for role in ("qzeros", "scales")}
        if gptq and prefix + "g_idx" in stored:
            names["groups"] = prefix + "g_idx"
        rows, columns = stored[words].shape
        shape = (columns, rows * 32 // bits) if gptq else (columns * 8, rows)
        unpack: Unpack = partial(_unpack_gptq, bits, offset) if gptq else _unpack_awq
        yield f"{prefix}weight", PackedTensor(names, shape, unpack)


def _unpack_gptq(bits: int, offset: int, packing: _Packing) -> torch.Tensor:
    """Unpack words of neighbouring inputs, lowest bits first; `g_idx` is each input's group.

    Source: AutoGPTQ, `pack` of nn_modules/qlinear/qlinear_cuda.py.
    """
    numbers = _split(packing["words"].T, bits).T
    return _scaled_groups(numbers, _split(packing["qzeros"], bits) + offset, packing)


def _unpack_awq(packing: _Packing) -> torch.Tensor:
    """Unpack words of 8 outputs in the order of _AWQ_ORDER.

    Source: AutoAWQ, `WQLinear_GEMM.from_linear` in awq/modules/linear/gemm.py.
    """
    place = torch.tensor(_AWQ_ORDER).argsort()
    numbers, zeros = (
        _split(packing[role], 4).reshape(len(packing[role]), -1, 8)[..., place].flatten(1)
        for role in ("words", "qzeros")
    )
    return _scaled_groups(numbers, zeros, packing)


def _scaled_groups(numbers: torch.Tensor, zeros: torch.Tensor, packing: _Packing) -> torch.Tensor:
    """Return (number - zero) * scale as [out, in], of numbers [in, out] and zeros [groups, out]."""
    scales, group = packing["scales"].to(torch.float32), packing.get("groups")
    if group is None:
        group = torch.arange(len(numbers)) // (len(numbers) // len(scales))
    group = group.long()
    return ((numbers - zeros[group]) * scales[group]).T


def _split(words: torch.Tensor, bits: int) -> torch.Tensor:
    """Split words [rows, n] of 32 bits into their numbers [rows, n * 32 / bits], lowest first."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(1)


# ---- compressed-tensors
def _compressed(
    settings: dict[str, Any], stored: dict[str, Tensor]
) -> Iterator[tuple[str, PackedTensor]]:
    layout = settings.get("format")
    if layout not in ("pack-quantized", "float-quantized", "int-quantized"):
        raise _refusal(f"compressed-tensors' format {layout!r}")
    groups = settings.get("config_groups") or {}
    weights = [g.get("weights") or {} for g in groups.values() if isinstance(g, dict)]
    packed = layout == "pack-quantized"
    bits = {w.get("num_bits") for w in weights}
    if packed and (len(bits) != 1 or not bits <= {4, 8}):
        raise _refusal(f"compressed-tensors of {sorted(map(str, bits))} bits")
    if any(not w.get("symmetric", True) for w in weights):
        raise _refusal("compressed-tensors' zero points")
    if any(w.get("actorder") for w in weights):
        raise _refusal("compressed-tensors' activation order")
    for scale in [name for name in stored if name.endswith(".weight_scale")]:
        name = scale.removesuffix("_scale")
        if not packed:
            names = {"weight": _role(stored, scale, name), "scale": scale}
            yield name, PackedTensor(names, stored[name].shape, _unpack_scaled)
            continue
        names = {"words": _role(stored, scale, f"{name}_packed"), "scale": scale}
        rows, columns = stored[names["words"]].shape
        width = int(next(iter(bits)) or 0)
        if f"{name}_shape" in stored:
            names["shape"] = f"{name}_shape"
        unpack = partial(_unpack_compressed, width)
        yield name, PackedTensor(names, (rows, columns * 32 // width), unpack)


def _unpack_scaled(packing: _Packing) -> torch.Tensor:
    """Multiply a weight [out, in] with its scales [1] or [out, groups]."""
    weight, scale = packing["weight"].to(torch.float32), packing["scale"].to(torch.float32)
    return weight * _per_column(scale, weight.shape[-1])


def _unpack_compressed(bits: int, packing: _Packing) -> torch.Tensor:
    """Return (q - half the range) * scale as [out, in]: a word holds neighbouring inputs.

    Source: compressed-tensors, `pack_to_int32` in compressors/quantized_compressors/.
    """
    numbers = _split(packing["words"], bits) - (1 << (bits - 1))
    if "shape" in packing and packing["shape"].tolist() != list(numbers.shape):
        raise _refusal("compressed-tensors' padding of a row to whole words")
    return numbers * _per_column(packing["scale"].to(torch.float32), numbers.shape[1])


def _per_column(scale: torch.Tensor, columns: int) -> torch.Tensor:
    if scale.ndim < 2 or scale.shape[-1] == 1:
        return scale
    return scale.repeat_interleave(columns // scale.shape[-1], -1)
