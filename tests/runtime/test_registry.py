"""Names for weights: append-only, idempotent, and never weights that are not what they say."""

import json
import threading
from pathlib import Path
from typing import Any

import pytest

from cray_agents.errors import BadInput, Corrupt, NotFound
from cray_agents.paths import Home
from cray_agents.records import Manifest
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry import registry as registry_module
from cray_agents.runtime.registry.checkpoints import read_manifest, weights_sha256
from cray_agents.runtime.registry.registry import Registry
from tests.support.bare_models import bare_model


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path / "home")


def model(directory: Path, weights: bytes = b"weights") -> Path:
    bare_model(directory, weights)
    (directory / "pytorch_model.bin").write_bytes(b"a pickle")
    (directory / "modeling.py").write_text("import os")
    return directory


def add(registry: Registry, directory: Path, name: str = "calc") -> str:
    return registry.register(name, *registry.import_checkpoint(directory)).id


def test_importing_copies_hashes_and_leaves_code_outside(home: Home, tmp_path: Path) -> None:
    registry = Registry(home)
    checkpoint_id, manifest = registry.import_checkpoint(model(tmp_path / "a"))
    assert checkpoint_id.startswith("hf-")
    assert set(manifest.files) == {"config.json", "model.safetensors"}
    names = {path.name for path in home.checkpoint(checkpoint_id).iterdir()}
    assert names == {"config.json", "model.safetensors", "manifest.json"}
    assert registry.import_checkpoint(model(tmp_path / "b"))[0] == checkpoint_id
    assert registry.import_checkpoint(checkpoint_id)[1] == manifest
    assert registry.import_checkpoint(model(tmp_path / "c", b"other"))[0] != checkpoint_id
    assert len(list(home.checkpoint("x").parent.iterdir())) == 2


def test_what_cannot_be_a_checkpoint(home: Home, tmp_path: Path) -> None:
    registry = Registry(home)
    source = model(tmp_path / "a")
    (source / "model.safetensors").unlink()
    with pytest.raises(BadInput, match="safetensors"):
        registry.import_checkpoint(source)
    (source / "config.json").unlink()
    with pytest.raises(BadInput, match=r"config\.json"):
        registry.import_checkpoint(source)
    with pytest.raises(NotFound):
        registry.import_checkpoint(tmp_path / "nowhere")


def test_a_corrupt_or_missing_file_is_named(home: Home, tmp_path: Path) -> None:
    registry = Registry(home)
    checkpoint_id, _ = registry.import_checkpoint(model(tmp_path / "a"))
    weights = home.checkpoint(checkpoint_id) / "model.safetensors"
    weights.write_bytes(b"weightz")
    with pytest.raises(Corrupt, match=r"model\.safetensors is damaged: its SHA-256"):
        registry.import_checkpoint(checkpoint_id)
    weights.unlink()
    with pytest.raises(Corrupt, match=r"model\.safetensors is missing"):
        registry.import_checkpoint(checkpoint_id)
    (home.checkpoint(checkpoint_id) / "manifest.json").write_text("{")
    with pytest.raises(Corrupt, match=r"manifest\.json"):
        read_manifest(home.checkpoint(checkpoint_id))


def test_weights_are_hashed_as_their_manifest_says(home: Home, tmp_path: Path) -> None:
    source = model(tmp_path / "a")
    weights = source / "model.safetensors"
    files = {
        "config.json": checksums.hash_of(source / "config.json"),
        weights.name: checksums.hash_of(weights, checksums.BLAKE3),
    }
    manifest = Manifest(version=2, files=files, weights_sha256=weights_sha256(files))
    (source / "manifest.json").write_text(manifest.model_dump_json())
    registry = Registry(home)
    checkpoint_id, kept = registry.import_checkpoint(source)
    assert kept.files == files and files[weights.name].startswith("blake3:")
    for folder in (home.checkpoint(checkpoint_id), source):
        weights = folder / weights.name
        content = bytearray(weights.read_bytes())
        content[-1] ^= 1
        weights.write_bytes(content)
        with pytest.raises(Corrupt, match=r"model\.safetensors is .*: its BLAKE3 is blake3:"):
            registry.import_checkpoint(checkpoint_id if folder != source else source)


