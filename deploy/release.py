"""A release: sdist, wheel, image context, chart and docs, each tried: `make release`.

    .venv/bin/python deploy/release.py [FOLDER]
    .venv/bin/python deploy/release.py --context FOLDER

They are made of the commit that is checked out and of the built dashboard, have the commit's time,
and lie with SHA256SUMS in FOLDER, or in dist/. With --context only what the Containerfile needs is
written, for build.sh. Prints the version.
"""

import gzip
import hashlib
import io
import json
import os
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
import tomllib
import venv
from collections.abc import Sequence
from pathlib import Path

import yaml

ROOT = Path(__file__).resolve().parents[1]
CHART = "deploy/chart"
DASHBOARD = "runtime/dashboard/static"
BUILD = "from setuptools import build_meta; import sys; build_meta.build_{}(sys.argv[1])"
REQUIREMENTS = ("cpu.txt", "gpu.txt", "licences.py", "setup.sh")  # of the image
#: Where a version is said, beside pyproject.toml. In the changelog the newest comes first.
STATED = {
    "CHANGELOG.md": r"(?s)\A.*?\n## (\S+),",
    "mkdocs.yml": r"(?m)^copyright: cray-agents (\S+)$",
    f"{CHART}/Chart.yaml": r"(?m)^(?:version|appVersion): (\S+)$",
}


class ReleaseError(Exception):
    """No release can be made; the message says why, and what to do."""


def agreed_version(root: Path) -> str:
    """Return the version that all places say. Raises ReleaseError: it names those that differ."""
    version = str(tomllib.loads((root / "pyproject.toml").read_text())["project"]["version"])
    wrong = [
        f"{name} says {' and '.join(found) or 'none'}"
        for name, pattern in STATED.items()
        if {*(found := re.findall(pattern, (root / name).read_text()))} != {version}
    ]
    expect(not wrong, f"pyproject.toml says version {version}, but {', '.join(wrong)}")
    return version


def source(folder: Path) -> Path:
    """Write the commit's files and the dashboard. Raises ReleaseError if either is not complete."""
    changed = run("git", "status", "--porcelain")
    expect(not changed, f"a release is made of a commit; commit, or remove, first:\n{changed}")
    expect((ROOT / DASHBOARD / "index.html").exists(), "the dashboard is not built: run `make ui`")
    packed = subprocess.run(["git", "archive", "HEAD"], cwd=ROOT, capture_output=True, check=True)
    with tarfile.open(fileobj=io.BytesIO(packed.stdout)) as tar:
        tar.extractall(folder, filter="data")
    shutil.copytree(ROOT / DASHBOARD, folder / DASHBOARD)
    return folder


def build(kind: str, tree: Path, into: Path) -> Path:
    """Build the sdist or the wheel of a tree by setuptools."""
    into.mkdir(exist_ok=True)
    run(sys.executable, "-P", "-c", BUILD.format(kind), into, at=tree)
    [made] = into.iterdir()
    return made


def pack(folder: Path, name: str, archive: Path) -> Path:
    """Pack a folder, and what its links lead to, so that the bytes depend on its content alone."""

    def plain(member: tarfile.TarInfo) -> tarfile.TarInfo:
        mode = 0o755 if member.mode & 0o100 else 0o644
        return member.replace(mtime=epoch, mode=mode, uid=0, gid=0, uname="", gname="", deep=False)

    epoch = int(os.environ["SOURCE_DATE_EPOCH"])
    shutil.copytree(folder, followed := archive.with_suffix(".followed"))
    with (
        archive.open("wb") as file,
        gzip.GzipFile("", "wb", fileobj=file, mtime=epoch) as packed,
        tarfile.open(fileobj=packed, mode="w") as tar,
    ):
        for path in sorted(each for each in followed.rglob("*") if each.is_file()):
            tar.add(path, name / path.relative_to(followed), filter=plain)
    return archive


def unpack(archive: Path, into: Path) -> Path:
    """Return the one folder of an archive."""
    with tarfile.open(archive) as tar:
        tar.extractall(into, filter="data")
    [folder] = into.iterdir()
    return folder


def context(wheel: Path, folder: Path) -> Path:
    """Write the context of the Containerfile."""
    shutil.copytree(ROOT / "deploy" / "images", folder, dirs_exist_ok=True)
    for file in (*(ROOT / "requirements" / name for name in REQUIREMENTS), wheel):
        place = folder if file == wheel else folder / "requirements"
        place.mkdir(exist_ok=True)
        shutil.copy2(file, place)
    return folder


