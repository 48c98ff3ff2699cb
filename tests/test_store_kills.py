"""Kill -9 of writers on several hosts, of who seals and compacts, of builders and exporters.

What was acknowledged is there once, each dataset is one and holds a run as often as it may, and an
export that was killed again and again has every run once. Prints a table of what was seen.
"""

import json
import random
import subprocess
import sys
import threading
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import orjson
import pytest

from cray_agents.paths import Home
from cray_agents.queries import RunQuery
from cray_agents.runtime.datasets.reader import dataset_runs, list_datasets
from cray_agents.runtime.store import Store
from cray_agents.runtime.store.segments.repair import check
from tests.support.campaign import Campaign, kills
from tests.support.host_namespaces import Host, namespaces
from tests.support.store.plain_reader import events_of
from tests.support.waiting import wait_until

pytestmark = pytest.mark.slow

KILLS = kills(6)
WRITERS = 4
STEPS = 3  # of the loop whose datasets are built meanwhile


class Writer:
    """Writes on its host until killed, and then goes on under another name."""

    role = "writer"

    def __init__(self, host: Host, name: str) -> None:
        self.acknowledged: list[str] = []
        self._host, self._name, self._lives = host, name, 0
        self.start()

    def start(self) -> None:
        self._lives += 1
        self._written_before = len(self.acknowledged)
        name = f"{self._name}x{self._lives}"
        argv = ("-m", "tests.support.store.writer_process", "{root}", name)
        self.process = self._host.start(*argv, stdout=subprocess.PIPE)
        self._reading = threading.Thread(target=self._read)
        self._reading.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.wait()
        self._reading.join()

    @property
    def has_written(self) -> bool:
        """Whether a write of its present life was acknowledged."""
        assert self.process.poll() is None, f"{self._name} ended by itself"
        return len(self.acknowledged) > self._written_before

    def _read(self) -> None:
        assert self.process.stdout is not None
        for line in self.process.stdout:
            if line.endswith("\n"):
                self.acknowledged.append(line.strip())


class Command:
    """Runs one command after another on its host, the same one again if it was killed."""

    def __init__(self, host: Host, role: str, commands: list[list[str]]) -> None:
        self.role = role
        self.finished: list[str] = []
        self.failed: list[str] = []
        self._host, self._commands, self._next = host, commands, 0
        self.start()

    def start(self) -> None:
        argv = self._commands[self._next % len(self._commands)]
        pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
        self.process = self._host.start(*argv, **pipes)

    def look(self) -> None:
        """Go on with the next command when one has ended."""
        if self.process.poll() is not None:
            out, err = self.process.communicate()
            if self.process.returncode == 0:
                self.finished.append(out)
                self._next += 1
            else:
                self.failed.append(err[-2000:])
            self.start()

    def kill(self) -> None:
        self.process.kill()
        self.process.communicate()


class Root:
    """A root that writers, a sealer and a builder on three hosts work at."""

    def __init__(self, folder: Path) -> None:
        self.home = Home(folder / "root")
        self.home.root.mkdir(parents=True)
        self.hosts = [Host(folder / f"host{n}", self.home.root) for n in range(3)]
        self.writers = [Writer(self.hosts[n % 3], f"w{n}") for n in range(WRITERS)]
        self.builds = [
            ["-m", "cray_agents", "dataset", "build", "--home", "{root}", "--where", "loop=faults",
             "--set", f"step={step}", "--set", "max_uses=1", "--set", "min_reward=1", "--json"]
            for step in range(STEPS)
        ]  # fmt: skip
        self.out = folder / "out.jsonl"
        sealer = ["-m", "tests.support.store.maintainer_process", "{root}"]
        self.builder = Command(self.hosts[1], "builder", self.builds)
        self.keepers = [Command(self.hosts[0], "sealer", [sealer]), self.builder]
        self.live: list[Writer | Command] = [*self.writers, *self.keepers]

    def stop(self) -> None:
        for one in self.live:
            one.kill()
        self.live = []


@contextmanager
def root(folder: Path, chance: random.Random) -> Iterator[Root]:
    made = Root(folder)
    try:
        yield made
    finally:
        made.stop()


