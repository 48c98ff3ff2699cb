"""Roots of earlier commits, and a configuration from before the API's new words: they are read.

`support/root_of_COMMIT.tar.xz` was written by the code of that commit: `everything` is a root with
every kind of file (`support/flipped_root.py`); `loop` is the root of a loop and a gateway that were
killed before its last iteration (`support/killable_loop.py`, kind `grpo`). That of a0fd6ac8 has a
`cray-agents.toml` with every setting, too.
"""

import json
import re
import tarfile
import time
from pathlib import Path
from typing import Any

import pytest

from cray_agents.config.settings import load_config
from cray_agents.paths import Home
from cray_agents.runtime import fsck
from tests.support.flipped_root import readers
from tests.support.killable_loop import ITERATIONS
from tests.test_loop_kills import Site, site

#: Kinds of files that the oldest root does not have: several hosts came later.
LATER = {"audit", "ledger", "terms", "standbys", "down", "serving", "excluded",
         "order of a replica", "lease of a replica"}  # fmt: skip
ROOTS = Path(__file__).parent / "support"
EARLY, LATEST = ["35a68fce", "4e368387"], "a0fd6ac8"


def unpacked(commit: str, folder: Path) -> Path:
    with tarfile.open(ROOTS / f"root_of_{commit}.tar.xz") as archive:
        archive.extractall(folder, filter="data")
    return folder


def test_an_old_configuration_is_read(tmp_path: Path) -> None:
    unpacked(LATEST, tmp_path)
    assert load_config(directory=tmp_path) == load_config(directory=tmp_path / "loop")


def test_the_page_says_which_roots_are_read() -> None:
    page = (ROOTS.parents[1] / "docs" / "operations.md").read_text()
    rows = re.findall(r"^\| (.*`[0-9a-f]{8}`.*?) \| (.+) \|$", page, re.MULTILINE)
    told = {commit: text for names, text in rows for commit in re.findall(r"`(\w{8})`", names)}
    assert {*told} == {*EARLY, LATEST} == {path.name[8:16] for path in ROOTS.glob("root_of_*")}
    assert [commit for commit in told if "end as new ones" in told[commit]] == [LATEST]


@pytest.mark.parametrize("commit", [*EARLY, LATEST])
def test_every_file_of_an_old_root_is_read(
    commit: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    home = Home(unpacked(commit, tmp_path) / "everything")
    written = home.platform.stat().st_mtime  # an excluded node is left out for an hour
    monkeypatch.setattr(time, "time", lambda: written + 1)
    assert list(fsck.check(home)) == []
    asked = readers(home)
    if not home.ledger.exists():
        asked = {name: read for name, read in asked.items() if name not in LATER}
    nothing = {name for name, read in asked.items() if not read(home)}
    assert nothing == {"platform", "demo"}  # one has ended, the other's reader answers nothing


def said(ended: Site) -> dict[str, Any]:
    """All that a loop left, but for its remarks, which had other words, as the evidence had."""
    state: dict[str, Any] = json.loads(json.dumps(ended.state()).replace(" of 20", ", 20 needed"))
    for each in state["iterations"]:
        del each["remarks"]
    return state


@pytest.mark.slow
def test_an_old_loop_goes_on_and_ends_as_a_new_one(tmp_path: Path) -> None:
    with site(tmp_path / "new", "grpo") as new:
        new.loop.wait()
        assert new.children.ended("loop")
        expected = said(new)
    assert continued(unpacked(LATEST, tmp_path), "grpo") == expected


@pytest.mark.slow
@pytest.mark.parametrize("commit", EARLY)
def test_a_loop_of_the_first_versions_goes_on(commit: str, tmp_path: Path) -> None:
    before = Home(unpacked(commit, tmp_path) / "loop").iterations("loop")
    records = [json.loads((before / f"{number}.json").read_bytes()) for number in (0, 1)]
    state = continued(tmp_path, "grpo-early")
    assert state["twice"] == [] and len(state["versions"]) == len(state["jobs"]) + 1
    assert [each["iteration"] for each in state["iterations"]] == [*range(ITERATIONS + 1)]
    for old, new in zip(records, state["iterations"], strict=False):
        for name in ("version", "holdout_success", "runs", "dataset"):
            assert new[name] == old[name], "what was done is not done again"


def continued(old: Path, kind: str) -> dict[str, Any]:
    """Let an old loop go on to its end; what it left then."""
    (old / "continued").mkdir()
    (old / "loop").rename(old / "continued" / "home")
    with site(old / "continued", kind) as made:
        made.loop.wait()
        assert made.children.ended("loop")
        return said(made)
