"""The pins: each with its hashes, from no named place; which licences bind is in the docs."""

import re
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parent.parent
FOLDER = ROOT / "requirements"
PIN = re.compile(r"[A-Za-z0-9][\w.-]*(\[[\w,-]+\])?==[\w.!+-]+( ; [^\\]+)?")
HASH = re.compile(r"--hash=sha256:[0-9a-f]{64}")


@pytest.mark.parametrize("file", sorted(FOLDER.glob("*.txt")), ids=lambda path: path.stem)
def test_every_pin_has_hashes(file: Path) -> None:
    text = "\n".join(line for line in file.read_text().splitlines() if not line.startswith("#"))
    entries = text.replace("\\\n", "").splitlines()
    assert len(entries) >= 20
    for entry in entries:
        pin, *hashes = re.split(r"\s+(?=--hash)", entry.strip())
        assert PIN.fullmatch(pin), pin
        assert hashes and all(HASH.fullmatch(one) for one in hashes), pin
    assert "://" not in text and "--index" not in text


def test_installs_demand_them() -> None:
    for script in ("setup.sh", "environment.sh"):
        text = (FOLDER / script).read_text().replace("\\\n", " ")
        lines = [line for line in text.splitlines() if re.search(r"\s-r ", line)]
        assert lines and all("--require-hashes" in line for line in lines), script


def test_licences_that_bind_are_named() -> None:
    script = [sys.executable, str(FOLDER / "licences.py"), "cpu", "dev"]
    done = subprocess.run(script, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout[:2000] + done.stderr
    rows = [line.split() for line in done.stdout.splitlines()]
    assert len(rows) > 150
    page = (ROOT / "docs" / "operations.md").read_text()
    named = page.partition("requirements/licences.py")[2][:1000]
    for kind, package, *_ in rows:
        assert kind == "permissive" or package in named, package