def hurt(root: Root, chance: random.Random, enough: int) -> Counter[str]:
    """Kill one after another; then let all of it end, and kill exports."""
    writers, builder = root.writers, root.builder
    hits = Counter[str]()
    for _ in range(enough):
        time.sleep(chance.uniform(0.1, 0.8))
        for keeper in root.keepers:
            keeper.look()
        victim = chance.choice(root.live)
        if isinstance(victim, Writer):  # another one, if this one has not written yet
            wait_until(lambda: any(writer.has_written for writer in writers))
            victim = chance.choice([writer for writer in writers if writer.has_written])
        victim.kill()
        hits[victim.role] += 1
        victim.start()
    while len(builder.finished) < STEPS:  # from runs that are written meanwhile
        builder.look()
        time.sleep(0.01)
    wait_until(lambda: sum(len(one.acknowledged) for one in writers) > 10 * KILLS, seconds=3600)
    root.stop()
    export = ["-m", "cray_agents", "export", "--home", "{root}", "--format", "jsonl"]
    argv = [*export, "-o", str(root.out)]
    hits["exporter"] = _export_with_kills(root.hosts[2], argv, chance, max(2, KILLS // 5))
    return hits


def check_root(root: Root) -> None:
    home, hosts, keepers = root.home, root.hosts, root.keepers
    built = _finish(hosts[1], root.builds)
    acknowledged = {event for writer in root.writers for event in writer.acknowledged}
    store = Store(home)
    store.seal_orphans(older_than=0)
    runs = {run.id: run for run in store.stream(RunQuery())}
    seen = Counter(
        event
        for run in runs.values()
        for event in [
            *(call.id for call in run.calls),
            *(f"{run.id}.run" for _ in [run] if run.agent),
            *(f"{run.id}.{reward.name}" for reward in run.rewards),
        ]
    )
    lost = {event for event in acknowledged if not store.has(event)}
    doubled = [event for event, count in seen.items() if count > 1]
    twice = sum(n - 1 for n in Counter(event["id"] for event in events_of(home)).values())
    uses = Counter(
        row["run"] for name in built for row in dataset_runs(home, name) if row["accepted"]
    )
    lines = [orjson.loads(line)["id"] for line in root.out.read_bytes().splitlines()]
    damage = [f for f in check(home.segments, older_than=0) if f.lost or f.kind == "lost"]
    _table(
        {
            "hosts (namespaces)" if namespaces() else "hosts (folders)": len(hosts),
            "events acknowledged": len(acknowledged),
            "lost": len(lost),
            "doubled": len(doubled),
            "lines there twice on the disk, counted once": twice,
            "runs exported": len(lines),
            "exported twice": len(lines) - len(set(lines)),
            "runs in datasets": len(uses),
            "used more often than the recipe says": sum(n > 1 for n in uses.values()),
            "damaged lines": len(damage),
        }
    )
    assert not lost and not doubled and not damage
    assert len(lines) == len(set(lines)) and runs.keys() >= set(lines)
    assert max(uses.values()) == 1 and len(built) == STEPS == len(set(built))
    assert len(list_datasets(home).rows) == STEPS
    assert all(runs[run].reward == 1 for run in uses)
    for keeper in keepers:
        assert not [text for text in keeper.failed if "Traceback" in text], keeper.failed
    assert len(acknowledged) > 10 * KILLS


def test_nothing_is_lost_or_doubled(tmp_path: Path) -> None:
    Campaign(root, hurt, check_root).run(tmp_path, KILLS)


def _export_with_kills(host: Host, argv: list[str], chance: random.Random, kills: int) -> int:
    """Export while killing; returns how many kills hit it at work."""
    hit = 0
    for _ in range(kills):
        process = host.start(*argv, stderr=subprocess.PIPE)
        try:
            process.wait(chance.uniform(0.3, 1.5))
        except subprocess.TimeoutExpired:
            process.kill()
            hit += 1
        process.communicate()
    assert _finish(host, [argv]) == [None]
    return hit


def _finish(host: Host, commands: list[list[str]]) -> list[str | None]:
    """Run each to its end; the id that it prints, if it prints JSON."""
    printed: list[str | None] = []
    for argv in commands:
        process = host.start(*argv, stdout=subprocess.PIPE, stderr=subprocess.PIPE)
        out, err = process.communicate()
        assert process.returncode == 0, err
        printed.append(json.loads(out)["id"] if "--json" in argv else None)
    return printed


def _table(rows: dict[str, int]) -> None:
    sys.stdout.write("\n| what | |\n|---|---|\n")
    for what, count in rows.items():
        sys.stdout.write(f"| {what} | {count:,} |\n")
