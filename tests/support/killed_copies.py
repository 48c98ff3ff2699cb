"""A process that rebuilds delta checkpoints and is killed after its n-th file-system call."""

import os
import signal
import sys
import threading
from pathlib import Path
from typing import Any

import numpy  # noqa: F401  (imported before the fork, as is the next one)
import zstandard  # noqa: F401

from cray_agents.paths import Home
from cray_agents.runtime.registry.deltas import Shadows, materialize

TOUCHES = {"open", "os.mkdir", "os.rename", "os.remove", "os.rmdir", "shutil.copyfile"}


def rebuild_until(root: str, name: str, how: str, touches: int, delay: float) -> None:
    """Rebuild a checkpoint as a copy to serve, or on the root; die `delay` after so many touches.

    `touches` 0: live, and write the number of touches to `root`/touches.
    """
    home, count = Home(Path(root, "home")), 0

    def touched(event: str, arguments: tuple[Any, ...]) -> None:
        nonlocal count
        if event in TOUCHES and str(arguments[0]).startswith(root):
            count += 1
            if count == touches and delay:
                timer = threading.Timer(delay, os.kill, (os.getpid(), signal.SIGKILL))
                timer.daemon = True
                timer.start()
            elif count == touches:
                os.kill(os.getpid(), signal.SIGKILL)

    sys.addaudithook(touched)
    if how == "copy":
        Shadows(home, Path(root, "shadows")).directory(home.checkpoint(name))
    else:
        materialize(home, home.checkpoint(name))
    if not touches:
        Path(root, "touches").write_text(str(count))
