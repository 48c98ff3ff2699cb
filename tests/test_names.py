"""Names that a newcomer can find: a class name occurs once, a module's name at most twice."""

import ast
from collections import defaultdict
from pathlib import Path

from tests.test_layers import ROOT, modules


def place(file: Path) -> str:
    return str(file.relative_to(ROOT))


def test_a_class_name_stands_once() -> None:
    places = defaultdict(list)
    for file in modules():
        for node in ast.walk(ast.parse(file.read_text())):
            if isinstance(node, ast.ClassDef):
                places[node.name].append(place(file))
    assert not {name: where for name, where in places.items() if len(where) > 1}


def test_a_module_name_stands_twice_at_most() -> None:
    places = defaultdict(list)
    for file in modules():
        if file.stem != "__init__":
            places[file.stem].append(place(file))
    assert not {stem: where for stem, where in places.items() if len(where) > 2}
