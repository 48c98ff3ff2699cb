"""`keys`, and what a platform asks of them before it listens beyond this host."""

import json
import os
import stat
import tempfile
from pathlib import Path
from typing import Any

import pytest

from cray_agents.config import Config
from cray_agents.errors import ConfigError, SetupError
from cray_agents.paths import Home
from cray_agents.runtime.disk import durable
from cray_agents.runtime.gateway.http.api_keys import Keys, Role
from cray_agents.server import gateway_parts, gateway_ports, platform_process, root_claim
from cray_agents.server.gateway_ports import Ports
from tests.support.audit_lines import read_audit
from tests.support.command_line import cli, refused


def config(home: Path, **values: Any) -> Config:
    return Config.model_validate({"home": home, **values})


def test_create_list_revoke(tmp_path: Path) -> None:
    home = ("--home", tmp_path)
    made = cli("keys", "create", "ann", "--role", "train", *home, cwd=tmp_path)
    secret = made.stdout.strip()  # alone, for `KEY=$(cray-agents keys create ann)`
    assert (made.returncode, secret[:8], secret.count("\n")) == (0, "sk-cray-", 0)
    keys = Keys(Home(tmp_path))
    found = keys.check(secret)
    assert found is not None and (found.name, found.role) == ("ann", Role.train)
    other = json.loads(cli("keys", "create", "bob", "--json", *home, cwd=tmp_path).stdout)
    assert (other["name"], other["role"], other["secret"][:8]) == ("bob", "use", "sk-cray-")
    ended = cli("keys", "revoke", "ann", "--reason", "she left", *home, cwd=tmp_path)
    assert read_audit(Home(tmp_path).audit)[-1].reason == "she left"
    assert (ended.returncode, found.id in ended.stdout) == (0, True)
    listed = cli("keys", "list", "--json", *home, cwd=tmp_path).stdout
    rows = [(row["name"], row["role"], row["state"]) for row in json.loads(listed)]
    assert rows == [("ann", "train", "revoked"), ("bob", "use", "works")]
    table = cli("keys", "list", *home, cwd=tmp_path).stdout
    for known in (secret, other["secret"], other["sha256"]):
        assert known not in listed + table


def test_a_secret_of_a_file(tmp_path: Path) -> None:
    """It is given once: not to a second key, and not again after it was revoked."""
    keys, file, short = Keys(Home(tmp_path / "home")), tmp_path / "secret", tmp_path / "short"
    file.write_text(f"sk-cray-{'a1_-' * 12}\n")
    short.write_text("sk-cray-1234")

    def create(name: str, path: Path, *words: str) -> Any:
        words = (
            "create",
            name,
            "--secret-file",
            str(path),
            *words,
            "--home",
            str(tmp_path / "home"),
        )
        return cli("keys", *words, cwd=tmp_path)

    made, again = create("ann", file), create("bob", file)
    assert made.returncode == again.returncode == 0 and "ann has this secret" in again.stdout
    assert file.read_text().strip() not in made.stdout + made.stderr
    assert [record.name for record, _ in keys.list()] == ["ann"]
    assert keys.check(file.read_text().strip()).role == Role.use
    refused(create("ann", file, "--role", "admin"), "the role use")
    refused(create("eve", short), "40 random letters")
    refused(create("eve", tmp_path / "none"), "cannot be read")
    keys.revoke("ann")
    assert "was revoked" in create("ann", file).stdout and not Keys(Home(tmp_path / "home")).working


def test_mistakes_are_told(tmp_path: Path) -> None:
    Home(tmp_path).segments.mkdir()
    for words, said in (
        (("create", "ann", "--role", "root"), "use, train, admin"),
        (("create", "a b"), "cannot name a key"),
        (("revoke", "nobody"), "cray-agents keys list"),
    ):
        refused(cli("keys", *words, "--home", tmp_path, cwd=tmp_path), said)


def test_up_beyond_loopback_needs_a_key(tmp_path: Path) -> None:
    done = cli("up", "--model", tmp_path, cwd=tmp_path, CRAY_AGENTS_HOST="0.0.0.0")
    refused(done, "loopback", "cray-agents keys create")


def test_who_may_be_let_in_without_a_key(tmp_path: Path) -> None:
    keys = Keys(Home(tmp_path))
    for host in ("127.0.0.1", "localhost", "127.1.2.3", "::1"):
        for mode in ("auto", "required", "off"):
            gateway_parts.check_access(config(tmp_path, host=host, api_keys=mode))
    for host in ("0.0.0.0", "10.0.0.1", "gpu1", "::", "127.evil.example"):
        with pytest.raises(ConfigError, match="keys create"):
            gateway_parts.check_access(config(tmp_path, host=host))
        with pytest.raises(ConfigError, match="api_keys = 'off'"):
            gateway_parts.check_access(config(tmp_path, host=host, api_keys="off"))
    keys.create("ann")
    gateway_parts.check_access(config(tmp_path, host="0.0.0.0"))
    with pytest.raises(ConfigError, match="api_keys = 'off'"):
        gateway_parts.check_access(config(tmp_path, host="0.0.0.0", api_keys="off"))
    keys.revoke("ann")
    with pytest.raises(ConfigError, match="keys create"):
        gateway_parts.check_access(config(tmp_path, host="0.0.0.0"))


def test_only_its_user_reads_the_platforms_own_key(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the first moment: no file is ever there that others could open."""
    modes: list[int] = []

    class Watched:
        def __getattr__(self, name: str) -> Any:
            modes.extend(stat.S_IMODE(path.stat().st_mode) for path in tmp_path.glob("*platform*"))
            return getattr(os, name)

    monkeypatch.setattr(durable, "os", Watched())
    before = os.umask(0)
    try:
        with gateway_ports.listen("127.0.0.1", 0) as listener:
            lease = root_claim.claim(Home(tmp_path), Ports(listener), "m")
    finally:
        os.umask(before)
    info = json.loads((tmp_path / "platform.json").read_text())
    lease.give_back(hand_over=False)
    assert info["token"] == lease.token and len(lease.token) > 40
    assert modes and set(modes) == {0o600}
    assert platform_process.key(info) == (os.environ.get("CRAY_AGENTS_API_KEY") or lease.token)


def test_another_users_platform_is_named() -> None:
    with tempfile.TemporaryDirectory() as folder:  # not tmp_path: others cannot look into that
        Path(folder).chmod(0o755)
        (Path(folder) / "platform.json").touch(0)
        me = os.geteuid()
        os.seteuid(65534 if me == 0 else me)  # root reads every file
        try:
            with pytest.raises(SetupError, match="CRAY_AGENTS_API_KEY"):
                platform_process.owner(Home(Path(folder)))
        finally:
            os.seteuid(me)


def test_addresses(tmp_path: Path) -> None:
    for host, shown in (("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1")):
        with gateway_ports.listen(host, 0) as listener:
            port = listener.getsockname()[1]
            assert gateway_ports.address(listener) == f"http://{shown}:{port}"
