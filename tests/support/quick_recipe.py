"""Quick recipe: run a recipe of the cookbook with `--quick`, in this process: imports take long."""

import io
import runpy
import sys
from contextlib import redirect_stdout
from pathlib import Path

import pytest


def quick_lines(recipe: Path, folder: Path, *words: str) -> list[str]:
    """Return the lines that a recipe prints in a folder."""
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(io.StringIO()) as printed:
        patch.setattr(sys, "argv", [str(recipe), "--quick", *words])
        patch.chdir(folder)
        runpy.run_path(str(recipe), run_name="__main__")
    return printed.getvalue().splitlines()
