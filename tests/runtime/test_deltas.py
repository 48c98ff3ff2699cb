"""Delta checkpoints: exact, small, verified, made whole, served from a copy, and kept together."""

import json
import shutil
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from cray_agents.engines.scripted import ScriptedEngine
from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import CACHE, Home
from cray_agents.records import Manifest
from cray_agents.runtime import fsck
from cray_agents.runtime.disk.durable import OLD, sha256_file
from cray_agents.runtime.registry import checkpoints
from cray_agents.runtime.registry.deltas import Shadows, changes_from, materialize, rebuilt_bytes
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.retention import prune, reasons_to_keep
from cray_agents.runtime.vllm_plugins import delta_codec
from cray_agents.runtime.vllm_plugins.worker import read_patches
from tests.support.delta_checkpoints import Words, bfloat16, changed, full, header, with_changes
from tests.support.in_process_engine import InProcessEngine
from tests.support.scripted_gateway import served

ONE = "model.safetensors"
A, B = "model-00001-of-00002.safetensors", "model-00002-of-00002.safetensors"


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def family(home: Home) -> tuple[dict[str, dict[str, Words]], Path, Path]:
    """A full checkpoint `one`, and `two`, which is what changed in it: its files and folders."""
    x, y, z = bfloat16(4000, 1), bfloat16(900, 2), bfloat16(64, 3)
    before = {A: {"x": x, "y": y}, B: {"z": z}}
    # in other files than before, with a tensor that is new and one of another length
    after = {A: {"x": with_changes(x, 0.02), "z": z[:32]}, B: {"y": y, "w": bfloat16(10)}}
    parent = full(home, "one", before)
    child, _ = changed(home, "two", "one", after)
    return after, parent, child


def assert_whole(directory: Path, files: dict[str, dict[str, Words]]) -> None:
    for file, tensors in files.items():
        content = b"".join([header(tensors), *(words.tobytes() for words in tensors.values())])
        assert (directory / file).read_bytes() == content
    assert checkpoints.is_whole(directory, checkpoints.verify(directory))


# ---- the codec
@settings(deadline=None, max_examples=60)
@given(
    old=st.lists(st.integers(0, 3), max_size=60),
    new=st.lists(st.integers(0, 3), max_size=60),
    width=st.sampled_from(["<u1", "<u2", "<u4", "<u8"]),
    step=st.sampled_from([1, 7, 1 << 22]),
)
def test_what_is_packed_comes_out_again(
    old: list[int], new: list[int], width: str, step: int
) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(delta_codec, "STEP", step)
        words = np.array(new, width) * 77
        base = np.array(old, width) * 77 if len(old) == len(new) else None
        head = header({"t": words})
        content = delta_codec.pack_header(head)
        content += b"".join(delta_codec.pack_changes(0, words, base))
        kept, entries, changes = delta_codec.unpack(content)
        result = np.zeros(len(new), width) if base is None else base.copy()
        for _, places, values in changes:
            assert base is None or (base[places] != values).all(), "only what differs is stored"
            result[places] = values
        assert (kept, entries[0].name) == (head, "t")
        assert result.tolist() == words.tolist()


# ---- made whole
def test_a_delta_is_made_whole_to_the_byte(home: Home) -> None:
    after, _, child = family(home)
    manifest = checkpoints.verify(child)
    assert not checkpoints.is_whole(child, manifest) and not list(child.glob("*.safetensors"))
    assert materialize(home, child) == child
    assert_whole(child, after)
    assert checkpoints.read_manifest(child) == manifest, "its id and its manifest stay"
    stat = (child / A).stat().st_mtime_ns
    materialize(home, child)
    assert (child / A).stat().st_mtime_ns == stat, "a whole one is left alone"
    assert not list(child.parent.glob(".*")), "no draft is left"


