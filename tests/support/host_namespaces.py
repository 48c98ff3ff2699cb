"""Processes that stand for hosts. Each sees the shared root at a path of its own, has its own index
cache, and where the kernel allows it its own mount table and network."""

import functools
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

NAMESPACES = (["unshare", "--mount", "--net"], ["unshare", "-Ur", "--mount", "--net"])


@functools.cache
def namespaces() -> list[str]:
    """How a command is given namespaces of its own here; [] where that is not allowed."""
    for argv in NAMESPACES:
        try:
            if subprocess.run([*argv, "true"], capture_output=True).returncode == 0:
                return argv
        except FileNotFoundError:
            continue
    return []


class Host:
    """One host of several that share `root`."""

    def __init__(self, folder: Path, root: Path) -> None:
        self.mount = folder / "shared"
        self.cache = folder / "cache"
        self._root = root
        self.cache.mkdir(parents=True)
        if namespaces():
            self.mount.mkdir()
        else:
            self.mount.symlink_to(root)

    def start(self, *argv: str, **options: Any) -> "subprocess.Popen[str]":
        """Start `python ARGV...` there; `{root}` in an argument is the shared root's path."""
        command = [sys.executable, *(part.replace("{root}", str(self.mount)) for part in argv)]
        if namespaces():
            enter = 'mount --bind "$0" "$1" && shift && exec "$@"'
            command = [
                *(*namespaces(), "sh", "-c", enter, str(self._root), str(self.mount)),
                *command,
            ]
        env = {**os.environ, "CRAY_AGENTS_CACHE": str(self.cache), **options.pop("env", {})}
        return subprocess.Popen(command, env=env, text=True, **options)
