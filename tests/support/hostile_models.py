"""Model directories that can never be models, each a change of a tiny one that is whole."""

import hashlib
import json
import os
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np

from cray_agents.trainers.models.architecture import read_architecture
from cray_agents.trainers.models.tensors import tensor_shapes

CONFIG: dict[str, Any] = {
    "model_type": "llama",
    "num_hidden_layers": 2,
    "hidden_size": 16,
    "intermediate_size": 24,
    "num_attention_heads": 2,
    "num_key_value_heads": 1,
    "vocab_size": 32,
    "max_position_embeddings": 64,
    "rms_norm_eps": 1e-6,
}
FILE, INDEX = "model.safetensors", "model.safetensors.index.json"
SECRET = b'{"root": "$6$secret"}'
Stored = tuple[str, tuple[int, ...], bytes]  # safetensors' type, shape, content


def tensors_of(config: dict[str, Any], folder: Path) -> dict[str, Stored]:
    """What a config implies, in small random numbers."""
    folder.mkdir(parents=True, exist_ok=True)
    (folder / "config.json").write_text(json.dumps(config))
    random = np.random.default_rng(0)
    found = {}
    for name, shape in tensor_shapes(read_architecture(folder)).items():
        numbers = random.normal(0, 0.05, shape).astype("<f4")
        found[name] = ("F32", shape, numbers.tobytes())
    return found


def safetensors(tensors: dict[str, Stored]) -> bytes:
    """A file of them, as safetensors lays it out."""
    header, at = {}, 0
    for name, (dtype, shape, content) in tensors.items():
        offsets = [at, at + len(content)]
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": offsets}
        at += len(content)
    text = json.dumps(header).encode()
    return len(text).to_bytes(8, "little") + text + b"".join(c for _, _, c in tensors.values())


def whole_model(folder: Path, **says: Any) -> Path:
    """A tiny model without a tokenizer, all of it as it should be."""
    tensors = tensors_of(CONFIG | says, folder)
    (folder / FILE).write_bytes(safetensors(tensors))
    (folder / "tokenizer.json").write_text("{}")
    return folder


def sharded(folder: Path) -> dict[str, str]:
    """Turn a whole model into two files and an index; returns the index."""
    tensors = tensors_of(json.loads((folder / "config.json").read_text()), folder)
    (folder / FILE).unlink()
    names = list(tensors)
    where = {}
    for n, part in enumerate((names[:5], names[5:]), 1):
        file = f"model-0000{n}-of-00002.safetensors"
        (folder / file).write_bytes(safetensors({name: tensors[name] for name in part}))
        where |= dict.fromkeys(part, file)
    (folder / INDEX).write_text(json.dumps({"weight_map": where}))
    return where


def with_manifest(folder: Path, **says: Any) -> None:
    """A manifest over what is there, as a checkpoint of this project has."""
    files = {}
    for path in sorted(folder.iterdir()):
        if path.suffix in (".json", ".jinja", ".safetensors") and path.name != "manifest.json":
            known = path.is_file() and not path.is_symlink()
            content = path.read_bytes() if known else b"unknown"
            files[path.name] = hashlib.sha256(content).hexdigest()
    weights = {name: found for name, found in files.items() if name.endswith(".safetensors")}
    from cray_agents.records import digest

    manifest = {"files": files, "weights_sha256": digest(weights, 64), **says}
    (folder / "manifest.json").write_text(json.dumps(manifest))


@dataclass(frozen=True)
class Case:
    """A change of a whole model, in its folder, and a part of what is said of it.

    `only_training`: an engine may still serve it.
    """

    change: Callable[[Path], object]
    said: str
    only_training: bool = False


def says(**what: Any) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        config = json.loads((folder / "config.json").read_text())
        (folder / "config.json").write_text(json.dumps(config | what))

    return change


def holds(name: str, content: bytes) -> Callable[[Path], object]:
    return lambda folder: (folder / name).write_bytes(content)


