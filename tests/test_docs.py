"""Documents: their Python runs, their commands exist, the site builds, with its reference."""

import ast
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pyarrow
import pytest
import typer.main
from pyarrow import parquet

from cray_agents.cli import app
from cray_agents.testing import ScriptedEngine
from tests.support.scripted_platform import platform
from ui.build import find_node

pytestmark = pytest.mark.slow

ROOT = Path(__file__).parents[1]
PYRIGHT = ROOT / "ui" / "node_modules" / "pyright" / "index.js"
PAGES = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
BLOCK = re.compile(r"^```(\w*)\n(.*?)^```", re.MULTILINE | re.DOTALL)


def blocks(page: Path, language: str) -> list[str]:
    return [text for kind, text in BLOCK.findall(page.read_text()) if kind == language]


#: Of these "4" is right every other time.
TASKS = [{"input": f"What is {n} + 2?", "target": "4" if n % 2 else "5"} for n in range(40)]
CHATS = [[{"role": "user", "content": f"{n}?"}, {"role": "assistant", "content": "4"}]
         for n in range(12)]  # fmt: skip


def page_code(page: Path) -> str:
    """The page's blocks, one after the other; those of agents.md first, if it goes on from them."""
    text = "\n".join(blocks(page, "python"))
    if "agent =" not in text and "agent" in text:  # data.md, gateway.md
        text = "\n".join(blocks(ROOT / "docs" / "agents.md", "python")) + text
    return text


