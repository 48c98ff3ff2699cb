"""A dataset builder in a forked process that kills itself at its n-th file-system call."""

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pyarrow.parquet  # noqa: F401  (imported before the fork)

from cray_agents.paths import Home
from cray_agents.queries import DatasetRecipe
from cray_agents.runtime.datasets.build import build_dataset
from cray_agents.runtime.store import Store

TOUCHES = {"open", "os.mkdir", "os.rename", "os.link", "os.remove", "os.rmdir", "os.truncate"}


def build_until(root: str, recipe: dict[str, Any], touches: int) -> None:
    """Build; die by SIGKILL just before the file system is touched for the n-th time."""
    home = Home(Path(root))
    store = Store(home)
    left = touches

    def count(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal left
        if event in TOUCHES and root in str(arguments[0]):
            left -= 1
            if left == 0:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(count)
    build_dataset(store, home, DatasetRecipe.model_validate(recipe))
