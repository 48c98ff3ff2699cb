"""Kill -9 of the loop and of the platform, at random moments: the end is that of a calm loop.

`CRAY_TEST_KILLS` and `CRAY_TEST_SEEDS` make it longer.
"""

import json
import os
import random
import signal
import socket
import subprocess
import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.runtime.datasets import dataset_runs
from cray_agents.runtime.registry.registry import Registry
from cray_agents.runtime.store import Store
from tests.support.killable_loop import KINDS

ROOT = Path(__file__).parents[1]
KILLS = int(os.environ.get("CRAY_TEST_KILLS", "2"))
SEEDS = [int(seed) for seed in os.environ.get("CRAY_TEST_SEEDS", "1").split(",")]
LOOPS = 0.7  # of the kills are of the loop, the others of the platform


@dataclass
class Site:
    """A platform and a loop on it, as processes; users too, where the loop watches them."""

    root: Path
    kind: str
    port: int = 0
    processes: dict[str, subprocess.Popen[bytes]] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.root.mkdir()
        with socket.socket() as free:
            free.bind(("127.0.0.1", 0))
            self.port = free.getsockname()[1]

    @property
    def out(self) -> Path:
        return self.root / "generations.json"

    def start(self, name: str) -> None:
        url = f"http://127.0.0.1:{self.port}"
        words = {
            "gateway": ["gateway", str(self.root / "home"), str(self.port)],
            "loop": ["loop", url, self.kind, str(self.out)],
            "users": ["users", url],
        }[name]
        with (self.root / f"{name}.log").open("ab") as log:
            self.processes[name] = subprocess.Popen(
                [sys.executable, "-m", "tests.support.killable_loop", *words],
                cwd=ROOT,
                stdout=log,
                stderr=log,
                env={**os.environ, "TEST_PARENT": str(os.getpid())},
            )
        if name == "gateway":
            self.wait_until_it_listens()

    def start_all(self) -> None:
        for name in ("gateway", *(["users"] if self.kind == "watch" else []), "loop"):
            self.start(name)

    def wait_until_it_listens(self) -> None:
        while True:
            self.check("gateway")
            try:
                socket.create_connection(("127.0.0.1", self.port)).close()
            except ConnectionError:
                time.sleep(0.02)
            else:
                return

    def check(self, name: str) -> None:
        """Whoever ends by itself before its time has failed."""
        code = self.processes[name].poll()
        log = (self.root / f"{name}.log").read_text()
        assert code in (None, 0), f"{name} ended with {code}: {log[-3000:]}"

    def kill(self, name: str) -> None:
        self.processes[name].send_signal(signal.SIGKILL)
        self.processes[name].wait()

    def stop(self) -> None:
        for name in self.processes:
            self.kill(name)

    def state(self) -> dict[str, Any]:
        """All that a loop leaves behind, but for what depends on the clock."""
        home = Home(self.root / "home")
        runs = Store(home).runs(RunQuery(loop="loop"))
        scored = Counter(run.id.split("-")[0] for run in runs if run.reward is not None)
        rewards = {run.id.split("-")[0]: run.reward for run in runs if run.reward is not None}
        events = Registry(home).history("m")
        generations = json.loads(self.out.read_text())
        return {
            "generations": generations,
            "trained on": [trained_on(home, each["dataset"]) for each in generations[1:]],
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


def calm(root: Path, kind: str) -> tuple[dict[str, Any], float]:
    """What an undisturbed loop leaves, and the seconds that it took."""
    site = Site(root, kind)
    try:
        site.start_all()
        begun = time.monotonic()
        site.processes["loop"].wait()
        site.check("loop")
        return site.state(), time.monotonic() - begun
    finally:
        site.stop()


@dataclass
class Campaign:
    """Kills until there were enough of them; whenever a loop has ended all the same, a new one."""

    root: Path
    kind: str
    chance: random.Random
    pause: float  # seconds, at most, from one kill to the next
    kills: Counter[str] = field(default_factory=Counter)
    lonely: bool = False  # whether the platform was away lately

    def run(self, enough: int) -> list[dict[str, Any]]:
        """What each loop left behind."""
        found = []
        while not found or self.kills.total() < enough:
            site = Site(self.root / str(len(found)), self.kind)
            try:
                site.start_all()
                while self.kills.total() < enough and self._killed(site):
                    pass
                self._see_through(site)
            finally:
                site.stop()
            found.append(site.state())
        return found

    def _killed(self, site: Site) -> bool:
        """Kill one of the two after a while, and start it again; False: the loop was faster."""
        time.sleep(self.chance.uniform(0, self.pause))
        if (code := site.processes["loop"].poll()) is not None:
            if code and self.lonely:
                site.start("loop")
            return code != 0 and self.lonely
        name = "loop" if self.chance.random() < LOOPS else "gateway"
        site.kill(name)
        self.kills[name] += 1
        self.lonely = name == "gateway"
        site.start(name)
        return True

    def _see_through(self, site: Site) -> None:
        """Wait for the loop's end. It may have given up on a platform that was away for long."""
        if site.processes["loop"].wait() != 0 and self.lonely:
            site.start("loop")
        site.processes["loop"].wait()
        site.check("loop")


@pytest.mark.parametrize("seed", SEEDS)
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.timeout(3600)
def test_a_killed_loop_ends_as_a_calm_one(tmp_path: Path, kind: str, seed: int) -> None:
    expected, seconds = calm(tmp_path / "calm", kind)
    (tmp_path / "killed").mkdir()
    campaign = Campaign(tmp_path / "killed", kind, random.Random(f"{seed} {kind}"), seconds / 2)
    states = campaign.run(-(-KILLS // len(KINDS)))
    kills = campaign.kills
    print(
        f"\n{kind}, seed {seed}: {kills.total()} kills {dict(kills)} "
        f"of {len(states)} loops; a calm one takes {seconds:.1f} s"
    )
    for state in states:
        assert state["twice"] == []
        assert state == expected
    if kind == "watch":  # the others may go back to earlier generations' runs
        used = [run for runs in expected["trained on"] for run in runs]
        assert used and len(used) == len(set(used))
