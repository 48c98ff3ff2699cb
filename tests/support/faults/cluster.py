"""A platform over several virtual nodes: two processes of `up`, replicas as jobs, a shared root.

Each node, and the host of each platform process, may have a view of its own of the root
(root_views.py); the processes then also take themselves to be on hosts of other names. The engines
are scripted servers, unless CRAY_TEST_ENGINES=vllm.
"""

import itertools
import os
import stat
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai

from cray_agents.paths import Home
from cray_agents.runtime.controller_lease import standby_notes
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.pool.job_lease import JobLease, attempts, read_lease
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.trainers.models.seed_model import make_seed_model
from tests.support.bare_models import provable_model
from tests.support.faults.root_views import RootView
from tests.support.scripted_server import NOT_TRAINED

ROOT = Path(__file__).parents[3]
VLLM = os.environ.get("CRAY_TEST_ENGINES") == "vllm"
NODES = 4
REPLICAS = 4
PATIENCE = 600.0 if VLLM else 240.0  # seconds until what must come is there, at a load of 20
LOGINS = ("login-1", "login-2")  # hosts of the platform's processes, by turns
TRAINED = "tiny"  # the name of the model that sessions train
SETTINGS = f"""\
replica_interface = "lo"
train_nodes = 2
train_ranks = 2
train_session_idle_minutes = 1
exclude_minutes = 0.5
[job]
environment = {{ PYTHONPATH = "{ROOT}" }}
"""
#: The gate of a training looks at GPUs, by a program that fails on the nodes that a file names.
GPUS = """\
#!/bin/sh
[ -e "$folder/bad-$SLURMD_NODENAME" ] && { echo GPU is lost; exit 15; }
echo 0, 0, No
"""


