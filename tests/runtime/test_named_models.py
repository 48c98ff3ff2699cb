"""Models that are no Hugging Face directory: GGUF files, and names of a hub."""

import importlib
import random
import re
import shutil
import struct
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from cray_agents.errors import AccessDenied, BadInput, NotFound, SetupError
from cray_agents.paths import Home
from cray_agents.runtime.registry.gguf_conversion import check_kind, convert, read_header
from cray_agents.runtime.registry.registry import Registry
from cray_agents.server.first_version import first_version
from tests.support.bare_models import bare_model
from tests.support.command_line import cli
from tests.support.gguf_file import MARKS, write_gguf


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    return Registry(Home(tmp_path / "home"))


@pytest.fixture
def told(capsys: pytest.CaptureFixture[str]) -> Callable[[Callable[[], object]], str]:
    """What a conversion says when it ends its process."""

    def run(convert_it: Callable[[], object]) -> str:
        with pytest.raises(SystemExit) as ended:
            convert_it()
        text = capsys.readouterr().out
        assert ended.value.code in (2, 3) and len(text.splitlines()) == 1
        return text

    return run


# ---- a GGUF file
@pytest.mark.slow
def test_a_gguf_file_is_served_as_the_model_that_it_holds(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from safetensors.torch import load_file
    from transformers import AutoModelForCausalLM, AutoTokenizer

    monkeypatch.chdir(tmp_path)
    held = write_gguf(tmp_path / "tiny.gguf")
    version = first_version(registry, Path("tiny.gguf"), "m")
    folder = registry.home.checkpoint(version.checkpoint)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == held.keys()  # the head is the embedding
    import torch

    for name, weights in held.items():
        assert torch.equal(stored[name], torch.from_numpy(weights.copy()).bfloat16()), name
    model = AutoModelForCausalLM.from_pretrained(folder)
    assert model.lm_head.weight is model.model.embed_tokens.weight
    assert model.config.architectures == ["LlamaForCausalLM"] and model.dtype == torch.bfloat16
    assert not {"quantization_config", "_model_name_or_path"} & model.config.to_dict().keys()
    tokenizer = AutoTokenizer.from_pretrained(folder)
    hello = [{"role": "user", "content": "hé"}]
    ids = tokenizer.apply_chat_template(hello, add_generation_prompt=True, return_dict=False)
    assert tokenizer.decode(ids) == "<|im_start|>user\nhé<|im_end|>\n<|im_start|>assistant\n"
    assert [ids.count(MARKS.index(mark)) for mark in MARKS] == [0, 2, 1]
    assert tokenizer.eos_token == "<|im_end|>" and model.config.eos_token_id == 2

    made = folder.stat()
    assert first_version(registry, Path("tiny.gguf"), "m") == version  # the same command again
    assert registry.import_checkpoint(tmp_path / "tiny.gguf")[0] == version.checkpoint
    assert folder.stat().st_mtime_ns == made.st_mtime_ns
    assert [path.name for path in folder.parent.iterdir()] == [version.checkpoint]
    with pytest.raises(AccessDenied):  # of a key that may name the folders of others alone
        registry.directory(str(tmp_path / "tiny.gguf"), [tmp_path / "elsewhere"])


class Edit(NamedTuple):
    """An edit of a whole file's bytes, and what is said of the result."""

    says: str
    change: Callable[[bytes], bytes]


def numbers_after(name: str, at: int, number: int, form: str = "<Q") -> Callable[[bytes], bytes]:
    """Overwrite a number `at` bytes behind a name."""

    def change(content: bytes) -> bytes:
        start = content.index(name.encode()) + len(name) + at
        new = struct.pack(form, number)
        return content[:start] + new + content[start + len(new) :]

    return change


NORM = "output_norm.weight"  # count of dimensions (4 bytes), one dimension (8), type (4), offset
EDITS = {
    "cut in its weights": Edit("the last is .* cut off", lambda c: c[:-100]),
    "cut in its header": Edit("are left: cut off", lambda c: c[:3000]),
    "empty": Edit("gives its mark 4 bytes", lambda c: b""),
    "of another kind": Edit("starts with b'PK", lambda c: b"PK\3\4" + c[4:]),
    "of another byte order": Edit("version 50331648", lambda c: c[:4] + b"\0\0\0\3" + c[8:]),
    "countless tensors": Edit(
        "claims 1,152,921,504,606,846,976 tensors",
        lambda c: c[:8] + struct.pack("<Q", 1 << 60) + c[16:],
    ),
    "a text of many bytes": Edit(
        "tokenizer.chat_template 1,099,511,627,776 bytes",
        numbers_after("tokenizer.chat_template", 4, 1 << 40),
    ),
    "an endless array": Edit(
        "'tokenizer.ggml.tokens' 1,152,921,504,606,846,976 entries",
        numbers_after("tokenizer.ggml.tokens", 8, 1 << 60),
    ),
    "an unknown type of value": Edit(
        "'llama.block_count' the type 77", numbers_after("llama.block_count", 0, 77, "<I")
    ),
    "a huge tensor": Edit(
        "the last is 'output_norm.weight' up to 4,503", numbers_after(NORM, 4, 1 << 50)
    ),
    "many dimensions": Edit("4,294,967,295 dim", numbers_after(NORM, 0, 0xFFFFFFFF, "<I")),
    "an unknown type of tensor": Edit("ggml's type 999,", numbers_after(NORM, 12, 999, "<I")),
    "whole numbers": Edit("type I32, which gguf cannot", numbers_after(NORM, 12, 26, "<I")),
    "an offset out of it": Edit("the last is", numbers_after(NORM, 16, 1 << 40)),
}


@pytest.mark.parametrize("name", EDITS)
def test_a_header_that_lies_is_refused(told: Callable[..., str], tmp_path: Path, name: str) -> None:
    path = tmp_path / "bad.gguf"
    write_gguf(path)
    path.write_bytes(EDITS[name].change(path.read_bytes()))
    said = told(lambda: read_header(path))
    assert re.search(EDITS[name].says, said), said


def test_no_damaged_header_is_a_traceback(tmp_path: Path) -> None:
    path = tmp_path / "bad.gguf"
    write_gguf(path)
    whole = path.read_bytes()
    size, draw, refused = read_header(path).size, random.Random(3), 0
    for _ in range(300):
        content = bytearray(whole)
        for _ in range(draw.randint(1, 3)):
            content[draw.randrange(size)] = draw.choice((0, 1, 127, 255))
        path.write_bytes(content)
        try:
            check_kind(read_header(path))
        except SystemExit:
            refused += 1
    assert refused > 20


@pytest.mark.parametrize(
    ("says", "more", "tensors"),
    [
        ("scales its RoPE", {}, {"rope_freqs.weight": 8}),
        ("scales its RoPE", {"llama.rope.scaling.type": "yarn"}, {}),
        ("a part of a model", {"split.count": 3}, {}),
        ("no model but a 'adapter'", {"general.type": "adapter"}, {}),
    ],
)
def test_what_transformers_would_leave_out_is_refused(
    told: Callable[..., str], tmp_path: Path, says: str, more: dict, tensors: dict
) -> None:
    write_gguf(tmp_path / "m.gguf", more=more, tensors=tensors)
    assert says in told(lambda: check_kind(read_header(tmp_path / "m.gguf")))


@pytest.mark.slow
def test_experts_are_named_as_on_the_hub(tmp_path: Path) -> None:
    """transformers keeps them together in memory; engines and trainers read each by its name."""
    import torch
    from safetensors.torch import load_file

    held = write_gguf(tmp_path / "m.gguf", architecture="qwen3moe", experts=4)
    folder = tmp_path / "made"
    folder.mkdir()
    convert(tmp_path / "m.gguf", folder)
    stored = load_file(folder / "model.safetensors")
    assert stored.keys() == held.keys()
    for name, weights in held.items():
        assert torch.equal(stored[name], torch.from_numpy(weights.copy()).bfloat16()), name


@pytest.mark.slow
def test_a_model_that_transformers_does_not_have_is_refused(
    told: Callable[..., str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def said(**changes: Any) -> str:
        write_gguf(tmp_path / "m.gguf", **changes)
        return told(lambda: convert(tmp_path / "m.gguf", tmp_path))

    assert "architecture quokka is not supported" in said(architecture="quokka")
    lost = said(tensors={"blk.0.attn_q.bias": 64})
    assert "LlamaForCausalLM" in lost and "a part of the model would be lost" in lost
    window = said(more={"llama.attention.sliding_window": 128})
    assert "attends to 128 tokens" in window
    layers = said(more={"llama.block_count": 1 << 31})
    assert "claims 2,147,483,648 layers" in layers
    monkeypatch.setattr(shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(0, 0, 9))
    assert "bytes as a directory" in (room := said()) and "has 9 free" in room
    assert [path.name for path in tmp_path.iterdir()] == ["m.gguf"]


def test_a_command_says_what_is_wrong_and_leaves_nothing(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    write_gguf(tmp_path / "whole.gguf")
    cut = tmp_path / "cut.gguf"
    cut.write_bytes((tmp_path / "whole.gguf").read_bytes()[:5000])
    words = ["plan", "train", "--model", cut.name, "--tokens", "1e6"]
    done = cli(*words, "--home", registry.home.root, cwd=tmp_path)
    assert done.returncode == 2 and "cut off" in done.stderr and "Traceback" not in done.stderr
    assert list(registry.home.checkpoint("x").parent.iterdir()) == []
    with pytest.raises(BadInput, match="neither a Hugging Face directory nor a GGUF file"):
        registry.named(__file__)
    monkeypatch.setitem(sys.modules, "gguf", None)
    with pytest.raises(SetupError, match=r"pip install gguf"):
        registry.named(tmp_path / "whole.gguf")


# ---- a hub's name
def test_a_name_of_a_hub_is_what_its_library_has(
    registry: Registry, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    constants = importlib.import_module("huggingface_hub.constants")
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    kept, commit = tmp_path / "hub" / "models--acme--tiny", "c" * 40
    snapshot = bare_model(kept / "snapshots" / commit)
    (kept / "blobs").mkdir()
    for path in list(snapshot.iterdir()):
        path.rename(kept / "blobs" / path.name)
        path.symlink_to(f"../../blobs/{path.name}")
    (kept / "refs").mkdir()
    (kept / "refs" / "main").write_text(commit)

    version = first_version(registry, Path("acme/tiny"), "m")
    assert version.checkpoint.startswith("hf-")
    assert first_version(registry, Path("acme/tiny"), "m") == version
    with pytest.raises(NotFound, match=r"no directory 'acme/other' here, and no such"):
        registry.named("acme/other")
    with pytest.raises(BadInput, match=r"none of its versions .*'acme/other'"):
        first_version(registry, Path("acme/other"), "m")
    with pytest.raises(AccessDenied):  # nor may a key for training load models down
        registry.directory("acme/tiny", [Path.cwd()])