def test_a_chain_is_made_whole_from_its_beginning(home: Home) -> None:
    after, _, child = family(home)
    last = {A: {"x": with_changes(after[A]["x"], 0.01, seed=9)}}
    materialize(home, child)
    third, _ = changed(home, "three", "two", last)
    for file in (A, B):
        (child / file).unlink()  # a delta again
    materialize(home, third)
    assert_whole(third, last)
    assert_whole(child, after)


def test_half_of_the_files_are_not_taken_for_the_whole(home: Home) -> None:
    """A process that was killed after one of the renames."""
    after, _, child = family(home)
    (child / A).write_bytes(b"half")
    assert not checkpoints.is_whole(child, checkpoints.verify(child))
    materialize(home, child)
    assert_whole(child, after)


def test_the_size_of_the_whole_is_known_before(home: Home) -> None:
    _, parent, child = family(home)
    assert rebuilt_bytes(parent) == sum(f.stat().st_size for f in parent.glob("*.safetensors"))
    small = rebuilt_bytes(child)
    materialize(home, child)
    assert small == rebuilt_bytes(child) == sum((child / file).stat().st_size for file in (A, B))
    (child / A).unlink()
    (child / "delta" / A).write_bytes(b"damaged")
    with pytest.raises(Corrupt, match=r"delta/model-0.* is damaged"):
        rebuilt_bytes(child)


# ---- damage
@pytest.mark.slow
def test_every_flipped_bit_is_noticed(home: Home) -> None:
    """Also in the parent, unless the result does not depend on it."""
    after, parent, child = family(home)
    refused = dict.fromkeys((parent, child), 0)
    for folder in refused:
        for path in sorted(folder.rglob("*")):
            if not path.is_file() or path == parent / "config.json":  # not read here
                continue
            whole = path.read_bytes()
            for place in range(0, len(whole), 1 + len(whole) // 40):
                flipped = bytearray(whole)
                flipped[place] ^= 1 << place % 8
                path.write_bytes(flipped)
                try:
                    checkpoints.verify(child)
                    materialize(home, child)
                except (Corrupt, BadInput):
                    refused[folder] += 1
                    assert not list(child.glob("*.safetensors"))
                else:
                    assert folder == parent
                    assert_whole(child, after)
                    for file in (A, B):
                        (child / file).unlink()
            path.write_bytes(whole)
    assert refused[child] > 100 and refused[parent] > 60


def test_fsck_finds_damaged_changes_of_a_whole_checkpoint(home: Home) -> None:
    _, _, child = family(home)
    materialize(home, child)
    assert not list(fsck.check(home))
    path = child / "delta" / A
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    assert [f.path for f in fsck.check(home)] == [str(child)]
    checkpoints.verify(child)  # it can be served all the same


def test_a_broken_chain_says_what_is_gone(home: Home) -> None:
    _, parent, child = family(home)
    aside = parent.rename(parent.with_name("aside"))
    with pytest.raises(NotFound, match=r"two holds what changed in one alone.* are gone") as error:
        materialize(home, child)
    assert error.value.code == "delta_parent"
    full(home, "one", {A: {"x": bfloat16(4000, 5)}})
    with pytest.raises(Corrupt, match="two holds what changed in weights"):
        materialize(home, child)
    shutil.rmtree(parent)
    aside.rename(parent)
    weights = bytearray((parent / A).read_bytes())
    weights[-1] ^= 1  # the manifest of the parent is whole
    (parent / A).write_bytes(weights)
    with pytest.raises(Corrupt, match=r"two is not rebuilt: one with its changes gives model-0"):
        materialize(home, child)


# ---- copies to serve
def test_a_copy_is_made_once_and_swept_when_nobody_uses_it(home: Home, tmp_path: Path) -> None:
    after, parent, child = family(home)
    shadows = Shadows(home, tmp_path / "shadows")
    copy = shadows.directory(child)
    assert copy != child and not list(child.glob("*.safetensors"))
    assert_whole(copy, after)
    stat = (copy / A).stat().st_ino
    assert shadows.directory(child) == copy and (copy / A).stat().st_ino == stat
    assert shadows.directory(parent) == parent, "a full one is served as it is"
    assert changes_from(copy, checkpoints.read_manifest(parent).weights_sha256)
    assert not changes_from(parent, checkpoints.read_manifest(parent).weights_sha256)
    shadows.sweep({copy})
    assert copy.is_dir()
    for number in range(4):  # the newest are spared, as they may be on their way to a replica
        changed(home, f"more-{number}", "one", after)
        shadows.directory(home.checkpoint(f"more-{number}"))
    shadows.sweep(())
    assert not copy.exists() and len(list(copy.parent.glob("more-*"))) == 4


OTHER = """
import sys
from pathlib import Path
from cray_agents.paths import Home
from cray_agents.runtime.registry.deltas import Shadows
home = Home(Path(sys.argv[1]))
print(Shadows(home, Path(sys.argv[2])).directory(home.checkpoint("two")), flush=True)
sys.stdin.read()
"""


def test_copies_of_a_dead_process_are_deleted(home: Home, tmp_path: Path) -> None:
    """The kernel tells who lives: processes of several containers may have the same id."""
    _, _, child = family(home)
    place = tmp_path / "shadows"
    command = [sys.executable, "-c", OTHER, str(home.root), str(place)]
    with subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE) as process:
        assert process.stdout is not None
        theirs = Path(process.stdout.readline().decode().strip())
        mine = Shadows(home, place)
        assert theirs.is_dir() and mine.directory(child).is_dir()
        process.kill()
    half = place / f".x{OLD}y"  # deleted by a process that died meanwhile
    half.mkdir()
    Shadows(home, place)
    assert not theirs.exists() and not half.exists() and mine.directory(child).is_dir()


