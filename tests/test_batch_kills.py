"""Kill -9 of the gateway and of batch workers, at random moments: each line has one result.

Workers are also stopped for longer than their lease, and then go on as if nothing had happened.
`CRAY_TEST_KILLS`, `CRAY_TEST_LINES` and `CRAY_TEST_SEEDS` make it longer.
"""

import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from pathlib import Path

import orjson
import pytest

from cray_agents.paths import Home
from cray_agents.runtime.batches.batch_records import Batch
from cray_agents.runtime.batches.queue import BatchQueue
from cray_agents.runtime.files.files import Files
from tests.support.gateway_process import first_version
from tests.support.store.plain_reader import events_of

KILLS = int(os.environ.get("CRAY_TEST_KILLS", "12"))
LINES = int(os.environ.get("CRAY_TEST_LINES", "2000"))
SEEDS = [int(seed) for seed in os.environ.get("CRAY_TEST_SEEDS", "1").split(",")]
WORKERS = 2
STALLS = 0.15  # of the kills are followed by one
LEASE = 1.0  # seconds; a stalled worker loses its claims while it is stopped
ENDPOINT = "/v1/chat/completions"


@dataclass
class Crowd:
    """A gateway and workers, each started again whenever it is killed."""

    home: Home
    port: int
    chance: random.Random
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)
    kills: Counter[str] = field(default_factory=Counter)
    stalls: int = 0

    def start(self, name: str) -> None:
        module, *words = (
            ["tests.support.gateway_process", str(self.home.root), str(self.port), "--hold", "0.02"]
            if name == "gateway"
            else [
                "cray_agents.runtime.batches.worker",
                str(self.home.root),
                f"http://127.0.0.1:{self.port}",
                "--parent",
                str(os.getpid()),
                "--lease",
                str(LEASE),
            ]
        )
        with (self.home.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", module, *words],
                stdout=log,
                stderr=log,
                env={**os.environ, "TEST_PARENT": str(os.getpid())},
            )

    def kill(self) -> None:
        """One of them, sometimes two at once, and start them again after a while."""
        names = self.chance.sample(sorted(self.processes), 1 + (self.chance.random() < 0.2))
        for name in names:
            self.processes[name].send_signal(signal.SIGKILL)
            self.kills[name.rstrip("0123456789")] += 1
        for name in names:
            assert self.processes[name].wait() == -signal.SIGKILL, f"{name} had ended by itself"
            time.sleep(self.chance.uniform(0, 0.1))
            self.start(name)

    def stall(self) -> None:
        """A worker stands still until others have taken its chunks over."""
        worker = self.processes[f"worker{self.chance.randrange(WORKERS)}"]
        worker.send_signal(signal.SIGSTOP)
        time.sleep(LEASE + self.chance.uniform(0, 1))
        worker.send_signal(signal.SIGCONT)
        self.stalls += 1

    def check(self) -> None:
        """Whoever ends without being killed has failed."""
        for name, process in self.processes.items():
            log = self.home.root / f"{name}.log"
            assert process.poll() is None, f"{name}: {log.read_text()[-3000:]}"


@contextmanager
def crowd(root: Path, chance: random.Random) -> Iterator[Crowd]:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        made = Crowd(Home(root), free.getsockname()[1], chance)
    root.mkdir()
    first_version(made.home)
    try:
        for name in ("gateway", *(f"worker{number}" for number in range(WORKERS))):
            made.start(name)
        yield made
    finally:
        for process in made.processes.values():
            process.kill()
            process.wait()


def submit(queue: BatchQueue, files: Files, lines: int, **options: object) -> Batch:
    with files.blobs.draft() as draft:
        for number in range(1, lines + 1):
            message = {"role": "user", "content": f"line {number}"}
            body = {"model": "m", "messages": [message], "temperature": 1, **options}
            line = {"custom_id": f"c{number}", "method": "POST", "url": ENDPOINT, "body": body}
            draft.write(orjson.dumps(line) + b"\n")
        blob = draft.publish()
    file = files.publish(blob, filename="in.jsonl", purpose="batch")
    return queue.create(
        {"input_file_id": file.id, "endpoint": ENDPOINT, "completion_window": "24h"}
    )


def moments(chance: random.Random, lines: int, kills: int) -> list[int]:
    """After how many results to kill: some at once, some at the end."""
    early, late = kills // 8, kills // 8
    along = sorted(chance.randrange(1, lines) for _ in range(kills - early - late))
    return [0] * early + along + [lines] * late


def written_results(queue: BatchQueue, batch: Batch) -> int:
    """Count the lines in sealed chunks, and in result files that are still written to."""
    counts, written = queue.get(batch.id).request_counts, 0
    for path in queue.folder(batch.id).results.glob("*.jsonl"):
        with suppress(FileNotFoundError):  # sealed meanwhile
            written += path.read_bytes().count(b"\n")
    return counts.completed + counts.failed + written


def wait_for(queue: BatchQueue, batch: Batch, results: int, crowd: Crowd) -> Batch:
    """Until the batch has so many results, or has ended."""
    while True:
        batch = queue.get(batch.id)
        if not results or batch.output_file_id:
            return batch
        if batch.request_counts.total and written_results(queue, batch) >= results:
            return batch
        crowd.check()
        time.sleep(0.01)


def sampled(home: Home) -> dict[str, set[str]]:
    """By run, the calls that the store holds: each was sampled and recorded."""
    calls: dict[str, set[str]] = {}
    for event in events_of(home):
        if event["kind"] == "call":
            calls.setdefault(event["run_id"], set()).add(event["body"]["id"])
    return calls


@pytest.mark.parametrize("seed", SEEDS)
def test_every_line_has_one_result(tmp_path: Path, seed: int) -> None:
    chance = random.Random(seed)
    with crowd(tmp_path / "home", chance) as running:
        files = Files(running.home)
        queue = BatchQueue(running.home, files)
        batch = submit(queue, files, LINES)
        begun = time.monotonic()
        for results in moments(chance, LINES, KILLS):
            wait_for(queue, batch, results, running)
            time.sleep(chance.choice((0.0, chance.uniform(0, 0.05), chance.uniform(0, 0.6))))
            running.kill()
            if chance.random() < STALLS:
                running.stall()
        while (batch := queue.get(batch.id)).status not in ("completed", "failed"):
            running.check()
            time.sleep(0.05)
        seconds = time.monotonic() - begun
    assert batch.output_file_id
    assert batch.error_file_id is None, files.path(batch.error_file_id).read_text()[:2000]
    answers = [orjson.loads(line) for line in files.path(batch.output_file_id).open("rb")]
    found = Counter(result["custom_id"] for result in answers)
    calls = sampled(running.home)
    lost = LINES - len(found)
    doubled = len(answers) - len(found)
    again = sum(len(ids) - 1 for ids in calls.values())
    print(
        f"\nseed {seed}: {LINES} accepted, {len(answers)} completed, {lost} lost, "
        f"{doubled} doubled, {again} resampled; "
        f"{running.kills.total()} kills {dict(running.kills)}, "
        f"{running.stalls} stalls in {seconds:.0f} s"
    )
    assert (lost, doubled, again) == (0, 0, 0)
    assert batch.request_counts.completed == LINES
    assert running.kills.total() >= KILLS
    for result in answers:
        number = result["custom_id"][1:]
        body = result["response"]["body"]
        assert body["choices"][0]["message"]["content"].startswith(f"line {number}: ")
        assert body["id"] in calls[f"{batch.id}-{number}"], "a result that was not recorded"
