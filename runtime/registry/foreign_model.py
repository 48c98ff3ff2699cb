"""Foreign models: read a model directory without trusting it, and never outside of it.

A file is opened only if it lies in the directory itself. A link may lead to a file beside it, or
from a snapshot of a Hugging Face cache to that cache's blobs. Any other link is refused before its
target is opened, so that an error reveals nothing about it. Weights are safetensors: 8 bytes of
length, JSON of that length, then the tensors without gaps.

Values of a config.json that no model can have are refused, for the kinds in KINDS: the numbers of
others are known to the engine alone.

`auto_map` in the JSON files of a model names classes in Python files beside it, which run only
where the operator allows their directory. A reference leads to the directory itself
(`modeling_x.Model`), or to another one (`/models/x--modeling_x.Model`). Checkpoints hold no code:
an import and an export make references to an allowed directory whole, so that what runs is always
that directory's code.

Called by checkpoints.py for imports, and by trainers/models/ for training.
"""

import hashlib
import io
import json
import math
import os
import re
import stat
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from cray_agents.config import load_config
from cray_agents.errors import BadInput, NotFound
from cray_agents.exact_json import refuse_costly
from cray_agents.runtime.disk.checksums import FileHash

CONFIG = "config.json"
INDEX = "model.safetensors.index.json"  # maps tensors to files
WEIGHTS = ".safetensors"
BLOCK = 8 << 20  # bytes read at a time; a multiple of every dtype's size
MOST_SETTINGS = 64 << 20  # bytes of an index, a manifest, or a file of a tokenizer
MOST_CONFIG = 4 << 20  # bytes of those in _CONFIGS, and of a chat template
MOST_HEADER = 16 << 20  # bytes; a hundred thousand tensors take some 12 MiB
MOST_TENSORS = 500_000  # of a model
MOST_FILES = 10_000  # in a directory
_CONFIGS = ("config.json", "tokenizer_config.json", "generation_config.json", "chat_template.json")
_PART = re.compile(r"-of-(\d{1,6})\.safetensors$")
BITS = {"BOOL": 8, "U8": 8, "I8": 8, "I16": 16, "U16": 16, "F16": 16, "BF16": 16, "I32": 32}
BITS |= {"U32": 32, "F32": 32, "I64": 64, "U64": 64, "F64": 64, "F8_E4M3": 8, "F8_E5M2": 8}
# a float whose exponent bits are all set is infinite or NaN
_EXPONENT = {
    "F64": ("<u8", 0x7FF0000000000000),
    "F32": ("<u4", 0x7F800000),
    "F16": ("<u2", 0x7C00),
    "BF16": ("<u2", 0x7F80),
}


@dataclass(frozen=True)
class Tensor:
    """A stored tensor: its file, and its bytes `start` to `end` in the file."""

    file: str
    dtype: str  # in safetensors' notation: F32, BF16, ...
    shape: tuple[int, ...]
    start: int
    end: int


# ---- files
def open_file(directory: Path, name: str) -> io.BufferedReader:
    """Open a file of the directory, which is a real path. Raises BadInput, naming the file."""
    path = directory / name
    target = Path(os.path.realpath(path))
    if not _may_lead_to(directory, path, target):  # refused before the target is touched
        raise _bad_file(
            path, "is a link that leads out of its directory: put the file itself there"
        )
    try:
        if not stat.S_ISREG(target.stat().st_mode):
            raise _bad_file(path, "is not a file")
        handle = os.open(target, os.O_RDONLY | os.O_NOFOLLOW | os.O_NONBLOCK)
    except FileNotFoundError:
        raise _bad_file(path, "is missing") from None
    except OSError as error:
        raise _bad_file(path, f"cannot be read: {error.strerror}") from error
    file = os.fdopen(handle, "rb")
    opened = Path(f"/proc/self/fd/{handle}").readlink()  # detects a rename since realpath
    if opened.parent != target.parent or not stat.S_ISREG(os.fstat(handle).st_mode):
        file.close()
        raise _bad_file(path, "was changed while it was opened")
    return file


def _may_lead_to(directory: Path, path: Path, target: Path) -> bool:
    """Tell whether a path in the directory may lead to a target: beside it, or a cache's blob."""
    if target.parent == path.parent:
        return True
    snapshot = path.parent == directory and directory.parent.name == "snapshots"
    return snapshot and target.parent == directory.parent.parent / "blobs"


