"""`cray-agents import`: files into the store of a root, without a platform."""

import json
from pathlib import Path
from typing import Any

import pytest

from tests.support.command_line import cli, refused

CHAT = {"messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}]}


def told(*words: object, cwd: Path) -> Any:
    done = cli(*words, "--json", cwd=cwd)
    assert done.returncode == 0, done.stderr
    return json.loads(done.stdout)


@pytest.mark.slow
def test_import_list_export_and_import_again(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    words = ("import", "chats.jsonl", "--format", "openai", "--tag", "a", "--tag", "b")
    more = ("--loop", "l", "--split", "holdout", "--agent", "clerk", "--reward", "0.5")
    assert cli(*words, *more, cwd=tmp_path).stdout == "1 runs imported, 0 model calls\n"
    (row,) = told("runs", "list", "--where", "tag=a", cwd=tmp_path)
    assert (row["loop"], row["split"], row["agent"], row["reward"]) == (
        "l",
        "holdout",
        "clerk",
        0.5,
    )
    assert (row["imported"], row["tags"], row["input"]) == ("openai", ["a", "b"], "hi")
    assert told(*words, *more, cwd=tmp_path)["duplicates"] == 1
    for form in ("jsonl", "sharegpt", "atif", "openai"):
        file = tmp_path / f"{form}.jsonl.zst"
        assert cli("export", "-f", form, "-o", file, cwd=tmp_path).returncode == 0
        into = ("--home", f"home-{form}")
        assert told("import", file, "-f", form, *into, cwd=tmp_path)["runs"] == 1
    (whole,) = told("runs", "list", "--home", "home-jsonl", cwd=tmp_path)
    assert whole == row


def test_mistakes_are_told(tmp_path: Path) -> None:
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps(CHAT) + "\n[markup]\n")
    for words, said in {
        ("import", file, "-f", "openai"): ["f.jsonl: line 2", "1 runs were imported"],
        ("import", file, "-f", "csv"): ["csv", "sharegpt"],
        ("import", "missing", "-f", "openai"): ["missing", "No such file"],
        ("import", file, "-f", "openai", "--split", "dev"): ["--split", "holdout"],
    }.items():
        refused(cli(*words, cwd=tmp_path), *said)


def test_the_configuration_redacts(tmp_path: Path) -> None:
    (tmp_path / "cray-agents.toml").write_text('redact = ["email"]\n')
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps(CHAT).replace("hello", "hello jane@example.com"))
    assert told("import", file, "-f", "openai", cwd=tmp_path)["runs"] == 1
    (row,) = told("runs", "list", cwd=tmp_path)
    assert row["output"] == "hello [redacted:email]" and row["redacted"] is True
    (tmp_path / "cray-agents.toml").write_text('redact = ["emial"]\n')
    refused(cli("import", file, "-f", "openai", cwd=tmp_path), "emial")
