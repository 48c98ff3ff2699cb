"""What `up --model` serves where the name has versions already."""

import shutil
from pathlib import Path

import pytest

from cray_agents.cli.first_version import first_version
from cray_agents.errors import BadInput
from cray_agents.paths import Home
from cray_agents.runtime.registry import Registry
from tests.runtime.gateways import checkpoint


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
    with pytest.raises(BadInput, match="it is no directory"):
        first_version(registry, tmp_path / "nowhere", "m")
    assert first_version(registry, tmp_path / "templated", "other").id == "other@1"
