"""`cray-agents import`: files into the store of a root, without a platform."""

import json
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner, Result

from cray_agents.cli import app
from cray_agents.errors import BadInput, ConfigError

CHAT = {
    "messages": [{"role": "user", "content": "hi"}, {"role": "assistant", "content": "hello"}],
}


@pytest.fixture(autouse=True)
def _here(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)


def cli(*words: object) -> Result:
    return CliRunner().invoke(app, list(map(str, words)))


def told(*words: object) -> Any:
    done = cli(*words, "--json")
    assert done.exit_code == 0, done.output
    return json.loads(done.stdout)


@pytest.mark.slow
def test_import_list_export_and_import_again(tmp_path: Path) -> None:
    (tmp_path / "chats.jsonl").write_text(json.dumps(CHAT) + "\n")
    words = ("import", "chats.jsonl", "--format", "openai", "--tag", "a", "--tag", "b")
    more = ("--loop", "l", "--split", "holdout", "--agent", "clerk", "--reward", "0.5")
    assert cli(*words, *more).stdout == "1 runs imported, 0 model calls\n"
    (row,) = told("runs", "list", "--where", "tag=a")
    assert (row["loop"], row["split"], row["agent"], row["reward"]) == (
        "l",
        "holdout",
        "clerk",
        0.5,
    )
    assert (row["imported"], row["tags"], row["input"]) == ("openai", ["a", "b"], "hi")
    assert told(*words, *more)["duplicates"] == 1
    for form in ("jsonl", "sharegpt", "atif", "openai"):
        file = tmp_path / f"{form}.jsonl.zst"
        assert cli("export", "-f", form, "-o", file).exit_code == 0
        assert told("import", file, "-f", form, "--home", f"home-{form}")["runs"] == 1
    (whole,) = told("runs", "list", "--home", "home-jsonl")
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
        done = cli(*words)
        assert isinstance(done.exception, BadInput), done.output
        assert all(word in str(done.exception) for word in said)


def test_the_configuration_redacts(tmp_path: Path) -> None:
    (tmp_path / "cray-agents.toml").write_text('redact = ["email"]\n')
    file = tmp_path / "f.jsonl"
    file.write_text(json.dumps(CHAT).replace("hello", "hello jane@example.com"))
    assert told("import", file, "-f", "openai")["runs"] == 1
    (row,) = told("runs", "list")
    assert row["output"] == "hello [redacted:email]" and row["redacted"] is True
    (tmp_path / "cray-agents.toml").write_text('redact = ["emial"]\n')
    done = cli("import", file, "-f", "openai")
    assert isinstance(done.exception, ConfigError) and "emial" in str(done.exception)
