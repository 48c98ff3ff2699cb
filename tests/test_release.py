"""deploy/: versions agree, archives depend on content alone, the demo runs in the image.

`make soak ARGS=release` makes a release, which tries each artefact itself; tests/test_packages.py
tests sdist and wheel. `make soak ARGS=image` needs root, buildah, debootstrap and podman.
"""

import importlib.metadata
import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
from pathlib import Path

import pytest
from packaging.requirements import Requirement

from cray_agents.config.job_section import JobSettings
from cray_agents.ports import Command
from cray_agents.runtime.scheduler.batch_script import batch_script
from deploy import release
from deploy.release import ROOT, STATED, ReleaseError

VERSION = release.agreed_version(ROOT)
IMAGE = f"localhost/cray-agents:{VERSION}"
#: As the chart runs it, but in the network of this host.
RUN = (
    *("podman", "run", "--rm", "--network=host", "--shm-size=1g", "--user=1000:1000"),
    *("--read-only", "--read-only-tmpfs=false", "--tmpfs=/tmp:mode=1777"),
    *("--cap-drop=all", "--security-opt=no-new-privileges"),
)


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    """The files that say a version."""
    for file in ("pyproject.toml", *STATED):
        (tmp_path / "tree" / file).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / file, tmp_path / "tree" / file)
    return tmp_path / "tree"


@pytest.mark.parametrize("name", STATED)
@pytest.mark.parametrize("instead", ["9.9.9", ""])
def test_a_version_that_differs_is_named(tree: Path, name: str, instead: str) -> None:
    assert release.agreed_version(tree) == VERSION
    text = (tree / name).read_text()
    (tree / name).write_text(text.replace(VERSION, instead))
    with pytest.raises(ReleaseError) as refused:
        release.agreed_version(tree)
    said = f"pyproject.toml says version {VERSION}, but {name} says {instead or 'none'}"
    assert str(refused.value).startswith(said)


