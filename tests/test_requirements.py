"""The pins: each with its hashes, from no named place; which licences bind is in the docs."""

import os
import re
import signal
import subprocess
import sys
import time
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
    assert len(entries) >= 10
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


@pytest.mark.parametrize(
    ("stop", "own"), [(None, False), (signal.SIGTERM, False), (signal.SIGINT, False), (None, True)]
)
def test_no_policy_of_the_set_up_is_left(tmp_path: Path, stop: int | None, own: bool) -> None:
    """The file that keeps apt from starting services, whenever the set-up ends."""
    text, policy = (FOLDER / "setup.sh").read_text(), tmp_path / "policy-rc.d"
    function = text[text.index("apt_install_slurm() (") : text.index("install_slurm() {\n")]
    function = function.replace("/usr/sbin/policy-rc.d", str(policy))
    for name, does in {"apt-get": f"test -e {policy} && cat", "systemctl": "true"}.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{does}\n")
        (tmp_path / name).chmod(0o755)
    if own:
        policy.write_text("own")
    child = subprocess.Popen(
        ["bash", "-c", f"set -eu; slurm_packages=a; {function}\napt_install_slurm; echo on"],
        env={"PATH": f"{tmp_path}:/usr/bin:/bin"}, stdin=subprocess.PIPE, stdout=subprocess.PIPE,
        stderr=subprocess.PIPE, text=True, start_new_session=True,
    )  # fmt: skip
    until = time.monotonic() + 60
    while not policy.exists() and time.monotonic() < until:
        time.sleep(0.01)
    if stop is not None:
        os.killpg(child.pid, stop)
    out, err = child.communicate()
    assert (out == "on\n") == (stop is None), err
    assert [policy.read_text()] == ["own"] if own else not policy.exists()


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
