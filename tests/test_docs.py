"""Documents: their Python runs, their commands exist, the README is short, the site builds."""

import json
import os
import re
import shlex
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from cray_agents import ScriptedEngine
from cray_agents.cli import app
from tests.support.scripted_platform import platform

ROOT = Path(__file__).parents[1]
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


def test_the_readme_is_short() -> None:
    text = (ROOT / "README.md").read_text()
    assert len(text.splitlines()) <= 120
    assert len(text.split()) <= 900
    assert "```python" in "\n".join(text.splitlines()[:50])


def answer(request: dict[str, object]) -> str:
    """Right for every other task of TASKS."""
    return "4"


TASKS = [{"input": f"What is {n} + 2?", "target": "4" if n % 2 else "5"} for n in range(40)]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, as a reader would; each page by itself, on a platform with a script."""
    code = blocks(page, "python")
    if (
        not code or page.name == "cookbook.md"
    ):  # its block needs a model that learns: test_warmup.py
        return
    monkeypatch.chdir(tmp_path)
    (tmp_path / "tasks.jsonl").write_text("".join(json.dumps(task) + "\n" for task in TASKS))
    with platform(tmp_path / "root", ScriptedEngine(answer), name="default") as where:
        url = f"{where.url}/v1"
        text = "\n".join(code).replace("http://127.0.0.1:8000/v1", url)
        if "agent =" not in text and "agent" in text:  # data.md, gateway.md: of agents.md
            text = "\n".join(blocks(ROOT / "docs" / "agents.md", "python")) + text
        (tmp_path / "page.py").write_text(text)
        ended = subprocess.run(
            [sys.executable, "page.py"],
            cwd=tmp_path,
            env={**os.environ, "CRAY_AGENTS_URL": url, "PYTHONPATH": str(ROOT)},
            capture_output=True,
            text=True,
        )
    assert ended.returncode == 0, ended.stderr


def commands() -> list[tuple[str, str]]:
    """Commands that the pages name: whole lines of blocks, and code within sentences."""
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [
            line.partition("  #")[0] for block in blocks(page, "") for line in block.splitlines()
        ]
        for piece in [*re.findall(r"`([^`\n]+)`", text), *lines]:
            for part in re.split(r"\s{3,}", piece.strip()):
                if match := re.match(r"(?:\.venv/bin/)?cray-agents (.+)", part):
                    found.append((page.name, match[1]))
    return found


@pytest.mark.parametrize(("page", "command"), commands())
def test_commands_exist(page: str, command: str) -> None:
    """Their names and options; what stands for a value is not looked at."""
    import typer.main

    words = shlex.split(command.replace("|", " | ").replace("'", " "), comments=True)
    group: Any = typer.main.get_command(app)
    while words and words[0] in getattr(group, "commands", {}):
        group = group.commands[words.pop(0)]
    if words and hasattr(group, "commands"):
        assert words[0][0] in "[<|-" or words[0].isupper(), f"{page}: no command {words[0]!r}"
    known = {name for option in group.params for name in [*option.opts, *option.secondary_opts]}
    for word in words:
        name = word.strip("[]").partition("=")[0]
        if name.startswith("--"):
            assert name in known | {"--help"}, f"{page}: `{command}` has no option {name}"


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """Strict: a page that is missing, or a link that leads nowhere, ends it."""
    site = str(tmp_path / "site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "WARNING" not in ended.stderr
    assert (tmp_path / "site" / "agents" / "index.html").exists()
