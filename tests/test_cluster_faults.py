"""A platform over several nodes under random faults: nothing is lost, doubled or served unproven.

Four replicas are Slurm jobs on four virtual nodes. Two gateways share a port, and a standby waits
for the end of whoever controls the root. Clients ask, a batch is in the queue, and versions are
promoted meanwhile. The engines are scripted servers. CRAY_TEST_FAULT_MINUTES: the length, in place
of four faults; CRAY_TEST_SEED: of their order.
"""

import os
import random
import signal
import statistics
import subprocess
import sys
import threading
import time
import uuid
from collections import Counter, defaultdict
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.pool.slurm.job_lease import JobLease, attempts, read_lease
from cray_agents.runtime.scheduler.private_cluster import PrivateCluster
from cray_agents.runtime.scheduler.programs import missing_programs
from cray_agents.runtime.store import Store
from tests.support.bare_models import bare_model

MINUTES = float(os.environ.get("CRAY_TEST_FAULT_MINUTES", "0"))
SEED = int(os.environ.get("CRAY_TEST_SEED", "1"))
LINES = int(os.environ.get("CRAY_TEST_LINES", "300"))
ROOT = Path(__file__).parents[1]
NODES = REPLICAS = 4
CLIENTS = 4
PATIENCE = 240.0  # seconds until what must come is there, on a machine with a load of 20

pytestmark = [
    pytest.mark.slurm,
    pytest.mark.skipif(bool(missing_programs()), reason="Slurm is not installed"),
]


class Cluster:
    """Virtual nodes, a shared root, and two processes of `cray-agents up` on it."""

    def __init__(self, folder: Path, slurm: PrivateCluster) -> None:
        self.folder, self.home, self.slurm = folder, Home(folder / "home"), slurm
        self.processes: list[subprocess.Popen[bytes]] = []
        self.models = 0
        (folder / "cray-agents.toml").write_text(
            f'replica_interface = "lo"\n[job]\nenvironment = {{ PYTHONPATH = "{ROOT}" }}\n'
        )
        self.environment = {**os.environ, **slurm.environment, "PYTHONPATH": str(ROOT)}
        self._up("--model", self.new_model())
        self.until(lambda: self.asks(), "the first answer")
        self._up("--standby")

    def new_model(self) -> Path:
        self.models += 1
        return bare_model(self.folder / f"model-{self.models}", str(self.models).encode())

    def _up(self, *words: object) -> None:
        argv = ["up", "--home", self.home.root, "--name", "m", "--port", 0, "--scheduler", "slurm",
                "--replicas", f"slurm:{REPLICAS}", "--gateways", 2, *words]  # fmt: skip
        with (self.folder / "up.log").open("ab") as log:
            self.processes.append(
                subprocess.Popen(
                    [sys.executable, "-m", "tests.support.scripted_cray_agents", *map(str, argv)],
                    cwd=self.folder,
                    env=self.environment,
                    stdout=log,
                    stderr=log,
                )
            )

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

    def client(self) -> openai.OpenAI:
        url, token = self.controller().get("url", "http://127.0.0.1:1"), "none"
        return openai.OpenAI(base_url=f"{url}/v1", api_key=token, max_retries=0, timeout=20)

    def call(self, path: str, body: dict[str, Any]) -> Any:
        return self.client().post(path, body=body, cast_to=object)

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
                tail = (self.folder / "up.log").read_text()[-4000:]
                raise AssertionError(f"{what}: not within {PATIENCE} s\n{tail}")
            time.sleep(0.1)
        return time.monotonic() - begun

    def close(self) -> None:
        for process in self.processes:
            process.kill()
            process.wait()


def ask(client: openai.OpenAI, text: str, key: str) -> tuple[str, str, str]:
    """Return the answer, the version that gave it, and the run."""
    raw = client.chat.completions.with_raw_response.create(
        model="m",
        messages=[{"role": "user", "content": text}],
        extra_headers={"Idempotency-Key": key},
    )
    answer = raw.parse()
    return answer.choices[0].message.content or "", answer.model, raw.headers["x-run-id"]