def test_a_foreign_manifest_cannot_reach_outside(home: Home, tmp_path: Path) -> None:
    registry = Registry(home)
    checkpoint_id, manifest = registry.import_checkpoint(model(tmp_path / "a"))
    secret = tmp_path / "foreign" / "secret.json"
    foreign = model(secret.parent / "model")
    secret.write_bytes((foreign / "config.json").read_bytes())
    files = {"../secret.json": manifest.files["config.json"]}
    text = manifest.model_copy(update={"files": files}).model_dump_json()
    (foreign / "manifest.json").write_text(text)
    with pytest.raises(BadInput, match="secret"):
        registry.import_checkpoint(foreign)
    assert len(list(home.checkpoint(checkpoint_id).parent.iterdir())) == 1


def test_versions_promotions_and_aliases(home: Home, tmp_path: Path) -> None:
    registry = Registry(home)
    assert add(registry, model(tmp_path / "a")) == "calc@1"
    with pytest.raises(NotFound, match="no version of 'calc' is promoted yet"):
        registry.resolve("calc")
    assert add(registry, model(tmp_path / "b", b"better")) == "calc@2"
    assert add(registry, model(tmp_path / "c")) == "calc@1"  # the same weights
    registry.promote("calc", 1, who="me")
    assert registry.resolve("calc").id == "calc@1"
    registry.promote("calc", 2, who="loop l", reason="0.5 -> 0.9")
    assert registry.promote("calc", 2).number == 2  # again is the same promotion
    registry.roll_back("calc", 1, reason="slow")
    assert registry.resolve("calc").id == "calc@1"
    reopened = Registry(home)
    history = reopened.history("calc")
    assert [(e.number, e.kind, e.version, e.who) for e in history] == [
        (1, "promoted", 1, "me"),
        (2, "promoted", 2, "loop l"),
        (3, "rolled_back", 1, ""),
    ]
    assert [v.id for v in reopened.versions("calc")] == ["calc@1", "calc@2"]
    assert reopened.resolve("calc@2").weights_sha256 != reopened.resolve("calc").weights_sha256
    assert reopened.directory("calc@2") == home.checkpoint(reopened.resolve("calc@2").checkpoint)
    with pytest.raises(NotFound) as missing:
        reopened.promote("calc", 3)
    assert missing.value.code == "model_not_found"