def names_in(directory: Path, suffixes: Collection[str]) -> list[str]:
    """List the names with one of these suffixes, without hidden ones. Raises BadInput."""
    try:
        paths = sorted(directory.iterdir())
    except OSError as error:
        raise _bad_file(directory, f"cannot be read: {error.strerror}") from error
    if len(paths) > MOST_FILES:
        raise _bad_file(directory, f"holds {len(paths)} files: it is no model directory")
    chosen = [p for p in paths if p.suffix in suffixes and not p.name.startswith(".")]
    return [path.name for path in chosen if path.is_symlink() or not path.is_dir()]


def refuse_links_outside(directory: Path) -> None:
    """Raise BadInput where a file is a link that leads out of the directory, also in its folders.

    Needed before other programs open files by name, such as a tokenizer's files and templates.
    """
    for count, (folder, folders, files) in enumerate(os.walk(directory)):
        if count > MOST_FILES:
            raise _bad_file(directory, "holds too many folders: it is no model directory")
        for name in (*folders, *files):
            path = Path(folder, name)
            if not path.is_symlink():
                continue
            if not _may_lead_to(directory, path, Path(os.path.realpath(path))):
                raise _bad_file(path, "is a link that leads out of its directory")


def sha256_file(directory: Path, name: str) -> str:
    """Return the hex SHA-256 of a file of the directory. Raises BadInput."""
    with open_file(directory, name) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def read_json(directory: Path, name: str) -> dict[str, Any]:
    """Read a JSON file of the directory. Raises BadInput unless it is an object."""
    refuse_large(directory, name)
    with open_file(directory, name) as file:
        content = file.read(MOST_SETTINGS)
    return _parse_object(content, directory / name)


def refuse_large(directory: Path, name: str) -> None:
    """Raise BadInput where a file that is no weights is larger than any of its kind is."""
    small = name in _CONFIGS or name.endswith(".jinja")
    most = MOST_CONFIG if small else MOST_SETTINGS
    with open_file(directory, name) as file:
        size = os.fstat(file.fileno()).st_size
    if size > most:
        why = f"is {size >> 20} MiB large, and at most {most >> 20} MiB are taken in"
        raise _bad_file(directory / name, why)


def _parse_object(content: bytes, path: Path) -> dict[str, Any]:
    try:
        value = json.loads(refuse_costly(content))
    except (ValueError, RecursionError) as error:
        reason = "it is nested too deeply" if isinstance(error, RecursionError) else error
        raise _bad_file(path, f"is not JSON: {reason}") from error
    if not isinstance(value, dict):
        kind = "a list" if isinstance(value, list) else repr(value)[:40]
        raise _bad_file(path, f"holds {kind} and not an object: it was damaged, or is another file")
    return value


# ---- weights
def read_weights(directory: Path) -> dict[str, Tensor]:
    """Return the tensors of a model by name: those of its index, else of all its files.

    Raises BadInput for a file that is missing, cut off, or no safetensors.
    """
    present = names_in(directory, {WEIGHTS})
    if not os.path.lexists(directory / INDEX):
        if "model.safetensors" in present:
            return _read_headers(directory, ["model.safetensors"])
        part = next((name for name in present if (of := _PART.search(name))
                     and int(of[1]) != sum(of[0] in n for n in present)), None)  # fmt: skip
        if part is not None:
            raise _bad_file(directory / INDEX, f"is missing, or other parts like {part}")
        return _read_headers(directory, present)
    index = read_json(directory, INDEX).get("weight_map")
    texts = isinstance(index, dict) and all(isinstance(file, str) for file in index.values())
    if not isinstance(index, dict) or not texts:
        raise _bad_file(directory / INDEX, "has no weight_map of names and files")
    files = sorted(set(index.values()))
    for file in files:
        if Path(file).name != file or Path(file).suffix != WEIGHTS:
            raise _bad_file(directory / INDEX, f"names {file!r}, which is no file of weights there")
        if file not in present:
            raise _bad_file(directory / file, f"is missing, but {INDEX} names it")
    if "model.safetensors" in present and "model.safetensors" not in files:
        raise BadInput(
            f"{directory} holds model.safetensors and an {INDEX} that names other files: which of"
            " the two is meant is not said; remove one of them",
            param="checkpoint",
        )
    tensors = _read_headers(directory, files)
    for name, file in index.items():
        if name not in tensors or tensors[name].file != file:
            reason = f"lacks the tensor {name!r}, which {INDEX} says it has"
            raise _bad_file(directory / file, reason)
    return tensors