class Client(threading.Thread):
    """Ask one question after the other, each until it is answered."""

    def __init__(self, cluster: Cluster, number: int) -> None:
        super().__init__(daemon=True)
        self.answers: dict[str, tuple[str, str, str]] = {}  # by question
        self.retries = 0
        self.refused: openai.APIStatusError | None = None
        self.ended = threading.Event()
        self._cluster, self._number = cluster, number
        self.start()

    def run(self) -> None:
        count = 0
        while not self.ended.is_set() and self.refused is None:
            count += 1
            self._ask(f"client {self._number}, question {count}")
            time.sleep(0.05)

    def _ask(self, text: str) -> None:
        key = uuid.uuid4().hex
        while self.refused is None:
            try:
                self.answers[text] = ask(self._cluster.client(), text, key)
                return
            except openai.APIStatusError as error:
                if error.status_code < 500 and error.status_code not in (401, 409, 429):
                    self.refused = error
            except openai.OpenAIError:
                pass
            self.retries += 1
            time.sleep(0.2)


class Faults:
    """One fault after the other; each is over when the cluster has recovered."""

    def __init__(self, cluster: Cluster, chance: random.Random) -> None:
        self.seconds: dict[str, list[float]] = defaultdict(list)  # to recovery, by kind
        self._cluster, self._chance = cluster, chance
        self._left: list[Callable[[], None]] = [
            self.kill_supervisor, self.kill_controller, self.promote, self.lose_node,
        ]  # fmt: skip
        self._kinds = [
            self.kill_engine, self.kill_supervisor, self.stop_supervisor, self.cancel_job,
            self.lose_node, self.kill_slurmd, self.kill_slurmctld, self.kill_controller,
            self.stop_controller, self.kill_standby, self.kill_gateway, self.promote,
        ]  # fmt: skip
        self._begun = 0.0

    def strike(self) -> None:
        """Cause a fault, after the first four by chance, and wait until all replicas serve."""
        if not self._left:
            self._left = self._chance.sample(self._kinds, len(self._kinds))
        fault = self._left.pop()
        self._begun = time.monotonic()
        fault()
        self._cluster.keep_two()
        self._cluster.until(self._cluster.asks, f"an answer after {fault.__name__}")
        self._cluster.until(
            lambda: len(self._cluster.replicas()) == REPLICAS,
            f"all replicas after {fault.__name__}",
        )
        self.seconds[fault.__name__].append(time.monotonic() - self._begun)

    @property
    def some_left(self) -> bool:
        """True until each kind of a round was caused."""
        return bool(self._left)

    def table(self) -> Iterator[str]:
        """Yield rows in Markdown: kind, count, median and longest seconds to recovery."""
        yield "| fault | times | median s | longest s |\n|---|---|---|---|"
        for kind, seconds in sorted(self.seconds.items()):
            row = (kind.replace("_", " "), len(seconds), f"{statistics.median(seconds):.1f}",
                   f"{max(seconds):.1f}")  # fmt: skip
            yield "| " + " | ".join(map(str, row)) + " |"

    # ---- serving
    def kill_engine(self) -> None:
        pid = self._chance.choice(list(self._cluster.replicas()))
        self._kill(pid)
        self._wait_for_successor(pid)

    def kill_supervisor(self) -> None:
        """Its engine dies with it."""
        pid = self._chance.choice(list(self._cluster.replicas()))
        self._kill(int(Path(f"/proc/{pid}/stat").read_text().rpartition(") ")[2].split()[1]))
        self._wait_for_successor(pid)

    def stop_supervisor(self) -> None:
        """Its lease is late, or lapses."""
        lease = self._chance.choice(self._cluster.leases())
        os.kill(lease.pid, signal.SIGSTOP)
        time.sleep(self._chance.choice((3.0, 20.0)))
        with suppress(ProcessLookupError):  # it was replaced meanwhile
            os.kill(lease.pid, signal.SIGCONT)

    def cancel_job(self) -> None:
        replica = self._chance.choice(list(self._cluster.replicas().values()))
        self._cluster.command("scancel", replica["job"])
        self._wait_for_successor(replica["pid"])

    # ---- Slurm
    def lose_node(self) -> None:
        """Slurm ends the jobs of a node that is down; the others have room for them."""
        replica = self._chance.choice(list(self._cluster.replicas().values()))
        words = ("scontrol", "update", f"nodename={replica['host']}")
        self._cluster.command(*words, "state=down", "reason=test")
        self._wait_for_successor(replica["pid"])
        self._cluster.command(*words, "state=resume")

    def kill_slurmd(self) -> None:
        """The jobs of its node go on."""
        pid = self._chance.choice(self._daemons("slurmd"))
        self._kill(pid)
        self._cluster.until(lambda: len(self._daemons("slurmd")) == NODES, "slurmd again")

    def kill_slurmctld(self) -> None:
        self._kill(*self._daemons("slurmctld"))
        self._cluster.until(lambda: "UP" in self._cluster.command("scontrol", "ping"), "slurmctld")

    # ---- control
    def kill_controller(self) -> None:
        """The standby takes over, which is a new term."""
        before = self._cluster.controller()
        self._kill(before["pid"])
        self._cluster.until(
            lambda: self._cluster.controller().get("term", 0) > before["term"], "a new term"
        )

    def stop_controller(self) -> None:
        """It stands still for longer than its lease; it may decide nothing when it goes on."""
        before = self._cluster.controller()
        os.kill(before["pid"], signal.SIGSTOP)
        self._cluster.until(
            lambda: self._cluster.controller().get("term", 0) > before["term"], "a new term"
        )
        self._cluster.until(self._cluster.asks, "an answer of the new controller")
        self.seconds["stop controller: to the next answer"].append(time.monotonic() - self._begun)
        with suppress(ProcessLookupError):  # who followed it on its host has ended it
            os.kill(before["pid"], signal.SIGCONT)
        (old,) = (p for p in self._cluster.processes if p.pid == before["pid"])
        self._cluster.until(lambda: old.poll() is not None, "the end of who was followed")

    def kill_standby(self) -> None:
        pid = self._cluster.controller().get("pid")
        self._kill(*(p.pid for p in self._cluster.processes if p.pid != pid))

    def kill_gateway(self) -> None:
        """A further one, of those that the controller keeps."""
        pid = self._cluster.controller()["pid"]
        children = Path(f"/proc/{pid}/task/{pid}/children")
        for child in map(int, children.read_text().split()):
            if b"gateway" in Path(f"/proc/{child}/cmdline").read_bytes().split(b"\0"):
                self._kill(child)

    def promote(self) -> None:
        """A new version, while all goes on."""
        model = self._cluster.new_model()
        version = self._cluster.call("/models/m/versions", {"checkpoint": str(model)})["number"]
        self._cluster.call("/models/m/promote", {"version": version, "who": "test"})

    # ---- means
    def _daemons(self, name: str) -> list[int]:
        """Of this cluster."""
        found = []
        for entry in Path("/proc").iterdir():
            with suppress(OSError):
                argv = (entry / "cmdline").read_bytes().split(b"\0") if entry.name.isdigit() else []
                mine = (
                    str(self._cluster.slurm.directory).encode() in (entry / "environ").read_bytes()
                )
                if argv and Path(argv[0].decode()).name == name and mine:
                    found.append(int(entry.name))
        return found

    def _kill(self, *pids: int) -> None:
        for pid in pids:
            with suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        for process in self._cluster.processes:
            if process.pid in pids:
                process.wait()

    def _wait_for_successor(self, pid: int) -> None:
        """Wait until all replicas serve, without this engine."""
        self._cluster.until(
            lambda: pid not in (now := self._cluster.replicas()) and len(now) == REPLICAS,
            f"the successor of {pid}",
        )