def weighs(edit: Callable[[dict[str, Stored]], object]) -> Callable[[Path], object]:
    """Other tensors under the same config."""

    def change(folder: Path) -> None:
        tensors = tensors_of(json.loads((folder / "config.json").read_text()), folder)
        edit(tensors)
        (folder / FILE).write_bytes(safetensors(tensors))

    return change


def stored(dtype: str, width: int, fill: bytes = b"\0") -> Callable[[dict[str, Stored]], object]:
    """One tensor of another type; `fill` is its last bytes."""

    def edit(tensors: dict[str, Stored]) -> None:
        _, shape, _ = tensors["model.norm.weight"]
        content = bytes(shape[0] * width - len(fill)) + fill
        tensors["model.norm.weight"] = (dtype, shape, content)

    return edit


def adds(**more: tuple[int, ...]) -> Callable[[dict[str, Stored]], object]:
    def edit(tensors: dict[str, Stored]) -> None:
        for name, shape in more.items():
            content = np.ones(shape, "<f4").tobytes()
            tensors[name.replace("__", ".")] = ("F32", shape, content)

    return edit


def links(name: str, to: str) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        (folder.parent / "outside").mkdir(exist_ok=True)
        (folder.parent / "outside" / "secret").write_bytes(SECRET)
        (folder.parent / "outside" / FILE).write_bytes(safetensors({"a": ("U8", (1,), b"a")}))
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(to)

    return change


