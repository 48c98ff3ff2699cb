"""The conversion of a GGUF file to a Hugging Face directory, as a process of its own.

    python -m cray_agents.runtime.registry.gguf_conversion FILE FOLDER PARENT_PID

The file is not trusted: each length of its header is compared with what is left of the file, and
the model is built without memory before a weight is read. So a header that lies is an error, and
takes neither memory nor time. transformers reads weights, config, tokenizer and chat template; the
weights become bfloat16. What transformers would leave out is refused: scaled RoPE, further tensors,
and weights that are missing, which it would make up at random.

What is wrong goes to stdout, with exit code 2 or 3. Called by registry.py.
Format: https://github.com/ggml-org/ggml/blob/master/docs/gguf.md
"""

import shutil
import struct
import sys
from math import prod
from pathlib import Path
from typing import Any, BinaryIO, NamedTuple, NoReturn

from cray_agents.processes import die_with_parent

MOST_TENSORS = 500_000
MOST_ENTRIES = 1 << 22  # of the metadata, and of an array there, such as the tokens
MOST_TEXT = 4 << 20  # bytes of a text that is read, such as a chat template
MOST_DIMENSIONS = 4  # of a tensor of ggml
NUMBERS = dict(zip((0, 1, 2, 3, 4, 5, 6, 7, 10, 11, 12), "BbHhIif?Qqd", strict=True))
TEXT, ARRAY = 8, 9  # the other types of values


class GgufHeader(NamedTuple):
    """What a file says of itself. `metadata` has an array's length in its place."""

    metadata: dict[str, Any]
    tensors: list[str]
    elements: int  # of all tensors
    size: int  # bytes of the header


def refuse(why: str, code: int = 2) -> NoReturn:
    """End this process with what is wrong with the file; `code` 3: there is no room for it."""
    print(" ".join(why.split())[:1000])
    raise SystemExit(code)


class _HeaderFile:
    """A file's header, read from front to back; each read is within the file."""

    def __init__(self, file: BinaryIO, size: int) -> None:
        self.file, self.left = file, size

    def take(self, length: int, what: str, most: int = MOST_TEXT) -> bytes:
        if length > min(self.left, most):
            refuse(f"gives {what} {length:,} bytes, and {self.left:,} are left: cut off or damaged")
        self.left -= length
        return self.file.read(length)

    def number(self, form: str, what: str) -> Any:
        return struct.unpack(f"<{form}", self.take(struct.calcsize(f"<{form}"), what))[0]

    def text(self, what: str) -> str:
        return self.take(self.number("Q", what), what).decode(errors="replace")

    def value(self, key: str) -> Any:
        kind = self.number("I", key)
        if kind != ARRAY:
            return self._single(kind, key)
        kind, count = self.number("I", key), self.number("Q", key)
        if count > MOST_ENTRIES:
            refuse(f"gives {key!r} {count:,} entries: it is damaged")
        for _ in range(count):
            self._single(kind, key)
        return count

    def _single(self, kind: int, key: str) -> Any:
        if kind != TEXT and kind not in NUMBERS:
            refuse(f"gives {key!r} the type {kind}, which GGUF does not have: it is damaged")
        return self.text(key) if kind == TEXT else self.number(NUMBERS[kind], key)


def read_header(path: Path) -> GgufHeader:
    """Read and check a file's header. Ends the process where the file cannot be what it says."""
    size = path.stat().st_size
    with path.open("rb") as file:
        header = _HeaderFile(file, size)
        magic, version = header.take(4, "its mark"), header.number("I", "its version")
        if magic != b"GGUF" or version not in (2, 3):
            refuse(f"starts with {magic!r} and version {version}, not as little-endian GGUF 2 or 3")
        tensors, entries = header.number("Q", "its counts"), header.number("Q", "its counts")
        if tensors > MOST_TENSORS or entries > MOST_ENTRIES:
            refuse(f"claims {tensors:,} tensors and {entries:,} entries of metadata: it is damaged")
        metadata = {}
        for _ in range(entries):
            key = header.text("a key of its metadata")
            metadata[key] = header.value(key)
        alignment = metadata.get("general.alignment", 32)
        if type(alignment) is not int or alignment < 1 or alignment & (alignment - 1):
            refuse(f"has general.alignment {alignment!r}, which must be a power of two")
        return _read_tensors(header, tensors, metadata, alignment, size)