@contextmanager
def cluster(folder: Path) -> Iterator[Cluster]:
    slurm = PrivateCluster(folder / "slurm", nodes=NODES, cpus=4, gpus=[])
    slurm.start()
    made = None
    try:
        made = Cluster(folder, slurm)
        yield made
    finally:
        if made is not None:
            made.close()
        slurm.close()


def submit(cluster: Cluster) -> str:
    """Put a batch into the queue; return its id."""
    line: Callable[[int], dict[str, Any]] = lambda n: {  # noqa: E731
        "custom_id": f"c{n}", "method": "POST", "url": "/v1/chat/completions",
        "body": {"model": "m", "messages": [{"role": "user", "content": f"line {n}"}]},
    }  # fmt: skip
    content = b"\n".join(orjson.dumps(line(n)) for n in range(LINES))
    client = cluster.client()
    file = client.files.create(file=("lines.jsonl", content), purpose="batch")
    batch = client.batches.create(
        input_file_id=file.id, endpoint="/v1/chat/completions", completion_window="24h"
    )
    return batch.id


def test_faults(tmp_path: Path) -> None:
    chance = random.Random(SEED)
    with cluster(tmp_path) as site:
        batch = submit(site)
        clients = [Client(site, number) for number in range(CLIENTS)]
        faults, end = Faults(site, chance), time.monotonic() + 60 * MINUTES
        while faults.some_left or time.monotonic() < end:
            faults.strike()
            assert all(client.refused is None for client in clients), clients[0].refused
        for client in clients:
            client.ended.set()
        for client in clients:
            client.join(PATIENCE)
            assert not client.is_alive() and client.refused is None, client.refused

        def ended() -> bool:
            with suppress(openai.OpenAIError):
                return site.client().batches.retrieve(batch).status == "completed"
            return False

        site.until(ended, "the batch's end")
        answers = {text: said for client in clients for text, said in client.answers.items()}
        check_answers(answers, site.models)
        check_store(site.home, answers)
        check_batch(site.client(), batch)
        print(f"\n{len(answers)} questions answered, {sum(c.retries for c in clients)} sent again")
        print("\n".join(faults.table()))


