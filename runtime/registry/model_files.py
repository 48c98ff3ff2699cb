"""Model files: read a foreign model directory without trusting it, and never outside of it.

A file is opened only if it lies in the directory itself. A link may lead to a file beside it, or
from a snapshot of a Hugging Face cache to that cache's blobs. Any other link is refused before its
target is opened, so that an error reveals nothing about it. Weights are safetensors: 8 bytes of
length, JSON of that length, then the tensors without gaps. Called by checkpoints.py for imports,
and by trainers/models/ for training. Read next: model_config.py.
"""

import hashlib
import io
import json
import os
import re
import stat
from collections.abc import Collection
from dataclasses import dataclass
from math import prod
from pathlib import Path
from typing import Any

from cray_agents.errors import BadInput
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