class Late(Shadows):
    """Finds the changes damaged while another process makes the checkpoint whole."""

    def _copy(self, checkpoint: Path, manifest: Manifest, shadow: Path) -> Path:
        materialize(self._home, checkpoint)
        (checkpoint / "delta" / A).write_bytes(b"damaged")
        return super()._copy(checkpoint, manifest, shadow)


def test_the_full_checkpoint_is_taken_if_there_is_one(
    home: Home, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    after, _, child = family(home)
    assert Late(home, tmp_path / "shadows").directory(child) == child
    assert "two is loaded from its full checkpoint: " in caplog.text and "damaged" in caplog.text
    assert_whole(child, after)


# ---- kept together
def test_prune_keeps_what_a_delta_is_rebuilt_from(home: Home) -> None:
    _, parent, child = family(home)
    registry = Registry(home)
    for name in ("one", "two"):
        registry.register("m", *registry.import_checkpoint(name))
    assert registry.resolve("m@2").checkpoint == "two" and not list(child.glob("*.safetensors"))
    reasons = reasons_to_keep(registry, 0, ())
    assert reasons == {"m@2": "the newest", "m@1": "m@2 is stored as what changed in it"}
    prune(home, keep=0, grace=0)
    assert parent.is_dir()
    materialize(home, child)
    prune(home, keep=0, grace=0)
    assert not parent.is_dir() and checkpoints.verify(child)


# ---- inside vLLM
def patched(files: Sequence[Any], model: dict[str, Any]) -> dict[str, Any]:
    """What vLLM's own loader makes of patches; the module alone, as vLLM takes seconds."""
    import importlib.util
    import sys

    import torch

    found = importlib.util.find_spec("vllm")
    if found is None:
        pytest.skip("vLLM is not installed")
    (folder,) = found.submodule_search_locations or [""]
    path = Path(folder, "model_executor", "model_loader", "checkpoint_weight_patch.py")
    spec = importlib.util.spec_from_file_location("checkpoint_weight_patch", path)
    assert spec is not None and spec.loader is not None
    module = sys.modules[spec.name] = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)

    class Model(torch.nn.Module):
        def load_weights(self, weights: Any) -> set[str]:
            return {name for name, new in weights if model[name].copy_(new) is not None}

    patches = [module.CheckpointWeightPatch(*one) for one in files]
    module.load_checkpoint_weight_patches(Model(), patches, validate_unique_indices=False)
    return model


