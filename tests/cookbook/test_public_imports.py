"""Imports of the cookbook: the facade, its four packages and the tools, nothing deeper."""

import ast
import importlib
from pathlib import Path

import pytest

import cray_agents

COOKBOOK = Path(__file__).parents[2] / "cookbook"
FILES = sorted(COOKBOOK.glob("**/*.py"))


def problem(module: str, names: list[str]) -> str | None:
    """Tell what is not public of an import; None if all is."""
    package, *rest = module.split(".")
    if package != "cray_agents":
        return None
    if not rest:
        hidden = [name for name in names if name not in cray_agents.__all__]
        return f"cray_agents does not export {', '.join(hidden)}" if hidden else None
    if rest[1:] == [] and rest[0] in ("agent", "loop", "testing", "training"):
        known = importlib.import_module(module).__all__
        hidden = [name for name in names if name not in known]
        return f"{module} does not export {', '.join(hidden)}" if hidden else None
    public = rest[0] == "tools" and len(rest) <= 2
    return None if public else f"{module} is no module for users"


@pytest.mark.parametrize("file", FILES, ids=lambda file: str(file.relative_to(COOKBOOK)))
def test_recipes_import_what_is_public(file: Path) -> None:
    problems = []
    for node in ast.walk(ast.parse(file.read_text())):
        match node:
            case ast.ImportFrom(module=str(module), names=names):
                problems.append(problem(module, [alias.name for alias in names]))
            case ast.Import(names=names):
                problems += [problem(alias.name, []) for alias in names]
            case ast.Call(args=[ast.Constant(value=str(module)), *_]):  # import_module("...")
                problems.append(problem(module, []))
    assert [each for each in problems if each] == []


def test_deeper_imports_are_noticed() -> None:
    assert problem("cray_agents", ["Agent", "Home"]) == "cray_agents does not export Home"
    deeper = ("cli", "paths", "runtime.store", "tools.verifier.judge", "testing.more")
    assert all(problem(f"cray_agents.{module}", []) for module in deeper)
    assert problem("cray_agents.tools.sandbox", ["Sandbox"]) is None
    assert len(FILES) == 9
