"""Kill -9 of the gateway and of batch workers, at random moments: each line has one result.

Workers are also stopped for longer than their lease, and then go on as if nothing had happened.
`CRAY_TEST_LINES` makes it longer, too.
"""

import os
import random
import signal
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
from tests.support.campaign import Campaign, Children, free_port, kills
from tests.support.gateway_process import first_version
from tests.support.store.plain_reader import events_of

pytestmark = pytest.mark.slow

LINES = int(os.environ.get("CRAY_TEST_LINES", "1000"))
WORKERS = 2
STALLS = 0.15  # of the kills are followed by one
LEASE = 1.0  # seconds; a stalled worker loses its claims while it is stopped
ENDPOINT = "/v1/chat/completions"


@dataclass
class Crowd:
    """A gateway and workers, each started again whenever it is killed, and their batch."""

    home: Home
    children: Children
    batch: Batch | None = None
    port: int = field(default_factory=free_port)
    kills: Counter[str] = field(default_factory=Counter)
    stalls: int = 0

    def __post_init__(self) -> None:
        self.files = Files(self.home)
        self.queue = BatchQueue(self.home, self.files)

    def start(self, name: str) -> None:
        root, words = self.home.root, tuple[object, ...]()
        if name == "gateway":
            module, words = "tests.support.gateway_process", (root, self.port, "--hold", 0.02)
        else:
            module = "cray_agents.runtime.batches.worker"
            url = f"http://127.0.0.1:{self.port}"
            words = (root, url, "--parent", os.getpid(), "--lease", LEASE)
        self.children.start(name, module, *words)

    def kill(self, chance: random.Random) -> None:
        """One of them, sometimes two at once, and start them again after a while."""
        names = chance.sample(sorted(self.children.processes), 1 + (chance.random() < 0.2))
        for name in names:
            self.children.processes[name].send_signal(signal.SIGKILL)
            self.kills[name.rstrip("0123456789")] += 1
        for name in names:
            assert self.children.kill(name) == -signal.SIGKILL, f"{name} had ended by itself"
            time.sleep(chance.uniform(0, 0.1))
            self.start(name)

    def stall(self, chance: random.Random) -> None:
        """A worker stands still until others have taken its chunks over."""
        worker = self.children.processes[f"worker{chance.randrange(WORKERS)}"]
        worker.send_signal(signal.SIGSTOP)
        time.sleep(LEASE + chance.uniform(0, 1))
        worker.send_signal(signal.SIGCONT)
        self.stalls += 1

    def check(self) -> None:
        """Whoever ends without being killed has failed."""
        for name in self.children.processes:
            assert not self.children.ended(name)


@contextmanager
def crowd(root: Path, chance: random.Random) -> Iterator[Crowd]:
    root.mkdir(parents=True)
    made = Crowd(Home(root), Children(root))
    first_version(made.home)
    try:
        for name in ("gateway", *(f"worker{number}" for number in range(WORKERS))):
            made.start(name)
        yield made
    finally:
        made.children.stop()


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


def wait_for(crowd: Crowd, batch: Batch, results: int) -> None:
    """Until the batch has so many results, or has ended."""
    while results:
        batch = crowd.queue.get(batch.id)
        written = written_results(crowd.queue, batch)
        if batch.output_file_id or (batch.request_counts.total and written >= results):
            return
        crowd.check()
        time.sleep(0.01)


def sampled(home: Home) -> dict[str, set[str]]:
    """By run, the calls that the store holds: each was sampled and recorded."""
    calls: dict[str, set[str]] = {}
    for event in events_of(home):
        if event["kind"] == "call":
            calls.setdefault(event["run_id"], set()).add(event["body"]["id"])
    return calls


def hurt(crowd: Crowd, chance: random.Random, enough: int) -> Counter[str]:
    """Kill while a batch goes on; return who was killed how often."""
    crowd.batch = batch = submit(crowd.queue, crowd.files, LINES)
    for results in moments(chance, LINES, enough):
        wait_for(crowd, batch, results)
        time.sleep(chance.choice((0.0, chance.uniform(0, 0.05), chance.uniform(0, 0.6))))
        crowd.kill(chance)
        if chance.random() < STALLS:
            crowd.stall(chance)
    while crowd.batch.status not in ("completed", "failed"):
        crowd.check()
        time.sleep(0.05)
        crowd.batch = crowd.queue.get(batch.id)
    return crowd.kills


def check(crowd: Crowd) -> None:
    files, batch = crowd.files, crowd.batch
    assert batch.output_file_id
    assert batch.error_file_id is None, files.path(batch.error_file_id).read_text()[:2000]
    answers = [orjson.loads(line) for line in files.path(batch.output_file_id).open("rb")]
    found = Counter(result["custom_id"] for result in answers)
    calls = sampled(crowd.home)
    lost = LINES - len(found)
    doubled = len(answers) - len(found)
    again = sum(len(ids) - 1 for ids in calls.values())
    print(f"\n{LINES} accepted, {len(answers)} completed, {lost} lost, {doubled} doubled,"
          f" {again} resampled; {crowd.stalls} stalls")  # fmt: skip
    assert (lost, doubled, again) == (0, 0, 0)
    assert batch.request_counts.completed == LINES
    for result in answers:
        number = result["custom_id"][1:]
        body = result["response"]["body"]
        assert body["choices"][0]["message"]["content"].startswith(f"line {number}: ")
        assert body["id"] in calls[f"{batch.id}-{number}"], "a result that was not recorded"


def test_every_line_has_one_result(tmp_path: Path) -> None:
    Campaign(crowd, hurt, check).run(tmp_path, kills(5))
