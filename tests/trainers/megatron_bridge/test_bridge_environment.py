"""The tests of bridged models, in a folder of their own: in `make soak`, CRAY_TEST_BRIDGE=1."""

import os
import subprocess
import sys
from pathlib import Path

import pytest

from cray_agents.trainers.models.megatron_bridge.bridged_kinds import why_not_installed
from tests.support.trainers.bridge_environment import ROOT, bridge_folder

TESTS = Path(__file__).with_name("test_bridged_models.py")


@pytest.mark.skipif(
    "CRAY_TEST_BRIDGE" not in os.environ, reason="CRAY_TEST_BRIDGE=1 unpacks Megatron-Bridge"
)
@pytest.mark.skipif(why_not_installed() is None, reason="test_bridged_models.py runs by itself")
def test_bridged_models() -> None:
    folder = bridge_folder()
    done = subprocess.run(
        [sys.executable, "-m", "pytest", "-n", "0", "-p", "no:cacheprovider", str(TESTS)],
        cwd=ROOT,
        env={**os.environ, "PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
        timeout=3000,
    )
    print(done.stdout[-3000:])
    assert done.returncode == 0, done.stdout[-6000:] + done.stderr[-2000:]
    assert " passed" in done.stdout and " skipped" not in done.stdout
