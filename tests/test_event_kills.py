"""Kill -9 of the gateway while runs, rewards and keyed calls come in: each is there once."""

import random
import signal
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import orjson
import pytest

from cray_agents.paths import Home
from cray_agents.runtime.store import Store
from tests.support.campaign import Campaign, free_port, kills
from tests.support.gateway_process import first_version, gateway
from tests.support.store.plain_reader import events_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

KILLS = kills(3)
SENDERS = 6
PATIENCE = 300  # seconds without an answer


class Sender:
    """Sends one run after another: a call, what it was, its reward; again until it is accepted."""

    def __init__(self, url: str, name: int, stop: threading.Event) -> None:
        self.url, self.name, self.stop = url, name, stop
        self.accepted: dict[str, str] = {}  # run id -> the answer that the client got

    def run(self) -> None:
        number = 0
        while not self.stop.is_set():
            number += 1
            run_id = f"run-{self.name}-{number}"
            asked = {"model": "m", "messages": [{"role": "user", "content": run_id}]}
            headers = {"X-Run-Id": run_id, "Idempotency-Key": f"{run_id}.0"}
            answer = self.post("/v1/chat/completions", asked, headers)
            said = answer["choices"][0]["message"]["content"]
            told = {"agent": "a", "model": "m@1", "input": run_id, "output": said}
            told |= {"stop_reason": "completed"}
            told["trajectory"] = {"turns": [{"call_id": answer["id"]}]}
            reward = {"name": "good", "value": float(number), "time": 1.0}
            events = [{"kind": "run", "body": told}, {"kind": "reward", "body": reward}]
            path = f"/v1/trajectories/{run_id}/events"
            self.post(path, {"events": events}, {})
            self.accepted[run_id] = said

    def post(self, path: str, body: dict[str, Any], headers: dict[str, str]) -> Any:
        deadline = time.monotonic() + PATIENCE
        while True:
            head = {"content-type": "application/json", **headers}
            request = urllib.request.Request(self.url + path, orjson.dumps(body), head)
            try:
                with urllib.request.urlopen(request, timeout=120) as response:
                    return orjson.loads(response.read())
            except urllib.error.HTTPError as error:
                assert error.code == 503, error.read()
            except (OSError, IncompleteRead):  # killed: again
                assert time.monotonic() < deadline, "no gateway answers"
                time.sleep(0.02)


@contextmanager
def senders(root: Path, chance: random.Random) -> Iterator["Senders"]:
    root.mkdir(parents=True)
    first_version(Home(root))
    with ThreadPoolExecutor(SENDERS) as pool:
        made = Senders(Home(root), free_port(), pool)
        try:
            yield made
        finally:
            made.stop.set()


class Senders:
    """SENDERS at once, and the gateway that they send to."""

    def __init__(self, home: Home, port: int, pool: ThreadPoolExecutor) -> None:
        self.home, self.port, self.stop = home, port, threading.Event()
        url = f"http://127.0.0.1:{port}"
        self.all = [Sender(url, name, self.stop) for name in range(SENDERS)]
        self.sending = [pool.submit(sender.run) for sender in self.all]


def hurt(senders: Senders, chance: random.Random, enough: int) -> Counter[str]:
    for _ in range(enough):
        with gateway(senders.home.root, senders.port) as (_, process):
            time.sleep(chance.uniform(0.05, 0.6))
            process.send_signal(signal.SIGKILL)
            process.wait()
    with gateway(senders.home.root, senders.port):
        wait_until(lambda: sum(len(one.accepted) for one in senders.all) > SENDERS)
        senders.stop.set()
        for sent in senders.sending:
            sent.result(PATIENCE)
    return Counter(gateway=enough)


def check(senders: Senders) -> None:
    accepted = {run: said for sender in senders.all for run, said in sender.accepted.items()}
    lines = Counter((event["run_id"], event["kind"]) for event in events_of(senders.home))
    runs = {run.id: run for run in Store(senders.home).runs()}
    lost = accepted.keys() - runs.keys()
    doubled = [key for key, count in lines.items() if count > 1]
    print(f"\n{len(accepted)} accepted, {len(lost)} lost, {len(doubled)} doubled")
    assert not lost and not doubled and len(accepted) > SENDERS
    for run_id, said in accepted.items():
        run = runs[run_id]
        assert run.output == said
        assert [r.value for r in run.rewards] == [float(run_id.split("-")[2])]
        assert [call.message["content"] for call in run.calls] == [said], "the same answer again"


def test_what_was_accepted_is_there_once(tmp_path: Path) -> None:
    Campaign(senders, hurt, check).run(tmp_path, KILLS)
