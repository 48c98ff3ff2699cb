"""Who may import whom: trainers -> runtime -> tools -> cray_agents, and nobody the other way."""

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
ORDER = ["cray_agents", "tools", "runtime", "trainers"]  # each may import those before it
LINKED = {"tools", "runtime", "trainers"}


def imports(file: Path) -> Iterator[str]:
    for node in ast.walk(ast.parse(file.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            assert node.level == 0, f"{file}:{node.lineno}: write absolute imports"
            yield node.module


def folder_of(module: str) -> str | None:
    parts = module.split(".")
    if parts[0] != "cray_agents":
        return None
    return parts[1] if len(parts) > 1 and parts[1] in LINKED else "cray_agents"


def modules() -> list[Path]:
    return [file for folder in ORDER for file in sorted((ROOT / folder).glob("**/*.py"))
            if not any(parent.is_symlink() for parent in file.parents)]  # fmt: skip


@pytest.mark.parametrize("file", modules(), ids=lambda file: str(file.relative_to(ROOT)))
def test_imports_point_down(file: Path) -> None:
    place = file.relative_to(ROOT)
    if place.parts[:2] in {("cray_agents", "__init__.py"), ("cray_agents", "cli")}:
        return  # the facade and the composition root
    above = ORDER[ORDER.index(place.parts[0]) + 1 :]
    for module in imports(file):
        assert module.split(".")[0] not in LINKED, f"{place}: write cray_agents.{module}"
        assert folder_of(module) not in above, f"{place} must not import {module}"


def test_links_stand() -> None:
    for name in LINKED:
        link = ROOT / "cray_agents" / name
        assert link.is_symlink()
        assert str(link.readlink()) == f"../{name}"


def test_no_module_is_named_like_a_dependency() -> None:
    taken = {"vllm", "torch", "transformers", "megatron", "pydantic", "openai", "tenacity", "rich"}
    assert not [file for file in modules() if file.stem in taken]


def test_import_is_light() -> None:
    """`import cray_agents` and its public names pull in nothing heavy."""
    script = (
        "import sys, cray_agents\n"
        "for name in cray_agents.__all__: getattr(cray_agents, name)\n"
        "heavy = {'torch', 'vllm', 'transformers', 'megatron', 'fastapi', 'pyarrow', 'numpy'}\n"
        "print(sorted(heavy & set(sys.modules)))"
    )
    out = subprocess.run([sys.executable, "-c", script], capture_output=True, text=True, check=True)
    assert out.stdout.strip() == "[]"