def try_wheel(wheel: Path, version: str, work: Path) -> str:
    """Install it, with what it asks for, and return what it says of its version."""
    venv.create(work, with_pip=True)
    run(work / "bin" / "pip", "install", "--quiet", wheel, at=work)
    said = run(work / "bin" / "cray-agents", "--version", at=work).strip()
    expect(said == f"cray-agents {version}", f"{wheel.name} says {said}")
    return f"installed, it says {said}"


def try_chart(chart: Path) -> str:
    """Lint it and render its examples by Helm's engine, as tests/test_chart.py does."""
    run(ROOT / "requirements" / "environment.sh", "chart")
    examples = [yaml.safe_load(path.read_text()) for path in chart.glob("examples/*.yaml")]
    python, script = ROOT / ".venv-chart/bin/python", ROOT / "tests/support/chart/render.py"
    rendered = json.loads(run(python, script, chart, text=json.dumps(examples)))
    wrong = [one.get("refused") or one["faults"] for one in rendered if one.get("faults") != []]
    expect(len(rendered) > 1 and not wrong, f"the packed chart: {wrong}")
    return f"{len(rendered)} examples rendered"


def try_docs(site: Path, version: str) -> str:
    """Follow the first page's links to files of the site, and look for the version."""
    first = (site / "index.html").read_text()
    links = {link.partition("#")[0] for link in re.findall(r'(?:href|src)="([^":]+)"', first)}
    lost = sorted(link for link in links - {""} if not (site / link).exists())
    expect(len(links) > 10 and not lost, f"links of the site lead nowhere: {lost}")
    expect(f"cray-agents {version}" in first, f"the site does not say {version}")
    return f"{len(links)} links followed"


def release(version: str, work: Path) -> dict[Path, str]:
    """Make and try all artefacts; return their files, and what each trial found."""
    tree, name = source(work / "source"), f"cray_agents-{version}"
    wheel = build("wheel", tree, work / "wheel")
    unpacked = unpack(build("sdist", tree, work / "sdist"), work / "unpacked")
    sdist = pack(unpacked, name, work / f"{name}.tar.gz")
    again = build("wheel", unpack(sdist, work / "again"), work / "of-sdist")
    expect(again.read_bytes() == wheel.read_bytes(), f"{sdist.name} builds another wheel")
    tried = {wheel: try_wheel(wheel, version, work / "venv"), sdist: "it builds this wheel"}
    image = context(wheel, work / "context")
    image = pack(image, f"{name}-image", work / f"{name}-image.tar.gz")
    run("sh", "-n", unpack(image, work / "image") / "install.sh")
    tried[image] = "its install.sh can be read"
    chart = pack(tree / CHART, "cray-agents", work / f"cray-agents-{version}.tgz")
    tried[chart] = try_chart(unpack(chart, work / "chart"))
    run(sys.executable, "-P", "-m", "mkdocs", "build", "--quiet", "--site-dir", work / "site")
    docs = pack(work / "site", f"{name}-docs", work / f"{name}-docs.tar.gz")
    tried[docs] = try_docs(unpack(docs, work / "docs"), version)
    return tried


def run(*argv: object, at: Path | None = None, text: str = "") -> str:
    """Return what a program prints. Raises ReleaseError, with its words, if it fails."""
    words = [str(word) for word in argv]
    done = subprocess.run(words, cwd=at or ROOT, input=text, capture_output=True, text=True)
    said = f"{done.stdout[-2000:]}{done.stderr[-4000:]}"
    expect(done.returncode == 0, f"{' '.join(words)[:300]} failed:\n{said}")
    return done.stdout


def expect(holds: bool, otherwise: str) -> None:
    """Raise ReleaseError with this text unless something holds."""
    if not holds:
        raise ReleaseError(otherwise)


def main(arguments: Sequence[str]) -> int:
    """Make a release, or a context. Returns the exit code."""
    alone = arguments[:1] == ["--context"]
    named = arguments[int(alone) :]
    folder = Path(named[0]).absolute() if named else ROOT / "dist"
    try:
        version = agreed_version(ROOT)
        os.environ.setdefault("SOURCE_DATE_EPOCH", run("git", "log", "-1", "--format=%ct").strip())
        folder.mkdir(parents=True, exist_ok=True)
        with tempfile.TemporaryDirectory() as temporary:
            work = Path(temporary)
            if alone:
                context(build("wheel", source(work / "source"), work / "wheel"), folder)
            else:
                sums = ""
                for file, found in release(version, work).items():
                    shutil.copy2(file, folder)
                    sums += f"{hashlib.sha256(file.read_bytes()).hexdigest()}  {file.name}\n"
                    print(f"{file.name}: {found}", file=sys.stderr)
                (folder / "SHA256SUMS").write_text(sums)
    except ReleaseError as error:
        print(f"error: {error}", file=sys.stderr)
        return 2
    print(version)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
