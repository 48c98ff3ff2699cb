"""Kill -9 of the gateway while runs, rewards and keyed calls come in: each is there once."""

import os
import random
import signal
import socket
import threading
import time
import urllib.error
import urllib.request
from collections import Counter
from concurrent.futures import ThreadPoolExecutor
from http.client import IncompleteRead
from pathlib import Path
from typing import Any

import orjson

from cray_agents.paths import Home
from cray_agents.runtime.store import Store
from tests.support.gateway_process import first_version, gateway
from tests.support.store.plain_reader import events_of

KILLS = int(os.environ.get("CRAY_TEST_KILLS", "5"))
SENDERS = 6


def port() -> int:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        number: int = free.getsockname()[1]
        return number


class Sender:
    """Sends one run after another: a call, what it was, its reward; again until it is accepted."""

    def __init__(self, url: str, name: int, stop: threading.Event) -> None:
        self.url, self.name, self.stop = url, name, stop
        self.deadline = time.monotonic() + 120 + 3 * KILLS
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
        while True:
            head = {"content-type": "application/json", **headers}
            request = urllib.request.Request(self.url + path, orjson.dumps(body), head)
            try:
                with urllib.request.urlopen(request, timeout=10) as response:
                    return orjson.loads(response.read())
            except urllib.error.HTTPError as error:
                assert error.code == 503, error.read()
            except (OSError, IncompleteRead):  # killed: again
                assert time.monotonic() < self.deadline, "no gateway answers"
                time.sleep(0.02)


def test_what_was_accepted_is_there_once(tmp_path: Path) -> None:
    chance = random.Random(3)
    home, number = Home(tmp_path / "home"), port()
    home.root.mkdir()
    first_version(home)
    stop = threading.Event()
    senders = [Sender(f"http://127.0.0.1:{number}", name, stop) for name in range(SENDERS)]
    with ThreadPoolExecutor(SENDERS) as pool:
        sending = [pool.submit(sender.run) for sender in senders]
        try:
            for _ in range(KILLS):
                with gateway(home.root, number) as (_, process):
                    time.sleep(chance.uniform(0.05, 0.6))
                    process.send_signal(signal.SIGKILL)
                    process.wait()
            with gateway(home.root, number):
                stop.set()
                for sent in sending:
                    sent.result(60)
        finally:
            stop.set()
    accepted = {run: said for sender in senders for run, said in sender.accepted.items()}
    lines = Counter((event["run_id"], event["kind"]) for event in events_of(home))
    runs = {run.id: run for run in Store(home).runs()}
    lost = accepted.keys() - runs.keys()
    doubled = [key for key, count in lines.items() if count > 1]
    print(f"\n{len(accepted)} accepted, {len(lost)} lost, {len(doubled)} doubled; {KILLS} kills")
    assert not lost and not doubled and len(accepted) > SENDERS
    for run_id, said in accepted.items():
        run = runs[run_id]
        assert run.output == said and [r.value for r in run.rewards] == [
            float(run_id.split("-")[2])
        ]
        assert [call.message["content"] for call in run.calls] == [said], "the same answer again"
