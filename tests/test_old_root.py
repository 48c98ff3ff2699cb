"""Roots of earlier commits, and a configuration from before the API's new words: they are read.

`support/root_of_COMMIT.tar.xz` was written by the code of that commit: `everything` is a root with
every kind of file (`support/flipped_root.py`); `loop` is the root of a loop and a gateway that were
killed before its last iteration (`support/killable_loop.py`, kind `grpo`). That of a0fd6ac8 has a
`cray-agents.toml` with every setting, too.
"""

import tarfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from cray_agents.config.settings import load_config
from cray_agents.paths import Home
from cray_agents.runtime import fsck
from tests.support.flipped_root import readers
from tests.test_loop_kills import Site, site

#: Kinds of files that the oldest root does not have: several hosts came later.
LATER = {"audit", "ledger", "terms", "standbys", "down", "serving", "excluded",
         "order of a replica", "lease of a replica"}  # fmt: skip
ROOTS = sorted((Path(__file__).parent / "support").glob("root_of_*.tar.xz"))


@pytest.fixture(params=ROOTS, ids=lambda path: path.name.split(".")[0])
def old(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    with tarfile.open(request.param) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_an_old_configuration_is_read(tmp_path: Path) -> None:
    with tarfile.open(next(path for path in ROOTS if "a0fd6ac8" in path.name)) as archive:
        archive.extract("cray-agents.toml", tmp_path, filter="data")
    (other := tmp_path / "other").mkdir()
    assert load_config(directory=tmp_path) == load_config(directory=other)


def test_every_file_of_an_old_root_is_read(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    home = Home(old / "everything")
    written = home.platform.stat().st_mtime  # an excluded node is left out for an hour
    monkeypatch.setattr(time, "time", lambda: written + 1)
    assert list(fsck.check(home)) == []
    asked = readers(home)
    if not home.ledger.exists():
        asked = {name: read for name, read in asked.items() if name not in LATER}
    nothing = {name for name, read in asked.items() if not read(home)}
    assert nothing == {"platform", "demo"}  # one has ended, the other's reader answers nothing


def said(ended: Site) -> dict[str, Any]:
    """All that a loop left, but for its remarks, which had other words."""
    state = ended.state()
    for each in state["iterations"]:
        del each["remarks"]
    return state


@pytest.fixture(scope="module")
def expected(tmp_path_factory: pytest.TempPathFactory) -> Iterator[dict[str, Any]]:
    """What a new loop leaves."""
    with site(tmp_path_factory.mktemp("new"), "grpo") as new:
        new.loop.wait()
        assert new.children.ended("loop")
        yield said(new)


@pytest.mark.slow
def test_an_old_loop_goes_on_and_ends_as_a_new_one(
    old: Path, tmp_path: Path, expected: dict[str, Any]
) -> None:
    (tmp_path / "continued").mkdir()
    (old / "loop").rename(tmp_path / "continued" / "home")
    with site(tmp_path / "continued", "grpo") as continued:
        continued.loop.wait()
        assert continued.children.ended("loop")
        assert said(continued) == expected
