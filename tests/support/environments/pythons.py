"""Environments of Python for the frameworks whose adapters are tested: .venv-NAME, made once."""

import subprocess
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]


@cache
def made(name: str) -> Path | str:
    """The venv of requirements/NAME.txt, or the reason why it cannot be had."""
    script = ROOT / "requirements" / "environment.sh"
    done = subprocess.run([script, name], capture_output=True, text=True, timeout=1500)
    if done.returncode != 0:
        return f"no .venv-{name}: {done.stderr.strip()[-300:]}"
    return ROOT / f".venv-{name}"


def venv(name: str) -> Path:
    """The venv of requirements/NAME.txt. Skips the test where it cannot be had."""
    folder = made(name)
    if isinstance(folder, str):
        pytest.skip(folder)
    return folder
