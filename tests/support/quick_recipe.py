"""Quick recipe: run a recipe of the cookbook with `--quick`, as a reader would."""

import subprocess
import sys
from pathlib import Path


def quick_lines(recipe: Path, folder: Path, *words: str) -> list[str]:
    """Return the lines that a recipe prints in a folder. AssertionError if it fails."""
    done = subprocess.run(
        [sys.executable, recipe, "--quick", *words],
        cwd=folder,
        capture_output=True,
        text=True,
        timeout=900,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-3000:]
    return done.stdout.splitlines()
