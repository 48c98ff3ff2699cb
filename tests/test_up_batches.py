"""A batch on real vLLM while the platform, its batch worker and its replica are killed with -9."""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import openai
import orjson
import pytest

from cray_agents.paths import Home
from cray_agents.runtime.batches.queue import BatchQueue
from cray_agents.runtime.files.files import Files
from cray_agents.trainers.models.seed_model import make_seed_model
from tests.test_batch_kills import sampled, submit, written_results

pytestmark = [pytest.mark.vllm, pytest.mark.usefixtures("forked_servers")]

ROUNDS = int(os.environ.get("CRAY_TEST_VLLM_KILLS", "1"))  # each kills the three of them
LINES = 300 * (1 + ROUNDS)
VICTIMS = ("replica", "worker", "platform")


class Site:
    """`cray-agents up` on a root, started again by the same command when it was killed."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "home")
        make_seed_model(folder / "model", seed=0, corpus=["line 1", "What is 1 + 1?"])
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]
        self.argv = [sys.executable, "-m", "cray_agents", "up", "--name", "m", "--scheduler"]
        self.argv += ["local", "--model", str(folder / "model"), "--port", str(self.port)]
        self.argv += ["--home", str(self.home.root)]
        self.start()

    def start(self) -> None:
        self.home.logs.mkdir(parents=True, exist_ok=True)
        with (self.home.logs / "up.log").open("ab") as log:
            self.process = subprocess.Popen(self.argv, stdout=log, stderr=log)

    def get(self, path: str) -> Any:
        with urllib.request.urlopen(f"http://127.0.0.1:{self.port}{path}", timeout=5) as answer:
            return json.load(answer)

    def pid_of(self, victim: str) -> int | None:
        """The process to kill; None while there is none."""
        if victim == "platform":
            return self.process.pid
        if victim == "replica":
            try:
                found: int | None = self.get("/v1/pool")["data"][0]["pid"]
            except OSError:
                return None
            return found
        children = Path(f"/proc/{self.process.pid}/task/{self.process.pid}/children").read_text()
        for pid in map(int, children.split()):
            if b"batches.worker" in Path(f"/proc/{pid}/cmdline").read_bytes():
                return pid
        return None

    def kill(self, victim: str) -> None:
        deadline = time.monotonic() + 60
        while (pid := self.pid_of(victim)) is None:
            assert time.monotonic() < deadline, f"there is no {victim} to kill"
            time.sleep(0.05)
        os.kill(pid, signal.SIGKILL)
        if victim == "platform":
            self.process.wait()
            self.start()


def test_every_line_has_one_result_whatever_is_killed(tmp_path: Path) -> None:
    chance = random.Random(7)
    site = Site(tmp_path)
    try:
        files = Files(site.home)
        queue = BatchQueue(site.home, files)
        batch = submit(queue, files, LINES, max_tokens=8)
        victims = [victim for _ in range(ROUNDS) for victim in chance.sample(VICTIMS, 3)]
        for number, victim in enumerate(victims):
            enough = number * LINES // (len(victims) + 1)
            while written_results(queue, batch) <= enough:
                assert site.process.poll() is None, (site.home.logs / "up.log").read_text()
                time.sleep(0.01)
            time.sleep(chance.uniform(0, 0.3))
            site.kill(victim)
        while (batch := queue.get(batch.id)).status != "completed":
            assert batch.status == "in_progress" or batch.status == "finalizing", batch
            time.sleep(0.05)
        assert batch.output_file_id and batch.error_file_id is None
        client = openai.OpenAI(base_url=f"http://127.0.0.1:{site.port}/v1", api_key="none")
        output = client.files.content(batch.output_file_id).text
    finally:
        site.process.terminate()
        site.process.wait()
    results = [orjson.loads(line) for line in output.splitlines()]
    found = Counter(result["custom_id"] for result in results)
    calls = sampled(site.home)
    print(
        f"\n{LINES} accepted, {len(results)} completed, {LINES - len(found)} lost, "
        f"{len(results) - len(found)} doubled; killed: {', '.join(victims)}"
    )
    assert len(results) == len(found) == LINES
    for result in results:
        body = result["response"]["body"]
        assert body["model"] == "m@1" and body["usage"]["completion_tokens"] <= 8
        assert calls[f"{batch.id}-{result['custom_id'][1:]}"] == {body["id"]}, "sampled once"
