"""Measures of the tree's size, with their bounds: `python -m tests.measures` prints a table."""

import subprocess
from collections import defaultdict
from pathlib import Path
from typing import Any

import typer.main

from cray_agents.cli import app
from tests.test_layers import LINKED, ROOT, dotted, imported, is_module, modules

#: What each measure may be at most.
BOUNDS = {
    "lines of source": 116_577,
    "modules of source": 527,
    "lines of the longest module": 600,
    "circles of folders": 0,
    "lines of tests": 94_917,
    "commands": 55,
    "parameters of commands": 239,
    "words of ARCHITECTURE.md": 3_000,
    "words of README.md": 950,
    "words of CHANGELOG.md": 300,
    "words of BENCHMARKS.md": 3_800,
    "pages of docs": 17,
    "words of docs": 21_780,
}
GENERATED = {"models.md", "status.md", "templates.md"}  # pages made by tests


def measure() -> dict[str, int]:
    """The tree as it is, by the names of BOUNDS."""
    source = [lines(file) for file in tracked("*.py", ":!tests", ":!bench", ":!docs")]
    pages = [page for page in tracked("docs/*.md") if page.name not in GENERATED]
    commands = leaves(typer.main.get_command(app))
    roots = ("ARCHITECTURE.md", "README.md", "CHANGELOG.md", "BENCHMARKS.md")
    return {
        "lines of source": sum(source),
        "modules of source": len(source),
        "lines of the longest module": max(source),
        "circles of folders": len(circles()),
        "lines of tests": sum(lines(file) for file in tracked("tests/*.py")),
        "commands": len(commands),
        "parameters of commands": sum(len(command.params) for command in commands),
        **{f"words of {name}": words(ROOT / name) for name in roots},
        "pages of docs": len(pages),
        "words of docs": sum(words(page) for page in pages),
    }


def tracked(*patterns: str) -> list[Path]:
    """Files of the checkout that git knows."""
    listed = subprocess.run(
        ["git", "ls-files", "-z", *patterns], cwd=ROOT, capture_output=True, text=True, check=True
    )
    found = [ROOT / name for name in listed.stdout.split("\0") if name]
    return [file for file in found if file.exists()]


def lines(file: Path) -> int:
    return len(file.read_text().splitlines())


def words(file: Path) -> int:
    return len(file.read_text().split())


def leaves(command: Any) -> list[Any]:
    """The commands of a group and of its groups."""
    inner = getattr(command, "commands", None)
    return [command] if inner is None else [leaf for one in inner.values() for leaf in leaves(one)]


def circles() -> list[list[str]]:
    """Folders that import each other, over others too: `runtime/pool` and the like.

    Imports within functions and under TYPE_CHECKING count. A module that lies directly in
    `cray_agents/`, `tools/`, `runtime/` or `trainers/` stands for itself. The facade and the entry
    point do not count.
    """
    needs: defaultdict[str, set[str]] = defaultdict(set)
    for file in modules():
        if (name := dotted(file)) not in ("cray_agents", "cray_agents.__main__"):
            needs[folder(name)] |= {
                folder(module) for module in imported(file)
                if module.startswith("cray_agents.") and is_module(module)
            }  # fmt: skip
    reached = {name: reach(name, needs) for name in needs}
    circles = {
        frozenset(other for other in reached[name] if name in reached.get(other, ()))
        for name in reached
        if name in reached[name]
    }
    return sorted(sorted(circle) for circle in circles if len(circle) > 1)


def folder(module: str) -> str:
    _, *parts = module.split(".")
    return "/".join(parts[:2] if parts[0] in LINKED else ["cray_agents", *parts][:2])


def reach(name: str, needs: dict[str, set[str]]) -> set[str]:
    """Whatever a folder imports, over others too."""
    found: set[str] = set()
    left = [name]
    while left:
        fresh = needs.get(left.pop(), set()) - found
        found |= fresh
        left += fresh
    return found


def main() -> None:
    """Print each measure beside its bound."""
    for name, value in measure().items():
        print(f"{name:<32} {value:>8,} of {BOUNDS[name]:>8,}")
    for circle in circles():
        print("import each other:", ", ".join(circle))


if __name__ == "__main__":
    main()