def _read_tensors(
    header: _HeaderFile, count: int, metadata: dict[str, Any], alignment: int, size: int
) -> GgufHeader:
    import numpy as np
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType, dequantize

    ends: dict[str, int] = {}
    first, elements, total = {}, 0, 0
    for _ in range(count):
        name = header.text("the name of a tensor")
        axes = header.number("I", name)
        if axes > MOST_DIMENSIONS or name in ends:
            refuse(f"has the tensor {name!r} twice, or with {axes:,} dimensions: it is damaged")
        shape = [header.number("Q", name) for _ in range(axes)]
        kind, offset = header.number("I", name), header.number("Q", name)
        if kind not in GGML_QUANT_SIZES:
            refuse(f"has {name!r} in ggml's type {kind}, which this version of gguf lacks")
        block, width = GGML_QUANT_SIZES[GGMLQuantizationType(kind)]
        if not all(shape) or (shape or [1])[0] % block or offset % alignment:
            refuse(f"has {name!r} with the shape {shape} at byte {offset:,}: it is damaged")
        length = prod(shape) // block * width
        ends[name], first[kind] = offset + length, name
        elements, total = elements + prod(shape), total + length
    start = -(-(size - header.left) // alignment) * alignment
    last = max(ends, key=ends.__getitem__, default="")
    if not ends or start + max(ends[last], total) > size:
        refuse(
            f"has {size:,} bytes; its tensors need {start + total:,}, the last is {last!r} up to"
            f" {start + ends.get(last, 0):,}: it is cut off or damaged"
        )
    for kind, name in first.items():
        try:
            block = np.zeros((1, GGML_QUANT_SIZES[kind][1]), np.uint8)
            dequantize(block, GGMLQuantizationType(kind))
        except NotImplementedError:
            named = GGMLQuantizationType(kind).name
            refuse(f"has {name!r} in the type {named}, which gguf cannot dequantize: take another")
    return GgufHeader(metadata, list(ends), elements, start)


def check_kind(header: GgufHeader) -> None:
    """Refuse a file that is no whole model, or of which transformers would leave a part out."""
    metadata, architecture = header.metadata, header.metadata.get("general.architecture")
    if metadata.get("general.type", "model") != "model" or not isinstance(architecture, str):
        refuse(f"holds no model but a {metadata.get('general.type')!r} of {architecture!r}")
    if metadata.get("split.count", 1) > 1:
        refuse("is a part of a model: merge its parts with llama.cpp's `llama-gguf-split --merge`")
    if not {"tokenizer.ggml.model", "tokenizer.ggml.tokens"} <= metadata.keys():
        refuse("holds no tokenizer (tokenizer.ggml.tokens)")
    linear = metadata.get(f"{architecture}.rope.scale_linear", "none")
    scaling = metadata.get(f"{architecture}.rope.scaling.type", linear)
    if scaling not in ("none", 1) or any(name.startswith("rope_f") for name in header.tensors):
        refuse(
            f"scales its RoPE (rope.scaling.type {scaling!r}, or rope_freqs), which transformers"
            " does not read from GGUF: take the model's Hugging Face directory"
        )


def convert(source: Path, folder: Path) -> None:
    """Write the Hugging Face directory of a file into an empty folder."""
    header = read_header(source)
    check_kind(header)
    need, free = 2 * header.elements + header.size, shutil.disk_usage(folder).free
    if free < need:
        refuse(f"needs {need:,} bytes as a directory, and {folder.parent} has {free:,} free", 3)
    import torch  # only now, for it takes seconds
    from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig

    place = {"pretrained_model_name_or_path": source.parent, "gguf_file": source.name}
    try:
        config = AutoConfig.from_pretrained(**place)
        _check_config(config, header)
        with torch.device("meta"):
            empty = AutoModelForCausalLM.from_config(config)
    except ValueError as error:  # of an architecture that it lacks, or does not read from GGUF
        refuse(f"cannot be read by transformers: {error!s:.300}")
    kept = [buffer for name, buffer in empty.named_buffers() if name in empty.state_dict()]
    places = sum(tensor.numel() for tensor in [*empty.parameters(), *kept])
    if places != header.elements:
        refuse(
            f"holds {header.elements:,} weights, and transformers' {type(empty).__name__} of its"
            f" metadata has {places:,}: a part of the model would be lost or made up; take its"
            " Hugging Face directory"
        )
    dense = GgufConfig(dequantize=True)
    more = {"dtype": torch.bfloat16, "quantization_config": dense, "output_loading_info": True}
    model, loaded = AutoModelForCausalLM.from_pretrained(**place, config=config, **more)
    if wrong := [*loaded["missing_keys"], *loaded["unexpected_keys"], *loaded["mismatched_keys"]]:
        refuse(f"does not have the weights of a {type(model).__name__}: {wrong[:3]}")
    # into the other model: transformers refuses to save one that was quantized, and would name the
    # experts' weights in its own way
    empty.load_state_dict(model.state_dict(), assign=True)
    empty.tie_weights()
    vars(config).pop("_model_name_or_path", None)
    tokenizer = AutoTokenizer.from_pretrained(**place, config=config)
    if len(tokenizer) > config.vocab_size:
        refuse(f"has {len(tokenizer):,} tokens, and embeddings for {config.vocab_size:,}")
    empty.save_pretrained(folder)
    tokenizer.save_pretrained(folder)


def _check_config(config: Any, header: GgufHeader) -> None:
    if not 0 < config.num_hidden_layers <= len(header.tensors):
        refuse(f"claims {config.num_hidden_layers:,} layers for {len(header.tensors)} tensors")
    architecture = header.metadata["general.architecture"]
    window = header.metadata.get(f"{architecture}.attention.sliding_window", 0)
    read = getattr(config, "sliding_window", None) == window
    if 0 < window < config.max_position_embeddings and not read:
        refuse(f"attends to {window:,} tokens, and transformers does not read that from GGUF")


if __name__ == "__main__":
    die_with_parent(int(sys.argv[3]))
    convert(Path(sys.argv[1]), Path(sys.argv[2]))
