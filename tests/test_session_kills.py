"""Kill -9 of ranks, launcher, client and gateway of a training session: all ends are as calm ones.

Every command has one result, and results, versions and weights are those of a session that nothing
happened to, to the bit. Some kills of rank or launcher are aimed at a publish: at the time between
the first and the last of its files. `CRAY_TEST_RANKS` makes another campaign of it.
"""

import json
import os
import random
import signal
import time
from collections import Counter
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest

from cray_agents.paths import Home
from cray_agents.runtime.disk import checksums
from cray_agents.runtime.registry.checkpoints import read_manifest
from cray_agents.runtime.registry.registry import Registry
from cray_agents.trainers.job.job_state import read_status
from cray_agents.trainers.job.journal import CommandJournal
from cray_agents.trainers.job.session_journal import sessions
from cray_agents.trainers.models.seed_model import make_seed_model
from tests.support.campaign import Campaign, Children, free_port, kills
from tests.support.killable_session import ONE_STEP, STEPS

pytestmark = [pytest.mark.megatron, pytest.mark.usefixtures("forked_jobs")]

PER_SESSION = 12  # kills, so that a long campaign sees many beginnings and ends
LAST = STEPS * len(ONE_STEP)  # command of a step
TARGETS = ("rank", "launcher", "publish", "client", "gateway")


@dataclass
class Site:
    """A platform and a client of it, as processes."""

    root: Path
    port: int = field(default_factory=free_port)

    def __post_init__(self) -> None:
        make_seed_model(self.root / "model", seed=0, corpus=["What is 1 + 1?"])
        self.children = Children(self.root)

    @property
    def home(self) -> Home:
        return Home(self.root / "home")

    def start(self, name: str) -> None:
        words: tuple[object, ...] = {
            "gateway": ("gateway", self.home.root, self.port),
            "client": ("client", f"http://127.0.0.1:{self.port}", self.root / "versions"),
        }[name]
        self.children.start(name, "tests.support.killable_session", *words)

    def kill(self, target: str, chance: random.Random) -> str:
        """Kill one of the processes; return what was hit, "" if nothing was there."""
        if target in self.children.processes:
            self.children.kill(target)
            self.start(target)
            return target
        drafts: set[str] = set()
        if target == "publish":
            drafts, target = self.wait_for_draft(), chance.choice(("rank", "launcher"))
            time.sleep(chance.uniform(0, 0.004))
        pids = self.session_pids()
        if len(pids) < 2:
            return ""
        try:
            os.kill(pids[0] if target == "launcher" else pids[-1], signal.SIGKILL)
        except ProcessLookupError:
            return ""
        return f"{target} in a publish" if drafts & self.drafts() else target

    def drafts(self) -> set[str]:
        """Return the folders of checkpoints that are being written, or were left half-written."""
        return {path.name for path in self.home.checkpoint("x").parent.glob(".job-*")}

    def wait_for_draft(self) -> set[str]:
        """Wait until another checkpoint is being written, or the client has ended; return it."""
        before = self.drafts()
        while not (begun := self.drafts() - before) and not self.ended():
            time.sleep(0.0005)
        return begun

    def session_pids(self) -> list[int]:
        """Return the pids of the session's launcher and of its ranks, as far as they run."""
        for session in sessions(self.home):
            claim = session.folder / "attempts" / str(session.attempts)
            try:
                pid = checksums.read_json(claim)["pid"]
                ranks = Path(f"/proc/{pid}/task/{pid}/children").read_text().split()
            except OSError:
                continue
            return [pid, *map(int, ranks)]
        return []

    def wait_for(self, commands: int) -> None:
        """Wait until that many commands have results, or the client has ended."""
        while self.done() < commands and not self.ended():
            time.sleep(0.005)

    def done(self) -> int:
        jobs = list(self.home.jobs.glob("job-*"))
        return CommandJournal(jobs[0]).done if jobs else 0

    def ended(self) -> bool:
        assert not self.children.ended("gateway")
        return self.children.ended("client")

    def state(self) -> dict[str, Any]:
        """Return all that the session leaves behind, but for what depends on the clock."""
        [job] = [path.name for path in self.home.jobs.iterdir()]
        journal = CommandJournal(self.home.job(job))
        results = [journal.result(number) for number in range(1, STEPS * len(ONE_STEP) + 2)]
        versions = Registry(self.home).versions("m")
        manifests = [read_manifest(self.home.checkpoint(v.checkpoint)) for v in versions]
        return {
            "job": job,
            "state": read_status(self.home, job).state,
            "results": [r and r.model_dump(exclude={"seconds"}) for r in results],
            "client": json.loads((self.root / "versions").read_text()),
            "versions": [(version.id, version.checkpoint) for version in versions],
            "files": [manifest.files for manifest in manifests],
            "commands": [manifest.metrics.get("commands_sha256") for manifest in manifests],
            "drafts": self.drafts(),
        }


@contextmanager
def session(root: Path, chance: random.Random) -> Iterator[Site]:
    root.mkdir()
    site = Site(root)
    try:
        site.start("gateway")
        site.start("client")
        yield site
    finally:
        site.children.stop()


def hurt(site: Site, chance: random.Random, enough: int) -> Counter[str]:
    """Kill at moments of a session until it ends."""
    hits = Counter[str]()
    for moment in sorted(chance.randint(0, LAST) for _ in range(min(enough, PER_SESSION))):
        site.wait_for(moment)
        time.sleep(chance.uniform(0, 0.05))
        target = chance.choice(TARGETS)
        if not site.ended() and (hit := site.kill(target, chance)):
            hits[hit] += 1
    site.wait_for(LAST + 2)
    return hits


@pytest.mark.timeout(3600)
def test_killed_sessions_end_as_a_calm_one(tmp_path: Path) -> None:
    with session(tmp_path / "calm", random.Random(0)) as calm:
        calm.wait_for(LAST + 2)
        expected = calm.state()
    assert expected["state"] == "succeeded" and None not in expected["results"]
    assert len(expected["versions"]) == 1 + STEPS // 2 + 1 and not expected["drafts"]

    def check(site: Site) -> None:
        assert site.state() == expected

    Campaign(session, hurt, check).run(tmp_path, kills(2))