def test_vllms_own_loader_takes_the_changes(home: Home) -> None:
    import torch

    x, y = bfloat16(6000, 1), bfloat16(100, 2)
    parent = full(home, "one", {ONE: {"x": x, "y": y}})
    new = with_changes(x, 0.02)
    child, _ = changed(home, "two", "one", {ONE: {"x": new, "y": y}})

    def tensor(words: Words) -> Any:
        return torch.from_numpy(words.view("<i2").copy()).view(torch.bfloat16)

    files = changes_from(child, checkpoints.read_manifest(parent).weights_sha256)
    patches = list(read_patches(child / "delta", files, lambda *fields: fields))
    assert [patch[0] for patch in patches] == ["x"], "y did not change"
    model = patched(patches, {"x": tensor(x), "y": tensor(y)})
    assert torch.equal(model["x"], tensor(new)) and torch.equal(model["y"], tensor(y))
    path = child / "delta" / ONE
    path.write_bytes(path.read_bytes()[:-1] + b"?")
    with pytest.raises(ValueError, match=r"delta/model.* is damaged"):
        list(read_patches(child / "delta", files, lambda *fields: fields))


# ---- through the gateway
async def test_a_delta_is_staged_from_a_copy_and_promoted_whole(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(CACHE, str(tmp_path / "cache"))
    engines = [ScriptedEngine(lambda request, version: version) for _ in range(2)]
    async with served(tmp_path, engines[0], others=[InProcessEngine(engines[1])]) as gateway:
        home = Home(tmp_path / "home")
        after, _, child = family(home)
        for name in ("one", "two"):
            body = {"checkpoint": name}
            status, made = await gateway.call("POST", "/v1/models/calc/versions", json=body)
            assert status == 200, made
        status, report = await gateway.call("POST", "/v1/models/calc/versions/3/stage", json={})
        assert status == 200, report
        (at,) = {e.checkpoint for e in engines if e.version == "calc@3" and e.checkpoint}
        assert at.parent.parent.name == "shadows" and not list(child.glob("*.safetensors"))
        assert_whole(at, after)
        status, event = await gateway.call("POST", "/v1/models/calc/promote", json={"version": 3})
        assert status == 200, event
        assert_whole(child, after)
        assert (await gateway.ask("hi")).text == "calc@3"
    assert not at.exists(), "the copies go with the platform"


async def test_a_job_gets_a_whole_parent_and_the_setting(tmp_path: Path) -> None:
    async with served(tmp_path, delta_checkpoints=True) as gateway:
        home = Home(tmp_path / "home")
        after, _, child = family(home)
        home.dataset("ds").mkdir(parents=True)
        for body in ({}, {"changes_only": False, "save_every": 7}):
            asked = {"dataset": "ds", "parent": "two", "hyperparameters": {"steps": 1}, **body}
            status, job = await gateway.call("POST", "/v1/jobs", json=asked)
            assert status == 200, job
        assert_whole(child, after)
        spec = json.loads((home.job(job["id"]) / "spec.json").read_bytes())
        assert spec["changes_only"] is True, "the first one made the job"


def test_a_delta_from_elsewhere_is_not_imported(home: Home, tmp_path: Path) -> None:
    _, _, child = family(home)
    elsewhere = Registry(Home(tmp_path / "other"))
    with pytest.raises(BadInput, match="is missing"):
        elsewhere.import_checkpoint(child)
    materialize(home, child)
    name, manifest = elsewhere.import_checkpoint(child)
    assert manifest.delta is None, "its parent is not there"
    copy = elsewhere.home.checkpoint(name)
    assert sha256_file(copy / A) == sha256_file(child / A) and not (copy / "delta").exists()