def odd_header(edit: Callable[[dict[str, Any]], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        content = (folder / FILE).read_bytes()
        length = int.from_bytes(content[:8], "little")
        header = json.loads(content[8 : 8 + length])
        edit(header)
        text = json.dumps(header).encode()
        data = content[8 + length :]
        (folder / FILE).write_bytes(len(text).to_bytes(8, "little") + text + data)

    return change


def cut(name: str, by: int = 7) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        if not (folder / name).exists():
            sharded(folder)
        os.truncate(folder / name, (folder / name).stat().st_size - by)

    return change


def lacks_shard(folder: Path) -> None:
    sharded(folder)
    (folder / "model-00002-of-00002.safetensors").unlink()


def lacks_shard_and_index(folder: Path) -> None:
    lacks_shard(folder)
    (folder / INDEX).unlink()


def indexed(edit: Callable[[dict[str, str]], object]) -> Callable[[Path], object]:
    def change(folder: Path) -> None:
        where = sharded(folder)
        edit(where)
        (folder / INDEX).write_text(json.dumps({"weight_map": where}))

    return change


def both_kinds(folder: Path) -> None:
    content = (folder / FILE).read_bytes()
    sharded(folder)
    (folder / FILE).write_bytes(content)


def is_pipe(folder: Path) -> None:
    (folder / "tokenizer.json").unlink()
    os.mkfifo(folder / "tokenizer.json")


def is_folder(folder: Path) -> None:
    (folder / "config.json").unlink()
    (folder / "config.json").mkdir()


def tells(**what: Any) -> Callable[[Path], object]:
    return lambda folder: with_manifest(folder, **what)


OUT = "is a link that leads out of its directory"
LAYER = {
    f"model__layers__2__{name}": shape
    for name, shape in {
        "input_layernorm__weight": (16,),
        "self_attn__q_proj__weight": (16, 16),
        "mlp__up_proj__weight": (24, 16),
    }.items()
}
ONE = {"num_key_value_heads": 1}
CASES: dict[str, Case] = {
    # links, pipes, names
    "config is a link outside": Case(links("config.json", "../outside/secret"), OUT),
    "tokenizer is a link outside": Case(links("tokenizer.json", "../outside/secret"), OUT),
    "weights are a link outside": Case(links(FILE, f"../outside/{FILE}"), OUT),
    "absolute link": Case(links("tokenizer.json", "/etc/hostname"), OUT),
    "dangling link outside": Case(links("tokenizer.json", "/nowhere/at/all"), OUT),
    "link to a folder outside": Case(links("more.json", "../outside"), OUT),
    "links in a circle": Case(links("tokenizer.json", "tokenizer.json"), "cannot be read"),
    "a pipe": Case(is_pipe, "is not a file"),
    "a device": Case(links("tokenizer.json", "/dev/zero"), OUT),
    "config is a folder": Case(is_folder, "config.json"),
    "manifest climbs": Case(tells(files={"../outside/secret": "0" * 64}), "is not the name"),
    "manifest is absolute": Case(tells(files={"/etc/hostname": "0" * 64}), "is not the name"),
    "manifest climbs in adapter": Case(tells(files={"adapter/..": "0" * 64}), "is not the name"),
    "manifest's job is a path": Case(tells(job="../../outside"), "names no job"),
    "manifest's dataset is a path": Case(tells(dataset="/etc"), "names no job"),
    "manifest of other weights": Case(tells(weights_sha256="0" * 64), "says another"),
    "manifest is a list": Case(holds("manifest.json", b"[]"), "a list and not an object"),
    "manifest is a link": Case(links("manifest.json", "../outside/secret"), OUT),
    # config.json
    "config is broken": Case(holds("config.json", b'{"model_type": '), "is not JSON"),
    "config is empty": Case(holds("config.json", b""), "is not JSON"),
    "config is no text": Case(holds("config.json", b"\xff\xfe\x00"), "is not JSON"),
    "config is a list": Case(holds("config.json", b"[1]"), "a list and not an object"),
    "config is null": Case(holds("config.json", b"null"), "not an object"),
    "config is deep": Case(holds("config.json", b"[" * 200_000), "is not JSON"),
    "config is large": Case(holds("config.json", b"{%5242880s}" % b""), "is 5 MiB large, and at"),
    "template is large": Case(
        holds("chat_template.jinja", bytes(5 << 20)), "is 5 MiB large, and at"
    ),
    "no layers": Case(says(num_hidden_layers=0), "num_hidden_layers = 0"),
    "negative heads": Case(says(num_attention_heads=-2), "num_attention_heads = -2"),
    "half a vocabulary": Case(says(vocab_size=31.5), "vocab_size = 31.5"),
    "a text for a size": Case(says(hidden_size="16"), "hidden_size = '16'"),
    "true for a size": Case(says(intermediate_size=True), "intermediate_size = True"),
    "a billion layers": Case(says(num_hidden_layers=10**9), "num_hidden_layers = 1000000000"),
    "a size beyond all": Case(says(hidden_size=10**40), "hidden_size = 1000"),
    "heads that do not divide": Case(says(num_attention_heads=3, **ONE), "a divisor of hidden"),
    "groups that do not divide": Case(says(num_key_value_heads=3), "num_key_value_heads = 3"),
    "epsilon is infinite": Case(says(rms_norm_eps=float("inf")), "rms_norm_eps = inf"),
    "epsilon is NaN": Case(says(rms_norm_eps=float("nan")), "rms_norm_eps = nan"),
    "rope's base is 0": Case(says(rope_theta=0), "rope_theta = 0"),
    "rope is a list": Case(says(rope_scaling=[1]), "rope_scaling = [1]"),
    "window is a text": Case(says(sliding_window="all"), "sliding_window = 'all'"),
    "tied is a text": Case(says(tie_word_embeddings="yes"), "tie_word_embeddings = 'yes'"),
    "tokenizer is broken": Case(holds("tokenizer.json", b'{"model"'), "is not JSON"),
    "tokenizer is a list": Case(holds("tokenizer.json", b"[]"), "a list and not an object"),
    "tokenizer's config is a text": Case(holds("tokenizer_config.json", b'"x"'), "not an object"),
    # weights
    "weights are cut off": Case(cut(FILE), "it is cut off or damaged"),
    "weights are empty": Case(holds(FILE, b""), "is cut off"),
    "a header longer than the file": Case(holds(FILE, b"\xff" * 64), "is cut off"),
    "a header without end": Case(
        holds(FILE, (17 << 20).to_bytes(8, "little") + bytes(17 << 20)), "has a header of 17 MiB"
    ),
    "a header that is no JSON": Case(holds(FILE, b"\4" + bytes(7) + b"nope"), "is not JSON"),
    "a header that is a list": Case(holds(FILE, b"\2" + bytes(7) + b"[]"), "a list and not"),
    "weights are a pickle": Case(holds(FILE, b"\x80\x04\x95" + bytes(64)), "safetensors"),
    "tensors lie over each other": Case(
        odd_header(lambda h: h["model.norm.weight"].update(data_offsets=[0, 64])), "does not fit"
    ),
    "a tensor of less than nothing": Case(
        odd_header(lambda h: h["model.norm.weight"].update(shape=[-16])), "not safetensors'"
    ),
    "a shape without end": Case(
        odd_header(lambda h: h["model.norm.weight"].update(shape=[2**62] * 65)), "not safetensors'"
    ),
    "a shape that is not its bytes": Case(
        odd_header(lambda h: h["model.norm.weight"].update(shape=[10**12])), "does not fit"
    ),
    "an entry that is none": Case(
        odd_header(lambda h: h.update({"model.norm.weight": 3})), "not safetensors'"
    ),
    "a shard is missing": Case(lacks_shard, "model-00002-of-00002.safetensors is missing"),
    "a shard and the index are missing": Case(lacks_shard_and_index, "is missing"),
    "a shard is cut off": Case(cut("model-00002-of-00002.safetensors"), "cut off or damaged"),
    "the index is a list": Case(holds(INDEX, b"[]"), "a list and not an object"),
    "the index says nothing": Case(holds(INDEX, b"{}"), "has no weight_map"),
    "the index climbs": Case(
        indexed(lambda w: w.update({"model.norm.weight": f"../outside/{FILE}"})), "names '../"
    ),
    "the index names another's": Case(
        indexed(lambda w: w.update({"model.norm.weight": f"/models/{FILE}"})),
        "which is no file of weights there",
    ),
    "the index is wrong": Case(
        indexed(lambda w: w.update(other="model-00001-of-00002.safetensors")), "lacks the tensor"
    ),
    "an index and another file": Case(both_kinds, "which of the two is meant"),
    "NaN in float32": Case(weighs(stored("F32", 4, b"\x00\x00\xc0\x7f")), "infinite numbers"),
    "inf in float32": Case(weighs(stored("F32", 4, b"\x00\x00\x80\xff")), "infinite numbers"),
    "inf in bfloat16": Case(weighs(stored("BF16", 2, b"\x80\x7f")), "infinite numbers"),
    "NaN in float16": Case(weighs(stored("F16", 2, b"\x01\xfc")), "infinite numbers"),
    "inf in float64": Case(weighs(stored("F64", 8, b"\0" * 6 + b"\xf0\x7f")), "NaN in 'model.norm"),
    # what only training minds
    "fp8": Case(weighs(stored("F8_E4M3", 1)), "is stored as F8_E4M3", True),
    "whole numbers": Case(weighs(stored("I8", 1)), "is stored as I8", True),
    "quantized": Case(says(quantization_config={"bits": 8}), "quantization_config", True),
    "an unknown kind": Case(
        says(model_type="unheard_of"), "cannot train a 'unheard_of' model", True
    ),
    "a third layer": Case(weighs(adds(**LAYER)), "model.layers.2.input_layernorm.weight", True),
    "an extra bias": Case(
        weighs(adds(model__layers__0__self_attn__q_proj__bias=(16,))),
        "model.layers.0.self_attn.q_proj.bias",
        True,
    ),
    "a tensor too few": Case(
        weighs(lambda tensors: tensors.pop("model.norm.weight")), "lacks the tensor 'model.n", True
    ),
    "another shape": Case(says(intermediate_size=25), "config.json implies [25, 16]", True),
    "far too few tensors": Case(says(num_hidden_layers=5000), "it speaks of 5000 layers", True),
    "rope without its factor": Case(
        says(rope_scaling={"rope_type": "linear"}), "linear) has factor = None", True
    ),
    "rope's lists are too short": Case(
        says(rope_scaling={"type": "longrope", "short_factor": [1.0], "long_factor": [1.0]}),
        "which must be a list of 4",
        True,
    ),
    "no experts are said": Case(
        says(model_type="mixtral"), "num_experts_per_tok, num_local_experts", True
    ),
}