def test_another_process_promotes(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(registry_module, "REFRESH_INTERVAL", 1e9)
    ours, theirs = Registry(home), Registry(home)
    add(ours, model(tmp_path / "a"))
    add(theirs, model(tmp_path / "b", b"better"))
    ours.promote("calc", 1)
    theirs.promote("calc", 2)
    assert ours.resolve("calc").id == "calc@1"  # read a moment ago
    monkeypatch.setattr(registry_module, "REFRESH_INTERVAL", 0.0)
    assert ours.resolve("calc").id == "calc@2"


def test_a_slow_look_hides_no_promotion(
    home: Home, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    registry, read = three(home, tmp_path), registry_module._read_numbered
    registry.promote("calc", 1)
    looked, go = threading.Event(), threading.Event()

    def read_slowly(folder: Path, *more: Any) -> Any:
        records = read(folder, *more)
        if threading.current_thread().name == "looking" and folder.name == "history":
            looked.set()
            go.wait(60)
        return records

    monkeypatch.setattr(registry_module, "_read_numbered", read_slowly)
    monkeypatch.setattr(registry_module, "REFRESH_INTERVAL", 1e9)
    looking = threading.Thread(target=registry._read, args=("calc",), name="looking")
    looking.start()
    assert looked.wait(60)
    promoting = threading.Thread(target=registry.promote, args=("calc", 2))
    promoting.start()
    promoting.join(0.2)
    go.set()
    for thread in (looking, promoting):
        thread.join()
    assert registry.resolve("calc").id == "calc@2"


def test_writers_at_once_get_numbers_of_their_own(home: Home, tmp_path: Path) -> None:
    taken = [
        Registry(home).import_checkpoint(model(tmp_path / str(n), str(n).encode()))
        for n in range(12)
    ]
    found: list[str] = []

    def register(n: int) -> None:
        found.append(Registry(home).register("calc", *taken[n]).id)

    threads = [threading.Thread(target=register, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert sorted(found) == sorted(f"calc@{n}" for n in range(1, 13))
    assert not [path for path in (home.models / "calc").iterdir() if "draft" in path.name]


@pytest.mark.parametrize("name", ["../x", "a/b", "", "a@1", ".hidden", "a" * 200])
def test_names_that_cannot_be_folders(home: Home, tmp_path: Path, name: str) -> None:
    registry = Registry(home)
    taken = registry.import_checkpoint(model(tmp_path / "a"))
    with pytest.raises(BadInput):
        registry.register(name, *taken)
    with pytest.raises(NotFound):
        registry.resolve(name)


def three(home: Home, tmp_path: Path) -> Registry:
    registry = Registry(home)
    for n in range(3):
        add(registry, model(tmp_path / str(n), str(n).encode()))
    return registry


def test_rolling_back_goes_through_what_was_promoted(home: Home, tmp_path: Path) -> None:
    registry = three(home, tmp_path)
    with pytest.raises(BadInput, match="nothing was promoted as 'calc' before now"):
        registry.rollback_target("calc")
    registry.promote("calc", 1)
    with pytest.raises(BadInput, match="before calc@1"):
        registry.rollback_target("calc")
    registry.promote("calc", 3)
    assert registry.rollback_target("calc").number == 1
    with pytest.raises(BadInput, match=r"calc@2 never was promoted: .*calc@1, calc@3"):
        registry.rollback_target("calc", 2)
    assert registry.rollback_target("calc", 2, force=True).number == 2
    with pytest.raises(NotFound, match="there is calc@1, calc@2, calc@3"):
        registry.rollback_target("calc", 4, force=True)
    registry.promote("calc", 2)
    registry.roll_back("calc", 3)
    assert registry.rollback_target("calc").number == 1  # not forward to 2 again
    registry.roll_back("calc", 2)
    assert Registry(home).rollback_target("calc").number == 3


def test_rejections_and_canaries_are_in_the_same_history(home: Home, tmp_path: Path) -> None:
    registry = three(home, tmp_path)
    registry.promote("calc", 1)
    first = registry.reject("calc", 2, who="loop l", reason="futile", numbers={"wins": 3})
    assert registry.reject("calc", 2, who="loop l", reason="futile") == first
    assert registry.reject("calc", 2, who="me").number == 3
    with pytest.raises(BadInput, match="calc@1 is promoted: roll back"):
        registry.reject("calc", 1)
    started = registry.start_canary("calc", 3, who="me", reason="", numbers={"share": 0.2})
    assert Registry(home).canary("calc") == started
    with pytest.raises(BadInput, match="canary of calc@3 runs already") as busy:
        registry.start_canary("calc", 2, who="me", reason="", numbers={})
    assert busy.value.code == "canary_running"
    registry.reject("calc", 2, who="you")
    assert registry.canary("calc") == started
    ended = registry.end_canary("calc", who="canary", reason="errors", numbers={"failed": 9})
    assert ended is not None and (ended.number, ended.version) == (6, 3)
    assert registry.end_canary("calc", who="me", reason="", numbers={}) is None
    registry.start_canary("calc", 2, who="me", reason="", numbers={})
    registry.promote("calc", 3)
    assert registry.canary("calc") is None  # whoever promotes has decided
    kinds = [event.kind for event in Registry(home).history("calc")]
    assert kinds == [
        "promoted",
        *["rejected"] * 2,
        "canary_started",
        "rejected",
        "canary_ended",
        "canary_started",
        "promoted",
    ]


def test_a_history_that_began_as_promotions_goes_on(home: Home, tmp_path: Path) -> None:
    three(home, tmp_path)
    folder = home.models / "calc" / "promotions"
    folder.mkdir()
    for n, version in enumerate([1, 3], 1):
        record = {"name": "calc", "number": n, "version": version, "who": "old", "time": 1.0}
        (folder / f"{n}.json").write_text(json.dumps(record))
    registry = Registry(home)
    assert registry.resolve("calc").number == 3
    assert registry.roll_back("calc", registry.rollback_target("calc").number).number == 3
    assert registry.resolve("calc").number == 1
    assert [event.kind for event in registry.history("calc")] == ["promoted"] * 2 + ["rolled_back"]


def test_events_at_once_are_all_there(home: Home, tmp_path: Path) -> None:
    three(home, tmp_path)

    def reject(n: int) -> None:
        Registry(home).reject("calc", 2, who=f"judge {n}")

    threads = [threading.Thread(target=reject, args=(n,)) for n in range(12)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    history = Registry(home).history("calc")
    assert sorted(event.who for event in history) == sorted(f"judge {n}" for n in range(12))
    assert [event.number for event in history] == list(range(1, 13))
