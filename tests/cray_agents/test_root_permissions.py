"""Permissions of the shared root and of files made in it, and `doctor`'s report of them."""

import grp
import json
import os
import stat
from pathlib import Path

import pytest

from cray_agents.errors import ConfigError
from cray_agents.ports import Command
from cray_agents.runtime.scheduler.choose import open_scheduler
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.server.permissions import make_private
from tests.support.command_line import cli

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "ho"}]}


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


def open_to_others(root: Path) -> list[str]:
    """What in a folder, itself included, more than its owner may use."""
    return [f"{path} {mode(path):o}" for path in (root, *root.rglob("*")) if mode(path) & 0o077]


def a_group() -> grp.struct_group:
    """One that this user may give files to, and that new files have not by themselves."""
    others = grp.getgrall() if os.geteuid() == 0 else map(grp.getgrgid, os.getgroups())
    return next(
        (group for group in others if group.gr_gid != os.getegid()), grp.getgrgid(os.getegid())
    )


def test_what_commands_write_is_their_users_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    cache = tmp_path / "cache"
    cache.mkdir(mode=0o700)
    monkeypatch.setenv("CRAY_AGENTS_CACHE", str(cache))
    home = tmp_path / "root"
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    for words in (
        ("import", "chats.jsonl", "--format", "openai", "--reward", "1"),
        ("keys", "create", "ann"),
        ("runs", "list"),
        ("maintain", "compact"),
        ("export", "--format", "jsonl", "-o", tmp_path / "mine.jsonl"),
    ):
        os.umask(0o022)
        done = cli(*words, "--home", home, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert len(list(home.rglob("*"))) >= 5 and any(cache.rglob("index-*.sqlite"))
    assert open_to_others(home) + open_to_others(cache) == []
    assert mode(tmp_path / "mine.jsonl") == 0o644  # its user named it: the modes are the user's


@pytest.mark.parametrize(
    "words", [("keys", "create", "ann"), ("import", "/dev/null", "--format", "openai")]
)
def test_whichever_command_makes_the_root_makes_it_private(
    words: tuple[str, ...], tmp_path: Path
) -> None:
    cli(*words, "--home", tmp_path / "root", cwd=tmp_path)
    assert open_to_others(tmp_path / "root") == []


@pytest.mark.parametrize(
    ("before", "after", "umask"),
    [
        (0o755, 0o700, 0o077),  # left open
        (0o775, 0o700, 0o077),
        (0o2775, 0o2770, 0o007),  # shared with a group, and left open
        (0o2770, 0o2770, 0o007),  # shared with a group
        (0o770, 0o770, 0o007),
        (0o750, 0o750, 0o027),
        (0o700, 0o700, 0o077),
    ],
)
def test_an_old_root_is_closed_to_all_but_those_it_was_shared_with(
    before: int, after: int, umask: int, tmp_path: Path
) -> None:
    tmp_path.chmod(before)
    access = make_private(tmp_path, None)
    assert (mode(tmp_path), access.umask) == (after, umask)
    assert ("was open to all users" in access.note) == (before != after)
    assert make_private(tmp_path, None).note == ""


def test_a_group_is_let_in_by_the_configuration(tmp_path: Path) -> None:
    group, home = a_group(), tmp_path / "root"
    (tmp_path / "cray-agents.toml").write_text(f'group = "{group.gr_name}"\n')
    done = cli("keys", "create", "ann", "--home", home, cwd=tmp_path)
    assert done.returncode == 0, done.stderr
    for path in (home, *home.rglob("*")):
        assert path.stat().st_gid == group.gr_gid
        assert mode(path) == (0o2770 if path.is_dir() else 0o660)


def test_an_old_root_is_given_to_a_group_with_what_is_left_to_do(tmp_path: Path) -> None:
    group = a_group().gr_name
    (tmp_path / "old").write_text("")
    assert f"chgrp -R {group}" in make_private(tmp_path, group).note
    assert make_private(tmp_path, group).note == ""


def test_groups_that_cannot_be_are_told(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="no such group") as unknown:
        make_private(tmp_path, "no-such-group")
    assert unknown.value.param == "group"


def test_doctor_says_who_may_read_the_root(tmp_path: Path) -> None:
    def row() -> dict[str, str]:
        said = cli("doctor", "--json", "--home", tmp_path / "root", cwd=tmp_path)
        found = {row["check"]: row for row in json.loads(said.stdout)}["shared root is private"]
        assert found["state"] == "pass" or said.returncode == 2
        return found

    assert row()["state"] == "pass"
    (tmp_path / "root").mkdir()
    assert row()["state"] == "fail"
    assert "0755" in row()["found"] and "chmod 700" in row()["to mend it"]
    (tmp_path / "root").chmod(0o2770)
    assert (row()["state"], "group" in row()["found"]) == ("pass", True)


@pytest.mark.parametrize("kind", ["local", pytest.param("slurm", marks=pytest.mark.slurm)])
def test_what_jobs_write_is_private_too(kind: str, tmp_path: Path) -> None:
    if kind == "slurm" and (missing := missing_programs()):
        pytest.skip(f"Slurm is not installed: {missing}")
    os.umask(0o077)
    log, made = tmp_path / "log", tmp_path / "made"
    argv = ["/bin/sh", "-c", f"umask; : > {made}"]
    with open_scheduler(kind, tmp_path / "slurm") as scheduler:  # type: ignore[arg-type]
        scheduler.submit(Command(name="a", argv=argv, directory=str(tmp_path), log=str(log)))
        while scheduler.status("a").state in ("queued", "running"):
            pass
    assert log.read_text().strip() == "0077"
    assert open_to_others(made) + open_to_others(tmp_path / "slurm") + open_to_others(log) == []