def _read_headers(directory: Path, files: list[str]) -> dict[str, Tensor]:
    tensors: dict[str, Tensor] = {}
    for file in files:
        for name, tensor in read_header(directory, file).items():
            if name in tensors:
                also = tensors[name].file
                raise _bad_file(directory / file, f"has {name!r}, and {also} has it too")
            tensors[name] = tensor
        if len(tensors) > MOST_TENSORS:
            raise _bad_file(directory, f"has more than {MOST_TENSORS:,} tensors")
    return tensors


def read_header(directory: Path, file: str) -> dict[str, Tensor]:
    """Return the tensors of one file by name. Raises BadInput unless the file is whole."""
    path = directory / file
    with open_file(directory, file) as opened:
        size = os.fstat(opened.fileno()).st_size
        length = int.from_bytes(opened.read(8), "little")
        if MOST_HEADER < length <= size - 8:
            most = f"and {MOST_HEADER >> 20} MiB is the most: save the model in more files"
            raise _bad_file(path, f"has a header of {length >> 20} MiB, {most}")
        if size < 8 or length > size - 8:
            raise _bad_file(path, "is cut off, or no safetensors file: save or download it again")
        header = _parse_object(opened.read(length), path)
    header.pop("__metadata__", None)
    try:
        tensors = {name: _tensor(file, entry, 8 + length) for name, entry in header.items()}
    except (KeyError, TypeError, ValueError) as error:
        raise _bad_file(path, "has a header that is not safetensors'") from error
    end = 8 + length
    for name, tensor in sorted(tensors.items(), key=lambda item: (item[1].start, item[1].end)):
        bits = BITS.get(tensor.dtype)
        expected = tensor.end - tensor.start if bits is None else prod(tensor.shape) * bits // 8
        if tensor.start != end or tensor.end - tensor.start != expected:
            raise _bad_file(path, f"has a header that cannot be: {name!r} does not fit its place")
        end = tensor.end
    if end != size:
        raise _bad_file(
            path,
            f"is {size} bytes long, and its header speaks of {end}: it is cut off or damaged; save"
            " or download it again",
        )
    return tensors


def _tensor(file: str, entry: dict[str, Any], data: int) -> Tensor:
    """Parse a header's entry; `data`: the file offset of the first tensor.

    Raises KeyError, TypeError, ValueError if the entry describes no tensor.
    """
    start, end = entry["data_offsets"]
    shape = tuple(entry["shape"])
    if not isinstance(entry["dtype"], str) or any(type(n) is not int for n in (start, end, *shape)):
        raise TypeError(entry)
    if min((start, *shape)) < 0 or end < start or max((end, *shape)) >> 63 or len(shape) > 64:
        raise ValueError(entry)
    return Tensor(file, entry["dtype"], shape, data + start, data + end)


def hash_weights(directory: Path, file: str, tensors: dict[str, Tensor], like: str = "") -> str:
    """Return the hash of a file of weights; check for infinite numbers in the same pass.

    `tensors`: the model's. `like`: a hash of the kind wanted. Raises BadInput, naming a tensor with
    an infinite number or a NaN.
    """
    of_file = sorted((t.start, t.end, n) for n, t in tensors.items() if t.file == file)
    hasher, at = FileHash(like), 0
    with open_file(directory, file) as opened:
        for start, end, name in of_file:
            hasher.update(opened.read(start - at))
            for begin in range(start, end, BLOCK):
                block = opened.read(min(BLOCK, end - begin))
                hasher.update(block)
                if not _is_finite(block, tensors[name].dtype):
                    raise _bad_file(
                        directory / file,
                        f"has infinite numbers or NaN in {name!r}: a model with these computes"
                        " nothing; take an earlier checkpoint of it",
                    )
            at = end
        while block := opened.read(BLOCK):
            hasher.update(block)
    return str(hasher)


