"""Public names of a package that are loaded when they are first used.

So that `import cray_agents` is quick and pulls in nothing heavy.
"""

import sys
from collections.abc import Callable, Mapping, Sequence
from importlib import import_module
from typing import Any


def lazy_names(
    package: str, modules: Mapping[str, Sequence[str]]
) -> tuple[Callable[[str], Any], list[str]]:
    """The `__getattr__` and the `__all__` of a package.

    `modules`: the names that each module of `cray_agents` has.
    """
    places = {name: module for module, names in modules.items() for name in names}

    def load(name: str) -> Any:
        if name not in places:
            raise AttributeError(f"module {package!r} has no attribute {name!r}")
        value = getattr(import_module(f"cray_agents.{places[name]}"), name)
        setattr(sys.modules[package], name, value)
        return value

    return load, sorted(places)