def check_answers(answers: dict[str, tuple[str, str, str]], versions: int) -> None:
    """Each names the version that gave it, a known one."""
    assert answers
    for text, (said, version, _) in answers.items():
        assert said == f"{version}: {text}"
        assert version in {f"m@{number}" for number in range(1, versions + 1)}


def check_store(home: Home, answers: dict[str, tuple[str, str, str]]) -> None:
    """Each question is recorded once, with the answer that its client got."""
    recorded: Counter[str] = Counter()
    for run in Store(home).stream(RunQuery()):
        for call in run.calls:
            text = call.messages[-1]["content"]
            recorded[text] += 1
            if text in answers:
                said, version, run_id = answers[text]
                assert (call.message["content"], call.model, run.id) == (said, version, run_id)
    assert {text: recorded[text] for text in answers} == dict.fromkeys(answers, 1)
    lines = {text: count for text, count in recorded.items() if text.startswith("line ")}
    assert lines == {f"line {n}": 1 for n in range(LINES)}
    asked = [text for text in recorded if text.startswith("client ")]
    assert set(asked) == set(answers)


def check_batch(client: openai.OpenAI, batch: str) -> None:
    """Each line has one answer."""
    output = client.batches.retrieve(batch).output_file_id
    assert output is not None
    lines = [orjson.loads(line) for line in client.files.content(output).content.splitlines()]
    assert sorted(line["custom_id"] for line in lines) == sorted(f"c{n}" for n in range(LINES))
