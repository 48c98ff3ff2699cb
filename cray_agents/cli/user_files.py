"""Files of users: what FILE.py:NAME and MODULE:NAME mean."""

import importlib
import importlib.util
import sys
import sysconfig
import traceback
from pathlib import Path
from types import ModuleType
from typing import Any, TypeVar

from cray_agents.errors import BadInput

T = TypeVar("T")


def load(file: Path) -> ModuleType:
    """Import a user's file from anywhere, with its own folder importable. Raises BadInput."""
    if not file.is_file():
        raise BadInput(f"{file}: no such file", param="file")
    sys.path.insert(0, str(file.resolve().parent))
    name = "user_" + "".join(c if c.isalnum() else "_" for c in file.stem)
    spec = importlib.util.spec_from_file_location(name, file)
    if spec is None or spec.loader is None:
        raise BadInput(f"{file} is not a Python file", param="file")
    module = importlib.util.module_from_spec(spec)
    sys.modules[name] = module
    try:
        spec.loader.exec_module(module)
    except SyntaxError as error:
        place = f"{error.filename or file}:{error.lineno or 1}"
        raise BadInput(f"{place}: {error.msg}", param="file") from error
    except Exception as error:  # the edge to the author's code
        raise BadInput(_describe(error, file), param="file") from error
    return module


def _describe(error: Exception, file: Path) -> str:
    """Tell an error of the author's code, with the line that raised it and those that led there.

    Raises the error itself if it is a package that a module of ours lacks: the caller knows which.
    """
    ours = str(Path(__file__).parents[1])
    installed = (ours, *map(sysconfig.get_path, ("stdlib", "purelib", "platlib")))
    frames = [
        frame
        for frame in traceback.extract_tb(error.__traceback__)
        if not frame.filename.startswith("<")
    ]
    if isinstance(error, ModuleNotFoundError) and frames[-1].filename.startswith(ours):
        raise error
    own = [each for each in frames if not each.filename.startswith(installed)] or frames
    lines = "".join(traceback.format_list(own)).rstrip()
    return f"{own[-1].filename}:{own[-1].lineno}: {type(error).__name__}: {error}\n{lines}"


def find(module: ModuleType, name: str, kind: type[T], file: Path) -> T:
    """Return the module's object of that name and type. Raises BadInput."""
    value = getattr(module, name, None)
    if not isinstance(value, kind):
        raise BadInput(
            f"{file} defines no `{name}` ({kind.__name__}); write: {name} = {kind.__name__}(...)",
            param=name,
        )
    return value


def find_function(target: str, param: str) -> Any:
    """Return what FILE.py:NAME or MODULE:NAME names, given as `param`. Raises BadInput."""
    place, _, name = target.rpartition(":")
    if not place or not name.isidentifier():
        raise BadInput(f"{param} {target!r}: name it as FILE.py:NAME or MODULE:NAME", param=param)
    function = getattr(_module(place, param), name, None)
    if function is None:
        raise BadInput(f"{place} has no {name!r}", param=param)
    return function


def _module(place: str, param: str) -> ModuleType:
    if place.endswith(".py"):
        return load(Path(place))
    sys.path.insert(0, str(Path.cwd()))
    try:
        return importlib.import_module(place)
    except ModuleNotFoundError as error:
        raise BadInput(f"{param}: no module {error.name!r}", param=param) from error