class ViewedSlurm(PrivateCluster):
    """A private cluster, each of whose nodes has a view of its own of the shared root."""

    def __init__(self, directory: Path, views: dict[str, RootView]) -> None:
        self._programs = directory.with_name("bin")
        super().__init__(directory, nodes=NODES, cpus=8, gpus=[])
        self._programs.mkdir()
        for node, name in zip(self.nodes, [n for n in views if n not in LOGINS], strict=True):
            (self._programs / node).write_text("\n".join(views[name].enter))
        real = subprocess.run(["which", "slurmd"], capture_output=True, text=True, check=True)
        program = self._programs / "slurmd"
        program.write_text(
            f"#!{sys.executable} -IS\nimport os, sys\n"
            f"words = open(f'{self._programs}/{{sys.argv[3]}}').read().split('\\n')\n"
            f"os.execvp(words[0], [*words, {real.stdout.strip()!r}, *sys.argv[1:]])\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)

    @property
    def environment(self) -> dict[str, str]:
        """Its PATH names a slurmd that enters its node's view first."""
        clean = super().environment
        return {**clean, "PATH": f"{self._programs}:{clean['PATH']}"}


class Cluster:
    """Virtual nodes, a shared root, and two processes of `cray-agents up` on it.

    `home` is the root without caches; `root` its path on the hosts.
    """

    def __init__(
        self, folder: Path, slurm: PrivateCluster, views: dict[str, RootView], root: Path
    ) -> None:
        self.folder, self.slurm, self.views, self._root = folder, slurm, views, root
        self.home = Home(folder / "disk") if views else Home(root)
        self.processes: list[subprocess.Popen[bytes]] = []
        self.models = 0
        self._logins = itertools.cycle(LOGINS)
        more = "" if VLLM else self._add_gpus(folder / "gpus")
        (folder / "cray-agents.toml").write_text(SETTINGS + more)
        self.environment = {**os.environ, **slurm.environment, "PYTHONPATH": str(ROOT)}
        self._up("--model", self.new_model())
        self.until(lambda: self.asks(), "the first answer")
        self._up("--standby")

    def _add_gpus(self, folder: Path) -> str:
        """Let nodes have GPUs that health gates look at; return the settings of jobs."""
        folder.mkdir()
        program = folder / "nvidia-smi"
        program.write_text(GPUS.replace("$folder", str(folder)))
        program.chmod(0o755)
        return f"prolog = ['export CUDA_VISIBLE_DEVICES=0 PATH={folder}:$PATH']\n"

    @contextmanager
    def lost_gpu(self, node: str) -> Iterator[None]:
        """Let the health gate fail on a node."""
        file = self.folder / "gpus" / f"bad-{node}"
        file.touch()
        try:
            yield
        finally:
            file.unlink()

    def new_model(self, *, proven: bool = True) -> Path:
        """Make a model that replicas can serve; return its folder.

        `proven`: they give the logprobs of its golden probe.
        """
        self.models += 1
        folder = self.folder / f"model-{self.models}"
        if VLLM:
            make_seed_model(folder, seed=self.models, corpus=["What is 1 + 1?"])
            return folder
        content = str(self.models).encode()
        return provable_model(folder, content if proven else content + b" " + NOT_TRAINED)

    def add_trained_model(self) -> None:
        """Register a model that a session can train, under a name of its own."""
        folder = self.folder / TRAINED
        make_seed_model(folder, seed=0, corpus=["What is 1 + 1?"])
        self.call(f"/models/{TRAINED}/versions", {"checkpoint": str(folder)})

    def _up(self, *words: object) -> None:
        module = "cray_agents" if VLLM else "tests.support.scripted_cray_agents"
        argv = ["up", "--home", self._root, "--name", "m", "--port", 0, "--scheduler", "slurm",
                "--replicas", f"slurm:{REPLICAS}", "--gateways", 2, *words]  # fmt: skip
        login = next(self._logins)
        enter = self.views[login].enter if self.views else []
        cache = {"CRAY_AGENTS_CACHE": str(self.folder / "cache" / login)}
        with (self.folder / "up.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [*enter, sys.executable, "-m", module, *map(str, argv)],
                    cwd=self.folder,
                    env=self.environment | cache,
                    stdout=log,
                    stderr=log,
                )
            )

    def down(self) -> list[int]:
        """End the platform as an operator does; return the exit codes of its processes."""
        mine = {process.pid for process in self.processes if process.poll() is None}

        def known() -> bool:  # a standby that starts when the platform is gone becomes one
            claims = (self.controller(), *standby_notes(self.home))
            return mine <= {claim.get("pid") for claim in claims}

        self.until(known, "a standby that waits")
        enter = self.views[self.controller()["host"]].enter if self.views else []
        argv = [*enter, sys.executable, "-m", "cray_agents", "down", "--home", str(self._root)]
        done = subprocess.run(
            argv, cwd=self.folder, env=self.environment, capture_output=True, text=True, check=False
        )
        assert done.returncode == 0, done.stdout + done.stderr
        self.until(lambda: all(p.poll() is not None for p in self.processes), "the platform's end")
        return [process.returncode for process in self.processes]

    def keep_two(self) -> None:
        """Start a standby in place of a process that has ended."""
        self.processes = [process for process in self.processes if process.poll() is None]
        while len(self.processes) < 2:
            self._up("--standby")

    def controller(self) -> dict[str, Any]:
        """The claim of the root; {} where there is none, or it is being written."""
        with suppress(OSError):
            claim: dict[str, Any] = checksums.read_json(self.home.platform)
            return claim
        return {}

    @property
    def url(self) -> str:
        """Where the gateways answer, by the claim."""
        return str(self.controller().get("url", "http://127.0.0.1:1"))

    def client(self) -> openai.OpenAI:
        return openai.OpenAI(
            base_url=f"{self.url}/v1", api_key="none", max_retries=0, timeout=60 if VLLM else 20
        )

    def call(self, path: str, body: dict[str, Any]) -> Any:
        client = self.client().with_options(timeout=PATIENCE)  # a real vLLM may load for long
        return client.post(path, body=body, cast_to=object)

    def asks(self) -> bool:
        """One question is answered."""
        with suppress(openai.OpenAIError):
            ask(self.client(), "are you there?", uuid.uuid4().hex)
            return True
        return False

    def leases(self) -> list[JobLease]:
        """The newest lease of each replica that has one."""
        found = []
        for number in range(REPLICAS):
            folder = self.home.replicas / str(number)
            leases = [read_lease(folder / str(n)) for n in attempts(folder)]
            found += [lease for lease in leases if lease is not None][-1:]
        return found

    def replicas(self) -> dict[int, Any]:
        """The replicas that serve, by their engine's pid."""
        with suppress(openai.OpenAIError):
            replicas: Any = self.client().get("/pool", cast_to=object)
            return {one["pid"]: one for one in replicas["data"] if one["state"] == "serving"}
        return {}

    def command(self, *argv: str) -> str:
        done = subprocess.run(
            argv, env=self.environment, cwd=self.folder, capture_output=True, text=True, check=False
        )
        return done.stdout.strip()

    def until(self, condition: Callable[[], Any], what: str) -> float:
        """Wait for something; return the seconds."""
        begun = time.monotonic()
        while not condition():
            if time.monotonic() > begun + PATIENCE:
                tail = (self.folder / "up.log").read_text()[-6000:]
                raise AssertionError(f"{what}: not within {PATIENCE} s\n{tail}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


@contextmanager
def cluster(folder: Path, *, cached: bool) -> Iterator[Cluster]:
    """Start a cluster. `cached`: each host has a view of its own of the root."""
    root = folder / "home"
    views: dict[str, RootView] = {}
    if cached:
        (folder / "disk").mkdir()
        for name in (*(f"node-{n}" for n in range(1, NODES + 1)), *LOGINS):
            host = name if name in LOGINS else ""
            views[name] = RootView(folder / "views" / name, folder / "disk", root, host)
    directory = folder / "slurm"
    slurm = (
        ViewedSlurm(directory, views)
        if cached
        else PrivateCluster(directory, nodes=NODES, cpus=8, gpus=[])
    )
    made = None
    try:
        slurm.start()
        made = Cluster(folder, slurm, views, root)
        yield made
    finally:
        if made is not None:
            made.close()
        slurm.close()
        for view in views.values():
            view.close()


def ask(client: openai.OpenAI, text: str, key: str) -> tuple[str, str, str]:
    """Return the answer, the version that gave it, and the run."""
    raw = client.chat.completions.with_raw_response.create(
        model="m",
        messages=[{"role": "user", "content": text}],
        max_tokens=8,
        extra_headers={"Idempotency-Key": key},
    )
    answer = raw.parse()
    return answer.choices[0].message.content or "", answer.model, raw.headers["x-run-id"]
