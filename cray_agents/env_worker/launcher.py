"""Launcher of the environment worker, as a script: `PYTHON launcher.py --adapter trl --env ...`.

`cray-agents env-worker` starts it with the Python of the environment's own venv, where cray-agents
is not installed. So it makes `cray_agents` importable from the folder that it lies in, without
putting any folder on the path, where its other packages would shadow the environment's.
"""

import importlib.util
import sys
from pathlib import Path


def provide_package() -> None:
    """Make `cray_agents` importable: this one, whatever else is installed."""
    folder = Path(__file__).resolve().parents[1]
    script = str(Path(__file__).resolve().parent)
    sys.path[:] = [entry for entry in sys.path if entry != script]
    spec = importlib.util.spec_from_file_location(
        "cray_agents", folder / "__init__.py", submodule_search_locations=[str(folder)]
    )
    assert spec is not None and spec.loader is not None
    package = importlib.util.module_from_spec(spec)
    sys.modules["cray_agents"] = package
    spec.loader.exec_module(package)


if __name__ == "__main__":
    provide_package()
    from cray_agents.env_worker.leased_runs import main

    sys.exit(main(sys.argv[1:]))
