"""`cray-agents up --replicas slurm:1` on real vLLM in a Slurm job, and `--replicas 0`.

CRAY_TEST_REPLICAS=all kills all that can be killed, and lets a job's time come to its end.
"""

import json
import os
import signal
import subprocess
import sys
import threading
import time
import urllib.error
import urllib.request
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from cray_agents.config import Config
from cray_agents.errors import BadInput, SetupError
from cray_agents.paths import Home
from cray_agents.processes import alive
from cray_agents.runtime.scheduler.local import LocalProcesses
from cray_agents.runtime.scheduler.site_environment import missing_programs
from cray_agents.runtime.scheduler.slurm import Slurm
from cray_agents.runtime.store import Store
from cray_agents.server import replica_count
from cray_agents.server.compose import slurm_hosts
from cray_agents.server.platform_process import ReplicaCount
from cray_agents.trainers.models.seed_model import make_seed_model
from tests.support.bare_models import bare_model
from tests.support.waiting import wait_until

ALL = os.environ.get("CRAY_TEST_REPLICAS") == "all"
CORPUS = ["hello there", "What is 1 + 1?"]


class Platform:
    """A shared root, and the commands for it."""

    def __init__(self, folder: Path) -> None:
        self.folder, self.home = folder, folder / "home"
        self.url = ""

    def model(self, seed: int) -> Path:
        directory = self.folder / f"model-{seed}"
        make_seed_model(directory, seed=seed, corpus=CORPUS)
        return directory

    def cli(self, *words: object, **env: str) -> subprocess.CompletedProcess[str]:
        argv = [sys.executable, "-m", "cray_agents", *map(str, words), "--home", str(self.home)]
        environment = {**os.environ, **env}
        return subprocess.run(argv, cwd=self.folder, env=environment, capture_output=True,
                              text=True, timeout=400)  # fmt: skip

    def up(self, *words: object, **env: str) -> None:
        done = self.cli("up", "--name", "m", "--port", 0, "--detach", *words, **env)
        assert done.returncode == 0, done.stderr + (self.home / "logs/platform.log").read_text()
        self.url = self.status()["url"]

    def status(self) -> dict[str, Any]:
        status: dict[str, Any] = json.loads(self.cli("status", "--json").stdout)
        return status

    def replica(self) -> dict[str, Any]:
        (replica,) = self.call("/v1/pool")["data"]
        found: dict[str, Any] = replica
        return found

    def call(self, path: str, body: dict[str, Any] | None = None) -> dict[str, Any]:
        content = None if body is None else json.dumps(body).encode()
        request = urllib.request.Request(self.url + path, content)
        request.add_header("Content-Type", "application/json")
        with urllib.request.urlopen(request, timeout=300) as answer:
            found: dict[str, Any] = json.load(answer)
            return found | {"run": answer.headers.get("x-run-id")}

    def ask(self) -> dict[str, Any]:
        messages = [{"role": "user", "content": "hello"}]
        return self.call("/v1/chat/completions",
                         {"model": "m", "messages": messages, "max_tokens": 4})  # fmt: skip

    def slurm(self, *argv: str) -> str:
        env = {**os.environ, "SLURM_CONF": str(self.home / "slurm" / "slurm.conf")}
        done = subprocess.run(argv, env=env, capture_output=True, text=True, check=False)
        return done.stdout.strip()


class Caller(threading.Thread):
    """Asks one question after the other, and keeps the answers."""

    def __init__(self, platform: Platform) -> None:
        super().__init__(daemon=True)
        self.answers: list[dict[str, Any]] = []
        self.error: Exception | None = None
        self.ended = False
        self._platform = platform
        self.start()

    def run(self) -> None:
        try:
            while not self.ended:
                self.answers.append(self._platform.ask())
                time.sleep(0.1)
        except urllib.error.HTTPError as error:
            self.error = ValueError(f"{error.status}: {error.read().decode()}")
        except (OSError, ValueError) as error:
            self.error = error

    def end(self) -> list[dict[str, Any]]:
        self.ended = True
        self.join(300)
        assert self.error is None and not self.is_alive(), self.error
        return self.answers


@pytest.fixture
def platform(tmp_path: Path) -> Iterator[Platform]:
    platform = Platform(tmp_path)
    yield platform
    platform.cli("down")


def test_replicas_are_a_number_or_jobs() -> None:
    for text, count in {
        "2": ReplicaCount(2), "0": ReplicaCount(), "slurm:8": ReplicaCount(jobs=8),
    }.items():  # fmt: skip
        assert ReplicaCount.parse(text) == count and str(count) == text
    for wrong in ("", "-1", "two", "slurm:", "slurm:0", "slurm:-1", "pbs:2", "slurm", ":2", "²"):
        with pytest.raises(BadInput, match="slurm:8 for eight Slurm jobs"):
            ReplicaCount.parse(wrong)


@pytest.mark.slow
def test_a_gateway_alone(platform: Platform) -> None:
    model, other = (bare_model(platform.folder / name, name.encode()) for name in ("one", "two"))
    here = ("--scheduler", "local", "--port", 0, "--model", model, "--replicas")
    platform.up(*here, 0)
    assert platform.status()["replicas"] == []
    assert platform.call("/health/live") == {"status": "ok", "run": None}
    platform.call("/v1/models/m/versions", {"checkpoint": str(other)})
    for path, body, why in (
        ("/health/ready", None, "no replica can answer with m@1"),
        ("/v1/models/m/promote", {"version": 2, "who": "me"}, "this platform has no replica"),
    ):
        with pytest.raises(urllib.error.HTTPError) as refused:
            platform.call(path, body)
        assert why in refused.value.read().decode()


