"""`cray-agents up` on real vLLM, on a machine that has no Slurm: served, shown, asked, ended."""

import asyncio
import json
import os
import shutil
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator
from contextlib import suppress
from importlib.metadata import packages_distributions
from pathlib import Path
from typing import Any

import openai
import pytest

from cray_agents.config import load_config
from cray_agents.errors import EngineUnavailable
from cray_agents.paths import Home
from cray_agents.processes import alive, python
from cray_agents.runtime.store import Store
from cray_agents.server.platform_process import client, serving
from cray_agents.trainers.models.seed_model import make_seed_model

pytestmark = pytest.mark.vllm

AGENT = 'from cray_agents import Agent\nagent = Agent(name="a", model="tiny", max_tokens=8)\n'


def without_slurm(folder: Path) -> str:
    """A PATH on which Slurm's programs are not to be found."""
    folder.mkdir()
    for directory in os.environ["PATH"].split(os.pathsep):
        for program in Path(directory).glob("*") if Path(directory).is_dir() else []:
            slurm = program.name.startswith(("slurm", "munge", "sinfo", "sbatch", "squeue"))
            if not slurm and not (folder / program.name).exists():
                (folder / program.name).symlink_to(program)
    assert shutil.which("slurmctld", path=str(folder)) is None
    return str(folder)


