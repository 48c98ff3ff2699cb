"""`up --model` on a name that has versions already: the version it serves."""

import shutil
from pathlib import Path

import pytest

from cray_agents.cli.platform import _only_name
from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.registry.registry import Registry
from cray_agents.server.first_version import first_version
from tests.support.command_line import cli
from tests.support.scripted_gateway import checkpoint


@pytest.fixture
def registry(tmp_path: Path) -> Registry:
    """m@1 is of one/, m@2 of two/ and promoted."""
    registry = Registry(Home(tmp_path / "home"))
    first_version(registry, checkpoint(tmp_path / "one", b"111"), "m")
    registry.register("m", *registry.import_checkpoint(checkpoint(tmp_path / "two", b"222")))
    registry.promote("m", 2)
    return registry


def test_a_model_that_is_one_of_its_versions_changes_nothing(
    registry: Registry, tmp_path: Path
) -> None:
    kept = registry.home.checkpoint(registry.versions("m")[0].checkpoint)
    shutil.copytree(kept, tmp_path / "with a manifest")
    for model in (None, tmp_path / "one", tmp_path / "two", kept, tmp_path / "with a manifest"):
        assert first_version(registry, model, "m").id == "m@2"
    shutil.rmtree(kept)  # the version is known still
    assert first_version(registry, tmp_path / "one", "m").id == "m@2"
    assert len(registry.versions("m")) == 2


def test_a_model_that_would_be_ignored_is_refused(registry: Registry, tmp_path: Path) -> None:
    ways = "'m' means m@2 on .*leave out --model.*--name.*--home"
    for model in (
        checkpoint(tmp_path / "as large", b"333"),
        checkpoint(tmp_path / "larger", b"4444"),
    ):
        with pytest.raises(BadInput, match=ways):
            first_version(registry, model, "m")
    shutil.copytree(tmp_path / "two", tmp_path / "templated")
    (tmp_path / "templated" / "chat_template.jinja").write_text("another")
    with pytest.raises(BadInput, match=ways):
        first_version(registry, tmp_path / "templated", "m")
    with pytest.raises(BadInput, match="no checkpoint at"):
        first_version(registry, tmp_path / "nowhere", "m")
    assert first_version(registry, tmp_path / "templated", "other").id == "other@1"


def test_the_only_name_of_a_root_is_the_one_that_is_served(registry: Registry) -> None:
    home = registry.home
    assert _only_name(home, None) == "m"
    assert _only_name(home, Path("model")) == "default"
    registry.register("other", *registry.import_checkpoint(registry.directory("m@1")))
    assert _only_name(home, None) == "default"
    with pytest.raises(BadInput, match=r"names there: m, other.*with --name"):
        first_version(registry, None, "default")


def test_decisions_without_a_platform(registry: Registry, tmp_path: Path) -> None:
    def models(*words: str) -> tuple[int, str]:
        done = cli("models", *words, "--home", registry.home.root, cwd=tmp_path)
        return done.returncode, done.stdout + done.stderr

    code, told = models("rollback", "m", "--who", "me", "--reason", "slow")
    assert code == 0 and "m rolled back by me: slow; m means m@1 now" in told
    assert "no platform runs" in told and "cray-agents up" in told
    promoted = Registry(registry.home).promoted("m")
    assert promoted is not None and promoted.number == 1
    assert models("reject", "m@2", "--who", "me")[0] == 0
    code, told = models("list")
    rows = {line.split()[0]: line for line in told.splitlines()[1:]}
    assert rows["m@1"].split()[1:4] == ["yes", "-", "rolled_back_to"] and "rejected" in rows["m@2"]
    assert "m@2 promoted by me; m means m@2 now" in models("promote", "m@2", "--who", "me")[1]
    code, told = models("reject", "m@2")
    assert code == 2 and "m@2 is promoted" in told
    code, told = models("promote", "m@9")
    assert code == 2 and "m@9" in told