def test_jobs_need_slurm_and_their_gpus_divide_over_their_nodes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    local = LocalProcesses(tmp_path, reason="local processes, as asked for", gpus=())
    config = Config(home=tmp_path)
    assert slurm_hosts(config, "m", 0, local) == []
    with pytest.raises(SetupError, match="slurm:2 needs Slurm, and this platform has local"):
        slurm_hosts(config, "m", 2, local)
    monkeypatch.setattr(replica_count, "has_gpu_build", lambda: True)
    wide = {"replica_nodes": 2, "engine_args": ["-tp", "16"]}
    (host,) = slurm_hosts(config.model_copy(update=wide), "m", 1, Slurm(tmp_path))
    command = host._command
    assert (command.nodes, command.ranks, command.cpus_per_rank, command.gpus) == (2, 16, 4, True)
    odd = wide | {"engine_args": ["-tp", "3"]}
    with pytest.raises(BadInput, match=r"3 GPUs .* does not divide over replica_nodes = 2"):
        slurm_hosts(config.model_copy(update=odd), "m", 1, Slurm(tmp_path))


@pytest.mark.vllm
@pytest.mark.slurm
@pytest.mark.skipif(bool(missing_programs()), reason="Slurm is not installed")
def test_a_vllm_in_a_slurm_job_serves_swaps_and_is_followed(platform: Platform) -> None:
    limit = {"CRAY_AGENTS_REPLICA_MINUTES": "4"} if ALL else {}
    platform.up("--model", platform.model(0), "--replicas", "slurm:1", "--scheduler", "slurm",
                CRAY_AGENTS_REPLICA_CPUS="1", **limit)  # fmt: skip
    replica = platform.replica()
    assert replica["state"] == "serving" and replica["version"] == "m@1"
    assert platform.slurm("squeue", "-h", "-o", "%A") == replica["job"]
    callers = [Caller(platform) for _ in range(2)]
    wait_until(lambda: all(caller.answers for caller in callers))
    platform.call("/v1/models/m/versions", {"checkpoint": str(platform.model(1))})
    platform.call("/v1/models/m/promote", {"version": 2, "who": "me"})
    after = platform.replica()
    assert after["version"] == "m@2" and after["pid"] == replica["pid"]

    def serves_anew(kill: Callable[[], Any]) -> None:
        before, began = platform.replica(), time.monotonic()
        kill()
        wait_until(lambda: (now := platform.replica())["state"] == "serving"
              and now["pid"] != before["pid"])  # fmt: skip
        count = len(callers[0].answers)
        wait_until(lambda: len(callers[0].answers) > count)
        print(f"{kill.__name__}: served again after {time.monotonic() - began:.1f} s")

    def end_engine() -> None:
        os.kill(platform.replica()["pid"], signal.SIGKILL)

    def end_supervisor() -> None:
        folder = max((platform.home / "replicas/0").iterdir(), key=lambda path: int(path.name))
        os.kill(json.loads((folder / "lease.json").read_text())["pid"], signal.SIGKILL)

    def cancel() -> None:
        platform.slurm("scancel", platform.replica()["job"])

    def end_node() -> None:
        node = platform.replica()["host"]
        platform.slurm("scontrol", "update", f"nodename={node}", "state=down", "reason=test")
        wait_until(lambda: platform.replica()["state"] != "serving")
        platform.slurm("scontrol", "update", f"nodename={node}", "state=resume")

    def wait_for_the_limit() -> None:
        """The successor is submitted after two of four minutes."""

    for kill in (end_engine, end_supervisor, cancel, end_node, wait_for_the_limit) if ALL else ():
        serves_anew(kill)
    wait_until(lambda: all(caller.answers[-1]["model"] == "m@2" for caller in callers))
    answers = [answer for caller in callers for answer in caller.end()]
    assert {answer["model"] for answer in answers} == {"m@1", "m@2"}
    store = Store(Home(platform.home))
    assert all(len(store.run(answer["run"]).calls) == 1 for answer in answers)
    replica = platform.replica()
    assert platform.cli("down").returncode == 0
    assert not alive(replica["pid"])


@pytest.mark.vllm
@pytest.mark.slurm
@pytest.mark.skipif(bool(missing_programs()) or not ALL, reason="CRAY_TEST_REPLICAS=all, and Slurm")
def test_the_only_vllm_goes_and_the_next_request_waits_for_another(platform: Platform) -> None:
    platform.up("--model", platform.model(0), "--replicas", "slurm:0-1", "--scheduler", "slurm",
                CRAY_AGENTS_REPLICA_CPUS="1", CRAY_AGENTS_REPLICA_CALM_MINUTES="0.05",
                CRAY_AGENTS_REPLICA_EMPTY_MINUTES="0.1")  # fmt: skip
    for _ in range(2):
        wait_until(lambda: platform.replica()["state"] == "away")
        wait_until(lambda: not platform.slurm("squeue", "-h"))
        assert platform.call("/health/ready")["status"] == "ready"
        began = time.monotonic()
        assert platform.ask()["model"] == "m@1"
        print(f"answered {time.monotonic() - began:.1f} s after it was asked")
    assert platform.cli("down").returncode == 0
    rows = {
        row["name"]: row for row in json.loads(platform.cli("usage", "goodput", "--json").stdout)
    }
    assert rows["replica"]["tokens_served"] == 8 and 0 < rows["replica"]["goodput"] < 1