class Site:
    """A folder with a model, a root, and a command line that finds no Slurm."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.model = folder / "model"
        make_seed_model(self.model, seed=0, corpus=["hello there", "What is 1 + 1?"])
        (folder / "agent.py").write_text(AGENT)
        self.env = {**os.environ, "PATH": without_slurm(folder / "bin")}
        self.marks = folder / "marks"
        self.foreign = folder / "foreign"  # a folder of somebody whose files nobody is to run
        self.foreign.mkdir()
        packages = filter(str.isidentifier, packages_distributions())
        for name in {*sys.stdlib_module_names, *packages, "sitecustomize"}:
            mark = f"open({str(self.marks)!r}, 'a').write(__name__ + '\\n')\nraise ImportError\n"
            (self.foreign / f"{name}.py").write_text(mark)

    def cli(self, *words: object, cwd: Path | None = None) -> subprocess.CompletedProcess[str]:
        argv = python("-m", "cray_agents", *map(str, words), "--home", str(self.home))
        return subprocess.run(argv, cwd=cwd or self.folder, env=self.env, capture_output=True,
                              text=True, timeout=200)  # fmt: skip

    def status(self) -> dict[str, Any]:
        found: dict[str, Any] = json.loads(self.cli("status", "--json").stdout)
        return found


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Site]:
    site = Site(tmp_path_factory.mktemp("up"))
    ways = ("--port", 0, "--gateways", 2, "--detach")
    done = site.cli("up", "--model", site.model, "--name", "tiny", *ways, cwd=site.foreign)
    assert done.returncode == 0, done.stderr + (site.home / "logs" / "platform.log").read_text()
    yield site
    site.cli("down")


def test_status(site: Site) -> None:
    status = site.status()
    assert status["running"] is True
    assert status["scheduler"]["name"] == "local"
    assert "not installed" in status["scheduler"]["reason"]
    assert [(r["version"], r["state"]) for r in status["replicas"]] == [("tiny@1", "serving")]
    log = (site.home / "logs" / "platform.log").read_text()
    [told] = [line for line in log.splitlines() if "replicas: " in line]
    assert "replicas: float32 (" in told and "1024 tokens of context (the model's)" in told


def test_a_platform_has_the_settings_that_it_was_started_with(tmp_path: Path) -> None:
    settings = {"home": tmp_path, "host": "127.0.0.2", "slurm_options": ["--comment=a b"]}
    with serving(load_config(settings), name="", replicas=0) as info:
        assert info["url"].startswith("http://127.0.0.2:")


def test_a_second_platform_on_the_root_is_refused(site: Site) -> None:
    done = site.cli("up", "--name", "tiny", "--port", 0)
    assert done.returncode == 2
    assert "runs on" in done.stderr
    assert "cray-agents down" in done.stderr


def gateways(url: str, count: int) -> set[int]:
    """The pids of so many processes at one port: the kernel chooses one for each connection."""
    found: set[int] = set()
    deadline = time.monotonic() + 100
    while len(found) < count:
        assert time.monotonic() < deadline, found
        with suppress(ConnectionError, urllib.error.URLError):  # of one that was just killed
            with urllib.request.urlopen(f"{url}/metrics", timeout=120) as answer:
                label = answer.read().decode().partition('gateway="')[2].partition('"')[0]
            pid = int(label.rpartition(":")[2])
            found |= {pid} if alive(pid) else set()
    return found


def test_two_gateways_at_the_port_answer_and_a_killed_one_comes_again(site: Site) -> None:
    status = site.status()
    url, controller = status["url"], status["pid"]
    (further,) = gateways(url, 2) - {controller}
    os.kill(further, signal.SIGKILL)
    (again,) = gateways(url, 2) - {controller}
    assert again != further
    asked: Any = [{"role": "user", "content": "hello"}]
    for number in range(20):  # each by a connection of its own
        with openai.OpenAI(base_url=f"{url}/runs/run_of_both/v1", api_key="none") as client:
            answer = client.chat.completions.create(model="tiny", messages=asked, max_tokens=5)
            assert answer.model == "tiny@1", number
    assert len(Store(Home(site.home)).run("run_of_both").calls) == 20
    texts = [(site.home / "logs" / name).read_text() for name in ("gateway-1.log", "platform.log")]
    assert "Traceback" not in "".join(texts)


def test_no_file_of_the_folder_where_it_was_started_is_run(site: Site) -> None:
    """Neither by the platform, its gateways, worker and vLLM, nor by what requests start."""
    url = site.status()["url"]
    with urllib.request.urlopen(f"{url}/v1/trajectories/export?format=jsonl") as answer:
        assert answer.read()
    body = json.dumps({"loop": "l", "tokenizer": str(site.model)}).encode()
    request = urllib.request.Request(f"{url}/v1/datasets", body, method="POST")
    with suppress(urllib.error.HTTPError):  # no run of that loop, says the process that builds
        urllib.request.urlopen(request)
    assert not site.marks.exists(), site.marks.read_text()


def test_nobody_else_may_read_what_platform_worker_and_commands_wrote(site: Site) -> None:
    for path in (site.home, *site.home.rglob("*")):
        with suppress(FileNotFoundError):  # a draft that was renamed meanwhile
            assert not path.lstat().st_mode & 0o077 or path.is_symlink(), path


def test_a_platform_that_dies_under_its_command_is_told_as_that(site: Site, tmp_path: Path) -> None:
    config = load_config({"home": tmp_path / "root"})
    log = config.root.logs / "platform.log"
    with (
        pytest.raises(EngineUnavailable, match=rf"exit code -9\): its log is {log}, and the same"),
        serving(config, model=site.model, name="tiny", replicas=0, ready=False) as info,
    ):
        os.kill(info["pid"], signal.SIGKILL)
        while alive(info["pid"]):
            time.sleep(0.05)
        asyncio.run(ask_for_jobs(info))


async def ask_for_jobs(info: dict[str, Any]) -> None:
    platform = client(info)
    platform.engine()._retries = 0
    try:
        await platform.rollback("tiny", who="me", reason="")
    finally:
        await platform.close()


def test_down_leaves_nothing(site: Site) -> None:
    status = site.status()
    pids = [*gateways(status["url"], 2), *(replica["pid"] for replica in status["replicas"])]
    assert site.cli("down").returncode == 0
    assert not [pid for pid in pids if alive(pid)]
    assert site.status() == {"running": False, "home": str(site.home)}