def write_files(folder: Path) -> None:
    """Write the files that pages read: tasks, tasks as verl has them, and chats."""
    chats = [{"messages": chat} for chat in CHATS]
    for name, lines in (("tasks", TASKS), ("chats", chats)):
        (folder / f"{name}.jsonl").write_text("".join(json.dumps(line) + "\n" for line in lines))
    rows = [
        {"data_source": "sums", "prompt": chat[:1], "reward_model": {"ground_truth": "4"}}
        for chat in CHATS
    ]
    parquet.write_table(pyarrow.Table.from_pylist(rows), folder / "train.parquet")


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_runs(page: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Block after block, as a reader would; each page by itself, on a platform with a script."""
    code = page_code(page)
    if not code or page.name == "cookbook.md":  # needs a model that learns: test_warmup.py
        return
    monkeypatch.chdir(tmp_path)
    write_files(tmp_path)
    with platform(tmp_path / "root", ScriptedEngine(lambda _: "4"), name="default") as where:
        url = f"{where.url}/v1"
        text = code.replace("http://127.0.0.1:8000/v1", url)
        (tmp_path / "page.py").write_text(text)
        monkeypatch.setenv("CRAY_AGENTS_URL", url)
        exec(compile(text, tmp_path / "page.py", "exec"), {"__name__": "__main__"})


def test_an_agent_is_asked_by_its_own_command(monkeypatch: pytest.MonkeyPatch) -> None:
    """Not by `chat`, which imports it; without a server it exits with 1, and says why."""
    monkeypatch.setenv("CRAY_AGENTS_URL", "http://127.0.0.1:9/v1")
    for page in ("README.md", "docs/agents.md"):
        code = blocks(ROOT / page, "python")[0]
        exec(code, {"__name__": "agent"})
        with pytest.raises(SystemExit, match="nobody answers at"):
            exec(code, {"__name__": "__main__"})


@pytest.mark.timeout(1800)  # where `make lint` has not run before, mypy reads all of the package
@pytest.mark.parametrize("checker", ["mypy", "pyright"])
def test_types_infer(tmp_path: Path, checker: str) -> None:
    """Each page, and test_typing.py, as a module; pyproject.toml says how strict mypy is."""
    folder = tmp_path / "docs_pages"
    folder.mkdir()
    (folder / "__init__.py").touch()
    shutil.copy(ROOT / "tests" / "cray_agents" / "test_typing.py", folder)
    for page in PAGES:
        if page.name != "cookbook.md":  # whose block has no agent
            name = page.stem.lower().replace("-", "_")
            (folder / f"{name}.py").write_text(page_code(page))
    argv = [sys.executable, "-m", "mypy", "-p", "docs_pages"]
    if checker == "pyright":
        if not PYRIGHT.is_file():
            pytest.skip("needs pyright: make ui")
        settings = {"extraPaths": [str(ROOT)], "reportUnnecessaryTypeIgnoreComment": True}
        (tmp_path / "pyrightconfig.json").write_text(json.dumps(settings))
        argv = [find_node()[0], str(PYRIGHT), "-p", str(tmp_path), "--pythonpath", sys.executable]
    env = {**os.environ, "MYPYPATH": str(tmp_path)}
    ended = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stdout


def source_texts() -> str:
    """The texts in the source, with a gap where a value is put in."""
    found = []
    for folder in ("cray_agents", "runtime", "trainers", "tools"):
        for file in (ROOT / folder).rglob("*.py"):
            for node in ast.walk(ast.parse(file.read_text())):
                if isinstance(node, ast.JoinedStr):
                    parts = [v.value if isinstance(v, ast.Constant) else "\0" for v in node.values]
                    found.append("".join(map(str, parts)))
                elif isinstance(node, ast.Constant) and isinstance(node.value, str):
                    found.append(node.value)
    return "\n".join(found)


def test_quoted_messages_exist() -> None:
    """Those of the first column of what goes wrong; `...` stands for a value."""
    quoted = [
        (page.name, part.strip())
        for page in PAGES
        for _, _, table in [page.read_text().partition("| you see |")]
        for cell in re.findall(r"^\| (.*?) \|", table, re.MULTILINE)
        for text in re.findall(r'"(.+?)"', re.sub(r"`[^`]*`", "", cell))
        for part in text.split("...")
    ]
    assert len(quoted) > 40
    texts = source_texts()
    assert [(page, part) for page, part in quoted if part not in texts] == []


def tree(command: Any, path: str = "") -> dict[str, Any]:
    """Each command by its words, as `runs stats`."""
    found = {path: command}
    for name, inner in getattr(command, "commands", {}).items():
        found |= tree(inner, f"{path} {name}".strip())
    return found


KNOWN = tree(typer.main.get_command(app))
#: Options whose values their help, or that of their command, lists.
CHOICES = {"--by", "--order", "--role", "--scheduler", "--adapter", "--format", "--method"}


def commands() -> list[tuple[str, str]]:
    """Commands that the pages name: whole lines of blocks, and code within sentences.

    There they may lack `cray-agents`, as `runs stats --by model` does.
    """
    found = []
    for page in PAGES:
        text = page.read_text()
        lines = [
            line.partition("  #")[0] for block in blocks(page, "") for line in block.splitlines()
        ]
        for piece in [*re.findall(r"`([^`\n]+)`", text), *lines]:
            for part in re.split(r"\s{3,}", piece.strip()):
                match = re.match(r"(?:\.venv/bin/)?cray-agents (.+)", part)
                words = part.split()
                bare = " ".join(words[:2]) in KNOWN or (words[0] in KNOWN and words[1][:2] == "--")
                if match or (len(words) > 2 and bare):
                    found.append((page.name, match[1] if match else part))
    return found


def test_commands_exist() -> None:
    """Their names and options, and what these are given; placeholders are not looked at."""
    wrong = [f"{page}: `{text}`: {fault}" for page, text in commands() for fault in faults(text)]
    assert wrong == []
    helps = [one.help or "" for each in KNOWN.values() for one in (each, *each.params)]
    assert not [text for text in helps if re.search(r"(?<!\\)\[[a-z]", text)], "as markup"


def faults(text: str) -> Iterator[str]:
    """What is wrong with a command that a page names."""
    words = shlex.split(text.replace("|", " | ").replace("'", " "), comments=True)
    path: list[str] = []
    while words and " ".join([*path, words[0]]) in KNOWN:
        path.append(words.pop(0))
    group = KNOWN[" ".join(path)]
    left = words[0] if words and hasattr(group, "commands") else "-"
    if left[0] not in "[<|-" and not left.isupper():
        yield f"no command {left!r}"
    known = {name: option for option in (*KNOWN[""].params, *group.params)
             for name in [*option.opts, *option.secondary_opts]}  # fmt: skip
    for place, word in enumerate(words):
        name, given, value = word.strip("[]").partition("=")
        if not name.startswith("-") or name in ("--help", "-"):
            continue
        if name not in known:
            yield f"no option {name}"
            continue
        option = known[name]
        if option.is_flag:
            if given:
                yield f"{name} takes no value"
            continue
        value = value if given else "".join(words[place + 1 : place + 2]).rstrip("]")
        if value and value[0].isalnum() and not value.isupper() and "..." not in value:
            if option.type_descriptor.annotation in (int, float):
                option.type_descriptor.annotation(value)
            listed = re.findall(r"[\w-]+", f"{option.help} {group.help}")
            unlisted = set(value.split(",")) - set(listed) if option.opts[0] in CHOICES else ()
            if unlisted:
                yield f"{name} does not list {unlisted}"


#: Words of each page that the build makes of the code.
REFERENCE = {
    "python": 'id="loop" PromotionTest ScriptedEngine forward_backward',
    "commands": 'id="jobs-submit" --lora-rank',
    "http": "/v1/chat/completions /v1/pool admin",
    "settings": "swap_mode gpu_hour",
    "notebook": 'id="a-loop-in-a-notebook" <polyline promoted</td>',
    "screens": 'src="../../screens/before/run.webp" src="../../screens/run.webp"',
}


def test_the_site_builds_without_warnings(tmp_path: Path) -> None:
    """Strict: a page that is missing, or a link that leads nowhere, ends it."""
    site = str(tmp_path / "site")
    argv = [sys.executable, "-m", "mkdocs", "build", "--strict", "--site-dir", site]
    env = {**os.environ, "NO_MKDOCS_2_WARNING": "1"}
    ended = subprocess.run(argv, cwd=ROOT, env=env, capture_output=True, text=True)
    assert ended.returncode == 0, ended.stderr
    assert "WARNING" not in ended.stderr
    for page, text in REFERENCE.items():
        made = (tmp_path / "site" / "reference" / page / "index.html").read_text()
        assert all(word in made for word in text.split()), page
