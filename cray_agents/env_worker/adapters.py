"""Adapters: their names, and the modules that are imported for them in the environment's Python."""

import importlib
import importlib.util
import sys
import sysconfig
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from cray_agents.env_worker.rollout import Adapter, UsageError

#: By name: the module beside this one, and the package that it takes.
ADAPTERS = {
    "trl": ("trl_environment", "transformers"),
    "inspect": ("inspect_task", "inspect_ai"),
    "verifiers": ("verifiers_taskset", "verifiers"),
    "openenv": ("openenv_environment", "openenv"),
}


def make_adapter(name: str, environment: str, options: Mapping[str, str]) -> Adapter:
    """Return the adapter over an environment. Raises UsageError."""
    if name not in ADAPTERS:
        raise UsageError(f"no adapter {name!r}; there are {', '.join(ADAPTERS)}")
    module, package = ADAPTERS[name]
    if importlib.util.find_spec(package) is None:
        raise UsageError(
            f"adapter {name!r} needs the package {package}, and {sys.executable} has none: "
            "name its environment with --venv"
        )
    make = importlib.import_module(f"cray_agents.env_worker.{module}").make
    try:
        made: Adapter = make(environment, options)
    except UsageError:
        raise
    except Exception as error:  # code of the user's
        library = ("<", sysconfig.get_path("stdlib"))
        frames = traceback.extract_tb(error.__traceback__)
        last = [each for each in frames if not each.filename.startswith(library)][-1]
        why = f"{type(error).__name__}: {error} ({last.filename}:{last.lineno})"
        raise UsageError(f"{environment}: {why}") from error
    return made


def load_object(reference: str) -> Any:
    """Return the object that `FILE.py:NAME` or `package.module:NAME` names. Raises UsageError."""
    source, _, name = reference.rpartition(":")
    if not source:
        raise UsageError(f"{reference!r}: write FILE.py:NAME or package.module:NAME")
    if source.endswith(".py"):
        path = Path(source).resolve()
        if not path.is_file():
            raise UsageError(f"there is no file {source}")
        loaded = sys.modules.get(path.stem)
        if loaded is None or getattr(loaded, "__file__", None) != str(path):
            spec = importlib.util.spec_from_file_location(path.stem, path)
            assert spec is not None and spec.loader is not None
            loaded = importlib.util.module_from_spec(spec)
            sys.modules[path.stem] = loaded
            sys.path.insert(0, str(path.parent))  # as when Python runs the file
            spec.loader.exec_module(loaded)
    else:
        try:
            loaded = importlib.import_module(source)
        except ModuleNotFoundError as error:
            raise UsageError(f"{source}: {error}") from None
    if not hasattr(loaded, name):
        raise UsageError(f"{source} has no {name!r}")
    return getattr(loaded, name)
