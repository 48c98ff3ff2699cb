"""Names and prose that a newcomer can read: one class a name, nouns for modules, no riddles."""

import ast
import re
from collections import defaultdict
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
FOLDERS = ("cray_agents", "runtime", "tools", "trainers")
#: Words that name nothing: as identifiers they send the reader to the code that fills them.
VAGUE = {"told", "held", "needed", "said", "settled", "found", "asked", "shown", "there", "where"}
VAGUE |= {"others", "parts"}
#: Fields on disk, over HTTP, or in calls of users, whose names are promises.
KEPT = {
    "cray_agents/records.py": {"shown"},  # ToolCall.shown
    "cray_agents/queries.py": {"where"},  # DatasetRecipe.where
    "cray_agents/loop/live/schedule.py": {"where"},  # Watch(where=...)
    "cray_agents/loop/warmup.py": {"shown"},  # the journal's entry
    "runtime/gateway/routes/files.py": {"parts"},  # an upload's
    "trainers/job/failures/rank_monitor.py": {"where"},  # BadEnd, in a job's events
}
#: Words of the field, though they end in -ing.
NOUNS = {"fine_tuning", "testing", "routing", "sampling", "paging"}
RIDDLES = {
    "What",
    "Who",
    "Whose",
    "Those",
    "Whether",
    "How",
    "Where",
    "Which",
    "When",
    "That",
    "It",
}


def files() -> list[Path]:
    return [
        file
        for folder in FOLDERS
        for file in sorted((ROOT / folder).glob("**/*.py"))
        if not any(parent.is_symlink() for parent in file.parents)
    ]


def place(file: Path) -> str:
    return str(file.relative_to(ROOT))


TREES = {place(file): ast.parse(file.read_text()) for file in files()}


def test_a_class_name_stands_once() -> None:
    places = defaultdict(list)
    for name, tree in TREES.items():
        for node in ast.walk(tree):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(name)
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_modules_are_nouns_and_their_names_stand_twice_at_most() -> None:
    places = defaultdict(list)
    for file in files():
        if file.stem != "__init__":
            places[file.stem].append(place(file))
    assert not {stem: where for stem, where in places.items() if len(where) > 2}
    assert not [stem for stem in places if stem.endswith("ing") and stem not in NOUNS]


@pytest.mark.parametrize("name", TREES)
def test_identifiers_say_what_they_hold(name: str) -> None:
    vague = [f"{line}: {word}" for line, word in defined(TREES[name])
             if word.strip("_").lower() in VAGUE - KEPT.get(name, set())]  # fmt: skip
    assert vague == []


def defined(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Identifiers that a module defines: functions, classes, parameters, variables, attributes."""
    for node in ast.walk(tree):
        match node:
            case ast.FunctionDef() | ast.AsyncFunctionDef() | ast.ClassDef():
                yield node.lineno, node.name
            case ast.arg():
                yield node.lineno, node.arg
            case ast.Name(ctx=ast.Store()):
                yield node.lineno, node.id
            case ast.Attribute(ctx=ast.Store()):
                yield node.lineno, node.attr


@pytest.mark.parametrize("name", TREES)
def test_docstrings_name_their_subject(name: str) -> None:
    riddles = []
    for node in ast.walk(TREES[name]):
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and re.split(r"\W", text)[0] in RIDDLES:
                riddles.append(f"{getattr(node, 'name', 'module')}: {text.splitlines()[0]}")
    assert riddles == []


def test_heads_of_tests_name_their_subject() -> None:
    heads = {place(file): ast.get_docstring(ast.parse(file.read_text())) or ""
             for file in (ROOT / "tests").glob("**/*.py")}  # fmt: skip
    assert {name: head for name, head in heads.items() if re.split(r"\W", head)[0] in RIDDLES} == {}
