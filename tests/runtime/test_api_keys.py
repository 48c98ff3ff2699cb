"""API keys: hashed on disk, ended for good, seen by other processes; nothing brings one back."""

import json
import shutil
from pathlib import Path

import pytest

from cray_agents.errors import BadInput, NotFound
from cray_agents.paths import Home
from cray_agents.runtime.gateway.http import api_keys as module
from cray_agents.runtime.gateway.http.api_keys import Keys, Role


@pytest.fixture
def home(tmp_path: Path) -> Home:
    return Home(tmp_path)


@pytest.fixture
def keys(home: Home, monkeypatch: pytest.MonkeyPatch) -> Keys:
    monkeypatch.setattr(module, "REFRESH_INTERVAL", 0.0)
    return Keys(home)


def test_a_key_is_known_by_its_secret_alone(home: Home, keys: Keys) -> None:
    record, secret = keys.create("ann", Role.train)
    assert secret.startswith("sk-cray-")
    assert len(secret.removeprefix("sk-cray-")) == 43  # 256 bits in base64
    assert keys.check(secret) == record
    assert (record.name, record.role) == ("ann", Role.train)
    for wrong in ("", "none", secret[:-1], secret + "a", secret.upper(), record.id, record.sha256):
        assert keys.check(wrong) is None
    assert keys.check("sk-cray-\udcff\u20ac") is None


def test_no_secret_is_on_the_disk(home: Home, keys: Keys) -> None:
    secrets = [keys.create(f"k{number}")[1] for number in range(3)]
    assert len(set(secrets)) == 3
    files = [path for path in home.root.rglob("*") if path.is_file()]
    assert len(files) == 3
    for path in files:
        assert not any(secret.removeprefix("sk-cray-") in path.read_text() for secret in secrets)


def test_revoked_by_name_or_id_once_and_for_good(home: Home, keys: Keys) -> None:
    ann, ann_secret = keys.create("ann")
    _, bob_secret = keys.create("bob")
    assert [record.id for record in keys.revoke("ann")] == [ann.id]
    assert keys.check(ann_secret) is None
    assert keys.check(bob_secret) is not None
    keys.revoke(ann.id)
    assert [(record.name, ended) for record, ended in keys.list()] == [
        ("ann", True),
        ("bob", False),
    ]
    assert keys.working and keys.ever
    keys.revoke("bob")
    assert keys.ever and not keys.working
    with pytest.raises(NotFound, match="carl"):
        keys.revoke("carl")


def test_a_name_is_free_again_after_its_key_was_revoked(keys: Keys) -> None:
    _, first = keys.create("ann")
    with pytest.raises(BadInput, match="ann"):
        keys.create("ann")
    keys.revoke("ann")
    _, second = keys.create("ann")
    assert keys.check(first) is None
    assert keys.check(second) is not None


@pytest.mark.parametrize("name", ["", "a b", "../x", "-x", "a\n", "x" * 101])
def test_names_are_plain(keys: Keys, name: str) -> None:
    with pytest.raises(BadInput):
        keys.create(name)
    assert not keys.ever


def test_what_is_known_is_old_for_a_moment_only(
    home: Home, monkeypatch: pytest.MonkeyPatch
) -> None:
    now = 1000.0
    monkeypatch.setattr("cray_agents.runtime.gateway.http.api_keys.time.monotonic", lambda: now)
    gateway, command = Keys(home), Keys(home)
    _, secret = command.create("ann")
    assert gateway.check(secret) is not None
    command.revoke("ann")
    now += module.REFRESH_INTERVAL / 2
    assert gateway.check(secret) is not None  # from memory
    now += module.REFRESH_INTERVAL
    assert gateway.check(secret) is None
    assert module.REFRESH_INTERVAL < 1


def test_damaged_and_copied_files_are_no_keys(home: Home, keys: Keys) -> None:
    record, secret = keys.create("ann")
    _, good = keys.create("bob")
    file = home.keys / f"{record.id}.json"
    keys.revoke("ann")
    shutil.copy(file, home.keys / "key_copy.json")  # a copy does not bring it back
    (home.keys / "key_empty.json").write_text("")
    (home.keys / "key_odd.json").write_text(json.dumps({"id": "key_odd", "role": "root"}))
    (home.keys / ".key_x.json.draft").write_text("{")
    assert keys.check(secret) is None
    assert keys.check(good) is not None
    assert [found.name for found, _ in keys.list()] == ["ann", "bob"]