def _is_finite(block: bytes, dtype: str) -> bool:
    if dtype not in _EXPONENT:
        return True
    import numpy as np

    kind, mask = _EXPONENT[dtype]
    usable = len(block) - len(block) % (BITS[dtype] // 8)  # the hash detects a file that shrank
    bits = np.frombuffer(block[:usable], kind)
    return not ((bits & bits.dtype.type(mask)) == mask).any()


def same_values(directory: Path, one: Tensor, other: Tensor) -> bool:
    """Tell whether two tensors hold the same numbers, in any dtypes. Raises BadInput."""
    if one.shape != other.shape or not {one.dtype, other.dtype} <= _EXPONENT.keys():
        return False
    import numpy as np

    count, step = prod(one.shape), BLOCK // 8
    with open_file(directory, one.file) as first, open_file(directory, other.file) as second:
        for begin in range(0, count, step):
            pieces = []
            for file, tensor in ((first, one), (second, other)):
                width = BITS[tensor.dtype] // 8
                file.seek(tensor.start + begin * width)
                pieces.append(_numbers(file.read(min(step, count - begin) * width), tensor.dtype))
            if not np.array_equal(*pieces):
                return False
    return True


def _numbers(block: bytes, dtype: str) -> Any:
    """Convert stored floats to an array; numpy has no bfloat16."""
    import numpy as np

    if dtype == "BF16":
        return (np.frombuffer(block, "<u2").astype("<u4") << 16).view("<f4")
    return np.frombuffer(block, {"F64": "<f8", "F32": "<f4", "F16": "<f2"}[dtype])


def _bad_file(path: Path, why: str) -> BadInput:
    return BadInput(f"{path} {why}", param="checkpoint")


KINDS = ("llama", "mistral", "mixtral", "qwen2", "qwen3", "qwen3_moe")
MIXTURES = ("mixtral", "qwen3_moe")
EMBEDDING, HEAD = "model.embed_tokens.weight", "lm_head.weight"
TIED = "tie_word_embeddings"
# whole numbers from 1 on; a value larger than in any known model means a damaged file
_MOST = {
    "num_hidden_layers": 10_000,
    "hidden_size": 1 << 20,
    "intermediate_size": 1 << 24,
    "num_attention_heads": 1 << 16,
    "num_key_value_heads": 1 << 16,
    "head_dim": 1 << 16,
    "vocab_size": 1 << 26,
    "max_position_embeddings": 1 << 31,
    "original_max_position_embeddings": 1 << 31,
    "sliding_window": 1 << 31,
}
_MOST_OF_MIXTURES = {
    "num_experts": 1 << 14,
    "num_local_experts": 1 << 14,
    "num_experts_per_tok": 1 << 14,
    "moe_intermediate_size": 1 << 24,
}
_MOST_EXPERTS = 1_000_000  # in all layers together
_FLAGS = (TIED, "use_sliding_window", "norm_topk_prob")
_FLOATS = ("rms_norm_eps", "rope_theta", "partial_rotary_factor")


def read_config(directory: Path) -> dict[str, Any]:
    """Read and check a directory's config.json. Raises NotFound without one, BadInput."""
    if not os.path.lexists(directory / CONFIG):
        raise NotFound(
            f"{directory} has no {CONFIG}: give a Hugging Face checkpoint", param="checkpoint"
        )
    config = read_json(directory.resolve(), CONFIG)
    if config.get("model_type") in KINDS:
        _check_numbers(config, directory / CONFIG)
    return config


def _check_numbers(config: dict[str, Any], path: Path) -> None:
    """Raise BadInput that names the first key with an impossible value."""

    def refuse(name: str, must: str) -> BadInput:
        value = repr(config[name])[:100]
        return BadInput(f"{path} has {name} = {value}, which must be {must}", param="checkpoint")

    most = _MOST | (_MOST_OF_MIXTURES if config["model_type"] in MIXTURES else {})
    for name, limit in most.items():
        value = config.get(name)
        if value is not None and (type(value) is not int or not 1 <= value <= limit):
            raise refuse(name, f"a whole number from 1 to {limit}")
    for name in _FLAGS:
        if not isinstance(config.get(name, False), bool):
            raise refuse(name, "true or false")
    for name in _FLOATS:
        if config.get(name) is not None and not is_positive(config[name]):
            raise refuse(name, "a finite number above 0")
    if config.get("initializer_range") and not is_positive(config["initializer_range"]):
        raise refuse("initializer_range", "a finite number from 0 on")
    for name in ("rope_parameters", "rope_scaling"):
        if not isinstance(config.get(name), dict | None):
            raise refuse(name, "an object")
    for name in ("dtype", "torch_dtype", "hidden_act"):
        if not isinstance(config.get(name), str | None):
            raise refuse(name, "a text")
    heads, hidden = config.get("num_attention_heads"), config.get("hidden_size")
    if heads and heads % (config.get("num_key_value_heads") or heads):
        raise refuse("num_key_value_heads", f"a divisor of num_attention_heads ({heads})")
    if heads and hidden and not config.get("head_dim") and hidden % heads:
        raise refuse("num_attention_heads", f"a divisor of hidden_size ({hidden})")
    experts = config.get("num_local_experts") or config.get("num_experts")
    if config["model_type"] in MIXTURES and experts:
        if (config.get("num_experts_per_tok") or 1) > experts:
            raise refuse("num_experts_per_tok", f"at most the number of experts ({experts})")
        if experts * (config.get("num_hidden_layers") or 1) > _MOST_EXPERTS:
            raise refuse("num_hidden_layers", f"less with {experts} experts in each layer")


def is_positive(value: object) -> bool:
    """Tell whether a value of JSON is a finite number above 0."""
    return type(value) in (int, float) and 0 < value < math.inf  # type: ignore[operator]


def is_tied(directory: Path, config: dict[str, Any], weights: dict[str, Tensor]) -> bool:
    """Tell whether embedding and head are one tensor, by transformers' rule when it loads a model.

    The config must tie them, and two stored tensors must be equal: `tie_weights` of transformers 5
    leaves different ones separate.
    """
    if not config.get(TIED):
        return False
    both = EMBEDDING in weights and HEAD in weights
    return not both or same_values(directory, weights[EMBEDDING], weights[HEAD])


AUTO_MAP = "auto_map"
VARIABLE = "CRAY_AGENTS_TRUST_REMOTE_CODE"
_APART = "--"  # between a directory and a file of it, as transformers writes it
_PLAIN = re.compile(r"\w+\.\w+")  # a file and a class in it
_NO_CODE = {"tokenizer.json", "vocab.json", "manifest.json", INDEX}  # large, and never asked for it


def allowed_directories() -> list[Path]:
    """Return the directories whose code may run: `trust_remote_code` of the configuration.

    A job's process, which runs elsewhere, has them in its environment. Raises ConfigError.
    """
    if (value := os.environ.get(VARIABLE)) is not None:
        return [Path(each).expanduser() for each in value.split(os.pathsep) if each]
    return load_config().trust_remote_code


def is_allowed(directory: Path) -> bool:
    """Tell whether the code of exactly this directory may run."""
    return directory.resolve() in [each.resolve() for each in allowed_directories()]


def code_place(reference: str, directory: Path) -> tuple[Path, str] | None:
    """Return the allowed directory of a reference, and the file and class; None if it may not run.

    `directory`: of the file that has the reference.
    """
    place, apart, name = reference.rpartition(_APART)
    folder = Path(place) if apart else directory.resolve()
    runs = _PLAIN.fullmatch(name) and folder.is_absolute() and is_allowed(folder)
    return (folder, name) if runs else None


def may_run(directory: Path) -> bool:
    """Tell whether a model refers to code, and all of it may run. Raises BadInput."""
    if not allowed_directories():
        return False
    references = [each for _, content in _settings(directory) for each in _references(content)]
    return bool(references) and all(code_place(each, directory) for each in references)


def changed_settings(directory: Path) -> dict[str, dict[str, Any]]:
    """Return the files of an allowed directory that refer to its code, with whole references.

    Empty for another directory. Raises BadInput.
    """
    if not is_allowed(directory):
        return {}
    both = ((name, content, _whole(content, directory)) for name, content in _settings(directory))
    return {name: whole for name, content, whole in both if whole != content}


def with_whole_references(content: dict[str, Any], directory: Path) -> dict[str, Any]:
    """Return the content of a file of a directory as `changed_settings` has it."""
    whole: dict[str, Any] = _whole(content, directory) if is_allowed(directory) else content
    return whole


def _settings(directory: Path) -> Iterator[tuple[str, dict[str, Any]]]:
    for name in names_in(directory, {".json"}):
        if name not in _NO_CODE:
            yield name, read_json(directory.resolve(), name)


def _references(value: Any, *, within: bool = False) -> Iterator[str]:
    """Yield the texts below any `auto_map`: of classes, or of lists of classes."""
    if isinstance(value, dict):
        for key, inner in value.items():
            yield from _references(inner, within=within or key == AUTO_MAP)
    elif isinstance(value, list):
        for inner in value:
            yield from _references(inner, within=within)
    elif within and isinstance(value, str):
        yield value


def _whole(value: Any, directory: Path, *, within: bool = False) -> Any:
    if isinstance(value, dict):
        return {k: _whole(v, directory, within=within or k == AUTO_MAP) for k, v in value.items()}
    if isinstance(value, list):
        return [_whole(inner, directory, within=within) for inner in value]
    if within and isinstance(value, str) and _APART not in value:
        return f"{directory.resolve()}{_APART}{value}"
    return value