def test_a_release_is_of_a_commit(
    tree: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(release, "ROOT", tree)
    git = ["git", "-c", "user.name=a", "-c", "user.email=a@example.org", "-C", str(tree)]
    for words in (["init", "-q"], ["add", "."], ["commit", "-qm", "all"]):
        subprocess.run([*git, *words], check=True)
    out = tree.with_name("out")
    assert release.main(["--context", str(out)]) == 2
    assert "run `make ui`" in capsys.readouterr().err
    (tree / "new.py").write_text("")
    assert release.main([str(out)]) == 2
    said = capsys.readouterr().err
    assert "commit, or remove, first" in said and "new.py" in said
    assert list(out.iterdir()) == []


def test_an_archive_depends_on_content_alone(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SOURCE_DATE_EPOCH", "1700000000")
    archives = []
    for name, mode, time in (("a", 0o600, 1), ("b", 0o664, 2)):
        folder = tmp_path / name
        (folder / "one").mkdir(parents=True)
        for path in (folder / "one" / "z.txt", folder / "a.txt"):
            path.write_text(path.name)
            path.chmod(mode)
            os.utime(path, (time, time))
        (folder / "link").symlink_to("one")
        archives.append(release.pack(folder, "top", tmp_path / f"{name}.tgz"))
    assert archives[0].read_bytes() == archives[1].read_bytes()
    found = release.unpack(archives[0], tmp_path / "unpacked")
    assert found.name == "top" and not (found / "link").is_symlink()
    assert (found / "link" / "z.txt").read_text() == "z.txt"


def test_the_images_context_is_whole(tmp_path: Path) -> None:
    wheel = tmp_path / "cray_agents-1-py3-none-any.whl"
    wheel.write_text("wheel")
    made = release.context(wheel, tmp_path / "context")
    asked = set(re.findall(r'\$context"?/([\w./*-]+)', (made / "install.sh").read_text()))
    assert {"requirements/cpu.txt", "cray_agents-*.whl", "sbom.py"} <= asked
    assert [name for name in asked if not list(made.glob(name))] == []
    _, text = (made / "Containerfile").read_text().split("\nARG BASE\n")  # no default
    assert re.search(r"\nRUN .* sh /mnt/install.sh\n(.*\n)*USER 1000:1000\n", text)


@pytest.mark.parametrize("python", ["3.11", "3.12", "3.13"])
def test_the_images_pins_are_whole(python: str) -> None:
    """They are installed with --no-deps: nothing else says that a Python wants one more."""
    pins = re.findall(r"^([\w.-]+)==", (ROOT / "requirements/cpu.txt").read_text(), re.MULTILINE)
    known = {*pins, "torch", "torchvision", "torchaudio", "torchcodec"}  # these are left out
    asked = [Requirement(line) for pin in pins for line in importlib.metadata.requires(pin) or ()]
    where = {"python_version": python, "python_full_version": f"{python}.0", "extra": ""}
    names = {one.name for one in asked if one.marker is None or one.marker.evaluate(where)}
    assert {re.sub(r"[-_.]+", "-", name).lower() for name in names} <= known


def test_jobs_start_in_the_image_by_its_python() -> None:
    """The section of docs/cluster.md for pyxis, and for apptainer, with the image's own Python."""
    page = (ROOT / "docs" / "cluster.md").read_text()
    (section,) = re.findall(r"^\[job\]\n.*?(?=^```)", page, re.MULTILINE | re.DOTALL)
    (python,) = re.findall(r'`python = "(.*?)"` in `\[job.container\]`', page)
    assert f"venv={Path(python).parents[1]} " in (ROOT / "deploy/images/install.sh").read_text()
    container = tomllib.loads(section)["job"]["container"] | {"python": python}
    command = Command(name="t", argv=[sys.executable, "-m", "train"], directory="/d", log="/l")
    starts = {"pyxis": ("enroot import -o", "--container-image="), "apptainer": ("build", " ")}
    for runtime, (line, option) in starts.items():
        (image,) = re.findall(rf"{line} (/images/\S+)", page)
        chosen = container | {"runtime": runtime, "image": image}
        settings = JobSettings.model_validate({"container": chosen})
        script = batch_script(command, Path("/l"), settings=settings)
        (start,) = [line for line in script.splitlines() if line.startswith("srun ")]
        assert start.endswith(f"{python} -m train &") and f"{option}{image} " in start
        assert ("apptainer exec" in start) == (runtime == "apptainer")


def test_links_of_the_site_are_followed(tmp_path: Path) -> None:
    names = [f"{n}.html" for n in range(12)]
    (tmp_path / "index.html").write_text(
        "cray-agents 1.0" + "".join(f'<a href="{n}#a">' for n in names)
    )
    for name in names:
        (tmp_path / name).write_text("")
    release.try_docs(tmp_path, "1.0")
    with pytest.raises(ReleaseError, match=r"does not say 2\.0"):
        release.try_docs(tmp_path, "2.0")
    (tmp_path / "3.html").unlink()
    with pytest.raises(ReleaseError, match=r"\['3\.html'\]"):
        release.try_docs(tmp_path, "1.0")


@pytest.mark.skipif(os.environ.get("CRAY_TEST_RELEASE") != "1", reason="make soak")
def test_a_release_is_made_and_each_artefact_tried(tmp_path: Path) -> None:
    """In a clone, for a release is of a commit, and other campaigns change this tree."""
    clone, out = tmp_path / "clone", tmp_path / "out"
    ran("git", "clone", "--quiet", ROOT, clone)
    (clone / ".git/info/exclude").write_text(".venv\n")
    (clone / ".venv").symlink_to(sys.prefix)
    shutil.copytree(ROOT / release.DASHBOARD, clone / release.DASHBOARD)
    argv = [str(clone / ".venv/bin/python"), "deploy/release.py", str(out)]
    done = subprocess.run(argv, cwd=clone, capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"{VERSION}\n"), done.stderr
    print(done.stderr, *(f"{file.stat().st_size:>11,} {file.name}\n" for file in out.iterdir()))
    name, examples = f"cray_agents-{VERSION}", len([*(ROOT / release.CHART).glob("examples/*")])
    tried = dict(line.split(": ", 1) for line in done.stderr.splitlines())
    links = tried.pop(f"{name}-docs.tar.gz").removesuffix(" links followed")
    assert int(links) > 10 and tried == {
        f"{name}-py3-none-any.whl": f"installed, it says cray-agents {VERSION}",
        f"{name}.tar.gz": "it builds this wheel",
        f"{name}-image.tar.gz": "its install.sh can be read",
        f"cray-agents-{VERSION}.tgz": f"{examples} examples rendered",
    }
    sums = ran("sha256sum", "--check", "SHA256SUMS", at=out)
    assert sums.count(": OK\n") == 5 == len([*out.iterdir()]) - 1


@pytest.mark.skipif(os.environ.get("CRAY_TEST_IMAGE") != "1", reason="make soak")
def test_the_demo_runs_in_the_image(tmp_path: Path) -> None:
    """It has a gateway, a replica, training jobs and, in a private Slurm, slurmd.

    The same commit, base and packages make the same image.
    """
    ran("deploy/images/build.sh")
    first = json.loads(ran("buildah", "inspect", "--type=image", IMAGE))
    base, wheels = "BASE=localhost/cray-agents-base", f"--volume={ROOT}/build/wheels:/wheels:ro"
    ran("deploy/images/build.sh", f"--build-arg={base}", "--build-arg=PIP_NO_INDEX=1", wheels)
    again = json.loads(ran("buildah", "inspect", "--type=image", IMAGE))
    layers, others = (found["OCIv1"]["rootfs"]["diff_ids"] for found in (first, again))
    assert layers == others and first["FromImageID"] == again["FromImageID"]
    config, revision = first["OCIv1"]["config"], ran("git", "rev-parse", "HEAD").strip()
    told = {"title": "cray-agents", "licenses": "Apache-2.0", "version": VERSION}
    labels = {f"org.opencontainers.image.{key}": value for key, value in told.items()}
    labels |= {"org.opencontainers.image.revision": revision, "cray-agents.device": "cpu"}
    assert labels.items() <= config["Labels"].items() and config["User"] == "1000:1000"
    root = tmp_path / "root"
    root.mkdir()
    os.chown(root, 1000, 1000)
    words = ["cray-agents", "--json", "--home", "/shared/demo", "demo", "--quick"]
    result = json.loads(ran(*RUN, f"--volume={root}:/shared", IMAGE, *words))
    names = {part: result[part]["name"] for part in ("engine", "trainer", "scheduler")}
    assert names == {"engine": "vllm", "trainer": "megatron-core", "scheduler": "slurm"}
    assert [one["iteration"] for one in result["iterations"]] == [0, 1, 2]
    sbom = json.loads(ran(*RUN, IMAGE, "cat", config["Labels"]["cray-agents.sbom"]))
    named = {one["bom-ref"].partition("?")[0] for one in sbom["components"]}
    pins = (ROOT / "requirements" / "cpu.txt").read_text().lower()
    for name, version in re.findall(r"^([a-z0-9][\w.-]*)\S*==(\S+)", pins, re.MULTILINE):
        assert f"pkg:pypi/{name}@{version}" in named
    assert len(named) == len(sbom["components"]) > 300
    no_key = ("test", "!", "-e", "/etc/munge/munge.key")
    ran("podman", "run", "--rm", "--network=none", "--user=0", IMAGE, *no_key)
    ran("buildah", "rmi", IMAGE, "localhost/cray-agents-base")


def ran(*argv: object, at: Path = ROOT) -> str:
    done = subprocess.run([str(word) for word in argv], cwd=at, capture_output=True, text=True)
    assert done.returncode == 0, done.stdout[-2000:] + done.stderr[-4000:]
    return done.stdout
