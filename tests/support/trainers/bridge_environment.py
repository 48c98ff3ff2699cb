"""A folder with Megatron-Bridge, for tests on CPUs also where Python is too old for it.

The wheels for Python 3.12 are unpacked without what they ask for: most of that is for GPUs, or for
Megatron-Bridge's own training loop. What its import needs beside them is written here: a stand-in
for Transformer Engine, for the one module that cannot do without, and `typing.override`, which is
new in 3.12.
On the path before site-packages, the folder's megatron-core takes the place of the pinned one.
"""

import hashlib
import shutil
import subprocess
import sys
import tempfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[3]
PINS = Path(__file__).with_name("bridge_pins.txt")
OVERRIDE = """import typing

import typing_extensions

typing.override = typing_extensions.override
"""
ENGINE = """import sys

asks = sys._getframe(1)
while "importlib" in asks.f_globals["__name__"]:
    asks = asks.f_back
if asks.f_globals["__name__"] != "megatron.bridge.peft.lora_layers":
    raise ModuleNotFoundError("a stand-in, for megatron.bridge.peft.lora_layers alone")
"""
OPERATIONS = """class ops:
    Sequential = object
"""


def bridge_folder() -> Path:
    """The folder, made once. Skips the test where the packages cannot be had."""
    digest = hashlib.sha256(PINS.read_bytes() + Path(__file__).read_bytes()).hexdigest()
    folder = ROOT / ".venv-bridge" / digest[:16]
    if folder.exists():
        return folder
    folder.parent.mkdir(exist_ok=True)
    with tempfile.TemporaryDirectory(dir=folder.parent) as temporary:
        draft = Path(temporary)
        pins = [line for line in PINS.read_text().splitlines() if not line.startswith("#")]
        source = [pin for pin in pins if pin.startswith("antlr4")]
        wheels = [pin for pin in pins if pin not in source]
        (draft / "source.txt").write_text("\n".join(source))
        (draft / "wheels.txt").write_text("\n".join(wheels))
        to = ["--target", str(draft / "made"), "--no-deps", "--require-hashes"]
        _pip(*to, "--no-build-isolation", "-r", str(draft / "source.txt"))
        for_312 = ["--python-version", "3.12", "--only-binary=:all:", "--ignore-requires-python"]
        _pip(*to, *for_312, "-r", str(draft / "wheels.txt"))
        made = draft / "made"
        (made / "sitecustomize.py").write_text(OVERRIDE)
        (made / "transformer_engine" / "pytorch").mkdir(parents=True)
        (made / "transformer_engine" / "__init__.py").write_text(ENGINE)
        (made / "transformer_engine" / "pytorch" / "__init__.py").write_text(OPERATIONS)
        shutil.rmtree(folder, ignore_errors=True)
        made.rename(folder)
    return folder


def _pip(*options: str) -> None:
    command = [sys.executable, "-m", "pip", "install", "--quiet", *options]
    done = subprocess.run(command, capture_output=True, text=True, timeout=600)
    if done.returncode != 0:
        pytest.skip(f"Megatron-Bridge cannot be had here: {done.stderr.strip()[-300:]}")
