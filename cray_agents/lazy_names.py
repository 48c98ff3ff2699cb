"""Public names of a package that are loaded when they are first used.

So that `import cray_agents` is quick and pulls in nothing heavy.
"""

import ast
import sys
from collections.abc import Callable
from importlib import import_module
from pathlib import Path
from typing import Any


def lazy_names(package: str, file: str) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` and the `__all__` of a package: the names `X` in `import X as X` of `file`.

    These are under `if TYPE_CHECKING`, where type checkers and editors read them.
    """
    places = {
        each.name: node.module
        for node in ast.walk(ast.parse(Path(file).read_bytes()))
        if isinstance(node, ast.ImportFrom) and node.module
        for each in node.names
        if each.asname == each.name
    }

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(places[name]), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, sorted(places)
