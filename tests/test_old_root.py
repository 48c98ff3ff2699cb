"""A root and a configuration from before the API's new words: both are read, the loop goes on.

`support/root_before_the_cut.tar.xz` was written by the code of commit a0fd6ac8: `cray-agents.toml`
has every setting; `everything` is a root with every kind of file (`support/flipped_root.py`);
`loop` is the root of a loop and a gateway that were killed in the second iteration of three
(`support/killable_loop.py`, kind `grpo`).
"""

import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from cray_agents.config.settings import load_config
from cray_agents.paths import Home
from cray_agents.runtime import fsck
from tests.support.flipped_root import readers
from tests.test_loop_kills import Site, site

OLD = Path(__file__).parent / "support" / "root_before_the_cut.tar.xz"
WRITTEN = 1795904600.0  # within the time for which its excluded node is left out


@pytest.fixture
def old(tmp_path: Path) -> Path:
    with tarfile.open(OLD) as archive:
        archive.extractall(tmp_path, filter="data")
    return tmp_path


def test_an_old_configuration_is_read(old: Path) -> None:
    assert load_config(directory=old) == load_config(directory=old / "loop")


def test_every_file_of_an_old_root_is_read(old: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(time, "time", lambda: WRITTEN)
    home = Home(old / "everything")
    assert list(fsck.check(home)) == []
    nothing = {name for name, read in readers(home).items() if not read(home)}
    assert nothing == {"platform", "demo"}  # one has ended, the other's reader answers nothing


def said(ended: Site) -> dict[str, Any]:
    """All that a loop left, but for its remarks, which had other words."""
    state = ended.state()
    for each in state["iterations"]:
        del each["remarks"]
    return state


@pytest.mark.slow
def test_an_old_loop_goes_on_and_ends_as_a_new_one(old: Path, tmp_path: Path) -> None:
    with site(tmp_path / "new", "grpo") as new:
        new.loop.wait()
        assert new.children.ended("loop")
        expected = said(new)
    (tmp_path / "continued").mkdir()
    (old / "loop").rename(tmp_path / "continued" / "home")
    with site(tmp_path / "continued", "grpo") as continued:
        continued.loop.wait()
        assert continued.children.ended("loop")
        assert said(continued) == expected
