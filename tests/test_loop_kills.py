"""Kill -9 of the loop and of the platform, at random moments: the end is that of a calm loop."""

import json
import random
import socket
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.runtime.datasets.reader import dataset_runs
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from tests.support.campaign import Campaign, Child, Children, free_port, kills
from tests.support.killable_loop import KINDS

pytestmark = pytest.mark.slow

LOOPS = 0.7  # of the kills are of the loop, the others of the platform


@dataclass
class Site:
    """A platform and a loop on it, as processes; users too, where the loop watches them."""

    root: Path
    kind: str
    port: int = field(default_factory=free_port)
    lonely: bool = False  # whether the platform was away lately

    def __post_init__(self) -> None:
        self.root.mkdir(parents=True, exist_ok=True)
        self.children = Children(self.root)

    @property
    def out(self) -> Path:
        return self.root / "iterations.json"

    @property
    def loop(self) -> Child:
        return self.children.processes["loop"]

    def start(self, name: str) -> None:
        url = f"http://127.0.0.1:{self.port}"
        words: tuple[object, ...] = {
            "gateway": ("gateway", self.root / "home", self.port),
            "loop": ("loop", url, self.kind, self.out),
            "users": ("users", url),
        }[name]
        self.children.start(name, "tests.support.killable_loop", *words)
        if name == "gateway":
            self.wait_until_it_listens()

    def wait_until_it_listens(self) -> None:
        while True:
            assert not self.children.ended("gateway")
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionError:
                time.sleep(0.02)
            else:
                return

    def state(self) -> dict[str, Any]:
        """All that a loop leaves behind, but for what depends on the clock."""
        home = Home(self.root / "home")
        runs = Store(home).runs(RunQuery(loop="loop"))
        scored = Counter(run.id.split("-")[0] for run in runs if run.reward is not None)
        rewards = {run.id.split("-")[0]: run.reward for run in runs if run.reward is not None}
        events = Registry(home).history("m")
        iterations = json.loads(self.out.read_text())
        return {
            "iterations": iterations,
            "trained on": [trained_on(home, each["dataset"]) for each in iterations[1:]],
            "twice": [name for name, times in scored.items() if times > 1],
            "runs": rewards,
            "jobs": sorted(path.name for path in home.jobs.iterdir()),
            "datasets": sorted(p.name for p in home.datasets.iterdir() if p.name[0] != "."),
            "versions": [v.checkpoint for v in Registry(home).versions("m")],
            "events": [(e.kind, e.version, e.reason) for e in events],
        }


def trained_on(home: Home, dataset: str) -> list[str]:
    lines = dataset_runs(home, dataset)
    return sorted(line["run"].split("-")[0] for line in lines if line["accepted"])


@contextmanager
def site(root: Path, kind: str) -> Iterator[Site]:
    made = Site(root, kind)
    try:
        for name in ("gateway", *(["users"] if kind == "watch" else []), "loop"):
            made.start(name)
        yield made
    finally:
        made.children.stop()


def hurt(site: Site, chance: random.Random, enough: int, pause: float) -> Counter[str]:
    """Kill one of the two after at most `pause` seconds, until the loop was faster."""
    hits = Counter[str]()
    while hits.total() < enough:
        time.sleep(chance.uniform(0, pause))
        if (code := site.loop.poll()) is not None:
            if not (code and site.lonely):
                break
            site.start("loop")
            continue
        name = "loop" if chance.random() < LOOPS else "gateway"
        site.children.kill(name)
        hits[name] += 1
        site.lonely = name == "gateway"
        site.start(name)
    if site.loop.wait() != 0 and site.lonely:  # it gave up on a platform that was away for long
        site.start("loop")
        site.loop.wait()
    assert site.children.ended("loop")
    return hits


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(3600)
def test_a_killed_loop_ends_as_a_calm_one(tmp_path: Path, kind: str) -> None:
    begun = time.monotonic()
    with site(tmp_path / "calm", kind) as calm:
        calm.loop.wait()
        assert calm.children.ended("loop")
        expected, seconds = calm.state(), time.monotonic() - begun

    def check(killed: Site) -> None:
        state = killed.state()
        assert state["twice"] == []
        assert state == expected

    Campaign(
        lambda root, chance: site(root, kind),
        lambda killed, chance, enough: hurt(killed, chance, enough, seconds / 2),
        check,
    ).run(tmp_path, -(-kills(8) // len(KINDS)))
    if kind == "watch":  # the others may go back to earlier iterations' runs
        used = [run for runs in expected["trained on"] for run in runs]
        assert used and len(used) == len(set(used))
